"""Finds iterations that take longer than a percentile of those before them, from the step records of a node.

`ringtap.core.iteration_end_detector` tells which steps of a process end an iteration. Each process is compared
with its own iterations of the training phase that runs.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left, insort
from pathlib import Path
from typing import NamedTuple

from ringtap.core.append_only_logs import INTEGER, open_records
from ringtap.core.errors import UsageError
from ringtap.core.iteration_end_detector import IterationEnds
from ringtap.core.run_directory_schema import MARK_RECORD, STEP_COLUMNS
from ringtap.core.units import duration_s

MIN_ITERATIONS = 100  # fewer have no 99th percentile
_KEPT = 10_000  # iterations of a process that the percentile is taken over: the newest
_BATCH = 100_000
_GONE_STEPS = 100  # a process that has written nothing while others made this many steps is no longer read
_RULE = re.compile(r"p(\d{1,2}(?:\.\d+)?):(.+)")
_FILE = re.compile(r"rank(\d+)-\d+(?:-\d+)?\.rec")


class SlowRule(NamedTuple):
    """The iterations that count as slow, and the time around them that is of interest.

    Attributes:
        share: quantile of a process's iteration times that a slow one exceeds.
        around_s: seconds before its begin and after its end.
    """

    share: float
    around_s: float


def parse_rule(text: str) -> SlowRule:
    """Parse a rule such as ``p99:5s``.

    Raises:
        UsageError: it is not a percentile from p50 to p99.99 and a time.
    """
    match = _RULE.fullmatch(text)
    if not match or not 50 <= float(match[1]) <= 99.99:
        raise UsageError(
            f"--packets-around-slow {text!r} is not understood: write a percentile from p50 to p99.99 and a time, for "
            "example p99:5s"
        )
    try:
        return SlowRule(round(float(match[1]) / 100, 6), duration_s(match[2]))
    except UsageError as error:
        raise UsageError(f"--packets-around-slow {text!r}: {error}") from None


class SlowIteration(NamedTuple):
    """An iteration that took longer than the percentile.

    Attributes:
        rank: rank of its process.
        step: number of the step that ended it.
        begin_ns: end of the step before, CLOCK_REALTIME.
        end_ns: end of the step.
        threshold_s: the percentile at that time.
    """

    rank: int
    step: int
    begin_ns: int
    end_ns: int
    threshold_s: float


class RecentTimes:
    """The newest times of a process, in order of size, for quantiles; memory is bounded."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._ordered = array("d")
        self._newest = array("d")  # a ring
        self._kept, self._next = kept, 0

    def quantile(self, share: float) -> float | None:
        """Return a quantile, which is one of the times; None if there are too few."""
        count = len(self._ordered)
        return None if count < MIN_ITERATIONS else self._ordered[math.ceil(share * count - 1e-9) - 1]

    def add(self, time_s: float) -> None:
        """Add a time, and forget the oldest one if there are too many."""
        insort(self._ordered, time_s)
        if len(self._newest) < self._kept:
            self._newest.append(time_s)
            return
        del self._ordered[bisect_left(self._ordered, self._newest[self._next])]
        self._newest[self._next] = time_s
        self._next = (self._next + 1) % self._kept


class _Process:
    """The step records of one process."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank
        self._read = 0
        self.end_ns = 0
        self.behind = 0
        self._end_mono_ns = 0
        self._ends = IterationEnds[tuple[int, int, int]]()
        self._stretch = 0
        self._times = RecentTimes()

    def poll(self, share: float, slow: list[SlowIteration]) -> int:
        """Read the new steps, and append the slow iterations; returns the number of records.

        Raises:
            OSError: the file cannot be read.
            UsageError: it is damaged.
        """
        file = open_records(self._path, STEP_COLUMNS | {"kind": INTEGER})
        at = file.index
        begun = self._read
        while records := file.tail(self._read, min(file.count, self._read + _BATCH)):
            self._read += len(records)
            for record in records:
                own = record[at["step"]], record[at["end_ns"]], record[at["end_mono_ns"]]
                ended = self._ends.add(own, record[at["optimizer"]], record[at["kind"]] == MARK_RECORD)
                if self._ends.stretch != self._stretch:
                    self._stretch, self._end_mono_ns, self._times = self._ends.stretch, 0, RecentTimes()
                if ended is not None:
                    self._end(ended, share, slow)
        return self._read - begun

    def _end(self, record: tuple[int, int, int], share: float, slow: list[SlowIteration]) -> None:
        step, end_ns, mono_ns = record
        if self._end_mono_ns:
            length_ns = mono_ns - self._end_mono_ns
            threshold_s = self._times.quantile(share)
            if threshold_s is not None and length_ns / 1e9 > threshold_s:
                slow.append(SlowIteration(self._rank, step, end_ns - length_ns, end_ns, threshold_s))
            self._times.add(length_ns / 1e9)
        self.end_ns, self._end_mono_ns = end_ns, mono_ns


class SlowIterations:
    """Reader of a node's step records as they are written.

    Args:
        folder: the node's folder ``steps``.
        share: quantile that a slow iteration exceeds.
    """

    def __init__(self, folder: Path, share: float) -> None:
        self._folder, self._share = folder, share
        self._processes: dict[str, _Process] = {}
        self._gone: set[str] = set()

    @property
    def reached_ns(self) -> int | None:
        """CLOCK_REALTIME until which every iteration is known, None before the first step."""
        return min((process.end_ns for process in self._processes.values() if process.end_ns), default=None)

    def poll(self) -> list[SlowIteration]:
        """Return the slow iterations that ended since the last poll; a file that cannot be read is passed over."""
        for path in self._folder.glob("rank*.rec"):
            match = _FILE.fullmatch(path.name)
            if match and path.name not in self._gone and path.name not in self._processes:
                self._processes[path.name] = _Process(path, int(match[1]))
        slow: list[SlowIteration] = []
        steps: dict[str, int] = {}
        for name, process in self._processes.items():
            try:
                steps[name] = process.poll(self._share, slow)
            except (OSError, UsageError):
                steps[name] = 0
        most = max(steps.values(), default=0)
        for name, count in steps.items():
            process = self._processes[name]
            process.behind = 0 if count else process.behind + most
            if process.behind > _GONE_STEPS:
                self._gone.add(name)
                del self._processes[name]
        return slow
