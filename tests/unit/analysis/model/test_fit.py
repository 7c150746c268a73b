import json

import numpy as np
import pytest

from ringtap.analysis.model.fit import CongestionModel, FitResult, corrected_akaike
from ringtap.core.errors import UsageError

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

LOADS = np.array([0.0, 3, 6, 9, 12, 14, 16, 18, 19, 20, 21, 22])
# Tables 3.9 and 3.10, and section 3.2 for iperf
PUBLISHED = [
    (0.618, 9.95, 1.0),
    (0.254, 10.75, 1.0),
    (0.200, 7.281, 0.5),
    (0.564, 3.667, 0.5),
    (0.268, 7.310, 0.5),
    (0.0645, 3.311, 0.5),
    (0.0862, 4.174, 0.5),
    (0.140, 22.793, 2.0),
]


def curve(a, b, n, loads=LOADS):
    return a * np.exp(b / (25 - loads) ** n)


def noisy(times, share, seed=3):
    return times * np.exp(np.random.default_rng(seed).normal(0, share, len(times)))


@pytest.mark.parametrize(("a", "b", "n"), PUBLISHED)
def test_published_parameters_come_back_from_noisy_points(a, b, n):
    fit = CongestionModel(25, n).fit(LOADS, noisy(curve(a, b, n), 0.05))
    assert pytest.approx(a, rel=0.12) == fit.A
    assert pytest.approx(b, rel=0.12) == fit.B
    assert abs(fit.A - a) < 4 * fit.stderr["A"]
    assert abs(fit.B - b) < 4 * fit.stderr["B"]
    assert fit.r2_log > 0.9
    assert fit.linear.r2 >= fit.r2 - 1e-9


@pytest.mark.parametrize(("a", "b", "n"), PUBLISHED)
def test_the_right_exponent_is_chosen_on_quiet_data(a, b, n):
    fit = CongestionModel(25).fit(LOADS, noisy(curve(a, b, n), 0.002))
    assert (fit.n, fit.free) == (n, False)
    assert [candidate.name for candidate in fit.candidates] == ["n = 1/2", "n = 1", "n = 2", "n free"]
    assert min(candidate.aicc for candidate in fit.candidates) == fit.aicc


@pytest.mark.parametrize("n", [0.3, 0.8, 1.5, 3.0])
def test_a_free_exponent_is_found(n):
    fit = CongestionModel(25, "free").fit(LOADS, noisy(curve(0.2, 5.0, n), 0.002))
    assert fit.n == pytest.approx(n, abs=4 * fit.stderr["n"])
    assert pytest.approx(5.0, rel=0.2) == fit.B


@pytest.mark.parametrize("n", [0.5, 1.0, 2.0])
def test_perfect_data_has_finite_criteria_and_the_right_choice(n):
    fit = CongestionModel(25).fit(LOADS, curve(0.2, 5.0, n))
    assert (fit.n, fit.free) == (n, False)
    assert pytest.approx(5.0, rel=1e-9) == fit.B
    assert fit.r2 == pytest.approx(1.0)
    json.dumps(fit.to_json(), allow_nan=False)


def test_standard_errors_match_the_scatter_of_repeated_fits():
    fits = [CongestionModel(25, 0.5).fit(LOADS, noisy(curve(0.2, 7.0, 0.5), 0.05, seed)) for seed in range(200)]
    assert np.std([fit.B for fit in fits]) == pytest.approx(np.mean([fit.stderr["B"] for fit in fits]), rel=0.2)
    assert np.std([fit.A for fit in fits]) == pytest.approx(np.mean([fit.stderr["A"] for fit in fits]), rel=0.2)


def test_intervals_are_seeded_and_agree_with_the_standard_errors():
    model, times = CongestionModel(25, 0.5), noisy(curve(0.2, 7.0, 0.5), 0.05)
    fit = model.fit(LOADS, times, seed=7)
    low, high = fit.intervals["B"]
    assert low < fit.B < high
    # 2.2 is Student's t for 10 degrees of freedom
    assert (high - low) / 2 == pytest.approx(2.2 * fit.stderr["B"], rel=0.3)
    assert model.fit(LOADS, times, seed=7).intervals == fit.intervals != model.fit(LOADS, times, seed=8).intervals
    assert fit.intervals["n"] == (0.5, 0.5)
    assert fit.to_json()["intervals"]["B"] == [low, high]
    without = model.fit(LOADS, times, bootstrap=0)
    assert without.intervals is None
    assert "intervals" not in without.to_json()


