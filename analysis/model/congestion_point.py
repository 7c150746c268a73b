"""Finds the congestion point of a series: the construction of the thesis's appendix A.2, done numerically.

docs/method/method.md describes the steps and the reasons for each choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import optimize

from ringtap.analysis.statistics.autocorrelation import block_means
from ringtap.analysis.statistics.quantiles import LEVEL
from ringtap.analysis.statistics.to_arrays import Array, Values, as_points, as_samples
from ringtap.core.run_directory_schema import MERGE_SHARE, MIN_CONGESTION_LOADS, MIN_RISE
from ringtap.core.units import rate_gbps

CURVED_SHARE = 2 / 3  # the curved region begins at this share of the way from the lightest loads' elasticity to 1
MIN_ELASTICITY = 0.5  # at the heaviest loads; below it, congestion was not reached


@dataclass(frozen=True)
class StraightLine:
    """A straight line t = intercept + slope * BW, and the points that it was fitted to.

    Attributes:
        intercept_s: time at no load, in seconds.
        slope_s_per_gbps: growth of the time with the load.
        points: indices of its points in the construction's arrays.
    """

    intercept_s: float
    slope_s_per_gbps: float
    points: tuple[int, ...]

    def at(self, bandwidth_gbps: float) -> float:
        """Return the time in seconds on the line."""
        return self.intercept_s + self.slope_s_per_gbps * bandwidth_gbps


@dataclass(frozen=True)
class CongestionPoint:
    """The congestion point and the lines that lead to it.

    Attributes:
        bandwidth_gbps: load BW* of the chosen point.
        iteration_s: its iteration time t*.
        data_mb: (C - BW*) * t* in decimal megabytes (thesis, section 3.2).
        capacity_gbps: C.
        flat: line through the flat region.
        tangent: tangent to the first points of the curved region.
        meeting_gbps: load where both lines meet.
        meeting_s: time where they meet.
        chosen: index of the chosen point.
        loads_gbps: loads after averaging replicates, ascending, shape (points,).
        times_s: times after averaging, shape (points,).
        interval_gbps: 95 % interval of BW* over resampled sets in which the construction finds a point; its ends are
            measured loads. None if it was not asked for.
        found_share: share of the resampled sets in which it finds one; None if not asked for.
    """

    bandwidth_gbps: float
    iteration_s: float
    data_mb: float
    capacity_gbps: float
    flat: StraightLine
    tangent: StraightLine
    meeting_gbps: float
    meeting_s: float
    chosen: int
    loads_gbps: tuple[float, ...]
    times_s: tuple[float, ...]
    interval_gbps: tuple[float, float] | None = None
    found_share: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The point and its construction as plain values."""

        def line(item: StraightLine) -> dict[str, Any]:
            used = [{"bandwidth_gbps": self.loads_gbps[i], "iteration_s": self.times_s[i]} for i in item.points]
            return {"intercept_s": item.intercept_s, "slope_s_per_gbps": item.slope_s_per_gbps, "points": used}

        point = {"bandwidth_gbps": self.bandwidth_gbps, "iteration_s": self.iteration_s, "data_mb": self.data_mb}
        meeting = {"bandwidth_gbps": self.meeting_gbps, "iteration_s": self.meeting_s}
        construction = {"flat": line(self.flat), "tangent": line(self.tangent), "meeting": meeting}
        return point | {"construction": construction}


@dataclass(frozen=True, repr=False)
class CongestionResult:
    """Either a congestion point or the reason why there is none.

    Attributes:
        point: the point, or None.
        reason: one sentence if ``point`` is None, else empty.
    """

    point: CongestionPoint | None
    reason: str = ""

    def __repr__(self) -> str:
        if self.point is None:
            return f"<CongestionResult: {self.reason}>"
        ends = self.point.interval_gbps
        interval = f" ({ends[0]:.4g} to {ends[1]:.4g})" if ends else ""
        return f"<CongestionResult: {self.point.bandwidth_gbps:.4g} Gbit/s{interval}>"


