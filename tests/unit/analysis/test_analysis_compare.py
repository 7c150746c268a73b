import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import signal, stats

from ringtap.analysis.statistics.two_sample import _distance_p, _fisher_p, compare, correct_together, holm
from ringtap.errors import UsageError


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
    apart = compare([1.0, 1.1, 1.2, 1.3, 1.4], [2.0, 2.1, 2.2, 2.3, 2.4])
    assert apart.cliffs_delta == 1.0
    # one of C(10, 5) = 252 ways, on two sides
    assert next(test.p for test in apart.tests if test.name == "location") == pytest.approx(2 / 252)
    assert 0 < apart.superiority.low < 1 == apart.superiority.high
    alike = compare([1.0] * 20, [1.0] * 20)
    assert (alike.superiority.value, alike.shift_s.value) == (0.5, 0.0)
    assert [test.p for test in alike.tests] == [1.0, 1.0, 1.0]
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
    assert compare(range(1, 6), range(11, 16)).tests[0].p == pytest.approx(2 / 252)
    assert compare(range(1, 9), range(11, 19)).tests[0].p == pytest.approx(2 / 12870)
    far = compare(drawn(1, 0, 0.1, 1500), drawn(2, 9, 0.1, 1500))
    assert all(0 < test.p < 1e-30 for test in far.tests)


def autoregressive(draw, count, correlation):
    noise = draw.standard_normal(count + 100) * math.sqrt(1 - correlation**2)
    return np.exp(0.1 * signal.lfilter([1.0], [1.0, -correlation], noise)[100:])


@pytest.mark.parametrize(
    ("pairs", "counts", "correlation", "least"),
    [(2000, (30, 40), 0.0, (0.03, 0.03)), (700, (60, 60), 0.5, (0.0, 0.03))],
)
def test_of_2000_comparisons_of_equal_kinds_five_per_cent_are_called_different(pairs, counts, correlation, least):
    """Each test at most 5 % and three standard errors; the first two not far less where the samples are independent."""
    draw, cried, called = np.random.default_rng(1), np.zeros(3), 0
    for _ in range(pairs):
        found = compare(*(autoregressive(draw, count, correlation) for count in counts))
        cried += [test.p < 0.05 for test in found.tests]
        called += any(test.p_holm < 0.05 for test in found.tests)
    most = 0.05 + 3 * math.sqrt(0.05 * 0.95 / pairs)
    assert called / pairs <= 0.05
    assert cried.max() / pairs <= most
    assert all(cried[:2] / pairs >= least)


@pytest.mark.parametrize("counts", [(5, 5), (6, 15)])
def test_p_of_the_location_holds_for_few_values(counts):
    draw = np.random.default_rng(1)
    cried = sum(compare(*(draw.lognormal(0, 0.1, n) for n in counts)).tests[1].p < 0.05 for _ in range(1000))
    assert 0.01 <= cried / 1000 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)


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
    assert [test.p for test in turned.tests] == pytest.approx([test.p for test in found.tests], abs=1e-9)
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
