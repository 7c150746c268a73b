"""The run directory of a sweep's job: how it ends is recorded, and nothing runs on hosts afterwards."""

import sys
from contextlib import closing
from pathlib import Path

import pytest

from ringtap.agents.hosts import LocalHosts
from ringtap.agents.sweep.job_launch_commands import job_run
from ringtap.core.errors import MeasurementError
from ringtap.core.run_directory import RunDirectory

pytestmark = pytest.mark.shares


@pytest.mark.parametrize(
    ("error", "status", "why"),
    [
        (None, "complete", ""),
        (MeasurementError("the sender ended early"), "partial", "the sender ended early"),
        (KeyboardInterrupt(), "partial", "interrupted"),
    ],
)
def test_the_end_of_a_run_is_recorded_and_ends_its_processes(
    error: BaseException | None, status: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "run"

    def measure(hosts: LocalHosts) -> None:
        with job_run(hosts, path, 7, series="x") as run:
            command = [sys.executable, "-c", "import time; time.sleep(600)"]
            started.append(hosts.start("a", "job", command, run.node("a") / "log" / "job.out"))
            if error is not None:
                raise error

    started = []  # type: ignore[var-annotated]
    with closing(LocalHosts(["a"])) as hosts:
        if error is None:
            measure(hosts)
        else:
            with pytest.raises(type(error)):
                measure(hosts)
        assert started[0].exit_code() is not None
    info = RunDirectory.open(path).info
    assert (info["status"], info["why"], info["series"], info["seed"]) == (status, why, "x", 7)
