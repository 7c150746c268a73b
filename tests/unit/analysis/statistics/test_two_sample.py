import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import signal, special, stats

from ringtap.analysis.statistics.short_correlated_series import mean_error, median_difference
from ringtap.analysis.statistics.two_sample import (
    _distance_p,
    _fisher_p,
    _superiority,
    compare,
    correct_together,
    holm,
    location_p,
)
from ringtap.core.errors import UsageError

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]


def drawn(seed, mean, spread, count):
    return np.random.default_rng(seed).lognormal(mean, spread, count)


A, B = drawn(3, 0.0, 0.1, 300), drawn(2, 0.03, 0.3, 250)


def test_independent_iterations_give_what_scipy_gives():
    found = compare(A, B)
    assert found.effective_counts == (300, 250)  # else these seeds would not show what the name says
    distribution, location, _ = found.tests
    assert location.p == pytest.approx(stats.brunnermunzel(A, B).pvalue)
    assert distribution.statistic == pytest.approx(stats.ks_2samp(A, B).statistic)
    assert distribution.p == pytest.approx(stats.ks_2samp(A, B, method="exact").pvalue, rel=1e-12)
    wins = np.sign(B[:, None] - A)
    assert found.cliffs_delta == pytest.approx(wins.mean())
    assert found.shift_s.value == pytest.approx(np.median(B[:, None] - A), abs=1e-4)


def test_effects_and_words():
    found = compare(A, B, ("consistent", "burst"))
    assert found.median_ratio.value == np.median(B) / np.median(A)
    assert found.median_ratio.low < found.median_ratio.value < found.median_ratio.high
    # 250 iterations do not bound p99 from above, and so neither their ratio
    assert found.p99_ratio.high is None
    assert found.p99_ratio.low > 1
    assert found.sentence.startswith("burst against consistent: the median iteration takes 1.04 times (0.973 to 1.09)")
    assert "or more" in found.sentence
    assert "Beyond chance in distribution and tail (corrected p < 0.001)." in found.sentence
    assert "No difference beyond chance" in compare(A, drawn(9, 0.0, 0.1, 250)).sentence
    json.dumps(found.to_json(), allow_nan=False)


def test_samples_that_do_not_overlap_or_do_not_vary():
    apart = compare(drawn(1, 0, 0.1, 100), drawn(2, 9, 0.1, 100))
    assert apart.cliffs_delta == 1.0
    # one of C(200, 100) = 9e58 ways, on two sides
    assert next(test.p for test in apart.tests if test.name == "location") == pytest.approx(2 / math.comb(200, 100))
    assert 0 < apart.superiority.low < 1 == apart.superiority.high
    alike = compare([1.0] * 100, [1.0] * 100)
    assert (alike.superiority.value, alike.shift_s.value) == (0.5, 0.0)
    assert [test.p for test in alike.tests] == [1.0, 1.0, 1.0]
    few = compare([1.0] * 20, [1.0] * 20)
    assert (few.median_ratio.low, few.median_ratio.high, few.tests[1].p) == (1.0, 1.0, 1.0)
    assert compare([1.0] * 20, [2.0] * 20).tests[1].p < 1e-300  # nothing varies: it is not chance
    json.dumps(alike.to_json(), allow_nan=False)


@pytest.mark.parametrize("sizes", [(5, 5), (5, 9), (8, 8), (30, 17), (60, 60), (300, 250), (1000, 1)])
def test_p_of_the_distribution_is_scipys_exact_one(sizes):
    draw = np.random.default_rng(sum(sizes))
    for shift in (0.0, 0.4, 9.0):
        a, b = draw.normal(0, 1, sizes[0]), draw.normal(shift, 1, sizes[1])
        exact = stats.ks_2samp(a, b, method="exact")
        assert _distance_p(exact.statistic, *sizes) == pytest.approx(exact.pvalue, rel=1e-9)
        assert _distance_p(exact.statistic, *sizes[::-1]) == pytest.approx(exact.pvalue, rel=1e-9)


