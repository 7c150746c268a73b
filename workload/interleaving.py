"""Interleaves jobs that share links: their circles, the compatibility score, and time shifts.

The method is that of CASSINI (Rajasekaran, Ghobadi and Akella, NSDI 2024). The demand of a job repeats with each
iteration, so that it is drawn around a circle whose perimeter is the time of an iteration. Jobs that share a link are
drawn around one circle whose perimeter is the least common multiple of their periods. A job that starts later is a
circle that is turned.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ringtap.core.errors import UsageError
from ringtap.core.units import counted, format_duration
from ringtap.workload.lowering import Algorithms, bytes_of
from ringtap.workload.message_graph import Integers
from ringtap.workload.simulate_under_cross_traffic import LoadSimulator
from ringtap.workload.simulation import Numbers
from ringtap.workload.topologies import star
from ringtap.workload.workload import Workload, carried_out_as, collectives_of, message_pairs, size_of, split_bytes

MAX_SLOTS = 5040  # of a circle; many numbers of turns divide it
MAX_PERIOD_ERROR = 0.05  # of a quantised period
MEASURED_ERROR = 0.05  # of a measured period, from which jobs are told apart
MAX_TURNS = 200  # of a job around the circle, when periods are quantised
STARTS, ROUNDS = 16, 20  # of coordinate descent
MAX_COMBINATIONS = 2000  # of shifts of all jobs but the first and the last, up to which a search is exhaustive
MAX_WORK = 100_000_000  # slots that a search adds up, about
_BLOCK = 1 << 16  # slots at once in memory
_SAME = 1e-9  # of a link's capacity over the circle: excesses that differ by less are the same


class Phase(NamedTuple):
    """A time in which a job communicates, within its period, and its rate."""

    begin_ns: int
    end_ns: int
    rate_bps: float


@dataclass(frozen=True)
class PeriodicJob:
    """The communication of a job in an iteration.

    Attributes:
        name: what the user calls it.
        period_ns: time of an iteration.
        phases: times in which it communicates, in order and without overlaps.
    """

    name: str
    period_ns: int
    phases: tuple[Phase, ...]

    @property
    def bits(self) -> float:
        """Bits of an iteration."""
        return sum((phase.end_ns - phase.begin_ns) / 1e9 * phase.rate_bps for phase in self.phases)

    def rates_bps(self, slots: int) -> Numbers:
        """Return the mean rate in each of the slots of a period, shape (slots,)."""
        edges_ns, sent = [0], [0.0]
        for phase in self.phases:
            edges_ns += [phase.begin_ns, phase.end_ns]
            sent += [sent[-1], sent[-1] + (phase.end_ns - phase.begin_ns) * phase.rate_bps]
        until = np.interp(np.linspace(0, self.period_ns, slots + 1), edges_ns, sent)
        mean: Numbers = np.diff(until) * slots / self.period_ns
        return mean


def simulated_job(
    workload: Workload, name: str, algorithms: Algorithms, rate_bps: float, ranks_per_host: int
) -> PeriodicJob:
    """Return the communication of a workload at the link to rank 0's host.

    The workload is simulated alone on a star, and its last iteration counts. A collective's bytes count as spread
    evenly over the time from its last rank's begin to its end. Collectives and messages that overlap are one phase,
    with their mean rate.

    Args:
        workload: what ranks compute and send.
        name: name of the job.
        algorithms: algorithms of collectives.
        rate_bps: rate of the links.
        ranks_per_host: ranks at each host.

    Raises:
        UsageError: it cannot be simulated, or sends nothing through the link.
    """
    network = star(-(-(workload.ranks + algorithms.others) // ranks_per_host), rate_bps)
    found = LoadSimulator(workload, network, algorithms, 0.0, ranks_per_host, network.hosts).under_share(0).simulated
    spans = [{span.node.id: span for span in trace} for trace in found.spans]
    first_s, last_s = found.end_s[-2:].max(axis=1)
    period_ns = max(round(1e9 * (last_s - first_s)), 1)
    received: list[tuple[int, int, float]] = []

    def receive(parts: list[tuple[int, int]], size_bytes: float) -> None:
        """Add bytes that the host receives in a node, given by its ranks and ids."""
        begin_s = max(spans[rank][node].begin_s for rank, node in parts)
        end_s = max(spans[rank][node].end_s for rank, node in parts if rank < ranks_per_host)
        begin_ns, end_ns = (round(1e9 * (time_s - first_s)) for time_s in (begin_s, end_s))
        length_ns = min(max(end_ns - begin_ns, 1), period_ns)
        begin_ns %= period_ns
        left_ns = min(length_ns, period_ns - begin_ns)
        received.append((begin_ns, begin_ns + left_ns, size_bytes * left_ns / length_ns))
        if left_ns < length_ns:
            received.append((0, length_ns - left_ns, size_bytes * (length_ns - left_ns) / length_ns))

    others = range(workload.ranks, workload.ranks + algorithms.others)
    for parts in (parts for parts in collectives_of(workload) if len(parts) > 1):
        ends, count = np.array([*(rank for rank, _ in parts), *others]) // ranks_per_host, len(parts)
        graph = algorithms.graph(carried_out_as(parts[0][1]), count, count << 20, split_bytes(parts))
        into = (ends[graph.destination] == 0) & (ends[graph.source] != 0)
        share = graph.size_bytes[into].sum() / graph.chunk_bytes.sum()
        if size_bytes := share * bytes_of(parts):
            receive([(rank, node.id) for rank, node in parts], size_bytes)
    for (source, one), (destination, other) in message_pairs(workload):
        if destination < ranks_per_host <= source and size_of(one):
            receive([(source, one.id), (destination, other.id)], size_of(one))
    if not received:
        raise UsageError(f"{name} sends nothing to the host of rank 0: it may share any link, leave it out")
    return PeriodicJob(name, period_ns, tuple(_merged(received)))


def _merged(received: list[tuple[int, int, float]]) -> Iterator[Phase]:
    """Yield phases of intervals with their bytes; those that overlap are one."""
    received.sort()
    begin_ns, end_ns, size_bytes = received[0]
    for begin, end, size in received[1:]:
        if begin >= end_ns:
            yield Phase(begin_ns, end_ns, 8e9 * size_bytes / (end_ns - begin_ns))
            begin_ns, end_ns, size_bytes = begin, end, size
        else:
            end_ns, size_bytes = max(end_ns, end), size_bytes + size
    yield Phase(begin_ns, end_ns, 8e9 * size_bytes / (end_ns - begin_ns))


@dataclass(frozen=True)
class Circles:
    """Jobs on slots of one length.

    Attributes:
        quantum_s: length of a slot.
        rates_bps: rate of each job in the slots of its period, shape (slots of the period,).
        period_errors: quantised period of each job over its real one, less 1.
    """

    quantum_s: float
    rates_bps: tuple[Numbers, ...]
    period_errors: tuple[float, ...]

    @property
    def slots(self) -> int:
        """Slots of the circle of all jobs."""
        return math.lcm(*map(len, self.rates_bps))


def draw_circles(jobs: Sequence[PeriodicJob], known_to: float = 0.0) -> Circles:
    """Divide the circle of jobs into slots.

    If the least common multiple of the periods has at most `MAX_SLOTS` slots of the greatest common divisor of all
    times, the slots are exact. Otherwise periods are quantised: each job turns a whole number of times on the circle,
    such that the largest error of a period, and half a slot over the shortest period, are small. Periods that were
    measured are known to a few percent only: of the circles that fit within ``known_to``, that with the fewest turns
    counts, so that jobs whose measured periods hardly differ turn alike.

    Args:
        jobs: the jobs.
        known_to: error of the periods, as a share of them.

    Raises:
        UsageError: the periods are too different for one circle.
    """
    periods_ns = [job.period_ns for job in jobs]
    quantum_ns = math.gcd(*periods_ns, *(ns for job in jobs for phase in job.phases for ns in phase[:2]))
    if math.lcm(*periods_ns) // quantum_ns <= MAX_SLOTS:
        rates = tuple(job.rates_bps(job.period_ns // quantum_ns) for job in jobs)
        return Circles(quantum_ns / 1e9, rates, (0.0,) * len(jobs))
    least, slots, turns = (math.inf, 0), 0, [0]
    for base_ns, count in itertools.product(sorted(set(periods_ns)), range(1, MAX_TURNS + 1)):
        some = [max(round(count * base_ns / period_ns), 1) for period_ns in periods_ns]
        common = math.lcm(*some)
        if math.gcd(*some) > 1 or common > MAX_SLOTS:
            continue
        perimeters_ns = [number * period_ns for number, period_ns in zip(some, periods_ns, strict=True)]
        period_error = (max(perimeters_ns) - min(perimeters_ns)) / (max(perimeters_ns) + min(perimeters_ns))
        fine = MAX_SLOTS // common * common
        error = max(period_error, max(some) / (2 * fine))
        if (max(error, known_to), sum(some)) < least:
            least, slots, turns = (max(error, known_to), sum(some)), fine, some
    if least[0] > MAX_PERIOD_ERROR:
        raise UsageError(
            f"periods of {format_duration(min(periods_ns) / 1e9)} to {format_duration(max(periods_ns) / 1e9)} do not "
            f"fit on one circle of {MAX_SLOTS:,} slots within {MAX_PERIOD_ERROR:.0%}: leave out a job, such as that "
            "with the shortest one"
        )
    perimeters_ns = [number * period_ns for number, period_ns in zip(turns, periods_ns, strict=True)]
    # the perimeter with the smallest largest error
    perimeter_ns = 2 / (1 / max(perimeters_ns) + 1 / min(perimeters_ns))
    rates = tuple(job.rates_bps(slots // number) for job, number in zip(jobs, turns, strict=True))
    errors = tuple(perimeter_ns / real_ns - 1 for real_ns in perimeters_ns)
    return Circles(perimeter_ns / slots / 1e9, rates, errors)


@dataclass(frozen=True)
class Interleaving:
    """Shifts of the jobs of a link.

    Attributes:
        shifts: slots by which each job starts later; the first job does not.
        score: compatibility score with them: 1 less the mean excess of the demand over the capacity, in capacities.
        score_unshifted: score without shifts.
        search: how they were found.
        optimal: True if no others on the same slots have a higher score.
    """

    shifts: tuple[int, ...]
    score: float
    score_unshifted: float
    search: str
    optimal: bool


def interleave(rates_bps: Sequence[Numbers], capacity_bps: float) -> Interleaving:
    """Search for the shifts with the highest score, of several the smallest ones.

    The score is piecewise linear in each shift, so that only those shifts are tried at which a begin or an end of a
    job meets one of the others. The shifts of all jobs but the first and the last are tried exhaustively, unless there
    are too many combinations. Then coordinate descent begins at several places.

    Args:
        rates_bps: rate of each job in the slots of its period, shape (slots of the period,).
        capacity_bps: capacity of the link.
    """
    slots = math.lcm(*map(len, rates_bps))
    search = _Search([np.tile(rate, slots // len(rate)) for rate in rates_bps], list(map(len, rates_bps)), capacity_bps)
    unshifted = search.excess((0,) * len(rates_bps))
    if len(rates_bps) < 2 or search.is_least(unshifted):
        excess, shifts, how, optimal = unshifted, (0,) * len(rates_bps), "not needed", True
    elif search.combinations <= MAX_COMBINATIONS and search.most_work <= MAX_WORK:
        (excess, shifts), how, optimal = search.exhaustive(), "exhaustive", True
    else:
        (excess, shifts), starts = search.descent()
        how, optimal = f"coordinate descent from {counted(starts, 'start')}", search.is_least(excess)
    return Interleaving(
        shifts, 1 - excess / (slots * capacity_bps), 1 - unshifted / (slots * capacity_bps), how, optimal
    )


def score_with(shifts: Sequence[int], rates_bps: Sequence[Numbers], capacity_bps: float) -> float:
    """Return the compatibility score of jobs on a link with given shifts, as in `interleave`."""
    slots = math.lcm(*map(len, rates_bps))
    demand = sum(
        np.roll(np.tile(rate, slots // len(rate)), shift) for rate, shift in zip(rates_bps, shifts, strict=True)
    )
    return 1 - float(np.maximum(demand - capacity_bps, 0).sum()) / (slots * capacity_bps)


def slowdown(circles: Circles, shifts: Sequence[int], capacity_bps: float) -> float:
    """Return the factor by which the iterations of jobs on a link become longer, at least 1, in a fluid model.

    What exceeds the capacity waits, and is sent when there is room. A job begins its next iteration when nothing waits
    any more at the end of its iteration alone. All periods become longer by the same factor, so that shifts are kept.

    Args:
        circles: the jobs.
        shifts: slots by which each job starts later.
        capacity_bps: capacity of the link.
    """
    lengths = list(map(len, circles.rates_bps))
    slots = circles.slots
    turns = [slots // length for length in lengths]
    bits = sum(float(rate.sum()) * turn for rate, turn in zip(circles.rates_bps, turns, strict=True))
    factor = max(1.0, bits / (capacity_bps * slots))
    for _ in range(ROUNDS):
        longer = math.ceil(factor * slots / math.lcm(*turns)) * math.lcm(*turns)
        demand, ends = np.zeros(longer), []
        for rate, turn, shift in zip(circles.rates_bps, turns, shifts, strict=True):
            period = longer // turn
            demand += np.roll(np.tile(np.append(rate, np.zeros(period - len(rate))), turn), shift)
            ends.append((shift + len(rate) - 1 + period * np.arange(turn)) % longer)
        excess = np.cumsum(np.tile(demand - capacity_bps, 2))
        waiting = (excess - np.minimum(np.minimum.accumulate(excess), 0))[longer:] / capacity_bps
        needed = max(1 + float(waiting[end].max()) / length for end, length in zip(ends, lengths, strict=True))
        if needed <= longer / slots:
            break
        factor = needed
    return factor


class _Search:
    """Search for shifts with the least excess, the sum over the slots of what demand is above the capacity.

    Args:
        rates_bps: rate of each job in the slots of the circle, shape (slots,).
        periods: slots of the period of each job.
        capacity_bps: capacity of the link.
    """

    def __init__(self, rates_bps: list[Numbers], periods: list[int], capacity_bps: float) -> None:
        self._rates, self._periods, self._capacity = rates_bps, periods, capacity_bps
        self._slots = math.lcm(*periods)
        self._same = _SAME * capacity_bps * self._slots
        # whole periods of the jobs before change nothing for them: other shifts of a job repeat one of these
        self._ranges = [math.gcd(each, math.lcm(*periods[:job])) if job else 1 for job, each in enumerate(periods)]
        self._least = max(float(sum(rate.sum() for rate in rates_bps)) - capacity_bps * self._slots, 0.0)
        self.combinations = math.prod(self._ranges[:-1])
        self.most_work = math.prod(self._ranges) * self._slots

    def is_least(self, excess: float) -> bool:
        """Return True if no shifts can have less excess than this."""
        return excess <= self._least + self._same

    def excess(self, shifts: Sequence[int]) -> float:
        return float(np.maximum(self._sum(shifts) - self._capacity, 0).sum())

    def exhaustive(self) -> tuple[float, tuple[int, ...]]:
        """Return the least excess, and its first shifts."""
        best: tuple[float, tuple[int, ...]] = math.inf, ()
        for before in itertools.product(*map(range, self._ranges[:-1])):
            excess, last, _ = self._best_shift(len(before), self._sum(before), self._ranges[-1])
            if excess < best[0] - self._same:
                best = excess, (*before, last)
            if self.is_least(best[0]):
                break
        return best

    def descent(self) -> tuple[tuple[float, tuple[int, ...]], int]:
        """Return the least excess that was found and its shifts, and the number of starts."""
        random = np.random.default_rng(0)
        best: tuple[float, tuple[int, ...]] = math.inf, ()
        work, start = 0, 0
        shifts = [0] * len(self._periods)
        while start < STARTS and work < MAX_WORK and not self.is_least(best[0]):
            excess, before = self.excess(shifts), math.inf
            for _ in range(ROUNDS):
                if excess >= before - self._same or work >= MAX_WORK:
                    break
                before = excess
                for job in range(1, len(shifts)):
                    others = self._sum(shifts) - np.roll(self._rates[job], shifts[job])
                    excess, shifts[job], slots = self._best_shift(job, others, self._periods[job])
                    work += slots
            if excess < best[0] - self._same:
                best = excess, tuple(shifts)
            shifts = [0, *(int(random.integers(period)) for period in self._periods[1:])]
            start += 1
        return best, start

    def _sum(self, shifts: Sequence[int]) -> Numbers:
        total = np.zeros(self._slots)
        for rate, shift in zip(self._rates, shifts, strict=False):
            total += np.roll(rate, shift)
        return total

    def _best_shift(self, job: int, others: Numbers, shifts: int) -> tuple[float, int, int]:
        """Return the least excess over the first shifts of a job, the first one with it, and the slots added up."""
        period = self._periods[job]
        rate = self._rates[job][:period]
        tried = _meetings(others, rate, shifts)
        turn = np.arange(period)
        others = others.reshape(1, -1, period) - self._capacity
        excess = np.empty(len(tried))
        step = max(_BLOCK // self._slots, 1)
        for first in range(0, len(tried), step):
            some = tried[first : first + step]
            turned = rate[(turn - some[:, None]) % period]
            excess[first : first + step] = np.maximum(turned[:, None, :] + others, 0).sum(axis=(1, 2))
        place = int(np.argmax(excess <= excess.min() + self._same))
        return float(excess[place]), int(tried[place]), len(tried) * self._slots


def _meetings(others: Numbers, rate: Numbers, shifts: int) -> Integers:
    """Return the shifts, modulo a number, at which a step of a rate meets a step of others, and 0."""
    steps = [np.unique(np.flatnonzero(each != np.roll(each, 1)) % shifts) for each in (others, rate)]
    if len(steps[0]) * len(steps[1]) >= shifts:
        return np.arange(shifts)
    return np.unique(np.append((steps[0][:, None] - steps[1]) % shifts, 0))


@dataclass(frozen=True)
class InterleavedLink:
    """A link, its capacity, and the numbers of the jobs that use it in ascending order."""

    name: str
    capacity_bps: float
    jobs: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """Time shifts of jobs on links.

    Attributes:
        shifts: slots by which each job starts later, below those of its period.
        links: the links.
        interleavings: shifts of the jobs of each link among themselves, and scores.
    """

    shifts: tuple[int, ...]
    links: tuple[InterleavedLink, ...]
    interleavings: tuple[Interleaving, ...]

    @property
    def score(self) -> float:
        """Mean score of the links."""
        return sum(found.score for found in self.interleavings) / len(self.links)

    @property
    def score_unshifted(self) -> float:
        """Mean score of the links without shifts."""
        return sum(found.score_unshifted for found in self.interleavings) / len(self.links)


def schedule(circles: Circles, links: Sequence[InterleavedLink]) -> Schedule:
    """Return the shifts with the highest score on each link, and one shift for each job that has the same effect.

    Raises:
        UsageError: jobs and links form a loop.
    """
    edges = affinity_edges(links, len(circles.rates_bps))
    found = [interleave([circles.rates_bps[job] for job in link.jobs], link.capacity_bps) for link in links]
    return Schedule(time_shifts(circles, links, found, edges), tuple(links), tuple(found))


def worst_shifts(circles: Circles, links: Sequence[InterleavedLink]) -> tuple[int, ...]:
    """Return shifts with the lowest scores, of several the smallest: job by job, while those before it keep theirs."""
    shifts, rates = [0], circles.rates_bps

    def score(job: int, shift: int) -> float:
        """Return the sum of the scores of a job's links, among the jobs up to it."""
        found = 0.0
        for link in (link for link in links if job in link.jobs):
            before = [one for one in link.jobs if one < job]
            placed = [shifts[one] for one in before], [rates[one] for one in before]
            found += score_with([*placed[0], shift], [*placed[1], rates[job]], link.capacity_bps)
        return found

    for job in range(1, len(rates)):
        scores = [score(job, shift) for shift in range(len(rates[job]))]
        shifts.append(next(shift for shift, each in enumerate(scores) if each <= min(scores) + _SAME))
    return tuple(shifts)


