"""Calculates what the overlap of computation and communication is worth in a workload whose layers are not known."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from ringtap.core.errors import UsageError
from ringtap.workload.execution_trace import Node
from ringtap.workload.lowering import Algorithms
from ringtap.workload.simulate_iterations import simulate
from ringtap.workload.simulate_under_cross_traffic import ITERATIONS, LoadSimulator
from ringtap.workload.topologies import star
from ringtap.workload.workload import Workload, is_communication


class OverlapTimes(NamedTuple):
    """Times of an iteration, in s.

    Attributes:
        recorded_s: as the job does it: what is launched waits for what it waited for.
        serial_s: without overlap: each rank computes and communicates one after the other, in the order of its trace;
            None if ranks would wait for each other for ever.
        compute_s: if no communication took time.
        communication_s: if no computation took time.
    """

    recorded_s: float
    serial_s: float | None
    compute_s: float
    communication_s: float

    @property
    def bound_s(self) -> float:
        """Time that no overlap goes below."""
        return min(max(self.compute_s, self.communication_s), self.recorded_s)


def overlap_times(workload: Workload, rate_bps: float, latency_s: float, ranks_per_host: int) -> OverlapTimes:
    """Simulate a workload on a star, with and without overlap; collectives are rings.

    Raises:
        UsageError: the workload is too large.
    """
    network = star(-(-workload.ranks // ranks_per_host), rate_bps)

    def time_s(changed: Workload) -> float:
        found = simulate(
            changed, network, Algorithms(), iterations=ITERATIONS, latency_s=latency_s, ranks_per_host=ranks_per_host
        )
        return found.iteration_s

    recorded = LoadSimulator(workload, network, Algorithms(), latency_s, ranks_per_host, 0).under_share(0.0)
    alone = simulate(
        workload, star(1, rate_bps), Algorithms(), iterations=ITERATIONS, ranks_per_host=workload.ranks
    )  # one host, in which messages take the latency alone, of 0
    idle = [[node if is_communication(node) else replace(node, duration_us=0) for node in trace]
            for trace in workload.traces]  # fmt: skip
    serial_s = None
    with suppress(UsageError):  # which is of the order
        serial_s = time_s(replace(workload, traces=[_one_by_one(trace) for trace in workload.traces]))
    idle_s = time_s(replace(workload, traces=idle))
    return OverlapTimes(recorded.simulated.iteration_s, serial_s, alone.iteration_s, idle_s)


def _one_by_one(trace: list[Node]) -> list[Node]:
    """Return nodes of which each waits for the one before it."""
    before: list[int] = []
    found = []
    for node in trace:
        found.append(replace(node, control_deps=sorted({*node.control_deps, *before})))
        before = [node.id]
    return found
