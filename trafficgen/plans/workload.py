"""Plans that replay a workload: each message after those that it waits for, and computation as time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_format import VERSION, Flow, Operation
from ringtap.core.units import counted
from ringtap.trafficgen.plans.common import NS, PlanOutline
from ringtap.trafficgen.plans.kind import DURATION, FROM, ITERATIONS, NODE, TrafficKind
from ringtap.trafficgen.protocol import parse_address

ReadOperations = Callable[[Path], Sequence[Operation]]
"""Reader of a workload without collectives: the operations of an iteration, each after those that it waits for."""

_LIMIT_NS = 86_400 * NS
# A job's connection carries a message while the receipt of the one before is still being told
_CONNECTIONS = 2


class WorkloadPlan:
    """Iterations of a training job: what each rank computes, as time, and the messages that it sends.

    Args:
        frame: duration, after which nothing is sent; 0: a day. The destinations are the ranks, in order.
        operations: operations of an iteration.
        iterations: number of iterations.
        workload: name of the workload.

    Attributes:
        header: the plan's first line.

    Raises:
        UsageError: the ranks are not as many as the destinations, or a plan cannot contain so much.
    """

    def __init__(self, frame: PlanOutline, operations: Sequence[Operation], iterations: int, workload: str) -> None:
        ranks = 1 + max((max(one.rank, one.peer) for one in operations), default=-1)
        if ranks != len(frame.destinations):
            raise UsageError(
                f"{workload} has {counted(ranks, 'rank')}, servers and switches among them, but "
                f"{counted(len(frame.destinations), 'node')}: give --node ADDRESS:PORT for each rank, in order"
            )
        if iterations < 1:
            raise UsageError(f"--iterations {iterations} is below 1")
        frame = replace(frame, duration_ns=frame.duration_ns or _LIMIT_NS)
        frame.check()
        self._operations, self._iterations = operations, iterations
        self._nodes = list(frame.destinations)
        self._hosts = [parse_address(node)[0] for node in self._nodes]
        sizes = [one.size_bytes for one in operations if one.peer >= 0]
        about = {
            "version": VERSION,
            "workload": workload,
            "iterations": iterations,
            "nodes": self._nodes,
            "max_connections": _CONNECTIONS,
        }
        self.header = frame.header("workload", len(sizes) * iterations, sum(sizes) * iterations, **about)

    def flows(self) -> Iterator[Flow]:
        """Yield the flows and computations, iteration by iteration; only what they wait for gives them a time."""
        count = len(self._operations)
        for first in range(0, count * self._iterations, count):
            for number, (rank, peer, size_bytes, after) in enumerate(self._operations):
                earlier = tuple(
                    (first + other - (count if other >= number else 0), delay_ns)
                    for other, delay_ns in after
                    if first or other < number
                )
                yield Flow(0, self._hosts[rank], self._nodes[peer] if peer >= 0 else "", size_bytes, earlier)


def _workload(given: dict[str, Any], frame: PlanOutline) -> WorkloadPlan:
    if len(given["from"]) > 1:
        raise UsageError("--from names the workload's directory once")
    path = Path(given["from"][0])
    return WorkloadPlan(frame, given["read_operations"](path), given["iterations"], path.resolve().name)


WORKLOAD = TrafficKind("workload", _workload, (FROM, NODE, ITERATIONS), (DURATION,))