@pytest.mark.parametrize("sizes", [(1, 1), (6, 4), (60, 60), (300, 17), (2500, 2400)])
def test_p_of_the_tail_is_scipys_exact_one(sizes):
    draw = np.random.default_rng(sum(sizes))
    for _ in range(20):
        rows = [(int(draw.integers(size + 1)), size) for size in sizes]
        exact = stats.fisher_exact([[many, size - many] for many, size in rows])
        # smaller ones have fewer digits
        assert _fisher_p(*rows) == pytest.approx(exact.pvalue, rel=1e-9, abs=1e-300)


def test_no_p_is_zero_however_far_apart_the_samples():
    far = compare(drawn(1, 0, 0.1, 1500), drawn(2, 9, 0.1, 1500))
    assert all(0 < test.p < 1e-30 for test in far.tests)


def autoregressive(draw, count, correlation):
    noise = draw.standard_normal(count + 100) * math.sqrt(1 - correlation**2)
    return np.exp(0.1 * signal.lfilter([1.0], [1.0, -correlation], noise)[100:])


@pytest.mark.parametrize(("pairs", "counts", "correlation"), [(400, (110, 120), 0.0), (400, (110, 120), 0.5)])
def test_of_comparisons_of_equal_kinds_five_per_cent_are_called_different(pairs, counts, correlation):
    """Each test at most 5 % and three standard errors; the location not far less."""
    draw, cried, called = np.random.default_rng(1), np.zeros(3), 0
    for _ in range(pairs):
        found = compare(*(autoregressive(draw, count, correlation) for count in counts))
        cried += [test.p < 0.05 for test in found.tests]
        called += any(test.is_beyond_chance for test in found.tests)
    most = 0.05 + 3 * math.sqrt(0.05 * 0.95 / pairs)
    assert called / pairs <= 0.05
    assert cried.max() / pairs <= most
    assert cried[1] / pairs >= 0.02


@pytest.mark.parametrize("transform", [lambda logs: logs, lambda logs: np.exp(10 * logs)], ids=["0.1", "skewed"])
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("counts", [(16, 16), (20, 60), (60, 60)])
def test_few_correlated_iterations_are_called_different_as_rarely(counts, correlation, transform):
    """At most 6 % and three standard errors, with intervals that hold the ratio in 92 to 98 %, likewise."""
    draw, trials = np.random.default_rng([8, *counts]), 300
    called = held = ranked = 0
    for _ in range(trials):
        a, b = (np.exp(transform(np.log(autoregressive(draw, count, correlation)))) for count in counts)
        found = compare(a, b)
        called += any(test.is_beyond_chance for test in found.tests)
        held += found.median_ratio.low <= 1 <= found.median_ratio.high
        ranked += location_p(a, b) < 0.05
    error = 3 * math.sqrt(0.06 * 0.94 / trials)
    assert max(called, ranked) / trials <= 0.06 + error
    assert 0.92 - error <= held / trials <= 0.98 + error


def test_few_effective_values_are_told_apart_as_rarely():
    """Student's t would call 8 % of samples of 5 different. At most 5 % and three standard errors."""
    draw, trials = np.random.default_rng(7), 2000
    pairs = (np.sort(draw.standard_normal((2, 5))) for _ in range(trials))
    called = sum(_superiority(a, b, (5, 5), 0.95)[1] < 0.05 for a, b in pairs)
    assert 0.02 <= called / trials <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)
    slow = [np.repeat(drawn(seed, 0.0, 0.1, 6), 20) for seed in (1, 2)]
    assert max(compare(*slow).effective_counts) < 10
    assert not any(test.is_beyond_chance for test in compare(*slow).tests)


