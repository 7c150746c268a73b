"""Whatever is measured: numbers or a reason, never NaN, and nothing but what JSON holds."""

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringtap.analysis.model.congestion_point_on_curve import find_curve_point
from ringtap.analysis.model.fit import CongestionModel
from ringtap.analysis.model.predict import Predictor
from ringtap.analysis.statistics.quantiles import quantile_interval
from ringtap.core.errors import UsageError

pytestmark = [pytest.mark.computes, pytest.mark.long]

points = st.lists(st.tuples(st.floats(0, 24.999999), st.floats(1e-9, 1e9)), min_size=4, max_size=12)

# robust: the curve without the points at 20 Gbit/s is 0 at these
LEAVES_FLOATING_POINT = [
    (9.405090493257587, 135819736.72696003),
    (18.050984901842003, 181405615.53594828),
    (18.050984901842003, 181405615.53594828),
    (17.360929319823374, 729383666.3854908),
    (15.486909977649708, 784682425.9451799),
    (20.0, 4.0),
    (1.0164092951761588e-156, 518378426.48636055),
    (21.964806175587075, 1e-06),
    (24.539768458923586, 388606976.5293648),
    (20.0, 4.0),
    (17.70173619916538, 116314804.39217293),
]


@settings(max_examples=120, deadline=None)
@example(LEAVES_FLOATING_POINT, "free", True, 0.01)
@given(points, st.sampled_from([0.5, 2.0, "free", None]), st.booleans(), st.sampled_from([None, 0.0, 0.01, 10.0]))
def test_fits_of_every_kind_and_their_predictions(pairs, n, robust, error):
    loads, times = np.array(pairs).T
    spread = None if error is None else error * times
    try:
        fit = CongestionModel(25, n).fit(loads, times, spread_s=spread, robust=robust, bootstrap=40)
        predictor = Predictor.from_fit(json.loads(json.dumps(fit.to_json(), allow_nan=False)))
    except UsageError:
        return
    assert fit.report()
    found = predictor.at(12.5)
    json.dumps(found.to_json(), allow_nan=False)
    if found.curve_s:
        assert found.point_s[0] <= found.curve_s[0] <= found.iteration_s <= found.curve_s[1] <= found.point_s[1]
    if predictor.chosen.solution.b > 0:
        json.dumps(predictor.load_for(1.5).to_json(), allow_nan=False)


@settings(max_examples=80, deadline=None)
@given(points)
def test_curve_points(pairs):
    loads, times = np.array(pairs).T
    found = find_curve_point(loads, times, 25)
    assert (found.point is None) == bool(found.reason)
    if found.point:
        json.dumps(found.point.to_json(), allow_nan=False)
        assert 0 <= found.point.low_gbps <= found.point.bandwidth_gbps <= found.point.high_gbps <= 25


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=400), st.floats(0.001, 0.999), st.floats(0.5, 0.99))
def test_quantiles_lie_within_their_intervals_and_those_within_the_sample(values, q, level):
    found = quantile_interval(values, q, level)
    json.dumps(found.to_json(), allow_nan=False)
    assert (found.low is None or found.high is None) == bool(found.reason)
    ends = [end for end in (found.low, found.high) if end is not None]
    assert all(min(values) <= end <= max(values) for end in ends)
    if len(ends) == 2:
        assert ends[0] <= ends[1]
