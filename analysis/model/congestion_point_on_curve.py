"""Finds the congestion point on the fitted curve: the thesis's construction in the limit of a dense grid of loads.

The construction of `ringtap.analysis.model.congestion_point` can only choose a measured load. On a curve, the same
steps give a load wherever the measured ones lie. The curves are those of equation 3.7 with any exponent, and two
straight lines of ln t against u = ln(C/(C-BW)). Each counts by how well it describes the points (Bayesian model
averaging: Hoeting et al., Statist. Sci. 14, 1999), so that the interval holds what the points leave open.
docs/method/method.md describes the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from ringtap.analysis.model.congestion_point import CURVED_SHARE, data_volume_mb, merge_replicates
from ringtap.analysis.model.fit import relative_errors
from ringtap.analysis.model.model_least_squares import FREE_BOUNDS
from ringtap.analysis.model.scatter_and_weights import RESIDUAL_FLOOR
from ringtap.analysis.statistics.mean_errors import mean_errors
from ringtap.analysis.statistics.quantiles import LEVEL
from ringtap.analysis.statistics.to_arrays import Array, Values, as_points, as_samples
from ringtap.core.units import rate_gbps

MIN_LOADS = 5
WIDE_SHARE = 0.5  # of the range of measured loads: points that leave more open do not place the point
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)  # the point is off by less than 2e-5 of the capacity
_MOST_U = 30.0  # of the curved region: no load that can be measured is nearer to the capacity
_BETWEEN = (0.0, 0.003, 0.01, 0.03, 0.1)  # scatter of ln t between windows, beyond the errors of their means
_GROWTH = (0.0, 0.6, 1.2)  # exponent with which the scatter grows in C/(C-BW), if the errors are not known
_RATIO = 3.0  # by which each further scatter is less likely beforehand than the one before
_PRIOR_FREEDOM = 8.0  # degrees of freedom for which known errors count
_BENT = (0.0, 0.5, 1.0)  # exponents of the curves that bend; with 0 they are two lines of ln t against u
_SLOPES = 2.0  # the elasticity at no load after the bend exceeds that before it by this at most
_PLACES, _LEAST_PLACES, _ZOOMS = 121, 40, 8
_QUANTILES = (np.arange(41) + 0.5) / 41
_NEGLIGIBLE = 14.0  # in ln of the weight


@dataclass(frozen=True)
class CurvePoint:
    """The congestion point on the fitted curve.

    Attributes:
        bandwidth_gbps: load BW*.
        low_gbps: lower end of its 95 % interval.
        high_gbps: upper end.
        iteration_s: time t* on the curve.
        data_mb: (C - BW*) t* in decimal megabytes.
        weighted: True if the points were weighted by their own errors.
        capacity_gbps: C.
    """

    bandwidth_gbps: float
    low_gbps: float
    high_gbps: float
    iteration_s: float
    data_mb: float
    weighted: bool
    capacity_gbps: float

    @property
    def interval_share(self) -> tuple[float, float]:
        """The interval, as shares of the capacity."""
        return self.low_gbps / self.capacity_gbps, self.high_gbps / self.capacity_gbps

    @property
    def half_width_gbps(self) -> float:
        """Half of the length of the interval."""
        return (self.high_gbps - self.low_gbps) / 2

    def to_json(self) -> dict[str, Any]:
        """The point as plain values."""
        return asdict(self) | {"level": LEVEL}


@dataclass(frozen=True, repr=False)
class CurveResult:
    """Either a congestion point on the curve or the reason why there is none.

    Attributes:
        point: the point, or None.
        reason: one sentence if ``point`` is None, else empty.
        is_open: True if there may be a point, but these points are too few or too uncertain to place it.
        curves: the curves that the points allow; None if there are too few points.
    """

    point: CurvePoint | None
    reason: str = ""
    is_open: bool = False
    curves: CurveFamily | None = field(default=None, compare=False)

    @property
    def clause(self) -> str:
        """Clause of a sentence: the load at which congestion begins, or the reason why it is not known."""
        point = self.point
        if point is None:
            unknown = "it is not known where congestion begins" if self.is_open else "no congestion point was found"
            return f"{unknown}, because {self.reason}"
        share, low, high = (
            f"{100 * one:.0f}" for one in (point.bandwidth_gbps / point.capacity_gbps, *point.interval_share)
        )
        at = f"{point.bandwidth_gbps:.3g} Gbit/s, {share} % of the capacity"
        return f"congestion begins at {at} ({100 * LEVEL:.0f} % interval {low} to {high} %)"

    def __repr__(self) -> str:
        if self.point is None:
            return f"<CurveResult: {self.reason}>"
        point = self.point
        return f"<CurveResult: {point.bandwidth_gbps:.4g} Gbit/s ({point.low_gbps:.4g} to {point.high_gbps:.4g})>"


def find_curve_point(
    bandwidth_gbps: Values,
    iteration_s: Values,
    capacity_gbps: float | str,
    iterations_s: Iterable[Values] | None = None,
    spread_s: Values | None = None,
) -> CurveResult:
    """Find the congestion point on the curve through the points, with its 95 % interval.

    Args:
        bandwidth_gbps: loads, shape (points,), in any order. Numbers are Gbit/s; text has a unit.
        iteration_s: mean iteration times, shape (points,). Numbers are seconds; text has a unit.
        capacity_gbps: capacity of the bottleneck, in Gbit/s or as text such as ``25gbit``.
        iterations_s: the iteration times behind each mean, in order of time, if they are known. The points are then
            weighted by the errors of their means.
        spread_s: standard error of each mean in seconds, shape (points,), if the iterations are not known. Without
            either, the scatter of the points around the curves gives the interval.

    Raises:
        UsageError: the arrays differ in length or hold invalid values.
    """
    capacity = rate_gbps(capacity_gbps)
    load, time = as_points(bandwidth_gbps, iteration_s, capacity)
    error = None if spread_s is None else relative_errors(spread_s, time)
    if (samples_s := as_samples(iterations_s, len(load))) is not None:
        error = mean_errors(load, capacity, samples_s)
    curves = curves_through(load, time, capacity, error)
    if curves is None:
        return CurveResult(None, f"fewer than {MIN_LOADS} different loads cannot place it", is_open=True)
    least, most = load.min(), load.max()
    low, middle, high = (capacity * share for share in curves.quantiles((1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2))
    point, reason, is_open = None, "", False
    if middle > most and curves.falling > (1 - LEVEL) / 2:
        reason = "the iteration time does not measurably grow with the load"
    elif middle > most:
        reason = "the curve bends beyond the heaviest load: no congestion was reached"
    elif middle <= 0:
        reason = "the time grows as fast as the bandwidth shrinks from no load on: there is no flat region"
    elif high - low > WIDE_SHARE * (most - least):
        where = f"between {low:.3g} and {high:.3g} Gbit/s (95 %)"
        reason = f"the points only place it {where}: add loads there, or measure each for longer"
        is_open = True
    else:
        at_s = curves.time_s(middle / capacity)
        volume_mb = data_volume_mb(middle, at_s, capacity)
        point = CurvePoint(middle, low, high, at_s, volume_mb, error is not None, capacity)
    return CurveResult(point, reason, is_open, curves)


def curves_through(load: Array, time: Array, capacity: float, error: Array | None) -> CurveFamily | None:
    """Return the curves that points allow, or None if they are at too few loads.

    Args:
        load: loads in Gbit/s, in any order.
        time: mean iteration times in seconds.
        capacity: capacity in Gbit/s.
        error: standard error of each mean, as a share of it; None if it is not known.
    """
    distinct = merge_replicates(load, time, capacity)[0]
    if len(distinct) < MIN_LOADS:
        return None
    order = np.lexsort((time, load))
    u, ends = (-np.log1p(-one / capacity) for one in (load[order], distinct[[0, 1, -2, -1]]))
    return CurveFamily(u, ends, np.log(time[order]), None if error is None else error[order])


@dataclass(frozen=True)
class _Solved:
    """Least squares of ln t on columns and a level.

    Attributes:
        log_evidence: ln of the likelihood of the points, over all slopes, levels and sizes of the scatter.
        level: ln t at the centre of the columns.
        centre: weighted mean of each column.
        slopes: coefficient of each column.
        deviation: standard deviation of the first coefficient, by Student's t.
        freedom: its degrees of freedom.
    """

    log_evidence: Array
    level: Array
    centre: Array
    slopes: Array
    deviation: Array
    freedom: float

    def at(self, kept: tuple[npt.NDArray[np.intp], ...]) -> _Solved:
        """Return some of the fits."""
        return _Solved(
            self.log_evidence[kept], self.level[kept], self.centre[kept], self.slopes[kept], self.deviation[kept],
            self.freedom,
        )  # fmt: skip


@dataclass(frozen=True)
class _Kind:
    """Curves of one kind, with ln of the weight of each.

    Attributes:
        log_weight: ln of the weight.
        share: congestion point as a share of the capacity: 0 without a flat region, 1 without congestion.
        falls: True if the time does not grow with the load.
        log_time: function that returns ln t of each curve at one u.
    """

    log_weight: Array
    share: Array
    falls: npt.NDArray[np.bool_]
    log_time: Callable[[Array], Array]


class CurveFamily:
    """The curves that the points allow, smooth ones of equation 3.7 and bent ones, with their weights.

    Attributes:
        falling: weight of the curves that do not grow.
    """

    def __init__(self, u: Array, ends: Array, log_time: Array, error: Array | None) -> None:
        self._u, self._mean = u, float(log_time.mean())
        self._log_time = log_time - self._mean
        self._prior = 0.0 if error is None else _PRIOR_FREEDOM
        log_prior: Array
        if error is None:
            log_prior = np.zeros(len(_GROWTH))
            weight: Array = np.exp(-2 * np.multiply.outer(_GROWTH, u - u.mean()))
        else:
            log_prior = np.array([-number * math.log(_RATIO) for number in range(len(_BETWEEN))])
            weight = 1 / (error**2 + np.square(_BETWEEN)[:, None] + RESIDUAL_FLOOR**2)
        self._weight, self._log_prior = weight, log_prior
        kinds = (self._smooth(), *(self._bent(n, ends) for n in _BENT))
        log_weight = np.concatenate([kind.log_weight for kind in kinds])
        likely = np.exp(log_weight - log_weight.max())
        self._kinds, self._share = kinds, np.concatenate([kind.share for kind in kinds])
        self._weight_of = likely / likely.sum()
        self.falling = float(self._weight_of[np.concatenate([kind.falls for kind in kinds])].sum())

    def quantiles(self, *orders: float) -> list[float]:
        """Return quantiles of the congestion point, as shares of the capacity."""
        order = np.argsort(self._share)
        weight = self._weight_of[order]
        result: list[float] = np.interp(orders, np.cumsum(weight) - weight / 2, self._share[order]).tolist()
        return result

    def time_s(self, share: float) -> float:
        """Return the time at a load, a share of the capacity: the mean of ln t over the curves."""
        u = np.array(-math.log1p(-share))
        log_times = np.concatenate([kind.log_time(u) for kind in self._kinds])
        return math.exp(self._mean + self._average(log_times))

    @property
    def variance(self) -> float:
        """Variance of the congestion point, as a share of the capacity."""
        return self._average((self._share - self._average(self._share)) ** 2)

    def _average(self, values: Array) -> float:
        """Return the mean over the curves; for a product as long as this, BLAS would start threads, which cost more."""
        return float((self._weight_of * values).sum())

    def _smooth(self) -> _Kind:
        def columns(log_n: Array, u: Array) -> Array:
            return np.expm1(np.multiply.outer(np.exp(log_n), u))[..., None]

        log_n, log_weight, solved = self._searched(np.log(FREE_BOUNDS), columns)
        n = np.exp(log_n)
        # b is as likely a priori as any other with an elasticity at no load from 0 to 1
        log_weight += log_n - math.log(len(_QUANTILES))
        b = solved.slopes + solved.deviation[:, None] * special.stdtrit(solved.freedom, _QUANTILES)

        def log_time(u: Array) -> Array:
            past = columns(log_n, u) - solved.centre
            result: Array = solved.level[:, None] + b * past
            return result.ravel()

        share = -np.expm1(-place(b, n[:, None]))
        return _Kind(np.repeat(log_weight, len(_QUANTILES)), share.ravel(), b.ravel() <= 0, log_time)

    def _bent(self, n: float, ends: Array) -> _Kind:
        """Curves that bend between the first and the last load; between the two at an end, all bends fit alike."""

        def scaled(u: Array) -> Array:
            result: Array = np.expm1(n * u) / n if n else u
            return result

        def columns(at: Array, u: Array) -> Array:
            past = scaled(u) - scaled(np.clip(at, ends[1], ends[2]))[:, None]
            return np.stack([np.minimum(past, 0.0), np.maximum(past, 0.0)], axis=-1)

        at, log_weight, solved = self._searched(ends[[0, 3]], columns)
        before, after = solved.slopes.T
        bend = np.clip(at, ends[1], ends[2])

        def log_time(u: Array) -> Array:
            result: Array = solved.level + ((columns(at, u)[:, 0] - solved.centre) * solved.slopes).sum(axis=-1)
            return result

        # the slopes are elasticities at no load: with u they grow by e^(nu)
        curved = before + CURVED_SHARE * (1 - before)
        start, steep = bend.copy(), after * np.exp(n * bend)
        for slope, later in ((before, False), (after, True)):
            with np.errstate(divide="ignore", invalid="ignore"):
                reaches = np.where(slope > 0, np.log(curved / slope) / n if n else np.inf, np.inf)
            moved = reaches > bend if later else reaches < bend
            moved &= (steep < curved) if later else np.full(len(bend), True)
            start, steep = np.where(moved, reaches, start), np.where(moved, curved, steep)
        share = np.where(before < 1, 1.0, 0.0)
        known = (before < 1) & (start < _MOST_U)
        first, second, kink = before[known], after[known], scaled(bend)[known]
        lines = _meeting(
            lambda u: np.where(scaled(u) < kink, first, second) * (scaled(u) - kink), start[known], steep[known]
        )
        share[known] = np.clip(lines - np.expm1(-at[known]) + np.expm1(-bend[known]), 0.0, 1.0)
        return _Kind(log_weight - math.log(_SLOPES * len(_BENT)), share, after <= 0, log_time)

    def _searched(self, ends: Array, columns: Callable[[Array, Array], Array]) -> tuple[Array, Array, _Solved]:
        """Fit the curves at places between two ends, closer together where they fit; return those with some weight.

        Returns:
            Places, ln of the weights and the fits, all of one length.
        """
        places = np.linspace(ends[0], ends[1], _PLACES)
        for _ in range(_ZOOMS):
            fits = self._solved(columns(places, self._u))
            likely = np.flatnonzero((fits.log_evidence > fits.log_evidence.max() - _NEGLIGIBLE).any(axis=0))
            if len(likely) >= _LEAST_PLACES:
                break
            places = np.linspace(places[max(likely[0] - 1, 0)], places[min(likely[-1] + 1, _PLACES - 1)], _PLACES)
        else:
            fits = self._solved(columns(places, self._u))
        log_weight = fits.log_evidence + math.log((places[1] - places[0]) / (ends[1] - ends[0]))
        kept = np.nonzero(log_weight > log_weight.max() - _NEGLIGIBLE)
        return places[kept[1]], log_weight[kept], fits.at(kept)

    def _solved(self, columns: Array) -> _Solved:
        """Fit ln t to columns, shape (places, points, columns), and a level, under each scatter."""
        points, number = columns.shape[1:]
        weight = self._weight[:, None, :, None]
        total = weight.sum(axis=2)
        centre = (columns * weight).sum(axis=2) / total
        level = (self._weight @ self._log_time)[:, None] / total[..., 0]
        past = columns - centre[:, :, None]
        weighted = np.swapaxes(past * weight, 2, 3)
        normal = weighted @ past
        rest = (self._log_time - level[..., None])[..., None]
        slopes = np.linalg.solve(normal, weighted @ rest)
        squares = ((rest - past @ slopes) ** 2 * weight).sum(axis=(2, 3))
        free = points - number - 1
        freedom = free + self._prior
        floor = 0.0 if self._prior else points * RESIDUAL_FLOOR**2
        scale = np.maximum(squares, floor) + self._prior
        log_evidence = (self._log_prior + np.log(self._weight).sum(axis=1) / 2)[:, None] - np.log(total[..., 0]) / 2
        log_evidence = log_evidence - np.linalg.slogdet(normal)[1] / 2 - free / 2 * math.log(2 * math.pi)
        log_evidence += special.gammaln(freedom / 2) - freedom / 2 * np.log(scale / 2)
        deviation = np.sqrt(scale / freedom / normal[..., 0, 0])
        level = np.broadcast_to(level, deviation.shape)
        return _Solved(log_evidence, level, centre, slopes[..., 0], deviation, freedom)


def place(b: Values, n: Values) -> Array:
    """Return u = ln(C/(C-BW)) of the congestion point on curves t = t0 exp(b ((C/(C-BW))^n - 1)).

    The curved region begins where the elasticity b n (C/(C-BW))^n has gone `CURVED_SHARE` of the way from that of no
    load to 1. The flat line is the least-squares line of t over all loads below it; the tangent meets it at the point.
    Without a flat region the result is 0, without growth infinite.
    """
    slopes, exponents = np.broadcast_arrays(np.asarray(b, dtype=np.float64), np.asarray(n, dtype=np.float64))
    elasticity = (slopes * exponents).ravel()
    result: Array = np.where(elasticity >= 1, 0.0, math.inf)
    (growing,) = np.nonzero((elasticity > 0) & (elasticity < 1))
    start = np.log1p(CURVED_SHARE * (1 / elasticity[growing] - 1)) / exponents.ravel()[growing]
    growing, start = growing[start < _MOST_U], start[start < _MOST_U]
    slope, exponent, first = (one.ravel()[growing] for one in (slopes, exponents, elasticity))
    steep = first + CURVED_SHARE * (1 - first)
    result[growing] = -np.log1p(-_meeting(lambda u: slope * (np.exp(exponent * u) - 1), start, steep))
    return result.reshape(slopes.shape)


def _meeting(log_time: Callable[[Array], Array], start: Array, elasticity: Array) -> Array:
    """Return the load at which a tangent meets the flat line, as a share of the capacity.

    Args:
        log_time: ln t of each curve at one u of its own.
        start: u at which the flat region ends.
        elasticity: elasticity of the tangent there.
    """
    rest = np.exp(-start)
    share = -np.expm1(-start)
    middle, slope = np.zeros(len(start)), np.zeros(len(start))
    for node, weight in zip(_NODES.tolist(), _WEIGHTS.tolist(), strict=True):
        at = (1 + node) / 2
        times = weight * np.exp(log_time(-np.log((1 - at) + at * rest)))
        middle += times / 2
        slope += 3 * node * times
    slope /= share
    end = np.exp(log_time(start))
    steep = end * elasticity / rest
    result: Array = (middle - slope * share / 2 - end + steep * share) / (steep - slope)
    return result
