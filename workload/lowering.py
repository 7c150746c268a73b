"""Lowers collectives to messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ringtap.workload.collectives import Shape, message_graph, uneven_all_to_all
from ringtap.workload.execution_trace import Collective, Node, NodeType, Value
from ringtap.workload.message_graph import Integers, MessageGraph, Operations
from ringtap.workload.workload import (
    Parts,
    Place,
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
    _graphs: dict[tuple[str, int], MessageGraph] = field(default_factory=dict)

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
        key = self.name(kind), members
        if key not in self._graphs:
            shape = Shape(members, size_bytes, self.group, self.shards, self.pieces)
            self._graphs[key] = message_graph(key[0], shape)
        return self._graphs[key].of_size(size_bytes)

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


@dataclass(frozen=True)
class LoweredCollective:
    """The sends and receives that a collective becomes.

    Attributes:
        parts: its ranks and nodes in the workload.
        ranks: rank of each endpoint.
        size_bytes: bytes of each message.
        operations: the sends and receives of each endpoint.
        first_ids: id of the first one of each endpoint.
        first_tags: tag of the first message of each pair of endpoints.
    """

    parts: Parts
    ranks: list[int]
    size_bytes: Integers
    operations: Operations
    first_ids: list[int]
    first_tags: Integers

    def at(self, endpoint: int) -> Iterator[tuple[int, bool, int, int, int, list[int]]]:
        """Yield the sends and receives of an endpoint.

        Yields:
            Id, True for a send and False for a receive, the rank at the other end, tag, bytes, and the ids of those
            that it waits for; none: it waits for what the collective waits for.
        """
        all_, first_id = self.operations, self.first_ids[endpoint]
        begin, end = all_.endpoint_start[endpoint : endpoint + 2]
        message, is_send = all_.message[begin:end], all_.is_send[begin:end]
        pair = all_.pair[message]
        peers = np.array(self.ranks)[all_.pairs[pair, is_send.astype(np.int64)]].tolist()
        tags, sizes = (self.first_tags[pair] + all_.turn[message]).tolist(), self.size_bytes[message].tolist()
        starts = all_.after_start[begin : end + 1].tolist()
        after = (all_.after[starts[0] : starts[-1]] + first_id).tolist()
        first = starts[0]
        for place, sends in enumerate(is_send.tolist()):
            waits = after[starts[place] - first : starts[place + 1] - first]
            yield first_id + place, sends, peers[place], tags[place], sizes[place], waits

    def last(self, endpoint: int) -> list[int]:
        """Return the ids of the sends and receives of an endpoint for which none of its others waits."""
        begin, end = self.operations.endpoint_start[endpoint : endpoint + 2]
        found: list[int] = (np.flatnonzero(self.operations.is_last[begin:end]) + self.first_ids[endpoint]).tolist()
        return found


def lowered_collectives(workload: Workload, algorithms: Algorithms) -> Iterator[LoweredCollective]:
    """Yield the sends and receives of each collective. Parameter servers and switches become further ranks."""
    others = range(workload.ranks, workload.ranks + algorithms.others)
    new_ids = [max((node.id for node in trace), default=0) + 1 for trace in workload.traces] + [1] * len(others)
    tags: dict[tuple[int, int], int] = {}  # the next one, beside those of the workload's own messages
    for source, destination, tag in messages_of(workload)[0]:
        tags[source, destination] = max(tag + 1, tags.get((source, destination), 0))
    known: dict[tuple[Collective, int], Operations] = {}
    for parts in collectives_of(workload):
        if len(parts) < 2:
            continue
        key, splits = (carried_out_as(parts[0][1]), len(parts)), split_bytes(parts)
        graph = algorithms.graph(*key, bytes_of(parts), splits)
        if splits or key not in known:
            known[key] = graph.operations()
        operations = known[key]
        ranks = [*(rank for rank, _ in parts), *others][: graph.endpoints]
        first_ids, first_tags = [new_ids[rank] for rank in ranks], []
        for rank, count in zip(ranks, np.diff(operations.endpoint_start).tolist(), strict=True):
            new_ids[rank] += count
        for (one, other), count in zip(operations.pairs.tolist(), operations.pair_messages.tolist(), strict=True):
            pair = ranks[one], ranks[other]
            first_tags.append(tags.get(pair, 0))
            tags[pair] = first_tags[-1] + count
        yield LoweredCollective(parts, ranks, graph.size_bytes, operations, first_ids, np.array(first_tags))


def lower(workload: Workload, algorithms: Algorithms) -> Workload:
    """Return a workload of computations, sends and receives, without collectives.

    A computation of no length stands where a collective was, and waits for all messages of its rank. Parameter servers
    and switches become further ranks.
    """
    extra = algorithms.others
    traces: list[list[Node]] = [[] for _ in range(workload.ranks + extra)]
    messages: dict[Place, list[Node]] = {}
    last: dict[Place, list[int]] = {}
    for collective in lowered_collectives(workload, algorithms):
        nodes = dict(collective.parts)
        for endpoint, rank in enumerate(collective.ranks):
            name, deps, found = "sum", list[int](), traces[rank]
            if rank in nodes:
                name, deps = nodes[rank].name, sorted(nodes[rank].deps)
                found = messages[rank, nodes[rank].id] = []
                last[rank, nodes[rank].id] = collective.last(endpoint)
            for number, sends, peer, tag, size_bytes, after in collective.at(endpoint):
                kind, end = (NodeType.COMM_SEND, "comm_dst") if sends else (NodeType.COMM_RECV, "comm_src")
                attributes: dict[str, Value] = {"is_cpu_op": False, end: peer, "comm_tag": tag, "comm_size": size_bytes}
                found.append(Node(number, name, kind, sorted(after) or deps, attributes=attributes))
    for rank, trace in enumerate(workload.traces):
        for node in trace:
            traces[rank] += messages.get((rank, node.id), [])
            traces[rank].append(ended(node))
            traces[rank][-1].control_deps += last.get((rank, node.id), [])
    about = workload.about | {"lowered": {"all_reduce": algorithms.all_reduce, "added_ranks": extra}}
    return Workload(traces, {}, about)


def ended(node: Node) -> Node:
    """Return a copy of a node; of a collective, the computation of no length that stands for its end."""
    copy = replace(node, control_deps=list(node.control_deps))
    if node.type != NodeType.COMM_COLL:
        return copy
    return replace(copy, type=NodeType.COMP, attributes={"is_cpu_op": False}, duration_us=0)
