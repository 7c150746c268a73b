"""The congestion point as the break of a continuous two-segment line, with an interval.

ln t is fitted against u = ln(C/(C-BW)), so that the slope is an elasticity: the per cent of time added for each per
cent of bandwidth taken away. Profile least squares find the break (Muggeo, Statist. Med. 22, 2003, fits the same
model). Its interval holds every place that an F test does not reject (Feder, Ann. Statist. 3, 1975; Hansen, J. Bus.
Econ. Statist. 35, 2017): the sum of squares is not normal around its minimum, so that resampled breaks scatter too
little. `ringtap.analysis.model.congestion_point` has the construction of the thesis's appendix A.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from ringtap.analysis.model.congestion_point import MIN_ELASTICITY
from ringtap.analysis.model.fit import FitResult, corrected_akaike
from ringtap.analysis.model.residuals import RESIDUAL_FLOOR
from ringtap.analysis.statistics.arrays import Array, Values, as_gbps, as_points, as_samples
from ringtap.analysis.statistics.mean_errors import mean_errors
from ringtap.core.schema import MERGE_SHARE
from ringtap.core.units import rate_gbps

MIN_LOADS = 5
LEVEL = 0.95
SIGNIFICANT = 0.05
WIDE_SHARE = 0.5  # of the range of measured loads: a wider interval does not locate the break
_BREAKS = 241  # candidate breaks
_OUTER = 20  # candidates of an interval between the two loads at either end, where no break is looked for
_NULL_SETS = 999
_MOST = 700.0  # a larger power of e is no floating point number
_DOUBT = 0.25  # exponent of p, by which an interval widens if the break itself may be chance


@dataclass(frozen=True)
class BreakCandidate:
    """A number of the break with the ends of its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class BreakPoint:
    """Break beyond which the iteration time grows faster with the load.

    Attributes:
        bandwidth_gbps: load BW* of the break, usually between measured loads.
        iteration_s: time t* on the lines at this load.
        data_mb: (C - BW*) t* in decimal megabytes.
        elasticity: slope of ln t against ln(C/(C-BW)) before and after: 0 if bandwidth does not matter, 1 if the
            time is inversely proportional to the bandwidth that is left.
        p: probability of as much improvement over one straight line by chance.
        aicc: AICc of the two segments, comparable with that of a fit of equation 3.7 to the same points; None if it
            is undefined.
        weighted: True if the points are weighted by the errors of their means.
        capacity_gbps: C.
        warnings: limits of the numbers, one sentence each.
    """

    bandwidth_gbps: BreakCandidate
    iteration_s: BreakCandidate
    data_mb: BreakCandidate
    elasticity: tuple[float, float]
    p: float
    aicc: float | None
    weighted: bool
    capacity_gbps: float
    warnings: tuple[str, ...]

    def at(self, bandwidth_gbps: Values) -> Array:
        """Return the times in seconds on the two segments at loads below the capacity; same shape as the argument."""
        u = scaled(as_gbps(bandwidth_gbps), self.capacity_gbps)
        past = u - scaled(np.array(self.bandwidth_gbps.value), self.capacity_gbps)
        before, after = self.elasticity
        result: Array = self.iteration_s.value * np.exp(np.where(past < 0, before, after) * past)
        return result

    def to_json(self) -> dict[str, Any]:
        """The break as plain values."""
        item: dict[str, Any] = {}
        for name in ("bandwidth_gbps", "iteration_s", "data_mb"):
            number = getattr(self, name)
            item |= {name: number.value, f"{name}_interval": [number.low, number.high]}
        item |= {"elasticity": list(self.elasticity), "p": self.p, "aicc": self.aicc, "level": LEVEL}
        return item | {"weighted": self.weighted, "warnings": list(self.warnings)}


@dataclass(frozen=True, repr=False)
class BreakResult:
    """Either a break or the reason why there is none.

    Attributes:
        point: the break, or None.
        reason: one sentence if ``point`` is None, else empty.
    """

    point: BreakPoint | None
    reason: str = ""

    def __repr__(self) -> str:
        if self.point is None:
            return f"<BreakResult: {self.reason}>"
        load = self.point.bandwidth_gbps
        return f"<BreakResult: {load.value:.4g} Gbit/s ({load.low:.4g} to {load.high:.4g})>"


