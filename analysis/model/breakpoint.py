"""The congestion point as the break of a continuous two-segment line, with an interval.

ln t is fitted against u = ln(C/(C-BW)), so that the slope is an elasticity: the per cent of time added for each per
cent of bandwidth taken away. Profile least squares find the break (Muggeo, Statist. Med. 22, 2003, fits the same
model), and resampling gives its interval. `ringtap.analysis.model.congestion_point` has the construction of the
thesis's appendix A.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ringtap.analysis.model.congestion_point import MIN_ELASTICITY
from ringtap.analysis.model.fit import FitResult, corrected_akaike
from ringtap.analysis.model.residuals import RESIDUAL_FLOOR
from ringtap.analysis.statistics.arrays import Array, Values, as_gbps, as_points, as_samples
from ringtap.analysis.statistics.autocorrelation import block_means
from ringtap.schema import MERGE_SHARE
from ringtap.units import rate_gbps

MIN_LOADS = 5
LEVEL = 0.95
SIGNIFICANT = 0.05
WIDE_SHARE = 0.5  # of the range of measured loads: a wider interval does not locate the break
_BREAKS = 241  # candidate breaks
_NULL_SETS = 999
_MIN_SHARE = 0.0025  # of the points' residual sum of squares: lower bound of that of a resampled set

Resampled = Literal["iterations", "residuals"]


@dataclass(frozen=True)
class BreakCandidate:
    """A number of the break with the ends of its bootstrap interval."""

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
        resampled: ``iterations`` within the points, or ``residuals`` around the lines.
        samples: number of resampled sets.
        capacity_gbps: C.
        warnings: limits of the numbers, one sentence each.
    """

    bandwidth_gbps: BreakCandidate
    iteration_s: BreakCandidate
    data_mb: BreakCandidate
    elasticity: tuple[float, float]
    p: float
    aicc: float | None
    resampled: Resampled
    samples: int
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
        return item | {"resampled": self.resampled, "samples": self.samples, "warnings": list(self.warnings)}


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
    samples: int = 1000,
    seed: int = 0,
) -> BreakResult:
    """Find the break of a series, with 95 % intervals of its load, time and volume.

    Args:
        bandwidth_gbps: loads, shape (points,), in any order. Numbers are Gbit/s; text has a unit.
        iteration_s: mean iteration times, shape (points,). Numbers are seconds; text has a unit.
        capacity_gbps: capacity of the bottleneck, in Gbit/s or as text such as ``25gbit``.
        iterations_s: the iteration times behind each mean, in order of time, if they are known. They are resampled
            within each point, in blocks as long as they are correlated. Without them, the residuals are resampled.
        samples: number of resampled sets.
        seed: seed of the resampling.

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
    search = _Search(scaled(load, capacity_gbps), *scaled(np.array(inner), capacity_gbps))
    found = search.solve(log_time[None])
    draw = np.random.default_rng(seed)
    p = search.chance(log_time, draw)
    reason = _no_break(found, p)
    if reason:
        return BreakResult(None, reason)
    if samples_s is None:
        sets = search.resampled(log_time, samples, draw)
    else:
        means = [block_means(samples_s[number], samples, draw) for number in order]
        # centred on the given means, however they were obtained
        sets = log_time + np.column_stack([np.log(mean / mean.mean()) for mean in means])
    resampled: Resampled = "residuals" if samples_s is None else "iterations"
    return BreakResult(_point(found, search.solve(sets), load, p, capacity_gbps, resampled))


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


@dataclass(frozen=True)
class _Lines:
    """Two segments of several sets; every array has shape (sets,).

    Attributes:
        at: u of the break.
        level: ln t at the break.
        before: slope before it.
        after: slope after it.
        rss: residual sum of squares.
    """

    at: Array
    level: Array
    before: Array
    after: Array
    rss: Array


class _Search:
    """Least squares of ln t = level + before*(u - at) + (after - before)*max(0, u - at) over all candidate breaks."""

    def __init__(self, u: Array, first: float, last: float) -> None:
        self.u = u
        self.candidates = np.linspace(first, last, _BREAKS)
        past = u - self.candidates[:, None]
        self.designs = np.stack([np.ones_like(past), past, np.maximum(past, 0.0)], axis=-1)
        self.bases = np.linalg.qr(self.designs)[0]
        self.straight = np.linalg.qr(np.column_stack([np.ones_like(u), u]))[0]

    def solve(self, log_times: Array) -> _Lines:
        """Find the least-squares break of each set, shape (sets, points); a downward bend counts as none."""
        centred = log_times - log_times.mean(axis=1, keepdims=True)
        total = (centred**2).sum(axis=1)
        explained = np.tensordot(centred, self.bases, axes=(1, 1))  # sets, candidates, columns
        # the last column of a basis belongs to the hinge alone; its sign is that of the change of slope
        turn = (self.bases[:, :, 2] * self.designs[:, :, 2]).sum(axis=1)
        upward = np.where(explained[:, :, 2] * turn > 0, explained[:, :, 2], 0.0)
        costs = total[:, None] - (explained[:, :, :2] ** 2).sum(axis=2) - upward**2
        best = costs.argmin(axis=1)
        numbers = np.empty((len(log_times), 3))
        for index in np.unique(best):
            chosen = best == index
            numbers[chosen] = np.linalg.lstsq(self.designs[index], log_times[chosen].T, rcond=None)[0].T
        level, before, change = numbers.T
        rss = np.maximum(costs[np.arange(len(best)), best], 0.0)
        return _Lines(self.candidates[best], level, before, before + change, rss)

    def fitted(self, lines: _Lines) -> Array:
        """ln t on the segments, shape (sets, points)."""
        past = self.u - lines.at[:, None]
        result: Array = lines.level[:, None] + np.where(past < 0, lines.before[:, None], lines.after[:, None]) * past
        return result

    def gain(self, log_times: Array) -> Array:
        """Reduction of a straight line's sum of squares by the break, relative to the rest; shape (sets,)."""
        centred = log_times - log_times.mean(axis=1, keepdims=True)
        straight = (centred**2).sum(axis=1) - ((centred @ self.straight) ** 2).sum(axis=1)
        rest = np.maximum(self.solve(log_times).rss, len(self.u) * RESIDUAL_FLOOR**2)
        result: Array = np.maximum(straight - rest, 0.0) / rest
        return result

    def chance(self, log_time: Array, draw: np.random.Generator) -> float:
        """p value from simulated straight lines with normal scatter, whose gains depend only on the loads."""
        null = self.gain(draw.normal(size=(_NULL_SETS, len(self.u))))
        return float((1 + np.sum(null >= self.gain(log_time[None])[0])) / (1 + _NULL_SETS))

    def resampled(self, log_time: Array, samples: int, draw: np.random.Generator) -> Array:
        """Return sets of residuals resampled around the segments, widened for the four fitted parameters."""
        fitted = self.fitted(self.solve(log_time[None]))[0]
        residual = (log_time - fitted) * math.sqrt(len(log_time) / max(len(log_time) - 4, 1))
        residual -= residual.mean()
        result: Array = fitted + draw.choice(residual, size=(samples, len(residual)))
        return result


