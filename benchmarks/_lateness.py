"""Lateness of small flows beside bulk flows: with a core for the launcher alone, and on busy cores."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from _context import Bench
from _machine import cores
from _own_core import send_from_own_core
from _processes import BenchmarkError
from _ringtap import Receiver, free_port, read_sent, send, write_plan

_FLOWS_PER_S = 1000
_SIZE_BYTES = 10_000
_BULK_FLOWS = 2
_SLOT_NS = 1_000_000
_BURN = "while True: pass"


def measure(bench: Bench, repeat: int) -> None:
    """Take one sample on an idle core and one on loaded cores."""
    route, length_s = bench.routes[0], bench.settings.lateness_s
    port = free_port()
    plan = write_plan(bench.path("late.plan"), f"{route.address}:{port}", length_s, _flows(length_s, repeat))
    with bench.sample("lateness", core="idle", repeat=repeat) as figures:
        figures.update(_idle(bench, plan, port))
    with bench.sample("lateness", core="loaded", repeat=repeat) as figures:
        figures.update(_loaded(bench, plan, port))


def _flows(length_s: float, seed: int) -> Iterator[tuple[int, int]]:
    """Yield open-ended flows from the start on, and Poisson arrivals of small ones."""
    yield from [(0, 0)] * _BULK_FLOWS
    arrivals = random.Random(seed)
    at_s = arrivals.expovariate(_FLOWS_PER_S)
    while at_s < length_s:
        yield int(at_s * 1e9), _SIZE_BYTES
        at_s += arrivals.expovariate(_FLOWS_PER_S)


def _idle(bench: Bench, plan: Path, port: int) -> dict[str, float]:
    log = bench.path("late.rec")
    with Receiver(bench.processes, bench.routes[0], port, cpus=cores()[:-1] or cores()):
        send_from_own_core(bench.processes, bench.routes[0], plan, "--log", log, timeout_s=bench.settings.lateness_s)
    return _lateness(log)


def _loaded(bench: Bench, plan: Path, port: int) -> dict[str, float]:
    """Measure with nothing pinned, and with one busy program per core."""
    log = bench.path("late.rec")
    burners = [bench.processes.start([sys.executable, "-c", _BURN]) for _ in cores()]
    try:
        with Receiver(bench.processes, bench.routes[0], port):
            send(bench.processes, bench.routes[0], plan, "--log", log, timeout_s=bench.settings.lateness_s)
    finally:
        for burner in burners:
            burner.end()
    return _lateness(log)


def _lateness(log: Path) -> dict[str, float]:
    """Return the lateness figures of the small flows that were launched."""
    flows = read_sent(log, "lateness_ns", "size_bytes", "start_ns")
    late_ns = sorted(late for late, size, start in flows if size and start)
    if not late_ns:
        raise BenchmarkError("no small flow was launched")
    figures = {f"p{share}_us": _quantile(late_ns, share / 100) / 1e3 for share in (50, 90, 99)}
    missed = sum(late > _SLOT_NS for late in late_ns)
    return figures | {"max_us": late_ns[-1] / 1e3, "flows": len(late_ns), "missed_slots": missed}


def _quantile(ordered: Sequence[int], share: float) -> int:
    """Return the nearest-rank quantile: the smallest value that ``share`` of the values do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
