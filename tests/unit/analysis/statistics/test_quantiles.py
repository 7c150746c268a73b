import json

import numpy as np
import pytest
from scipy import stats

from ringtap.analysis.statistics.autocorrelation import block_means, correlation_time, effective_count
from ringtap.analysis.statistics.quantiles import quantile_interval
from ringtap.core.errors import UsageError

pytestmark = [pytest.mark.computes, pytest.mark.together]


def wandering(count, rho, seed):
    """A first-order autoregressive series of unit variance."""
    noise = np.random.default_rng(seed).normal(size=count + 100)
    values = noise.copy()
    for index in range(1, len(values)):
        values[index] = rho * values[index - 1] + np.sqrt(1 - rho**2) * noise[index]
    return values[100:]


@pytest.mark.parametrize(
    ("count", "q", "low", "high"),
    [
        (100, 0.5, 40, 61),  # tabulated: Conover, Practical Nonparametric Statistics, table A3, n = 100
        (6, 0.5, 1, 6),
        (5, 0.5, None, None),
        (30, 0.1, 1, 9),  # 0.9^30 = 0.0424: its least value bounds p10 at 95 %
        (298, 0.99, 291, None),
        (299, 0.99, 289, 299),  # 0.99^299 = 0.0495: the first count whose greatest value bounds p99 at 95 %
        (368, 0.99, 360, 368),  # 0.99^368 = 0.0248: the first with half of the rest in each tail
        (1200, 0.99, 1181, 1195),
    ],
)
def test_ranks_that_enclose_a_quantile(count, q, low, high):
    values = np.random.default_rng(8).permutation(np.arange(1.0, count + 1))  # a value is its rank
    assert effective_count(values) == count
    found = quantile_interval(values, q)
    assert (found.low, found.high, found.count) == (low, high, count)
    assert found.value == np.percentile(values, 100 * q)
    for rank, tail in ((low, 0), (high, 1)):
        if rank is not None:
            missed = stats.binom.cdf(rank - 1, count, q)
            assert (1 - missed if tail else missed) <= 0.05


def test_a_missing_end_says_why_and_how_many_are_needed():
    found = quantile_interval(np.random.default_rng(8).random(100))
    assert found.high is None
    assert found.low is not None
    assert found.reason == "100 values cannot bound the upper end of p99: 299 are needed"
    assert "either end" in quantile_interval([1.0, 3.0, 2.0], 0.5).reason
    assert "the lower end" in quantile_interval(np.random.default_rng(8).random(100), 0.01).reason
    json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.parametrize("q", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("count", [*range(1, 60), 100, 299, 300, 1000])
def test_an_interval_contains_its_estimate(count, q):
    found = quantile_interval(np.random.default_rng(count).random(count), q)
    assert found.low is None or found.low <= found.value
    assert found.high is None or found.value <= found.high


@pytest.mark.parametrize(("count", "q"), [(299, 0.99), (1200, 0.99), (50, 0.5)])
def test_the_interval_covers_as_often_as_it_says(count, q):
    draw = np.random.default_rng(11)
    truth = stats.lognorm.ppf(q, 0.5)
    covered = 0
    for _ in range(400):
        found = quantile_interval(draw.lognormal(0, 0.5, count), q)
        covered += (found.low is None or found.low <= truth) and (found.high is None or truth <= found.high)
    # never below the level but for chance: three standard errors of 400 trials
    assert covered / 400 > 0.95 - 3 * np.sqrt(0.95 * 0.05 / 400)


def test_alike_neighbours_count_for_less():
    values = wandering(4000, 0.6, 3)
    # (1 + rho) / (1 - rho) = 4 values count as one; ranks lower it by a few per cent, chance by 10
    assert correlation_time(values) == pytest.approx(4.0, rel=0.2)
    found, shuffled = quantile_interval(values), quantile_interval(np.random.default_rng(1).permutation(values))
    assert found.effective_count < 0.3 * found.count
    assert found.high - found.low > shuffled.high - shuffled.low
    assert "independent ones" in quantile_interval(values[:500]).reason
    assert correlation_time(np.ones(50)) == 1.0


@pytest.mark.parametrize("q", [0.25, 0.5, 0.75])
def test_repeated_values_have_the_interval_of_the_values_themselves(q):
    values = np.random.default_rng(7).permutation(400).astype(float)
    once, five_times = quantile_interval(values, q), quantile_interval(np.repeat(values, 5), q)
    assert five_times.effective_count < 0.3 * five_times.count
    # five values count as one or a little less, so the ends move by a few ranks of 400
    for end in ("low", "high"):
        assert getattr(five_times, end) == pytest.approx(getattr(once, end), abs=8)
    assert five_times.low < five_times.value < five_times.high


def test_block_means_scatter_as_the_mean_does():
    draw = np.random.default_rng(5)
    means = [wandering(800, 0.6, seed).mean() for seed in range(300)]
    blocks = np.mean([block_means(wandering(800, 0.6, seed), 200, draw).std() for seed in range(20)])
    # blocks of two correlation times see most of the correlation, single values half of it
    assert blocks == pytest.approx(np.std(means), rel=0.2)
    quiet = draw.normal(size=800)
    assert block_means(quiet, 500, draw).std() == pytest.approx(quiet.std() / np.sqrt(800), rel=0.15)


@pytest.mark.parametrize(
    ("values", "q", "level"),
    [([], 0.99, 0.95), ([1.0, float("nan")], 0.99, 0.95), ([[1.0]], 0.5, 0.95), ([1.0], 1.0, 0.95), ([1.0], 0.5, 0)],
)
def test_values_that_make_no_sense_are_refused(values, q, level):
    with pytest.raises(UsageError):
        quantile_interval(values, q, level)
