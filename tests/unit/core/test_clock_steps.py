"""Clocks that were set, told from pairs of readings of which some were interrupted."""

import pytest

from ringtap.core.clock_steps import CLOCK_STEP_NS, clock_set_ns

pytestmark = pytest.mark.computes
MS = 1_000_000


@pytest.mark.parametrize("step_ns", [CLOCK_STEP_NS, -CLOCK_STEP_NS, 3600 * 10**9])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (5, 5), (7, 23), (40, 3)])
def test_a_clock_that_is_set_is_told_from_all_that_follows(before: int, after: int, step_ns: int) -> None:
    assert clock_set_ns([17] * before + [17 + step_ns] * after) == step_ns


@pytest.mark.parametrize("place", range(12))
def test_a_pause_between_two_readings_is_no_step(place: int) -> None:
    gaps_ns = [number % 3 for number in range(12)]  # as exact as readings are
    gaps_ns[place] -= 50 * MS
    assert clock_set_ns(gaps_ns) == 0


def test_slewing_and_few_records_are_no_step() -> None:
    assert clock_set_ns([number * CLOCK_STEP_NS // 100 for number in range(400)]) == 0
    assert clock_set_ns([0, CLOCK_STEP_NS - 1]) == clock_set_ns([5]) == clock_set_ns([]) == 0


def test_of_a_clock_that_is_set_and_set_back_the_larger_step_counts() -> None:
    assert clock_set_ns([0] * 10 + [30 * MS] * 10 + [10 * MS] * 10) == 30 * MS
