"""Finds the iterations of a running job, from the step records of its ranks as they are written.

An iteration ends when the last rank has ended it; `ringtap.core.iteration_end_detector` has the rules. The
iterations are those of the training phase that runs: what came before another optimizer, or another start of the job,
is forgotten (docs/reference/iterations.md).
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import NamedTuple

from ringtap.analysis.runs.exposed_communication import MOMENTS, exposed_ns, is_synced
from ringtap.analysis.runs.growing_files import Record
from ringtap.core.append_only_logs import RecordFile
from ringtap.core.iteration_end_detector import IterationEnds
from ringtap.core.run_directory_schema import MARK_RECORD, SKIPPED_RECORD

STEP_FILE = re.compile(r"rank(\d+)-(\d+)(?:-\d+)?(\.ddp|\.horovod)?\.rec")
MAX_KEPT = 600
_KEPT_IN_ALL = 60_000
_MIN_KEPT = 120
_RELEASED_AFTER_NS = 60 * 10**9
_DDP_TIMES = ("forward_ns", "backward_ns", "comm_ns", "overlap_ns")


@dataclass(frozen=True)
class LiveIteration:
    """One iteration.

    Attributes:
        number: the step's number, from 0.
        end_ns: time at which the last rank ended it, CLOCK_REALTIME of the reference node.
        seconds: time since the end of the iteration before.
        skipped: True if the optimizer's step was skipped (AMP).
    """

    number: int
    end_ns: int
    seconds: float
    skipped: bool = False


@dataclass(frozen=True)
class IterationStats:
    """Statistics of the iteration time over the last iterations.

    Attributes:
        history: the last iterations in order.
        last_s: time of the last one; None before the second step.
        median_s: median of ``over`` iterations.
        p99_s: 99th percentile of the same.
        over: number of iterations that both are taken over.
        ranks: number of ranks whose steps were seen.
        world_size: number of ranks that the job reports; 0 if it reports none.
        restarts: number of earlier starts of the job that runs.
    """

    history: tuple[LiveIteration, ...] = ()
    last_s: float | None = None
    median_s: float | None = None
    p99_s: float | None = None
    over: int = 0
    ranks: int = 0
    world_size: int = 0
    restarts: int = 0


class StepEnd(NamedTuple):
    """End of an iteration of one process.

    Attributes:
        step: number of the step that ended it.
        end_ns: on the reference clock.
        skipped: True if the optimizer's step was skipped (AMP).
        iteration_s: time since the end before; None for the first one.
        optimizer_s: time in the steps of its optimizers, without the passes within these.
    """

    step: int
    end_ns: int
    skipped: bool
    iteration_s: float | None
    optimizer_s: float


class TimedPass(NamedTuple):
    """Times of one pass, by DDP's log or of Horovod's optimizers.

    Attributes:
        seen_ns: its last moment that is known, on the reference clock.
        compute_s: forward and backward pass; with Horovod, the backward pass.
        exposed_s: communication after the last gradient was ready.
        overlap_s: communication during the backward pass.
    """

    seen_ns: int
    compute_s: float
    exposed_s: float
    overlap_s: float

    def joined(self, other: TimedPass) -> TimedPass:
        """Return the sums over two passes of an iteration, and the last moment."""
        times = zip(self[1:], other[1:], strict=True)
        return TimedPass(max(self.seen_ns, other.seen_ns), *map(sum, times))


class RankSteps:
    """The last steps of one process of one rank.

    Args:
        node: the node it runs on.
        rank: its rank.
        pid: its process.
        file: the record file's header.
        to_reference: converts CLOCK_REALTIME and CLOCK_MONOTONIC of its node to the reference node's clock.

    Attributes:
        began: start of the process, or of its first step if that is not known, by both clocks of its node.
        steps_s: times between its last steps.
        timed_steps: number of times between steps that were read, kept or not.
        timed_s: their sum.
        passes: times of the passes of its iterations.
    """

    def __init__(
        self, node: str, rank: int, pid: int, file: RecordFile, to_reference: Callable[[int, int], int]
    ) -> None:
        self.node, self.rank, self.pid = node, rank, pid
        self.world_size = int(file.about.get("world_size") or 0)
        self.launch = bool(file.about.get("group")), str(file.about.get("address") or "")
        self.command = file.about.get("command")
        self.ends: deque[StepEnd] = deque(maxlen=MAX_KEPT)
        self.samples = 0
        self.last_end_ns = 0
        self.began = 0, 0
        self._last_mono_ns = 0
        self.last_step_s: float | None = None
        self.steps_s: deque[float] = deque(maxlen=MAX_KEPT)
        self.timed_steps, self.timed_s = 0, 0.0
        self.generation = self.restarts = 0
        self.counts = True
        self.passes = PassTimes(to_reference)
        self._iteration_ends = IterationEnds[tuple[int, int, int]]()
        self._stretch = 0
        self._is_skipped = False  # a step of the iteration that runs was
        self._optimizer_ns = 0  # in it
        self._to_reference = to_reference
        self.file = file

    def span_ns(self) -> tuple[int, int]:
        """Return the start of the process and its last step, on the reference clock."""
        last_ns = self.ends[-1].end_ns if self.ends else self._to_reference(self.last_end_ns, self._last_mono_ns)
        return self._to_reference(*self.began), last_ns

    def release(self) -> None:
        """Forget the kept steps of a process whose successor's successor runs."""
        self.ends.clear()
        self.steps_s.clear()

    def feed(self, batch: Iterable[Record]) -> None:
        """Add step records."""
        at = self.file.index
        step, optimizer, end, kind_column = at["step"], at["optimizer"], at["end_ns"], at.get("kind")
        mono, start, passes = at["end_mono_ns"], at["start_mono_ns"], at.get("passes_ns")
        ends = self._iteration_ends
        for record in batch:
            self.samples += 1
            kind = record[kind_column] if kind_column is not None else 0
            own = record[step], record[end], record[mono]
            ended = ends.add(own, record[optimizer], kind == MARK_RECORD)
            if ends.stretch != self._stretch:
                self._stretch = ends.stretch
                self.release()
                if ends.is_reread:
                    self.timed_steps, self.timed_s = 0, 0.0
            if ended is not None and ended is not own:  # the record before this one
                self._add(*ended)
            self._is_skipped = self._is_skipped or kind == SKIPPED_RECORD
            if kind != MARK_RECORD:
                within_ns = record[passes] if passes is not None else 0
                self._optimizer_ns += max(record[mono] - record[start] - within_ns, 0)
            if ended is own:
                self._add(*own)

    def _add(self, step: int, end_ns: int, mono_ns: int) -> None:
        iteration_s = (mono_ns - self._last_mono_ns) / 1e9 if self.ends else None
        if iteration_s is not None:
            self.last_step_s = iteration_s
            self.steps_s.append(iteration_s)
            self.timed_steps += 1
            self.timed_s += iteration_s
        self.last_end_ns, self._last_mono_ns = end_ns, mono_ns
        at_ns, optimizer_s = self._to_reference(end_ns, mono_ns), self._optimizer_ns / 1e9
        self.ends.append(StepEnd(step, at_ns, self._is_skipped, iteration_s, optimizer_s))
        self._is_skipped, self._optimizer_ns = False, 0


