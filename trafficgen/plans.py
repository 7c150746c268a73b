"""Flow plans: which flow starts when, where to and how large (the thesis's Algorithms 1 and 2, made exact).

A plan holds exactly the bytes asked for. Sizes are drawn from the distribution and then multiplied by one factor a
stretch (the whole plan, or a burst, or the quiet part of a period); starts are a Poisson process given its number of
arrivals. docs/traffic.md explains both.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from ringtap.errors import UsageError
from ringtap.trafficgen.protocol import parse_address
from ringtap.trafficgen.sizes import WEB_SEARCH, SizeDistribution, exponential, normal_share

FORMAT = "ringtap-flow-plan"
VERSION = 1
KINDS = ("consistent", "burst")
MOST = 2**63 - 1
_NS = 1_000_000_000
_BURST_FLOWS = 2
_LEAST_QUIET_FLOWS = 8
# A burst's first flow takes this share of it: normal, three deviations from the middle to either end
_SPLIT_MEAN, _SPLIT_DEVIATION = 0.5, 1 / 6
# Weights are sizes in 1/256 byte, so that scaled-down sizes keep their shape in integer arithmetic
_WEIGHT = 256


class Flow(NamedTuple):
    """One line of a plan: nanoseconds after the sender's launch, ``host:port``, payload bytes."""

    start_ns: int
    destination: str
    size_bytes: int


@dataclass(frozen=True)
class PlanSpec:
    """What a plan is asked to be.

    Attributes:
        kind: ``consistent`` (Algorithm 1) or ``burst`` (Algorithm 2).
        load_bps: payload bits per second, mean over the duration.
        duration_ns: length of the plan.
        destinations: ``host:port`` of the receivers; each flow goes to one of them, drawn evenly.
        seed: seed of everything random, 0 or more.
        scale: flow sizes of the distribution are divided by it (a testbed at 1:100 has 100).
        burst_height: rate in a burst as a multiple of the load.
        burst_length_ns: length of a burst.
        burst_period_ns: time from one burst to the next.
    """

    kind: Literal["consistent", "burst"]
    load_bps: float
    duration_ns: int
    destinations: Sequence[str]
    seed: int = 1
    scale: float = 1.0
    burst_height: float = 3.0
    burst_length_ns: int = 1_000_000
    burst_period_ns: int = 10_000_000


@dataclass(frozen=True)
class _Stretch:
    """A piece of time with a byte budget of its own."""

    start_ns: int
    length_ns: int
    size_bytes: int
    flows: int
    burst: bool


class FlowPlan:
    """A plan that can be walked any number of times; nothing of its flows is kept in memory.

    Attributes:
        spec: what it was asked to be.
        header: what the first line of its file says.

    Raises:
        UsageError: the asked plan makes no sense or cannot be made exact.
    """

    def __init__(self, spec: PlanSpec) -> None:
        self.spec = spec
        _check(spec)
        self._sizes = WEB_SEARCH.scaled(1 / spec.scale)
        self.header = self._describe()

    def flows(self) -> Iterator[Flow]:
        """The flows in order of their starts."""
        places = _stream(self.spec.seed, "destinations")
        names = list(self.spec.destinations)
        for start_ns, size_bytes in self._placed():
            yield Flow(start_ns, names[int(places.random() * len(names))], size_bytes)

    def _placed(self) -> Iterator[tuple[int, int]]:
        gaps, sizes = _stream(self.spec.seed, "gaps"), _stream(self.spec.seed, "sizes")
        for stretch in self._stretches():
            starts = _arrivals(gaps, stretch)
            if stretch.burst:
                yield from zip(starts, _split(sizes, stretch.size_bytes), strict=True)
            else:
                yield from zip(starts, _sizes(sizes, self._sizes, stretch), strict=True)

    def _stretches(self) -> Iterator[_Stretch]:
        spec = self.spec
        if spec.kind == "consistent":
            budget = _payload_bytes(spec, spec.duration_ns)
            yield _Stretch(0, spec.duration_ns, budget, self._count(budget, 1), burst=False)
            return
        burst_share = Fraction(repr(float(spec.burst_height))) * spec.burst_length_ns / spec.burst_period_ns
        for start_ns in range(0, spec.duration_ns, spec.burst_period_ns):
            # A last period that does not fit is a smaller one of the same shape
            length_ns = min(spec.burst_period_ns, spec.duration_ns - start_ns)
            budget = _payload_bytes(spec, start_ns + length_ns) - _payload_bytes(spec, start_ns)
            in_burst = round(budget * burst_share)
            burst_ns = spec.burst_length_ns * length_ns // spec.burst_period_ns
            yield _Stretch(start_ns, burst_ns, in_burst, _BURST_FLOWS, burst=True)
            quiet = self._count(budget - in_burst, _LEAST_QUIET_FLOWS)
            yield _Stretch(start_ns + burst_ns, length_ns - burst_ns, budget - in_burst, quiet, burst=False)

    def _count(self, size_bytes: int, least: int) -> int:
        return max(least, int(size_bytes / self._sizes.mean_bytes))

    def _describe(self) -> dict[str, Any]:
        spec, flows, total = self.spec, 0, 0
        for stretch in self._stretches():
            if stretch.size_bytes < stretch.flows or stretch.length_ns < 1:
                raise UsageError(
                    f"a load of {spec.load_bps:.0f} bit/s leaves {stretch.size_bytes} bytes for {stretch.flows} flows "
                    f"at {stretch.start_ns / 1e9:.6f} s: ask for more load or a longer burst period"
                )
            flows += stretch.flows
            total += stretch.size_bytes
        header: dict[str, Any] = {"format": FORMAT, "version": VERSION, "kind": spec.kind}
        header |= {"load_bps": spec.load_bps, "load_counts": "payload", "duration_ns": spec.duration_ns}
        header |= {"flows": flows, "bytes": total, "destinations": list(spec.destinations), "seed": spec.seed}
        header |= {"distribution": self._sizes.name, "scale": spec.scale}
        header |= {"starts": "ns after the sender's launch"}
        if spec.kind == "burst":
            header |= {"burst_height": spec.burst_height, "burst_length_ns": spec.burst_length_ns}
            header |= {"burst_period_ns": spec.burst_period_ns}
        else:
            header |= {"size_factor": self._size_factor(flows, total)}
        return header

    def _size_factor(self, flows: int, total: int) -> float:
        rng = _stream(self.spec.seed, "sizes")
        return total / math.fsum(self._sizes.sample_bytes(rng) for _ in range(flows))