def find_break(
    bandwidth_gbps: Values,
    iteration_s: Values,
    capacity_gbps: float | str,
    iterations_s: Iterable[Values] | None = None,
    seed: int = 0,
) -> BreakResult:
    """Find the break of a series, with 95 % intervals of its load, time and volume.

    Args:
        bandwidth_gbps: loads, shape (points,), in any order. Numbers are Gbit/s; text has a unit.
        iteration_s: mean iteration times, shape (points,). Numbers are seconds; text has a unit.
        capacity_gbps: capacity of the bottleneck, in Gbit/s or as text such as ``25gbit``.
        iterations_s: the iteration times behind each mean, in order of time, if they are known. The points are then
            weighted by the errors of their means. Without them, all points count for the same.
        seed: seed of the simulated straight lines.

    Raises:
        UsageError: the arrays differ in length or hold invalid values.
    """
    capacity_gbps = rate_gbps(capacity_gbps)
    load, time = as_points(bandwidth_gbps, iteration_s, capacity_gbps)
    samples_s = as_samples(iterations_s, len(load))
    order = np.lexsort((time, load))
    load, log_time = load[order], np.log(time[order])
    inner = _inner(load, capacity_gbps)
    if inner is None:
        return BreakResult(None, f"fewer than {MIN_LOADS} different loads cannot place a break")
    u, (first, last) = scaled(load, capacity_gbps), scaled(np.array(inner), capacity_gbps)
    log_weight = np.zeros(len(u))
    if samples_s is not None:
        log_weight = -np.log(mean_errors(load, capacity_gbps, [samples_s[number] for number in order]))
    # a geometric mean of 1 keeps AICc comparable with that of fits
    weight = np.exp(log_weight - log_weight.mean())
    places = np.linspace(first, last, _BREAKS)
    found = _Lines(u, weight, places, log_time)
    p = found.chance(np.random.default_rng(seed))
    reason = _no_break(found, p)
    if reason:
        return BreakResult(None, reason)
    outer = [np.linspace(*ends, _OUTER + 2)[1:-1] for ends in ((u[0], first), (last, u[-1]))]
    wide = _Lines(u, weight, np.concatenate((outer[0], places, outer[1])), log_time)
    return BreakResult(_point(found, wide, load, p, capacity_gbps, samples_s is not None))


def scaled(bandwidth_gbps: Array, capacity_gbps: float) -> Array:
    """Return u = ln(C/(C-BW))."""
    result: Array = -np.log1p(-bandwidth_gbps / capacity_gbps)
    return result


def compared(point: BreakPoint, fit: FitResult) -> str:
    """Return a sentence if a smooth curve describes the points better than a break does, else an empty text."""
    if point.aicc is None or fit.aicc is None or point.aicc <= fit.aicc + 2:
        return ""
    return (
        f"a smooth curve ({fit.name}) describes these points better than a break (AICc {fit.aicc:.1f} against "
        f"{point.aicc:.1f}): the break is a summary of a bend and moves with the choice of loads"
    )


class _Lines:
    """Least squares of ln t = level + before*(u - at) + (after - before)*max(0, u - at) at each of several places.

    Attributes:
        at: u of each place.
        numbers: level, before and after - before, shape (places, 3).
        level_variance: variance of the level at a known place, relative to that of a point of weight 1.
        rss: residual sum of squares of each place; a downward bend counts as none.
        best: number of the place with the least one.
    """

    def __init__(self, u: Array, weight: Array, at: Array, log_time: Array) -> None:
        self.at = at
        past = u - at[:, None]
        designs = np.stack([np.ones_like(past), past, np.maximum(past, 0.0)], axis=-1) * weight[:, None]
        self._bases, triangles = np.linalg.qr(designs)
        # the last column of a basis belongs to the hinge alone; its sign is that of the change of slope
        self._turn = np.sign(triangles[:, 2, 2])
        self._straight = np.linalg.qr(np.column_stack([weight, weight * u]))[0]
        rows = weight * (log_time - log_time.mean())
        inverse = np.linalg.inv(triangles)
        self.numbers = (inverse @ (np.swapaxes(self._bases, 1, 2) @ rows)[:, :, None])[:, :, 0]
        self.numbers[:, 0] += log_time.mean()
        self.level_variance: Array = (inverse[:, 0] ** 2).sum(axis=1)
        self._rows = rows
        self.rss: Array = self._costs(rows[None])[0]
        self.best = int(self.rss.argmin())

    @property
    def slopes(self) -> tuple[float, float]:
        """Slopes before and after the best place."""
        _, before, change = self.numbers[self.best]
        return float(before), float(before + change)

    def chance(self, draw: np.random.Generator) -> float:
        """p value from simulated straight lines with normal scatter, whose gains depend on loads and weights alone."""
        null = self._gain(draw.normal(size=(_NULL_SETS, len(self._rows))))
        return float((1 + np.sum(null >= self._gain(self._rows[None])[0])) / (1 + _NULL_SETS))

    def _costs(self, rows: Array) -> Array:
        """Residual sum of squares of sets of weighted times, shape (sets, places)."""
        explained = np.tensordot(rows, self._bases, axes=(1, 1))  # sets, places, columns
        upward = np.maximum(explained[:, :, 2] * self._turn, 0.0)
        costs = (rows**2).sum(axis=1)[:, None] - (explained[:, :, :2] ** 2).sum(axis=2) - upward**2
        result: Array = np.maximum(costs, 0.0)
        return result

    def _gain(self, rows: Array) -> Array:
        """Reduction of a straight line's sum of squares by the break, relative to the rest; shape (sets,)."""
        straight = (rows**2).sum(axis=1) - ((rows @ self._straight) ** 2).sum(axis=1)
        rest = np.maximum(self._costs(rows).min(axis=1), rows.shape[1] * RESIDUAL_FLOOR**2)
        result: Array = np.maximum(straight - rest, 0.0) / rest
        return result