class PassTimes:
    """Times of the passes of one process.

    Args:
        to_reference: converts times as `RankSteps` does.

    Attributes:
        source: ``ddp``, or ``horovod``, whose forward passes are not timed.
        last: ``forward_s``, ``backward_s``, ``comm_s`` and ``overlap_s`` of the last iteration; None for times that are
            not known.
        communication_s: sum over the iterations that were read; None before the first.
        exposed_s: the same of communication after the last gradient was ready.
    """

    def __init__(self, to_reference: Callable[[int, int], int]) -> None:
        self._to_reference = to_reference
        self.source = "ddp"
        self._passes: deque[TimedPass] = deque(maxlen=MAX_KEPT)
        self.last: dict[str, float | None] = {}
        self.communication_s: float | None = None
        self.exposed_s: float | None = None
        self._sample: tuple[int, ...] = ()

    def feed(self, file: RecordFile, batch: Iterable[Record]) -> None:
        """Add records.

        Where DDP samples rarely, its log repeats the last sample.
        """
        columns = [file.index[name] for name in ("module", *MOMENTS, *_DDP_TIMES)]
        clocks = [file.index[name] for name in ("t_ns", "mono_ns") if name in file.index]
        for record in batch:
            sample = tuple(record[number] for number in columns)
            if sample[: 1 + len(MOMENTS)] == self._sample[: 1 + len(MOMENTS)]:
                continue
            self._sample = sample
            _, _, backward_start, backward_end, comm_start, comm_end, forward, backward, comm, overlap = sample
            synced = is_synced(backward_start, comm_start, comm_end)
            exposed = exposed_ns(synced, backward_end, comm_start, comm_end, comm, overlap)
            self.communication_s = (self.communication_s or 0.0) + synced * comm / 1e9
            self.exposed_s = (self.exposed_s or 0.0) + exposed / 1e9
            seen_ns = max(sample[1 : 1 + len(MOMENTS)])
            if seen_ns and len(clocks) == 2:  # logs of older versions have no times of their records
                t_ns, mono_ns = (record[number] for number in clocks)
                ahead_ns = t_ns - self._to_reference(t_ns, mono_ns)
                times = (max(forward, 0) + backward) / 1e9, exposed / 1e9, synced * overlap / 1e9
                self._passes.append(TimedPass(seen_ns - ahead_ns, *times))
        self.last = {
            f"{name.removesuffix('_ns')}_s": time / 1e9 if time > 0 else None
            for name, time in zip(_DDP_TIMES, self._sample[-len(_DDP_TIMES) :], strict=False)
        }

    def by_step(self, ends: Sequence[StepEnd]) -> dict[int, TimedPass]:
        """Return the times of each step as far as they are known: sums over its passes, and the last moment."""
        found: dict[int, TimedPass] = {}
        for own in self._passes:
            place = bisect_left(ends, own.seen_ns, key=attrgetter("end_ns"))
            if place < len(ends):
                step = ends[place].step
                found[step] = own.joined(found[step]) if step in found else own
        return found


