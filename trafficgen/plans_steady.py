"""Plans of flows that last: long-lived ones, and one that is on and off."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from typing import Any

from ringtap.errors import UsageError
from ringtap.trafficgen.draws import again, exponentials, shares_of, stream
from ringtap.trafficgen.flow import Flow
from ringtap.trafficgen.planparts import Frame, Load

_MOST_FLOWS = 100_000
# On times are drawn as weights of so many units for the mean, so that shares keep their shape as integers
_UNITS = 2.0**32


class LongLivedPlan:
    """Flows that all start at once and send until the plan's end; the n-th has the n-th destination and source in turn.

    Args:
        frame: duration, destinations and so on.
        count: how many flows.
        load: what they send together, each paced to its part; None: as much as the network gives.

    Attributes:
        header: what the first line of its file says.

    Raises:
        UsageError: the asked plan makes no sense.
    """

    def __init__(self, frame: Frame, count: int, load: Load | None = None) -> None:
        frame.check()
        if not 1 <= count <= _MOST_FLOWS:
            raise UsageError(f"--flows {count} is not usable: it must be from 1 to {_MOST_FLOWS}")
        more: dict[str, Any] = {}
        if load is not None:
            frame, _, more = paced(frame, load, Fraction(1, count))
        self._frame, self._count = frame, count
        self.header = frame.header("long-lived", count, 0, **more)

    def flows(self) -> Iterator[Flow]:
        """The flows in order of their starts."""
        to, by = self._frame.destinations, self._frame.sources or ("",)
        for number in range(self._count):
            yield Flow(0, by[number % len(by)], to[number % len(to)], 0)


class OnOffPlan:
    """A source that is on and off in turn, each for an exponential time; an on period is one flow, paced at the peak.

    On times are fitted to their share of the duration and off times to the rest, so the load is exact and the peak
    is load x (on + off) / on.

    Args:
        frame: duration, destinations and so on.
        load: mean over the duration.
        on_ns: mean of the on times.
        off_ns: mean of the off times.

    Attributes:
        header: what the first line of its file says.

    Raises:
        UsageError: the asked plan makes no sense or cannot be made exact.
    """

    def __init__(self, frame: Frame, load: Load, on_ns: int, off_ns: int) -> None:
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
        """The flows in order of their starts."""
        seed, frame, count = self._frame.seed, self._frame, self._count
        sizes, gaps = stream(seed, "sizes"), stream(seed, "gaps")
        place, source = stream(seed, "destinations").random, stream(seed, "sources").random
        to, by = list(frame.destinations), list(frame.sources) or [""]
        on_first = gaps.random() < self._on_ns / frame.duration_ns
        off_before = chain([0] if on_first else [], _fitted(gaps, count, frame.duration_ns - self._on_ns))
        draw, sent = exponentials(sizes), 0
        for size_bytes in shares_of(sizes, lambda: draw() * _UNITS, count, self._bytes):
            # What of the bytes came before is also what of the on time came before
            start_ns = next(off_before) + self._on_ns * sent // self._bytes
            sent += size_bytes
            yield Flow(start_ns, by[int(source() * len(by))], to[int(place() * len(to))], size_bytes)


def paced(frame: Frame, load: Load, factor: Fraction) -> tuple[Frame, Load, dict[str, Any]]:
    """The frame with each flow paced to ``factor`` of the load, the load as counted there, and their header keys.

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
    """Ends of ``count`` exponential times one after the other, fitted so that the last is at ``total_ns``."""
    times = again(rng, exponentials(rng), count)
    # fsum: the built-in sum rounds differently from Python 3.12 on
    drawn, passed = math.fsum(times()), 0.0
    for time in times():
        passed += time
        yield min(total_ns, int(total_ns * (passed / drawn)))
