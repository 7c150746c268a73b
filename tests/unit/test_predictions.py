"""Simulations, orders of tensors and schedules from Python: what the commands print with --json."""

import json
from pathlib import Path
from typing import Any

import pytest

import ringtap
from ringtap.cli import main

pytestmark = pytest.mark.computes

JOBS = ["100ms:0ms-60ms@20gbit", "100ms:0ms-30ms@20gbit"]


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    assert main(["workload", "new", "--model", "resnet50", "--workers", "2", "-o", str(tmp_path / "-w")]) == 0
    return tmp_path / "-w"


def test_a_call_gives_what_its_command_prints(
    workload: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workload.parent)  # in which its name looks like an option's
    calls: list[tuple[Any, str]] = [
        (
            ringtap.simulate("-w", capacity=10e9, loads="0:0.5:0.5"),
            "workload simulate --capacity 10gbit --loads 0:0.5:0.5",
        ),
        (ringtap.whatif("-w", capacity="10gbit", latency=1e-5), "whatif --capacity 10gbit --latency 10us"),
        (ringtap.schedule(job=JOBS, capacity="25gbit"), f"schedule --capacity 25gbit --job {' --job '.join(JOBS)}"),
    ]
    capsys.readouterr()
    for found, line in calls:
        words = [*line.split(), "--json", *(["--", "-w"] if "--job" not in line else [])]
        assert main(words) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found))
    assert [point["load"] for point in calls[0][0]["points"]] == [0, 0.5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "capacity is missing: give the rate of each host's links, such as 25gbit; ethtool NIC shows it"),
        ({"capacty": "1gbit"}, "there is no option capacty: did you mean 'capacity'?"),
        ({"capacity": "25"}, "capacity '25' has no unit: "),
        ({"capacity": "1gbit", "gpus_per_node": 0}, "gpus_per_node 0 is outside 1 to 1,024"),
    ],
)
def test_a_wrong_option_is_named_as_an_argument(options: dict[str, Any], message: str, workload: Path) -> None:
    with pytest.raises(ringtap.UsageError) as raised:
        ringtap.simulate(workload, **options)
    assert str(raised.value).startswith(message)


def test_a_run_is_written_and_no_option_is_given_for_none(workload: Path, tmp_path: Path) -> None:
    ringtap.simulate(workload, capacity="10gbit", loads="0:0.8:0.2", output=tmp_path / "run", bottleneck=None)
    assert len(ringtap.open_sweep(tmp_path / "run").points) == 5
