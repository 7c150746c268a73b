"""The benchmark of long runs goes from end to end at a small size, and what it makes and finds is right."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testbed.benchmark_runs import ROOT, benchmark

pytestmark = [pytest.mark.shares, pytest.mark.usefixtures("unchanged_machine")]
NODES, SECONDS = 3, 6


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch):
    """The benchmark's module, as ``python benchmarks/hours.py`` finds what it imports."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("hours")


def test_a_small_size_is_measured_whole(tmp_path: Path) -> None:
    raw, scratch = tmp_path / "raw.json", tmp_path / "scratch"
    scratch.mkdir()
    command = [*benchmark("hours"), "--nodes", str(NODES), "--seconds", str(SECONDS)]
    command += ["-o", str(raw)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=280, env=os.environ | {"TMPDIR": str(scratch)}
    )
    assert done.returncode == 0, done.stderr
    figures, results = json.loads(done.stdout.splitlines()[-1]), json.loads(raw.read_text())
    assert results["figures"] == figures
    assert not results["failures"]
    assert figures.pop("cost_ratio") is None  # of two sizes
    assert all(value is not None and value > 0 for value in figures.values())
    assert list(scratch.iterdir()) == []
    for one in results["samples"]["analyze"]:
        assert (one["found_nodes"], one["found_iterations"]) == (NODES, 10 * SECONDS)


def test_the_figures_follow_from_the_samples(hours) -> None:
    def sample(nodes: int, seconds: float, cpu_s: float, **more: float) -> dict[str, float]:
        return {"nodes": nodes, "seconds": seconds, "cpu_s": cpu_s, "peak_mb": 900.0} | more

    samples = {
        "start": [{"cpu_s": 0.5}],
        "analyze": [
            sample(10, 4.0, 5.5, cpu_s_per_node_hour=0.5),
            sample(100, 30.0, 55.5, cpu_s_per_node_hour=0.55, peak_mb=1100.0),
        ],
        "report": [sample(10, 3.0, 3.0), sample(100, 5.0, 5.0)],
    }
    figures = hours.last_line(samples)
    assert (figures["analyze_s"], figures["report_s"], figures["total_s"]) == (30.0, 5.0, 35.0)
    assert (figures["cpu_s_per_node_hour"], figures["cost_ratio"]) == (0.55, 1.1)
    assert figures["peak_mb"] == 1100.0
    assert all(target.is_met(figures[target.key]) for target in hours.TARGETS)
    # without a second number of nodes and without reports, these figures are missing
    alone = hours.last_line({"start": samples["start"], "analyze": samples["analyze"][:1]})
    assert {name for name, value in alone.items() if value is not None} == {
        *("nodes", "analyze_s", "peak_mb", "cpu_s_per_node_hour", "start_cpu_s")
    }


def test_processes_of_a_command_are_watched_until_it_ends(
    hours, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, seen = tmp_path / "there", tmp_path / "seen"
    program = "import pathlib, sys, time; x = b'x' * 30_000_000; there, seen = map(pathlib.Path, sys.argv[1:])\n"
    program += "there.touch(); time.sleep(2)\nwhile not seen.exists(): time.sleep(0.05)"
    twice = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}, *sys.argv[1:]])"
    with importlib.import_module("_processes").Processes({}) as processes:
        child = processes.start([sys.executable, "-c", twice, there, seen])
        is_over, looks = child.is_over, list[bool]()

        def look(seconds: float) -> bool:
            if any(looks):  # a look at its memory has followed
                seen.touch()
            over: bool = is_over(seconds)
            looks.append(there.exists())
            return over

        monkeypatch.setattr(child, "is_over", look)
        found = hours._watched(child)
    assert found["peak_mb"] > 30
    assert 2 < found["seconds"] < 30  # on a busy machine
