"""Solves least squares for ln t = ln t0 + b*((C/(C-BW))^n - 1), a well-conditioned form of equation 3.7.

t0 is the time at no load; A = t0*exp(-b) and B = b*C^n. The dimensionless load keeps the numbers near one, whatever the
unit of bandwidth. One call can solve many sets of times at the same loads, as the bootstrap of the intervals needs.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

from ringtap.analysis.model.scatter_and_weights import RESIDUAL_FLOOR, Noise

Array = npt.NDArray[np.float64]
Exponent = float | Literal["free"]
Interval = tuple[float, float]

FREE_BOUNDS = (0.1, 4.0)
EXPONENT_GRID = np.geomspace(*FREE_BOUNDS, 60)
_MAX_EXPONENT = 300.0
_MIN_SCATTER = 0.05  # of the points' own scatter: lower bound of the scatter of a resampled set


@dataclass(frozen=True)
class Solution:
    """A least-squares solution in the well-conditioned form.

    Attributes:
        log_t0: ln of the time at no load, in seconds.
        b: slope against (C/(C-BW))^n - 1.
        n: the exponent.
        covariance: covariance of (log_t0, b) or, with a free exponent, (log_t0, b, n); None if it is not defined.
        n_interval: 95 % profile-likelihood interval of a free exponent in log space.
    """

    log_t0: float
    b: float
    n: float
    covariance: Array | None
    n_interval: tuple[float, float] | None = None


def reduced_load(bandwidth: Array, capacity: float, n: float | Array) -> Array:
    """Return (C/(C-BW))^n - 1, which is zero at no load."""
    # expm1 and log1p keep the precision of light loads
    result: Array = np.expm1(-n * np.log1p(-bandwidth / capacity))
    return result


def log_predict(solution: Solution, bandwidth: Array, capacity: float) -> Array:
    """Return ln t at loads."""
    return solution.log_t0 + solution.b * reduced_load(bandwidth, capacity, solution.n)


def lines(x: Array, y: Array, noise: Noise) -> tuple[Array, Array, Array]:
    """Fit straight lines to sets of points.

    Args:
        x: shape (points,) or (sets, points); not all equal.
        y: shape (sets, points).
        noise: scatter of the points.

    Returns:
        Intercepts, slopes and costs (weighted sums of squares), each of shape (sets,).
    """
    weight = noise.weight
    total = weight.sum(axis=-1)
    mean_x, mean_y = (x * weight).sum(axis=-1) / total, (y * weight).sum(axis=-1) / total
    dx = x - mean_x[..., None]
    slope = (dx * weight * (y - mean_y[:, None])).sum(axis=-1) / (dx * dx * weight).sum(axis=-1)
    residual = y - mean_y[:, None] - slope[:, None] * dx
    return mean_y - slope * mean_x, slope, noise.cost(residual)


def jacobian(bandwidth: Array, capacity: float, b: float, n: float, free: bool) -> Array:
    """Return the derivatives of ln t by log_t0, b and, if it is free, n; shape (points, parameters)."""
    x = reduced_load(bandwidth, capacity, n)
    columns = [np.ones_like(x), x]
    if free:
        columns.append(-b * (x + 1) * np.log1p(-bandwidth / capacity))
    return np.column_stack(columns)


def solve_log(bandwidth: Array, log_time: Array, capacity: float, n: Exponent, noise: Noise) -> Solution:
    """Solve least squares on ln t: in closed form for a given exponent, with a search for a free one."""
    if isinstance(n, str):
        return _solve_free(bandwidth, log_time, capacity, noise)
    intercept, slope, _ = (
        float(item[0]) for item in lines(reduced_load(bandwidth, capacity, n), log_time[None], noise)
    )
    residual = log_time - intercept - slope * reduced_load(bandwidth, capacity, n)
    covariance = noise.covariance(jacobian(bandwidth, capacity, slope, n, free=False), residual)
    return Solution(intercept, slope, n, covariance)


def _solve_free(bandwidth: Array, log_time: Array, capacity: float, noise: Noise) -> Solution:
    """Solve by variable projection, with A and B in closed form at each exponent."""

    def cost_at(log_n: float) -> float:
        return float(lines(reduced_load(bandwidth, capacity, math.exp(log_n)), log_time[None], noise)[2][0])

    grid = np.log(EXPONENT_GRID)
    profile = _profile(bandwidth, log_time[None], capacity, noise)[0]
    best = int(profile.argmin())
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    found = optimize.minimize_scalar(cost_at, bounds=(low, high), method="bounded", options={"xatol": 1e-9})
    log_n = float(found.x) if found.fun < profile[best] else float(grid[best])
    n = min(max(math.exp(log_n), FREE_BOUNDS[0]), FREE_BOUNDS[1])
    x = reduced_load(bandwidth, capacity, n)
    intercept, slope, cost = (float(item[0]) for item in lines(x, log_time[None], noise))
    covariance = noise.covariance(jacobian(bandwidth, capacity, slope, n, free=True), log_time - intercept - slope * x)
    freedom = len(log_time) - 3
    unit = 1.0 if noise.known else cost / freedom
    inside = EXPONENT_GRID[profile <= cost + unit * special.fdtri(1, freedom, 0.95)]
    interval = (min(n, float(inside.min(initial=n))), max(n, float(inside.max(initial=n))))
    return Solution(intercept, slope, n, covariance, interval)


def _profile(bandwidth: Array, log_times: Array, capacity: float, noise: Noise) -> Array:
    """Cost of each set at each exponent of the grid, shape (sets, exponents)."""
    costs = [lines(reduced_load(bandwidth, capacity, n), log_times, noise)[2] for n in EXPONENT_GRID]
    return np.column_stack(costs)


def solve_many(
    bandwidth: Array, log_times: Array, capacity: float, n: Exponent, noise: Noise
) -> tuple[Array, Array, Array]:
    """Solve many sets of times at the same loads.

    A free exponent is interpolated on a grid of 60 by a parabola through the least cost and its neighbours.

    Args:
        bandwidth: loads, shape (points,).
        log_times: ln t, shape (sets, points).
        capacity: capacity of the bottleneck.
        n: exponent.
        noise: scatter of the measured points; it is not estimated again for each set.

    Returns:
        log_t0, b and n, each of shape (sets,).
    """
    if not isinstance(n, str):
        intercept, slope, _ = lines(reduced_load(bandwidth, capacity, n), log_times, noise)
        return intercept, slope, np.full(len(log_times), float(n))
    profile = _profile(bandwidth, log_times, capacity, noise)
    best = np.clip(profile.argmin(axis=1), 1, profile.shape[1] - 2)
    rows = np.arange(len(profile))
    left, middle, right = (profile[rows, best + step] for step in (-1, 0, 1))
    bend = left - 2 * middle + right
    step = np.divide(left - right, 2 * bend, out=np.zeros_like(bend), where=bend > 0)
    # a cost that still falls at the end of the grid has its minimum there
    chosen = np.log(EXPONENT_GRID)[best] + np.clip(step, -1, 1) * math.log(EXPONENT_GRID[1] / EXPONENT_GRID[0])
    found = np.exp(chosen)
    intercept, slope, _ = lines(reduced_load(bandwidth, capacity, found[:, None]), log_times, noise)
    return intercept, slope, found


def solve_linear(
    bandwidth: Array, time: Array, capacity: float, start: Solution, free: bool, noise: Noise
) -> Solution | None:
    """Solve least squares on t itself from a start in log space; return None if it does not converge.

    Known variances of ln t become those of t by the delta method.
    """
    scale = math.exp(float(np.log(time).mean()))

    def curve(load: Array, log_t0: float, b: float, n: float = start.n) -> Array:
        exponent = log_t0 + b * reduced_load(load, capacity, n)
        result: Array = np.exp(np.clip(exponent, -_MAX_EXPONENT, _MAX_EXPONENT))
        return result

    first = [start.log_t0 - math.log(scale), start.b]
    low, high = [-np.inf, -np.inf], [np.inf, np.inf]
    if free:
        # the solver refuses a start on the bound
        first.append(min(max(start.n, FREE_BOUNDS[0] * 1.001), FREE_BOUNDS[1] * 0.999))
        low.append(FREE_BOUNDS[0])
        high.append(FREE_BOUNDS[1])
    sigma = time / scale / np.sqrt(noise.weight) if noise.known else None
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", optimize.OptimizeWarning)
        try:
            found, covariance = optimize.curve_fit(
                curve, bandwidth, time / scale, p0=first, sigma=sigma, absolute_sigma=noise.known,
                bounds=(low, high), maxfev=5000,
            )  # fmt: skip
        except (RuntimeError, ValueError):
            return None
    if not np.all(np.isfinite(found)):
        return None
    usable = bool(np.all(np.isfinite(covariance)))
    n = float(found[2]) if free else start.n
    return Solution(float(found[0]) + math.log(scale), float(found[1]), n, covariance if usable else None)


def parameter_intervals(
    load: Array, log_time: Array, capacity: float, n: Exponent, noise: Noise, solution: Solution,
    samples: int, seed: int, level: float,
) -> dict[str, Interval]:  # fmt: skip
    """Return intervals of A, B and n from resampled residuals, each resampled set scaled by its own scatter.

    Residuals of ln t, scaled by their weights and widened for leverage, are drawn with replacement and added to the
    fitted curve. The distance of each resampled solution from the fit is divided by the scatter of its own residuals
    (bootstrap-t: Davison and Hinkley, Bootstrap Methods and their Application, 1997, sections 5.2.1 and 6.2.3). The
    distances are those of ln A, ln B and ln n, or of B itself if its sign is in doubt. Loads and weights are fixed.

    Returns:
        Lower and upper ends by name; both ends of n are n if it was given.
    """
    free = isinstance(n, str)
    points, parameters = len(load), 3 if free else 2
    fitted = log_predict(solution, load, capacity)
    root = np.sqrt(noise.weight)
    columns = jacobian(load, capacity, solution.b, solution.n, free) * root[:, None]
    leverage = np.minimum((np.linalg.qr(columns)[0] ** 2).sum(axis=1), 0.99)
    residual = (log_time - fitted) * root / np.sqrt(1 - leverage)
    residual -= residual.mean()
    own = float(np.sqrt(noise.cost(log_time - fitted) / (points - parameters)))
    drawn = np.random.default_rng(seed).integers(0, points, (samples, points))
    resampled = fitted + residual[drawn] / root
    log_t0, b, exponents = solve_many(load, resampled, capacity, n, noise)
    residuals = resampled - log_t0[:, None] - b[:, None] * reduced_load(load, capacity, exponents[:, None])
    scatter = np.sqrt(noise.cost(residuals) / (points - parameters))
    # points on the curve have no scatter to divide by
    ratio = np.maximum(scatter / own, _MIN_SCATTER) if own > RESIDUAL_FLOOR else np.ones(samples)
    certain = bool(np.all(b > 0) and solution.b > 0)
    tails = np.array([1 - (1 - level) / 2, (1 - level) / 2])

    def ends(estimate: float, values: Array) -> Interval:
        low, high = estimate - np.quantile((values - estimate) / ratio, tails)
        return float(low), float(high)

    scale = exponents * math.log(capacity)
    log_a = ends(solution.log_t0 - solution.b, log_t0 - b)
    if certain:
        log_b = ends(math.log(solution.b) + solution.n * math.log(capacity), np.log(b) + scale)
        bounds_b = exp(log_b[0]), exp(log_b[1])
    else:
        bounds_b = ends(solution.b * capacity**solution.n, b * np.exp(scale))
    bounds_n = (solution.n, solution.n)
    if free:
        low, high = map(exp, ends(math.log(solution.n), np.log(exponents)))
        bounds_n = (max(low, FREE_BOUNDS[0]), min(high, FREE_BOUNDS[1]))
    return {"A": (exp(log_a[0]), exp(log_a[1])), "B": bounds_b, "n": bounds_n}


def exp(value: float) -> float:
    """Return the exponential; beyond the floating point range it is clipped, because JSON has no infinity."""
    return math.exp(min(max(value, -700.0), 700.0))
