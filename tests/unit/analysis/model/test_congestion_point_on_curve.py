import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.analysis.model.congestion_point_on_curve import WIDE_SHARE, find_curve_point
from ringtap.core.errors import UsageError

pytestmark = pytest.mark.alone(2)

LOADS = np.array([0.0, 4, 8, 11, 13, 15, 17, 18, 19, 20, 21, 22])


def scaled(loads):
    return -np.log1p(-np.asarray(loads) / 25)


def broken(loads, at=16.0, before=0.1, after=1.0):
    """0.3 s at the break, bandwidth-bound past it."""
    past = scaled(loads) - scaled(at)
    return 0.3 * np.exp(np.where(past < 0, before, after) * past)


def noisy(times, share, seed):
    return times * np.exp(np.random.default_rng(seed).normal(0, share, len(times)))


def measured(times, spreads, count, seed):
    draw = np.random.default_rng([count, seed])
    return [
        time * draw.lognormal(-spread * spread / 2, spread, count) for time, spread in zip(times, spreads, strict=True)
    ]


def test_a_break_without_noise_is_found():
    """The flat line of times that rise by a tenth of the bandwidth lies a little below them at its end."""
    point = find_curve_point(LOADS, broken(LOADS), 25).point
    assert 15.8 < point.bandwidth_gbps < 16
    assert point.iteration_s == pytest.approx(0.3, rel=0.01)
    assert point.data_mb == pytest.approx(9 * 0.3 * 125, rel=0.02)
    assert point.high_gbps - point.low_gbps < 0.2
    assert not point.weighted
    json.dumps(point.to_json(), allow_nan=False)


def test_a_floor_under_a_curve_is_found():
    """The steps of the thesis's construction, on a dense grid of the true times."""

    def true(loads):
        return np.maximum(0.158, 0.0645 * np.exp(3.311 / np.sqrt(25 - loads)))

    dense = np.linspace(0, 24, 100_001)
    times, start = true(dense), 0.5 * 3.311 / np.sqrt(25 - dense) >= 2 / 3
    first = int(np.argmax(start))
    slope, level = np.polyfit(dense[:first], times[:first], 1)
    tangent = (times[first + 1] - times[first]) / (dense[1] - dense[0])
    truth = (times[first] - tangent * dense[first] - level) / (slope - tangent)
    point = find_curve_point(LOADS, true(LOADS), 25).point
    assert point.bandwidth_gbps == pytest.approx(truth, abs=0.2)
    assert point.high_gbps - point.low_gbps < 0.1


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(("count", "spreads"), [(10, np.full(8, 0.1)), (30, np.linspace(0.01, 0.4, 8))])
@pytest.mark.parametrize("at", [8.0, 12.0, 17.5])
def test_few_points_of_few_iterations_cover_the_break(at, count, spreads, is_known):
    """92 % and three standard errors, with the errors of the means and without."""
    loads, hits, found = np.linspace(0, 22, 8), 0, 0
    for seed in range(40):
        iterations = measured(broken(loads, at, 0.0), spreads, count, seed)
        means = [one.mean() for one in iterations]
        point = find_curve_point(loads, means, 25, iterations_s=iterations if is_known else None).point
        if point is not None:
            found += 1
            assert point.weighted is is_known
            hits += point.low_gbps <= at <= point.high_gbps
    assert found >= 15
    assert hits / found >= 0.92 - 3 * math.sqrt(0.92 * 0.08 / found)


def test_points_that_are_better_known_count_for_more():
    """The last point is wrong by a half, and its own iterations show that it is not known."""
    iterations = [np.full(20, time) for time in broken(LOADS, before=0.0)]
    iterations = [one * np.tile([0.99, 1.01], 10) for one in iterations]
    iterations[-1] = iterations[-1] * 1.5 * np.repeat([0.2, 1.8], 10)
    means = [one.mean() for one in iterations]
    errors_s = [one.std() / math.sqrt(20) for one in iterations]
    by_iterations = find_curve_point(LOADS, means, 25, iterations_s=iterations).point
    for point in (by_iterations, find_curve_point(LOADS, means, 25, spread_s=errors_s).point):
        assert point.bandwidth_gbps == pytest.approx(16, abs=0.4)
        assert point.low_gbps < 16 < point.high_gbps < 18
    alike = find_curve_point(LOADS, means, 25)
    assert alike.point is None or alike.point.high_gbps - alike.point.low_gbps > 2 * (
        by_iterations.high_gbps - by_iterations.low_gbps
    )


