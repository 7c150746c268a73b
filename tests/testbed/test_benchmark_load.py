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
_MODULES = ("_bench", "_load", "_machine", "_processes", "traffic")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The benchmark's modules, as ``python benchmarks/traffic.py`` finds them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return SimpleNamespace(**{name.strip("_"): importlib.import_module(name) for name in _MODULES})


@pytest.fixture
def bench(parts: SimpleNamespace, tmp_path: Path) -> Iterator[Any]:
    """A quick run over loopback."""
    with parts.processes.Processes({"XDG_CACHE_HOME": str(tmp_path)}) as processes:
        yield parts.bench.Bench(argparse.Namespace(quick=True), processes, tmp_path)


def test_a_load_that_is_missed_beside_busy_programs_is_not_judged(
    bench: Any, parts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts.load, "SHARES", (3.0,))
    ceiling_bps = parts.load.calibrate(bench)
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * len(parts.machine.cores()))
    ]
    try:
        parts.load.measure(bench, ceiling_bps, 0.5, 0)
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
        assert sample["is_doubtful"]
        if not sample["unfinished"] and not sample["failed"]:  # what misses is what waited at the plan's end
            tail_pct = 100 * sample["tail_s"] / (0.5 + sample["tail_s"])
            assert sample["error_pct"] == pytest.approx(tail_pct, rel=0.05), sample
    assert parts.traffic.last_line(bench.samples)["load_error_pct_max"] is None
    targets = parts.traffic.tables(bench)[0]
    assert "cannot judge" in [row[-1] for row in targets.rows]
    assert any(note.startswith(f"This run cannot judge {missed[0]['kind']} traffic at 300%") for note in bench.notes)


def test_a_load_that_a_quiet_machine_misses_counts(parts: SimpleNamespace) -> None:
    samples = {"load": [_sample("burst", 5.6), _sample("consistent", 0.2)]}
    assert parts.load.worst_error_pct(samples) == 5.6
    assert parts.load.unjudged(samples) == []


def test_a_doubtful_sample_is_left_out_beside_a_sure_one(parts: SimpleNamespace) -> None:
    samples = {"load": [_sample("burst", 5.6, True), _sample("burst", 0.4), _sample("burst", 0.2)]}
    assert parts.load.worst_error_pct(samples) == pytest.approx(0.3)
    assert parts.load.unjudged(samples) == []


def test_a_load_that_surely_missed_counts_beside_one_that_cannot_be_judged(parts: SimpleNamespace) -> None:
    samples = {"load": [_sample("burst", 9.0, True), _sample("consistent", 3.0)]}
    assert parts.load.worst_error_pct(samples) == 3.0
    (sentence,) = parts.load.unjudged(samples)
    assert sentence.startswith("This run cannot judge burst traffic at 80% of the ceiling")


def _sample(kind: str, error_pct: float, is_doubtful: bool = False) -> dict[str, Any]:
    return {"kind": kind, "share": "80%", "error_pct": error_pct, "is_doubtful": is_doubtful}
