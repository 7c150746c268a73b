"""Turns a workload into a flow plan's operations, which replay its messages and computations."""

from __future__ import annotations

from pathlib import Path

from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_format import Operation
from ringtap.workload.execution_trace import Node, NodeType
from ringtap.workload.workload import (
    UNITS,
    Place,
    Workload,
    length_us,
    order_by_messages,
    peer_of,
    read_workload,
    senders_of,
    size_of,
    unit_of,
)

# Lines that a receipt stands for; beyond them, it becomes a line of its own
_MOST_REFERENCES = 4

References = dict[int, int]  # number of an operation -> ns from its completion


def read_operations(path: Path) -> list[Operation]:
    """Read the operations of an iteration of a workload.

    Raises:
        UsageError: the workload cannot be read, has collectives, or its ranks wait for each other for ever.
    """
    return operations(read_workload(path))


def operations(workload: Workload) -> list[Operation]:
    """Return the operations of an iteration, each after those that it waits for.

    The first ones are the begin of the iteration on each rank, the last ones its end, for which the next iteration's
    begin waits. A computation that waits for one operation is not one itself, but a delay after it.

    Raises:
        UsageError: the workload has collectives, or its ranks wait for each other for ever.
    """
    found = [Operation(rank, -1, 0, ()) for rank in range(workload.ranks)]
    references: dict[Place, References] = {}  # of each node that is known so far
    for rank, trace in enumerate(workload.traces):
        for node in trace:
            if node.type == NodeType.COMM_COLL:
                raise UsageError(
                    f"{workload.where(rank, node)} is a collective: replace it by messages with ringtap workload lower"
                )
    sender_of, queue = senders_of(workload), _Queue(workload.ranks)
    for place, node in order_by_messages(workload, sender_of):
        sent = references[sender_of[place]] if place in sender_of else None
        before = [references[place[0], dep] for dep in node.deps]
        if (last := queue.add(place[0], node)) is not None:
            before.append(references[last])
        references[place] = _reference(found, place[0], node, before, sent)
    for rank, trace in enumerate(workload.traces):
        awaited = {dep for node in trace for dep in node.deps}
        every = [references[rank, node.id] for node in trace if node.id not in awaited]
        found.append(Operation(rank, -1, 0, tuple(sorted(_joined([{rank: 0}, *every]).items()))))
        found[rank] = found[rank]._replace(after=((len(found) - 1, 0),))
    return found


class _Queue:
    """The computations of each rank, which runs one at a time."""

    def __init__(self, ranks: int) -> None:
        self._count = [0] * (UNITS * ranks)
        self._last: dict[int, Place] = {}
        self._ended: dict[Place, list[int]] = {}  # computations of each unit that a node follows

    def add(self, rank: int, node: Node) -> Place | None:
        """Add the next node, and return the computation before it if it does not wait for that one anyway."""
        known = [self._ended[rank, dep] for dep in node.deps]
        ended = [max(column) for column in zip(*known, strict=True)] or [0] * UNITS
        self._ended[rank, node.id] = ended
        if not length_us(node):
            return None
        unit = unit_of(rank, node)
        last = self._last.get(unit) if ended[unit % UNITS] < self._count[unit] else None
        self._count[unit] += 1
        ended[unit % UNITS], self._last[unit] = self._count[unit], (rank, node.id)
        return last


def _reference(
    found: list[Operation], rank: int, node: Node, before: list[References], sent: References | None
) -> References:
    """Return the operations whose completions make that of a node, after adding the node if it needs one itself."""
    after = _joined(before or [{rank: 0}])
    if node.type == NodeType.COMM_SEND:
        peer = int(peer_of(node))
        # messages to one peer share a connection, so that none waits until the receipt of the one before is known
        after = {one: delay_ns for one, delay_ns in after.items() if found[one][:2] != (rank, peer) or delay_ns}
        found.append(Operation(rank, peer, max(1, size_of(node)), tuple(sorted(after.items()))))
        return {len(found) - 1: 0}
    if sent is not None:
        after = _joined([sent, after]) if before else dict(sent)
    after = {number: delay_ns + 1000 * length_us(node) for number, delay_ns in after.items()}
    if len(after) <= (1 if sent is None else _MOST_REFERENCES):
        return after
    found.append(Operation(rank, -1, 0, tuple(sorted(after.items()))))
    return {len(found) - 1: 0}


def _joined(every: list[References]) -> References:
    """Return the later one of each operation's delays."""
    joined: References = {}
    for each in every:
        for number, delay_ns in each.items():
            joined[number] = max(delay_ns, joined.get(number, 0))
    return joined
