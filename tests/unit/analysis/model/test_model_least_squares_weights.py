import json

import numpy as np
import pytest

from ringtap.analysis.model.fit import CongestionModel, weigh
from ringtap.analysis.model.model_least_squares import log_predict, reduced_load, solve_log, solve_many
from ringtap.analysis.model.outliers import deletion_ratios
from ringtap.core.errors import UsageError

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

LOADS = np.array([0.0, 3, 6, 9, 12, 14, 16, 18, 19, 20, 21, 22])
ERRORS = np.linspace(0.01, 0.15, len(LOADS))  # of ln t: the spread grows with the load


def measured(seed, errors=ERRORS, between=0.0):
    draw = np.random.default_rng(seed)
    log_time = np.log(0.2) + 7 / np.sqrt(25 - LOADS)
    return np.exp(log_time + draw.normal(size=len(LOADS)) * np.hypot(errors, between))


def test_known_errors_weigh_the_points():
    times = measured(1)
    fit = CongestionModel(25, 0.5).fit(LOADS, times, spread_s=ERRORS * times)
    weight = 1 / np.hypot(ERRORS, fit.between)
    design = np.column_stack([np.ones(len(LOADS)), 1 / np.sqrt(25 - LOADS)])
    expected = np.linalg.lstsq(design * weight[:, None], np.log(times) * weight, rcond=None)[0]
    assert pytest.approx(expected, rel=1e-9) == [np.log(fit.A), fit.B]
    covariance = np.linalg.inv((design * weight[:, None] ** 2).T @ design)
    assert fit.stderr["B"] == pytest.approx(np.sqrt(covariance[1, 1]))
    assert fit.weighted
    assert "weighted" in fit.report()


def test_weights_bring_the_parameters_nearer():
    """Over 100 repetitions the standard deviation of B falls, and the standard errors say by how much."""
    plain, weighted = [], []
    for seed in range(100):
        times = measured(seed)
        plain.append(CongestionModel(25, 0.5).fit(LOADS, times, bootstrap=0).B)
        weighted.append(CongestionModel(25, 0.5).fit(LOADS, times, spread_s=ERRORS * times, bootstrap=0))
    scatter = np.std([fit.B for fit in weighted])
    assert scatter < 0.8 * np.std(plain)
    # 100 repetitions know a standard deviation to 7 %
    assert np.mean([fit.stderr["B"] for fit in weighted]) == pytest.approx(scatter, rel=0.25)


def test_scatter_that_the_errors_do_not_explain_is_found():
    found = [
        CongestionModel(25, 0.5).fit(LOADS, times := measured(seed, 0.005, 0.05), spread_s=0.005 * times).between
        for seed in range(60)
    ]
    assert np.mean(found) == pytest.approx(0.05, rel=0.1)
    honest = measured(4, 0.05)
    assert CongestionModel(25, 0.5).fit(LOADS, honest, spread_s=10 * 0.05 * honest).between == 0.0


def test_equal_errors_change_no_parameter():
    times = measured(2, 0.05)
    plain, weighted = (
        CongestionModel(25).fit(LOADS, times),
        CongestionModel(25).fit(LOADS, times, spread_s=0.01 * times),
    )
    assert (weighted.name, weighted.A, weighted.B) == (plain.name, pytest.approx(plain.A), pytest.approx(plain.B))
    # one scatter, found as the mean square of the residuals: the criteria differ by rounding alone
    assert weighted.aicc == pytest.approx(plain.aicc, abs=1e-4)
    assert weighted.stderr["B"] == pytest.approx(plain.stderr["B"], rel=1e-6)


def test_an_outlier_moves_a_robust_fit_less_and_is_named():
    times = measured(3, 0.01)
    clean = CongestionModel(25, 0.5).fit(LOADS, times)
    times[-2] *= 2
    robust = CongestionModel(25, 0.5).fit(LOADS, times, robust=True)
    plain = CongestionModel(25, 0.5).fit(LOADS, times)
    assert abs(robust.B - clean.B) < 0.15 * abs(plain.B - clean.B)
    named = [text for text in robust.warnings if "left out" in text]
    assert len(named) == 1
    assert named[0].startswith("the point at 21 Gbit/s lies +")
    assert "outliers left out" in robust.report()
    json.dumps(robust.to_json(), allow_nan=False)
    low, high = robust.intervals["B"]
    assert low < clean.B < high