def _check(spec: PlanSpec) -> None:
    if spec.kind not in KINDS:
        raise UsageError(f"plan kind {spec.kind!r} is unknown: choose one of {', '.join(KINDS)}")
    if not 0 < spec.load_bps < 1e15:
        raise UsageError(f"load {spec.load_bps} bit/s is not usable: it must be above 0 and below 1 Pbit/s")
    if not 0 < spec.duration_ns <= MOST // 4:
        raise UsageError(f"duration {spec.duration_ns} ns is not usable: it must be above 0")
    if not 0 < spec.scale <= 1e6:
        raise UsageError(f"scale {spec.scale} is not usable: it must be above 0 and at most 1,000,000")
    if spec.seed < 0:
        raise UsageError(f"seed {spec.seed} is negative: use 0 or more")
    if not spec.destinations:
        raise UsageError("a plan needs a destination: give --to HOST:PORT")
    for destination in spec.destinations:
        if parse_address(destination)[1] == 0:
            raise UsageError(f"destination {destination!r} has port 0: name the port that the receiver listens on")
    if len(set(spec.destinations)) != len(spec.destinations):
        raise UsageError("a destination is named twice: name each --to once")
    if _payload_bytes(spec, spec.duration_ns) < 1:
        raise UsageError(f"{spec.load_bps} bit/s for {spec.duration_ns} ns is less than one byte: ask for more load")
    if spec.kind == "burst":
        _check_burst(spec)


def _check_burst(spec: PlanSpec) -> None:
    if not 0 < spec.burst_length_ns < spec.burst_period_ns:
        raise UsageError("a burst must be shorter than its period: change --burst-length or --burst-period")
    if not 0 < spec.burst_height * spec.burst_length_ns < spec.burst_period_ns:
        raise UsageError(
            f"bursts of {spec.burst_height} x {spec.burst_length_ns} ns carry no less than the whole period of "
            f"{spec.burst_period_ns} ns: lower --burst-height or --burst-length"
        )


def _payload_bytes(spec: PlanSpec, until_ns: int) -> int:
    """Bytes asked for from the launch to ``until_ns``, in exact arithmetic and rounded once."""
    return round(Fraction(spec.load_bps) * until_ns / (8 * _NS))


def _stream(seed: int, purpose: Literal["gaps", "sizes", "destinations"]) -> random.Random:
    """A generator a purpose, so that more destinations leave sizes and starts as they are."""
    return random.Random(4 * seed + ("gaps", "sizes", "destinations").index(purpose))


def _arrivals(rng: random.Random, stretch: _Stretch) -> Iterator[int]:
    """Starts of a Poisson process given its number of arrivals: exponential gaps, fitted to the stretch.

    One gap more than flows is drawn, and all are divided by their sum: the n starts are then distributed as those of
    a Poisson process that had n arrivals in the stretch. Two passes over the same draws, so none is kept.
    """
    closing = exponential(rng)
    state = rng.getstate()
    # fsum: the built-in sum rounds differently from Python 3.12 on
    total = math.fsum(exponential(rng) for _ in range(stretch.flows)) + closing
    rng.setstate(state)
    passed = 0.0
    for _ in range(stretch.flows):
        passed += exponential(rng)
        yield stretch.start_ns + min(stretch.length_ns - 1, int(stretch.length_ns * (passed / total)))


def _sizes(rng: random.Random, distribution: SizeDistribution, stretch: _Stretch) -> Iterator[int]:
    """Sizes in proportion to draws from the distribution, at least 1 byte each, with exactly the stretch's sum."""
    state = rng.getstate()
    total = sum(_weight(rng, distribution) for _ in range(stretch.flows))
    rng.setstate(state)
    spare, passed, before = stretch.size_bytes - stretch.flows, 0, 0
    for _ in range(stretch.flows):
        passed += _weight(rng, distribution)
        upto = spare * passed // total
        yield 1 + upto - before
        before = upto


def _weight(rng: random.Random, distribution: SizeDistribution) -> int:
    return 1 + int(distribution.sample_bytes(rng) * _WEIGHT)


def _split(rng: random.Random, size_bytes: int) -> tuple[int, int]:
    """A burst's two flows, at least 1 byte each."""
    first = 1 + int((size_bytes - 2) * normal_share(rng, _SPLIT_MEAN, _SPLIT_DEVIATION))
    return first, size_bytes - first
