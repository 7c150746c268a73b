"""Records the timelines kept in tests/gold/horovod-*.json: python tests/horovod/record_timelines.py FOLDER.

Real jobs of two ranks on one machine; what each shows is in its name.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

JOB = Path(__file__).with_name("job.py")
SETTINGS = {
    "cached": {"HOROVOD_FUSION_THRESHOLD": "0"},
    "uncached": {
        "HOROVOD_CACHE_CAPACITY": "0",
        "HOROVOD_FUSION_THRESHOLD": "0",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_CYCLE_TIME": "20",
    },
    "fused": {"HOROVOD_CYCLE_TIME": "20"},
}


def start(timeline: Path, *arguments: str, **settings: str) -> subprocess.Popen[bytes]:
    launcher = str(Path(sys.executable).with_name("horovodrun"))
    environment = dict(os.environ) | settings | {"HOROVOD_TIMELINE": str(timeline), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([launcher, "-np", "2", "--gloo", sys.executable, str(JOB), *arguments], env=environment)


def main() -> None:
    folder = Path(sys.argv[1])
    for name, settings in SETTINGS.items():
        if start(folder / f"horovod-{name}.json", "3", **settings).wait(60):
            sys.exit(f"the job for {name} failed")
    killed = folder / "horovod-killed.json"
    job = start(killed, "1000", "0.02")
    deadline = time.monotonic() + 60
    while not killed.exists() or killed.stat().st_size < 45_000:
        if time.monotonic() > deadline:
            sys.exit("the job to be killed wrote nothing")
        time.sleep(0.001)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            rank = b"HOROVOD_TIMELINE=" + str(killed).encode() in (process / "environ").read_bytes().split(b"\0")
            if rank and str(JOB).encode() in (process / "cmdline").read_bytes().split(b"\0")[:3]:
                os.kill(int(process.name), signal.SIGKILL)
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    job.wait(60)


if __name__ == "__main__":
    main()