def test_numbers_of_few_iterations_are_those_of_all():
    """Without intervals, but calculated alike."""
    a, b = drawn(1, 0.0, 0.1, 30), drawn(2, 0.2, 0.3, 40)
    found, (p99_a, p99_b) = compare(a, b), (np.quantile(one, 0.99) for one in (a, b))
    assert found.median_ratio.value == pytest.approx(np.median(b) / np.median(a))
    assert found.p99_ratio.value == pytest.approx(p99_b / p99_a)
    assert found.p99_difference_s.value == pytest.approx(p99_b - p99_a)
    assert found.superiority.value == pytest.approx((b[:, None] > a).mean())
    assert found.shift_s.value == pytest.approx(np.median(b[:, None] - a), abs=1e-3)
    border = np.quantile(np.concatenate((a, b)), 0.95)
    tail = (b > border).sum() / ((a > border).sum() + (b > border).sum()) - 40 / 70
    statistics = [stats.ks_2samp(a, b).statistic, (b[:, None] > a).mean(), tail]
    assert [test.statistic for test in found.tests] == pytest.approx(statistics)
    assert found.effective_counts == (30, 40)


def test_of_too_few_iterations_nothing_is_said():
    found = compare(drawn(1, 0.0, 0.1, 5), drawn(2, 9.0, 0.1, 15), ("x", "y"))
    assert [(test.p, test.p_holm, test.is_beyond_chance) for test in found.tests] == [(None, None, False)] * 3
    for name in ("median_ratio", "p99_ratio", "p99_difference_s", "shift_s", "superiority"):
        assert (getattr(found, name).low, getattr(found, name).high) == (None, None)
    reason = "Whether beyond chance is not known from 5 iterations of x and 15 iterations of y: record 16 or more"
    assert found.reason == reason
    assert found.sentence.endswith(f"{reason}.")
    json.dumps(found.to_json(), allow_nan=False)
    with pytest.raises(UsageError, match="at least 16"):
        location_p([1] * 15, [2] * 15)


def test_a_large_difference_of_few_iterations_is_beyond_chance():
    found = compare(drawn(1, 0.0, 0.01, 16), drawn(2, 0.7, 0.01, 16))
    assert [test.p is None for test in found.tests] == [True, False, True]
    assert found.tests[1].is_beyond_chance
    assert found.median_ratio.low < math.exp(0.7) < found.median_ratio.high
    assert found.reason == "Distribution and tail are compared from 100 iterations of each on"


def test_rounded_and_rare_values_are_not_called_different_by_their_ties():
    """Stretches whose medians or numbers of losses are alike by rounding alone have no error of 0."""
    assert median_difference(np.array([0.1, 0.11] * 8 + [0.1]), np.array([0.11, 0.1] * 8 + [0.11])).p > 0.05
    rare = np.zeros(16)
    rare[[3, 12]] = 1
    assert location_p(rare, np.zeros(16)) > 0.05
    assert location_p(np.zeros(16), np.zeros(16)) == 1.0
    # bytes of a job are the same in nearly all of its iterations: twice as many are beyond chance, however few
    bytes_of_one, bytes_of_other = np.full(28, 2_404_608.0), np.full(28, 4_804_608.0)
    bytes_of_one[20] += 9_500
    assert location_p(bytes_of_one, bytes_of_other) < 0.001


@pytest.mark.parametrize("counts", [(16, 16), (16, 60), (28, 28)])
@pytest.mark.parametrize("share", [0.1, 0.05])
def test_measures_that_are_mostly_0_are_called_different_rarely(counts, share):
    draw, trials = np.random.default_rng([6, *counts]), 400
    pairs = ([draw.random(count) < share for count in counts] for _ in range(trials))
    called = sum(location_p(a * draw.lognormal(), b * draw.lognormal()) < 0.05 for a, b in pairs)
    assert called / trials <= 0.06
    assert location_p(np.zeros(counts[1]), np.arange(counts[0]) % 3 == 0) < 0.05, "one in three is no chance"


def test_alike_neighbours_widen_every_interval():
    slow = np.repeat(A, 8)  # eight iterations in a row alike
    other = np.repeat(drawn(5, 0.02, 0.1, 300), 8)
    shuffled = [np.random.default_rng(3).permutation(values) for values in (slow, other)]
    honest, naive = compare(slow, other), compare(*shuffled)
    assert honest.effective_counts[0] == pytest.approx(300, rel=0.35)
    for name in ("median_ratio", "shift_s", "superiority"):
        wide, narrow = getattr(honest, name), getattr(naive, name)
        assert wide.high - wide.low > 1.8 * (narrow.high - narrow.low)
    assert all(one.p >= other.p for one, other in zip(honest.tests, naive.tests, strict=True))


