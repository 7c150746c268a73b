"""The benchmark of large runs goes from end to end at a small size, and what it makes and finds is right."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testbed.benchmark_runs import benchmark

pytestmark = [pytest.mark.shares, pytest.mark.usefixtures("unchanged_machine")]
# so long that bytes per iteration can be told from samples of 100 ms
NODES, ITERATIONS = 12, 30


def test_a_small_size_is_measured_whole(tmp_path: Path) -> None:
    raw, scratch = tmp_path / "raw.json", tmp_path / "scratch"
    scratch.mkdir()
    command = [*benchmark("scale"), "--quick", "--nodes", str(NODES), "--iterations", str(ITERATIONS)]
    command += ["--gigabytes", "0.02", "-o", str(raw)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=200, env=os.environ | {"TMPDIR": str(scratch)}
    )
    assert done.returncode == 0, done.stderr
    figures, results = json.loads(done.stdout.splitlines()[-1]), json.loads(raw.read_text())
    assert results["figures"] == figures
    assert not results["failures"]
    assert all(value is not None and value > 0 for value in figures.values())
    assert list(scratch.iterdir()) == []

    jobs = [one for one in results["samples"]["nodes"] if one["of"] == "job"]
    assert [(one["found_nodes"], one["found_ranks"], one["found_iterations"]) for one in jobs] == [
        (NODES, NODES, ITERATIONS)
    ] * 2
    for one in jobs:
        # copies come in pairs that reduce between themselves: by equation 3.1 a rank of two sends its gradients once
        assert one["sent_bytes"] == pytest.approx(one["gradient_bytes"], rel=0.1)
    (whole,) = (one["sets"][-1] for one in results["samples"]["read"] if one["workers"] == 2)
    (again,) = (one["sets"][-1] for one in results["samples"]["read"] if one["workers"] == 1)
    assert (whole["packets"], whole["bytes"]) == (again["packets"], again["bytes"])


def test_the_figures_of_an_hour_follow_from_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    hours = importlib.import_module("hours")

    def sample(nodes: int, seconds: float, cpu_s: float, **more: float) -> dict[str, float]:
        return {"nodes": nodes, "hours": 1.0, "seconds": seconds, "cpu_s": cpu_s, "client_cpu_s": 1.0} | more

    memory = {"peak_mb": 900.0, "client_peak_mb": 300.0}
    samples = {
        "start": [{"cpu_s": 0.5}],
        "analyze": [sample(10, 4.0, 5.5, **memory), sample(100, 30.0, 55.5, **memory | {"peak_mb": 1100.0})],
        "report": [sample(10, 3.0, 3.0, **memory), sample(100, 5.0, 5.0, **memory)],
        "workers": [sample(100, 50 / n, 55.0, workers=n, **memory) for n in (1, 2)],
        "resume": [sample(100, 16.0, 30.0, **memory)],
    }
    figures = hours.last_line(samples)
    assert (figures["analyze_s"], figures["report_s"], figures["total_s"]) == (30.0, 5.0, 35.0)
    assert (figures["cpu_s_per_node_hour"], figures["cost_ratio"]) == (0.55, 1.1)  # (55.5 - 0.5) / 100, and of 0.5
    assert (figures["peak_mb"], figures["workers_speedup"]) == (1100.0, 2.0)
    assert figures["resumed_share"] == pytest.approx(30.0 / 55.5, rel=1e-3)
    targets, runs = hours.tables(samples)
    assert {row[-1] for row in targets.rows} == {"yes"}
    assert [row[0] for row in runs.rows][4:6] == [f"`ringtap analyze --scheduler local:{n}`" for n in (1, 2)]
    # without a second number of nodes and without workers, these figures are missing
    alone = hours.last_line({"start": samples["start"], "analyze": samples["analyze"][:1]})
    assert {name for name, value in alone.items() if value is not None} == {
        *("nodes", "analyze_s", "peak_mb", "cpu_s_per_node_hour", "start_cpu_s")
    }


def test_processes_of_a_command_are_watched_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    hours = importlib.import_module("hours")

    program = "import subprocess, sys, time; x = b'x' * 30_000_000; time.sleep(2)"
    twice = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"
    with hours.Processes({}) as processes:
        found = hours._watched(processes.start([sys.executable, "-c", twice]))
    assert found["peak_mb"] > 30 > found["client_peak_mb"]
    assert 2 < found["seconds"] < 30  # on a busy machine