def _inner(load: Array, capacity_gbps: float) -> tuple[float, float] | None:
    """Second and second-last load; loads within 1 % of capacity count as one. None for too few loads."""
    distinct: list[float] = []
    for value in load:
        if not distinct or value - distinct[-1] > MERGE_SHARE * capacity_gbps:
            distinct.append(float(value))
    return (distinct[1], distinct[-2]) if len(distinct) >= MIN_LOADS else None


def _no_break(found: _Lines, p: float) -> str:
    before, after = found.slopes
    if p >= SIGNIFICANT or after <= before:
        return f"one straight line describes the points about as well as two (p = {p:.2g}): no break can be placed"
    if after < MIN_ELASTICITY:
        return (
            f"past its break the time grows by {after:.2g} % for each per cent of bandwidth taken: no congestion was "
            "reached"
        )
    return ""


def _margin(p: float, freedom: int) -> float:
    """Return how much the sum of squares may exceed its minimum within an interval, in variances of the residuals.

    A break is only reported if its p is small, and then its scatter is often underestimated, so that intervals at 95 %
    miss it more often (Benjamini and Yekutieli, J. Am. Statist. Assoc. 100, 2005). The more p resembles chance, the
    less may be missed; docs/method/method.md, "Break of two segments", has the coverage.
    """
    missed = (1 - LEVEL) * (1 - (p / SIGNIFICANT) ** _DOUBT)
    return float(special.stdtrit(freedom, 1 - missed / 2)) ** 2


def _point(found: _Lines, wide: _Lines, load: Array, p: float, capacity: float, weighted: bool) -> BreakPoint:
    points = len(load)
    rss = max(float(found.rss[found.best]), points * RESIDUAL_FLOOR**2)
    left = rss * (1 + _margin(p, points - 4) / (points - 4)) - wide.rss
    inside = np.flatnonzero(left >= 0)
    # the ends lie between the outermost places within and the next ones, where the numbers count as well
    first, last = int(inside[0]) - 1, int(inside[-1]) + 1
    within = slice(max(first, 0), last + 1)
    reach = np.sqrt(wide.level_variance * np.maximum(left, 0.0))

    def bandwidth(u: float) -> float:
        return -capacity * math.expm1(-u)

    def end(outside: int, within: int) -> float:
        """Interpolate where the margin ends."""
        share = left[within] / (left[within] - left[outside])
        return bandwidth(float(wide.at[within] + share * (wide.at[outside] - wide.at[within])))

    def profile(of: Array, value: float) -> BreakCandidate:
        """Return a logarithm that is known at each place up to ``reach``, with its ends over all places."""
        low, high = (of - reach)[within].min(), (of + reach)[within].max()
        return BreakCandidate(math.exp(value), math.exp(max(low, -_MOST)), math.exp(min(high, _MOST)))

    level, at_u = wide.numbers[:, 0], float(found.at[found.best])
    best = float(found.numbers[found.best, 0])
    log_left = math.log(125 * capacity)
    at = BreakCandidate(
        bandwidth(at_u),
        float(load[0]) if first < 0 else end(first, first + 1),
        float(load[-1]) if last == len(wide.at) else end(last, last - 1),
    )
    warnings = []
    if at.high - at.low > WIDE_SHARE * (load[-1] - load[0]):
        warnings.append(
            f"the break lies anywhere from {max(round(at.low, 9), 0.0):.3g} to {at.high:.3g} Gbit/s (95 %): these "
            "points hardly place it"
        )
    return BreakPoint(
        bandwidth_gbps=at,
        iteration_s=profile(level, best),
        data_mb=profile(log_left - wide.at + level, log_left - at_u + best),
        elasticity=found.slopes,
        p=p,
        aicc=corrected_akaike(points * math.log(rss / points), points, 5),
        weighted=weighted,
        capacity_gbps=capacity,
        warnings=tuple(warnings),
    )
