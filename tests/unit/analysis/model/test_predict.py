import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.analysis.model.fit import CongestionModel
from ringtap.analysis.model.predict import Predictor, read_fit
from ringtap.cli import main
from ringtap.core.errors import UsageError

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

LOADS = np.array([0.0, 3, 6, 9, 12, 14, 16, 18, 19, 20, 21, 22])
SLOPES = {0.5: 1.4, 0.7: 0.9, 1.0: 0.4}  # B / C^n of large models in the thesis


def fitted(n, scatter=0.03, seed=1, model=None, loads=LOADS):
    times = 0.2 * np.exp(SLOPES[n] * ((25 / (25 - loads)) ** n - 1))
    times = times * np.exp(np.random.default_rng(seed).normal(0, scatter, len(loads)))
    return CongestionModel(25, model).fit(loads, times, bootstrap=0)


def test_the_prediction_is_the_fit_and_its_json_says_as_much():
    fit = fitted(0.5)
    there, again = Predictor.from_fit(fit), Predictor.from_fit(json.loads(json.dumps(fit.to_json())))
    for load in (0.0, 12.5, 22.0):
        found = there.at(load)
        assert found.iteration_s == pytest.approx(fit.predict([load])[0])
        assert found == again.at(load)
        assert found.point_s[0] < found.curve_s[0] < found.iteration_s < found.curve_s[1] < found.point_s[1]
        assert found.warnings == ()
    assert there.load_for(1.5) == again.load_for(1.5)


def test_one_model_has_students_interval():
    """n given: the mean response of a straight line, as any textbook on regression has it."""
    fit = fitted(1.0, model=1.0)
    x, y = 1 / (25 - LOADS), np.log(fit.iteration_s)
    at = 1 / (25 - 18.0)
    slope, intercept = np.polyfit(x, y, 1)
    scatter = math.sqrt(np.sum((y - intercept - slope * x) ** 2) / 10)
    spread = math.sqrt(1 / 12 + (at - x.mean()) ** 2 / np.sum((x - x.mean()) ** 2))
    found = Predictor.from_fit(fit).at(18.0)
    centre, student = intercept + slope * at, 2.228139  # t of 10 degrees of freedom
    assert np.log(found.curve_s) == pytest.approx(centre + student * scatter * spread * np.array([-1, 1]), rel=1e-6)
    wide = student * scatter * math.sqrt(1 + spread**2)
    assert np.log(found.point_s) == pytest.approx([centre - wide, centre + wide], rel=1e-6)


@pytest.mark.parametrize(("n", "model"), [(0.5, None), (1.0, 1.0), (1.0, "free")])
def test_intervals_cover_as_often_as_they_say(n, model):
    """100 repetitions: not rarer than 95 % but for chance, three standard errors."""
    draw, hits, trials = np.random.default_rng(9), np.zeros(3), 100
    truth = 0.2 * math.exp(SLOPES[n] * ((25 / 7) ** n - 1))
    allowed = 25 * (1 - (1 + math.log(1.5) / SLOPES[n]) ** (-1 / n))
    for seed in range(trials):
        predictor = Predictor.from_fit(fitted(n, 0.05, seed, model))
        found, load = predictor.at(18.0), predictor.load_for(1.5)
        new = truth * math.exp(draw.normal(0, 0.05))
        hits += [
            found.curve_s[0] <= truth <= found.curve_s[1],
            found.point_s[0] <= new <= found.point_s[1],
            load.low_gbps <= allowed and (load.high_gbps is None or allowed <= load.high_gbps),
        ]
    assert hits.min() / trials >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / trials)


predictors = [Predictor.from_fit(fitted(n, 0.03, 2, model)) for n, model in ((0.5, None), (1.0, 1.0), (0.7, "free"))]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(predictors), st.floats(0, 24.9), st.floats(0, 24.9))
def test_more_load_takes_longer_and_the_inverse_brings_the_load_back(predictor, one, other):
    light, heavy = sorted((one, other))
    first, second = predictor.at(light), predictor.at(heavy)
    assert first.iteration_s <= second.iteration_s
    assert first.slowdown <= second.slowdown
    if second.slowdown < 1e200:
        back = predictor.load_for(max(second.slowdown, 1.0))
        assert back.load_gbps == pytest.approx(heavy, abs=1e-6)
        assert back.low_gbps <= back.load_gbps + 1e-6
        assert back.high_gbps is None or back.load_gbps - 1e-6 <= back.high_gbps


