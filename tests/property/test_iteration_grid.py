"""The grid of iterations: pauses end at its points, and a job that is a little late is not held back."""

from hypothesis import given
from hypothesis import strategies as st

from ringtap.agents.hook.ringtap_hook.grid import Grid

TIMES = st.integers(0, 2**61)


@given(TIMES, st.integers(1, 10**12), TIMES, st.integers(0, 100))
def test_a_pause_ends_at_a_point_and_is_shorter_than_a_period(start: int, period: int, now: int, step: int) -> None:
    pause = Grid(start, period).pause_ns(now, step)
    assert 0 <= pause < period
    late = (now - start) % period
    if pause:
        assert (now + pause - start) % period == 0
        assert step < 5 or 2 * pause <= period
    else:
        assert late == 0 or (step >= 5 and 2 * late < period)
