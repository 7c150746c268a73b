"""Finds out why a running job is slow now, from its last iterations, by the rules of `ringtap.analysis.job.diagnosis`.

A cause is named while its iterations go on, with its cost since they began. Only this module of the live view needs
NumPy and SciPy.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from ringtap.analysis.job import iteration_budget
from ringtap.analysis.job.diagnosis import (
    LIMITED_SHARE,
    MIN_ITERATIONS,
    Evidence,
    FlowSum,
    FullBuffers,
    NetworkRecords,
    cause_of,
    described,
    nothing_known,
    timed_in,
    why_no_parts,
)
from ringtap.analysis.job.iteration_budget import CAUSES, NETWORK_STALL, SLOW_RANK, WHOLE_STALL, RankTimes
from ringtap.analysis.job.verdict import is_open, named, verdict
from ringtap.analysis.live.follow_run import RunFollower
from ringtap.analysis.live.iterations import RankSteps, StepEnd, TimedPass
from ringtap.analysis.live.recent_traffic import BusyTimes, FlowEnds, FlowGrowth, RecentTraffic
from ringtap.analysis.live.snapshot import Diagnosis
from ringtap.core.counter_growth import MAX_UNCERTAIN_SHARE
from ringtap.core.run_completeness import missing_ranks
from ringtap.core.run_directory_schema import RUN_DELAY

# of iterations, and of iterations times ranks; as many of the last ones are looked at
_MAX_ITERATIONS, _MAX_CELLS = 300, 60_000
# DDP times the first iterations in buckets that it then changes
_WARM_UP = 10
# a cause goes on once it is in so many iterations, or in more if nothing says whose stalls it is, and until it was in
# none for so long and for so many iterations
_GOES_ON, _GOES_ON_UNEXPLAINED, _OVER_S, _OVER = 2, 3, 5.0, 10
# full buffers count over so many iterations, as a counter of another sample may lag behind
_AROUND = 3
# the interval of when a cause began is shown if it is this long
_LEAST_SHOWN_S = 2.0
# whether a slow rank waits for a processor is told by samples of this time, and waited for no longer than this
_LEAST_SAMPLED_NS, _MAX_WAIT_NS = 10**9, 3 * 10**9
# a node's samples are in its logs this long after they were taken, at the latest
_WRITTEN_S = 0.2


class _Window(NamedTuple):
    """The last iterations of which all times of all ranks are known.

    Attributes:
        begin_ns, end_ns: their beginnings and ends on the reference clock.
        times: the times of the ranks.
        why_whole: why only their length is known; empty if more is.
    """

    begin_ns: npt.NDArray[np.int64]
    end_ns: npt.NDArray[np.int64]
    times: RankTimes
    why_whole: str = ""

    def chosen(self, rows: npt.NDArray[np.bool_]) -> _Window:
        """Return some of the iterations."""
        times = self.times
        begin_ns, end_ns = self.begin_ns[rows], self.end_ns[rows]
        if self.why_whole:
            return _Window(begin_ns, end_ns, RankTimes.whole((end_ns - begin_ns) / 1e9), self.why_whole)
        names = ("iteration_s", "exposed_s", "compute_s", "optimizer_s", "overlap_s")
        own = {name: getattr(times, name)[rows] for name in names}
        mean_s = float((end_ns - begin_ns).mean()) / 1e9 if len(begin_ns) else 0.0
        return _Window(begin_ns, end_ns, RankTimes(times.ranks, **own, mean_s=mean_s, source=times.source))


def diagnose(follower: RunFollower, files: Sequence[RankSteps]) -> Diagnosis:
    """Return why a job is slow now.

    Args:
        follower: the run.
        files: the processes of its ranks.
    """
    window = _window(sorted(files, key=lambda file: file.rank))
    window, network = _with_network(follower, window)
    if len(window.begin_ns) < MIN_ITERATIONS:
        return Diagnosis()
    if missing := missing_ranks((file.rank, file.world_size) for file in files if file.launch[0]):
        return _unknown(missing)
    if why := why_no_parts(window.times):
        return _unknown(why)
    node_of = {file.rank: file.node for file in files}
    begin_s = window.begin_ns / 1e9
    pid_of = {file.rank: file.pid for file in files}
    early: set[int] = set()  # ranks whose run delay is not known yet

    def run_delay_s(rank: int, affected: iteration_budget.Mask) -> float | None:
        """Return how long a rank waits for a processor in some iterations in a row, by samples of a second of them."""
        node, where = follower.nodes[node_of[rank]], np.flatnonzero(affected)
        samples = node.keyed["host", "processes"].samples(pid_of[rank], RUN_DELAY)
        if not samples or not len(where):
            return None
        *_, (t_ns, last_ns, _) = samples
        at_ns = np.array([mono_ns for _, mono_ns, _ in samples], np.int64) + (
            node.to_reference(t_ns, last_ns) - last_ns
        )
        begin_ns, end_ns = int(window.begin_ns[where[0]]), int(window.end_ns[where[-1]])
        known_ns = max(begin_ns, int(at_ns[0])), min(end_ns, int(at_ns[-1]))
        if known_ns[1] - known_ns[0] < _LEAST_SAMPLED_NS:
            if at_ns[-1] < end_ns and window.end_ns[-1] - begin_ns < _MAX_WAIT_NS:
                early.add(rank)
            return None
        first, last = np.interp(known_ns, at_ns, [value for _, _, value in samples])
        share = (last - first) / (known_ns[1] - known_ns[0]) * 1e9
        return float(share * window.times.iteration_s[affected].mean()) if share >= 0 else None  # not counted: NaN

    evidence = Evidence(
        window.times, len(begin_s), begin_s, network, node_of, lambda _: None, run_delay_s, window.why_whole
    )
    try:
        budget = iteration_budget.split(window.times, network.evidence)
    except ValueError as error:
        return _unknown(str(error))
    found = [
        (begin, _since(share, begin, evidence))
        for share in budget.shares
        if share.name in CAUSES and (begin := _begin(share, window.times.mean_s)) is not None
    ]
    # whether a rank is slow or lacks a processor is known a second later
    found = [item for item in found if item[1]["name"] != SLOW_RANK or item[1]["run_delay_s"] is not None or not early]
    causes = named({"causes": sorted((cause for _, cause in found), key=lambda cause: -cause["seconds"])})
    latest = max((begin for begin, cause in found if cause in causes), default=0)
    iteration_s = float((window.end_ns - window.begin_ns)[latest:].mean()) / 1e9
    about = described(budget, evidence) | {"causes": causes, "iteration_s": iteration_s}
    return Diagnosis(tuple(verdict(about)), tuple(causes), not is_open(about))


def _unknown(why: str) -> Diagnosis:
    return Diagnosis(tuple(verdict(nothing_known(why))))


def _window(files: Sequence[RankSteps]) -> _Window:
    """Return the last iterations."""
    keep = max(min(_MAX_ITERATIONS, _MAX_CELLS // len(files)), 2 * MIN_ITERATIONS)
    ends = [list(file.ends)[-keep - 1 :] for file in files]
    passes = [file.passes.by_step(own) for file, own in zip(files, ends, strict=True)]
    by_step = [{end.step: end for end in own} for own in ends]
    steps = sorted(set[int].intersection(*(set(own) for own in by_step)))
    end_ns = {step: max(own[step].end_ns for own in by_step) for step in steps}
    rows = [
        step
        for before, step in pairwise(steps)
        if before == step - 1 and step > _WARM_UP and all(own[step].iteration_s is not None for own in by_step)
    ]
    known = [step for step in rows if all(step in own for own in passes)]
    why_whole = ""
    if len(rows) >= 2 * MIN_ITERATIONS and len(known) < MIN_ITERATIONS:
        why_whole = timed_in(len(known), len(rows)) if any(passes) else "no passes of the ranks are timed"
        known = rows

    at_ns = np.array([(end_ns[step - 1], end_ns[step]) for step in known], np.int64).reshape(-1, 2)
    if why_whole:
        return _Window(at_ns[:, 0], at_ns[:, 1], RankTimes.whole(np.diff(at_ns)[:, 0] / 1e9), why_whole)

    def table(of: Sequence[dict[int, Any]], name: str) -> npt.NDArray[np.float64]:
        values = [[getattr(own[step], name) for own in of] for step in known]
        return np.array(values, np.float64).reshape(len(known), len(files))

    ends_of: dict[str, Sequence[dict[int, StepEnd]]] = dict.fromkeys(("iteration_s", "optimizer_s"), by_step)
    of_passes = "exposed_s", "compute_s", "overlap_s"
    passes_of: dict[str, Sequence[dict[int, TimedPass]]] = dict.fromkeys(of_passes, passes)
    times = {name: table(of, name) for name, of in (ends_of | passes_of).items()}
    ranks = np.array([file.rank for file in files], np.int64)
    whole = _Window(at_ns[:, 0], at_ns[:, 1], RankTimes(ranks, **times, mean_s=0.0, source=files[0].passes.source))
    return whole.chosen(np.ones(len(known), bool))


def _with_network(follower: RunFollower, window: _Window) -> tuple[_Window, NetworkRecords]:
    """Return the iterations of which the traffic is known, and the records of the network in them."""
    logs = [node for node in follower.nodes.values() if node.traffic and node.traffic.begin_ns is not None]
    if not logs or {file.node for file in follower.ranks} - {node.name for node in logs}:
        return window, NetworkRecords.missing("sockets are not recorded (--collect sockets)")
    traffic = [node.traffic for node in logs if node.traffic]
    since_ns = max(own.begin_ns or 0 for own in traffic)
    # a socket with little traffic so far may be in a later sample than others
    late_ns = round(1e9 * (_WRITTEN_S + max(own.all_every_s for own in traffic)))
    until_ns = min(node.to_reference(node.t_ns, node.mono_ns) for node in logs) - late_ns
    window = window.chosen((window.begin_ns >= since_ns) & (window.end_ns <= until_ns))
    if not len(window.begin_ns):
        return window, NetworkRecords.missing("not yet")
    seconds = float((window.end_ns - window.begin_ns).sum()) / 1e9
    period_s = max(own.every_s for own in traffic) + max(own.all_every_s for own in traffic)
    if period_s / 2 > MAX_UNCERTAIN_SHARE * seconds:
        return window, NetworkRecords.missing(
            "sockets are sampled too rarely for iterations as short as these (--every)"
        )
    training, other, lost = (np.zeros(len(window.begin_ns)) for _ in range(3))
    if not all(log.tells_losses for log in traffic):
        lost[:] = np.nan
    flows: list[FlowSum] = []
    node_of = follower.node_of_address
    for node, log in zip(logs, traffic, strict=True):
        growths = log.growths
        training += _by_iteration(window, [one for one in growths if one.ends.is_training])
        other += _by_iteration(window, [one for one in growths if not one.ends.is_training])
        flows += _flows(window, growths, _losses(window, log, lost, node_of, node.name), node_of)
    busy = [
        (ends, times)
        for node, log in zip(logs, traffic, strict=True)
        for ends, times in log.busy_times(node_of, node.name)
    ]
    facts = {node.name: [node.facts] for node in follower.nodes.values()}
    buffers = _full_buffers(window, busy, node_of)
    return window, NetworkRecords.of(training, other, lost, flows, seconds, lambda node: facts.get(node, []), buffers)


def _full_buffers(
    window: _Window, sockets: Sequence[tuple[FlowEnds, Sequence[BusyTimes]]], node_of: Mapping[str, str]
) -> FullBuffers | None:
    """Return the training's socket that full buffers limit longest in these iterations; None if not for long.

    The share is of the iterations around each one, as the counters are sampled more rarely than iterations may end.
    """
    first_ns = int(window.begin_ns[0])
    edges_ns = np.stack([window.begin_ns, window.end_ns]) - first_ns

    def grown(times: Sequence[BusyTimes]) -> npt.NDArray[np.float64]:
        """Return the growth of the three times in each iteration."""
        at_ns, *columns = (np.array(times, np.int64) - [first_ns, 0, 0, 0]).T
        return np.stack([np.diff(np.interp(edges_ns, at_ns, column), axis=0)[0] for column in columns])

    def in_all(item: tuple[FlowEnds, Sequence[BusyTimes]]) -> tuple[int, int]:
        """Return how long a socket was limited and busy since about the first iteration."""
        times = item[1]
        first = times[bisect.bisect_left(times[:-1], first_ns, key=attrgetter("at_ns"))]
        _, busy_us, *limited_us = (last - before for last, before in zip(times[-1], first, strict=True))
        return sum(limited_us), busy_us

    known = [item for item in sockets if item[1][-1].at_ns > first_ns]
    if not known:
        return None
    ends, times = max(known, key=lambda item: in_all(item)[0])
    _, by_receiver, by_sender = grown(times)
    busy = grown(max(known, key=lambda item: in_all(item)[1])[1])[0]
    limited, busy = (ndimage.uniform_filter1d(one, _AROUND) for one in (by_receiver + by_sender, busy))
    share = np.minimum(limited / np.maximum(busy, 1.0), 1.0)
    share[share < LIMITED_SHARE] = 0.0
    if not share.any():
        return None
    source, destination = (node_of.get(address, address) for address in (ends.source, ends.destination))
    return FullBuffers(share, source, destination, bool(by_receiver.sum() >= by_sender.sum()))


def _by_iteration(window: _Window, growths: Sequence[FlowGrowth]) -> npt.NDArray[np.float64]:
    """Return the payload in each iteration; between two samples, growth is linear."""
    if not growths:
        return np.zeros(len(window.begin_ns))
    first_ns = int(window.begin_ns[0])
    rows = [(begin_ns - first_ns, end_ns - first_ns, payload_bytes) for begin_ns, end_ns, _, payload_bytes in growths]
    begin_s, end_s, payload = np.array(rows, np.float64).T * [[1e-9], [1e-9], [1.0]]
    rates = payload / (end_s - begin_s)
    at_s = np.concatenate((begin_s, end_s))
    order = np.argsort(at_s, kind="stable")
    at_s, rate = at_s[order], np.cumsum(np.concatenate((rates, -rates))[order])
    total = np.concatenate(([0.0], np.cumsum(rate[:-1] * np.diff(at_s))))
    begin, end = (np.interp((edges - first_ns) / 1e9, at_s, total) for edges in (window.begin_ns, window.end_ns))
    found: npt.NDArray[np.float64] = np.maximum(end - begin, 0.0)
    return found


def _losses(
    window: _Window, log: RecentTraffic, lost: npt.NDArray[np.float64], node_of: Mapping[str, str], node: str
) -> dict[FlowEnds, float]:
    """Add the lost segments of a node's sockets to ``lost``, by iteration, and return those of each flow."""
    sums: dict[FlowEnds, float] = {}
    for ends, steps in log.losses(node_of, node):
        for at_ns, number in steps:
            row = int(np.searchsorted(window.end_ns, at_ns - round(5e8 * log.every_s)))
            if row < len(lost) and at_ns > window.begin_ns[row]:
                lost[row] += number
                sums[ends] = sums.get(ends, 0.0) + number
    return sums