def test_a_limit_fits_the_points_up_to_it_as_if_there_were_no_others():
    times = noisy(curve(0.254, 10.75, 1.0), 0.01)
    errors, below = 0.01 * times, LOADS <= 17
    limited = CongestionModel(25).fit(LOADS[::-1], times[::-1], spread_s=errors[::-1], max_load="17gbit")
    selected = CongestionModel(25).fit(LOADS[below], times[below], spread_s=errors[below])
    assert limited.to_json() == selected.to_json() | {"max_load_gbps": 17.0}
    assert FitResult.from_json(limited.to_json()).max_load_gbps == 17
    assert f"{below.sum()} points up to 17 Gbit/s, fitted to ln t" in limited.report()
    assert CongestionModel(25).fit(LOADS, times, max_load=22).to_json()["points"] == len(LOADS)
    few = "^3 points at 3 loads up to 6 Gbit/s are too few: this fit needs 4 at 3 different loads$"
    with pytest.raises(UsageError, match=few):
        CongestionModel(25).fit(LOADS, times, max_load=6)
    with pytest.raises(UsageError, match="not a positive rate"):
        CongestionModel(25).fit(LOADS, times, max_load=0)


def test_guess_passes_through_the_outer_points():
    a, b, n = CongestionModel(25, 1.0).guess(LOADS, curve(0.2, 5.0, 1.0))
    assert (a, b, n) == (pytest.approx(0.2), pytest.approx(5.0), 1.0)


def test_predict_gives_the_curve_and_refuses_impossible_loads():
    fit = CongestionModel(25, 1.0).fit(LOADS, curve(0.2, 5.0, 1.0))
    assert fit.predict([0.0, 20.0]) == pytest.approx([0.2 * np.exp(0.2), 0.2 * np.exp(1.0)])
    for load in (25.0, -1.0, float("nan")):
        with pytest.raises(UsageError):
            fit.predict([load])


def test_flat_data_is_called_flat():
    times = noisy(np.full(len(LOADS), 0.16), 0.01)
    fixed = CongestionModel(25, 0.5).fit(LOADS, times)
    assert any("statistically zero" in text for text in fixed.warnings)
    free = CongestionModel(25, "free").fit(LOADS, times)
    assert any("not identifiable" in text for text in free.warnings)
    constant = CongestionModel(25).fit(LOADS, np.full(len(LOADS), 0.16))
    assert (constant.r2, constant.r2_log) == (None, None)
    assert any("statistically zero" in text for text in constant.warnings)
    json.dumps(constant.to_json(), allow_nan=False)


def test_a_free_exponent_that_blurs_b_does_not_hide_the_growth():
    loads = np.array([0, 6.33, 11.38, 15.09, 17.20, 18.65, 18.80])
    fit = CongestionModel(25, "free").fit(loads, [0.366, 0.450, 0.576, 0.748, 0.876, 1.089, 1.136])
    assert fit.stderr["B"] > 0.15 * fit.B
    assert not any("statistically zero" in text for text in fit.warnings)


def test_warnings_name_what_is_wrong():
    light = np.array([0.0, 0.5, 1.0, 1.5])
    texts = " ".join(CongestionModel(25, 0.5).fit(light, curve(0.2, 5.0, 0.5, light)).warnings)
    assert "hardly told apart" in texts
    assert "6% of capacity" in texts
    assert "AICc is undefined" in texts
    falling = CongestionModel(25, 1.0).fit(LOADS, curve(0.2, -5.0, 1.0))
    assert any("negative" in text for text in falling.warnings)
    steep = CongestionModel(25, "free").fit(LOADS, curve(0.2, 200.0, 5.0))
    assert any("boundary" in text for text in steep.warnings)
    heavy = LOADS[4:]
    assert any("lightest" in text for text in CongestionModel(25, 1.0).fit(heavy, curve(0.2, 5.0, 1.0, heavy)).warnings)


def test_four_points_choose_by_residual_and_have_no_free_exponent():
    loads = np.array([0.0, 10, 16, 20])
    fit = CongestionModel(25).fit(loads, curve(0.2, 20.0, 2.0, loads))
    assert fit.n == 2.0
    assert fit.aicc is None
    assert len(fit.candidates) == 3


