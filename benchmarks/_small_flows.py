"""Measures small flows: how many one worker finishes per second, and how late they start beside bulk flows."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack

from _bench import Bench
from _machine import cores
from _processes import BenchmarkError
from _ringtap import HOST, Receiver, free_port, read_sent, send, write_plan

_RATE_BYTES = 1000
_PATIENCE_S = 20
_FLOWS_PER_S = 1000
_SIZE_BYTES = 10_000
_BULK_FLOWS = 2
_SLOT_NS = 1_000_000
_BURN = "while True: pass"


def measure_rate(bench: Bench, connections: str, offered: int, length_s: float, repeat: int) -> None:
    """Offer more flows than can finish, on kept connections or with one connection each; count those that finish."""
    port, log = free_port(), bench.path("rate.rec")
    flows = ((int(number * 1e9 / offered), _RATE_BYTES) for number in range(int(offered * length_s)))
    plan = write_plan(bench.path("rate.plan"), f"{HOST}:{port}", length_s, flows)
    with bench.sample("flow rate", connections=connections, repeat=repeat) as figures:
        arguments = ["--log", log, "--workers", 1, "--connections", connections, "--patience", f"{_PATIENCE_S}s"]
        with Receiver(bench.processes, port, "--workers", 1):
            sent = send(bench.processes, plan, *arguments, timeout_s=length_s + _PATIENCE_S)
        rows = read_sent(log, "intended_start_ns", "finish_ns", "state")
        ends = [finish for _, finish, state in rows if state == 0]
        if not ends:
            raise BenchmarkError("no flow finished")
        figures["flows_per_s"] = len(ends) / ((max(ends) - min(start for start, _, _ in rows)) / 1e9)
        figures |= {"offered_per_s": offered, "finished": len(ends), "planned": len(rows), "cpu_s": sent.cpu_s}


def measure_lateness(bench: Bench, length_s: float, repeat: int) -> None:
    """Take one sample on an idle core, and one with nothing pinned and a busy program per core."""
    import numpy as np  # not before: a process with its threads may not enter a user namespace

    port, log = free_port(), bench.path("late.rec")
    plan = write_plan(bench.path("late.plan"), f"{HOST}:{port}", length_s, _flows(length_s, repeat))
    for core in ("idle", "loaded"):
        log.unlink(missing_ok=True)
        with bench.sample("lateness", core=core, repeat=repeat) as figures, ExitStack() as busy:
            *others, last = cores()
            if core == "idle" and not others:
                raise BenchmarkError("this machine has one core, so none is left for the launcher alone")
            for _ in cores() if core == "loaded" else ():
                busy.callback(bench.processes.start([sys.executable, "-c", _BURN]).end)
            pinned = ["--launcher-cpu", last] if core == "idle" else []
            with Receiver(bench.processes, port, cpus=others if pinned else None):
                send(bench.processes, plan, "--log", log, *pinned, timeout_s=length_s)
            late_ns = [late for late, size, start in read_sent(log, "lateness_ns", "size_bytes", "start_ns")
                       if size and start]  # fmt: skip
            if not late_ns:
                raise BenchmarkError("no small flow was launched")
            for share in (50, 90, 99, 100):
                figures[f"p{share}_us"] = float(np.percentile(late_ns, share, method="inverted_cdf")) / 1e3
            figures |= {"flows": len(late_ns), "missed_slots": sum(late > _SLOT_NS for late in late_ns)}


def _flows(length_s: float, seed: int) -> Iterator[tuple[int, int]]:
    """Yield open-ended flows from the start on, and Poisson arrivals of small ones."""
    yield from [(0, 0)] * _BULK_FLOWS
    arrivals = random.Random(seed)
    at_s = arrivals.expovariate(_FLOWS_PER_S)
    while at_s < length_s:
        yield int(at_s * 1e9), _SIZE_BYTES
        at_s += arrivals.expovariate(_FLOWS_PER_S)
