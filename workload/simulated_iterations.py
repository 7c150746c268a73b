"""Simulation of the iterations of a workload on a topology, and the critical path of an iteration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ringtap.errors import UsageError
from ringtap.units import counted, format_size
from ringtap.workload.collectives import Shape, message_graph
from ringtap.workload.execution_trace import Collective, Node, NodeType
from ringtap.workload.lowering import Algorithms, data_bytes
from ringtap.workload.simulation import CrossFlows, Numbers, Simulation
from ringtap.workload.topologies import Topology
from ringtap.workload.workload import (
    Place,
    Workload,
    collectives_of,
    kind_of,
    messages_of,
    order_by_messages,
    senders_of,
    size_of,
)


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
        link_bytes: bytes of the workload through each link in an iteration, shape (links,).
        cross_begin_s: time at which each flow of cross traffic begins, shape (flows,).
        cross_end_s: time at which it ends.
    """

    end_s: Numbers
    spans: list[list[Span]]
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
    simulation = Simulation(topology, latency_s, rate_share, cross)
    placed: dict[tuple[object, ...], int] = {}
    sends, receives = messages_of(workload)
    pairs = [(key, i) for key, each in sends.items() for i in range(len(each))]
    collectives = [(key, parts) for key, every in collectives_of(workload).items() for parts in every]

    def placed_graph(kind: Collective, members: tuple[int, ...]) -> int:
        if (kind, members) not in placed:
            graph = algorithms.graph(kind, len(members), len(members) << 20)
            ends = [*members, *range(workload.ranks, endpoints)][: graph.endpoints]
            placed[kind, members] = simulation.place(graph, [places[end] for end in ends])
        return placed[kind, members]

    def placed_pair(source: int, destination: int) -> int:
        if (source, destination) not in placed:
            graph = message_graph("send", Shape(2, 1 << 20))
            if workload.is_eager:
                graph = replace(graph, workers=1)  # the receiver has no part in it
            placed[source, destination] = simulation.place(graph, [places[source], places[destination]])
        return placed[source, destination]

    ends: list[int] = []
    last: list[list[int]] = [[] for _ in range(workload.ranks)]
    order, sender_of = _order(workload)
    numbers: list[dict[int, int]] = [{} for _ in range(workload.ranks)]
    for _ in range(iterations):
        role: dict[tuple[int, int], tuple[int, int]] = {}  # rank, node id -> instance, worker
        for (_, members), parts in collectives:
            node = parts[0][1]
            if len(members) < 2:
                continue
            instance = simulation.collective(placed_graph(kind_of(node), members), data_bytes(node, len(members)))
            role |= {(rank, each.id): (instance, worker) for worker, (rank, each) in enumerate(parts)}
        for (source, destination, tag), i in pairs:
            sender, receiver = sends[source, destination, tag][i][1], receives[source, destination, tag][i][1]
            instance = simulation.collective(placed_pair(source, destination), size_of(sender))
            parts_of = [(source, sender.id), (destination, receiver.id)][: 2 - workload.is_eager]
            role |= {place: (instance, worker) for worker, place in enumerate(parts_of)}
        numbers = [{} for _ in range(workload.ranks)]
        for rank, each in order:
            after = [numbers[rank][dep] for dep in each.deps] or last[rank]
            if sent_by := sender_of.get((rank, each.id)):
                after = [*after, numbers[sent_by[0]][sent_by[1]]]
            if (rank, each.id) in role:
                numbers[rank][each.id] = simulation.part(*role[rank, each.id], after)
            else:
                numbers[rank][each.id] = simulation.compute(each.duration_us / 1e6, after)
        last = [[simulation.compute(0.0, list(own.values()) or last[rank])] for rank, own in enumerate(numbers)]
        ends += [end for (end,) in last]
    result = simulation.run()
    found = result.end_s[ends]
    if (found < 0).any():
        raise UsageError(
            f"rank {np.argmax(found < 0) % workload.ranks} waits for ever: ranks wait for each other's messages in "
            "different orders"
        )
    spans = [
        [Span(node, float(result.begin_s[at[node.id]]), float(result.end_s[at[node.id]])) for node in trace]
        for trace, at in zip(workload.traces, numbers, strict=True)
    ]
    return SimulatedIterations(
        found.reshape(iterations, workload.ranks), spans, result.link_bytes / iterations, result.cross_begin_s,
        result.cross_end_s,
    )  # fmt: skip


