"""The web-search distribution against its exact moments and quantiles, and the draws against theirs."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ringtap.core.errors import UsageError
from ringtap.trafficgen.plans.sampling import exponential, normal_share
from ringtap.trafficgen.plans.size_distributions import WEB_SEARCH, WORKLOADS, SizeDistribution, parse_sizes
from tests.unit.size_quantiles import quantile_bytes

pytestmark = pytest.mark.computes


def test_the_mean_is_the_published_one() -> None:
    assert WEB_SEARCH.mean_bytes == 1_711_250


def test_quantiles_are_the_points_and_linear_between_them() -> None:
    for size, share in WEB_SEARCH.points:
        assert quantile_bytes(WEB_SEARCH, share) == size
    assert quantile_bytes(WEB_SEARCH, 0.5) == pytest.approx(50_000 + 30_000 * 10 / 13)
    assert quantile_bytes(WEB_SEARCH, 0.985) == pytest.approx(20_000_000)


def test_samples_have_the_distribution() -> None:
    rng = random.Random(3)
    sample = [WEB_SEARCH.sampler(rng)() for _ in range(40_000)]
    sizes, shares = zip(*WEB_SEARCH.points, strict=True)
    assert stats.kstest(sample, lambda x: np.interp(x, sizes, shares)).pvalue > 0.01
    error = np.std(sample) / math.sqrt(len(sample))
    assert abs(np.mean(sample) - WEB_SEARCH.mean_bytes) < 3 * error


def test_scaling_divides_every_size() -> None:
    scaled = WEB_SEARCH.scaled(1 / 100)
    assert scaled.mean_bytes == pytest.approx(17_112.5)
    for share in (0.01, 0.3, 0.5, 0.999, 1.0):
        assert quantile_bytes(scaled, share) == pytest.approx(quantile_bytes(WEB_SEARCH, share) / 100)


@pytest.mark.parametrize(
    "points",
    [[], [(10, 0.5)], [(10, 0.5), (5, 1.0)], [(10, 0.6), (20, 0.5), (30, 1.0)], [(0, 0.5), (1, 1.0)], [(10, 1.5)]],
)
def test_points_that_are_no_cdf_are_refused(points: list[tuple[float, float]]) -> None:
    with pytest.raises(UsageError, match="not a CDF"):
        SizeDistribution("bad", points)


def test_a_flat_piece_of_the_cdf_is_skipped() -> None:
    gap = SizeDistribution("gap", [(10, 0.5), (100, 0.5), (110, 1.0)])
    assert quantile_bytes(gap, 0.5) == 10
    assert quantile_bytes(gap, 0.75) == 105


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
    draws = [exponential(rng), normal_share(rng, 0.5, 1 / 6), WEB_SEARCH.sampler(rng)()]
    assert draws == pytest.approx([0.1442910641095, 0.527936877113, 25_506.90257394])


@pytest.mark.parametrize(
    ("name", "mean_bytes"),
    [
        ("web-search", 1_711_250),
        ("data-mining", 12_658_198.6),
        ("facebook-hadoop", 120_420.75),
        ("ali-storage-2019", 40_869.8),
    ],
)
def test_workloads_have_the_published_means(name: str, mean_bytes: float) -> None:
    assert WORKLOADS[name].mean_bytes == mean_bytes
    assert parse_sizes(name) is WORKLOADS[name]


def test_facebook_hadoop_and_ali_storage_have_their_published_quantiles() -> None:
    assert quantile_bytes(WORKLOADS["facebook-hadoop"], 0.5) == 700
    assert quantile_bytes(WORKLOADS["facebook-hadoop"], 0.975) == 1_000_000
    assert quantile_bytes(WORKLOADS["ali-storage-2019"], 0.6921) == 8_000
    assert quantile_bytes(WORKLOADS["data-mining"], 0.8) == 10_000


@pytest.mark.parametrize(
    ("text", "mean_bytes", "median_bytes"),
    [
        ("fixed:64kB", 64_000, 64_000),
        ("fixed:1000", 1_000, 1_000),
        ("uniform:1kB:3kB", 2_000, 2_000),
        ("lognormal:100kB:1", 100_000, 100_000 * math.exp(-0.5)),
        ("pareto:100kB:2.5", 100_000, 60_000 * 2**0.4),
    ],
)
def test_formulas_have_the_mean_and_median_asked_for(text: str, mean_bytes: float, median_bytes: float) -> None:
    sizes = parse_sizes(text)
    assert sizes.name == text
    assert sizes.mean_bytes == mean_bytes
    assert quantile_bytes(sizes, 0.5) == pytest.approx(median_bytes)
    assert sizes.scaled(0.1).mean_bytes == pytest.approx(mean_bytes / 10)
    assert quantile_bytes(sizes.scaled(0.1), 0.5) == pytest.approx(median_bytes / 10)


def test_the_ends_of_formulas() -> None:
    lognormal, pareto = parse_sizes("lognormal:1kB:1"), parse_sizes("pareto:1kB:2")
    assert quantile_bytes(lognormal, 0) < 1
    assert quantile_bytes(pareto, 0) == 500
    assert min(quantile_bytes(each, 1 - 2**-53) for each in (lognormal, pareto)) > 1_000_000


class Least(random.Random):
    """Draws the least number that there is."""

    def random(self) -> float:
        return 0.0


def test_the_least_draw_is_a_size() -> None:
    for text in (*WORKLOADS, "fixed:5", "uniform:1:9", "lognormal:1kB:3", "pareto:1kB:1.1"):
        assert 0 <= parse_sizes(text).sampler(Least())() < 5_000


@pytest.mark.parametrize(
    ("text", "distribution"),
    [
        ("uniform:1kB:3kB", stats.uniform(1_000, 2_000)),
        ("lognormal:100kB:1.5", stats.lognorm(1.5, scale=100_000 * math.exp(-1.125))),
        ("pareto:100kB:1.2", stats.pareto(1.2, scale=100_000 / 6)),
    ],
)
def test_formulas_draw_what_they_are_called(text: str, distribution: Any) -> None:
    draw = parse_sizes(text).sampler(random.Random(11))
    assert stats.kstest([draw() for _ in range(20_000)], distribution.cdf).pvalue > 0.01


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "unknown"),
        ("websearch", "web-search"),
        ("fixed", "not understood"),
        ("fixed:0", "1 byte"),
        ("fixed:-5", "not understood"),
        ("fixed:1PB", "not understood"),
        ("fixed:9999TB", "1 byte"),
        ("fixed:1:2", "unknown"),
        ("uniform:5", "unknown"),
        ("uniform:9:9", "larger"),
        ("lognormal:1kB:0", "above 0"),
        ("lognormal:1kB:nan", "above 0"),
        ("lognormal:1kB:11", "at most 10"),
        ("pareto:1kB:1", "above 1"),
        ("pareto:1kB:x", "'x'"),
        ("file:", "unknown"),
        ("file:missing.txt", "missing.txt cannot be read"),
    ],
)
def test_sizes_that_make_no_sense_are_one_sentence(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_sizes(text)
