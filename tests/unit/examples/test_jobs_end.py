"""The end of the jobs that ship with ringtap."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.shares, pytest.mark.together]

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
# the names of the process's threads when the job has returned; the kernel may show one that has been joined a moment
# longer, with the flag PF_EXITING
RUN = """
import contextlib, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
__import__(sys.argv[2]).main(sys.argv[3:])
threads = []
for path in Path("/proc/self/task").iterdir():
    with contextlib.suppress(OSError):
        name, _, rest = (path / "stat").read_text().partition("(")[2].rpartition(")")
        threads += [name] if not int(rest.split()[6]) & 4 else []
print("threads:", *sorted(threads))
"""


@pytest.mark.parametrize(
    "job",
    [
        "scale_model --parameters 1000 --layers 2 --compute-s 0.001 --iterations 2",
        "wide_resnet --images 64 --depth 10 --width 1 --batch 32 --epochs 1",
        "real_model --model resnet50 --batch 2 --image 64 --iterations 1",
    ],
)
def test_no_thread_of_the_process_group_is_left_to_the_interpreters_end(job: str) -> None:
    """Such a thread may ask for an interpreter that no longer exists, which aborts the process."""
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    env |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # where prepare.sh puts torchvision for the tests
    env["PYTHONPATH"] = str(Path(sys.prefix, "torchvision"))
    command = [sys.executable, "-c", RUN, str(EXAMPLES), *job.split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "gloo" not in done.stdout.split("threads:")[1]
