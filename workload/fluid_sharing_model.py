"""Models jobs that share links without a schedule: their iterations under a rule that divides each capacity.

The jobs are fluids. A job alternates between gaps, in which it computes, and phases, in which it sends a number of
bytes at no more than its own rate. What delays a phase delays all that follows. While several jobs send, the rule
divides the capacity. Unequal shares let jobs slide apart until they communicate in turn (Rajasekaran et al., HotNets
2022); MLTCP makes them unequal by the bytes that a job has sent in its iteration (HotNets 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ringtap.workload.interleaving import PeriodicJob
from ringtap.workload.simulation import Numbers

MLTCP_SLOPE, MLTCP_INTERCEPT = 1.75, 0.25  # of F(r); MLTCP, section 3
_STEPS = 500  # in which a job sends the bytes of an iteration, where shares change with them
_DONE = 1e-12  # of an iteration's bytes or time: what is left of less is done


class Share(NamedTuple):
    """Claim of a job to the capacity of a link.

    Attributes:
        intercept: weight of its share when an iteration begins.
        slope: growth of the weight until all bytes of the iteration are sent.
        priority: jobs of a lower one get what those of a higher one leave.
    """

    intercept: float = 1.0
    slope: float = 0.0
    priority: int = 0


# of a link: its capacity in bit/s, and the numbers of those that share it
SharedCapacity = tuple[float, Sequence[int]]
MLTCP = Share(MLTCP_INTERCEPT, MLTCP_SLOPE)


@dataclass(frozen=True)
class SharedRun:
    """Iterations of a job on a shared link.

    Attributes:
        begin_s: begin of each iteration and end of the last one, shape (iterations + 1,).
        sent_s: time in which each iteration's bytes were sent, from the begin of its first phase to the end of its
            last one, shape (iterations,).
    """

    begin_s: Numbers
    sent_s: Numbers

    @property
    def iteration_s(self) -> Numbers:
        """Time of each iteration, shape (iterations,)."""
        times: Numbers = np.diff(self.begin_s)
        return times


def mltcp_shift_s(offset_s: float, sending_s: float, share: Share = MLTCP) -> float:
    """Return the shift of two equal jobs in an iteration, by MLTCP's equation for Shift(Δ).

    Args:
        offset_s: time by which the second job begins to send later, Δ.
        sending_s: time in which a job alone sends its bytes, aT.
        share: claim of both jobs.
    """
    slope, intercept = share.slope, share.intercept
    return slope * offset_s * (sending_s - offset_s) / (sending_s * intercept + slope * offset_s)


class _Runner:
    """State of a job: gaps in s, phases in bit, and what is left of the present one."""

    def __init__(self, job: PeriodicJob, share: Share, start_s: float) -> None:
        edges_ns = [0, *(ns for phase in job.phases for ns in phase[:2]), job.period_ns]
        lengths_s: list[float] = (np.diff(edges_ns) / 1e9).tolist()
        self.share, self.period_s = share, job.period_ns / 1e9
        self._rates_bps = [phase.rate_bps for phase in job.phases]
        # gap, phase, gap, … and a last gap
        self._gaps_s = lengths_s[::2]
        self._bits = [length * rate for length, rate in zip(lengths_s[1::2], self._rates_bps, strict=True)]
        self.total_bits = sum(self._bits)
        self.begin_s, self.sent_s = [start_s], list[float]()
        self._number, self.sends, self.left = 0, False, start_s + self._gaps_s[0]
        self._sent_bits, self._first_s = 0.0, 0.0

    @property
    def rate_bps(self) -> float:
        """Highest rate of the present phase."""
        return self._rates_bps[self._number]

    def weight(self, more_bits: float = 0.0) -> float:
        """Return the weight of its share after further bits."""
        sent = self._sent_bits + more_bits
        return self.share.intercept + self.share.slope * min(sent / self.total_bits, 1.0)

    def pass_by(self, now_s: float, amount: float) -> None:
        """Take seconds from a gap, or bits from a phase, that ends at a time; go on to the next part at its end."""
        self.left -= amount
        if self.sends:
            self._sent_bits += amount
        if self.left > _DONE * (self.total_bits if self.sends else self.period_s):
            return
        if self.sends:
            self._number += 1
            self.sends, self.left = False, self._gaps_s[self._number]
            if self._number == len(self._bits):
                self.sent_s.append(now_s - self._first_s)
            return
        if self._number == len(self._bits):
            self.begin_s.append(now_s)
            self._number, self._sent_bits, self.left = 0, 0.0, self._gaps_s[0]
            return
        if self._number == 0:
            self._first_s = now_s
        self.sends, self.left = True, self._bits[self._number]


def divide_links(
    links: Sequence[SharedCapacity],
    wanted_bps: Sequence[float],
    weights: Sequence[float],
    priorities: Sequence[int],
) -> list[float]:
    """Return the rate of each sender: by priority, then max-min fair by weight, and at most what it wants.

    The senders of a priority rise together, by their weights, until one has what it wants or a link of it is full.

    Args:
        links: capacity and senders of each link.
        wanted_bps: highest rate of each sender.
        weights: their weights.
        priorities: their priorities.
    """
    rates, left_bps = [0.0] * len(wanted_bps), [capacity_bps for capacity_bps, _ in links]
    for priority in sorted(set(priorities), reverse=True):
        open_ = {sender for sender, each in enumerate(priorities) if each == priority}
        while open_:
            # the level at which a sender or the senders of a link rise no further
            stops = [(wanted_bps[sender] / weights[sender], [sender]) for sender in open_]
            for (_, senders), left in zip(links, left_bps, strict=True):
                if risen := [sender for sender in senders if sender in open_]:
                    stops.append((max(left, 0.0) / sum(weights[sender] for sender in risen), risen))
            level, stopped = min(stops)
            for sender in stopped:
                rates[sender] = level * weights[sender]
                for number, (_, senders) in enumerate(links):
                    left_bps[number] -= rates[sender] if sender in senders else 0.0
            open_ -= set(stopped)
    return rates


def share_link(
    jobs: Sequence[PeriodicJob],
    shares: Sequence[Share],
    starts_s: Sequence[float],
    capacity_bps: float,
    iterations: int,
) -> list[SharedRun]:
    """Run jobs on a link, as `share_links` does on several."""
    return share_links(jobs, shares, starts_s, [(capacity_bps, range(len(jobs)))], iterations)


def share_links(
    jobs: Sequence[PeriodicJob],
    shares: Sequence[Share],
    starts_s: Sequence[float],
    links: Sequence[SharedCapacity],
    iterations: int,
) -> list[SharedRun]:
    """Run jobs on links until each has ended a number of iterations.

    Args:
        jobs: the jobs; each sends in at least one phase, through all its links at the same time.
        shares: their claims to the capacity.
        starts_s: begin of their first iterations.
        links: capacity and jobs of each link.
        iterations: iterations of each job.
    """

    def rates_of(senders: Sequence[_Runner], weights: Sequence[float]) -> list[float]:
        place = {id(runner): number for number, runner in enumerate(senders)}
        used = [
            (capacity_bps, [place[id(runners[job])] for job in members if id(runners[job]) in place])
            for capacity_bps, members in links
        ]
        wanted, priorities = [one.rate_bps for one in senders], [one.share.priority for one in senders]
        return divide_links(used, wanted, weights, priorities)

    runners = [_Runner(job, share, start_s) for job, share, start_s in zip(jobs, shares, starts_s, strict=True)]
    now_s = 0.0
    while any(len(runner.begin_s) <= iterations for runner in runners):
        senders = [runner for runner in runners if runner.sends]
        rates = rates_of(senders, [one.weight() for one in senders])
        step_s = _step_s(runners, senders, rates)
        if len(senders) > 1 and any(one.share.slope for one in senders):
            # the midpoint method: weights as they are after half the step
            middle = [one.weight(rate * step_s / 2) for one, rate in zip(senders, rates, strict=True)]
            rates = rates_of(senders, middle)
            step_s = min(step_s, _step_s(runners, senders, rates))
        now_s += step_s
        speeds = dict(zip(map(id, senders), rates, strict=True))
        for runner in runners:
            runner.pass_by(now_s, step_s * speeds.get(id(runner), 0.0) if runner.sends else step_s)
    return [
        SharedRun(np.array(runner.begin_s[: iterations + 1]), np.array(runner.sent_s[:iterations]))
        for runner in runners
    ]


def share_paths(
    jobs: Sequence[PeriodicJob],
    paths: Sequence[int],
    shares: Sequence[Share],
    starts_s: Sequence[float],
    capacity_bps: float,
    iterations: int,
) -> list[SharedRun]:
    """Run jobs on equal paths, each with those that have the same one, as `share_link` does on a link."""
    found: dict[int, SharedRun] = {}
    for path in set(paths):
        numbers = [number for number, own in enumerate(paths) if own == path]
        met, claims = [jobs[number] for number in numbers], [shares[number] for number in numbers]
        runs = share_link(met, claims, [starts_s[number] for number in numbers], capacity_bps, iterations)
        found |= dict(zip(numbers, runs, strict=True))
    return [found[number] for number in range(len(jobs))]


def _step_s(runners: Sequence[_Runner], senders: Sequence[_Runner], rates_bps: Sequence[float]) -> float:
    """Return the time until the first gap or phase ends, or until shares have changed a little."""
    gaps_s = [runner.left for runner in runners if not runner.sends]
    phases_s = [one.left / rate for one, rate in zip(senders, rates_bps, strict=True) if rate]
    steps_s = [
        one.total_bits / _STEPS / rate
        for one, rate in zip(senders, rates_bps, strict=True)
        if rate and one.share.slope and len(senders) > 1
    ]
    return min([*gaps_s, *phases_s, *steps_s])
