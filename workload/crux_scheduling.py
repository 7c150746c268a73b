"""Chooses paths and priorities of jobs by GPU intensity, with as many levels of priority as a network has.

The method is that of Crux (Cao et al., SIGCOMM 2024). Its correction factors for the overlap of computation and
communication are left out, so that a priority is the GPU intensity itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from ringtap.workload.fluid_sharing_model import Share, share_link
from ringtap.workload.interleaving import PeriodicJob


def gpu_intensity_flop_per_s(flop: float, job: PeriodicJob, capacity_bps: float) -> float:
    """Return the GPU intensity of a job on a link: FLOPs of an iteration over the time in which its bytes pass.

    This is Crux's equation 2, I = W / t.

    Args:
        flop: FLOPs of an iteration, of all its GPUs.
        job: the job; it sends in at least one phase.
        capacity_bps: capacity of the link.
    """
    return flop / (job.bits / capacity_bps)


def choose_paths(intensities: Sequence[float], jobs: Sequence[PeriodicJob], paths: int) -> list[int]:
    """Return the path of each job, from 0: in the order of GPU intensity, each takes the least congested one.

    Congestion is the mean rate of the jobs that have the path already (Crux's path selection, for equal paths).

    Args:
        intensities: GPU intensity of each job.
        jobs: the jobs.
        paths: parallel paths, such as the spines of a leaf-spine network.
    """
    found, loads_bps = [0] * len(jobs), [0.0] * paths
    for number in sorted(range(len(jobs)), key=lambda number: -intensities[number]):
        found[number] = loads_bps.index(min(loads_bps))
        loads_bps[found[number]] += jobs[number].bits / (jobs[number].period_ns / 1e9)
    return found


def random_paths_flop_per_s(
    jobs: Sequence[PeriodicJob],
    flop: Sequence[float],
    starts_s: Sequence[float],
    capacity_bps: float,
    iterations: int,
    paths: int,
) -> float:
    """Return the FLOPs per second of all jobs if each has a random path, as ECMP gives, and a fair share of it.

    Args:
        jobs: the jobs.
        flop: FLOPs of an iteration of each job.
        starts_s: begin of their first iterations.
        capacity_bps: capacity of each path.
        iterations: iterations of each job.
        paths: parallel paths.
    """
    expected = 0.0
    for size in range(1, len(jobs) + 1):
        # exactly these jobs meet on one of the paths
        probability = paths * (1 / paths) ** size * (1 - 1 / paths) ** (len(jobs) - size)
        for numbers in combinations(range(len(jobs)), size) if probability else ():
            met, starts = [jobs[number] for number in numbers], [starts_s[number] for number in numbers]
            runs = share_link(met, [Share()] * size, starts, capacity_bps, iterations)
            done = (flop[number] / float(run.iteration_s.mean()) for number, run in zip(numbers, runs, strict=True))
            expected += probability * sum(done)
    return expected


def priority_levels(intensities: Sequence[float], levels: int) -> list[int]:
    """Return the priority level of each job of a link, from 0 for the lowest.

    In the order of intensities, neighbours share a level such that the pairs of jobs in different levels, each with
    the intensity of its higher job, have the largest sum (Crux's compression, for jobs that all contend).

    Args:
        intensities: GPU intensity of each job.
        levels: levels that the network has.
    """
    order = sorted(range(len(intensities)), key=lambda job: -intensities[job])
    count = len(order)
    # in a level from first to last, each pair loses the intensity of its higher job
    loss = [
        [sum(intensities[order[job]] * (last - job) for job in range(first, last + 1)) for last in range(count)]
        for first in range(count)
    ]
    best = [[math.inf] * (count + 1) for _ in range(levels + 1)]
    begins = [[0] * (count + 1) for _ in range(levels + 1)]
    best[0][0] = 0.0
    for level in range(1, levels + 1):
        for end in range(count + 1):
            for first in range(end + 1):
                lost = best[level - 1][first] + (loss[first][end - 1] if first < end else 0.0)
                if lost < best[level][end]:
                    best[level][end], begins[level][end] = lost, first
    found, end = [0] * count, count
    for level in range(levels, 0, -1):
        first = begins[level][end]
        for place in range(first, end):
            found[order[place]] = levels - level
        end = first
    used = sorted(set(found))
    return [used.index(level) for level in found]
