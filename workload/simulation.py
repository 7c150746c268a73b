"""Simulates flow by flow what ranks compute and send: max-min fair shares of links, event by event."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ringtap.core.errors import UsageError
from ringtap.workload import simulation_kernel as kernel
from ringtap.workload.message_graph import Integers, MessageGraph, starts_of
from ringtap.workload.topologies import Topology

Numbers = npt.NDArray[np.float64]
MAX_BYTES = 2**32  # of arrays that grow during a simulation
# numba takes half a second and 130 MB to load; without it, what happens to a message takes 15 to 30 us
MAX_INTERPRETED = 25_000  # of all simulations of a process
_work = 0.0


@dataclass(frozen=True)
class CrossFlows:
    """Flows of cross traffic, in order of their begins; all arrays have the shape (flows,).

    Attributes:
        source: host that sends each flow.
        destination: host that receives it.
        size_bytes: its bytes.
        begin_s: time at which it begins, the earliest one if it waits for another.
        after: number of an earlier flow for which it waits; -1: none.
        delay_s: time from the end of that flow to its begin.
    """

    source: Integers
    destination: Integers
    size_bytes: Numbers
    begin_s: Numbers
    after: Integers
    delay_s: Numbers


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation.

    Attributes:
        begin_s: time at which each node begins, shape (nodes,); -1: never.
        end_s: time at which it ends.
        link_bytes: bytes through each link, shape (links,).
        messages: number of messages.
        cross_begin_s: time at which each flow of cross traffic begins, shape (flows,).
        cross_end_s: time at which it ends.
    """

    begin_s: Numbers
    end_s: Numbers
    link_bytes: Numbers
    messages: int
    cross_begin_s: Numbers
    cross_end_s: Numbers