def choose_worlds(files: list[RankSteps]) -> None:
    """Choose the processes whose steps count: of worlds that ran at the same time, that with most time.

    `ringtap.analysis.runs.group_steps_into_iterations.find_worlds` says which processes are one world. Sets ``counts``,
    ``generation`` (number of earlier worlds that counted) and ``restarts`` (those of them that were the same job) of
    each process, and releases those of earlier generations that ended a minute ago.
    """
    is_unclear = any(not 0 <= file.rank < file.world_size for file in files)
    together: list[list[list[RankSteps]]] = []  # worlds that ran at the same time, in order of time
    until_ns = -1
    for begin_ns, end_ns, file in sorted(((*file.span_ns(), file) for file in files), key=lambda item: item[:2]):
        if not together or begin_ns >= until_ns:
            together.append([])
        until_ns = max(until_ns, end_ns)
        for world in together[-1] if file.world_size > 1 or is_unclear else ():
            if _met(file) == _met(world[0]):
                world.append(file)
                break
        else:
            together[-1].append([file])
    newest_ns = max(file.span_ns()[1] for file in files)
    jobs: Counter[tuple[int, bool, object]] = Counter()
    for generation, joined in enumerate(together):
        worlds = [part for world in joined for part in _told_apart(world)]
        chosen = max(worlds, key=_rank_seconds_and_steps)
        key = chosen[0].world_size, chosen[0].launch[0], chosen[0].command
        for world in worlds:
            for file in world:
                file.generation, file.counts, file.restarts = generation, world is chosen, jobs[key]
                if generation < len(together) - 2 and file.span_ns()[1] < newest_ns - _RELEASED_AFTER_NS:
                    file.release()
        jobs[key] += 1


def _met(file: RankSteps) -> tuple[int, bool, str]:
    """Return what the ranks of a world have in common; they may name their first host differently."""
    return file.world_size, file.launch[0], file.launch[1].rpartition(":")[2]


def _told_apart(world: list[RankSteps]) -> list[list[RankSteps]]:
    """Split processes, some of the same rank, by the address and then by the command; else each is by itself."""
    if len({file.rank for file in world}) == len(world):
        return [world]
    for keys in ([file.launch[1] for file in world], [file.command for file in world]):
        parts: dict[object, list[RankSteps]] = {}
        for key, file in zip(keys, world, strict=True):
            parts.setdefault(key, []).append(file)
        if len(parts) > 1:
            return [own for part in parts.values() for own in _told_apart(part)]
    return [[file] for file in world]


def _rank_seconds_and_steps(world: list[RankSteps]) -> tuple[float, int]:
    return sum(file.timed_s for file in world), sum(file.samples for file in world)


def join(files: list[RankSteps], over: int = 100) -> IterationStats:
    """Join the ranks' steps into iterations.

    Args:
        files: all processes of all ranks.
        over: number of iterations for the median and the 99th percentile.
    """
    if not files:
        return IterationStats()
    files = [file for file in files if file.counts]
    newest = max(file.generation for file in files)
    current = [file for file in files if file.generation == newest]
    history = _iterations(current)
    if len(history) < 2 and newest > 0:  # just restarted: show the generation before until there are iterations
        history = _iterations([file for file in files if file.generation == newest - 1])
    recent = history[-over:]
    times = sorted(iteration.seconds for iteration in recent)
    return IterationStats(
        history=tuple(history),
        last_s=history[-1].seconds if history else None,
        median_s=quantile(times, 0.5),
        p99_s=quantile(times, 0.99),
        over=len(times),
        ranks=len({file.rank for file in current}),
        world_size=max(file.world_size for file in current),
        restarts=max(file.restarts for file in current),
    )


def _iterations(files: list[RankSteps]) -> list[LiveIteration]:
    """Return the iterations that every one of these ranks has ended, in order."""
    keep = max(_MIN_KEPT, min(MAX_KEPT, _KEPT_IN_ALL // len(files)))
    ended: dict[int, list[StepEnd]] = {}
    for file in files:
        for end in list(file.ends)[-keep:]:
            ended.setdefault(end.step, []).append(end)
    iterations = []
    previous: tuple[int, int] | None = None
    for step in sorted(ended):
        ends = ended[step]
        if len(ends) < len(files):
            continue
        end_ns = max(end.end_ns for end in ends)
        if previous and previous[0] == step - 1:
            skipped = any(end.skipped for end in ends)
            iterations.append(LiveIteration(step, end_ns, (end_ns - previous[1]) / 1e9, skipped))
        previous = (step, end_ns)
    return iterations


def quantile(ordered: list[float], share: float) -> float | None:
    """Return a quantile of ordered values: for 0.5 their median, else one of the values; None if there are none."""
    if not ordered:
        return None
    if share == 0.5:
        return median(ordered)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
