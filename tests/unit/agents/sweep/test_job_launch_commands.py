"""The run directory of a sweep's job: how it ends is recorded, and nothing runs on hosts afterwards."""

import sys
from contextlib import closing
from pathlib import Path

import pytest

import ringtap
from ringtap.agents.hosts import LocalHosts
from ringtap.agents.sweep.job_launch_commands import job_run, on_this_machine
from ringtap.core.errors import MeasurementError
from ringtap.core.run_directory import RunDirectory
from ringtap.core.sweep_plans.sweep_plan import load_plan

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


def test_a_plans_command_finds_the_examples_that_ship_with_ringtap_but_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["{python}", "examples/scale_model.py"]
    plan: dict[str, object] = {"sweep": {"name": "own", "loads": [0]}, "testbed": {"configuration": "B"}}
    own = {"name": "own", "command": command, "parameters": 1}
    here, elsewhere = (load_plan({**plan, "models": [own | more]}).every_model[0] for more in ({}, {"directory": "/"}))
    said: list[str] = []
    assert Path(on_this_machine(here, said.append)[1]).samefile(Path(ringtap.__file__).parent / command[1])
    assert on_this_machine(elsewhere, said.append) == command
    assert len(said) == 1