class Simulation:
    """Nodes of ranks, each a computation or a part in a collective, on a topology.

    Args:
        topology: hosts and links.
        latency_s: time that each message takes beside its transmission.
        rate_share: part of each link's rate that is left for these messages, one number or shape (links,).
        cross: flows of cross traffic; None: there are none.
    """

    def __init__(
        self,
        topology: Topology,
        latency_s: float = 0.0,
        rate_share: float | Numbers = 1.0,
        cross: CrossFlows | None = None,
    ) -> None:
        self.topology, self._latency_s = topology, latency_s
        none, no = np.empty(0, np.int64), np.empty(0)
        self._cross = CrossFlows(none, none, no, no, none, no) if cross is None else cross
        self._rate = np.asarray(topology.rate_bps) / 8 * rate_share
        self._graphs: list[tuple[MessageGraph, Integers]] = []
        self._instances: list[tuple[int, float]] = []
        self._nodes: list[tuple[int, float, int, int]] = []
        self._units: list[tuple[int, int]] = []
        self._before: list[Integers] = []

    def place(self, graph: MessageGraph, hosts: npt.ArrayLike) -> int:
        """Add a message graph whose endpoints are at hosts, shape (endpoints,), and return its number."""
        self._graphs.append((graph, np.asarray(hosts, np.int64)))
        return len(self._graphs) - 1

    def compute(self, seconds: float, after: npt.ArrayLike = (), unit: int = kernel.NONE, order: int = 0) -> int:
        """Add a computation that begins after other nodes, and return its number.

        Args:
            seconds: its time.
            after: the nodes that it waits for.
            unit: number of what computes, one at a time; -1: it waits for nothing else. What takes no time needs none.
            order: of the computations of a unit that are ready, that with the lowest one begins.
        """
        return self._add(kernel.COMPUTE, seconds, -1, -1, after, (unit if seconds > 0 else kernel.NONE, order))

    def collective(self, placed: int, size_bytes: float) -> int:
        """Add a collective of some bytes, by the number of its message graph, and return its own number."""
        self._instances.append((placed, size_bytes))
        return len(self._instances) - 1

    def part(self, collective: int, worker: int, after: npt.ArrayLike = ()) -> int:
        """Add the part of a worker in a collective, which begins after other nodes, and return its number.

        Every worker of a collective needs its part.
        """
        return self._add(kernel.COLLECTIVE, 0.0, collective, worker, after)

    def _add(
        self, kind: int, seconds: float, instance: int, local: int, after: npt.ArrayLike,
        unit: tuple[int, int] = (kernel.NONE, 0),
    ) -> int:  # fmt: skip
        self._nodes.append((kind, seconds, instance, local))
        self._units.append(unit)
        self._before.append(np.atleast_1d(np.asarray(after, np.int64)))
        return len(self._nodes) - 1

    def run(self) -> Simulated:
        """Simulate until nothing more happens.

        Raises:
            UsageError: too much happens at a time.
        """
        state = self._state()
        ready = np.flatnonzero(state.nodes.waits == 0)
        state.queue.ready[: len(ready)] = ready
        counters = state.queue.counters
        counters[kernel.READY], counters[kernel.SPARE_FLOWS] = len(ready), len(state.flows.free)
        if (first := np.flatnonzero(self._cross.after < 0)[:1]).size:
            state.queue.times[0], state.queue.codes[0] = self._cross.begin_s[first[0]], kernel.cross_code(first[0])
            counters[kernel.EVENTS] = 1
        advance = _loop_for(self._work())
        with np.errstate(all="ignore"):  # as in machine code
            while needs := advance(*state):
                state = _grown(state, needs)
        return Simulated(
            state.nodes.begin_s, state.nodes.end_s, state.routes.link_bytes, int(counters[kernel.MESSAGES]),
            state.cross.begin_s, state.cross.end_s,
        )  # fmt: skip

    def _work(self) -> float:
        """Return about how often something happens, and how many messages at once that concerns."""
        waits = {placed: np.diff(graph.after_start) for placed, (graph, _) in enumerate(self._graphs)}
        messages = sum(len(waits[placed]) for placed, _ in self._instances)
        # where many begin at once, each end of one changes the rates of the others
        at_once = sum(int((waits[placed] == 0).sum()) ** 2 for placed, _ in self._instances)
        return len(self._nodes) + messages + at_once / 4 + 10 * len(self._cross.begin_s)

    def _state(self) -> kernel.State:
        pairs: dict[tuple[int, int], int] = {}
        graphs, cross = self._placed(pairs), self._crossing(pairs)
        paths = [self.topology.path(a, b) if a != b else () for a, b in pairs]
        routes = kernel.RouteArrays(
            pair_start=starts_of(np.array([len(path) for path in paths], np.int64)),
            pair_links=np.array([link for path in paths for link in path], np.int64),
            pair_s=np.full(len(paths), float(self._latency_s)),
            link_rate=self._rate,
            link_bytes=np.zeros(len(self._rate)),
        )
        instances = kernel.InstanceArrays(
            graph=np.array([graph for graph, _ in self._instances], np.int64),
            size_bytes=np.array([size for _, size in self._instances], float),
            slot=np.full(len(self._instances), kernel.NONE),
        )
        hops = max((len(path) for path in paths), default=0)
        return kernel.State(
            self._ranks(), self._computing(), instances, graphs, cross, routes, self._slots(), _flows(hops),
            self._links(), self._queue(),
        )  # fmt: skip

    def _ranks(self) -> kernel.NodeArrays:
        count = len(self._nodes)
        kinds, seconds, instances, locals_ = list(zip(*self._nodes, strict=True)) or [(), (), (), ()]
        waits = np.array([len(each) for each in self._before], np.int64)
        befores = np.concatenate([*self._before, np.empty(0, np.int64)])
        next_start, following = _grouped(befores, np.repeat(np.arange(count), waits), count)
        return kernel.NodeArrays(
            kind=np.array(kinds, np.int64),
            seconds=np.array(seconds, float),
            instance=np.array(instances, np.int64),
            local=np.array(locals_, np.int64),
            waits=waits,
            next_start=next_start,
            next=following,
            begin_s=np.full(count, -1.0),
            end_s=np.full(count, -1.0),
        )

    def _computing(self) -> kernel.UnitArrays:
        """Return the units: the nodes of each one in their order, and room for those that wait for it."""
        unit = np.array([unit for unit, _ in self._units], np.int64)
        order = np.array([order for _, order in self._units], np.uint64)
        units, place = int(unit.max(initial=kernel.NONE)) + 1, np.full(len(unit), kernel.NONE)
        nodes = np.lexsort((order, unit))[np.count_nonzero(unit == kernel.NONE) :]
        place[nodes] = np.arange(len(nodes))
        return kernel.UnitArrays(
            of_node=unit,
            place=place,
            nodes=nodes,
            start=starts_of(np.bincount(unit[nodes], minlength=units)),
            waiting=np.zeros(len(nodes), np.int64),
            waiting_count=np.zeros(units, np.int64),
            runs=np.zeros(units, np.bool_),
            is_called=np.zeros(units, np.bool_),
            called=np.zeros(units, np.int64),
        )

    def _placed(self, pairs: dict[tuple[int, int], int]) -> kernel.GraphArrays:
        """Return the message graphs, and add their pairs of hosts."""
        parts = defaultdict[str, list[Any]](lambda: [np.empty(0, np.int32)])
        sizes, free, workers, endpoints = [0], [], [], [0]
        for graph, hosts in self._graphs:
            count = len(graph)
            numbers = self._numbered(pairs, hosts[graph.source], hosts[graph.destination])
            # a message needs both of its ends to take part: data are sent when the receiver is ready for them
            waits = np.diff(graph.after_start) + (graph.source < graph.workers) + (graph.destination < graph.workers)
            reply_start, reply = _grouped(graph.after, np.repeat(np.arange(count), np.diff(graph.after_start)), count)
            ends_of, numbers_of = np.concatenate([graph.source, graph.destination]), np.tile(np.arange(count), 2)
            local_starts, by_local = _grouped(ends_of, numbers_of, graph.endpoints)
            parts["share"].append(graph.size_bytes / max(int(graph.chunk_bytes.sum()), 1))
            for name, values in (
                ("pair", numbers), ("source", graph.source), ("destination", graph.destination), ("waits", waits),
                ("reply", reply), ("replies", np.diff(reply_start)), ("by_local", by_local),
                ("ends", np.diff(local_starts)),
            ):  # fmt: skip
                parts[name].append(values.astype(np.int32))
            sizes.append(sizes[-1] + count)
            endpoints.append(endpoints[-1] + graph.endpoints)
            free.append(int((waits == 0).sum()))
            workers.append(graph.workers)
        joined = defaultdict[str, Any](lambda: np.empty(0, np.int32))
        for name in list(parts):
            joined[name] = np.concatenate(parts.pop(name))
        return kernel.GraphArrays(
            start=np.array(sizes),
            free=np.array(free, np.int64),
            workers=np.array(workers, np.int64),
            local_start=np.array(endpoints),
            share=joined["share"].astype(np.float64),
            pair=joined["pair"],
            source=joined["source"],
            destination=joined["destination"],
            waits=joined["waits"],
            reply_start=starts_of(joined["replies"]),
            reply=joined["reply"],
            by_local_start=starts_of(joined["ends"]),
            by_local=joined["by_local"],
            local_messages=joined["ends"],
        )

    def _crossing(self, pairs: dict[tuple[int, int], int]) -> kernel.CrossArrays:
        """Return the flows of cross traffic, and add their pairs of hosts."""
        cross, count = self._cross, len(self._cross.begin_s)
        alone, waiting = np.flatnonzero(cross.after < 0), np.flatnonzero(cross.after >= 0)
        following = np.full(count, kernel.NONE)
        following[alone[:-1]] = alone[1:]
        start, order = _grouped(cross.after[waiting], waiting, count)
        return kernel.CrossArrays(
            pair=self._numbered(pairs, cross.source, cross.destination),
            size_bytes=cross.size_bytes,
            begin_s=cross.begin_s.copy(),
            next=following,
            end_s=np.full(count, -1.0),
            waiting_start=start,
            waiting=order,
            # what waits for a flow has its last byte after the latency
            waiting_s=cross.delay_s[order] + self._latency_s,
        )

    def _numbered(self, pairs: dict[tuple[int, int], int], source: Integers, destination: Integers) -> Integers:
        """Return the number of each pair of hosts; new pairs are added."""
        keys, which = np.unique(source * self.topology.hosts + destination, return_inverse=True)
        numbers = [pairs.setdefault(divmod(int(key), self.topology.hosts), len(pairs)) for key in keys]
        found: Integers = np.array(numbers, np.int64)[which.ravel()]
        return found

    def _slots(self) -> kernel.SlotArrays:
        slots = 4
        messages = max([len(graph) for graph, _ in self._graphs], default=1) or 1
        locals_ = max([graph.endpoints for graph, _ in self._graphs], default=1)
        return kernel.SlotArrays(
            remaining=np.zeros((slots, messages), np.int32),
            local_left=np.zeros((slots, locals_), np.int64),
            local_node=np.full((slots, locals_), kernel.NONE),
            instance=np.full(slots, kernel.NONE),
            open=np.zeros(slots, np.int64),
        )

    def _links(self) -> kernel.LinkArrays:
        links = len(self._rate)
        return kernel.LinkArrays(
            head=np.full(links, kernel.NONE),
            flows=np.zeros(links, np.int64),
            mark=np.zeros(links, np.int64),
            is_dirty=np.zeros(links, np.bool_),
            dirty=np.zeros(links, np.int64),
            part=np.zeros(links, np.int64),
            capacity=np.zeros(links),
            sharing=np.zeros(links, np.int64),
        )

    def _queue(self) -> kernel.EventArrays:
        length = 1024
        return kernel.EventArrays(
            times=np.zeros(length),
            codes=np.zeros(length, np.int64),
            ready=np.zeros(max(len(self._nodes), 1), np.int64),
            starts_slot=np.zeros(length, np.int64),
            starts_message=np.zeros(length, np.int64),
            arrived_slot=np.zeros(length, np.int64),
            arrived_message=np.zeros(length, np.int64),
            counters=np.zeros(kernel.COUNTERS, np.int64),
            clock=np.zeros(1),
        )


