"""A small disk that fills up under a run: the job goes on, the log reads back, the run says what is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringtap.core.append_only_logs import open_records
from tests.unit.agent_processes import RINGTAP, ROOT, gone, node_item, run_item

pytestmark = [pytest.mark.shares, pytest.mark.usefixtures("unchanged_machine")]

JOB = """
import ringtap, time
from pathlib import Path
from ringtap.core.append_only_logs import open_records
nic, log, after = Path("run/nodes/here/nic/nic.rec"), Path("run/nodes/here/log/agent.log"), 0
while not nic.exists():  # the job does not wait for the agent, which comes late on a busy machine
    time.sleep(0.01)
for number in range(3000):
    if number == 200 and {greedy}:
        while not nic.stat().st_size or open_records(nic).count <= 100:
            time.sleep(0.01)
        with open("ballast", "wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass
    ringtap.step()
    time.sleep(0.01)
    after += "nic collector stopped" in log.read_text()
    if after == 20:
        break
print("result 42")
"""
# in a network of its own, as interfaces of other tests make the records longer
OWN_MOUNTS = ["unshare", "--mount", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]


def on_small_disk(tmp_path: Path, size: str, job: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """A run in a tmpfs of a mount name space of its own; what it left is copied out of it."""
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    script = (
        f"mount -t tmpfs -o size={size} none {disk}; cd {disk}; "
        f'"$@"; code=$?; df --output=avail {disk} | tail -n 1; cp -r {disk}/run {kept}; exit $code'
    )
    command = [*RINGTAP, "run", "-o", str(disk / "run"), "--node", "here", *options, "--", sys.executable, "-c", job]
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*OWN_MOUNTS, "sh", "-c", script, "sh", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment,
    )


@pytest.mark.parametrize("greedy", [False, True], ids=["by the recording", "by the job"])
def test_a_disk_that_fills_up(tmp_path: Path, greedy: bool) -> None:
    size = "400k" if greedy else "220k"
    options = ("--collect", "nic,host,steps", "--every", "1ms")
    done = on_small_disk(tmp_path, size, JOB.format(greedy=greedy), *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("result 42\n")
    assert "Traceback" not in done.stderr
    kept = tmp_path / "kept"
    gone(tmp_path / "disk" / "run")
    item, info = node_item(kept), run_item(kept)
    assert item["status"] == "partial"
    assert "No space left on device" in item["why"]
    assert item["collectors"]["nic"]["state"] == "failed"
    assert info["status"] == "partial"
    assert "No space left on device" in info["why"]
    assert (kept / "nodes" / "here" / "DONE").exists()
    records = open_records(kept / "nodes" / "here" / "nic" / "nic.rec")
    assert records.count > 100
    assert len(records.tail()) == records.count
    assert item["after"]["kernel"] == os.uname().release


def test_a_disk_that_is_full_from_the_start(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f'mount -t tmpfs -o size=64k none {disk}; cd {disk}; cat /dev/zero >full 2>/dev/null; "$@"'
    command = [*RINGTAP, "run", "-o", str(disk / "run"), "--", "sh", "-c", "echo ran; exit 3"]
    done = subprocess.run(
        [*OWN_MOUNTS, "sh", "-c", script, "sh", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=dict(os.environ) | {"PYTHONPATH": str(ROOT)},
    )
    assert (done.stdout, done.returncode) == ("ran\n", 3), done.stderr
    assert "runs without being recorded" in done.stderr
    assert "Traceback" not in done.stderr
