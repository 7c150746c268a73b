import json
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ringtap.analysis.model.bytes_per_iteration import COLLECTIVES, demand
from ringtap.analysis.model.congestion_point import find_congestion_point
from ringtap.analysis.model.fit import CongestionModel
from ringtap.core.errors import UsageError

pytestmark = [pytest.mark.computes, pytest.mark.long]

# Loads as shares of capacity, times within the range that anyone will measure
points = st.lists(
    st.tuples(st.floats(0, 0.99), st.floats(1e-3, 1e3)), min_size=6, max_size=12, unique_by=lambda point: point[0]
)
exponents = st.sampled_from([0.5, 1.0, 2.0, None])
few = settings(max_examples=60, deadline=None)


def arrays(pairs):
    loads, times = np.array(pairs).T
    assume(len(np.unique(np.round(loads, 3))) >= 4)
    return 25 * loads, times


@few
@given(points, exponents, st.floats(0.01, 100), st.floats(0.01, 100))
def test_fits_do_not_depend_on_units(pairs, n, rate_unit, time_unit):
    loads, times = arrays(pairs)
    assume(np.ptp(np.log(times)) > 0.01)
    first = CongestionModel(25, n).fit(loads, times)
    second = CongestionModel(25 * rate_unit, n if n is None else first.n).fit(loads * rate_unit, times * time_unit)
    assume(first.free == second.free)
    if first.free:
        return
    assert second.n == first.n
    assert math.log(second.A / first.A / time_unit) == pytest.approx(0, abs=1e-5)
    assert pytest.approx(first.B * rate_unit**first.n, rel=1e-5, abs=1e-7 * rate_unit**first.n) == second.B


@few
@given(points, exponents, st.randoms(use_true_random=False))
def test_the_order_of_points_does_not_matter(pairs, n, random):
    loads, times = arrays(pairs)
    order = list(range(len(loads)))
    random.shuffle(order)
    assert (
        CongestionModel(25, n).fit(loads, times).to_json()
        == CongestionModel(25, n).fit(loads[order], times[order]).to_json()
    )
    assert find_congestion_point(loads, times, 25) == find_congestion_point(loads[order], times[order], 25)


@few
@given(points, st.sampled_from([0.5, 1.0, 2.0]))
def test_repeating_every_point_changes_no_parameter(pairs, n):
    loads, times = arrays(pairs)
    once = CongestionModel(25, n).fit(loads, times)
    twice = CongestionModel(25, n).fit(np.tile(loads, 2), np.tile(times, 2))
    assert pytest.approx(once.B, rel=1e-6, abs=1e-8) == twice.B
    assert math.log(twice.A / once.A) == pytest.approx(0, abs=1e-6)
    first, second = (find_congestion_point(np.tile(loads, k), np.tile(times, k), 25) for k in (1, 2))
    assert (first.point is None) == (second.point is None)
    if first.point and second.point:
        assert second.point.data_mb == pytest.approx(first.point.data_mb)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 24.999999), st.floats(1e-9, 1e9)), min_size=4, max_size=12),
    st.sampled_from([0.5, 1.0, 2.0, "free", None]),
)
def test_nothing_is_ever_nan(pairs, n):
    loads, times = np.array(pairs).T
    try:
        fit = CongestionModel(25, n).fit(loads, times)
    except UsageError:
        pass
    else:
        json.dumps(fit.to_json(), allow_nan=False)
        assert fit.report()
    found = find_congestion_point(loads, times, 25)
    assert (found.point is None) == bool(found.reason)
    if found.point is not None:
        json.dumps(found.point.to_json(), allow_nan=False)
        assert found.point.data_mb > 0


@given(st.integers(1, 10**12), st.integers(2, 4096), st.sampled_from(COLLECTIVES))
def test_demand_grows_with_parameters_and_workers(parameters, workers, collective):
    one = demand(parameters, workers, collective)
    assert demand(parameters + 1, workers, collective).busiest_link_bytes > one.busiest_link_bytes
    assert demand(parameters, workers + 1, collective).busiest_link_bytes >= one.busiest_link_bytes
    assert one.busiest_link_bytes >= one.worker_bytes > 0
    assert one.required_bps(0.5) == pytest.approx(2 * one.required_bps(1.0))
