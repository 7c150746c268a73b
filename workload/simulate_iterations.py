"""Simulates the iterations of a workload on a topology, and finds the critical path of an iteration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ringtap.core.errors import UsageError
from ringtap.core.units import counted, format_size
from ringtap.workload.collectives import Shape, message_graph, messages_of_one
from ringtap.workload.execution_trace import Node, NodeType
from ringtap.workload.lowering import Algorithms, bytes_of
from ringtap.workload.simulation import CrossFlows, Numbers, Simulation
from ringtap.workload.topologies import Topology, star
from ringtap.workload.workload import (
    SPLITS,
    Parts,
    Place,
    Workload,
    carried_out_as,
    collectives_of,
    is_communication,
    length_us,
    message_pairs,
    order_by_messages,
    senders_of,
    size_of,
    split_bytes,
    unit_of,
)

_SHOWN_SIZES, _SHOWN_LINKS = 3, 3


class Span(NamedTuple):
    """A node of a rank, and when it begins and ends, in s."""

    node: Node
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class SimulatedIterations:
    """Simulated iterations.

    Attributes:
        end_s: time at which each rank ends each iteration, shape (iterations, ranks).
        spans: the nodes of each rank in the last iteration.
        since_s: time at which the iteration before the last one ends.
        link_bytes: bytes of the workload through each link in an iteration, shape (links,).
        cross_begin_s: time at which each flow of cross traffic begins, shape (flows,).
        cross_end_s: time at which it ends.
    """

    end_s: Numbers
    spans: list[list[Span]]
    since_s: float
    link_bytes: Numbers
    cross_begin_s: Numbers
    cross_end_s: Numbers

    @property
    def iteration_s(self) -> float:
        """Mean time of an iteration without the first one, if there are more."""
        ends = self.end_s.max(axis=1)
        return float(np.diff(ends).mean() if len(ends) > 1 else ends[0])

    def until(self, time_s: float) -> SimulatedIterations:
        """Return the iterations that have ended by a time."""
        return replace(self, end_s=self.end_s[self.end_s.max(axis=1) <= time_s])


def check_room(topology: Topology, endpoints: int, ranks_per_host: int = 1) -> None:
    """Check that a topology has a place for each rank, server and switch that adds.

    Raises:
        UsageError: it has fewer.
    """
    if topology.hosts * ranks_per_host < endpoints:
        raise UsageError(
            f"the topology has {counted(topology.hosts, 'host')} for {counted(endpoints, 'rank')} (servers and "
            "switches count): name a larger one"
        )


def simulate(
    workload: Workload,
    topology: Topology,
    algorithms: Algorithms,
    *,
    iterations: int = 1,
    latency_s: float = 0.0,
    rate_share: float | Numbers = 1.0,
    ranks_per_host: int = 1,
    places: Sequence[int] = (),
    cross: CrossFlows | None = None,
) -> SimulatedIterations:
    """Simulate iterations of a workload.

    Args:
        workload: what ranks compute and send.
        topology: hosts and links.
        algorithms: algorithms of collectives.
        iterations: number of iterations.
        latency_s: time that each message takes beside its transmission.
        rate_share: part of each link's rate that is left for these messages, one number or shape (links,).
        ranks_per_host: ranks at each host, between which messages take only the latency.
        places: host of each rank, server and switch that adds, in this order; none: one host after the other.
        cross: flows of cross traffic beside the workload; None: there are none.

    Raises:
        UsageError: the topology has too few hosts, ranks wait for each other for ever, or there is no room.
    """
    endpoints = workload.ranks + algorithms.others
    if not places:
        check_room(topology, endpoints, ranks_per_host)
        places = [endpoint // ranks_per_host for endpoint in range(endpoints)]
    # where all ranks do the same at the same time, one stands for all
    is_one = cross is None and len(set(places)) == endpoints and _are_alike(workload, topology, algorithms, rate_share)
    ranks = 1 if is_one else workload.ranks
    network = star(2, topology.rate_bps[0]) if is_one else topology
    simulation = Simulation(network, latency_s, np.max(rate_share) if is_one else rate_share, cross)
    communication = _Communication(workload, algorithms, simulation, [0, 1] if is_one else places, ranks)
    ends: list[int] = []
    last: list[list[int]] = [[] for _ in range(ranks)]
    order, sender_of = _order(workload, ranks)
    numbers: list[dict[int, int]] = []
    for _ in range(iterations):
        role = communication.begin()
        numbers = [{} for _ in range(ranks)]
        for rank, each in order:
            after = [numbers[rank][dep] for dep in each.deps] or last[rank]
            if sent_by := sender_of.get((rank, each.id)):
                after = [*after, numbers[sent_by[0]][sent_by[1]]]
            if (rank, each.id) in role:
                numbers[rank][each.id] = simulation.part(*role[rank, each.id], after)
            else:
                length_s = length_us(each) / 1e6
                numbers[rank][each.id] = simulation.compute(length_s, after, unit_of(rank, each), each.id)
        last = [[simulation.compute(0.0, list(own.values()) or last[rank])] for rank, own in enumerate(numbers)]
        ends += [end for (end,) in last]
    result = simulation.run()
    found = result.end_s[ends]
    if (found < 0).any():
        raise UsageError(
            f"rank {np.argmax(found < 0) % ranks} waits for ever: ranks wait for each other's messages in different "
            "orders"
        )
    spans = [
        [Span(node, float(result.begin_s[at[node.id]]), float(result.end_s[at[node.id]])) for node in trace]
        for trace, at in zip(workload.traces, numbers, strict=False)
    ]
    end_s, link_bytes = found.reshape(iterations, ranks), result.link_bytes / iterations
    if is_one:
        end_s, spans = np.repeat(end_s, workload.ranks, axis=1), spans * workload.ranks
        of_one, link_bytes = link_bytes, np.zeros(len(topology.links))
        for place in places:
            for link in topology.path(place, place):
                link_bytes[link] = of_one[0]
    return SimulatedIterations(
        end_s, spans, float(end_s[-2].max()) if iterations > 1 else 0.0, link_bytes, result.cross_begin_s,
        result.cross_end_s,
    )  # fmt: skip


def _are_alike(workload: Workload, topology: Topology, algorithms: Algorithms, rate_share: float | Numbers) -> bool:
    """Return True if all ranks, at hosts of their own, do the same and have the same share of links that are alike."""
    if topology.name != "star" or np.ptp(rate_share) > 0 or workload.ranks < 2 or algorithms.others:
        return False
    first, everybody = workload.traces[0], range(workload.ranks)
    for node in first:
        if node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
            return False
        if node.type == NodeType.COMM_COLL and (
            list(workload.members(node)) != list(everybody)
            or SPLITS in node.attributes
            or messages_of_one(algorithms.name(carried_out_as(node)), 2) is None
        ):
            return False
    return all(trace == first for trace in workload.traces)


class _Communication:
    """The collectives and messages of a workload in a simulation."""

    def __init__(
        self, workload: Workload, algorithms: Algorithms, simulation: Simulation, places: Sequence[int], ranks: int
    ) -> None:
        self._workload, self._algorithms, self._simulation, self._places = workload, algorithms, simulation, places
        self._ranks = ranks
        self._placed: dict[tuple[object, ...], int] = {}
        self._messages = list(message_pairs(workload))
        self._collectives = [parts for parts in collectives_of(workload) if len(parts) > 1]

    def begin(self) -> dict[Place, tuple[int, int]]:
        """Add those of an iteration, and return for each node its collective and its worker."""
        role: dict[Place, tuple[int, int]] = {}
        for parts in self._collectives:
            instance = self._simulation.collective(self._graph(parts), bytes_of(parts))
            role |= {(rank, node.id): (instance, worker) for worker, (rank, node) in enumerate(parts[: self._ranks])}
        for (source, sender), (destination, receiver) in self._messages:
            instance = self._simulation.collective(self._pair(source, destination), size_of(sender))
            role[source, sender.id] = instance, 0
            if not self._workload.is_eager:
                role[destination, receiver.id] = instance, 1
        return role

    def _graph(self, parts: Parts) -> int:
        """Return the number of the message graph of a collective, which is that of all others but for its bytes."""
        members, splits = tuple(rank for rank, _ in parts), split_bytes(parts)
        key = carried_out_as(parts[0][1]), members, splits
        if key not in self._placed:
            graph = messages_of_one(self._algorithms.name(key[0]), len(members)) if self._ranks == 1 else None
            if graph is None:
                graph = self._algorithms.graph(key[0], len(members), len(members) << 20, splits)
            ends = [*members, *range(self._workload.ranks, len(self._places))][: graph.endpoints]
            self._placed[key] = self._simulation.place(graph, [self._places[end] for end in ends])
        return self._placed[key]

    def _pair(self, source: int, destination: int) -> int:
        if (source, destination) not in self._placed:
            graph = message_graph("send", Shape(2, 1 << 20))
            if self._workload.is_eager:
                graph = replace(graph, workers=1)  # the receiver has no part in it
            ends = [self._places[source], self._places[destination]]
            self._placed[source, destination] = self._simulation.place(graph, ends)
        return self._placed[source, destination]


def _order(workload: Workload, ranks: int) -> tuple[list[tuple[int, Node]], dict[Place, Place]]:
    """Return nodes with their ranks, each after those that it waits for, and the senders that receives wait for."""
    if not workload.is_eager or ranks < workload.ranks:
        return [(rank, node) for rank, trace in enumerate(workload.traces[:ranks]) for node in trace], {}
    sender_of = senders_of(workload)
    return [(rank, node) for (rank, _), node in order_by_messages(workload, sender_of)], sender_of


class CriticalPath(NamedTuple):
    """The chain of computations and communication that makes an iteration as long as it is.

    Attributes:
        compute_s: time of the computations in it.
        communication_s: time of the communication in it, between the last rank's begin and the end.
        communication: name -> time of each communication in it.
        memory_s: time of loads and stores of memory in it.
    """

    compute_s: float
    communication_s: float
    communication: dict[str, float]
    memory_s: float = 0.0

    def sentence(self) -> str:
        """Return it in words."""
        most = sorted(self.communication, key=lambda name: -self.communication[name])[:3]
        parts = ", ".join(f"{name} {1e3 * self.communication[name]:.3g} ms" for name in most)
        memory = f", {1e3 * self.memory_s:.4g} ms of loads and stores of memory," if self.memory_s else ""
        return (
            f"Critical path: {1e3 * self.compute_s:.4g} ms of computation{memory} and "
            f"{1e3 * self.communication_s:.4g} ms of communication{f' ({parts})' if parts else ''}"
        )


def busiest_links(topology: Topology, link_bytes: Numbers) -> str:
    """Return the bytes of all links in words: those with the most by their names, the others by their number."""
    by_size = defaultdict[str, list[str]](list)
    for link in np.argsort(-link_bytes, kind="stable"):
        by_size[format_size(round(link_bytes[link]))].append(topology.links[link])
    idle = by_size.pop(format_size(0), [])
    parts = []
    for size, links in list(by_size.items())[:_SHOWN_SIZES]:
        some = ", ".join(links[:_SHOWN_LINKS]) + ", …" * (len(links) > _SHOWN_LINKS)
        each = "each" if len(links) == len(link_bytes) else f"each of {len(links)} ({some})"
        parts.append(f"{size} on {each if len(links) > 1 else some}")
    if less := sum(map(len, list(by_size.values())[_SHOWN_SIZES:])):
        parts.append(f"less on {counted(less, 'other')}")
    if idle:
        parts.append(f"none on {counted(len(idle), 'link')}")
    return f"Bytes per iteration on {counted(len(link_bytes), 'link')}: {'; '.join(parts)}"


def critical_path(workload: Workload, simulated: SimulatedIterations) -> CriticalPath:
    """Return the critical path of the last iteration."""
    alone_s, communication = defaultdict[bool, float](float), defaultdict[str, float](float)
    for _, node, seconds in critical_nodes(workload, simulated):
        if is_communication(node):
            communication[node.name] += seconds
        else:
            alone_s[node.type == NodeType.COMP] += seconds
    return CriticalPath(alone_s[True], sum(communication.values()), dict(communication), alone_s[False])


def critical_nodes(workload: Workload, simulated: SimulatedIterations) -> Iterator[tuple[int, Node, float]]:
    """Yield the nodes of the critical path of the last iteration, from its last node back to the end of the one before.

    A collective ends when all of its ranks have begun it, so that the path goes on at the rank that was last. In a
    broadcast, for example, a rank may end before another one begins: of those that have begun, it is the last one.
    Ranks begin an iteration before others have ended the one before; this part belongs to the iteration before.

    Yields:
        The rank, the node, and the seconds that it adds to the path.
    """
    parts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    sender_of = senders_of(workload) if workload.is_eager else {}
    for collective in [*collectives_of(workload), *message_pairs(workload)]:
        places = [(rank, node.id) for rank, node in collective]
        if places[-1] not in sender_of:
            parts |= dict.fromkeys(places, places)
    spans = {(rank, span.node.id): span for rank, trace in enumerate(simulated.spans) for span in trace}
    before = {  # what a computation waited for if its processor was busy
        (unit_of(rank, span.node), span.end_s): (rank, span.node.id)
        for rank, trace in enumerate(simulated.spans)
        for span in trace
        if length_us(span.node)
    }
    place: tuple[int, int] | None = max(spans, key=lambda at: spans[at].end_s, default=None)
    while place is not None and spans[place].end_s > simulated.since_s:
        end_s = spans[place].end_s
        begun = [at for at in parts.get(place, []) if spans[at].begin_s <= end_s]
        place = max(begun, key=lambda at: spans[at].begin_s, default=place)
        node, begin_s = spans[place].node, spans[place].begin_s
        yield place[0], node, end_s - max(begin_s, simulated.since_s)
        earlier = [(place[0], dep) for dep in node.deps]
        earlier += [sender_of[place]] if place in sender_of else []
        if length_us(node) and (unit_of(place[0], node), begin_s) in before:
            earlier.append(before[unit_of(place[0], node), begin_s])
        place = max(earlier, key=lambda at: spans[at].end_s, default=None)