def find_congestion_point(
    bandwidth_gbps: Values,
    iteration_s: Values,
    capacity_gbps: float | str,
    iterations_s: Iterable[Values] | None = None,
    samples: int = 1000,
    seed: int = 0,
) -> CongestionResult:
    """Find the load at which congestion begins (thesis, section 3.2 and appendix A.2).

    Args:
        bandwidth_gbps: loads, shape (points,), in any order; replicates are averaged. Numbers are Gbit/s; text has a
            unit.
        iteration_s: mean iteration times, shape (points,). Numbers are seconds; text has a unit.
        capacity_gbps: capacity of the bottleneck, in Gbit/s or as text such as ``25gbit``.
        iterations_s: the iteration times behind each mean, in order of time, if they are known. They are resampled
            within each point, in blocks as long as they are correlated. Without them, the residuals of ln t around the
            curve of `elasticities` are resampled.
        samples: number of resampled sets for the interval; 0 for no interval.
        seed: seed of the resampling.

    Raises:
        UsageError: the arrays differ in length or hold invalid values.
    """
    capacity_gbps = rate_gbps(capacity_gbps)
    load, time = as_points(bandwidth_gbps, iteration_s, capacity_gbps)
    samples_s = as_samples(iterations_s, len(load))
    order = np.lexsort((time, load))
    every_load, every_time = load[order], time[order]
    load, time = merge_replicates(load, time, capacity_gbps)
    found = _find(load, time, capacity_gbps)
    if found.point is None or not samples:
        return found
    draw = np.random.default_rng(seed)
    if samples_s is None:
        sets = _around_curve(load, time, capacity_gbps, samples, draw)
    else:
        means = [block_means(samples_s[number], samples, draw) for number in order]
        # centred on the given means, however they were obtained
        scattered = every_time * np.column_stack([mean / mean.mean() for mean in means])
        sets = np.stack([merge_replicates(every_load, one, capacity_gbps)[1] for one in scattered])
    chosen = [point.bandwidth_gbps for one in sets if (point := _find(load, one, capacity_gbps).point) is not None]
    if not chosen:
        return CongestionResult(replace(found.point, found_share=0.0))
    low, high = np.quantile(chosen, [(1 - LEVEL) / 2, 1 - (1 - LEVEL) / 2], method="inverted_cdf").tolist()
    share = len(chosen) / samples
    return CongestionResult(replace(found.point, interval_gbps=(low, high), found_share=share))


def _around_curve(load: Array, time: Array, capacity_gbps: float, samples: int, draw: np.random.Generator) -> Array:
    """Return sets of times with the residuals of ln t around the convex curve resampled, widened for its slopes."""
    u = -np.log1p(-load / capacity_gbps)
    slopes = elasticities(load, time, capacity_gbps)
    log_time = np.log(time)
    curve = np.concatenate(([0.0], np.cumsum(slopes * np.diff(u))))
    residual = log_time - curve - (log_time - curve).mean()
    parameters = 1 + len(np.unique(slopes.round(9)))
    residual *= np.sqrt(len(load) / max(len(load) - parameters, 1))
    fitted = log_time.mean() - curve.mean() + curve
    result: Array = np.exp(fitted + draw.choice(residual, size=(samples, len(load))))
    return result


def _find(load: Array, time: Array, capacity_gbps: float) -> CongestionResult:
    """Find the point of times at distinct loads, ascending."""
    if len(load) < MIN_CONGESTION_LOADS:
        return CongestionResult(None, f"the construction needs {MIN_CONGESTION_LOADS} loads, but has {len(load)}")
    if time[-1] < MIN_RISE * time[0]:
        rise = time[-1] / time[0] - 1
        return CongestionResult(None, f"the iteration time does not rise: {rise:+.0%} from the lightest load on")
    first = _first_curved(load, time, capacity_gbps)
    if isinstance(first, str):
        return CongestionResult(None, first)
    return _construct(load, time, capacity_gbps, first)


def data_volume_mb(bandwidth_gbps: float, iteration_s: float, capacity_gbps: float) -> float:
    """Return the volume (C - BW) t that an iteration leaves room for, in decimal megabytes (thesis, section 3.2)."""
    return (capacity_gbps - bandwidth_gbps) * iteration_s * 125


