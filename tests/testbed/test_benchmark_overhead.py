"""The overhead benchmark runs from end to end and says what it found; what it finds is no matter of a test."""

import importlib
import math
import random
from pathlib import Path

import pytest

from tests.testbed.benchmark_runs import interrupt, quick

pytestmark = [pytest.mark.alone(2), pytest.mark.usefixtures("unchanged_machine")]
KEYS = {
    "iteration_overhead_pct",
    "iteration_overhead_ci_pct",
    "agent_cpu_pct_default",
    "agent_cpu_pct_100hz",
    "agent_cpu_pct_1khz",
    "agent_rss_mb",
    "disk_mb_per_hour",
}


def test_quick_measures_everything_in_its_time(tmp_path: Path) -> None:
    """A quarter of its usual time: what it finds is not judged here, only that it says how sure it is."""
    figures, results, tables = quick("overhead", tmp_path, "--limit-s", "30")
    assert set(figures) == KEYS
    low, high = figures["iteration_overhead_ci_pct"]
    assert low <= figures["iteration_overhead_pct"] <= high
    for key in KEYS - {"iteration_overhead_ci_pct"}:
        assert math.isfinite(figures[key]), (key, figures)
    for key in (
        "agent_cpu_pct_default",
        "agent_cpu_pct_100hz",
        "agent_cpu_pct_1khz",
        "agent_rss_mb",
        "disk_mb_per_hour",
    ):
        assert figures[key] > 0, (key, figures)
    agents = results["samples"]["agent"]
    assert {sample["every"] for sample in agents} == {"100ms", "10ms", "1ms"}
    for sample in agents:  # an agent that does not look, or not often, would be cheap
        assert sample["connections"] == 100
        assert sample["samples_per_s"] > {"100ms": 8, "10ms": 60, "1ms": 300}[sample["every"]]
    assert "| 10ms |" in tables
    jobs = results["samples"]["job"]
    assert [job["kind"] for job in jobs] == ["computes", "communicates"]
    for job in jobs:
        assert len(job["pairs"]) >= 12
        assert all(block["cpu_s"] > 0 for pair in job["pairs"] for block in pair.values())
        assert (job["agent_cpu_share"] is None) == (job["kind"] == "communicates")
        assert job["agent_cpu_share"] is None or 0 < job["agent_cpu_share"] < 1


def test_intervals_of_paired_blocks_hold_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 % of overhead under noise with outliers: 95 of 100 intervals hold it (standard error of 2,000: 0.5 %)."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    interval = importlib.import_module("_overhead_pairs").interval
    draw = random.Random(5)

    def block(factor: float) -> dict[str, float]:
        disturbed = draw.random() < 0.05
        return {"mean_s": 0.02 * factor * draw.gauss(1, 0.01) * (draw.uniform(1, 1.5) if disturbed else 1)}

    held = 0
    for _ in range(2000):
        low, high = interval([{"with": block(1.01), "without": block(1)} for _ in range(30)], "mean_s")[1:]
        held += low <= 1 <= high
    assert held / 2000 == pytest.approx(0.95, abs=0.02)


def test_interrupted_it_ends_at_once() -> None:
    """The fixture sees to it that agents, connections and namespaces are gone."""
    interrupt("overhead", "--only", "agent", at="agent", after_s=3)  # into a recording