def _order(workload: Workload) -> tuple[list[tuple[int, Node]], dict[Place, Place]]:
    """Return all nodes with their ranks, each after those that it waits for, and the senders that receives wait for."""
    if not workload.is_eager:
        return [(rank, node) for rank, trace in enumerate(workload.traces) for node in trace], {}
    sender_of = senders_of(workload)
    return [(rank, node) for (rank, _), node in order_by_messages(workload, sender_of)], sender_of


class CriticalPath(NamedTuple):
    """The chain of computations and communication that makes an iteration as long as it is.

    Attributes:
        compute_s: time of the computations in it.
        communication_s: time of the communication in it, between the last rank's begin and the end.
        communication: name -> time of each communication in it.
    """

    compute_s: float
    communication_s: float
    communication: dict[str, float]

    def sentence(self) -> str:
        """Return it in words."""
        most = sorted(self.communication, key=lambda name: -self.communication[name])[:3]
        parts = ", ".join(f"{name} {1e3 * self.communication[name]:.3g} ms" for name in most)
        return (
            f"Critical path: {1e3 * self.compute_s:.4g} ms of computation and {1e3 * self.communication_s:.4g} ms of "
            f"communication{f' ({parts})' if parts else ''}"
        )


def busiest_links(topology: Topology, link_bytes: Numbers, count: int = 5) -> str:
    """Return the links with the most bytes in words, and the links that carry none if there are any."""
    order = [link for link in np.argsort(-link_bytes, kind="stable")[:count] if link_bytes[link]]
    parts = ", ".join(f"{topology.links[link]} {format_size(round(link_bytes[link]))}" for link in order)
    idle = int((link_bytes == 0).sum())
    return f"Bytes per link: {parts or 'none'}" + (f"; {counted(idle, 'link')} without any" if idle and parts else "")


def critical_path(workload: Workload, simulated: SimulatedIterations) -> CriticalPath:
    """Return the critical path of the last iteration."""
    compute_s, communication = 0.0, defaultdict[str, float](float)
    for _, node, seconds in critical_nodes(workload, simulated):
        if node.type == NodeType.COMP:
            compute_s += seconds
        else:
            communication[node.name] += seconds
    return CriticalPath(compute_s, sum(communication.values()), dict(communication))


def critical_nodes(workload: Workload, simulated: SimulatedIterations) -> Iterator[tuple[int, Node, float]]:
    """Yield the nodes of the critical path of the last iteration, from its last node back to the first.

    A collective ends when all of its ranks have begun it, so that the path goes on at the rank that was last.

    Yields:
        The rank, the node, and the seconds that it adds to the path.
    """
    parts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for every in collectives_of(workload).values():
        for collective in every:
            places = [(rank, node.id) for rank, node in collective]
            parts |= dict.fromkeys(places, places)
    sends, receives = messages_of(workload)
    sender_of = senders_of(workload) if workload.is_eager else {}
    for key, sent in sends.items():
        for (source, one), (destination, other) in zip(sent, receives[key], strict=True):
            places = [(source, one.id), (destination, other.id)]
            if places[1] not in sender_of:
                parts |= dict.fromkeys(places, places)
    spans = {(rank, span.node.id): span for rank, trace in enumerate(simulated.spans) for span in trace}
    place: tuple[int, int] | None = max(spans, key=lambda at: spans[at].end_s, default=None)
    while place is not None:
        span = spans[place]
        if span.node.type != NodeType.COMP:
            place = max(parts.get(place, [place]), key=lambda at: spans[at].begin_s)
        yield place[0], spans[place].node, span.end_s - spans[place].begin_s
        earlier = [(place[0], dep) for dep in spans[place].node.deps]
        earlier += [sender_of[place]] if place in sender_of else []
        place = max(earlier, key=lambda at: spans[at].end_s, default=None)
