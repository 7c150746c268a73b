import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.analysis.model.breakpoint import compared, find_break, scaled
from ringtap.analysis.model.fit import CongestionModel
from ringtap.core.errors import UsageError

pytestmark = [pytest.mark.computes, pytest.mark.together]

LOADS = np.array([0.0, 4, 8, 11, 13, 15, 17, 18, 19, 20, 21, 22])


def broken(loads, at=16.0, before=0.1, after=1.0):
    """0.3 s at the break, bandwidth-bound past it."""
    past = scaled(loads, 25) - scaled(np.array(at), 25)
    return 0.3 * np.exp(np.where(past < 0, before, after) * past)


def noisy(times, share, seed):
    return times * np.exp(np.random.default_rng(seed).normal(0, share, len(times)))


def test_a_break_without_noise_is_found():
    point = find_break(LOADS, broken(LOADS), 25).point
    # 241 places between 4 and 21 Gbit/s: 0.1 Gbit/s at 16
    assert point.bandwidth_gbps.value == pytest.approx(16, abs=0.1)
    assert point.data_mb.value == pytest.approx(9 * 0.3 * 125, rel=0.01)
    assert point.elasticity == pytest.approx((0.1, 1.0), abs=0.02)
    assert point.at(LOADS) == pytest.approx(broken(LOADS), rel=0.01)
    assert point.bandwidth_gbps.high - point.bandwidth_gbps.low < 0.5
    assert point.warnings == ()
    json.dumps(point.to_json(), allow_nan=False)


@pytest.mark.parametrize(("loads", "share"), [(LOADS, 0.03), (LOADS[[0, 2, 4, 5, 7, 9, 11]], 0.03)])
def test_intervals_cover_as_often_as_they_say(loads, share):
    """80 repetitions; three standard errors of chance, and 2 % for the approximation of the bootstrap."""
    trials, hits, found = 80, np.zeros(2), 0
    for seed in range(trials):
        point = find_break(loads, noisy(broken(loads), share, seed), 25, seed=seed).point
        if point is None:
            continue
        found += 1
        hits += [
            point.bandwidth_gbps.low <= 16 <= point.bandwidth_gbps.high,
            point.data_mb.low <= 337.5 <= point.data_mb.high,
        ]
    assert found > 0.9 * trials
    assert hits.min() / found >= 0.93 - 3 * math.sqrt(0.95 * 0.05 / found)


def measured(times, spreads, count, seed):
    draw = np.random.default_rng([count, seed])
    return [
        time * draw.lognormal(-spread * spread / 2, spread, count) for time, spread in zip(times, spreads, strict=True)
    ]


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(("count", "spreads"), [(10, np.full(8, 0.2)), (30, np.linspace(0.01, 0.4, 8))])
@pytest.mark.parametrize("at", [6.0, 12.0, 17.5])
def test_few_points_of_few_iterations_cover_the_break(at, count, spreads, is_known):
    """92 % and three standard errors; without the iterations, points of unlike spread are taken for alike."""
    loads, hits, found = np.linspace(0, 22, 8), 0, 0
    for seed in range(50):
        iterations = measured(broken(loads, at, 0.05), spreads, count, seed)
        point = find_break(loads, [one.mean() for one in iterations], 25, iterations if is_known else None).point
        if point is not None:
            found += 1
            assert point.weighted is is_known
            hits += point.bandwidth_gbps.low <= at <= point.bandwidth_gbps.high
    assert found >= 30
    if is_known or count == 10:
        assert hits / found >= 0.92 - 3 * math.sqrt(0.92 * 0.08 / found)


def test_points_that_are_better_known_count_for_more():
    """The last point is wrong by a half, and its own iterations show that it is not known."""
    iterations = [np.full(20, time) for time in broken(LOADS)]
    iterations = [one * np.tile([0.99, 1.01], 10) for one in iterations]
    iterations[-1] = iterations[-1] * 1.5 * np.repeat([0.2, 1.8], 10)
    means = [one.mean() for one in iterations]
    by_errors, by_points = (find_break(LOADS, means, 25, known).point for known in (iterations, None))
    assert by_errors.bandwidth_gbps.value == pytest.approx(16, abs=0.3)
    assert by_points.bandwidth_gbps.value > 17
    assert by_errors.bandwidth_gbps.low < 16 < by_errors.bandwidth_gbps.high < 18


def test_a_break_before_the_second_load_is_within_the_interval():
    """One point before it cannot tell where it lies: then the interval begins at the lightest load."""
    loads, hits, found = np.linspace(0, 22, 8), 0, 0
    for seed in range(60):
        point = find_break(loads, noisy(broken(loads, 2.0, 0.0), 0.02, seed), 25).point
        if point is not None:
            found += 1
            hits += point.bandwidth_gbps.low <= 2.0 <= point.bandwidth_gbps.high
    assert hits >= 0.9 * found


def test_a_straight_line_has_no_break_but_by_chance():
    straight = 0.3 * np.exp(0.7 * scaled(LOADS, 25))
    results = [find_break(LOADS, noisy(straight, 0.03, seed), 25) for seed in range(120)]
    share = np.mean([one.point is not None for one in results])
    assert share <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 120)
    assert all("no break can be placed" in one.reason for one in results if one.point is None)


def test_what_the_data_cannot_say_is_said():
    flat = find_break(LOADS, noisy(np.full(12, 0.3), 0.03, 1), 25)
    assert flat.point is None
    assert flat.reason
    slight = find_break(LOADS, broken(LOADS, before=0.0, after=0.2), 25)
    assert "no congestion was reached" in slight.reason
    assert "different loads" in find_break([0, 5, 10, 20], [1, 1, 1, 2], 25).reason
    seeds = [find_break(LOADS, noisy(broken(LOADS, before=0.4), 0.12, seed), 25).point for seed in range(12)]
    assert any("hardly place it" in text for point in seeds if point for text in point.warnings)


def test_a_smooth_curve_is_told_from_a_break():
    smooth = noisy(0.2 * np.exp(7 / np.sqrt(25 - LOADS)), 0.003, 2)
    point, fit = find_break(LOADS, smooth, 25).point, CongestionModel(25).fit(LOADS, smooth)
    assert "a smooth curve (n = 1/2) describes these points better" in compared(point, fit)
    sharp = noisy(broken(LOADS), 0.003, 2)
    assert compared(find_break(LOADS, sharp, 25).point, CongestionModel(25).fit(LOADS, sharp)) == ""


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 100), st.floats(0.01, 100))
def test_units_and_order_do_not_matter(seed, rate, unit):
    draw = np.random.default_rng(seed)
    times, order = noisy(broken(LOADS), 0.05, seed), draw.permutation(12)
    one = find_break(LOADS, times, 25)
    other = find_break(rate * LOADS[order], unit * times[order], 25 * rate)
    assert (one.point is None) == (other.point is None)
    if one.point:
        assert other.point.bandwidth_gbps.value == pytest.approx(rate * one.point.bandwidth_gbps.value, rel=1e-6)
        assert other.point.data_mb.low == pytest.approx(rate * unit * one.point.data_mb.low, rel=1e-6)
        json.dumps(other.point.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("loads", "times"), [([0, 1, 2], [1, 2]), ([0, 25], [1, 1]), ([0, 1], [1, 0]), ([0, float("nan")], [1, 1])]
)
def test_points_that_make_no_sense_are_refused(loads, times):
    with pytest.raises(UsageError):
        find_break(loads, times, 25)
    with pytest.raises(UsageError, match="1 lists of iterations for 2 points: give one for each"):
        find_break([0.0, 1.0], [1.0, 1.0], 25, [[1.0, 1.0]])
