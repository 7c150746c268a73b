"""The congestion point on the fitted curve: the thesis's construction in the limit of a dense grid of loads.

The construction of `ringtap.analysis.model.congestion_point` can only choose a measured load. On the curve of equation
3.7, the same steps give a load with an interval that narrows with every point, wherever the loads lie.
docs/method/method.md describes the steps.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import special

from ringtap.analysis.model.congestion_point import CURVED_SHARE, data_volume_mb
from ringtap.analysis.model.fit import CongestionModel
from ringtap.analysis.model.fit_result import LEVEL, FitResult
from ringtap.analysis.model.regression import reduced_load
from ringtap.analysis.statistics.arrays import Array, Values, as_points, as_seconds
from ringtap.core.errors import UsageError
from ringtap.core.units import rate_gbps

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(40)
_DERIVED = 1e-4  # relative step of the numerical derivatives
_PRIOR_FREEDOM = 4.0


@dataclass(frozen=True)
class CurvePoint:
    """The congestion point on the fitted curve.

    Attributes:
        bandwidth_gbps: load BW*.
        low_gbps: lower end of its 95 % interval.
        high_gbps: upper end.
        iteration_s: time t* on the chosen curve.
        data_mb: (C - BW*) t* in decimal megabytes.
        weighted: True if the points were weighted by their own errors.
    """

    bandwidth_gbps: float
    low_gbps: float
    high_gbps: float
    iteration_s: float
    data_mb: float
    weighted: bool

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
        fit: the fit; None if there are too few points.
    """

    point: CurvePoint | None
    reason: str = ""
    fit: FitResult | None = None

    def __repr__(self) -> str:
        if self.point is None:
            return f"<CurveResult: {self.reason}>"
        point = self.point
        return f"<CurveResult: {point.bandwidth_gbps:.4g} Gbit/s ({point.low_gbps:.4g} to {point.high_gbps:.4g})>"


def find_curve_point(
    bandwidth_gbps: Values, iteration_s: Values, capacity_gbps: float | str, spread_s: Values | None = None
) -> CurveResult:
    """Find the congestion point on the curve of equation 3.7 through the points, with its 95 % interval.

    The exponents that `CongestionModel` compares count with their Akaike weights, and their disagreement is a part of
    the interval (Burnham and Anderson, Model Selection and Multimodel Inference, 2002, equation 6.12).

    Args:
        bandwidth_gbps: loads, shape (points,), in any order. Numbers are Gbit/s; text has a unit.
        iteration_s: mean iteration times, shape (points,). Numbers are seconds; text has a unit.
        capacity_gbps: capacity of the bottleneck, in Gbit/s or as text such as ``25gbit``.
        spread_s: standard error of each mean in seconds, shape (points,); None: all relative errors count as equal.

    Raises:
        UsageError: the arrays differ in length or hold invalid values.
    """
    capacity = rate_gbps(capacity_gbps)
    load, time = as_points(bandwidth_gbps, iteration_s, capacity)
    spread = None if spread_s is None else as_seconds(spread_s)
    try:
        fit = CongestionModel(capacity).fit(load, time, spread_s=spread, bootstrap=0)
    except UsageError as problem:
        return CurveResult(None, str(problem))
    known = [one for one in fit.candidates if one.aicc is not None and one.terms.covariance is not None]
    if not known:
        return CurveResult(None, "the points are too few for an error of the curve: measure more loads", fit)
    chosen = min(known, key=lambda one: one.aicc or 0.0)
    if reason := _no_point(chosen):
        return CurveResult(None, reason, fit)
    error = None if spread is None else spread[np.lexsort((spread / time, time, load))]
    share = np.array([math.exp(((chosen.aicc or 0.0) - (one.aicc or 0.0)) / 2) for one in known])
    share /= share.sum()
    at = np.array([place(one.terms.b, one.n) for one in known])
    own, freedom = np.transpose([_variance(one, error) for one in known])
    mean = float(share @ at)
    reach = float(
        special.stdtrit(freedom[known.index(chosen)], (1 + LEVEL) / 2) * np.sqrt(share @ (own + (at - mean) ** 2))
    )
    at_gbps, low, high = (float(-capacity * np.expm1(-max(u, 0.0))) for u in (mean, mean - reach, mean + reach))
    at_s = float(chosen.predict(at_gbps))
    volume_mb = data_volume_mb(at_gbps, at_s, capacity)
    return CurveResult(CurvePoint(at_gbps, low, high, at_s, volume_mb, spread is not None), fit=fit)


