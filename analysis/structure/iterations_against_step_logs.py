"""Compares iterations found in packets with the step logs of the same run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringtap.analysis.job.iterations_of_ranks import logged_passes
from ringtap.analysis.job.run import Job
from ringtap.analysis.runs.group_steps_into_iterations import process_marks
from ringtap.analysis.runs.run import aligned

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepCheck:
    """Errors of iterations found in packets against the step logs, on the reference node's clock.

    Attributes:
        iterations: iterations compared: those with a boundary by packets, except the first of the run, which the ranks
            begin at different times.
        missed: iterations of the log, between the first and the last of these, without a boundary by packets.
        extra: boundaries beyond one per iteration.
        log_s: mean iteration time by the logs over the same iterations: between starts of communication by DDP's own
            log; without it, between ends of steps.
        packets_s: mean time between boundaries by packets over the same iterations.
        period_error: ``packets_s`` over ``log_s``, less 1.
        iteration_error_s: median of the absolute differences of single iterations: against the starts of communication
            by DDP's own log; without it, against the ends of steps.
        boundary_median_s: median of boundary minus start of communication by DDP's own log; None without such logs.
        boundary_p95_s: 95th percentile of the absolute value of this difference; None without such logs.
        clock_error_s: largest clock error of the nodes; None if one is not known.
    """

    iterations: int
    missed: int
    extra: int
    log_s: float
    packets_s: float
    period_error: float
    iteration_error_s: float
    boundary_median_s: float | None
    boundary_p95_s: float | None
    clock_error_s: float | None


def check_against_steps(job: Job, boundaries_ns: Integers) -> StepCheck | None:
    """Compare boundaries by packets with a run's step logs; None if the logs have fewer than two common iterations.

    Args:
        job: the run.
        boundaries_ns: starts of communication by packets, ascending, on the reference node's clock.
    """
    table = job.logs.work.iterations
    if len(table) < 2:
        return None
    ends = table["end_ns"].to_numpy(np.int64)
    iterations, begins = _communication_begins(job)
    if len(begins) > 1:
        # a rank may begin before the slowest one has ended the previous step
        near = np.abs(begins[None, :] - boundaries_ns[:, None]).argmin(axis=1)
        iteration, logged = iterations[near], begins[near]
    else:
        iteration = np.searchsorted(ends, boundaries_ns)
        logged = ends[np.minimum(iteration, len(ends) - 1)]
    inside = (iteration > 0) & (iteration < len(ends)) & (boundaries_ns >= int(table["start_ns"].iloc[0]))
    iteration, logged, boundaries = iteration[inside], logged[inside], boundaries_ns[inside]
    used, first = np.unique(iteration, return_index=True)
    if len(used) < 2:
        return None
    at, logged = boundaries[first], logged[first]
    steps = int(used[-1] - used[0])
    log_s = float(logged[-1] - logged[0]) / 1e9 / steps
    packets_s = float(at[-1] - at[0]) / 1e9 / max(len(iteration) - 1, 1)
    median_s = p95_s = None
    if len(begins) > 1:
        lag = (at - logged) / 1e9
        median_s, p95_s = float(np.median(lag)), float(np.quantile(np.abs(lag), 0.95))
    errors = np.abs(np.diff(at) - np.diff(logged))[np.diff(used) == 1] / 1e9
    clocks = [node.clock.error_ns for node in job.logs.nodes.values()]
    known = [error for error in clocks if error is not None]
    return StepCheck(
        len(used),
        steps + 1 - len(used),
        len(iteration) - len(used),
        log_s,
        packets_s,
        packets_s / log_s - 1,
        float(np.median(errors)) if len(errors) else 0.0,
        median_s,
        p95_s,
        max(known) / 1e9 if known and len(known) == len(clocks) else None,
    )


def _communication_begins(job: Job) -> tuple[Integers, Integers]:
    """Return the numbers of iterations, and the times at which their first rank began to communicate, by DDP's log."""
    rows = job.logs.work.rank_iterations.sort_values("end_ns")
    found = [np.empty((0, 2), np.int64)]
    marks = process_marks(aligned(job.logs.run.steps, job.logs.nodes))[0]
    for process, passes in logged_passes(job.logs.run, marks).items():
        mine = rows[rows["process"] == process]
        ends, iterations = mine["end_ns"].to_numpy(np.int64), mine["iteration"].to_numpy(np.int64)
        begun = passes["synced"] & (passes["backward_end_ns"] > 0)  # on a GPU, work was queued at these times
        times = passes.loc[begun, "comm_start_ns"].to_numpy(np.int64)
        iteration = np.searchsorted(ends, times)
        known = iteration < len(ends)
        found.append(np.column_stack((iterations[iteration[known]], times[known])))
    pairs = np.concatenate(found)
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    first = np.unique(pairs[:, 0], return_index=True)[1]
    return pairs[first, 0], pairs[first, 1]
