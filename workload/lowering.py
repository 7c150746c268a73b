"""Lowering of collectives to messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ringtap.workload.collectives import Shape, message_graph, uneven_all_to_all
from ringtap.workload.execution_trace import Collective, Node, NodeType
from ringtap.workload.message_graph import MessageGraph
from ringtap.workload.workload import (
    Parts,
    Workload,
    carried_out_as,
    collectives_of,
    kind_of,
    messages_of,
    size_of,
    split_bytes,
)

# algorithms of collectives other than all-reduce
_OTHERS = {
    Collective.REDUCE: "reduce", Collective.ALL_GATHER: "all-gather", Collective.GATHER: "gather",
    Collective.SCATTER: "scatter", Collective.BROADCAST: "broadcast", Collective.ALL_TO_ALL: "all-to-all",
    Collective.REDUCE_SCATTER: "reduce-scatter", Collective.REDUCE_SCATTER_BLOCK: "reduce-scatter",
    Collective.BARRIER: "tree",
}  # fmt: skip
_SINGLE_INPUT = {Collective.ALL_GATHER, Collective.GATHER}  # whose size is that of one rank's input


@dataclass
class Algorithms:
    """The algorithms of collectives.

    Attributes:
        all_reduce: algorithm of all-reduce.
        group: workers per node, for ``hierarchical``.
        shards: parameter servers.
        pieces: pieces of trees and switches.
    """

    all_reduce: str = "ring"
    group: int = 1
    shards: int = 1
    pieces: int = 1
    _graphs: dict[tuple[str, int, int], MessageGraph] = field(default_factory=dict)

    def graph(
        self, kind: Collective, members: int, size_bytes: int, splits: Sequence[Sequence[int]] = ()
    ) -> MessageGraph:
        """Return the message graph of a collective of some ranks.

        Args:
            kind: kind of the collective.
            members: number of its ranks.
            size_bytes: bytes of its data.
            splits: bytes from each rank to each rank of an uneven all-to-all.

        Raises:
            UsageError: the algorithm does not go with the number of ranks.
        """
        if splits:
            return uneven_all_to_all(splits)
        name = self.name(kind)
        key = name, members, size_bytes
        if key not in self._graphs:
            shape = Shape(members, size_bytes, self.group, self.shards, self.pieces)
            self._graphs[key] = message_graph(name, shape)
        return self._graphs[key]

    def name(self, kind: Collective) -> str:
        """Return the name of the algorithm of a kind of collective."""
        return self.all_reduce if kind == Collective.ALL_REDUCE else _OTHERS[kind]

    @property
    def key(self) -> str:
        """Text that differs from that of any other algorithms."""
        return f"{self.all_reduce} {self.group} {self.shards} {self.pieces}"

    @property
    def others(self) -> int:
        """Number of servers or switches that all-reduce needs beside the ranks."""
        return {"parameter-server": self.shards, "in-network": 1}.get(self.all_reduce, 0)


def data_bytes(node: Node, members: int) -> int:
    """Return the bytes of all data of a collective whose ranks have as many bytes each."""
    return size_of(node) * (members if kind_of(node) in _SINGLE_INPUT else 1)


def bytes_of(parts: Parts) -> int:
    """Return the bytes of all data of a collective, as its message graph counts them."""
    splits = split_bytes(parts)
    return sum(map(sum, splits)) if splits else data_bytes(parts[0][1], len(parts))


def lower(workload: Workload, algorithms: Algorithms) -> Workload:
    """Return a workload of computations, sends and receives, without collectives.

    A computation of no length stands where a collective was, and waits for all messages of its rank. Parameter servers
    and switches become further ranks.
    """
    extra = algorithms.others
    traces: list[list[Node]] = [[replace(node) for node in trace] for trace in workload.traces]
    traces += [[] for _ in range(extra)]
    new_ids = [max((node.id for node in trace), default=0) + 1 for trace in traces]
    tags: dict[tuple[int, int], int] = {}  # beside those of the workload's own messages
    for source, destination, tag in messages_of(workload)[0]:
        tags[source, destination] = max(tag, tags.get((source, destination), -1))
    by_id = [{node.id: node for node in trace} for trace in traces]
    for (_, members), collectives in collectives_of(workload).items():
        for parts in collectives:
            for rank, node in parts:
                place = by_id[rank][node.id]
                place.type, place.attributes, place.duration_us = NodeType.COMP, {"is_cpu_op": False}, 0
            if len(members) < 2:
                continue
            graph = algorithms.graph(carried_out_as(parts[0][1]), len(members), bytes_of(parts), split_bytes(parts))
            ends = [*members, *range(workload.ranks, workload.ranks + extra)]
            nodes = dict(parts)
            sends, receives = [0] * len(graph), [0] * len(graph)
            joined: dict[int, list[int]] = {rank: [] for rank in members}
            for message, size_bytes in enumerate(graph.size_bytes.tolist()):
                source, destination = ends[graph.source[message]], ends[graph.destination[message]]
                tag = tags[source, destination] = tags.get((source, destination), -1) + 1
                after: dict[int, list[int]] = {source: [], destination: []}
                for before in graph.waits_for(message).tolist():
                    # a node waits for nodes of its own rank: the sender's, else the receiver's
                    ends_before = {ends[graph.destination[before]]: receives, ends[graph.source[before]]: sends}
                    rank = source if source in ends_before else destination
                    after[rank].append(ends_before[rank][before])
                for rank, kind, ids, peer in (
                    (source, NodeType.COMM_SEND, sends, "comm_dst"),
                    (destination, NodeType.COMM_RECV, receives, "comm_src"),
                ):
                    ids[message] = new_ids[rank]
                    new_ids[rank] += 1
                    deps = {*after[rank], *(nodes[rank].deps if rank in nodes else ())}
                    other = destination if rank == source else source
                    attributes = {"is_cpu_op": False, peer: other, "comm_tag": tag, "comm_size": size_bytes}
                    name = nodes[rank].name if rank in nodes else "sum"
                    traces[rank].append(Node(ids[message], name, kind, sorted(deps), attributes=attributes))
                    if rank in joined:
                        joined[rank].append(ids[message])
            for rank, node in parts:
                by_id[rank][node.id].control_deps = sorted({*node.control_deps, *joined[rank]})
    about = workload.about | {"lowered": {"all_reduce": algorithms.all_reduce, "added_ranks": extra}}
    return Workload(traces, {}, about)
