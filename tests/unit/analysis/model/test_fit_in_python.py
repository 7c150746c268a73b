"""Fits as a user of the library meets them: text and columns as arguments, bands, comparisons, JSON, figures."""

import json

import numpy as np
import pandas as pd
import pytest

import ringtap
from ringtap.analysis.model.predict import Predictor

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

LOADS = np.array([0, 5, 10, 14, 17, 19, 21, 22.5])


def times(b: float, scatter: float, seed: int, loads: np.ndarray = LOADS) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return 0.3 * np.exp(b * ((25 / (25 - loads)) ** 0.5 - 1)) * np.exp(rng.normal(0, scatter, len(loads)))


@pytest.fixture(scope="module")
def fit() -> ringtap.FitResult:
    return ringtap.CongestionModel("25gbit").fit(LOADS, times(0.5, 0.02, 1))


def test_a_capacity_is_a_number_or_text_and_points_are_columns(fit):
    table = pd.DataFrame({"load": LOADS, "s": times(0.5, 0.02, 1)}).astype("Float64")
    assert ringtap.CongestionModel(25).fit(table["load"], table["s"]) == fit
    by_text, by_number = (ringtap.find_curve_point(table["load"], table["s"], capacity) for capacity in ("25gbit", 25))
    assert by_text == by_number
    assert by_text.point is not None
    assert by_text.point.low_gbps < by_text.point.bandwidth_gbps < by_text.point.high_gbps
    found = ringtap.find_congestion_point(table["load"], table["s"], "25gbit")
    assert found == ringtap.find_congestion_point(LOADS.tolist(), times(0.5, 0.02, 1).tolist(), 25.0)


@pytest.mark.parametrize("column", [list, pd.Series, np.array])
def test_loads_and_times_are_numbers_or_texts_with_units(fit, column):
    loads = column([f"{load * 1000:g}mbit" for load in LOADS])
    seconds = column([f"{second * 1000!r}ms" for second in times(0.5, 0.02, 1).tolist()])
    by_text = ringtap.CongestionModel("25gbit").fit(loads, seconds)
    assert pytest.approx((fit.A, fit.B)) == (by_text.A, by_text.B)
    assert by_text.predict("10gbit") == by_text.predict(10)
    assert by_text.band(loads)["bandwidth_gbps"].tolist() == LOADS.tolist()
    errors_s = 0.01 * times(0.5, 0.02, 1)
    by_errors = [
        ringtap.CongestionModel(25, 0.5).fit(LOADS, seconds, spread_s=spread)
        for spread in (errors_s, [f"{error!r}s" for error in errors_s.tolist()])
    ]
    assert pytest.approx(by_errors[1].A) == by_errors[0].A
    assert ringtap.find_curve_point(loads, seconds, 25).point is not None
    assert ringtap.find_congestion_point(loads, seconds, 25).point is not None


@pytest.mark.parametrize("find", [ringtap.find_curve_point, ringtap.find_congestion_point])
def test_the_iterations_of_each_point_are_a_list_or_a_column(find):
    means = times(0.9, 0.02, 1)
    behind = [mean * np.tile([0.98, 1.02, 0.99, 1.01], 5) for mean in means]
    table = pd.DataFrame({"load": LOADS, "s": means, "iterations": behind}, index=range(100, 100 + len(LOADS)))
    found = find(table["load"], table["s"], 25, table["iterations"])
    assert found.point is not None
    assert found == find(LOADS, means, 25, behind)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ringtap.CongestionModel("25gbits"), "did you mean 25gbit"),
        (lambda: ringtap.CongestionModel("25"), "write a number and a unit"),
        (lambda: ringtap.CongestionModel("25"), "capacity '25' has no unit"),
        (lambda: ringtap.CongestionModel(-1), "-1 Gbit/s is not a positive rate"),
        (lambda: ringtap.CongestionModel(None), "must be a number or text with a unit"),
        (lambda: ringtap.CongestionModel(25, "fre"), "exponent 'fre' is unknown"),
        (lambda: ringtap.CongestionModel(25).fit(["a"] * 4, [1] * 4), "load 'a' is not understood"),
        (lambda: ringtap.CongestionModel(25).fit(pd.Series([0, 1, 2, pd.NA]), [1] * 4), "must be finite numbers"),
        (lambda: ringtap.find_curve_point([0, 1], [1, 2], "fast"), "rate 'fast' is not understood"),
        (lambda: ringtap.find_congestion_point([[0]], [[1]], 25), "two lists of one length"),
        (lambda: ringtap.demand(10**6, 4, "rign"), "did you mean 'ring'"),
        (lambda: ringtap.demand(1.5, 4), "parameters must be a whole number"),
        (lambda: ringtap.demand(10**6, 4).required_bps("370 milli"), "an iteration time '370 milli' is not understood"),
        (lambda: ringtap.demand(10**6, 4).required_bps(0), "0 s is not a positive time"),
        (lambda: ringtap.compare([1, 2], [1, 2]), "at least 5 values"),
        (lambda: ringtap.compare("abcde", [1] * 5), "must be numbers"),
    ],
)
def test_wrong_arguments_are_answered_in_a_sentence(call, says):
    with pytest.raises(ringtap.UsageError, match=says) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["curve", "point"])