class Edge(NamedTuple):
    """Two jobs that are neighbours through a link; the first one has its shift before the second."""

    job: int
    link: int
    other: int


def affinity_edges(links: Sequence[InterleavedLink], jobs: int) -> list[Edge]:
    """Return the edges of the affinity graph, in which a job is at each link that it shares, from the first job on.

    Raises:
        UsageError: the graph has a loop, for which a job could need two shifts.
    """
    before: dict[int, Edge | None] = {}
    edges = []
    for root in range(jobs):
        if root in before:
            continue
        before[root] = None
        queue = [root]
        for job in queue:
            came = before[job]
            for number, link in enumerate(links):
                if job not in link.jobs or (came is not None and came.link == number):
                    continue
                for other in link.jobs:
                    edge = Edge(job, number, other)
                    if other in before and other != job:
                        raise UsageError(
                            f"the affinity graph has the loop {_loop(before, edge, links)}: shifts are unique without "
                            "loops only, place one of these jobs on other links"
                        )
                    if other != job:
                        before[other] = edge
                        edges.append(edge)
                        queue.append(other)
    return edges


def _loop(before: dict[int, Edge | None], last: Edge, links: Sequence[InterleavedLink]) -> str:
    """Return the names of the loop that an edge closes."""

    def way(job: int) -> list[str]:
        edge = before[job]
        return [f"job {job}", *([] if edge is None else [links[edge.link].name, *way(edge.job)])]

    one, other = way(last.job), way(last.other)
    while len(one) > 1 and len(other) > 1 and one[-2:] == other[-2:]:
        one.pop()
        other.pop()
    return " - ".join([*reversed(one), links[last.link].name, *other])


