"""The overhead benchmark runs from end to end and says what it found; what it finds is no matter of a test."""

import math
from pathlib import Path

import pytest

from tests.testbed.benchmark_runs import interrupt, quick

pytestmark = pytest.mark.usefixtures("unchanged_machine")
KEYS = {
    "iteration_overhead_pct",
    "iteration_overhead_ci_pct",
    "agent_cpu_pct_default",
    "agent_cpu_pct_100hz",
    "agent_cpu_pct_1khz",
    "agent_rss_mb",
    "disk_mb_per_hour",
    "hook_import_ms",
}


def test_quick_measures_everything_in_its_time(tmp_path: Path) -> None:
    figures, results, tables = quick("overhead", tmp_path)
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
    assert "| 100 Hz |" in tables


def test_interrupted_it_ends_at_once() -> None:
    """The fixture sees to it that agents, connections and namespaces are gone."""
    interrupt("overhead", "--only", "agent", at="agent", after_s=3)  # into a recording