def test_akaike_formula():
    assert corrected_akaike(-12.5, 10, 3) == pytest.approx(-12.5 + 6 + 24 / 6)
    assert corrected_akaike(-12.5, 4, 3) is None
    loads, times = np.array([0.0, 5, 10, 15, 20]), np.array([1.0, 1.1, 1.3, 1.5, 2.4])
    fit = CongestionModel(25, 1.0).fit(loads, times)
    rss = np.sum((np.log(times) - np.log(fit.predict(loads))) ** 2)
    assert fit.aicc == pytest.approx(5 * np.log(rss / 5) + 6 + 24 / 1)
    assert np.isfinite(CongestionModel(25, 1.0).fit(loads, curve(0.2, 5.0, 1.0, loads)).aicc)


@pytest.mark.parametrize(
    ("loads", "times", "says"),
    [
        ([0, 5, 10], [1, 1, 1], "too few"),
        ([0, 0, 5, 5], [1, 1, 2, 2], "too few"),
        ([0, 5, 10, 25], [1, 1, 1, 1], "capacity"),
        ([0, 5, 10, -1], [1, 1, 1, 1], "negative"),
        ([0, 5, 10, 12], [1, 1, 1, 0], "positive"),
        ([0, 5, 10, 12], [1, 1, 1, float("nan")], "finite"),
        ([0, 5, 10, 12], [1, 1, 1], "one length"),
        ([0, 1, 2, 3], [1e-300, 1e-300, 1, 1e300], "orders of magnitude"),
    ],
)
def test_points_that_make_no_sense_are_refused(loads, times, says):
    with pytest.raises(UsageError, match=says):
        CongestionModel(25, 0.5).fit(loads, times)


def test_a_free_exponent_needs_six_points_at_four_loads():
    with pytest.raises(UsageError, match="needs 6 at 4"):
        CongestionModel(25, "free").fit([0, 5, 10, 15, 20], [1, 1, 1.1, 1.3, 2])
    with pytest.raises(UsageError, match="needs 6 at 4"):
        CongestionModel(25, "free").fit([0, 0, 10, 10, 20, 20], [1, 1, 1.1, 1.1, 2, 2])


@pytest.mark.parametrize("model", [(0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (25.0, "most"), (25.0, 9.0)])
def test_models_that_make_no_sense_are_refused(model):
    with pytest.raises(UsageError):
        CongestionModel(*model)


def test_report_marks_the_chosen_model():
    text = CongestionModel(25).fit(LOADS, noisy(curve(0.2, 7.0, 0.5), 0.005)).report()
    assert "* n = 1/2" in text
    assert "R² log" in text


def test_a_free_exponent_near_zero_leaves_a_unidentified():
    """t = D/(C-BW), bandwidth alone: n goes to its lower end and A loses its meaning."""
    loads = np.array([0.0, 4, 8, 12, 15, 17, 19, 21])
    times = 9 / (25 - loads) * (1 + 0.01 * np.array([1, -1, 1, -1, 1, -1, 1, -1]))
    texts = CongestionModel(25, "free").fit(loads, times).warnings
    assert any("A is not identifiable" in text or "boundary" in text for text in texts)
    assert not any("A is not" in text for text in CongestionModel(25, 0.5).fit(loads, times).warnings)


@pytest.mark.parametrize(("n", "model", "trials"), [(0.5, 0.5, 150), (2.0, 2.0, 150), (1.0, "free", 60)])
@pytest.mark.parametrize("loads", [LOADS, LOADS[::2]], ids=["12 points", "6 points"])
def test_bootstrap_intervals_hold_the_truth(loads, n, model, trials):
    """Seeded repetitions with 3 % noise: three standard errors of chance, and 4 % for so few residuals to draw from."""
    a, b = 0.2, {0.5: 7.0, 1.0: 10.0, 2.0: 25.0}[n]
    hits = np.zeros(3)
    for seed in range(trials):
        fit = CongestionModel(25, model).fit(loads, noisy(curve(a, b, n, loads), 0.03, seed), bootstrap=400, seed=seed)
        hits += [low <= true <= high for (low, high), true in zip(fit.intervals.values(), (a, b, n), strict=True)]
    assert hits.min() / trials >= 0.91 - 3 * np.sqrt(0.95 * 0.05 / trials)