def merge_replicates(load: Array, time: Array, capacity_gbps: float) -> tuple[Array, Array]:
    """Average points whose loads lie within 1 % of capacity of the lightest one among them; ascending loads."""
    order = np.lexsort((time, load))
    load, time = load[order], time[order]
    starts = [0]
    for index in range(1, len(load)):
        if load[index] - load[starts[-1]] > MERGE_SHARE * capacity_gbps:
            starts.append(index)
    groups = [slice(start, end) for start, end in zip(starts, [*starts[1:], len(load)], strict=True)]
    if not len(load):
        return load, time
    return np.array([load[group].mean() for group in groups]), np.array([time[group].mean() for group in groups])


def elasticities(load: Array, time: Array, capacity_gbps: float) -> Array:
    """Return the per cent of time added for each per cent of bandwidth taken away, between neighbouring points.

    These are the slopes of the convex, non-decreasing, piecewise linear function of u = ln(C/(C-BW)) that is nearest to
    ln t in least squares: 0 if bandwidth does not matter, 1 if the time is inversely proportional to what is left.

    Returns:
        Slopes, ascending, shape (points - 1,).
    """
    u = -np.log1p(-load / capacity_gbps)
    log_time = np.log(time)
    # ln t = c + sum of w_j * max(0, u - u_j) with w_j >= 0 is exactly that class of functions
    hinges = np.maximum(0.0, u[:, None] - u[None, :-1])
    centred = hinges - hinges.mean(axis=0)
    weights, _ = optimize.nnls(centred, log_time - log_time.mean())
    result: Array = np.cumsum(weights)
    return result


def _first_curved(load: Array, time: Array, capacity_gbps: float) -> int | str:
    """Return the index of the first point of the curved region, or the reason why there is none."""
    slopes = elasticities(load, time, capacity_gbps)
    if slopes[0] >= 1:
        return "the time grows as fast as the bandwidth shrinks from the lightest load on: no flat region was measured"
    at_point = np.append((slopes[:-1] + slopes[1:]) / 2, slopes[-1])  # of points 1, 2, ...
    if slopes[-1] < MIN_ELASTICITY:
        return (
            "the time grows much slower than the bandwidth shrinks, up to the heaviest load: no congestion was reached"
        )
    if slopes[-1] <= slopes[0]:
        return "the time grows alike at light and heavy loads: a flat and a curved region cannot be told apart"
    curved = np.flatnonzero(at_point >= slopes[0] + CURVED_SHARE * (1 - slopes[0]))
    # the flat line needs two points; if the curve begins at the last point, the tangent has the two heaviest
    return min(max(int(curved[0]) + 1 if len(curved) else len(load), 2), len(load) - 2)


def _line_through(load: Array, time: Array, points: range) -> StraightLine:
    x, y = load[points.start : points.stop], time[points.start : points.stop]
    centre = float(x.mean())
    past = x - centre
    slope = float(past @ y / (past @ past))
    return StraightLine(float(y.mean()) - slope * centre, slope, tuple(points))


def _construct(load: Array, time: Array, capacity_gbps: float, first: int) -> CongestionResult:
    for start in range(first, len(load) - 1):
        flat = _line_through(load, time, range(start))
        tangent = _line_through(load, time, range(start, start + 2))
        steeper = tangent.slope_s_per_gbps - flat.slope_s_per_gbps
        if steeper <= 0:
            continue
        meeting = (flat.intercept_s - tangent.intercept_s) / steeper
        # noise can tilt the first chord so that it meets the flat line far away; then the next chord is the tangent
        if not load[max(start - 2, 1)] <= meeting <= load[start + 1]:
            continue
        # The nearest point is chosen by load, because the points around the intersection hardly differ in time. Of two
        # equally near points, the one with the higher load is chosen.
        chosen = len(load) - 1 - int(np.abs(load - meeting)[::-1].argmin())
        data_mb = data_volume_mb(float(load[chosen]), float(time[chosen]), capacity_gbps)
        point = CongestionPoint(
            float(load[chosen]), float(time[chosen]), data_mb, capacity_gbps, flat, tangent,
            meeting, flat.at(meeting), chosen, tuple(map(float, load)), tuple(map(float, time)),
        )  # fmt: skip
        return CongestionResult(point)
    return CongestionResult(None, "no tangent to the curved region meets the flat line within the measured loads")
