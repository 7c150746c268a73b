"""Fits lines to measurements of a clock's offset during a run, each with a bound on its error.

A measurement bounds the offset to ± half its round trip. Between steps a clock drifts evenly for a while, so the offset
is a line. The lines that pass through every interval form a convex polygon in the plane of offset (at the first
measurement) and drift (at most 500 ppm). At both ends of a segment, the fit takes the middle of these lines' offsets.
The larger half range is the error, but never less than half the least round trip: no number of pings can rule out that
much asymmetry. If no line passes through the next interval (the clock's rate has changed), a new segment begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# No two clocks drift apart faster for long: quartz keeps 100 ppm, and the kernel slews by at most 500.
MAX_DRIFT_PPM = 500.0
_NS_PER_PPM_S = 1e3

Point = tuple[float, float]
# CLOCK_MONOTONIC of this node before and after one of the two clocks was set
Break = tuple[int, int]


@dataclass(frozen=True)
class Measurement:
    """The best of a burst of pings.

    Attributes:
        t_ns: this node's CLOCK_REALTIME halfway between sending the ping and receiving its answer.
        mono_ns: its CLOCK_MONOTONIC at the same time.
        phase: ``before``, ``during`` or ``after`` the job.
        offset_ns: this node's clock minus the reference node's.
        error_ns: half of this ping's round trip, the bound of the offset's error.
        round_trip_ns: time on the network, without the time at the reference node.
        pings: pings answered.
        lost: pings not answered.
    """

    t_ns: int
    mono_ns: int
    phase: str
    offset_ns: int
    error_ns: int
    round_trip_ns: int
    pings: int
    lost: int = 0


@dataclass(frozen=True)
class ClockFit:
    """A line: offset at time t is ``offset_ns + drift_ppm * 1e-6 * (t - t0_ns)``, within ± ``error_ns``.

    Attributes:
        from_ns, to_ns: the time for which it holds, in this node's CLOCK_REALTIME.
        from_mono_ns, to_mono_ns: the same in its CLOCK_MONOTONIC, which has no steps.
        t0_ns: time of the given offset.
        offset_ns: this node's clock minus the reference node's.
        drift_ppm: rate at which this node's clock gains on the reference node's.
        error_ns: bound of the error anywhere in the segment.
        measurements: number of measurements that the line is fitted to.
    """

    from_ns: int
    to_ns: int
    from_mono_ns: int
    to_mono_ns: int
    t0_ns: int
    offset_ns: int
    drift_ppm: float
    error_ns: int
    measurements: int

    def at(self, t_ns: int) -> float:
        """Offset in ns at a time of this node's CLOCK_REALTIME."""
        return self.offset_ns + self.drift_ppm * 1e-6 * (t_ns - self.t0_ns)


def clip(polygon: Sequence[Point], a: float, b: float, c: float) -> list[Point]:
    """The part of a convex polygon where ``a*x + b*y <= c``."""
    kept: list[Point] = []
    for (x0, y0), (x1, y1) in zip(polygon, [*polygon[1:], *polygon[:1]], strict=True):
        d0, d1 = a * x0 + b * y0 - c, a * x1 + b * y1 - c
        if d0 <= 0:
            kept.append((x0, y0))
        if (d0 < 0 < d1) or (d1 < 0 < d0):
            share = d0 / (d0 - d1)
            kept.append((x0 + share * (x1 - x0), y0 + share * (y1 - y0)))
    return kept


class _Bounds:
    """The lines that pass through all intervals so far: polygon of (offset in ns at the first one, drift in ns/s)."""

    def __init__(self, first: Measurement) -> None:
        self._first = first
        error, drift = float(first.error_ns), MAX_DRIFT_PPM * _NS_PER_PPM_S
        self._polygon: list[Point] = [(-error, -drift), (error, -drift), (error, drift), (-error, drift)]

    def add(self, measurement: Measurement) -> bool:
        """Add an interval; returns False, without a change, if no line passes through it and all others."""
        seconds = (measurement.mono_ns - self._first.mono_ns) / 1e9
        middle = float(measurement.offset_ns - self._first.offset_ns)
        polygon = clip(self._polygon, 1.0, seconds, middle + measurement.error_ns)
        polygon = clip(polygon, -1.0, -seconds, -(middle - measurement.error_ns))
        if not polygon:
            return False
        self._polygon = polygon
        return True

    def offset_range(self, mono_ns: int) -> tuple[float, float]:
        """Least and largest offset of these lines at a time, in ns relative to the first measurement's offset."""
        seconds = (mono_ns - self._first.mono_ns) / 1e9
        values = [offset + drift * seconds for offset, drift in self._polygon]
        return min(values), max(values)