def test_a_point_is_judged_by_its_distance_from_the_curve_through_the_others():
    """With their errors and a scatter beyond them, over the error of that distance."""
    times, errors, at = measured(5, ERRORS / 5, 0.05), ERRORS / 5, 4
    others = np.arange(len(LOADS)) != at
    fit = CongestionModel(25, 0.5).fit(LOADS[others], times[others], spread_s=(errors * times)[others], bootstrap=0)
    assert fit.between > 0.02
    design = np.column_stack([np.ones(len(LOADS)), 1 / np.sqrt(25 - LOADS)])
    variance = errors**2 + fit.between**2
    weighted = design[others].T / variance[others]
    covariance = np.linalg.inv(weighted @ design[others])
    distance = np.log(times[at]) - design[at] @ covariance @ weighted @ np.log(times[others])
    expected = abs(distance) / np.sqrt(variance[at] + design[at] @ covariance @ design[at])
    assert deletion_ratios(design, np.log(times), errors)[at] == pytest.approx(expected, rel=1e-6)


def test_an_outlier_on_an_exact_curve_changes_nothing():
    loads = np.array([0.0, 3, 6, 9, 12, 15, 18, 20, 22])
    times = 0.1 * np.exp(2 / (25 - loads) ** 0.5)
    times[4] *= 3
    for n in (0.5, None):
        fit = CongestionModel(25, n).fit(loads, times, robust=True)
        assert (pytest.approx(0.1, rel=1e-9), pytest.approx(2, rel=1e-9)) == (fit.A, fit.B)
        low, high = fit.intervals["A"]
        assert low <= fit.A <= high <= low * (1 + 1e-9)
        assert [text for text in fit.warnings if "left out" in text] == [
            "the point at 12 Gbit/s lies +200% off the curve and is left out"
        ]


@pytest.mark.parametrize("errors", [None, np.full(len(LOADS), 0.02)])
@pytest.mark.parametrize("at", [None, 0, 5, 10])
def test_intervals_of_a_robust_fit_hold_the_truth(at, errors):
    """95 % and three standard errors, with and without an outlier."""
    held, trials = np.zeros(2), 150
    for seed in range(trials):
        times = measured(1000 + seed, 0.02)
        if at is not None:
            times[at] *= 2
        spread = None if errors is None else errors * times
        fit = CongestionModel(25, 0.5).fit(LOADS, times, spread_s=spread, robust=True, bootstrap=100)
        held += [fit.intervals[name][0] <= true <= fit.intervals[name][1] for name, true in (("A", 0.2), ("B", 7))]
    error = 3 * np.sqrt(0.05 * 0.95 / trials)
    assert (held / trials > 0.95 - error).all()
    assert errors is not None or (held / trials < 0.95 + error).all()


def test_a_robust_fit_says_which_point_it_cannot_judge():
    loads = [0.0, 5, 10, 15, 18, 22]
    times = 0.2 * np.exp(7 / np.sqrt(25 - np.array(loads)) + np.array([1, -1, 1, 1, -1, 0]) * 0.01)
    warnings = CongestionModel(25, 0.5).fit(loads, times, robust=True).warnings
    assert any(text.startswith("the point at 22 Gbit/s decides the curve there") for text in warnings)
    few = CongestionModel(25, 0.5).fit(loads[:4], times[:4], robust=True).warnings
    assert "4 points are too few to tell an outlier: none was looked for" in few


@pytest.mark.parametrize("n", [0.5, "free"])
def test_many_sets_are_solved_as_one_by_one(n):
    sets = np.log([measured(seed, 0.03) for seed in range(5)])
    noise = weigh(LOADS, sets[0], 25, n, None)
    log_t0, b, found = solve_many(LOADS, sets, 25, n, noise)
    for index, log_time in enumerate(sets):
        alone = solve_log(LOADS, log_time, 25, n, noise)
        # a free exponent is interpolated on the grid: within a thousandth, and the curve with it
        assert found[index] == pytest.approx(alone.n, rel=3e-3)
        curve = log_t0[index] + b[index] * reduced_load(LOADS, 25, found[index])
        assert curve == pytest.approx(log_predict(alone, LOADS, 25), abs=1e-3)


def test_near_exponents_are_named():
    # 15 % scatter at these loads does not tell n = 1/2 from n = 1
    texts = CongestionModel(25).fit(LOADS[:9], measured(6, 0.15)[:9]).warnings
    assert any("n and B are hardly told apart" in text and "AICc" in text for text in texts)
    free = CongestionModel(25, "free").fit(LOADS[:9], measured(6, 0.15)[:9]).warnings
    assert any("n from" in text or "not identifiable" in text for text in free)
    sure = CongestionModel(25).fit(LOADS, measured(6, 0.0005)).warnings
    assert not any("told apart" in text for text in sure if "AICc +" in text and "n = 1 " in text)


@pytest.mark.parametrize(
    ("spread", "says"), [([1.0], "1 spreads for 12"), ([-1.0] * 12, "not below zero"), ([float("nan")] * 12, "finite")]
)
def test_spreads_that_make_no_sense_are_refused(spread, says):
    with pytest.raises(UsageError, match=says):
        CongestionModel(25, 0.5).fit(LOADS, measured(1), spread_s=spread)
