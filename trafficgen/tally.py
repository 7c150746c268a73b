"""Counts and quantiles of a stream of values in bounded memory."""

from __future__ import annotations

import math
from collections import Counter

# Neighbouring classes are 1 % apart, which is therefore the error of a quantile
_STEP = math.log(1.01)


class Tally:
    """Mean, greatest and quantiles of values of 0 or more; quantiles are right to 1 %.

    Attributes:
        count: values seen.
        greatest: the largest of them, 0 when there is none.
    """

    def __init__(self) -> None:
        self.count = 0
        self.greatest = 0
        self._sum = 0
        self._classes: Counter[int] = Counter()

    def add(self, value: int) -> None:
        """Count one value; a negative one counts as 0."""
        value = max(0, value)
        self.count += 1
        self._sum += value
        self.greatest = max(self.greatest, value)
        self._classes[int(math.log(value) / _STEP) + 1 if value else 0] += 1

    def merge(self, other: Tally) -> None:
        """Count what another tally has counted."""
        self.count += other.count
        self.greatest = max(self.greatest, other.greatest)
        self._sum += other._sum
        self._classes.update(other._classes)

    def mean(self) -> float | None:
        """The mean, or None without values."""
        return self._sum / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The value that ``share`` of the values do not exceed, or None without values."""
        wanted, seen = share * self.count, 0
        for number in sorted(self._classes):
            seen += self._classes[number]
            if seen >= wanted:
                return min(float(self.greatest), math.exp((number - 0.5) * _STEP)) if number else 0.0
        return None
