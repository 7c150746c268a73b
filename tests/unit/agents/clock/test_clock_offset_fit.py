"""Lines through measurements of a clock's offset: the truth lies within their error, whatever the delays were."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.agents.clock.clock_offset_fit import MAX_DRIFT_PPM, ClockFit, Measurement, clip, overall, segments

pytestmark = pytest.mark.shares

T0_NS = 1_700_000_000_000_000_000
MONO_NS = 5_000_000_000


def measurement(mono_ns: int, offset_ns: int, error_ns: int) -> Measurement:
    return Measurement(T0_NS + mono_ns, mono_ns, "during", offset_ns, error_ns, 2 * error_ns, 20)


@st.composite
def delays(draw: st.DrawFn) -> tuple[int, int]:
    """A way there and a way back in ns: far apart where a queue stands on one of them."""
    return draw(st.integers(500, 30_000_000)), draw(st.integers(500, 30_000_000))


@st.composite
def linear_clock(draw: st.DrawFn) -> tuple[int, float, list[Measurement]]:
    """True offset at MONO_NS and drift, and what pings measure of it."""
    offset_ns = draw(st.integers(-(10**12), 10**12))
    drift_ppm = draw(st.floats(-400, 400, allow_nan=False))
    gaps_ns = draw(st.lists(st.integers(1_000_000, 60_000_000_000), min_size=0, max_size=30))
    found, mono_ns = [], MONO_NS
    for gap_ns in [0, *gaps_ns]:
        mono_ns += gap_ns
        there_ns, back_ns = draw(delays())
        true_ns = offset_ns + drift_ppm * 1e-6 * (mono_ns - MONO_NS)
        # a ping reads the truth plus half of what the ways differ by
        read_ns = round(true_ns + (back_ns - there_ns) / 2)
        found.append(measurement(mono_ns, read_ns, (there_ns + back_ns) // 2 + 1))
    return offset_ns, drift_ppm, found


@settings(deadline=None)
@given(linear_clock(), st.integers(0, 10**10), st.integers(0, 10**10))
def test_the_truth_lies_within_the_error_of_the_fit(
    case: tuple[int, float, list[Measurement]], early_ns: int, late_ns: int
) -> None:
    offset_ns, drift_ppm, found = case
    begin_ns, end_ns = found[0].mono_ns - early_ns, found[-1].mono_ns + late_ns
    (fit,) = segments(found, (), begin_ns, end_ns)
    assert (fit.from_mono_ns, fit.to_mono_ns, fit.measurements) == (begin_ns, end_ns, len(found))
    for share in (0, 0.25, 0.5, 0.75, 1):
        mono_ns = round(begin_ns + share * (end_ns - begin_ns))
        true_ns = offset_ns + drift_ppm * 1e-6 * (mono_ns - MONO_NS)
        assert abs(fit.at(T0_NS + mono_ns) - true_ns) <= fit.error_ns + 3
    assert fit.error_ns >= min(item.error_ns for item in found)


@settings(deadline=None)
@given(linear_clock())
def test_more_measurements_never_make_the_error_of_the_first_moment_larger(
    case: tuple[int, float, list[Measurement]],
) -> None:
    _, _, found = case
    first = segments(found[:1])[0]
    assert first.error_ns <= found[0].error_ns + 1
    whole = segments(found)[0]
    worst = max(item.error_ns for item in (found[0], found[-1]))
    assert whole.error_ns <= worst + 2


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-400, 400), st.lists(st.integers(10**6, 2 * 10**10), min_size=1, max_size=8)),
        min_size=1,
        max_size=6,
    ),
    st.data(),
)
def test_where_the_rate_changes_the_lines_stay_near_the_truth(parts: list[Any], data: st.DataObject) -> None:
    """Each line passes through the intervals it rests on, so it is off by two of their half widths at most."""
    mono_ns, true_ns, found, truths = MONO_NS, 0.0, [], []
    for drift_ppm, gaps_ns in parts:
        for gap_ns in gaps_ns:
            mono_ns += gap_ns
            true_ns += drift_ppm * 1e-6 * gap_ns
            there_ns, back_ns = data.draw(delays())
            found.append(measurement(mono_ns, round(true_ns + (back_ns - there_ns) / 2), (there_ns + back_ns) // 2 + 1))
            truths.append(true_ns)
    fits = segments(found)
    assert [fit.from_mono_ns for fit in fits[1:]] == [fit.to_mono_ns for fit in fits[:-1]], "no time is left out"
    for item, truth in zip(found, truths, strict=True):
        covering = [fit for fit in fits if fit.from_mono_ns <= item.mono_ns <= fit.to_mono_ns]
        assert covering
        assert any(abs(fit.at(item.t_ns) - truth) <= 2 * item.error_ns + 3 for fit in covering)
    whole = overall(fits)
    for fit in fits:
        for t_ns in (fit.from_ns, fit.to_ns):
            assert abs(whole.at(t_ns) - fit.at(t_ns)) + fit.error_ns <= whole.error_ns + 3


def test_a_steady_drift_is_found_to_a_fraction_of_a_ppm() -> None:
    found = [
        measurement(MONO_NS + second * 10**9, 5_000 + round(37.5e3 * second), 20_000) for second in range(0, 601, 10)
    ]
    (fit,) = segments(found)
    assert fit.drift_ppm == pytest.approx(37.5, abs=0.01)
    assert fit.offset_ns == pytest.approx(5_000, abs=2)
    assert 20_000 <= fit.error_ns <= 20_001


def test_pings_after_a_queue_do_not_widen_what_is_known_before() -> None:
    """One burst through a full queue among good ones says nothing, and takes nothing away."""
    good = [measurement(MONO_NS + second * 10**9, 100, 20_000) for second in range(0, 100, 10)]
    bad = measurement(MONO_NS + 45 * 10**9, 8_000_000, 10_000_000)
    (fit,) = segments(sorted([*good, bad], key=lambda item: item.mono_ns))
    assert fit.error_ns <= 20_001
    assert fit.measurements == 11


def step_at(before_s: float, after_s: float) -> tuple[int, int]:
    return MONO_NS + round(before_s * 1e9), MONO_NS + round(after_s * 1e9)


def test_a_step_parts_two_segments_which_meet_at_it() -> None:
    before = [measurement(MONO_NS + second * 10**9, 0, 20_000) for second in (0, 10, 20)]
    after = [measurement(MONO_NS + second * 10**9, 5_000_000, 20_000) for second in (30, 40)]
    first, second = segments([*before, *after], [step_at(24, 25)], MONO_NS - 10**9, MONO_NS + 41 * 10**9)
    assert (first.to_mono_ns, second.from_mono_ns) == step_at(24, 25)
    assert (first.measurements, second.measurements) == (3, 2)
    assert abs(first.at(first.to_ns)) <= first.error_ns
    assert abs(second.at(second.from_ns) - 5_000_000) <= second.error_ns
    assert overall([first, second]).error_ns >= 2_500_000 - 50_000


def test_a_small_step_within_the_intervals_still_parts_them() -> None:
    found = [measurement(MONO_NS + second * 10**9, 0, 20_000) for second in (0, 10, 20, 30)]
    assert len(segments(found, [step_at(14, 15)])) == 2


def test_a_step_before_the_first_or_after_the_last_measurement_cuts_the_time_it_holds_for() -> None:
    found = [measurement(MONO_NS + second * 10**9, 0, 20_000) for second in (10, 20)]
    (fit,) = segments(found, [step_at(4, 5), step_at(25, 26)], MONO_NS, MONO_NS + 40 * 10**9)
    assert (fit.from_mono_ns, fit.to_mono_ns) == (MONO_NS + 5 * 10**9, MONO_NS + 25 * 10**9)


def test_a_jump_that_nobody_saw_parts_two_segments() -> None:
    found = [measurement(MONO_NS + second * 10**9, 0, 20_000) for second in (0, 10, 20)]
    found += [measurement(MONO_NS + second * 10**9, 10**9, 20_000) for second in (30, 40)]
    first, second = segments(found)
    assert (first.measurements, second.measurements) == (3, 2)
    assert second.from_mono_ns == MONO_NS + 30 * 10**9


def test_nothing_measured_is_no_line() -> None:
    assert segments([]) == []
    with pytest.raises(ValueError, match="no segment"):
        overall([])


def test_beyond_a_single_measurement_the_error_grows_as_fast_as_a_clock_can_drift() -> None:
    (fit,) = segments([measurement(MONO_NS, 0, 20_000)], (), MONO_NS, MONO_NS + 10**9)
    assert fit.error_ns == pytest.approx(20_000 + MAX_DRIFT_PPM * 1e3, abs=2)


def test_a_line_is_read_at_any_time() -> None:
    fit = ClockFit(0, 10**9, 0, 10**9, 500, 100, 10.0, 5, 2)
    assert fit.at(500) == 100
    assert fit.at(500 + 10**9) == pytest.approx(10_100)


@given(
    st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=1, max_size=8),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(-10, 10),
)
def test_clipping_leaves_nothing_beyond_the_line(
    points: list[tuple[float, float]], a: float, b: float, c: float
) -> None:
    square = [(-5.0, -5.0), (5.0, -5.0), (5.0, 5.0), (-5.0, 5.0)]
    kept = clip(square, a, b, c)
    assert all(a * x + b * y <= c + 1e-6 for x, y in kept)
    for x, y in points:
        inside = abs(x) < 4.999 and abs(y) < 4.999 and a * x + b * y < c - 1e-3
        assert not inside or kept
