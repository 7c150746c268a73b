"""Estimates standard errors of mean iteration times, from autocorrelated iterations and from few of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from ringtap.analysis.statistics.autocorrelation import effective_count
from ringtap.analysis.statistics.short_correlated_series import MANY_VALUES, stretches_of
from ringtap.analysis.statistics.to_arrays import Array, Values

_LEAST, _MOST = 1e-3, 1.0  # bounds of a relative error: a mean is not better known than the load of its window
_PRIOR_FREEDOM = 4.0  # degrees of freedom that the spread of the other windows counts for
_PRIOR_LOADS = 4
_CORRELATIONS = np.linspace(0.0, 0.95, 96)
_LEAST_FEW = 4  # values of a window that has two stretches


def relative_error(iteration_s: Array) -> float:
    """Standard error of the mean of iteration times in order of time, by their effective count, as a share of it.

    It is infinite for a single iteration.
    """
    if len(iteration_s) < 2:
        return math.inf
    return float(iteration_s.std(ddof=1) / math.sqrt(effective_count(iteration_s)) / iteration_s.mean())


def independent_counts(windows: Sequence[Array]) -> Array:
    """Return the effective number of independent values of each window of a series, at least 1.

    Few values do not show how strongly neighbours are correlated. Windows of fewer than `MANY_VALUES` are therefore
    taken for autoregressive with one correlation: that which explains how much the means of their stretches scatter.
    """
    few = [one for one in windows if _LEAST_FEW <= len(one) < MANY_VALUES and one.var() > 0]
    excess = np.zeros(len(_CORRELATIONS))
    for one in few:
        number = stretches_of(len(one))
        means = [part.mean() for part in np.array_split(one, number)]
        scatter = np.var(means, ddof=1) * len(one) / number / one.var(ddof=1)
        excess += (number - 1) * (scatter - _by_correlation(len(one))[0])
    best = int(np.abs(excess).argmin()) if excess[0] > 0 else 0
    return np.array(
        [
            effective_count(one) if len(one) >= MANY_VALUES else max(1.0, len(one) / _by_correlation(len(one))[1][best])
            for one in windows
        ]
    )


@functools.lru_cache(maxsize=MANY_VALUES)
def _by_correlation(count: int) -> tuple[Array, Array]:
    """Variance of means of autoregressive values over that of independent values with the same scatter.

    Returns:
        For each of `_CORRELATIONS`, that of the means of stretches, as they scatter around their own mean, and that of
        the mean of all. Both allow for the scatter of correlated values, which is too small in a short series.
    """
    if count < _LEAST_FEW:
        return np.ones(len(_CORRELATIONS)), np.ones(len(_CORRELATIONS))
    number = stretches_of(count)
    stretches = np.array(
        [np.bincount(part, minlength=count) / len(part) for part in np.array_split(np.arange(count), number)]
    )
    stretches -= stretches.mean(axis=0)
    lags = np.abs(np.subtract.outer(np.arange(count), np.arange(count)))
    found = []
    for correlation in _CORRELATIONS:
        covariance = correlation**lags
        of_mean = covariance.mean()
        scatter = (1 - of_mean) * count / (count - 1)
        between = np.trace(stretches @ covariance @ stretches.T) / (number - 1)
        found.append((count / number * between / scatter, count * of_mean / scatter))
    of_stretches, of_all = np.array(found).T
    return of_stretches, of_all


def mean_errors(loads: Values, capacity: float, windows: Sequence[Array]) -> Array:
    """Standard error of the mean of each window as a share of it, moderated by the spread of the other windows.

    Two or three iterations may agree by chance. Each variance is therefore a weighted mean of its own and of the one
    that a smooth curve through all windows gives for its load (Smyth, Stat. Appl. Genet. Mol. Biol. 3, 2004, equation
    for moderated variances). The weights are degrees of freedom: one less than the effective count, and 4.

    Args:
        loads: measured load of each window, shape (windows,), below the capacity.
        capacity: capacity of the bottleneck, in the same unit.
        windows: iteration times of each in order of time, one at least.
    """
    u = -np.log1p(-np.asarray(loads, dtype=np.float64) / capacity)
    counts = independent_counts(windows)
    own = np.array([one.std(ddof=1) / one.mean() if len(one) > 1 else 1.0 for one in windows]) ** 2
    freedom = np.maximum(counts - 1, 0.0)
    own = np.clip(np.where(freedom > 0, own, 1.0), _LEAST**2, None)
    degree = 1 if len(np.unique(u.round(2))) >= _PRIOR_LOADS else 0
    known = freedom > 0
    if not known.any():
        return np.full(len(u), _MOST)
    degree = min(degree, int(known.sum()) - 1)
    curve = np.polynomial.Polynomial.fit(u[known], np.log(own[known]), degree, w=np.sqrt(freedom[known]))
    prior = np.exp(np.clip(curve(u), math.log(_LEAST**2), 0.0))
    variance = (freedom * own + _PRIOR_FREEDOM * prior) / (freedom + _PRIOR_FREEDOM)
    result: Array = np.clip(np.sqrt(variance / counts), _LEAST, _MOST)
    return result
