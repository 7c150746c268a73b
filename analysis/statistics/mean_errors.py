"""Standard errors of mean iteration times, from autocorrelated iterations and from few of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ringtap.analysis.statistics.arrays import Array, Values
from ringtap.analysis.statistics.autocorrelation import effective_count

_LEAST, _MOST = 1e-3, 1.0  # bounds of a relative error: a mean is not better known than the load of its window
_PRIOR_FREEDOM = 4.0  # degrees of freedom that the spread of the other windows counts for
_PRIOR_LOADS = 4


def relative_error(iteration_s: Array) -> float:
    """Standard error of the mean of iteration times in order of time, by their effective count, as a share of it.

    It is infinite for a single iteration.
    """
    if len(iteration_s) < 2:
        return math.inf
    return float(iteration_s.std(ddof=1) / math.sqrt(effective_count(iteration_s)) / iteration_s.mean())


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
    counts = np.array([effective_count(one) if len(one) > 1 else 1.0 for one in windows])
    own = np.array([relative_error(one) for one in windows]) ** 2 * counts
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
