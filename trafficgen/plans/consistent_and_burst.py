"""Makes flow plans of web-like traffic: the thesis's Algorithms 1 (consistent) and 2 (burst), made exact.

A plan contains exactly the requested bytes. Sizes are drawn from the distribution and then multiplied by one factor: of
the whole plan, of all quiet parts between bursts together, or of each quiet part. A burst is two flows that divide its
bytes at random. Starts are a Poisson process given its number of arrivals. docs/commands/traffic-plans.md explains it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import Any, Literal

from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_format import Flow
from ringtap.trafficgen.plans.common import MAX_FLOWS, OfferedLoad, PlanOutline
from ringtap.trafficgen.plans.kind import (
    CAPACITY,
    DURATION,
    FROM,
    LOAD,
    LOAD_COUNTS,
    MTU,
    SCALE,
    TO,
    Option,
    TrafficKind,
    needed_load,
)
from ringtap.trafficgen.plans.kind import duration_ns as read_ns
from ringtap.trafficgen.plans.sampling import Draw, arrivals, normal_share, shares_of, stream
from ringtap.trafficgen.plans.size_distributions import WEB_SEARCH, Sizes, parse_sizes

QUIET_BUDGETS = ("each", "together")
_BURST_FLOWS = 2
_MIN_QUIET_FLOWS = 8
# Share of a burst in its first flow: normal, with three standard deviations from the middle to either end
_SPLIT_MEAN, _SPLIT_DEVIATION = 0.5, 1 / 6


@dataclass(frozen=True)
class PlanSpec:
    """The parameters of a plan of web-like traffic.

    Attributes:
        kind: ``consistent`` (Algorithm 1) or ``burst`` (Algorithm 2).
        frame: duration, destinations and so on; the destination and the source of a flow are drawn uniformly.
        load: mean load over the duration.
        scale: flow sizes of the distribution are divided by it (a testbed at 1:100 has 100).
        burst_height: rate in a burst as a multiple of the load.
        burst_length_ns: length of a burst.
        burst_period_ns: time from one burst to the next.
        quiet_budget: ``each`` quiet part between two bursts has exactly its bytes, or all of them ``together`` do.
        sizes: distribution of flow sizes.
    """

    kind: Literal["consistent", "burst"]
    frame: PlanOutline
    load: OfferedLoad
    scale: float = 1.0
    burst_height: float = 3.0
    burst_length_ns: int = 1_000_000
    burst_period_ns: int = 10_000_000
    quiet_budget: Literal["each", "together"] = "each"
    sizes: Sizes = WEB_SEARCH


@dataclass(frozen=True)
class _Interval:
    """An interval with a byte budget of its own; its flows start in the first ``starts_ns`` of it."""

    start_ns: int
    length_ns: int
    starts_ns: int
    size_bytes: int
    flows: int
    burst: bool


class WebSearchPlan:
    """A plan of web-like traffic that can be iterated repeatedly; its flows are not kept in memory.

    Attributes:
        spec: its parameters.
        header: the plan's first line.

    Raises:
        UsageError: the requested plan is inconsistent or cannot be made exact.
    """

    def __init__(self, spec: PlanSpec) -> None:
        self.spec, self._frame = spec, spec.frame
        _check(spec)
        self._load, duration_ns = replace(spec.load, ipv6=spec.frame.ipv6()), spec.frame.duration_ns
        if self._load.bytes_until(duration_ns) < 1:
            raise UsageError(f"{spec.load.bps} bit/s for {duration_ns} ns is less than one byte: ask for more load")
        self._sizes = spec.sizes.scaled(1 / spec.scale)
        self.header = self._describe()

    def flows(self) -> Iterator[Flow]:
        """Yield the flows in order of their starts."""
        frame = self._frame
        to, draw_to = list(frame.destinations), stream(frame.seed, "destinations").random
        by, draw_from = list(frame.sources) or [""], stream(frame.seed, "sources").random
        for start_ns, size_bytes in self._starts_and_sizes():
            yield Flow(start_ns, by[int(draw_from() * len(by))], to[int(draw_to() * len(to))], size_bytes)

    def _starts_and_sizes(self) -> Iterator[tuple[int, int]]:
        gaps, sizes = stream(self._frame.seed, "gaps"), stream(self._frame.seed, "sizes")
        quiet_sizes = self._quiet_sizes(sizes)
        # sizes that quiet parts have in common come from one stream, from which bursts must not draw
        splits = sizes if self.spec.quiet_budget == "each" else gaps
        for interval in self._intervals():
            if interval.burst:
                share = normal_share(splits, _SPLIT_MEAN, _SPLIT_DEVIATION)
                first = 1 + int((interval.size_bytes - 2) * share)
                drawn: Iterator[int] = iter((first, interval.size_bytes - first))
            else:
                drawn = quiet_sizes(interval)
            starts = arrivals(gaps, interval.start_ns, interval.starts_ns, interval.flows)
            yield from zip(starts, drawn, strict=True)

    def _quiet_sizes(self, rng: random.Random) -> Callable[[_Interval], Iterator[int]]:
        """Return a function that yields the sizes of the flows of an interval that is not a burst."""
        draw: Draw = self._sizes.sampler(rng)
        if self.spec.kind == "consistent" or self.spec.quiet_budget == "each":
            return lambda part: shares_of(rng, draw, part.flows, part.size_bytes)
        last_ns = self._frame.duration_ns // self.spec.burst_period_ns * self.spec.burst_period_ns
        flows = size_bytes = 0
        for part in self._intervals():
            if not part.burst and part.start_ns < last_ns:
                flows += part.flows
                size_bytes += part.size_bytes
        together = shares_of(rng, draw, flows, size_bytes)
        # the part of a shortened last period comes after all others, and has a budget of its own
        return lambda part: (
            islice(together, part.flows)
            if part.start_ns < last_ns
            else shares_of(rng, draw, part.flows, part.size_bytes)
        )

    def _intervals(self) -> Iterator[_Interval]:
        spec, until, duration_ns = self.spec, self._load.bytes_until, self._frame.duration_ns
        if spec.kind == "consistent":
            budget = until(duration_ns)
            yield _Interval(0, duration_ns, duration_ns, budget, self._count(budget, 1), burst=False)
            return
        burst_share = Fraction(repr(float(spec.burst_height))) * spec.burst_length_ns / spec.burst_period_ns
        for start_ns in range(0, duration_ns, spec.burst_period_ns):
            # A last period that does not fit is shortened in proportion
            length_ns = min(spec.burst_period_ns, duration_ns - start_ns)
            budget = until(start_ns + length_ns) - until(start_ns)
            in_burst = round(budget * burst_share)
            burst_ns = spec.burst_length_ns * length_ns // spec.burst_period_ns
            # To cross the link within an interval, flows must start some time before its end
            half_ns, quiet_ns = burst_ns // 2, length_ns - burst_ns
            yield _Interval(start_ns, burst_ns, half_ns, in_burst, _BURST_FLOWS, burst=True)
            quiet = self._count(budget - in_burst, _MIN_QUIET_FLOWS)
            early_ns = max(quiet_ns - half_ns, quiet_ns // 2)
            yield _Interval(start_ns + burst_ns, quiet_ns, early_ns, budget - in_burst, quiet, burst=False)

    def _count(self, size_bytes: int, least: int) -> int:
        return max(least, int(size_bytes / self._sizes.mean_bytes))

    def _describe(self) -> dict[str, Any]:
        spec, flows, total = self.spec, 0, 0
        for interval in self._intervals():
            if interval.size_bytes < interval.flows or interval.starts_ns < 1:
                raise UsageError(
                    f"a load of {spec.load.bps:.0f} bit/s leaves {interval.size_bytes} bytes and "
                    f"{interval.length_ns} ns for {interval.flows} flows at {interval.start_ns / 1e9:.6f} s: ask for "
                    "more load or a longer burst period"
                )
            flows += interval.flows
            total += interval.size_bytes
        more = self._load.header() | {"distribution": self._sizes.name, "scale": spec.scale}
        header = self._frame.header(spec.kind, flows, total, **more)
        if spec.kind == "burst":
            header |= {"burst_height": spec.burst_height, "burst_length_ns": spec.burst_length_ns}
            header |= {"burst_period_ns": spec.burst_period_ns, "quiet_budget": spec.quiet_budget}
        else:
            header |= {"size_factor": self._size_factor(flows, total)}
        return header

    def _size_factor(self, flows: int, total: int) -> float:
        draw = self._sizes.sampler(stream(self._frame.seed, "sizes"))
        return total / math.fsum(draw() for _ in range(flows))


def _check(spec: PlanSpec) -> None:
    spec.load.check()
    spec.frame.check()
    if not 0 < spec.scale <= 1e6:
        raise UsageError(f"scale {spec.scale} is not usable: it must be above 0 and at most 1,000,000")
    if spec.kind != "burst":
        return
    if not 0 < spec.burst_length_ns < spec.burst_period_ns:
        raise UsageError("a burst must be shorter than its period: change --burst-length or --burst-period")
    if spec.frame.duration_ns // spec.burst_period_ns * (_BURST_FLOWS + _MIN_QUIET_FLOWS) > MAX_FLOWS:
        raise UsageError(f"a plan of more than {MAX_FLOWS} flows is too long: ask for a longer --burst-period")
    if not 0 < spec.burst_height * spec.burst_length_ns < spec.burst_period_ns:
        raise UsageError(
            f"bursts of {spec.burst_height} x {spec.burst_length_ns} ns carry as much as the whole period of "
            f"{spec.burst_period_ns} ns: lower --burst-height or --burst-length"
        )


def _make(kind: Literal["consistent", "burst"], given: dict[str, Any], frame: PlanOutline) -> WebSearchPlan:
    named = {"burst_length": "burst_length_ns", "burst_period": "burst_period_ns"}
    options = {named.get(key, key): given[key] for key in _OWN if key in given}
    if "sizes" in given:
        options["sizes"] = parse_sizes(given["sizes"])
    return WebSearchPlan(PlanSpec(kind, frame, needed_load(given), **options))


_OWN = ("scale", "burst_height", "burst_length", "burst_period", "quiet_budget")
_TAKES = (
    *(CAPACITY, LOAD_COUNTS, MTU, TO, FROM),
    Option("sizes", "NAME", "a workload, a formula or file:PATH (default web-search)"),
    SCALE,
)
CONSISTENT = TrafficKind("consistent", partial(_make, "consistent"), (LOAD, DURATION), _TAKES)
BURST = TrafficKind(
    "burst",
    partial(_make, "burst"),
    (LOAD, DURATION),
    (
        *_TAKES,
        Option("burst-height", "H", "burst: rate in a burst over the load (default 3)", float),
        Option("burst-length", "TIME", "burst: length of a burst (default 1ms)", read_ns),
        Option("burst-period", "TIME", "burst: from burst to burst (default 10ms)", read_ns),
        Option("quiet-budget", "", "burst: bytes exact in each quiet part (default) or in all", choices=QUIET_BUDGETS),
    ),
)