def _flows(hops: int) -> kernel.FlowArrays:
    """Return room for flows over at most some hops."""
    flows, bits = 256, max(hops - 1, 0).bit_length()
    left, rate, since = np.zeros((3, flows))
    version, owner, place, via, mark, part = np.zeros((6, flows), np.int64)
    after, before = np.full((2, flows << bits), kernel.NONE)
    return kernel.FlowArrays(
        left, rate, since, version, owner, place, via, mark, part,
        free=np.arange(flows - 1, -1, -1), after=after, before=before, hop_bits=bits,
    )  # fmt: skip


def _loop_for(work: float) -> kernel.Loop:
    """Return the event loop: in Python until all work of this process takes longer than to load machine code."""
    global _work
    _work += work
    return kernel.advance if _work <= MAX_INTERPRETED else kernel.compiled()


# what is full -> its group, and the arrays of it that grow
_GROWING = {
    kernel.EVENTS: ("queue", ("times", "codes")),
    kernel.STARTS: ("queue", ("starts_slot", "starts_message")),
    kernel.ARRIVED: ("queue", ("arrived_slot", "arrived_message")),
    kernel.SLOTS: ("slots", ("remaining", "local_left", "local_node", "instance", "open")),
    kernel.SPARE_FLOWS: (
        "flows",
        ("left", "rate", "since", "version", "owner", "place", "via", "mark", "part", "after", "before"),
    ),
}


