"""Weights of the points of a fit: by their own errors, and less for outliers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import optimize, stats

from ringtap.analysis.model.regression import Array, Exponent, log_predict, reduced_load, solve_log
from ringtap.analysis.model.scatter import RESIDUAL_FLOOR, Noise, from_errors

# Huber's constant: about 95 % of the efficiency of least squares where there are no outliers
CUT = 1.345
ALIKE_SHARE = 1e-6  # of the loads' range: points nearer than this are at one load
_TRIED = (0.5, 1.0, 2.0)


def weigh(load: Array, log_time: Array, capacity: float, n: Exponent, error: Array | None, robust: bool) -> Noise:
    """Estimate the scatter of the points around the curve, and their weights.

    Args:
        load: loads, shape (points,).
        log_time: ln t of the points.
        capacity: of the bottleneck.
        n: exponent of the curve; outliers are judged alike for all exponents.
        error: standard error of each ln t, or None where it is not known.
        robust: whether outliers are to count for less.
    """
    if robust:
        return _robust(load, log_time, capacity, error)
    if error is None:
        return Noise(np.ones(len(load)))
    freedom = len(load) - (3 if isinstance(n, str) else 2)

    def excess(between: float) -> float:
        noise = from_errors(error, between)
        solution = solve_log(load, log_time, capacity, n, noise)
        return float(noise.cost(log_time - log_predict(solution, load, capacity))) - freedom

    return from_errors(error, _scatter_between(excess, log_time))


def _scatter_between(excess: Callable[[float], float], log_time: Array) -> float:
    """Scatter at which the residuals have their expected size (Paule and Mandel, 1982); at least 0.

    ``excess`` decreases with the scatter.
    """
    most = float(np.ptp(log_time)) + RESIDUAL_FLOOR
    if excess(0.0) <= 0:
        return 0.0
    while excess(most) > 0:
        most *= 2
    return float(optimize.brentq(excess, 0.0, most, xtol=1e-9 * most))


def _robust(load: Array, log_time: Array, capacity: float, error: Array | None) -> Noise:
    """Noise by the median absolute residual from a line that outliers hardly move.

    It is Theil and Sen's line at the exponent that fits best, so that all exponents are judged by the same scatter.
    """
    ones = np.ones(len(load))
    residuals = [_residuals(load, log_time, capacity, n) for n in _TRIED]
    residual = min(residuals, key=lambda item: _middle(item, ones))
    if error is None:
        return Noise(ones, cut=CUT * max(_middle(residual, ones), RESIDUAL_FLOOR))
    between = _scatter_between(lambda scatter: _middle(residual, from_errors(error, scatter).weight) - 1, log_time)
    return from_errors(error, between, CUT)


def _residuals(load: Array, log_time: Array, capacity: float, n: float) -> Array:
    x = reduced_load(load, capacity, n)
    one, other = np.triu_indices(len(x), 1)
    run = x[other] - x[one]
    apart = np.abs(run) > ALIKE_SHARE * np.ptp(x)  # replicates have no slope between them
    slope = np.median((log_time[other] - log_time[one])[apart] / run[apart])
    around: Array = log_time - slope * x
    result: Array = around - np.median(around)
    return result


def _middle(residual: Array, weight: Array) -> float:
    """Standard deviation by the median absolute deviation of normal residuals, with two fitted parameters."""
    points = len(residual)
    spread = float(np.median(np.abs(residual) * np.sqrt(weight)))
    return spread / float(stats.norm.ppf(0.75)) * float(np.sqrt(points / (points - 2)))
