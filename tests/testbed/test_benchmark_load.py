"""The traffic benchmark judges the sender only where the machine lets it: else it says why it cannot."""

import argparse
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.testbed.benchmark_runs import ROOT

pytestmark = [pytest.mark.alone(2), pytest.mark.usefixtures("unchanged_machine")]
_MODULES = ("_context", "_figures", "_load", "_machine", "_namespaces", "_processes", "_report", "_ringtap")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The benchmark's modules, as ``python benchmarks/traffic.py`` finds them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return SimpleNamespace(**{name[1:]: importlib.import_module(name) for name in _MODULES})


@pytest.fixture
def bench(parts: SimpleNamespace, tmp_path: Path) -> Iterator[Any]:
    """A quick run over loopback, with plans of half a second."""
    settings = parts.context.Settings(True, 1, (4,), bulk_s=0.5, load_s=0.5)
    with parts.processes.Processes({"XDG_CACHE_HOME": str(tmp_path)} | parts.ringtap.TOKEN) as processes:
        routes, _ = parts.namespaces.make_routes(processes)
        yield parts.context.Bench(settings, processes, routes, [], tmp_path)


def test_a_load_that_is_missed_beside_busy_programs_is_not_judged(
    bench: Any, parts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parts.load, "SHARES", (0.8,))
    ceiling_bps = 3 * _ceiling(bench, parts)
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * len(parts.machine.cores()))
    ]
    try:
        parts.load.measure(bench, ceiling_bps, 0)
    finally:
        for other in others:
            other.kill()
            other.wait()
    samples = bench.samples["load"]
    assert {sample["kind"] for sample in samples} == {"consistent", "burst"}
    assert all(sample["others_pct"] > 2 for sample in samples)
    missed = [sample for sample in samples if sample["error_pct"] > 1]
    assert missed
    for sample in missed:
        assert "other programs took" in sample["doubt"]
        if not sample["unfinished"] and not sample["failed"]:  # what misses is what waited at the plan's end
            tail_pct = 100 * sample["tail_s"] / (bench.settings.load_s + sample["tail_s"])
            assert sample["error_pct"] == pytest.approx(tail_pct, rel=0.05), sample
    last, output = _written(bench, parts, capsys)
    assert last["load_error_pct_max"] is None
    assert "cannot judge" in output
    assert f"This run cannot judge {missed[0]['kind']} traffic at 80% of the ceiling, which missed its" in output


def test_a_load_beyond_the_ceiling_of_that_moment_is_not_judged(
    bench: Any, parts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parts.load, "SHARES", (0.8,))
    parts.load.measure(bench, 3 * _ceiling(bench, parts), 0)
    for sample in bench.samples["load"]:
        assert sample["error_pct"] > 1
        # A test shares the machine: where others took some of it, that is what the sample says
        assert sample["doubt"].startswith("the ceiling right after it was " if "ceiling_bps" in sample else "other pro")
    assert _written(bench, parts, capsys)[0]["load_error_pct_max"] is None


def test_a_load_that_a_quiet_machine_misses_counts(parts: SimpleNamespace) -> None:
    samples = {"load": [_sample("burst", 5.6, None), _sample("consistent", 0.2, None)]}
    assert parts.figures.last_line(samples, 4)["load_error_pct_max"] == 5.6
    assert parts.figures.unjudged_loads(samples) == []


def test_a_doubtful_sample_is_left_out_beside_a_sure_one(parts: SimpleNamespace) -> None:
    samples = {"load": [_sample("burst", 5.6, "others"), _sample("burst", 0.4, None), _sample("burst", 0.2, None)]}
    assert parts.figures.last_line(samples, 4)["load_error_pct_max"] == pytest.approx(0.3)
    assert parts.figures.unjudged_loads(samples) == []


def test_a_load_that_surely_missed_counts_beside_one_that_cannot_be_judged(parts: SimpleNamespace) -> None:
    samples = {"load": [_sample("burst", 9.0, "others"), _sample("consistent", 3.0, None)]}
    assert parts.figures.last_line(samples, 4)["load_error_pct_max"] == 3.0
    (sentence,) = parts.figures.unjudged_loads(samples)
    assert "burst traffic at 80% of the ceiling, which missed its planned load by 9.0 %: others." in sentence


def _ceiling(bench: Any, parts: SimpleNamespace) -> float:
    """The best of three: half a second may be one in which the machine's host gave the cores to others."""
    return max(parts.load.ceiling_now(bench) for _ in range(3))


def _sample(kind: str, error_pct: float, doubt: str | None) -> dict[str, Any]:
    return {"tool": "ringtap", "kind": kind, "share": 0.8, "error_pct": error_pct, "doubt": doubt}


def _written(
    bench: Any, parts: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> tuple[dict[str, float | None], str]:
    figures = parts.figures.last_line(bench.samples, 4)
    machine = parts.machine.describe() | {"stolen_pct": 0.0, "others_pct": 0.0}
    made = parts.report.tables(bench)
    capsys.readouterr()
    parts.report.write(bench, machine, argparse.Namespace(output=None, markdown=None), figures, made)
    return figures, capsys.readouterr().out
