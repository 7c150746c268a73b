"""Writes workloads as files for other simulators and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_format import flow_list_line
from ringtap.core.units import counted
from ringtap.workload.execution_trace import Collective, NodeType
from ringtap.workload.lowering import Algorithms, LoweredCollective, ended, lowered_collectives
from ringtap.workload.workload import (
    Workload,
    check_of_all_ranks,
    kind_of,
    length_us,
    message_pairs,
    peer_of,
    size_of,
)

if TYPE_CHECKING:
    from ringtap.workload.simulate_iterations import SimulatedIterations

_HPCC_PORT = 100  # of all flows, as in HPCC's traffic_gen

_PARAM_NAMES = {
    Collective.ALL_REDUCE: "all_reduce", Collective.REDUCE: "reduce", Collective.ALL_GATHER: "all_gather",
    Collective.GATHER: "gather", Collective.SCATTER: "scatter", Collective.BROADCAST: "broadcast",
    Collective.ALL_TO_ALL: "all_to_allv", Collective.REDUCE_SCATTER: "reduce_scatter",
    Collective.REDUCE_SCATTER_BLOCK: "reduce_scatter", Collective.BARRIER: "barrier",
}  # fmt: skip
_PARAM_ROOTED = {Collective.REDUCE, Collective.GATHER, Collective.SCATTER, Collective.BROADCAST}
# whose data PARAM divides among the ranks
_PARAM_DIVIDED = {
    Collective.SCATTER, Collective.ALL_TO_ALL, Collective.REDUCE_SCATTER, Collective.REDUCE_SCATTER_BLOCK
}  # fmt: skip


def goal(workload: Workload, algorithms: Algorithms, units_per_us: int = 1000) -> Iterator[str]:
    """Return the lines of a GOAL schedule (LogGOPSim, ATLAHS) of a workload, with the messages of its collectives.

    Args:
        workload: what ranks compute and send.
        algorithms: algorithms of collectives.
        units_per_us: units of time in 1 us; 1000: times are in ns.

    Raises:
        UsageError: an algorithm does not go with the number of ranks.
    """
    of_rank: list[list[tuple[LoweredCollective, int]]] = [[] for _ in range(workload.ranks + algorithms.others)]
    for collective in lowered_collectives(workload, algorithms):
        for endpoint, rank in enumerate(collective.ranks):
            of_rank[rank].append((collective, endpoint))
    return _goal_lines(workload, of_rank, units_per_us)


def _goal_lines(
    workload: Workload, of_rank: list[list[tuple[LoweredCollective, int]]], units_per_us: int
) -> Iterator[str]:
    """Yield the lines of a schedule, from the collectives of each rank and its endpoint in each."""
    yield f"num_ranks {len(of_rank)}"
    for rank, collectives in enumerate(of_rank):
        yield ""
        yield f"rank {rank} {{"
        trace = workload.traces[rank] if rank < workload.ranks else []
        requires = [f"l{node.id} requires l{dep}" for node in trace for dep in sorted(node.deps)]
        for node in map(ended, trace):
            if node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
                is_send, tag = node.type == NodeType.COMM_SEND, node.attributes.get("comm_tag", 0)
                yield _goal_message(node.id, is_send, peer_of(node), tag, size_of(node))
            else:
                yield f"l{node.id}: calc {length_us(node) * units_per_us}"
        for collective, endpoint in collectives:
            own = collective.parts[endpoint][1] if endpoint < len(collective.parts) else None  # a server has no node
            first_deps = sorted(own.deps) if own else []
            for number, is_send, peer, tag, size_bytes, after in collective.at(endpoint):
                yield _goal_message(number, is_send, peer, tag, size_bytes)
                requires += [f"l{number} requires l{dep}" for dep in after or first_deps]
            requires += [f"l{own.id} requires l{last}" for last in collective.last(endpoint)] if own else []
        yield from requires
        yield "}"


def _goal_message(number: int, is_send: bool, peer: Any, tag: Any, size_bytes: int) -> str:
    # LogGOPSim charges the bytes after the first, and the time of a message of 0 bytes would wrap around
    what, where = ("send", "to") if is_send else ("recv", "from")
    return f"l{number}: {what} {max(size_bytes, 1)}b {where} {peer} tag {tag}"


def hpcc(lowered: Workload, simulated: SimulatedIterations, ranks_per_host: int = 1) -> tuple[list[str], list[str]]:
    """Return the lines of an HPCC flow list for ns-3: the messages of an iteration between hosts.

    A flow starts when both of its ranks have begun the message, in s since the begin of the iteration.

    Args:
        lowered: a workload without collectives.
        simulated: its simulation, of one iteration.
        ranks_per_host: ranks at each host; messages within a host are left out.

    Returns:
        The lines, and a sentence about messages that they do not have.

    Raises:
        UsageError: there is no message with data between hosts.
    """
    begin_s = [{span.node.id: span.begin_s for span in spans} for spans in simulated.spans]
    flows, left_out = [], 0
    for (source, one), (destination, other) in message_pairs(lowered):
        hosts = source // ranks_per_host, destination // ranks_per_host
        if hosts[0] != hosts[1] and size_of(one):
            start_s = max(begin_s[source][one.id], begin_s[destination][other.id])
            flows.append((round(start_s * 1e9), *hosts, size_of(one)))
        else:
            left_out += 1
    if not flows:
        raise UsageError("no message of the workload goes from one host to another: there is no flow to list")
    lines = [flow_list_line(source, destination, _HPCC_PORT, size_bytes, start_ns)
             for start_ns, source, destination, size_bytes in sorted(flows)]  # fmt: skip
    lost = [f"left out: {counted(left_out, 'message')} within a host or of 0 bytes"] if left_out else []
    return [str(len(flows)), *lines], lost


def param(workload: Workload) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the collectives as a basic trace of PARAM's replay (commsTraceParser.py), one for all ranks.

    Sizes are elements of a rank's input and output. A collective begins after the computations of rank 0 before it.

    Returns:
        The trace, and a sentence about each detail that it does not have.

    Raises:
        UsageError: there is a message between two ranks, a collective of some ranks, or no collective.
    """
    check_of_all_ranks(workload, "PARAM", _PARAM_NAMES)
    found, ends_us, cut, ranks = [], dict[int, int](), 0, workload.ranks
    for node in workload.traces[0]:
        begin_us = max((ends_us[dep] for dep in node.deps), default=0)
        ends_us[node.id] = begin_us + length_us(node)
        if node.type != NodeType.COMM_COLL:
            continue
        kind, size_bytes = kind_of(node), size_of(node)
        item: dict[str, Any] = {"comms": _PARAM_NAMES[kind], "startTime_ns": begin_us * 1000, "world_size": ranks}
        size, dtype = (size_bytes // 4, "float") if size_bytes % 4 == 0 else (size_bytes, "byte")
        if kind in _PARAM_DIVIDED:
            cut += size % ranks > 0
            size -= size % ranks
        out_size = size
        if kind in (Collective.ALL_GATHER, Collective.GATHER):
            out_size = size * ranks
        elif kind == Collective.ALL_TO_ALL:
            item |= dict.fromkeys(("in_split", "out_split"), [size // ranks] * ranks)
        elif kind in _PARAM_DIVIDED:
            out_size = size // ranks
        if kind in _PARAM_ROOTED:
            item["root"] = 0
        if kind != Collective.BARRIER:
            item |= {"in_msg_size": size, "out_msg_size": out_size, "dtype": dtype}
        found.append(item)
    if not found:
        raise UsageError("the workload has no collectives: there is nothing for PARAM to replay")
    lost = []
    if any(ends_us.values()):
        last_us = max(ends_us.values()) - max(item["startTime_ns"] for item in found) // 1000
        lost.append(
            "PARAM replays no computations: with --use-timestamp, a collective begins after those of rank 0 before it, "
            f"as if collectives took no time, and the {last_us / 1000:g} ms after the last one are left out"
        )
    if cut:
        what = counted(cut, "collective has", "collectives have")
        lost.append(f"{what} a size that {workload.ranks} ranks cannot divide, of which PARAM leaves out the remainder")
    return sorted(found, key=lambda item: item["startTime_ns"]), lost
