"""Writes directories that ASTRA-sim 2.x runs: execution traces, and the configuration of its analytical network.

The simulator charges a message its latency at each hop, and the latency and bytes of one dimension only
(github.com/astra-sim/astra-sim, astra-network-analytical). Rates are in GB/s of 2^30 bytes, latencies in ns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from ringtap.core.errors import UsageError, file_errors
from ringtap.core.run_directory import write_json
from ringtap.core.units import counted
from ringtap.workload.execution_trace import Collective, Node, NodeType, Value, message_classes, write_trace
from ringtap.workload.topologies import Dimension, Topology
from ringtap.workload.workload import (
    GROUPS_JSON,
    PREFIX,
    Workload,
    carried_out_as,
    check_even,
    length_us,
    peer_of,
    size_of,
)

# option of the simulator -> file in the directory
CONFIGURATION = {
    "comm-group": GROUPS_JSON, "system": "system.json", "network": "network.yml", "remote-memory": "remote_memory.json",
}  # fmt: skip
_ALL_REDUCE = {"ring": "ring", "halving-doubling": "halvingDoubling", "double-tree": "doubleBinaryTree"}
# collectives in which each rank needs data of all others -> what the simulator calls them
KINDS = {
    Collective.ALL_REDUCE: Collective.ALL_REDUCE, Collective.ALL_GATHER: Collective.ALL_GATHER,
    Collective.ALL_TO_ALL: Collective.ALL_TO_ALL, Collective.REDUCE_SCATTER: Collective.REDUCE_SCATTER,
    Collective.REDUCE_SCATTER_BLOCK: Collective.REDUCE_SCATTER,
}  # fmt: skip
_LOWER = "lower the workload first (ringtap workload lower)"


def write_astra_sim(workload: Workload, topology: Topology, all_reduce: str, latency_s: float, path: Path) -> None:
    """Write a directory for ASTRA-sim 2.x.

    Args:
        workload: what ranks compute and send.
        topology: the network, with a host per rank.
        all_reduce: algorithm of all-reduce.
        latency_s: time of a message between neighbours beside its bytes.
        path: the directory, which is created.

    Raises:
        UsageError: the simulator cannot run the workload or the topology, or the directory cannot be written.
    """
    check_even(workload, "ASTRA-sim")
    dimensions = _dimensions(workload, topology)
    system = _system(workload, all_reduce, len(dimensions))
    numbers = {name: str(number) for number, name in enumerate(workload.groups, start=1)}
    sizes = [dimension.size for dimension in dimensions]
    # the simulator counts whole ns, and aborts at a message that takes none
    least_bytes = int(max(dimension.rate_bps for dimension in dimensions) / 8e9) + 1
    traces = [[_node(workload, rank, node, numbers, sizes, least_bytes) for node in trace] or [_computation(1, "idle")]
              for rank, trace in enumerate(workload.traces)]  # fmt: skip
    message_classes()  # before there is a directory
    with file_errors(path, "cannot be written"):
        path.mkdir(parents=True)
        for rank, trace in enumerate(traces):
            write_trace(trace, path / f"{PREFIX}.{rank}.et")
        write_json(path / GROUPS_JSON, {numbers[name]: ranks for name, ranks in workload.groups.items()})
        write_json(path / CONFIGURATION["system"], system)
        write_json(path / CONFIGURATION["remote-memory"], {"memory-type": "NO_MEMORY_EXPANSION"})
        (path / CONFIGURATION["network"]).write_text(_network(dimensions, latency_s))


def _dimensions(workload: Workload, topology: Topology) -> list[Dimension]:
    if not topology.dimensions:
        several_paths = topology.name != "leaf-spine" or "leaf0 spine1 up" in topology.links
        why = "it has several paths" if several_paths else "its leaves have different numbers of hosts"
        raise UsageError(f"ASTRA-sim's analytical network has no {topology.name} like this one: {why}")
    if topology.hosts != workload.ranks:
        raise UsageError(
            f"the {topology.name} has {counted(topology.hosts, 'host')} for {counted(workload.ranks, 'rank')}: "
            "ASTRA-sim needs one rank per host"
        )
    dimensions = [dimension for dimension in topology.dimensions if dimension.size > 1]
    if not dimensions:
        raise UsageError("ASTRA-sim's analytical network needs 2 ranks or more")
    return dimensions


def _network(dimensions: Sequence[Dimension], latency_s: float) -> str:
    """Return network.yml; a message passes two links where a switch is."""
    columns = {
        "topology": ["Switch" if each.switch else "Ring" for each in dimensions],
        "npus_count": [str(each.size) for each in dimensions],
        "bandwidth": [f"{each.rate_bps / 8 / 2**30:.12g}" for each in dimensions],
        "latency": [f"{latency_s * 1e9 / (2 if each.switch else 1):.12g}" for each in dimensions],
    }
    return "".join(f"{name}: [{', '.join(values)}]\n" for name, values in columns.items())


def _system(workload: Workload, all_reduce: str, dimensions: int) -> dict[str, object]:
    kinds = {carried_out_as(node) for trace in workload.traces for node in trace if node.type == NodeType.COMM_COLL}
    if Collective.ALL_REDUCE in kinds and all_reduce not in _ALL_REDUCE:
        raise UsageError(f"ASTRA-sim has no {all_reduce} all-reduce: choose {', '.join(_ALL_REDUCE)}, or {_LOWER}")
    # all-to-all: straight to each other rank, one message at a time
    chosen = {
        "all-reduce": _ALL_REDUCE.get(all_reduce, "ring"), "all-gather": "ring", "reduce-scatter": "ring",
        "all-to-all": "direct1",
    }  # fmt: skip
    # as in the simulation here, a collective is one chunk, whose data come from memory at once (1 PB/s); the simulator
    # aborts without a delay of endpoints (ns)
    return {
        "scheduling-policy": "FIFO", "endpoint-delay": 1, "active-chunks-per-dimension": 1,
        "preferred-dataset-splits": 1, "collective-optimization": "localBWAware", "local-mem-bw": 10**6,
        **{f"{kind}-implementation": [name] * dimensions for kind, name in chosen.items()},
    }  # fmt: skip


def _computation(number: int, name: str) -> Node:
    return Node(number, name, NodeType.COMP, attributes={"is_cpu_op": False})


def _node(
    workload: Workload, rank: int, node: Node, numbers: dict[str, str], sizes: Sequence[int], least_bytes: int
) -> Node:
    """Return a node with the type and the attributes that the simulator accepts."""
    written = _computation(node.id, node.name)
    written.control_deps, written.data_deps, written.duration_us = node.control_deps, node.data_deps, length_us(node)
    attributes: dict[str, Value] = {"is_cpu_op": False, "comm_size": max(size_of(node), least_bytes)}
    if node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
        peer = peer_of(node)
        _check_dimensions(workload, rank, node, [(rank, peer)], sizes)
        ends = (rank, peer) if node.type == NodeType.COMM_SEND else (peer, rank)
        attributes |= {"comm_src": ends[0], "comm_dst": ends[1], "comm_tag": node.attributes.get("comm_tag", 0)}
        written.type, written.duration_us, written.attributes = node.type, 0, attributes
    elif node.type == NodeType.COMM_COLL:
        kind, members = carried_out_as(node), workload.members(node)
        if kind not in KINDS:
            raise UsageError(f"{workload.where(rank, node)}: ASTRA-sim cannot run {kind.name.lower()}; {_LOWER}")
        written.duration_us = 0
        if len(members) > 1:
            if len(members) < workload.ranks:
                _check_dimensions(workload, rank, node, list(pairwise([*members, members[0]])), sizes)
            group = numbers.get(str(node.attributes.get("pg_name", "")))
            attributes |= {"comm_type": int(KINDS[kind])} | ({"pg_name": group} if group else {})
            written.type, written.attributes = NodeType.COMM_COLL, attributes
    return written


def _check_dimensions(
    workload: Workload, rank: int, node: Node, pairs: Sequence[tuple[int, int]], sizes: Sequence[int]
) -> None:
    """Check that messages go along one dimension: the simulator leaves out the time of the others."""
    for pair in pairs:
        crossed = 0
        for place, size in enumerate(sizes):
            step = math.prod(sizes[:place])
            crossed += pair[0] // step % size != pair[1] // step % size
        if crossed > 1:
            raise UsageError(
                f"{workload.where(rank, node)} is between ranks {pair[0]} and {pair[1]}, {crossed} dimensions apart: "
                "ASTRA-sim charges the first one only; choose a star or a ring"
            )
