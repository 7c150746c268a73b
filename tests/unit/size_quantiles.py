"""Quantiles of size distributions for tests: the size that is drawn at a share."""

from __future__ import annotations

import random

from ringtap.trafficgen.plans.size_distributions import Sizes


class _Fixed(random.Random):
    """Always draws the same number."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def random(self) -> float:
        return self._share


def quantile_bytes(sizes: Sizes, share: float) -> float:
    """Return the size that ``share`` (0 to 1) of the flows do not exceed."""
    return sizes.sampler(_Fixed(share))()