def place(b: float, n: float) -> float:
    """Return u = ln(C/(C-BW)) of the congestion point on t = t0 exp(b ((C/(C-BW))^n - 1)); 0 without a flat region.

    The curved region begins where the elasticity b n (C/(C-BW))^n has gone `CURVED_SHARE` of the way from that of no
    load to 1. The flat line is the least-squares line of t over all loads below it; the tangent meets it at the point.
    """
    if b * n >= 1:
        return 0.0
    # the start of the curved region, as a share of the capacity
    start = -math.expm1(-math.log1p(CURVED_SHARE * (1 / (b * n) - 1)) / n)
    loads = start * (1 + _NODES) / 2
    times = np.exp(b * reduced_load(loads, 1.0, n)) * _WEIGHTS
    middle, slope = float(times.sum()) / 2, 3 * float(times @ _NODES) / start
    end = math.exp(b * float(reduced_load(np.array(start), 1.0, n)))
    steep = end * (b * n + CURVED_SHARE * (1 - b * n)) / (1 - start)
    meeting = (middle - slope * start / 2 - end + steep * start) / (steep - slope)
    return -math.log1p(-meeting)


def gradient(b: float, n: float, free: bool) -> Array:
    """Derivatives of `place` by log_t0, b and, if it is free, n; shape (parameters,)."""

    def along(step_b: float, step_n: float) -> float:
        return place(b * (1 + step_b), n * (1 + step_n)) - place(b * (1 - step_b), n * (1 - step_n))

    by_b, by_n = along(_DERIVED, 0.0) / (2 * _DERIVED * b), along(0.0, _DERIVED) / (2 * _DERIVED * n)
    return np.array([0.0, by_b, by_n] if free else [0.0, by_b])


def _no_point(fit: FitResult) -> str:
    steep, capacity = fit.terms.b * fit.n, fit.C_gbps
    if steep <= 0 or any(warning.startswith("B is statistically zero") for warning in fit.warnings):
        return "the iteration time does not grow with the load"
    if steep >= 1:
        return "the time grows as fast as the bandwidth shrinks from no load on: there is no flat region"
    point = -capacity * math.expm1(-place(fit.terms.b, fit.n))
    if point > fit.bandwidth_gbps[-1]:
        return f"the curve bends at {point:.3g} Gbit/s, beyond the heaviest load: no congestion was reached"
    return ""


def _variance(fit: FitResult, error: Array | None) -> tuple[float, float]:
    """Variance of `place` by the delta method, and its degrees of freedom.

    If the points scatter no more than their own errors say, these errors count for `_PRIOR_FREEDOM` degrees of freedom,
    and the scatter for its own: iterations under random traffic may balance each other, so that a window's mean is
    better known than its iterations tell.
    """
    freedom = float(fit.terms.freedom)
    if fit.terms.b * fit.n >= 1:
        return 0.0, freedom
    slopes = gradient(fit.terms.b, fit.n, fit.free)
    variance = float(slopes @ np.array(fit.terms.covariance) @ slopes)
    if error is None or fit.between:
        return variance, freedom
    residual = np.log(fit.iteration_s) - fit.terms.log_t0
    residual -= fit.terms.b * reduced_load(fit.bandwidth_gbps, fit.C_gbps, fit.n)
    squares = float(np.sum((residual * fit.iteration_s / error) ** 2))
    total = _PRIOR_FREEDOM + freedom
    return variance * (_PRIOR_FREEDOM + squares) / total, total
