"""Flow size distributions and the few random draws that plans need.

Every draw is an inverse transform of ``random.Random.random()``, the one method whose sequence Python promises to
keep for a seed, so a seed gives the same plan on every Python version.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from ringtap.errors import UsageError

# (bytes, cumulative probability); DCTCP's web-search workload as pFabric, TrafficGenerator and HPCC publish it
_WEB_SEARCH = (
    (10_000, 0.15),
    (20_000, 0.20),
    (30_000, 0.30),
    (50_000, 0.40),
    (80_000, 0.53),
    (200_000, 0.60),
    (1_000_000, 0.70),
    (2_000_000, 0.80),
    (5_000_000, 0.90),
    (10_000_000, 0.97),
    (30_000_000, 1.0),
)


class SizeDistribution:
    """A distribution of flow sizes given by points of its CDF, linear between them and 0 at size 0.

    Args:
        name: what plans and reports call it.
        points: (size in bytes, cumulative probability), both rising, ending at probability 1.

    Raises:
        UsageError: the points are not a CDF.
    """

    def __init__(self, name: str, points: Sequence[tuple[float, float]]) -> None:
        self.name = name
        self.points = ((0.0, 0.0), *((float(size), float(share)) for size, share in points))
        steps = list(pairwise(self.points))
        if not steps or any(low[0] >= high[0] or low[1] > high[1] for low, high in steps) or self.points[-1][1] != 1.0:
            raise UsageError(
                f"size distribution {name!r} is no CDF: sizes must rise and probabilities must rise from 0 to 1"
            )
        self._shares = [share for _, share in self.points]
        # Fractions of the decimal texts, so that the mean is the published one and not a sum of rounding errors
        mean = sum(
            (Fraction(repr(high[1])) - Fraction(repr(low[1]))) * (Fraction(high[0]) + Fraction(low[0])) / 2
            for low, high in steps
        )
        self.mean_bytes = float(mean)

    def quantile_bytes(self, share: float) -> float:
        """The size that ``share`` (0 to 1) of the flows do not exceed (inverse CDF), in bytes."""
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"share {share} is not between 0 and 1")
        above = max(1, bisect_left(self._shares, share))
        (low_size, low_share), (high_size, high_share) = self.points[above - 1], self.points[above]
        if high_share == low_share:
            return low_size
        return low_size + (high_size - low_size) * (share - low_share) / (high_share - low_share)

    def sample_bytes(self, rng: random.Random) -> float:
        """Draw one size in bytes, not rounded."""
        return self.quantile_bytes(rng.random())

    def scaled(self, factor: float) -> SizeDistribution:
        """The same shape with every size multiplied by ``factor``."""
        return SizeDistribution(self.name, [(size * factor, share) for size, share in self.points[1:]])


WEB_SEARCH = SizeDistribution("web-search", _WEB_SEARCH)


def exponential(rng: random.Random) -> float:
    """Draw from the exponential distribution with mean 1."""
    return -math.log1p(-rng.random())


def normal_share(rng: random.Random, mean: float, deviation: float) -> float:
    """Draw from a normal distribution restricted to the open interval (0, 1), by Box-Muller and drawing again."""
    while True:
        radius = math.sqrt(2.0 * exponential(rng))
        share = mean + deviation * radius * math.cos(2.0 * math.pi * rng.random())
        if 0.0 < share < 1.0:
            return share
