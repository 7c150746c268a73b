"""Makes plans of traffic patterns: incast, all-to-all, ring all-reduce, long-lived flows and an on-off source."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from typing import Any

from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_file import MadePlan
from ringtap.core.flow_plan_format import Flow
from ringtap.core.host_port import parse_address
from ringtap.core.units import parse_size_bytes
from ringtap.trafficgen.plans.common import OfferedLoad, PlanOutline
from ringtap.trafficgen.plans.kind import (
    CAPACITY,
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

_MAX_PAIRS = _MAX_FLOWS = 100_000
_LONG_LIVED_FLOWS, _INCAST_FLOWS = 1, 8
_ON_NS = _OFF_NS = _PERIOD_NS = 10_000_000
# Mean of the integer weights of on times: large, so that rounding does not change their shares
_UNITS = 2.0**32


def _long_lived(given: dict[str, Any], frame: PlanOutline) -> MadePlan:
    """Return flows that all start at once and send until the plan's end; destinations and sources are used in turn.

    Of a load, each flow is paced to an equal part; without one, it sends as much as the network allows.
    """
    count, load = given.get("flows", _LONG_LIVED_FLOWS), offered_load(given)
    frame.check()
    _check_count(count)
    more: dict[str, Any] = {}
    if load is not None:
        frame, _, more = paced(frame, load, Fraction(1, count))

    def flows() -> Iterator[Flow]:
        to, by = frame.destinations, frame.sources or ("",)
        for number in range(count):
            yield Flow(0, by[number % len(by)], to[number % len(to)], 0)

    return MadePlan(frame.header("long-lived", count, 0, **more), flows)


def _check_count(count: int) -> None:
    if not 1 <= count <= _MAX_FLOWS:
        raise UsageError(f"--flows {count} is not usable: it must be from 1 to {_MAX_FLOWS}")


def _on_off(given: dict[str, Any], frame: PlanOutline) -> MadePlan:
    """Return a source that alternates between on and off for exponential times; an on period is one flow at the peak.

    On times are scaled to their share of the duration and off times to the rest, so the load is exact and the peak
    rate, to which flows are paced, is load x (on + off) / on.
    """
    load, on_ns, off_ns = needed_load(given), given.get("on", _ON_NS), given.get("off", _OFF_NS)
    frame.check()
    if on_ns < 1 or off_ns < 1:
        raise UsageError("--on and --off must be above 0")
    frame, load, more = paced(frame, load, Fraction(on_ns + off_ns, on_ns))
    all_on_ns = frame.duration_ns * on_ns // (on_ns + off_ns)
    count = max(1, round(Fraction(frame.duration_ns, on_ns + off_ns)))
    total_bytes = load.bytes_until(frame.duration_ns)
    if total_bytes < count or all_on_ns < 1:
        raise UsageError(
            f"a load of {load.bps:.0f} bit/s leaves {total_bytes} bytes for {count} on periods: ask for more load or "
            "longer times"
        )

    def flows() -> Iterator[Flow]:
        sizes, gaps = stream(frame.seed, "sizes"), stream(frame.seed, "gaps")
        draw_to, draw_from = stream(frame.seed, "destinations").random, stream(frame.seed, "sources").random
        to, by = list(frame.destinations), list(frame.sources) or [""]
        on_first = gaps.random() < all_on_ns / frame.duration_ns
        off_before = chain([0] if on_first else [], _fitted(gaps, count, frame.duration_ns - all_on_ns))
        draw, sent = exponentials(sizes), 0
        for size_bytes in shares_of(sizes, lambda: draw() * _UNITS, count, total_bytes):
            # The share of the bytes sent before equals the share of the on time passed before
            start_ns = next(off_before) + all_on_ns * sent // total_bytes
            sent += size_bytes
            yield Flow(start_ns, by[int(draw_from() * len(by))], to[int(draw_to() * len(to))], size_bytes)

    more |= {"on_ns": on_ns, "off_ns": off_ns}
    return MadePlan(frame.header("on-off", count, total_bytes, **more), flows)


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


def _incast(given: dict[str, Any], frame: PlanOutline) -> MadePlan:
    if len(frame.destinations) != 1:
        raise UsageError("incast goes to one destination: give --to once")
    if "flows" in given and "from" in given:
        raise UsageError("incast has a flow for each --from, or --flows unbound ones: give one of the two")
    if not (sources := given.get("from")):
        _check_count(count := given.get("flows", _INCAST_FLOWS))
        sources = [""] * count
    return _rounds("incast", frame, [(source, frame.destinations[0]) for source in sources], given, {})


def _all_to_all(given: dict[str, Any], frame: PlanOutline) -> MadePlan:
    nodes, hosts = given["node"], [parse_address(node)[0] for node in given["node"]]
    count = len(nodes)
    if count < 2:
        raise UsageError("all-to-all needs two nodes or more: give --node ADDRESS:PORT for each")
    # In shifted order, so that no receiver comes first for every sender
    pairs = [(hosts[node], nodes[(node + shift) % count]) for shift in range(1, count) for node in range(count)]
    return _rounds("all-to-all", frame, pairs, given, {"nodes": list(nodes)})


def _rounds(
    kind: str, frame: PlanOutline, pairs: Sequence[tuple[str, str]], given: dict[str, Any], about: dict[str, Any]
) -> MadePlan:
    """Return rounds of flows: in each, every source and destination of a list has one flow, and all start at once.

    Of a load, the bytes of a round are divided into equal flows; a last round that is cut short gets its share.
    """
    period_ns, demand = given.get("period", _PERIOD_NS), _demand(given)
    frame.check()
    count = len(pairs)
    if not 1 <= count <= _MAX_PAIRS:
        raise UsageError(f"a round of {count} flows is not usable: it must have from 1 to {_MAX_PAIRS}")
    if period_ns < 1:
        raise UsageError("--period must be above 0")
    rounds = -(-frame.duration_ns // period_ns)
    more: dict[str, Any] = {"period_ns": period_ns} | about
    if isinstance(demand, OfferedLoad):
        demand.check()
        load = replace(demand, ipv6=frame.ipv6())
        total_bytes, more = load.bytes_until(frame.duration_ns), load.header() | more
    elif demand < 1:
        raise UsageError("--size must be 1 byte or more")
    else:
        total_bytes = demand * rounds * count
        more |= {"size_bytes": demand}

    def budget(number: int) -> int:
        if not isinstance(demand, OfferedLoad):
            return demand * count
        start_ns = number * period_ns
        return load.bytes_until(min(start_ns + period_ns, frame.duration_ns)) - load.bytes_until(start_ns)

    def flows() -> Iterator[Flow]:
        for number in range(rounds):
            round_bytes = budget(number)
            for index, (source, destination) in enumerate(pairs):
                size_bytes = round_bytes * (index + 1) // count - round_bytes * index // count
                yield Flow(number * period_ns, source, destination, size_bytes)

    header = frame.header(kind, rounds * count, total_bytes, **more)
    for number in {0, rounds - 1}:
        if budget(number) < count:
            raise UsageError(
                f"the load leaves {budget(number)} bytes for the {count} flows of round {number}: ask for more load, a "
                "longer --period, or a --duration of whole periods"
            )
    return MadePlan(header, flows)


def _demand(given: dict[str, Any]) -> int | OfferedLoad:
    load = offered_load(given)
    if (load is None) == ("size" not in given):
        raise UsageError("give --load for all flows together, or --size for each one")
    return load if load is not None else int(given["size"])


def _ring(given: dict[str, Any], frame: PlanOutline) -> MadePlan:
    """Return a ring all-reduce in 2(N-1) steps: in each, every node sends the next one the chunk that it just received.

    Each chunk waits until the node has received the chunk of the previous step; the first chunk of an iteration waits
    for the last one of the previous iteration and then for the compute time.
    """
    nodes, size_bytes, iterations = list(given["node"]), given["bytes"], given["iterations"]
    compute_ns, count = given.get("compute", 0), len(nodes)
    frame.check()
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
    hosts = [parse_address(node)[0] for node in nodes]
    chunks = [size_bytes * (part + 1) // count - size_bytes * part // count for part in range(count)]
    steps = 2 * (count - 1)

    def flows() -> Iterator[Flow]:
        """Yield the flows; their starts are the earliest possible ones, on a network without delay."""
        for row in range(iterations * steps):
            iteration, step = divmod(row, steps)
            delay_ns = compute_ns if step == 0 and iteration else 0
            for node in range(count):
                # The flow that brought this chunk: one step earlier, from the left neighbour
                after = (((row - 1) * count + (node - 1) % count, delay_ns),) if row else ()
                chunk_bytes = chunks[(node - step) % count]
                yield Flow(iteration * compute_ns, hosts[node], nodes[(node + 1) % count], chunk_bytes, after)

    about = {"nodes": nodes, "size_bytes": size_bytes, "compute_ns": compute_ns, "iterations": iterations}
    # A step moves every chunk once
    header = frame.header("ring", iterations * steps * count, iterations * steps * size_bytes, **about)
    return MadePlan(header, flows)


_FLOWS = Option("flows", "N", "long-lived, incast: how many at once (default 1 and 8)", int)
_PERIOD = Option("period", "TIME", "incast, all-to-all: from round to round (default 10ms)", read_ns)
_SIZE = Option("size", "SIZE", "incast, all-to-all: of each flow, instead of --load", parse_size_bytes)
LONG_LIVED = TrafficKind("long-lived", _long_lived, (DURATION,), (*RATE, TO, FROM, _FLOWS))
ON_OFF = TrafficKind(
    "on-off",
    _on_off,
    (LOAD, DURATION),
    (
        *(CAPACITY, LOAD_COUNTS, MTU, TO, FROM),
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
