"""Iterations by packets against step logs whose every time is known."""

from pathlib import Path

import numpy as np
import pytest

from ringtap.analysis.job import open_job
from ringtap.analysis.structure.steps import check_against_steps
from ringtap.rundir import RunDirectory
from tests.gold.job_run import MS, START_NS, Node

ITERATIONS, COMPUTE_MS, COMMUNICATION_MS, FIRST_MS = 10, 60, 40, 300


def write_job(path: Path, *, with_ddp: bool) -> tuple[np.ndarray, np.ndarray]:
    """A job whose first communication takes longer than the others; its begins of communication and ends of steps."""
    run = RunDirectory.create(path, "job", ["ringtap", "run"], 1)
    node = Node(run, "n0")
    steps, ddp, at = [], [], START_NS
    begins, ends = [], []
    for number in range(ITERATIONS):
        begin = at + COMPUTE_MS * MS
        end = begin + (COMMUNICATION_MS if number else FIRST_MS) * MS
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


def test_a_long_first_communication_is_no_error_of_the_packets(tmp_path: Path) -> None:
    begins, _ = write_job(tmp_path / "job", with_ddp=True)
    found = check_against_steps(open_job(tmp_path / "job"), begins + MS)
    assert found is not None
    assert (found.iterations, found.missed, found.extra) == (ITERATIONS, 0, 0)
    assert found.log_s == pytest.approx((begins[-1] - begins[0]) / 1e9 / (ITERATIONS - 1))
    assert found.period_error == pytest.approx(0, abs=1e-9)
    assert found.boundary_median_s == pytest.approx(0.001)


def test_without_ddp_s_log_the_ends_of_steps_are_what_there_is(tmp_path: Path) -> None:
    begins, ends = write_job(tmp_path / "job", with_ddp=False)
    found = check_against_steps(open_job(tmp_path / "job"), begins)
    assert found is not None
    assert found.boundary_median_s is None
    assert found.iterations == ITERATIONS - 1  # the first iteration has no end of a step before it
    assert found.log_s == pytest.approx((ends[-1] - ends[1]) / 1e9 / (found.iterations - 1))
