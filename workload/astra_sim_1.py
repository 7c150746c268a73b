"""Writes workload files of ASTRA-sim 1.0: layers with computations and collectives of all ranks, in one file.

Of the simulator's loops (astra-sim/workload/Workload.cc, branch ASTRA-sim-1.0), two have what a workload needs. In
``DATA``, a layer's collective begins after its weight gradient, and the next computation does not wait; layers run from
the last one to the first, and an update follows each collective. In ``DISTRIBUTED_INFERENCE``, the next layer waits.
``MICRO`` runs the collective of the first layer alone, without any computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ringtap.core.errors import UsageError
from ringtap.workload.execution_trace import Collective, Node, NodeType
from ringtap.workload.workload import Workload, carried_out_as, check_of_all_ranks, length_us, size_of

_NAMES = {
    Collective.ALL_REDUCE: "ALLREDUCE", Collective.ALL_GATHER: "ALLGATHER", Collective.REDUCE_SCATTER: "REDUCESCATTER",
    Collective.REDUCE_SCATTER_BLOCK: "REDUCESCATTER", Collective.ALL_TO_ALL: "ALLTOALL",
}  # fmt: skip
_NOTHING = "0 NONE 0"
_UPDATE_NS = 1  # the least that the examples of the simulator have


class _Layer(NamedTuple):
    """A computation, and the collective that begins after it."""

    compute_ns: int
    collective: Node | None


class _Loop(NamedTuple):
    """A loop of the simulator with its layers in order, and the update after each collective."""

    name: str
    layers: list[_Layer]
    update_ns: int = _UPDATE_NS


Step = tuple[Node, set[int]]  # a node that takes time, and the ids of those that it waits for


def workload_file(workload: Workload) -> tuple[list[str], list[str]]:
    """Return the lines of a file, and a sentence about each detail that it does not have.

    Raises:
        UsageError: the simulator has no loop for the workload.
    """
    check_of_all_ranks(workload, "ASTRA-sim 1.0", _NAMES)
    loops = _loops([_steps(trace) for trace in workload.traces])
    name, layers, update_ns = loops[0]
    lines = [_line(number, layer, name, update_ns, workload.ranks) for number, layer in enumerate(layers)]
    lost = []
    computed_ns = [[layer.compute_ns for layer in loop.layers] for loop in loops]
    if any(each != computed_ns[0] for each in computed_ns):
        sums_ms = [sum(each) / 1e6 for each in computed_ns]
        lost.append(
            f"computations differ between ranks ({min(sums_ms):g} to {max(sums_ms):g} ms in all): the file has those "
            f"of rank 0 ({sums_ms[0]:g} ms)"
        )
    return [name, str(len(lines)), *(reversed(lines) if name == "DATA" else lines)], lost


def _line(number: int, layer: _Layer, loop: str, update_ns: int, ranks: int) -> str:
    what, name = _NOTHING[2:], f"layer{number}"
    if (node := layer.collective) is not None:
        # a size is that of a rank's input; a message of a ring has 1 byte or more
        what = f"{_NAMES[carried_out_as(node)]} {max(size_of(node), ranks)}"
        name = node.name if len(node.name.split()) == 1 else name
    computed = f"{layer.compute_ns} {what}"
    passes = (_NOTHING, _NOTHING, computed) if loop == "DATA" else (computed, _NOTHING, _NOTHING)
    return f"{name} -1 {' '.join(passes)} {update_ns}"


def _loops(every: Sequence[Sequence[Step]]) -> list[_Loop]:
    """Return what each rank does, by the same loop of the simulator."""
    if not any(every):
        raise UsageError("the workload has nothing that takes time: there is no layer to write")
    for find in (_one_by_one, _overlapping):
        found = [loop for steps in every if (loop := find(steps)) is not None]
        if len(found) == len(every):
            return found
    raise UsageError(
        "ASTRA-sim 1.0 has no loop for this workload: each rank computes one thing at a time, and either waits for "
        "each collective at once, or computes on and waits for all of them at the end; choose --to chakra or --to goal"
    )


def _steps(trace: Sequence[Node]) -> list[Step]:
    """Return the nodes that take time, each with those of them that it waits for directly."""
    steps: list[Step] = []
    stands_for: dict[int, set[int]] = {}
    for node in trace:
        before = set().union(*(stands_for[dep] for dep in node.deps))
        takes_time = node.type == NodeType.COMM_COLL or length_us(node) > 0
        stands_for[node.id] = {node.id} if takes_time else before
        if takes_time:
            steps.append((node, before))
    return steps


def _overlapping(steps: Sequence[Step]) -> _Loop | None:
    """Return a loop in which computations do not wait for collectives, apart from the last ones, which wait for all."""
    computations: list[Node] = []
    collectives: dict[int, Node] = {}
    after: dict[int, int] = {}  # node -> number of computations before its end
    last: list[Node] = []
    for node, before in steps:
        if last:
            if node.type == NodeType.COMM_COLL or last[-1].id not in before:
                return None
            last.append(node)
        elif node.type == NodeType.COMM_COLL:
            after[node.id] = max((after[each] for each in before), default=0)
            collectives[node.id] = node
        elif not before.isdisjoint(collectives):
            if len(_all_before(steps, before)) < len(after):
                return None
            last.append(node)
        elif computations and computations[-1].id not in before:
            return None
        else:
            computations.append(node)
            after[node.id] = len(computations)
    done, layers = 0, []
    for node in sorted(collectives.values(), key=lambda each: after[each.id]):
        layers.append(_Layer(_compute_ns(computations[done : after[node.id]]), node))
        done = after[node.id]
    # the update delays the end of collectives, and a layer without one that of the computations
    update_ns = _compute_ns(last)
    rest_ns = _compute_ns(computations[done:]) + update_ns
    if rest_ns:
        layers.append(_Layer(rest_ns, None))
    return _Loop("DATA", layers, max(update_ns, _UPDATE_NS))


def _one_by_one(steps: Sequence[Step]) -> _Loop | None:
    """Return a loop in which each node waits for the one before."""
    layers, computed_ns, previous = [], 0, None
    for node, before in steps:
        if previous is not None and previous not in before:
            return None
        previous = node.id
        if node.type == NodeType.COMM_COLL:
            layers.append(_Layer(computed_ns, node))
            computed_ns = 0
        else:
            computed_ns += length_us(node) * 1000
    return _Loop("DISTRIBUTED_INFERENCE", [*layers, _Layer(computed_ns, None)] if computed_ns else layers)


def _all_before(steps: Sequence[Step], ids: set[int]) -> set[int]:
    waits = {node.id: before for node, before in steps}
    found, left = set(ids), list(ids)
    while left:
        new = waits[left.pop()] - found
        found |= new
        left += new
    return found


def _compute_ns(nodes: Sequence[Node]) -> int:
    return sum(length_us(node) for node in nodes) * 1000
