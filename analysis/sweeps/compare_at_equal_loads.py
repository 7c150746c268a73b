"""Compares series at exactly the same load, between the points that were measured next to it.

docs/commands/report.md, "Equal loads", has the rules.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from scipy import special

from ringtap.analysis.statistics.quantiles import LEVEL
from ringtap.analysis.statistics.to_arrays import Array
from ringtap.analysis.statistics.two_sample import Comparison, Estimate, compare
from ringtap.analysis.sweeps.points import Point
from ringtap.analysis.sweeps.series_analysis import Series

HEAVY_SHARE = 0.80  # of capacity: the heavy load of figures 3-5 and B-1
NEAR_SHARE = 0.12  # of capacity: largest distance of a measured load from another one
MIN_INDEPENDENT = 3.0  # the interval of a mean of fewer iterations is too wide to be useful
_ROUNDING = 1e-9  # of capacity

Interval = tuple[float, float]


def common_share(series: Sequence[Series]) -> float:
    """Return the heavy load at which series are compared: 80 % of capacity, or the heaviest that all of them reach.

    A series that does not come near 80 % has no number at this load, and does not lower it for the others.
    """
    heaviest = [one.loads_gbps[-1] / one.capacity_gbps for one in series if one.used]
    return min([HEAVY_SHARE, *(share for share in heaviest if share >= HEAVY_SHARE - NEAR_SHARE)])


@dataclass(frozen=True)
class AtLoad:
    """A series at exactly a load, between the two measured points next to it.

    ln t lies on a straight line between them against 1/(C-BW)^n with the n of the fit, and without a fit against
    ln(C/(C-BW)).

    Attributes:
        share: the load, as a share of capacity.
        mean_s: mean iteration time.
        error: its relative standard error, from those of both means; None if one of them is not known.
        count: effective number of independent iterations behind it; 0 without an error.
        bend: how far ln t lies from another line (against ln(C/(C-BW)), and without a fit against BW): the intervals
            are wider by this on each side.
        point: the nearer point, whose iterations stand for those at this load.
        factor: time at this load over that of the point.
        reach: half of the 95 % interval of its logarithm; None without an error.
        spread: standard deviation over mean; None if that of a point is not known.
        utilisation: of the bottleneck; likewise.
    """

    share: float
    mean_s: float
    error: float | None
    count: float
    bend: float
    point: Point
    factor: float
    reach: float | None
    spread: float | None
    utilisation: float | None

    @property
    def times_s(self) -> Array:
        """The iteration times of the point, moved to this load."""
        moved: Array = self.point.iteration_s * self.factor
        return moved

    @property
    def interval_s(self) -> Interval | None:
        """95 % interval of the mean."""
        if self.error is None:
            return None
        half = student_t(self.count) * self.error + self.bend
        return self.mean_s * math.exp(-half), self.mean_s * math.exp(half)

    def moved(self, seconds: float | None, side: int) -> float | None:
        """Move an end of an interval of the point to this load, on the low (-1) or the high side (1)."""
        if seconds is None or self.reach is None:
            return None
        return seconds * self.factor * math.exp(side * self.reach)


def at_load(series: Series, share: float) -> AtLoad | str:
    """Return a series at exactly a share of capacity, or the reason why it is not known there.

    There must be points of several iterations on both sides of it, one of them within 12 % of capacity.
    """
    capacity = series.capacity_gbps
    points = [point for point in series.used if point.iterations != 1]
    loads = [point.cross_gbps or 0.0 for point in points]
    if not any(abs(load - share * capacity) <= NEAR_SHARE * capacity for load in loads):
        return f"no point of several iterations lies within {100 * NEAR_SHARE:.0f} percentage points of that load"
    if not loads[0] - _ROUNDING * capacity <= share * capacity <= loads[-1] + _ROUNDING * capacity or len(loads) < 2:
        return "no points of several iterations lie on both sides of that load"
    after = min(max(bisect_left(loads, share * capacity), 1), len(loads) - 1)
    pair, ends = (points[after - 1], points[after]), (loads[after - 1], loads[after])
    logs = [math.log(point.mean_s or 0.0) for point in pair]
    weights = [_weight(scale, ends, share * capacity) for scale in _scales(series)]
    (log_s, other) = (logs[0] + weight * (logs[1] - logs[0]) for weight in weights)
    weight, bend = weights[0], abs(log_s - other)
    nearer = int(weight > 0.5)
    errors = [error for error in map(relative_error, pair) if error is not None]
    error = reach = None
    count = 0.0
    if len(errors) == len(pair):
        first, second = (each for each, _ in errors)
        count = min(each for _, each in errors)
        error = math.hypot((1 - weight) * first, weight * second)
        reach = student_t(count) * min(weight, 1 - weight) * math.hypot(first, second) + bend
    return AtLoad(
        share=share,
        mean_s=math.exp(log_s),
        error=error,
        count=count,
        bend=bend,
        point=pair[nearer],
        factor=math.exp(log_s - logs[nearer]),
        reach=reach,
        spread=_between([point.variation for point in pair], weight),
        utilisation=_between([point.utilisation for point in pair], weight),
    )


def _between(values: Sequence[float | None], weight: float) -> float | None:
    first, second = values
    return None if first is None or second is None else first + weight * (second - first)


def _scales(series: Series) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """Return the load scales on which ln t is a line between two points: the one that is used, and another one."""
    capacity, fit = series.capacity_gbps, series.fit

    def logarithmic(load: float) -> float:
        return -math.log1p(-load / capacity)

    if fit is None:
        return logarithmic, lambda load: load
    return lambda load: (capacity - load) ** -fit.n, logarithmic


def _weight(scale: Callable[[float], float], ends: Interval, load: float) -> float:
    """Return how far a load lies from the first to the second of two ends, on a scale: from 0 to 1."""
    low, high = map(scale, ends)
    return min(max((scale(load) - low) / (high - low), 0.0), 1.0) if high > low else 0.0


def compare_moved(first: AtLoad, second: AtLoad, names: tuple[str, str]) -> Comparison:
    """Compare the iterations of two series at one load.

    The intervals hold that the iterations may be moved to this load too far or not far enough. The tests are those of
    samples that are moved, within these bounds, as close to each other as they can be.
    """
    samples = first.times_s, second.times_s
    found = compare(*samples, names)
    if first.reach == second.reach == 0.0:
        return found
    found = replace(
        found,
        p99_difference_s=_unbounded(found.p99_difference_s),
        shift_s=_unbounded(found.shift_s),
        superiority=_unbounded(found.superiority),
    )
    if first.reach is None or second.reach is None:
        return replace(
            found,
            median_ratio=_unbounded(found.median_ratio),
            p99_ratio=_unbounded(found.p99_ratio),
            tests=tuple(replace(test, p=None, p_holm=None) for test in found.tests),
            reason="Whether beyond chance is not known: the scatter of the points next to this load is not",
        )
    reach, away = math.hypot(first.reach, second.reach), math.log(found.median_ratio.value)
    nearer = compare(samples[0], samples[1] * math.exp(-math.copysign(min(abs(away), reach), away)), names)
    return replace(
        found,
        median_ratio=_widened(found.median_ratio, reach),
        p99_ratio=_widened(found.p99_ratio, reach),
        tests=nearer.tests,
    )


def mean_ratio(first: AtLoad, second: AtLoad) -> tuple[Estimate, float | None]:
    """Return the second series' mean over the first one's at one load, its 95 % interval, and p; None: not known.

    The means may be moved to this load too far or not far enough: the interval is wider by that, and p is that of means
    which are moved, within these bounds, as close to each other as they can be.
    """
    value = second.mean_s / first.mean_s
    if first.error is None or second.error is None:
        return Estimate(value, None, None), None
    error, count, bend = math.hypot(first.error, second.error), min(first.count, second.count), first.bend + second.bend
    half, beyond = student_t(count) * error + bend, abs(math.log(value)) - bend
    p = 2 * float(special.stdtr(count - 1, -max(beyond, 0.0) / error)) if error else float(beyond <= 0)
    return Estimate(value, value * math.exp(-half), value * math.exp(half)), p


def _unbounded(estimate: Estimate) -> Estimate:
    return Estimate(estimate.value, None, None)


def _widened(ratio: Estimate, reach: float) -> Estimate:
    """Widen the interval of a ratio by an error that is independent of it."""
    low, high = (
        None if end is None else ratio.value * math.exp(side * math.hypot(math.log(end / ratio.value), reach))
        for end, side in ((ratio.low, -1), (ratio.high, 1))
    )
    return Estimate(ratio.value, low, high)


def mean_interval(point: Point) -> Interval | None:
    """95 % interval of the mean iteration time, in s: mean ± t * s / sqrt(m), m the independent iterations."""
    error = relative_error(point)
    if error is None or point.mean_s is None:
        return None
    half = point.mean_s * error[0] * student_t(error[1])
    return point.mean_s - half, point.mean_s + half


def relative_error(point: Point) -> tuple[float, float] | None:
    """Relative standard error of the mean, and the effective number of independent iterations behind it."""
    count = point.iterations if point.independent is None else point.independent
    if count is None or count < MIN_INDEPENDENT or point.variation is None:
        return None
    return point.variation / math.sqrt(count), count


def student_t(count: float) -> float:
    """Return Student's t of a 95 % interval for a number of independent iterations."""
    return float(special.stdtrit(count - 1, (1 + LEVEL) / 2))
