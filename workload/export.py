"""Files for other simulators and benchmarks, made from workloads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ringtap.errors import UsageError
from ringtap.flow_plan import flow_list_line
from ringtap.workload.execution_trace import Collective, Node, NodeType
from ringtap.workload.lowering import data_bytes
from ringtap.workload.workload import Workload, check_even, kind_of, length_us, messages_of, peer_of, size_of

if TYPE_CHECKING:
    from ringtap.workload.simulated_iterations import SimulatedIterations

_HPCC_PORT = 100  # of all flows, as in HPCC's traffic_gen

_ASTRA_NAMES = {
    Collective.ALL_REDUCE: "ALLREDUCE", Collective.ALL_GATHER: "ALLGATHER", Collective.REDUCE_SCATTER: "REDUCESCATTER",
    Collective.ALL_TO_ALL: "ALLTOALL",
}  # fmt: skip
_PARAM_NAMES = {
    Collective.ALL_REDUCE: "all_reduce", Collective.REDUCE: "reduce", Collective.ALL_GATHER: "all_gather",
    Collective.GATHER: "gather", Collective.SCATTER: "scatter", Collective.BROADCAST: "broadcast",
    Collective.ALL_TO_ALL: "all_to_all", Collective.REDUCE_SCATTER: "reduce_scatter",
    Collective.REDUCE_SCATTER_BLOCK: "reduce_scatter", Collective.BARRIER: "barrier",
}  # fmt: skip


def goal(lowered: Workload, units_per_us: int = 1000) -> Iterator[str]:
    """Yield the lines of a GOAL schedule (LogGOPSim, ATLAHS) of a workload without collectives.

    Args:
        lowered: the workload.
        units_per_us: units of time in 1 us; 1000: times are in ns.

    Raises:
        UsageError: the workload has collectives.
    """
    yield f"num_ranks {lowered.ranks}"
    for rank, trace in enumerate(lowered.traces):
        yield ""
        yield f"rank {rank} {{"
        for node in trace:
            yield f"l{node.id}: {_goal_operation(lowered, rank, node, units_per_us)}"
        for node in trace:
            yield from (f"l{node.id} requires l{dep}" for dep in sorted(node.deps))
        yield "}"


def _goal_operation(lowered: Workload, rank: int, node: Node, units_per_us: int) -> str:
    # LogGOPSim charges the bytes after the first, and the time of a message of 0 bytes would wrap around
    tag, size_bytes = node.attributes.get("comm_tag", 0), max(size_of(node), 1)
    if node.type == NodeType.COMM_SEND:
        return f"send {size_bytes}b to {peer_of(node)} tag {tag}"
    if node.type == NodeType.COMM_RECV:
        return f"recv {size_bytes}b from {peer_of(node)} tag {tag}"
    if node.type == NodeType.COMM_COLL:
        raise UsageError(f"{lowered.where(rank, node)} is a collective: lower the workload first")
    return f"calc {length_us(node) * units_per_us}"


def hpcc(lowered: Workload, simulated: SimulatedIterations, ranks_per_host: int = 1) -> Iterator[str]:
    """Yield the lines of an HPCC flow list for ns-3: the messages of an iteration between hosts.

    A flow starts when both of its ranks have begun the message, in s since the begin of the iteration.

    Args:
        lowered: a workload without collectives.
        simulated: its simulation, of one iteration.
        ranks_per_host: ranks at each host; messages within a host are left out.

    Raises:
        UsageError: there is no message with data between hosts.
    """
    begin_s = [{span.node.id: span.begin_s for span in spans} for spans in simulated.spans]
    sends, receives = messages_of(lowered)
    flows = []
    for key, sent in sends.items():
        hosts = key[0] // ranks_per_host, key[1] // ranks_per_host
        for (source, one), (destination, other) in zip(sent, receives[key], strict=True):
            if hosts[0] != hosts[1] and size_of(one):
                start_s = max(begin_s[source][one.id], begin_s[destination][other.id])
                flows.append((round(start_s * 1e9), *hosts, size_of(one)))
    if not flows:
        raise UsageError("no message of the workload goes from one host to another: there is no flow to list")
    yield str(len(flows))
    for start_ns, source, destination, size_bytes in sorted(flows):
        yield flow_list_line(source, destination, _HPCC_PORT, size_bytes, start_ns)


def astra1(workload: Workload) -> Iterator[str]:
    """Yield the lines of a workload file of ASTRA-sim 1.0: one layer per collective of rank 0, in ns.

    Each layer has the computation since the collective before, as the weight gradient's.

    Raises:
        UsageError: ASTRA-sim 1.0 does not have a collective of the workload.
    """
    check_even(workload, "ASTRA-sim 1.0")
    layers: list[str] = []
    compute_ns = 0
    for node in workload.traces[0]:
        if node.type == NodeType.COMM_COLL:
            kind = kind_of(node)
            if kind not in _ASTRA_NAMES:
                raise UsageError(f"{workload.where(0, node)}: ASTRA-sim 1.0 has no {kind.name.lower()}")
            size = data_bytes(node, len(workload.members(node)))
            name = f"layer{len(layers)}" if not node.name or " " in node.name else node.name
            layers.append(f"{name} -1 1 NONE 0 1 NONE 0 {max(compute_ns, 1)} {_ASTRA_NAMES[kind]} {size} 1")
            compute_ns = 0
        else:
            compute_ns += node.duration_us * 1000
    yield "MICRO"
    yield str(len(layers))
    yield from layers


def param(workload: Workload) -> list[dict[str, Any]]:
    """Return the collectives of rank 0 as a basic trace of PARAM's replay; sizes in elements of 4 bytes."""
    check_even(workload, "a basic trace of PARAM")
    found, now_ns = [], 0
    for node in workload.traces[0]:
        if node.type != NodeType.COMM_COLL:
            now_ns += node.duration_us * 1000
            continue
        kind, members = kind_of(node), len(workload.members(node))
        size = size_of(node) // 4
        item = {"comms": _PARAM_NAMES[kind], "in_msg_size": size, "out_msg_size": size, "dtype": "Float"}
        if kind == Collective.ALL_GATHER:
            item["out_msg_size"] = size * members
        elif kind in (Collective.REDUCE_SCATTER, Collective.REDUCE_SCATTER_BLOCK):
            item["out_msg_size"] = size // members
        found.append(item | {"startTime_ns": now_ns, "world_size": members})
    return found