def test_a_break_before_the_second_load_is_within_the_interval():
    """One point before it cannot tell where it lies: then the interval begins near the lightest load."""
    loads, hits, found = np.linspace(0, 22, 8), 0, 0
    for seed in range(40):
        point = find_curve_point(loads, noisy(broken(loads, 2.0, 0.0), 0.02, seed), 25).point
        if point is not None:
            found += 1
            hits += point.low_gbps <= 2.0 <= point.high_gbps
    assert hits >= 0.9 * found > 0


def test_what_the_data_cannot_say_is_said():
    flat = find_curve_point(LOADS, noisy(np.full(12, 0.3), 0.03, 1), 25)
    assert flat.point is None
    assert flat.clause == (
        "no congestion point was found, because the iteration time does not measurably grow with the load"
    )
    slight = find_curve_point(LOADS, broken(LOADS, before=0.0, after=0.2), 25)
    assert "no congestion was reached" in slight.reason
    few = find_curve_point([0, 5, 10, 20], [1, 1, 1, 2], 25)
    assert few.clause == (
        "it is not known where congestion begins, because fewer than 5 different loads cannot place it"
    )
    assert (few.is_open, flat.is_open, slight.is_open) == (True, False, False)


def test_an_interval_that_is_too_wide_gives_no_point():
    loads, wide = LOADS[::2], 0
    for seed in range(12):
        found = find_curve_point(loads, noisy(broken(loads, before=0.4), 0.12, seed), 25)
        wide += found.is_open
        if found.is_open:
            assert "the points only place it between " in found.reason
        elif found.point is not None:
            assert found.point.high_gbps - found.point.low_gbps <= WIDE_SHARE * 22
    assert wide > 0


def test_times_without_a_bend_seldom_give_a_point():
    """A straight line of ln t has the same elasticity at every load, and congestion is not reached."""
    straight = 0.3 * np.exp(0.3 * scaled(LOADS))
    given = [find_curve_point(LOADS, noisy(straight, 0.03, seed), 25).point for seed in range(60)]
    assert np.mean([one is not None for one in given]) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 60)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 100), st.floats(0.01, 100))
def test_units_and_order_do_not_matter(seed, rate, unit):
    draw = np.random.default_rng(seed)
    times, order = noisy(broken(LOADS), 0.05, seed), draw.permutation(12)
    one = find_curve_point(LOADS, times, 25)
    other = find_curve_point(rate * LOADS[order], unit * times[order], 25 * rate)
    assert (one.point is None) == (other.point is None)
    if one.point:
        assert other.point.bandwidth_gbps == pytest.approx(rate * one.point.bandwidth_gbps, rel=1e-6)
        assert other.point.data_mb == pytest.approx(rate * unit * one.point.data_mb, rel=1e-6)
        json.dumps(other.point.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("loads", "times"), [([0, 1, 2], [1, 2]), ([0, 25], [1, 1]), ([0, 1], [1, 0]), ([0, float("nan")], [1, 1])]
)
def test_points_that_make_no_sense_are_refused(loads, times):
    with pytest.raises(UsageError):
        find_curve_point(loads, times, 25)
    with pytest.raises(UsageError, match="1 lists of iterations for 2 points: give one for each"):
        find_curve_point([0.0, 1.0], [1.0, 1.0], 25, iterations_s=[[1.0, 1.0]])
    with pytest.raises(UsageError, match="1 spreads for 2 times"):
        find_curve_point([0.0, 1.0], [1.0, 1.0], 25, spread_s=[0.1])
