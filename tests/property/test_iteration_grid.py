"""The grid of iterations: pauses end at its points, and a job that is a little late is not held back."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtap.agents.hook.ringtap_hook.iteration_time_shift import Grid

pytestmark = pytest.mark.computes

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


def test_a_grid_ends_as_soon_as_there_is_its_file(tmp_path: Path) -> None:
    until = tmp_path / "released, at last"
    grid = Grid(0, 100, str(until))
    assert grid.pause_ns(30, 9) == 0, "a little late"
    assert grid.pause_ns(70, 9) == 30
    until.touch()
    assert [grid.pause_ns(70, step) for step in (0, 9)] == [0, 0]