def _fit(members: Sequence[Measurement], bounds: _Bounds, begin_mono_ns: int, end_mono_ns: int) -> ClockFit:
    first = members[0]
    low0, high0 = bounds.offset_range(begin_mono_ns)
    low1, high1 = bounds.offset_range(end_mono_ns)
    begin, end = (low0 + high0) / 2, (low1 + high1) / 2
    seconds = (end_mono_ns - begin_mono_ns) / 1e9
    drift_ppm = (end - begin) / seconds / _NS_PER_PPM_S if seconds else 0.0
    least = min(member.error_ns for member in members)
    error = max((high0 - low0) / 2, (high1 - low1) / 2, least)
    from_ns = first.t_ns + begin_mono_ns - first.mono_ns
    return ClockFit(
        from_ns,
        first.t_ns + end_mono_ns - first.mono_ns,
        begin_mono_ns,
        end_mono_ns,
        from_ns,
        first.offset_ns + round(begin),
        round(drift_ppm, 6),
        int(error) + 1,  # the corners of the polygon and the rounding above are good to a nanosecond
        len(members),
    )


def segments(
    measurements: Sequence[Measurement],
    breaks: Sequence[Break] = (),
    begin_mono_ns: int | None = None,
    end_mono_ns: int | None = None,
) -> list[ClockFit]:
    """Lines for the times between the measurements, in order.

    Args:
        measurements: the measurements, in order of time.
        breaks: times at which one of the two clocks was set; no segment spans one.
        begin_mono_ns, end_mono_ns: time to cover (CLOCK_MONOTONIC) beyond the first and the last measurement; the error
            grows there with the range of possible drifts.

    Returns:
        The segments. Neighbours share a measurement, or are separated by a break or by a jump that was not noticed.
    """
    edges = sorted(breaks)
    begins = [begin_mono_ns, *(after for _, after in edges)]
    ends: list[int | None] = [*(before for before, _ in edges), end_mono_ns]
    found: list[ClockFit] = []
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        piece = [item for item in measurements if sum(after <= item.mono_ns for _, after in edges) == number]
        if piece:
            found += _fit_piece(piece, begin, end)
    return found


def _fit_piece(piece: Sequence[Measurement], begin_mono_ns: int | None, end_mono_ns: int | None) -> list[ClockFit]:
    """Segments of a piece without a step; a segment ends when no line passes through the next interval."""
    runs: list[tuple[list[Measurement], _Bounds]] = []
    for measurement in piece:
        if runs and runs[-1][1].add(measurement):
            runs[-1][0].append(measurement)
            continue
        if runs:  # the clock's rate has changed: the next line begins at the last measurement, if possible
            last = runs[-1][0][-1]
            bounds = _Bounds(last)
            if bounds.add(measurement):
                runs.append(([last, measurement], bounds))
                continue
        runs.append(([measurement], _Bounds(measurement)))
    fits = []
    for number, (members, bounds) in enumerate(runs):
        begin, end = members[0].mono_ns, members[-1].mono_ns
        if number == 0 and begin_mono_ns is not None:
            begin = min(begin, begin_mono_ns)
        if number == len(runs) - 1 and end_mono_ns is not None:
            end = max(end, end_mono_ns)
        fits.append(_fit(members, bounds, begin, end))
    return fits


def overall(parts: Sequence[ClockFit]) -> ClockFit:
    """One line for the whole run: a least-squares fit to its segments' ends, with an error that covers every segment.

    Raises:
        ValueError: there is no segment.
    """
    if not parts:
        raise ValueError("no segment")
    if len(parts) == 1:
        return parts[0]
    first, last = parts[0], parts[-1]
    ends = [(t_ns, part.at(t_ns)) for part in parts for t_ns in (part.from_ns, part.to_ns)]
    slope, offset = _least_squares([(t_ns - first.from_ns, value) for t_ns, value in ends])
    error = max(
        abs(part.at(t_ns) - (offset + slope * (t_ns - first.from_ns))) + part.error_ns
        for part in parts
        for t_ns in (part.from_ns, part.to_ns)
    )
    return ClockFit(
        first.from_ns,
        last.to_ns,
        first.from_mono_ns,
        last.to_mono_ns,
        first.from_ns,
        round(offset),
        round(slope * 1e6, 6),
        int(error) + 1,
        sum(part.measurements for part in parts),
    )


def _least_squares(points: Sequence[Point]) -> tuple[float, float]:
    """Slope and intercept of the least-squares line."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return slope, mean_y - slope * mean_x
