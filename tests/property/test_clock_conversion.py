"""Conversion of times to the reference clock: a moment, as in the live view, and columns, as in the analysis."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringtap.analysis.runs.reference_clock import ClockLine, NodeClock, RecordedClockStep

pytestmark = pytest.mark.computes

SECOND = 10**9
START_NS = 1_700_000_000 * SECOND
seconds = st.integers(0, 1000).map(lambda count: count * SECOND)


@st.composite
def clocks(draw: st.DrawFn) -> NodeClock:
    lines, steps = [], []
    for from_ns in sorted(draw(st.sets(seconds, min_size=1, max_size=4))):
        offset_ns, drift_ppm = draw(st.integers(-(10**10), 10**10)), draw(st.floats(-500, 500))
        lines.append(ClockLine(START_NS + from_ns, START_NS, float(offset_ns), drift_ppm))
    for mono_ns in sorted(draw(st.sets(seconds, max_size=3))):
        step_ns = draw(st.integers(-100, 100).filter(bool)) * SECOND
        steps.append(RecordedClockStep(mono_ns - SECOND, mono_ns, START_NS + mono_ns + step_ns, step_ns))
    return NodeClock(tuple(lines), steps=tuple(steps), gap_ns=START_NS)


# the two steps cannot be told apart by the time alone: a time before the first one is before the second one too
TWO_STEPS = NodeClock(
    (ClockLine(START_NS, START_NS, 0.0, 0.0),),
    steps=tuple(
        RecordedClockStep((at - 1) * SECOND, at * SECOND, START_NS + (at + moved) * SECOND, moved * SECOND)
        for at, moved in ((52, 4), (53, 1))
    ),
    gap_ns=START_NS,
)


@example(TWO_STEPS, [(0, 53)])
@given(clocks(), st.lists(st.tuples(seconds, st.integers(-150, 150)), min_size=1, max_size=20))
def test_one_moment_is_converted_as_a_column_is(clock: NodeClock, moments: list[tuple[int, int]]) -> None:
    mono_ns = [mono for mono, _ in moments]
    t_ns = [START_NS + mono + moved * SECOND for mono, moved in moments]
    columns = (np.array(t_ns), np.array(mono_ns))
    assert [*map(clock.moment_unstepped, t_ns, mono_ns)] == clock.unstepped(*columns).tolist()
    assert [clock.moment_unstepped(t) for t in t_ns] == [clock.unstepped(np.array([t]))[0] for t in t_ns]
    assert [*map(clock.moment_on_reference, t_ns, mono_ns)] == clock.on_reference(*columns).tolist()


@given(clocks(), seconds)
def test_a_recording_that_begins_after_a_step_has_the_same_times(clock: NodeClock, mono_ns: int) -> None:
    moved_ns = sum(step.step_ns for step in clock.steps if step.mono_ns <= mono_ns)
    assert clock.since((START_NS + mono_ns + moved_ns, mono_ns)) == clock


def test_a_time_that_is_not_known_stays_so() -> None:
    clock = NodeClock((ClockLine(0, 0, 5.0, 0.0),), gap_ns=3)
    assert clock.moment_on_reference(0, 7) == 0
    assert clock.on_reference(np.array([0]), np.array([7]))[0] == 0