def _flows(
    window: _Window, growths: Sequence[FlowGrowth], losses: Mapping[FlowEnds, float], node_of: Mapping[str, str]
) -> Iterator[FlowSum]:
    """Yield the flows of the iterations; a growth that begins before these, or ends after, counts with its share."""
    sums = dict.fromkeys(losses, 0.0)
    first_ns, last_ns = int(window.begin_ns[0]), int(window.end_ns[-1])
    for begin_ns, end_ns, ends, payload_bytes in growths:
        within_ns = min(end_ns, last_ns) - max(begin_ns, first_ns)
        if within_ns > 0:
            sums[ends] = sums.get(ends, 0.0) + payload_bytes * within_ns / (end_ns - begin_ns)
    for ends, total in sums.items():
        nodes = node_of.get(ends.source), node_of.get(ends.destination)
        addresses = nodes[0], ends.source, nodes[1], ends.destination
        yield FlowSum(*addresses, ends.is_training, total, losses.get(ends, 0.0))


def _begin(share: iteration_budget.CauseOrPart, iteration_s: float) -> int | None:
    """Return the iteration in which a cause that goes on now began; None if it does not go on."""
    affected = share.affected
    least = _GOES_ON_UNEXPLAINED if share.name in (NETWORK_STALL, WHOLE_STALL) else _GOES_ON
    where = np.flatnonzero(affected)
    if len(where) < least:
        return None
    gaps = np.diff(where)
    most = max(_OVER, _OVER_S / iteration_s, 2 * float(np.median(gaps)) if len(gaps) else 0.0)
    if len(affected) - 1 - where[-1] > most:
        return None
    breaks = np.flatnonzero(gaps > most)
    where = where[breaks[-1] + 1 :] if len(breaks) else where
    return int(where[0]) if len(where) >= least else None


def _since(share: iteration_budget.CauseOrPart, begin: int, evidence: Evidence) -> dict[str, Any]:
    """Describe a cause that goes on since iteration number ``begin``; ``since`` says when that was, in words."""
    share, times = share.since(begin), evidence.times
    count = len(share.affected) - begin
    since, cause = f"in all of the last {count} iterations", cause_of(share, evidence, begin)
    if begin > 0:
        since = f"since {_clock(evidence.start_s[begin])}"
        low_s, high_s = cause["from_low_s"], cause["from_high_s"]
        if low_s is not None and high_s - low_s >= _LEAST_SHOWN_S:
            since += f" (between {_clock(low_s)} and {_clock(high_s)})"
    about = {"since": since, "share": share.seconds / float(times.iteration_s[begin:].mean())}
    about |= {"seconds": share.seconds, "low_s": share.low_s, "high_s": share.high_s}
    return cause | about


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(float(at_s)))