def _grown(state: kernel.State, needs: int) -> kernel.State:
    """Return a state whose full arrays have twice the length."""
    group, names = _GROWING[needs]
    full = getattr(state, group)
    if sum(getattr(full, name).nbytes for name in names) > MAX_BYTES:
        what, length = ("collectives", state.slots.instance) if group == "slots" else ("messages", state.flows.left)
        raise UsageError(
            f"more than {len(length):,} {what} are under way at once, for which there is no room: simulate a "
            "lower load or fewer ranks"
        )
    if needs == kernel.SPARE_FLOWS:
        flows = len(full.left)
        full = full._replace(free=np.concatenate([np.arange(2 * flows - 1, flows - 1, -1), np.empty(flows, np.int64)]))
        state.queue.counters[kernel.SPARE_FLOWS] = flows
    for name in names:
        array = getattr(full, name)
        empty = kernel.NONE if name == "instance" else 0
        full = full._replace(**{name: np.concatenate([array, np.full_like(array, empty)])})
    return state._replace(**{group: full})


def _grouped(keys: npt.NDArray[Any], values: Integers, groups: int) -> tuple[Integers, Integers]:
    """Return values by their keys: the place at which each group begins, shape (groups + 1,), and the values."""
    return starts_of(np.bincount(keys, minlength=groups)), values[np.argsort(keys, kind="stable")]
