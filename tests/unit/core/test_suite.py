"""The suite itself: two processes that share its tests must agree on their names."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def collect(seed: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    environment = dict(os.environ) | {"PYTHONHASHSEED": seed}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def test_names_of_tests_depend_on_neither_hashes_nor_the_time() -> None:
    first = collect("1")
    # some formats hold whole seconds
    time.sleep(1.1)
    second = collect("2")
    names = [process.communicate(timeout=250)[0].splitlines()[:-1] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert len(names[0]) > 1000
    assert names[0] == names[1]
