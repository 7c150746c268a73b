import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.analysis.runs.samples_to_iterations import (
    Borders,
    add_up,
    counter_steps,
    growth,
    largest_in,
    mean_in,
    plain,
    shares,
)

pytestmark = [pytest.mark.computes, pytest.mark.together]

T0 = 1_700_000_000_000_000_000


def borders(*edges_ms):
    edges = T0 + np.array(edges_ms, np.int64) * 1_000_000
    return Borders(edges, np.arange(len(edges) - 1))


def at(*times_ms):
    return T0 + np.array(times_ms, np.int64) * 1_000_000


@settings(max_examples=200, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**6), st.integers(0, 10**9)), max_size=40),
    cuts=st.lists(st.integers(0, 2 * 10**6), min_size=1, max_size=30, unique=True),
)
def test_spreading_conserves_bytes(spans, cuts):
    begin = np.array([one[0] for one in spans], np.int64) + T0
    end = begin + np.array([one[1] for one in spans], np.int64)
    amount = np.array([one[2] for one in spans], np.float64)
    edges = np.array([-1, *sorted(cuts), 3 * 10**6], np.int64) + T0
    span, place, share = shares(begin, end, edges)
    total = add_up(np.zeros(len(span), np.int64), place, amount[span] * share, 1, len(edges) - 1)
    assert total.sum() == pytest.approx(amount.sum(), rel=1e-9, abs=1e-6)
    assert (share > 0).all()
    # each part lies in its bin
    assert (edges[place] < end[span]).all()
    assert (edges[place + 1] > begin[span]).all()


@settings(max_examples=100, deadline=None)
@given(
    gaps=st.lists(st.integers(1, 10**9), min_size=2, max_size=50),
    steps=st.lists(st.integers(0, 10**12), min_size=50, max_size=50),
    cuts=st.lists(st.floats(0, 1), min_size=2, max_size=20, unique=True),
)
def test_interpolating_a_counter_conserves_its_growth(gaps, steps, cuts):
    t_ns = T0 + np.cumsum([0, *gaps])
    grown = np.array(steps[: len(gaps)], np.float64)
    cut_ns = t_ns[0] + ((t_ns[-1] - t_ns[0]) * np.array(cuts)).astype(np.int64)
    edges = np.unique(np.concatenate((t_ns[:1], cut_ns, t_ns[-1:])))
    found = growth(t_ns, grown, Borders(edges, np.arange(len(edges) - 1)), np.inf)
    assert np.nansum(found) == pytest.approx(grown.sum(), rel=1e-9, abs=1e-3)
    assert not np.isnan(found).any()


def test_a_span_is_cut_at_the_borders():
    span, place, share = shares(at(10, 60), at(50, 61), borders(0, 20, 30, 60, 100).edges_ns)
    assert span.tolist() == [0, 0, 0, 1]
    assert place.tolist() == [0, 1, 2, 3]
    assert share.tolist() == [0.25, 0.25, 0.5, 1.0]


def test_a_span_beyond_the_outer_borders_counts_in_part():
    _, place, share = shares(at(0), at(100), borders(50, 75).edges_ns)
    assert (place.tolist(), share.tolist()) == ([0], [0.25])
    assert not len(shares(at(0), at(50), borders(50, 75).edges_ns)[0])


def test_bins_that_samples_do_not_cover_are_missing_not_zero():
    found = growth(at(0, 10, 20), np.array([5.0, 5.0]), borders(-10, 0, 10, 15, 30), np.inf)
    assert np.isnan(found[[0, 3]]).all()
    assert found[1:3].tolist() == [5.0, 2.5]
    assert np.isnan(growth(at(0), np.empty(0), borders(0, 10), np.inf)).all()


def test_bins_that_begin_or_end_inside_a_long_gap_are_missing_not_spread():
    t_ns, steps = at(0, 10, 50, 60), np.array([5.0, 8.0, 5.0])
    found = growth(t_ns, steps, borders(0, 5, 10, 20, 50, 60), 30e6)
    assert found == pytest.approx([2.5, 2.5, np.nan, np.nan, 5.0], nan_ok=True)
    # a bin that holds the whole gap, and an edge at each end of it
    assert growth(t_ns, steps, borders(5, 10, 50, 55), 30e6).tolist() == [2.5, 8.0, 2.5]
    # each bin by its own limit
    assert growth(t_ns, steps, borders(0, 30, 60), np.array([40e6, 39e6])) == pytest.approx([9.0, np.nan], nan_ok=True)


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        (np.array([2**32 - 10, 5, 30], np.uint32), 32, [15, 25]),
        (np.array([250, 4], np.uint8), 8, [10]),
        (np.array([10, 30, 7], np.uint64), 64, [20, np.nan]),
        (np.array([2**63, 2**63 + 3], np.uint64), 64, [3]),
        (np.array([1.5, 2.0, 0.25]), 0, [0.5, np.nan]),
    ],
)
def test_growth_of_counters_that_wrap_or_were_reset(values, width, expected):
    np.testing.assert_array_equal(counter_steps(values[:-1], values[1:], width), expected)


def test_a_gauge_holds_until_its_next_sample():
    t_ns, values = at(0, 10, 30), np.array([1.0, 3.0, 100.0])
    assert mean_in(t_ns, values, borders(0, 20, 30)) == pytest.approx([2.0, 3.0])
    assert largest_in(t_ns, values, borders(0, 10, 20, 40, 50)).tolist() == [1.0, 3.0, 100.0, 100.0]
    assert largest_in(t_ns, values, borders(-20, -10, 5)).tolist()[1] == 1.0
    assert np.isnan(largest_in(t_ns, values, borders(-20, -10))).all()


def test_borders_keep_gaps_between_generations_apart():
    found = Borders.of(at(0, 10, 50), at(10, 20, 60))
    assert found.bins == 4
    assert found.bin_of.tolist() == [0, 1, 3]


def test_plain_values_have_no_nan():
    assert [plain(one) for one in (float("nan"), np.float64("inf"), None, np.int64(3), 2.5, "a")] == [
        None, None, None, 3, 2.5, "a",
    ]  # fmt: skip
