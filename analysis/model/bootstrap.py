"""Bootstrap intervals of the general model's parameters."""

from __future__ import annotations

import math

import numpy as np

from ringtap.analysis.model.regression import (
    FREE_BOUNDS,
    Array,
    Exponent,
    Solution,
    jacobian,
    log_predict,
    reduced_load,
    solve_many,
)  # fmt: skip
from ringtap.analysis.model.residuals import RESIDUAL_FLOOR, Noise

Interval = tuple[float, float]
_MIN_SCATTER = 0.05  # of the points' own scatter: lower bound of the scatter of a resampled set


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
        bounds_b = _exp(log_b)
    else:
        bounds_b = ends(solution.b * capacity**solution.n, b * np.exp(scale))
    bounds_n = (solution.n, solution.n)
    if free:
        low, high = _exp(ends(math.log(solution.n), np.log(exponents)))
        bounds_n = (max(low, FREE_BOUNDS[0]), min(high, FREE_BOUNDS[1]))
    return {"A": _exp(log_a), "B": bounds_b, "n": bounds_n}


def _exp(ends: Interval) -> Interval:
    # an end beyond the floating point range is clipped, as JSON has no infinity
    low, high = (math.exp(min(max(end, -700.0), 700.0)) for end in ends)
    return low, high