def _inner(load: Array, capacity_gbps: float) -> tuple[float, float] | None:
    """Second and second-last load; loads within 1 % of capacity count as one. None for too few loads."""
    distinct: list[float] = []
    for value in load:
        if not distinct or value - distinct[-1] > MERGE_SHARE * capacity_gbps:
            distinct.append(float(value))
    return (distinct[1], distinct[-2]) if len(distinct) >= MIN_LOADS else None


def _no_break(found: _Lines, p: float) -> str:
    if p >= SIGNIFICANT or found.after[0] <= found.before[0]:
        return f"one straight line describes the points about as well as two (p = {p:.2g}): no break can be placed"
    if found.after[0] < MIN_ELASTICITY:
        return (
            f"past its break the time grows by {found.after[0]:.2g} % for each per cent of bandwidth taken: no "
            "congestion was reached"
        )
    return ""


def _point(found: _Lines, many: _Lines, load: Array, p: float, capacity: float, resampled: Resampled) -> BreakPoint:
    points, rss = len(load), max(float(found.rss[0]), len(load) * RESIDUAL_FLOOR**2)
    ratio = np.ones_like(many.rss)
    if resampled == "residuals":
        # bootstrap-t: each set is scaled by its own scatter, whose estimate from few points needs a lower bound
        ratio = np.sqrt(np.maximum(many.rss / rss, _MIN_SHARE))
    log_left = math.log(capacity) - found.at, math.log(capacity) - many.at
    most = np.log(capacity - load[[-1, 0]])

    def estimate(value: Array, values: Array, low: float = -np.inf, high: float = np.inf) -> tuple[float, float, float]:
        """Return value and ends from logarithms, with the ends clipped to ``low`` and ``high``."""
        ends = value - np.quantile((values - value) / ratio, [1 - (1 - LEVEL) / 2, (1 - LEVEL) / 2])
        first, last = np.exp(np.clip(ends, low, high))
        return float(np.exp(value[0])), float(first), float(last)

    left, last, first = estimate(*log_left, *most)
    at = BreakCandidate(capacity - left, capacity - first, capacity - last)
    volume = [one + lines.level + math.log(125) for one, lines in zip(log_left, (found, many), strict=True)]
    warnings = []
    if at.high - at.low > WIDE_SHARE * (load[-1] - load[0]):
        warnings.append(
            f"the break lies anywhere from {max(round(at.low, 9), 0.0):.3g} to {at.high:.3g} Gbit/s (95 %): these "
            "points hardly place it"
        )
    return BreakPoint(
        bandwidth_gbps=at,
        iteration_s=BreakCandidate(*estimate(found.level, many.level)),
        data_mb=BreakCandidate(*estimate(volume[0], volume[1])),
        elasticity=(float(found.before[0]), float(found.after[0])),
        p=p,
        aicc=corrected_akaike(points * math.log(rss / points), points, 5),
        resampled=resampled,
        samples=len(many.at),
        capacity_gbps=capacity,
        warnings=tuple(warnings),
    )
