"""Finds outliers among measured points: those that the curve through the other points contradicts."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy import special

from ringtap.analysis.model.model_least_squares import EXPONENT_GRID, Array, Exponent, jacobian, reduced_load, solve_log
from ringtap.analysis.model.scatter_and_weights import RESIDUAL_FLOOR, Noise, from_errors, scatter_between

LEVEL = 0.002  # probability to leave out a point of a series without outliers; it narrows the intervals of such series
MOST_SHARE = 0.25  # of the points can be outliers, and one in any case
DECISIVE_LEVERAGE = 0.5  # weight of a point in its own fitted value; above, the others hardly say what it should be
_ALIKE_SHARE = 1e-6  # of the loads' range: points closer than this are at the same load
_REFINEMENTS = 5  # of a free exponent
_MAX_CONDITION = 1e7  # of the columns; beyond, their squares have no digits left

Mask = npt.NDArray[np.bool_]


def find_outliers(load: Array, log_time: Array, capacity: float, n: Exponent, error: Array | None, most: int) -> Mask:
    """Return a mask of the outliers, by the generalized ESD test (Rosner, Technometrics 25, 1983).

    The point that the curve through the others contradicts most is left out, and so on, up to ``most`` points. Each is
    judged by Student's t of its distance from that curve, corrected for the number of points. The last one beyond
    `LEVEL`, and all before it, are outliers, so that one does not hide another.

    Args:
        load: loads, shape (points,).
        log_time: ln t of the points.
        capacity: capacity of the bottleneck.
        n: exponent of the curve, or ``free``.
        error: standard error of each ln t; None if it is not known.
        most: maximum number of outliers.
    """
    if not isinstance(n, str):
        return _contradicted(jacobian(load, capacity, 1.0, n, free=False), log_time, error, most)
    at = min(EXPONENT_GRID, key=lambda one: _robust_scatter(reduced_load(load, capacity, float(one)), log_time))
    found = np.zeros(len(load), np.bool_)
    for _ in range(_REFINEMENTS):
        # the curve is linear in a small change of the exponent
        before, found = found, _contradicted(jacobian(load, capacity, 1.0, float(at), True), log_time, error, most)
        if np.array_equal(found, before):
            break
        noise = Noise(np.ones(int(np.sum(~found))))
        at = solve_log(load[~found], log_time[~found], capacity, "free", noise).n
    return found


def _contradicted(columns: Array, log_time: Array, error: Array | None, most: int) -> Mask:
    """Return the outliers of a model that is linear in these columns, shape (points, parameters)."""
    left, order, outliers = np.arange(len(log_time)), [], 0
    for _ in range(most):
        ratios = deletion_ratios(columns[left], log_time[left], None if error is None else error[left])
        largest, freedom = int(ratios.argmax()), len(left) - 1 - columns.shape[1]
        order.append(left[largest])
        if 2 * special.stdtr(freedom, -ratios[largest]) * len(left) < LEVEL:
            outliers = len(order)
        left = np.delete(left, largest)
    found = np.zeros(len(log_time), np.bool_)
    found[order[:outliers]] = True
    return found


def deletion_ratios(columns: Array, log_time: Array, error: Array | None) -> Array:
    """Return the distance of each point from the curve through the others, over its standard error.

    It is 0 for a point without which the parameters cannot be distinguished.
    """
    scaled = columns / np.linalg.norm(columns, axis=0)
    ratios = np.zeros(len(log_time))
    for at in range(len(log_time)):
        others = np.arange(len(log_time)) != at
        if not np.linalg.cond(scaled[others]) < _MAX_CONDITION:
            continue
        weight, own = _weights(scaled, log_time, error, at)
        found, inverse = _weighted(scaled[others], log_time[others], weight)
        variance = own + scaled[at] @ inverse @ scaled[at]
        ratios[at] = abs(log_time[at] - scaled[at] @ found) / math.sqrt(variance)
    return ratios


def _weights(columns: Array, log_time: Array, error: Array | None, at: int) -> tuple[Array, float]:
    """Return the inverse variances of all points but one, and the variance of that one."""
    others = np.arange(len(log_time)) != at
    left, times = columns[others], log_time[others]
    freedom = len(times) - columns.shape[1]

    def squares(weight: Array) -> float:
        root = np.sqrt(weight)
        own_columns, own_times = left * root[:, None], times * root
        return float(np.sum((own_times - own_columns @ np.linalg.lstsq(own_columns, own_times, rcond=None)[0]) ** 2))

    if error is None:
        variance = max(squares(np.ones(len(times))) / freedom, RESIDUAL_FLOOR**2)
        return np.full(len(times), 1 / variance), variance
    known = error[others]
    between = scatter_between(lambda scatter: squares(from_errors(known, scatter).weight) - freedom, times)
    return from_errors(known, between).weight, max(float(error[at] ** 2) + between**2, RESIDUAL_FLOOR**2)


def _weighted(columns: Array, log_time: Array, weight: Array) -> tuple[Array, Array]:
    """Return the parameters of weighted least squares, and their covariance."""
    inverse = np.asarray(np.linalg.pinv((columns * weight[:, None]).T @ columns, hermitian=True), np.float64)
    return inverse @ (columns * weight[:, None]).T @ log_time, inverse


def _robust_scatter(x: Array, log_time: Array) -> float:
    """Return the median absolute residual of Theil and Sen's line, which outliers hardly move."""
    first, second = np.triu_indices(len(x), 1)
    run = x[second] - x[first]
    apart = np.abs(run) > _ALIKE_SHARE * np.ptp(x)  # replicates have no slope between them
    detrended = log_time - np.median((log_time[second] - log_time[first])[apart] / run[apart]) * x
    return float(np.median(np.abs(detrended - np.median(detrended))))
