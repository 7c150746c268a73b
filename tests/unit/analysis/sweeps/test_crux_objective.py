"""FLOPs per second of jobs that share links, and gains with their intervals."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtap.analysis.sweeps.crux_objective import Computation, computation, flop_of, with_gain

pytestmark = [pytest.mark.computes, pytest.mark.together]


def table(begin_s: float, times_s: list[float]) -> pd.DataFrame:
    """Return iterations of a job, the first of which begins at a time."""
    begins = begin_s + np.concatenate(([0.0], np.cumsum(times_s)[:-1]))
    return pd.DataFrame({"begin_ns": (begins * 1e9).astype(np.int64), "iteration_s": times_s})


def test_flops_per_second_are_those_of_all_jobs_while_all_run() -> None:
    tables = [table(100.0, [0.1] * 100), table(101.0, [0.2] * 40)]
    found = computation(tables, [1e12, 4e12], [0.1, 0.25])
    assert found is not None
    assert found.flop_per_s == pytest.approx(1e13 + 2e13)
    assert found.predicted_flop_per_s == pytest.approx(1e13 + 1.6e13)
    assert (found.low_flop_per_s, found.high_flop_per_s) == pytest.approx((3e13, 3e13))
    unknown = computation(tables, [1e12, 4e12], [0.1, None])
    assert unknown is not None
    assert unknown.predicted_flop_per_s is None
    assert computation([table(0.0, [0.1] * 5), table(1.0, [0.1] * 5)], [1e12, 1e12], [None, None]) is None
    few = computation([table(0.0, [0.1] * 12), table(0.0, [0.2] * 6)], [1e12, 4e12], [None, None])
    assert few is not None
    assert few.low_flop_per_s is None, "16 iterations of the slowest job are needed"


def test_what_one_job_loses_to_another_one_is_no_error() -> None:
    """Two jobs that take turns being slow compute as much as before, whose interval is narrow."""
    rng = np.random.default_rng(1)
    blocks = rng.uniform(-0.3, 0.3, 20)
    rates = [np.repeat(10 * (1 + sign * blocks), 40) for sign in (1, -1)]
    together = computation([table(0.0, list(1 / each)) for each in rates], [1e12, 1e12], [None, None])
    one = computation([table(0.0, list(1 / rates[0]))], [1e12], [None])
    assert together is not None
    assert one is not None
    assert together.error is not None
    assert one.error is not None
    assert together.error < 0.5 * one.error


@given(st.floats(0.5, 2.0), st.lists(st.floats(0.01, 0.05), min_size=2, max_size=4))
def test_a_gain_is_a_ratio_whose_errors_add_up(ratio: float, errors: list[float]) -> None:
    def point(mean: float, error: float | None) -> Computation:
        return Computation(mean, None, None, mean, error=error, freedom=1e6)

    equal = [point(1e13, error) for error in errors[1:]]
    found = with_gain(point(ratio * 1e13, errors[0]), equal)
    assert found.gain == pytest.approx(ratio - 1)
    assert found.predicted_gain == pytest.approx(ratio - 1)
    error = np.sqrt(errors[0] ** 2 + sum(each**2 for each in errors[1:]) / len(equal) ** 2)
    assert found.gain_high is not None
    # 1.96 for a normal distribution
    assert found.gain_high - ratio + 1 == pytest.approx(1.96 * ratio * error, rel=1e-3)
    unknown = with_gain(point(1e13, errors[0]), [point(1e13, None)])
    assert (unknown.gain, unknown.gain_low) == (pytest.approx(0.0), None)


def test_flop_are_those_of_the_plan() -> None:
    jobs = [
        {"name": "a", "flop": 1e12},
        {"name": "b", "flop": None},
        "x",
        {"name": "c", "flop": -1},
        {"name": "d", "flop": 10**400},
    ]
    assert flop_of({"jobs": jobs}) == {"a": 1e12}
    assert flop_of({}) == {}
