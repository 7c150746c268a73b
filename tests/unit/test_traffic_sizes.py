"""The web-search distribution against its exact moments and quantiles, and the draws against theirs."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy import stats

from ringtap.errors import UsageError
from ringtap.trafficgen.sizes import WEB_SEARCH, SizeDistribution, exponential, normal_share


def test_the_mean_is_the_published_one() -> None:
    assert WEB_SEARCH.mean_bytes == 1_711_250


def test_quantiles_are_the_points_and_linear_between_them() -> None:
    for size, share in WEB_SEARCH.points:
        assert WEB_SEARCH.quantile_bytes(share) == size
    assert WEB_SEARCH.quantile_bytes(0.5) == pytest.approx(50_000 + 30_000 * 10 / 13)
    assert WEB_SEARCH.quantile_bytes(0.985) == pytest.approx(20_000_000)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_outside_0_to_1_is_an_error(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        WEB_SEARCH.quantile_bytes(share)


def test_samples_have_the_distribution() -> None:
    rng = random.Random(3)
    sample = [WEB_SEARCH.sample_bytes(rng) for _ in range(40_000)]
    sizes, shares = zip(*WEB_SEARCH.points, strict=True)
    assert stats.kstest(sample, lambda x: np.interp(x, sizes, shares)).pvalue > 0.01
    error = np.std(sample) / math.sqrt(len(sample))
    assert abs(np.mean(sample) - WEB_SEARCH.mean_bytes) < 3 * error


def test_scaling_divides_every_size() -> None:
    scaled = WEB_SEARCH.scaled(1 / 100)
    assert scaled.mean_bytes == pytest.approx(17_112.5)
    for share in (0.01, 0.3, 0.5, 0.999, 1.0):
        assert scaled.quantile_bytes(share) == pytest.approx(WEB_SEARCH.quantile_bytes(share) / 100)


@pytest.mark.parametrize(
    "points",
    [[], [(10, 0.5)], [(10, 0.5), (5, 1.0)], [(10, 0.6), (20, 0.5), (30, 1.0)], [(0, 0.5), (1, 1.0)], [(10, 1.5)]],
)
def test_points_that_are_no_cdf_are_refused(points: list[tuple[float, float]]) -> None:
    with pytest.raises(UsageError, match="no CDF"):
        SizeDistribution("bad", points)


def test_a_flat_piece_of_the_cdf_is_skipped() -> None:
    gap = SizeDistribution("gap", [(10, 0.5), (100, 0.5), (110, 1.0)])
    assert gap.quantile_bytes(0.5) == 10
    assert gap.quantile_bytes(0.75) == 105


def test_exponential_draws() -> None:
    rng = random.Random(5)
    assert stats.kstest([exponential(rng) for _ in range(20_000)], "expon").pvalue > 0.01


def test_normal_shares_are_normal_and_stay_inside() -> None:
    rng = random.Random(5)
    shares = [normal_share(rng, 0.5, 1 / 6) for _ in range(20_000)]
    assert 0 < min(shares) < max(shares) < 1
    assert stats.kstest(shares, stats.truncnorm(-3, 3, 0.5, 1 / 6).cdf).pvalue > 0.01


def test_draws_of_a_seed_never_change() -> None:
    rng = random.Random(1)
    draws = [exponential(rng), normal_share(rng, 0.5, 1 / 6), WEB_SEARCH.sample_bytes(rng)]
    assert draws == pytest.approx([0.1442910641095, 0.527936877113, 25_506.90257394])
