"""Estimates quantiles of iteration times with distribution-free intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import special

from ringtap.analysis.statistics.autocorrelation import effective_count
from ringtap.analysis.statistics.to_arrays import Array, Values, sample
from ringtap.core.errors import UsageError
from ringtap.core.units import counted

LEVEL = 0.95  # of all intervals, unless a caller asks for another
_ROUNDED = 1 + 1e-9  # probabilities that differ by a smaller factor are the same


@dataclass(frozen=True)
class QuantileInterval:
    """A quantile, its interval and its sample sizes.

    Attributes:
        q: the quantile, 0.99 for p99.
        value: estimate, linear between the nearest ranks (Hyndman and Fan's type 7).
        low: lower end of the interval; None if the values cannot bound it.
        high: upper end; None if the values cannot bound it.
        count: number of values.
        effective_count: effective number of independent values; smaller if neighbours are correlated.
        level: confidence of the interval.
        reason: the reason why an end is missing, one sentence; else empty.
    """

    q: float
    value: float
    low: float | None
    high: float | None
    count: int
    effective_count: float
    level: float
    reason: str

    def to_json(self) -> dict[str, Any]:
        """The interval as plain values."""
        return asdict(self)


def quantile_interval(values: Values, q: float = 0.99, level: float = LEVEL) -> QuantileInterval:
    """Estimate a quantile of a sample, with its distribution-free interval from order statistics.

    The number of values at or below the quantile is binomial for every distribution, so two order statistics enclose
    it with a probability of at least ``level`` (David and Nagaraja, Order Statistics, 2003, section 7.1). Each tail
    gets half of the rest; if one end needs more, it gets more and the other less. Both ends of a 95 % interval of p99
    need 299 independent values. Correlated values count as
    `ringtap.analysis.statistics.autocorrelation.effective_count` values. Of few values, the estimate may lie outside
    these order statistics: the interval then reaches as far as the estimate.

    Args:
        values: the sample in order of time, shape (values,); the result has its unit.
        q: the quantile, between 0 and 1.
        level: confidence, between 0 and 1.

    Raises:
        UsageError: there are no values, a value is not finite, or q or level is not between 0 and 1.
    """
    return quantile_intervals(values, (q,), level)[0]


def quantile_intervals(values: Values, qs: Sequence[float], level: float = LEVEL) -> list[QuantileInterval]:
    """Estimate several quantiles of a sample, each as `quantile_interval` does."""
    for q in qs:
        if not (0 < q < 1 and 0 < level < 1):
            raise UsageError(f"a quantile of {q:g} at a level of {level:g} makes no sense: both lie between 0 and 1")
    ordered = sample(values)
    effective = effective_count(ordered)
    ranked = np.sort(ordered)
    return [_interval(ranked, effective, q, level) for q in qs]


def _interval(ranked: Array, effective: float, q: float, level: float) -> QuantileInterval:
    count, value = len(ranked), float(np.quantile(ranked, q))
    low, high = _ranks(math.floor(effective + 1e-9), q, 1 - level)
    stretch = count / math.floor(effective + 1e-9)
    reason = ""
    if low is None or high is None:
        end = "either" if low is high else "the upper" if high is None else "the lower"
        worth = "" if effective == count else f" that are worth {effective:.0f} independent ones"
        reason = (
            f"{counted(count, 'value')}{worth} cannot bound {end} end of p{100 * q:g}: {_needed(q, level)} are needed"
        )
    return QuantileInterval(
        q=q,
        value=value,
        low=None if low is None else min(value, float(ranked[max(math.floor(low * stretch), 1) - 1])),
        high=None if high is None else max(value, float(ranked[min(math.ceil(high * stretch), count) - 1])),
        count=count,
        effective_count=effective,
        level=level,
        reason=reason,
    )


def _ranks(count: int, q: float, missed: float) -> tuple[int | None, int | None]:
    """Ranks, from 1, of the order statistics that enclose the quantile with probability 1 - ``missed``."""
    above, below = q**count, (1 - q) ** count  # probabilities that the quantile is above or below all values
    lower = upper = missed / 2
    if above + below <= missed:
        upper = min(max(upper, above), missed - below)
        lower = missed - upper
    # real numbers near the quantiles; the upper one is counted from above, where a small probability keeps its digits
    low, high = float(special.bdtrik(lower, count, q)), float(count - 1 - special.bdtrik(upper, count, 1 - q))
    first = _least(lambda successes: bool(special.bdtr(successes, count, q) > lower * _ROUNDED), low)
    last = _least(lambda successes: bool(special.bdtrc(successes, count, q) <= upper * _ROUNDED), high) + 1
    return (first if first >= 1 else None), (last if last <= count else None)


def _least(holds: Callable[[int], bool], near: float) -> int:
    """Least number, 0 or more, for which a condition holds that begins to hold close to ``near``."""
    number = max(0, math.ceil(near) - 2) if math.isfinite(near) else 0
    while not holds(number):
        number += 1
    return number


def _needed(q: float, level: float) -> int:
    """Least number of independent values for which both ends exist."""
    count = 1
    while q**count + (1 - q) ** count > 1 - level:
        count += 1
    return count
