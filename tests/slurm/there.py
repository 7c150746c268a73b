"""What tests of this folder do on the login host, and what they wait for."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringtap.core.append_only_logs import open_records
from tests.slurm.cluster import SlurmCluster

RINGTAP = [sys.executable, "-m", "ringtap.cli"]
# in names of folders: what breaks scripts that quote badly
ODD = 'it\'s an "odd"\nplace $(x)'


def ringtap(
    cluster: SlurmCluster, *words: str | Path, user: str = "alice", cwd: Path | None = None, code: int = 0
) -> "subprocess.CompletedProcess[str]":
    """Run ringtap and see its exit code."""
    done = cluster.run([*RINGTAP, *words], user=user, cwd=cwd, timeout=100)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def status(cluster: SlurmCluster, run: Path, user: str = "alice") -> Any:
    """What ringtap status says of a run."""
    return json.loads(ringtap(cluster, "status", run, "--json", user=user).stdout)


def until(is_so: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait for something; what takes long to look at is looked at less often, as that takes time from others."""
    begin = asked = time.monotonic()
    while not is_so():
        now = time.monotonic()
        assert now < begin + seconds, f"{what} took more than {seconds:.0f} s"
        time.sleep(max(0.2, 2 * (now - asked)))
        asked = time.monotonic()


def steps(run: Path) -> dict[str, int]:
    """Steps recorded so far, by node."""
    found = {}
    for path in run.glob("nodes/*/steps/rank*.rec"):
        if path.suffixes == [".rec"] and path.stat().st_size:
            found[path.parent.parent.name] = open_records(path).count
    return found


def said(run: Path) -> str:
    """What the jobs of a run said."""
    return "\n".join(path.read_text() for path in (run / "submit").glob("*.out"))