def time_shifts(
    circles: Circles, links: Sequence[InterleavedLink], interleavings: Sequence[Interleaving], edges: Sequence[Edge]
) -> tuple[int, ...]:
    """Return the shift of each job that gives jobs the same shifts on each link: t_k = (t_j - w(j,l) + w(l,k)) mod T_k.

    Args:
        circles: the jobs.
        links: the links.
        interleavings: shifts on each link.
        edges: edges of the affinity graph.
    """
    shifts = [0] * len(circles.rates_bps)
    for job, number, other in edges:
        on_link = dict(zip(links[number].jobs, interleavings[number].shifts, strict=True))
        shifts[other] = (shifts[job] - on_link[job] + on_link[other]) % len(circles.rates_bps[other])
    return tuple(shifts)


def place(circles: Circles, capacity_bps: float, count: int) -> Schedule:
    """Return the schedule with the highest mean score of all placements of jobs on equal links.

    Of placements with the same score, the one with the highest score without shifts counts.

    Args:
        circles: the jobs.
        capacity_bps: capacity of each link.
        count: number of links.
    """
    known: dict[tuple[int, ...], Interleaving] = {}
    best: tuple[tuple[float, float], list[tuple[int, ...]]] | None = None
    for groups in _partitions(len(circles.rates_bps), count):
        for jobs in groups:
            if jobs not in known:
                known[jobs] = interleave([circles.rates_bps[job] for job in jobs], capacity_bps)
        scores = [[getattr(known[jobs], name) for jobs in groups] for name in ("score", "score_unshifted")]
        key = round(sum(scores[0]) / count, 9), round(sum(scores[1]) / count, 9)
        if best is None or key > best[0]:
            best = key, groups
    assert best is not None
    links = tuple(InterleavedLink(f"link {number}", capacity_bps, jobs) for number, jobs in enumerate(best[1]))
    found = tuple(known[link.jobs] for link in links)
    return Schedule(time_shifts(circles, links, found, affinity_edges(links, len(circles.rates_bps))), links, found)


def _partitions(jobs: int, count: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield each way to put jobs on equal links; links are empty only if there are fewer jobs, as jobs add no score."""
    for rest in itertools.product(range(count), repeat=jobs - 1):
        numbers = (0, *rest)
        in_order = all(number <= max(numbers[:job]) + 1 for job, number in enumerate(numbers) if job)
        if in_order and len(set(numbers)) == min(count, jobs):
            yield [tuple(job for job in range(jobs) if numbers[job] == link) for link in range(count)]
