"""Calculates the shares of jobs by a rule of a plan, and predicts their iterations with a fluid model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ringtap.agents.testbed.topology import JobShare
from ringtap.core.sweep_plans.jobs_that_share import CONGESTION_CONTROL, CRUX, MLTCP, PRIORITIES, WEIGHTS, SharingJob
from ringtap.workload import fluid_sharing_model
from ringtap.workload.crux_scheduling import gpu_intensity_flop_per_s, priority_levels
from ringtap.workload.interleaving import MEASURED_ERROR, PeriodicJob

GAP_SHARE = 0.5  # of a job's longest silence in an iteration alone: after this silence, an iteration begins


def gpu_intensities(
    jobs: Sequence[SharingJob], alone: Sequence[PeriodicJob], capacities_bps: Sequence[float]
) -> list[float]:
    """Return the GPU intensity of each job, in FLOP/s.

    Args:
        jobs: the jobs of the plan.
        alone: their communication as recorded alone.
        capacities_bps: capacity of the slowest link of each job.
    """
    return [
        gpu_intensity_flop_per_s(job.flop or 0.0, one, capacity_bps)
        for job, one, capacity_bps in zip(jobs, alone, capacities_bps, strict=True)
    ]


def shares_of(
    rule: str, jobs: Sequence[SharingJob], alone: Sequence[PeriodicJob], intensities: Sequence[float]
) -> list[JobShare]:
    """Return the share of each job by a rule, equal ones if there is no rule.

    Args:
        rule: one of `ringtap.core.sweep_plans.jobs_that_share.RULES`, or any other name of an offset.
        jobs: the jobs of the plan.
        alone: their communication as recorded alone.
        intensities: their GPU intensities, for `CRUX`.
    """
    if rule == WEIGHTS:
        return [JobShare(job.weight) for job in jobs]
    if rule == PRIORITIES:
        return [JobShare(priority=job.priority) for job in jobs]
    if rule == CRUX:
        return [JobShare(priority=level) for level in priority_levels(intensities, len(jobs))]
    if rule == CONGESTION_CONTROL:
        return [JobShare(congestion_control=job.congestion_control) for job in jobs]
    if rule == MLTCP:
        grows = JobShare(fluid_sharing_model.MLTCP_INTERCEPT, fluid_sharing_model.MLTCP_SLOPE)
        return [grows._replace(iteration_bytes=job.bits / 8, gap_s=GAP_SHARE * longest_silence_s(job)) for job in alone]
    return [JobShare()] * len(jobs)


def longest_silence_s(job: PeriodicJob) -> float:
    """Return the longest time without communication in the circle of a job's iteration."""
    begins_ns = [phase.begin_ns for phase in job.phases]
    ends_ns = [phase.end_ns for phase in job.phases]
    nexts_ns = [*begins_ns[1:], begins_ns[0] + job.period_ns]
    return max(begin - end for end, begin in zip(ends_ns, nexts_ns, strict=True)) / 1e9


def predicted_begins_s(
    alone: Sequence[PeriodicJob],
    shares: Sequence[JobShare],
    starts_s: Sequence[float],
    links: Sequence[fluid_sharing_model.SharedCapacity],
    until_s: float,
) -> list[list[float]]:
    """Return the begins of each job's iterations on links that they share, by `fluid_sharing_model.share_links`.

    Args:
        alone: communication of each job alone.
        shares: share of each job.
        starts_s: begin of the iteration of each job that runs at time 0.
        links: capacity and jobs of each link.
        until_s: end of the time, from 0, whose begins are returned.
    """
    first_s = min(starts_s)
    iterations = math.ceil((until_s - first_s) * 1e9 / min(job.period_ns for job in alone)) + 1
    claims = [fluid_sharing_model.Share(share.intercept, share.slope, share.priority) for share in shares]
    starts_s = [start_s - first_s for start_s in starts_s]
    runs = fluid_sharing_model.share_links(alone, claims, starts_s, links, iterations)
    return [[first_s + begin for begin in run.begin_s.tolist() if 0 <= first_s + begin <= until_s] for run in runs]


def mltcp_phases(alone: Sequence[PeriodicJob], starts_s: Sequence[float], iterations: int) -> list[float] | str:
    """Return the phase of the second of two equal jobs in the present and later iterations, by MLTCP's Shift(Δ).

    A phase is the time from the first job's begin to the second one's, as a share of the period; Δ ends at half of it,
    where the jobs are as far apart as they can be.

    Args:
        alone: communication of each job alone.
        starts_s: begin of the present iteration of each job.
        iterations: number of phases.

    Returns:
        The phases, or why there are none: the equation is for two jobs with the same period.
    """
    period_s = alone[0].period_ns / 1e9
    if len(alone) != 2:
        return f"MLTCP's equation is for two jobs, not for {len(alone)}"
    if (difference := abs(alone[1].period_ns / alone[0].period_ns - 1)) > MEASURED_ERROR:
        return (
            f"MLTCP's equation is for jobs whose iterations take the same time alone; here they differ "
            f"by {difference:.1%}, more than {MEASURED_ERROR:.0%}"
        )
    sending_s = sum(phase.end_ns - phase.begin_ns for phase in alone[0].phases) / 1e9
    offset_s = (starts_s[1] - starts_s[0]) % period_s
    if is_first := offset_s > period_s / 2:  # the second job's iteration is the one that is ahead
        offset_s = period_s - offset_s
    found = []
    for _ in range(iterations):
        found.append(1 - offset_s / period_s if is_first else offset_s / period_s)
        if offset_s < sending_s:
            offset_s = min(offset_s + fluid_sharing_model.mltcp_shift_s(offset_s, sending_s), period_s / 2)
    return found
