"""Least squares for ln t = ln t0 + b*((C/(C-BW))^n - 1), the general model (equation 3.7) in a well-conditioned form.

t0 is the time at no load; A = t0*exp(-b) and B = b*C^n. Working with the dimensionless load keeps the numbers near one
whatever the unit of bandwidth.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

Array = npt.NDArray[np.float64]

FREE_BOUNDS = (0.1, 4.0)
_EXPONENT_GRID = np.geomspace(*FREE_BOUNDS, 60)
_LARGEST_EXPONENT = 300.0


@dataclass(frozen=True)
class Solution:
    """A least-squares solution in the well-conditioned form.

    Attributes:
        log_t0: ln of the time at no load, in seconds.
        b: slope against (C/(C-BW))^n - 1.
        n: the exponent.
        covariance: of (log_t0, b) or, with a free exponent, (log_t0, b, n); None where it is not defined.
        n_interval: 95 % profile-likelihood interval of a free exponent in log space.
    """

    log_t0: float
    b: float
    n: float
    covariance: Array | None
    n_interval: tuple[float, float] | None = None


def reduced_load(bandwidth: Array, capacity: float, n: float) -> Array:
    """(C/(C-BW))^n - 1, zero at no load."""
    # expm1 and log1p keep light loads from vanishing beside 1
    result: Array = np.expm1(-n * np.log1p(-bandwidth / capacity))
    return result


def log_predict(solution: Solution, bandwidth: Array, capacity: float) -> Array:
    """ln t at the given loads."""
    return solution.log_t0 + solution.b * reduced_load(bandwidth, capacity, solution.n)


def _line(x: Array, y: Array) -> tuple[float, float, float]:
    """Intercept, slope and residual sum of squares of a straight line through points with distinct x."""
    dx = x - x.mean()
    slope = float(dx @ (y - y.mean()) / (dx @ dx))
    intercept = float(y.mean() - slope * x.mean())
    residual = y - intercept - slope * x
    return intercept, slope, float(residual @ residual)


def _covariance(jacobian: Array, rss: float) -> Array | None:
    points, parameters = jacobian.shape
    scale = np.linalg.norm(jacobian, axis=0)
    if points <= parameters or not np.all(scale > 0):
        return None
    scaled = jacobian / scale
    if np.linalg.cond(scaled) > 1e7:
        return None
    result: Array = np.linalg.inv(scaled.T @ scaled) / np.outer(scale, scale) * rss / (points - parameters)
    return result


def _jacobian(bandwidth: Array, capacity: float, b: float, n: float, free: bool) -> Array:
    x = reduced_load(bandwidth, capacity, n)
    columns = [np.ones_like(x), x]
    if free:
        columns.append(-b * (x + 1) * np.log1p(-bandwidth / capacity))
    return np.column_stack(columns)


def solve_log_fixed(bandwidth: Array, log_time: Array, capacity: float, n: float) -> Solution:
    """Ordinary least squares on ln t with the exponent given (closed form)."""
    intercept, slope, rss = _line(reduced_load(bandwidth, capacity, n), log_time)
    covariance = _covariance(_jacobian(bandwidth, capacity, slope, n, free=False), rss)
    return Solution(intercept, slope, n, covariance)


def solve_log_free(bandwidth: Array, log_time: Array, capacity: float) -> Solution:
    """Least squares on ln t with the exponent searched within `FREE_BOUNDS` (variable projection)."""

    def rss_at(log_n: float) -> float:
        return _line(reduced_load(bandwidth, capacity, math.exp(log_n)), log_time)[2]

    grid = np.log(_EXPONENT_GRID)
    profile = np.array([rss_at(value) for value in grid])
    best = int(profile.argmin())
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    found = optimize.minimize_scalar(rss_at, bounds=(low, high), method="bounded", options={"xatol": 1e-9})
    log_n = float(found.x) if found.fun < profile[best] else float(grid[best])
    n = min(max(math.exp(log_n), FREE_BOUNDS[0]), FREE_BOUNDS[1])
    intercept, slope, rss = _line(reduced_load(bandwidth, capacity, n), log_time)
    covariance = _covariance(_jacobian(bandwidth, capacity, slope, n, free=True), rss)
    freedom = len(log_time) - 3
    limit = rss * (1 + stats.f.ppf(0.95, 1, freedom) / freedom)
    inside = _EXPONENT_GRID[profile <= limit]
    interval = (min(n, float(inside.min(initial=n))), max(n, float(inside.max(initial=n))))
    return Solution(intercept, slope, n, covariance, interval)


def solve_linear(bandwidth: Array, time: Array, capacity: float, start: Solution, free: bool) -> Solution | None:
    """Least squares on t itself, started from the solution in log space; None where it does not converge."""
    scale = math.exp(float(np.log(time).mean()))

    def curve(load: Array, log_t0: float, b: float, n: float = start.n) -> Array:
        exponent = log_t0 + b * reduced_load(load, capacity, n)
        result: Array = np.exp(np.clip(exponent, -_LARGEST_EXPONENT, _LARGEST_EXPONENT))
        return result

    first = [start.log_t0 - math.log(scale), start.b]
    low, high = [-np.inf, -np.inf], [np.inf, np.inf]
    if free:
        # a start on the bound is refused by the solver
        first.append(min(max(start.n, FREE_BOUNDS[0] * 1.001), FREE_BOUNDS[1] * 0.999))
        low.append(FREE_BOUNDS[0])
        high.append(FREE_BOUNDS[1])
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", optimize.OptimizeWarning)
        try:
            found, covariance = optimize.curve_fit(
                curve, bandwidth, time / scale, p0=first, bounds=(low, high), maxfev=5000
            )
        except (RuntimeError, ValueError):
            return None
    if not np.all(np.isfinite(found)):
        return None
    usable = bool(np.all(np.isfinite(covariance)))
    n = float(found[2]) if free else start.n
    return Solution(float(found[0]) + math.log(scale), float(found[1]), n, covariance if usable else None)