def test_errors_are_as_rare_as_they_should_be():
    """200 pairs: intervals that miss and tests that cry wolf stay within three standard errors of 5 %."""
    draw, missed, cried = np.random.default_rng(4), np.zeros(3), np.zeros(3)
    z, trials = stats.norm.ppf(0.99), 200
    for _ in range(trials):
        a, b = draw.lognormal(0, 0.1, 320), draw.lognormal(0.1, 0.3, 310)
        found = compare(a, b)
        true = (math.exp(0.1), math.exp(0.1 + 0.2 * z), stats.norm.cdf(0.1 / math.hypot(0.1, 0.3)))
        for index, name in enumerate(("median_ratio", "p99_ratio", "superiority")):
            one = getattr(found, name)
            missed[index] += not ((one.low is None or one.low <= true[index]) and (one.high or 1e9) >= true[index])
        cried += [test.p < 0.05 for test in compare(a, draw.lognormal(0, 0.1, 310)).tests]
    limit = trials * 0.05 + 3 * math.sqrt(trials * 0.05 * 0.95)
    assert missed.max() <= limit
    assert cried.max() <= limit


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.5, 0.9]) == [1.0, 1.0]


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("count", [16, 20, 60])
def test_errors_of_means_of_few_correlated_values_hold(count, correlation):
    """92 to 98 % of intervals hold the mean, and three standard errors."""
    draw, trials, true = np.random.default_rng([9, count]), 600, math.exp(0.005)
    held = 0
    for _ in range(trials):
        values = autoregressive(draw, count, correlation)
        error, freedom = mean_error(values)
        reach = special.stdtrit(freedom, 0.975) * error
        held += abs(math.log(values.mean() / true)) <= reach
    margin = 3 * math.sqrt(0.92 * 0.08 / trials)
    assert 0.92 - margin <= held / trials <= 0.98 + margin
    assert mean_error(values[:15]) is None


def test_many_samples_are_corrected_together():
    three = {"iperf": A, "consistent": drawn(7, 0.0, 0.1, 300), "burst": B}
    found = correct_together([compare(three[a], three[b], (a, b)) for a, b in itertools.combinations(three, 2)])
    assert [one.names for one in found] == [("iperf", "consistent"), ("iperf", "burst"), ("consistent", "burst")]
    alone = compare(A, B)
    together = found[1]
    assert [test.p for test in together.tests] == [test.p for test in alone.tests]
    assert all(many.p_holm >= one.p_holm for many, one in zip(together.tests, alone.tests, strict=True))


times = st.lists(st.floats(1e-3, 1e3), min_size=5, max_size=40)


@settings(max_examples=60, deadline=None)
@example([2.0, 4.0, 4.0, 4.0, 0.5], [1.0, 1.0, 1.0, 3.0, 5.0, 5.0], 1.0)
@given(times, times, st.floats(0.01, 100))
def test_turned_round_and_in_other_units_it_says_the_same(a, b, unit):
    found, turned = compare(a, b), compare(b, a)
    assert turned.superiority.value == pytest.approx(1 - found.superiority.value)
    assert turned.median_ratio.value == pytest.approx(1 / found.median_ratio.value)
    assert [test.p for test in turned.tests] == [pytest.approx(test.p, abs=1e-9) for test in found.tests]
    scaled = compare([unit * value for value in a], [unit * value for value in b])
    assert scaled.median_ratio.value == pytest.approx(found.median_ratio.value)
    assert scaled.p99_difference_s.value == pytest.approx(unit * found.p99_difference_s.value, abs=1e-9 * unit)
    json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ([1.0] * 4, [1.0] * 9, "sample a: a list of at least 5"),
        ([1.0] * 9, [1.0] * 8 + [math.nan], "sample b"),
        ([1.0] * 9, [1.0] * 8 + [0.0], "sample b has an iteration time of 0"),
    ],
)
def test_samples_that_make_no_sense_are_refused(a, b, says):
    with pytest.raises(UsageError, match=says):
        compare(a, b)