def test_a_band_has_the_intervals_of_the_predictions(fit, kind):
    band = fit.band([0, 10, 20], kind)
    assert list(band) == ["bandwidth_gbps", "iteration_s", "low_s", "high_s"]
    assert band["iteration_s"].to_numpy() == pytest.approx(fit.predict([0, 10, 20]))
    for row in band.itertuples():
        one = Predictor.from_fit(fit).at(row.bandwidth_gbps)
        assert (row.low_s, row.high_s) == pytest.approx(one.curve_s if kind == "curve" else one.point_s)
    assert band.attrs["units"]["low_s"] == "s"


def test_a_band_of_an_exact_fit_without_errors_is_not_known():
    loads = [0, 5, 10, 20]
    fit = ringtap.CongestionModel(25, 1.0).fit(loads, [1, 1, 1, 1], bootstrap=0)
    if fit.terms.covariance is None:
        assert fit.band(loads)["low_s"].isna().all()


def test_wrong_bands_are_answered_in_a_sentence(fit):
    with pytest.raises(ringtap.UsageError, match="did you mean 'curve'"):
        fit.band([1], "curv")
    with pytest.raises(ringtap.UsageError, match="below the capacity"):
        fit.band([25])


def test_a_load_for_a_slowdown_is_one_call(fit):
    found = fit.load_for(1.5)
    assert fit.predict([found.load_gbps])[0] / fit.predict([0])[0] == pytest.approx(1.5)
    assert found.low_gbps < found.load_gbps < found.high_gbps


def test_curves_that_differ_are_told_apart_and_the_loads_named(fit):
    steeper = ringtap.CongestionModel(25).fit(LOADS, times(0.8, 0.02, 2))
    found = fit.compare(steeper)
    assert found.differs
    assert found.p < 0.001
    ((low, high),) = found.ranges_gbps
    assert 0 < low < 10
    assert high == 22.5
    truth = np.exp(0.3 * ((25 / (25 - found.largest_gbps)) ** 0.5 - 1))
    assert found.low < truth < found.high
    assert str(found).startswith("The curves differ beyond chance from ")
    band = found.band
    assert set(band.attrs["columns"]) == set(band.columns)
    inside = band["bandwidth_gbps"].between(low, high)
    assert band["differs"].tolist() == inside.tolist()


def test_curves_of_the_same_truth_differ_by_chance_as_often_as_stated():
    # 400 pairs at 5 %: the number is binomial, and 4 standard deviations are 17; Scheffe's method may find fewer
    differing = 0
    for seed in range(400):
        pair = [
            ringtap.CongestionModel(25, 0.5).fit(LOADS, times(0.5, 0.05, 2 * seed + one), bootstrap=0) for one in (0, 1)
        ]
        differing += pair[0].compare(pair[1]).differs
    assert 3 <= differing <= 20 + 17


def test_curves_without_common_loads_or_capacity_are_not_compared(fit):
    other = ringtap.CongestionModel(10).fit(LOADS / 2.5, times(0.5, 0.02, 1))
    with pytest.raises(ringtap.UsageError, match="capacities of 25 and 10"):
        fit.compare(other)
    light = np.array([0, 0.5, 1, 1.5, 2, 2.5])
    heavy = ringtap.CongestionModel(25).fit(LOADS[4:].repeat(2), times(0.5, 0.02, 3, LOADS[4:].repeat(2)))
    with pytest.raises(ringtap.UsageError, match="no loads in common"):
        ringtap.CongestionModel(25).fit(light, times(0.5, 0.02, 3, light)).compare(heavy)


@pytest.mark.parametrize("n", [None, 0.5, "free"])
@pytest.mark.parametrize("robust", [False, True])
def test_a_fit_comes_back_from_its_json(n, robust, tmp_path):
    fit = ringtap.CongestionModel(25, n).fit(LOADS, times(0.5, 0.05, 4), robust=robust, bootstrap=100)
    path = tmp_path / "fit.json"
    path.write_text(json.dumps(fit.to_json(), allow_nan=False))
    for again in (ringtap.FitResult.from_json(json.loads(path.read_text())), ringtap.FitResult.from_json(path)):
        assert again == fit
        assert again.to_json() == fit.to_json()
        assert again.candidates == fit.candidates
        assert again.linear == fit.linear
        assert again.band([3.0]).equals(fit.band([3.0]))


def test_what_is_no_fit_is_refused_in_a_sentence(fit, tmp_path):
    item = fit.to_json()
    item["C_gbps"] = item.pop("capacity_gbps")
    with pytest.raises(ringtap.UsageError, match="fit the points again"):
        ringtap.FitResult.from_json(item)
    with pytest.raises(ringtap.UsageError, match="is not the JSON that ringtap fit writes"):
        ringtap.FitResult.from_json({"A": 1})
    with pytest.raises(ringtap.UsageError, match="cannot be read"):
        ringtap.FitResult.from_json(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("[")
    with pytest.raises(ringtap.UsageError, match=r"bad\.json"):
        ringtap.FitResult.from_json(tmp_path / "bad.json")
