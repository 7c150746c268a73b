"""Iterations by packets against step logs whose every time is known."""

from pathlib import Path

import numpy as np
import pytest

from ringtap.analysis.job.run import open_job
from ringtap.analysis.structure.iterations_against_step_logs import check_against_steps
from ringtap.core.run_directory import RunDirectory
from tests.gold.job_run import MS, START_NS, Node

pytestmark = [pytest.mark.computes, pytest.mark.together]

ITERATIONS, COMPUTE_MS, COMMUNICATION_MS, SLOW_MS = 10, 60, 40, 300


def write_job(path: Path, *, with_ddp: bool, slow: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A job with one communication longer than the others; its begins of communication and ends of steps."""
    run = RunDirectory.create(path, "job", ["ringtap", "run"], 1)
    node = Node(run, "n0")
    steps, ddp, at = [], [], START_NS
    begins, ends = [], []
    for number in range(ITERATIONS):
        begin = at + COMPUTE_MS * MS
        end = begin + (SLOW_MS if number == slow else COMMUNICATION_MS) * MS
        steps.append((number, 0, end - MS, end, 0, 0, 0, 1))
        spans = (MS, COMPUTE_MS * MS, end - begin, 0)
        ddp.append((number, 0, at, at + MS, begin, begin, end, *spans, end, end - START_NS))
        begins.append(begin)
        ends.append(end)
        at = end
    node.steps(0, steps)
    if with_ddp:
        node.ddp(0, ddp, [1000])
    node.clock(0, 0, "n0")
    node.finish()
    run.finish("complete")
    return np.array(begins), np.array(ends)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_long_communication_at_the_begin_is_no_error_of_the_packets(tmp_path: Path, slow: int) -> None:
    begins, _ = write_job(tmp_path / "job", with_ddp=True, slow=slow)
    found = check_against_steps(open_job(tmp_path / "job"), begins + MS)
    assert found is not None
    assert (found.iterations, found.missed, found.extra) == (ITERATIONS - 1, 0, 0)
    assert found.log_s == pytest.approx((begins[-1] - begins[1]) / 1e9 / (ITERATIONS - 2))
    assert found.period_error == pytest.approx(0, abs=1e-9)
    assert found.boundary_median_s == pytest.approx(0.001)


def test_a_first_iteration_that_ranks_begin_apart_is_not_compared(tmp_path: Path) -> None:
    """The first rank waits for the others, and its packets with it."""
    begins, _ = write_job(tmp_path / "job", with_ddp=True)
    begins[0] += 50 * MS
    found = check_against_steps(open_job(tmp_path / "job"), begins)
    assert found is not None
    assert (found.iterations, found.missed, found.extra) == (ITERATIONS - 1, 0, 0)
    assert found.period_error == pytest.approx(0, abs=1e-9)


def test_without_ddp_s_log_the_ends_of_steps_are_what_there_is(tmp_path: Path) -> None:
    begins, ends = write_job(tmp_path / "job", with_ddp=False)
    found = check_against_steps(open_job(tmp_path / "job"), begins)
    assert found is not None
    assert found.boundary_median_s is None
    assert found.iterations == ITERATIONS - 2  # the first iteration has no end of a step before it
    assert found.log_s == pytest.approx((ends[-1] - ends[2]) / 1e9 / (found.iterations - 1))
