"""Estimates the scatter of measured points around a curve, and the weights that follow from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize

Array = npt.NDArray[np.float64]

# Iteration times come from clocks that resolve about a microsecond in a second, so smaller residuals mean nothing
RESIDUAL_FLOOR = 1e-8
_WORST_CONDITION = 1e7


@dataclass(frozen=True)
class Noise:
    """Scatter of the points around a curve, in ln t.

    Attributes:
        weight: weight of each point, shape (points,): the inverse of its variance, or 1 if that is not known.
        known: True if the weights are inverse variances, not relative weights.
        between: standard deviation of the points beyond their own errors; None if these are not known.
    """

    weight: Array
    known: bool = False
    between: float | None = None

    def cost(self, residual: Array) -> Array:
        """Return the sum of weighted squares over the points along the last axis."""
        result: Array = (self.weight * residual**2).sum(axis=-1)
        return result

    def covariance(self, jacobian: Array, residual: Array) -> Array | None:
        """Covariance of the parameters; None if they cannot be distinguished or no degree of freedom is left."""
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
        return 1.0 if self.known else float(self.cost(residual)) / (points - parameters)

    def scatter(self, residual: Array, parameters: int) -> float:
        """Standard deviation of ln t of one point around the curve, including its own error."""
        if self.known:
            return float(np.sqrt(np.mean(1 / self.weight)))
        return float(np.sqrt(self._unit(residual, len(residual), parameters)))

    def deviance(self, residual: Array, error: Array | None) -> float:
        """-2 ln likelihood of the residuals up to constants, at the likeliest scatter.

        Without errors of the points, it is m ln(cost / m).
        """
        points = len(residual)
        if error is None:
            return points * math.log(max(float(self.cost(residual)) / points, RESIDUAL_FLOOR**2))

        def at(between: float) -> float:
            variance = np.maximum(error**2 + between**2, RESIDUAL_FLOOR**2)
            return float(np.sum(np.log(variance) + residual**2 / variance)) - points

        most = float(np.abs(residual).max()) + RESIDUAL_FLOOR
        found = optimize.minimize_scalar(at, bounds=(0.0, most), method="bounded", options={"xatol": 1e-9 * most})
        return min(at(0.0), float(found.fun))


def from_errors(error: Array, between: float) -> Noise:
    """Return the noise of points with their own errors and a scatter ``between`` them beyond these errors."""
    variance = np.maximum(error**2 + between**2, RESIDUAL_FLOOR**2)
    return Noise(1 / variance, True, between)


def scatter_between(excess: Callable[[float], float], log_time: Array) -> float:
    """Scatter at which the residuals have their expected size (Paule and Mandel, 1982); at least 0.

    ``excess`` decreases with the scatter.
    """
    most = float(np.ptp(log_time)) + RESIDUAL_FLOOR
    if excess(0.0) <= 0:
        return 0.0
    while excess(most) > 0:
        most *= 2
    return float(optimize.brentq(excess, 0.0, most, xtol=1e-9 * most))
