"""The overhead benchmark runs from end to end and says what it found; what it finds is no matter of a test."""

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("unchanged_machine")
OVERHEAD = [sys.executable, str(Path(__file__).resolve().parents[2] / "benchmarks" / "overhead.py")]
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
# --quick promises a minute on two cores of its own; a test shares them with whatever else the machine does meanwhile
BUDGET_S = 60 + 60


def test_quick_measures_everything_in_its_time(tmp_path: Path) -> None:
    raw, markdown = tmp_path / "raw.json", tmp_path / "tables.md"
    begun_s = time.monotonic()
    done = subprocess.run(
        [*OVERHEAD, "--quick", "-o", str(raw), "--markdown", str(markdown)],
        capture_output=True,
        text=True,
        check=False,
        timeout=BUDGET_S + 120,
        cwd=tmp_path,
    )
    took_s = time.monotonic() - begun_s
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    figures = json.loads(done.stdout.splitlines()[-1])
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
    assert took_s < BUDGET_S, done.stderr
    results = json.loads(raw.read_text())
    assert not results["failures"]
    agents = results["samples"]["agent"]
    assert {sample["every"] for sample in agents} == {"100ms", "10ms", "1ms"}
    for sample in agents:  # an agent that does not look, or not often, would be cheap
        assert sample["connections"] == 100
        assert sample["samples_per_s"] > {"100ms": 8, "10ms": 60, "1ms": 300}[sample["every"]]
    assert "| 100 Hz |" in markdown.read_text()


def test_interrupted_it_ends_at_once() -> None:
    """The fixture sees to it that agents, connections and namespaces are gone."""
    process = subprocess.Popen([*OVERHEAD, "--only", "agent"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    while b"agent" not in process.stderr.readline():
        pass
    time.sleep(3)  # into a recording
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert output == b""
