"""Plans of traffic patterns: incast, all-to-all, ring all-reduce, long-lived flows and an on-off source."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from typing import Any

from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_format import MAX_INT64, Flow
from ringtap.core.units import parse_size_bytes
from ringtap.trafficgen.plans.common import OfferedLoad, PlanOutline
from ringtap.trafficgen.plans.kind import (
    DURATION,
    FROM,
    ITERATIONS,
    LOAD,
    LOAD_COUNTS,
    MTU,
    NODE,
    RATE,
    TO,
    Option,
    TrafficKind,
    needed_load,
    offered_load,
)
from ringtap.trafficgen.plans.kind import duration_ns as read_ns
from ringtap.trafficgen.plans.sampling import again, exponentials, shares_of, stream
from ringtap.trafficgen.protocol import parse_address

_MAX_PAIRS = 100_000


class RoundsPlan:
    """Rounds of flows: in each round, every pair of a list gets one flow, and all start at the same instant.

    Args:
        kind: the plan's kind in the header: ``incast`` or ``all-to-all``.
        frame: duration, destinations and so on.
        pairs: (source, destination) of a round's flows.
        period_ns: time from one round to the next.
        demand: size of each flow in bytes, or the load, whose bytes per round are divided into equal flows.
        about: further header keys.

    Attributes:
        header: the plan's first line.

    Raises:
        UsageError: the requested plan is inconsistent or cannot be made exact.
    """

    def __init__(
        self,
        kind: str,
        frame: PlanOutline,
        pairs: Sequence[tuple[str, str]],
        period_ns: int,
        demand: int | OfferedLoad,
        about: dict[str, Any],
    ) -> None:
        frame.check()
        if not 1 <= len(pairs) <= _MAX_PAIRS:
            raise UsageError(f"a round of {len(pairs)} flows is not usable: it must have from 1 to {_MAX_PAIRS}")
        if period_ns < 1:
            raise UsageError("--period must be above 0")
        self._frame, self._pairs, self._period_ns = frame, pairs, period_ns
        rounds = -(-frame.duration_ns // period_ns)
        more: dict[str, Any] = {"period_ns": period_ns} | about
        if isinstance(demand, OfferedLoad):
            demand.check()
            self._load = OfferedLoad(demand.bps, demand.counts, demand.mtu, frame.ipv6())
            total = self._load.bytes_until(frame.duration_ns)
            more = self._load.header() | more
        elif demand < 1:
            raise UsageError("--size must be 1 byte or more")
        else:
            total = demand * rounds * len(pairs)
            more |= {"size_bytes": demand}
        self._demand = demand
        self.header = frame.header(kind, rounds * len(pairs), total, **more)
        for number in {0, rounds - 1}:
            if self._budget(number) < len(pairs):
                raise UsageError(
                    f"the load leaves {self._budget(number)} bytes for the {len(pairs)} flows of round {number}: ask "
                    "for more load, a longer --period, or a --duration of whole periods"
                )

    def flows(self) -> Iterator[Flow]:
        """Yield the flows in order of their starts."""
        count = len(self._pairs)
        for number, start_ns in enumerate(range(0, self._frame.duration_ns, self._period_ns)):
            budget = self._budget(number)
            for index, (source, destination) in enumerate(self._pairs):
                size_bytes = budget * (index + 1) // count - budget * index // count
                yield Flow(start_ns, source, destination, size_bytes)

    def _budget(self, number: int) -> int:
        """Return the bytes of a round; a last round that is cut short gets its share of the load."""
        if not isinstance(self._demand, OfferedLoad):
            return self._demand * len(self._pairs)
        start_ns, until = number * self._period_ns, self._load.bytes_until
        return until(min(start_ns + self._period_ns, self._frame.duration_ns)) - until(start_ns)


class RingPlan:
    """Ring all-reduce in 2(N-1) steps: in each, every node sends the next one the chunk that it has just received.

    Each chunk waits until the node has received the chunk of the previous step; the first chunk of an iteration waits
    for the last one of the previous iteration and then for the compute time.

    Args:
        frame: duration, and the nodes as sources and destinations.
        nodes: ``host:port`` of the nodes in the ring's order; each one also sends from its host.
        size_bytes: size of the reduced data; it is divided into one chunk per node.
        compute_ns: time from an iteration's last chunk to the next iteration's first.
        iterations: number of iterations.

    Attributes:
        header: the plan's first line.

    Raises:
        UsageError: the requested plan is inconsistent.
    """

    def __init__(
        self, frame: PlanOutline, nodes: Sequence[str], size_bytes: int, compute_ns: int, iterations: int
    ) -> None:
        frame.check()
        count = len(nodes)
        if count < 2:
            raise UsageError("a ring needs two nodes or more: give --node ADDRESS:PORT for each, in order")
        if size_bytes < count:
            raise UsageError(f"{size_bytes} bytes do not make a chunk for each of {count} nodes: ask for more --bytes")
        if compute_ns < 0 or iterations < 1:
            raise UsageError("--iterations must be 1 or more and --compute 0 or more")
        if (iterations - 1) * compute_ns >= frame.duration_ns:
            raise UsageError(
                f"{iterations} iterations compute for longer than the duration: ask for fewer or a longer --duration"
            )
        self._iterations, self._compute_ns = iterations, compute_ns
        self._hosts, self._nodes = [parse_address(node)[0] for node in nodes], list(nodes)
        self._chunks = [size_bytes * (part + 1) // count - size_bytes * part // count for part in range(count)]
        steps = 2 * (count - 1)
        about = {"nodes": list(nodes), "size_bytes": size_bytes, "compute_ns": compute_ns, "iterations": iterations}
        # A step moves every chunk once
        total = iterations * steps * size_bytes
        if total > MAX_INT64:
            raise UsageError(f"a plan of {total} bytes is too large: at most {MAX_INT64}")
        self.header = frame.header("ring", iterations * steps * count, total, **about)

    def flows(self) -> Iterator[Flow]:
        """Yield the flows; their starts are the earliest possible ones, on a network without delay."""
        count = len(self._nodes)
        steps = 2 * (count - 1)
        for row in range(self._iterations * steps):
            iteration, step = divmod(row, steps)
            delay_ns = self._compute_ns if step == 0 and iteration else 0
            for node in range(count):
                # The flow that brought this chunk: one step earlier, from the left neighbour
                after = (((row - 1) * count + (node - 1) % count, delay_ns),) if row else ()
                source, destination = self._hosts[node], self._nodes[(node + 1) % count]
                size_bytes = self._chunks[(node - step) % count]
                yield Flow(iteration * self._compute_ns, source, destination, size_bytes, after)


_MAX_FLOWS = 100_000
# Mean of the integer weights of on times: large, so that rounding does not change their shares
_UNITS = 2.0**32


class LongLivedPlan:
    """Flows that all start at once and send until the plan's end; destinations and sources are used in turn.

    Args:
        frame: duration, destinations and so on.
        count: number of flows.
        load: total load, of which each flow is paced to an equal part; None: as much as the network allows.

    Attributes:
        header: the plan's first line.

    Raises:
        UsageError: the requested plan is inconsistent.
    """

    def __init__(self, frame: PlanOutline, count: int, load: OfferedLoad | None = None) -> None:
        frame.check()
        if not 1 <= count <= _MAX_FLOWS:
            raise UsageError(f"--flows {count} is not usable: it must be from 1 to {_MAX_FLOWS}")
        more: dict[str, Any] = {}
        if load is not None:
            frame, _, more = paced(frame, load, Fraction(1, count))
        self._frame, self._count = frame, count
        self.header = frame.header("long-lived", count, 0, **more)

    def flows(self) -> Iterator[Flow]:
        """Yield the flows in order of their starts."""
        to, by = self._frame.destinations, self._frame.sources or ("",)
        for number in range(self._count):
            yield Flow(0, by[number % len(by)], to[number % len(to)], 0)


class OnOffPlan:
    """A source that alternates between on and off for exponential times; an on period is one flow, paced at the peak.

    On times are scaled to their share of the duration and off times to the rest, so the load is exact and the peak
    rate is load x (on + off) / on.

    Args:
        frame: duration, destinations and so on.
        load: mean load over the duration.
        on_ns: mean on time.
        off_ns: mean off time.

    Attributes:
        header: the plan's first line.

    Raises:
        UsageError: the requested plan is inconsistent or cannot be made exact.
    """

    def __init__(self, frame: PlanOutline, load: OfferedLoad, on_ns: int, off_ns: int) -> None:
        frame.check()
        if on_ns < 1 or off_ns < 1:
            raise UsageError("--on and --off must be above 0")
        frame, load, more = paced(frame, load, Fraction(on_ns + off_ns, on_ns))
        self._frame = frame
        self._on_ns = frame.duration_ns * on_ns // (on_ns + off_ns)
        self._count = max(1, round(Fraction(frame.duration_ns, on_ns + off_ns)))
        self._bytes = load.bytes_until(frame.duration_ns)
        if self._bytes < self._count or self._on_ns < 1:
            raise UsageError(
                f"a load of {load.bps:.0f} bit/s leaves {self._bytes} bytes for {self._count} on periods: ask for more "
                "load or longer times"
            )
        more |= {"on_ns": on_ns, "off_ns": off_ns}
        self.header = frame.header("on-off", self._count, self._bytes, **more)

    def flows(self) -> Iterator[Flow]:
        """Yield the flows in order of their starts."""
        seed, frame, count = self._frame.seed, self._frame, self._count
        sizes, gaps = stream(seed, "sizes"), stream(seed, "gaps")
        draw_to, draw_from = stream(seed, "destinations").random, stream(seed, "sources").random
        to, by = list(frame.destinations), list(frame.sources) or [""]
        on_first = gaps.random() < self._on_ns / frame.duration_ns
        off_before = chain([0] if on_first else [], _fitted(gaps, count, frame.duration_ns - self._on_ns))
        draw, sent = exponentials(sizes), 0
        for size_bytes in shares_of(sizes, lambda: draw() * _UNITS, count, self._bytes):
            # The share of the bytes sent before equals the share of the on time passed before
            start_ns = next(off_before) + self._on_ns * sent // self._bytes
            sent += size_bytes
            yield Flow(start_ns, by[int(draw_from() * len(by))], to[int(draw_to() * len(to))], size_bytes)


def paced(frame: PlanOutline, load: OfferedLoad, factor: Fraction) -> tuple[PlanOutline, OfferedLoad, dict[str, Any]]:
    """Return the frame with each flow paced to ``factor`` of the load, the load with its IP version, and header keys.

    Raises:
        UsageError: the load is not usable, or the frame has a pacing rate of its own.
    """
    load.check()
    if "pacing_bps" in frame.transport:
        raise UsageError("--pacing does not go with --load here: each flow is paced to its part of the load")
    load = replace(load, ipv6=frame.ipv6())
    pacing_bps = max(1, round(load.payload_bps() * factor))
    return replace(frame, transport={**frame.transport, "pacing_bps": pacing_bps}), load, load.header()


def _fitted(rng: random.Random, count: int, total_ns: int) -> Iterator[int]:
    """Yield the ends of ``count`` consecutive exponential times, scaled so that the last is at ``total_ns``."""
    times = again(rng, exponentials(rng), count)
    # fsum: the built-in sum rounds differently from Python 3.12 on
    drawn, passed = math.fsum(times()), 0.0
    for time in times():
        passed += time
        yield min(total_ns, int(total_ns * (passed / drawn)))


_LONG_LIVED_FLOWS, _INCAST_FLOWS = 1, 8
_ON_NS = _OFF_NS = _PERIOD_NS = 10_000_000


def _long_lived(given: dict[str, Any], frame: PlanOutline) -> LongLivedPlan:
    return LongLivedPlan(frame, given.get("flows", _LONG_LIVED_FLOWS), offered_load(given))


def _on_off(given: dict[str, Any], frame: PlanOutline) -> OnOffPlan:
    return OnOffPlan(frame, needed_load(given), given.get("on", _ON_NS), given.get("off", _OFF_NS))


def _incast(given: dict[str, Any], frame: PlanOutline) -> RoundsPlan:
    if len(frame.destinations) != 1:
        raise UsageError("incast goes to one destination: give --to once")
    if "flows" in given and "from" in given:
        raise UsageError("incast has a flow for each --from, or --flows unbound ones: give one of the two")
    sources = given.get("from") or [""] * _bounded(given.get("flows", _INCAST_FLOWS))
    pairs = [(source, frame.destinations[0]) for source in sources]
    return RoundsPlan("incast", frame, pairs, given.get("period", _PERIOD_NS), _demand(given), {})


def _all_to_all(given: dict[str, Any], frame: PlanOutline) -> RoundsPlan:
    nodes, hosts = given["node"], [parse_address(node)[0] for node in given["node"]]
    count = len(nodes)
    if count < 2:
        raise UsageError("all-to-all needs two nodes or more: give --node ADDRESS:PORT for each")
    # In shifted order, so that no receiver comes first for every sender
    pairs = [(hosts[node], nodes[(node + shift) % count]) for shift in range(1, count) for node in range(count)]
    period_ns = given.get("period", _PERIOD_NS)
    return RoundsPlan("all-to-all", frame, pairs, period_ns, _demand(given), {"nodes": list(nodes)})


def _demand(given: dict[str, Any]) -> int | OfferedLoad:
    load = offered_load(given)
    if (load is None) == ("size" not in given):
        raise UsageError("give --load for all flows together, or --size for each one")
    return load if load is not None else int(given["size"])


def _bounded(count: int) -> int:
    if not 1 <= count <= _MAX_FLOWS:
        raise UsageError(f"--flows {count} is not usable: it must be from 1 to {_MAX_FLOWS}")
    return count


def _ring(given: dict[str, Any], frame: PlanOutline) -> RingPlan:
    return RingPlan(frame, given["node"], given["bytes"], given.get("compute", 0), given["iterations"])


_FLOWS = Option("flows", "N", "long-lived, incast: how many at once (default 1 and 8)", int)
_PERIOD = Option("period", "TIME", "incast, all-to-all: from round to round (default 10ms)", read_ns)
_SIZE = Option("size", "SIZE", "incast, all-to-all: of each flow, instead of --load", parse_size_bytes)
LONG_LIVED = TrafficKind("long-lived", _long_lived, (DURATION,), (*RATE, TO, FROM, _FLOWS))
ON_OFF = TrafficKind(
    "on-off",
    _on_off,
    (LOAD, DURATION),
    (
        *(LOAD_COUNTS, MTU, TO, FROM),
        Option("on", "TIME", "on-off: mean of the on times (default 10ms)", read_ns),
        Option("off", "TIME", "on-off: mean of the off times (default 10ms)", read_ns),
    ),
)
INCAST = TrafficKind("incast", _incast, (DURATION,), (*RATE, TO, FROM, _FLOWS, _PERIOD, _SIZE))
ALL_TO_ALL = TrafficKind("all-to-all", _all_to_all, (DURATION, NODE), (*RATE, _PERIOD, _SIZE))
RING = TrafficKind(
    "ring",
    _ring,
    (
        *(DURATION, NODE),
        Option("bytes", "SIZE", "ring: what each iteration reduces", parse_size_bytes),
        ITERATIONS,
    ),
    (Option("compute", "TIME", "ring: from an iteration's last chunk to the next one's first (default 0s)", read_ns),),
)
