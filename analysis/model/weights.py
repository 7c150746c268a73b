"""Weights of measured points: the expected scatter of each around a curve."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

from ringtap.analysis.model.regression import Exponent, log_predict, reduced_load, solve_log

Array = npt.NDArray[np.float64]

# Iteration times are read from clocks that resolve about a microsecond in a second: smaller residuals say nothing.
RESIDUAL_FLOOR = 1e-8
_WORST_CONDITION = 1e7


@dataclass(frozen=True)
class Noise:
    """Scatter of the points around a curve, in ln t.

    Attributes:
        weight: what each point counts, shape (points,): 1 where nothing is known, else one over its variance.
        known: whether the weights are variances' inverses, and not shares alone.
        cut: residual, times the root of the weight, past which a point counts for less (scipy's ``soft_l1`` with this
            ``f_scale``); None for least squares.
        between: standard deviation that the points scatter by beyond their own errors; None where these are unknown.
    """

    weight: Array
    known: bool = False
    cut: float | None = None
    between: float | None = None

    def share(self, residual: Array) -> Array:
        """Share of each point's weight that is left at this residual: 1 near the curve, less for outliers."""
        if self.cut is None:
            return np.ones_like(residual)
        result: Array = 1 / np.sqrt(1 + self.weight * (residual / self.cut) ** 2)
        return result

    def cost(self, residual: Array) -> Array:
        """Sum over the points, along the last axis, of weighted squares or of soft_l1's rho."""
        squares = self.weight * residual**2
        if self.cut is not None:
            squares = 2 * self.cut**2 * (np.sqrt(1 + squares / self.cut**2) - 1)
        result: Array = squares.sum(axis=-1)
        return result

    def covariance(self, jacobian: Array, residual: Array) -> Array | None:
        """Covariance of the parameters; None where they cannot be told apart or no residual is left.

        With outliers held down it is Huber's (Robust Statistics, 1981, equation 7.6.8).
        """
        points, parameters = jacobian.shape
        weighted = jacobian * np.sqrt(self.weight)[:, None]
        length = np.linalg.norm(weighted, axis=0)
        if points <= parameters or not np.all(length > 0):
            return None
        scaled = weighted / length
        if np.linalg.cond(scaled) > _WORST_CONDITION:
            return None
        result: Array = np.linalg.inv(scaled.T @ scaled) / np.outer(length, length)
        return result * self._unit(residual, points, parameters)

    def _unit(self, residual: Array, points: int, parameters: int) -> float:
        """Variance of a point of weight 1."""
        if self.cut is None:
            return 1.0 if self.known else float(self.cost(residual)) / (points - parameters)
        share = self.share(residual)
        influence = self.weight * (share * residual) ** 2
        steepness = share**3
        mean = float(steepness.mean())
        correction = 1 + parameters / points * float(steepness.var()) / mean**2
        return float(correction**2 * influence.sum() / (points - parameters) / mean**2)

    def scatter(self, residual: Array, parameters: int) -> float:
        """Standard deviation of ln t of one point around the curve, its own error included."""
        if self.known:
            return float(np.sqrt(np.mean(1 / self.weight)))
        return float(np.sqrt(self._unit(residual, len(residual), parameters)))

    def deviance(self, residual: Array, error: Array | None) -> float:
        """-2 ln likelihood of the residuals but for constants, at the likeliest scatter.

        Without errors of the points it is m ln(cost / m). Outliers held down enter with soft_l1's rho.
        """
        points = len(residual)
        if error is None:
            return points * math.log(max(float(self.cost(residual)) / points, RESIDUAL_FLOOR**2))
        if self.cut is not None:
            return float(self.cost(residual) - np.log(self.weight).sum()) - points

        def at(between: float) -> float:
            variance = np.maximum(error**2 + between**2, RESIDUAL_FLOOR**2)
            return float(np.sum(np.log(variance) + residual**2 / variance)) - points

        most = float(np.abs(residual).max()) + RESIDUAL_FLOOR
        found = optimize.minimize_scalar(at, bounds=(0.0, most), method="bounded", options={"xatol": 1e-9 * most})
        return min(at(0.0), float(found.fun))


def from_errors(error: Array, between: float, cut: float | None = None) -> Noise:
    """Points with errors of their own, and a scatter ``between`` them that the errors do not explain."""
    variance = np.maximum(error**2 + between**2, RESIDUAL_FLOOR**2)
    return Noise(1 / variance, True, cut, between)


# Huber's constant: about 95 % of the efficiency of least squares where there are no outliers
CUT = 1.345
ALIKE_SHARE = 1e-6  # of the loads' range: points nearer than this are at one load
_TRIED = (0.5, 1.0, 2.0)


def weigh(load: Array, log_time: Array, capacity: float, n: Exponent, error: Array | None, robust: bool) -> Noise:
    """Estimate the points' scatter around the curve.

    Args:
        load: loads, shape (points,).
        log_time: ln t of the points.
        capacity: of the bottleneck.
        n: exponent of the curve; outliers are judged alike for all.
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
    """Scatter at which the points lie as far from the curve as they should (Paule and Mandel, 1982); 0 at the least.

    ``excess`` falls with it.
    """
    most = float(np.ptp(log_time)) + RESIDUAL_FLOOR
    if excess(0.0) <= 0:
        return 0.0
    while excess(most) > 0:
        most *= 2
    return float(optimize.brentq(excess, 0.0, most, xtol=1e-9 * most))


def _robust(load: Array, log_time: Array, capacity: float, error: Array | None) -> Noise:
    """The scatter is that of the middle half of the residuals from a line that outliers hardly move.

    Theil and Sen's line, at the exponent that it fits best, so that all exponents are judged by the same scatter.
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
    """Standard deviation of normal residuals with this median absolute deviation, two parameters fitted."""
    points = len(residual)
    spread = float(np.median(np.abs(residual) * np.sqrt(weight)))
    return spread / float(stats.norm.ppf(0.75)) * float(np.sqrt(points / (points - 2)))
