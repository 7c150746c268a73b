"""Estimates differences and means of short series of correlated values, from the scatter of a few stretches of each.

docs/method/method.md, "Few iterations", has the reason, docs/notes/error-rates.md the error rates. Few values do not
show how strongly neighbours are correlated. Medians and means of long stretches are nearly independent of each other,
however strong it is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from ringtap.analysis.statistics.to_arrays import Array

MIN_STRETCHED = 16  # values of the smaller sample; of fewer, stretches of correlated values are too short
MANY_VALUES = 100  # of the smaller sample, from which on it shows how strongly neighbours are correlated
MIN_P = sys.float_info.min  # a smaller p cannot be written as a normal floating point number
_PER_STRETCH = 2.5  # stretches are the root of the number of values over this, so that they lengthen with the series


class StretchDifference(NamedTuple):
    """Difference of the centres of two series, b minus a.

    Attributes:
        value: the difference.
        error: its standard error; 0 if no value of either series differs from its others.
        freedom: degrees of freedom of the error.
    """

    value: float
    error: float
    freedom: float

    @property
    def p(self) -> float:
        """Two-sided p value of Welch's t test."""
        if self.error == 0:
            return 1.0 if self.value == 0 else MIN_P
        return max(MIN_P, float(2 * special.stdtr(self.freedom, -abs(self.value) / self.error)))

    def interval(self, level: float) -> tuple[float, float]:
        """Return the ends of its interval."""
        reach = self.error and float(special.stdtrit(self.freedom, (1 + level) / 2)) * self.error
        return self.value - reach, self.value + reach


def median_difference(a: Array, b: Array) -> StretchDifference:
    """Return the difference of the medians of two series, each of at least `MIN_STRETCHED` values in order of time."""
    number = stretches_of(min(len(a), len(b)))
    parts = [_variance(values, number, np.median, 1.0) for values in (a, b)]
    return _difference(float(np.median(b) - np.median(a)), parts, number)


def rank_difference(a: Array, b: Array) -> StretchDifference:
    """Return the difference of the mean ranks of two series among both, for values that may be rare, such as losses."""
    number = stretches_of(min(len(a), len(b)))
    ranks = np.split(np.asarray(pd.Series(np.concatenate((a, b))).rank(), np.float64), [len(a)])
    parts = [_variance(values, number, np.mean, number / len(values)) for values in ranks]
    return _difference(float(ranks[1].mean() - ranks[0].mean()), parts, number)


def stretches_of(count: int) -> int:
    """Return the number of stretches of a series of at least `MIN_STRETCHED` values."""
    return max(2, int(math.sqrt(count) / _PER_STRETCH))


def mean_error(values: Array) -> tuple[float, float] | None:
    """Return the standard error of the mean of a series as a share of it, and its degrees of freedom.

    None if there are fewer than `MIN_STRETCHED` values.
    """
    if len(values) < MIN_STRETCHED:
        return None
    number = stretches_of(len(values))
    variance = _variance(values, number, np.mean, number / len(values))
    return math.sqrt(variance) / float(values.mean()), number - 1.0


def _difference(value: float, parts: list[float], number: int) -> StretchDifference:
    total = sum(parts)
    freedom = (number - 1) * total**2 / sum(part**2 for part in parts) if total else 1.0
    return StretchDifference(value, math.sqrt(total), freedom)


def _variance(values: Array, number: int, centre: Callable[[Array], np.floating], moved: float) -> float:
    """Return the variance of the mean of the centres of stretches, with that of rounding.

    Centres may be alike only because values are rounded. If one value takes a step, the centre moves by at most the
    share ``moved`` of it, and so its rounding has the variance of a uniform distribution of this width.
    """
    centres = np.array([centre(part) for part in np.array_split(values, number)])
    steps = np.diff(np.unique(values))
    width = moved * float(steps.min()) if len(steps) else 0.0
    return float(centres.var(ddof=1) + width**2 / 12) / number