def test_units_do_not_matter():
    loads, times = LOADS / 10, 0.2 * np.exp(2.2 * (25 / (25 - LOADS)) ** 0.5)
    times *= np.exp(np.random.default_rng(3).normal(0, 0.03, len(times)))
    full = Predictor.from_fit(CongestionModel(25, 0.5).fit(LOADS, times, bootstrap=0)).at(18.0)
    small = Predictor.from_fit(CongestionModel(2.5, 0.5).fit(loads, 1000 * times, bootstrap=0)).at(1.8)
    assert small.curve_s == pytest.approx([1000 * end for end in full.curve_s])
    assert small.slowdown == pytest.approx(full.slowdown)


def test_what_lies_outside_of_the_measured_loads_is_said():
    predictor = predictors[0]
    assert "0 to 22: this is extrapolated" in predictor.at(23.0).warnings[0]
    assert predictor.load_for(predictor.at(24.0).slowdown).warnings
    for load in (25.0, 30.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="cannot be predicted"):
            predictor.at(load)
    for slowdown in (0.9, 0.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="slowdown"):
            predictor.load_for(slowdown)


def test_a_slowdown_that_may_never_come_has_no_upper_end():
    unsure = Predictor.from_fit(fitted(0.5, 1.0, 1, 0.5, LOADS[:6]))
    assert unsure.chosen.solution.b > 0
    found = unsure.load_for(1.5)
    assert found.high_gbps is None
    assert any("upper end of the load is missing" in text for text in found.warnings)
    falling = CongestionModel(25, 1.0).fit(LOADS, 0.2 * np.exp(-5 / (25 - LOADS)), bootstrap=0)
    with pytest.raises(UsageError, match="does not grow"):
        Predictor.from_fit(falling).load_for(1.5)


@pytest.fixture
def kept(tmp_path):
    path = tmp_path / "fit.json"
    path.write_text(json.dumps(fitted(0.5).to_json()))
    return path


def test_the_verb_in_words_and_as_json(capsys, kept):
    assert main(["predict", "--fit", str(kept), "--load", "18gbit"]) == 0
    text = capsys.readouterr().out
    assert "At 18 Gbit/s" in text
    assert "of a new mean" in text
    assert main(["predict", "--fit", str(kept), "--load", "18gbit", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(read_fit(kept).at(18.0).to_json()))
    assert main(["predict", "--fit", str(kept), "--slowdown", "1.5"]) == 0
    assert "1.5 times the time without cross traffic" in capsys.readouterr().out
    assert main(["predict", "--fit", str(kept), "--slowdown", "1.5", "--json"]) == 0
    item = json.loads(capsys.readouterr().out)
    assert item["low_gbps"] < item["load_gbps"] < item["high_gbps"]


def test_a_series_of_a_report(capsys, tmp_path):
    fit = fitted(0.5).to_json()
    series = [{"series": "vgg16-burst", "fit": fit}, {"series": "short", "fit": None, "fit_reason": "2 points"}]
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"series": series}))
    assert main(["predict", "--fit", str(path), "--series", "vgg16-burst", "--load", "18gbit"]) == 0
    (tmp_path / "one.json").write_text(json.dumps({"series": series[:1]}))
    assert main(["predict", "--fit", str(tmp_path / "one.json"), "--load", "18gbit"]) == 0
    for extra, says in (
        ([], "vgg16-burst, short: name one with --series"),
        (["--series", "vgg"], "there is no 'vgg'"),
        (["--series", "short"], "no fit of short: 2 points"),
    ):
        assert main(["predict", "--fit", str(path), "--load", "18gbit", *extra]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        (None, ["--load", "18gbit"], "cannot be read"),
        ("folder", ["--load", "18gbit"], "report/report.json, or the file that ringtap fit "),
        ("not json", ["--load", "18gbit"], "it is not JSON"),
        ("[1]", ["--load", "18gbit"], "not the JSON that ringtap fit writes"),
        ('{"capacity_gbps": 25}', ["--load", "18gbit"], "not the JSON that ringtap fit writes"),
        ('{"C_gbps": 25}', ["--load", "18gbit"], "is of an earlier version of ringtap: fit the points, or"),
        ("kept", ["--load", "25gbit"], "cannot be predicted"),
        ("kept", ["--load", "18"], "--load '18' has no unit"),
        ("kept", ["--slowdown", "half"], "not a number"),
        ("kept", ["--slowdown", "0.5"], "makes no sense"),
        ("kept", ["--slowdown", "2", "--load", "1gbit"], "not allowed with"),
        ("kept", [], "required"),
        ("kept", ["--load", "1gbit", "--series", "x"], "holds one fit"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(capsys, tmp_path, kept, text, options, says):
    path = {None: tmp_path / "none.json", "folder": tmp_path}.get(text, kept)
    if text not in (None, "folder", "kept"):
        path.write_text(text)
    assert main(["predict", "--fit", str(path), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.count("\n") == 1
