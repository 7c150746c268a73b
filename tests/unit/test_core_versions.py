"""Runs and plans of other versions: those of 0.1 are read (tests/gold/v0.1/record.sh made them)."""

import csv
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from ringtap.analysis.traffic.plan import read_plan
from ringtap.cli import main
from ringtap.trafficgen.plans.plan_file import PlanFile

GOLD = Path(__file__).resolve().parents[1] / "gold" / "v0.1"
PLANS = {
    "web-search": "--kind consistent --load 200mbit --duration 2s --to 10.0.0.1:5001 --to 10.0.0.2:5001 --seed 7",
    "incast": "--kind incast --load 50mbit --load-counts wire --duration 100ms --period 10ms --from 10.0.0.2 "
    "--from 10.0.0.3 --to 10.0.0.1:5001 --seed 7 --dscp 8 --congestion-control cubic",
    "ring": "--kind ring --duration 1s --node 10.0.0.1:5001 --node 10.0.0.2:5001 --node 10.0.0.3:5001 --bytes 1MB "
    "--iterations 4 --compute 20ms",
}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Folder with ``job`` and ``sweep`` as 0.1.0 recorded them, and ``expected`` with what it found there."""
    with tarfile.open(GOLD / "runs.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def summary(path: Path) -> dict[str, Any]:
    """A summary without the version and folder of the analysis; numbers to nine digits, as sums differ in the last."""
    found: dict[str, Any] = json.loads(path.read_text(), parse_float=lambda digits: f"{float(digits):.9g}")
    return found | {"ringtap": "", "run": found["run"] | {"directory": ""}}


def test_a_job_of_0_1_is_analyzed_with_the_numbers_of_0_1(recorded: Path) -> None:
    assert main(["analyze", str(recorded / "job")]) == 0
    assert summary(recorded / "job" / "derived" / "summary.json") == summary(recorded / "expected" / "summary.json")


def test_a_live_view_shows_a_job_of_0_1(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["live", str(recorded / "job"), "--plain"]) == 0
    assert "status=complete iteration=23 iteration_s=0.0940" in capsys.readouterr().out


def test_a_sweep_of_0_1_is_reported_with_the_numbers_of_0_1(recorded: Path) -> None:
    assert main(["report", str(recorded / "sweep")]) == 0
    paths = (recorded / "sweep" / "report" / "points.csv", recorded / "expected" / "points.csv")
    found, expected = (list(csv.DictReader(path.read_text().splitlines())) for path in paths)
    assert len(found) == len(expected) == 2
    for name in ("cross_bps", "total_bps", "iterations", "mean_s", "median_s", "p99_s", "std_s"):
        assert [float(row[name]) for row in found] == pytest.approx([float(row[name]) for row in expected]), name
    assert (recorded / "sweep" / "report" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_of_0_1_has_the_flows_that_its_options_give_now(name: str, tmp_path: Path) -> None:
    made = tmp_path / "made.plan"
    assert main(["traffic", "plan", *PLANS[name].split(), "-o", str(made)]) == 0
    old, new = PlanFile(GOLD / f"{name}.plan"), PlanFile(made)
    assert old.check() == new.check()
    assert list(old.flows()) == list(new.flows())
    assert read_plan(old.path).start_ns.tolist() == [flow.start_ns for flow in new.flows()]
