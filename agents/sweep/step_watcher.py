"""Reads the growing step logs of a running job, and tells whether it has stalled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import add
from pathlib import Path
from typing import Any

from ringtap.core.iteration_end_detector import IterationEnds
from ringtap.core.run_directory import RunDirectory, clock_gap_ns, open_log
from ringtap.core.run_directory_schema import MARK_RECORD

# a job has stalled if no iteration ends for so many times the longest one, plus the delay of the logs
_STALLED_ITERATIONS = 3
_LOG_DELAY_S = 2.0


class _RankEnds:
    """The records that end iterations of the training phase that a rank is in.

    Attributes:
        read: number of records that were read.
        ends: those that end an iteration.
    """

    def __init__(self) -> None:
        self.read = 0
        self.ends: list[tuple[Any, ...]] = []
        self._iteration_ends = IterationEnds[tuple[Any, ...]]()
        self._stretch = 0

    def add(self, records: Sequence[tuple[Any, ...]], optimizer: int, kind: int) -> None:
        """Add records; ``optimizer`` and ``kind`` are the numbers of these columns."""
        for record in records:
            ended = self._iteration_ends.add(record, record[optimizer], record[kind] == MARK_RECORD)
            if self._iteration_ends.stretch != self._stretch:
                self._stretch = self._iteration_ends.stretch
                self.ends.clear()
            if ended is not None:
                self.ends.append(ended)
        self.read += len(records)


class StepWatcher:
    """Reader of the growing step logs of a running job, rank by rank.

    Args:
        run: the job's run directory.
        ranks: number of ranks of each worker.
    """

    def __init__(self, run: RunDirectory, ranks: Mapping[str, int]) -> None:
        self._expected = ranks
        self._folders = [run.path / "nodes" / worker / "steps" for worker in ranks]
        self._ranks: dict[Path, _RankEnds] = {}
        self._columns: list[str] = []

    def iteration_ends_ns(self) -> list[int]:
        """Return the end of each iteration that all ranks have ended, at the slowest rank.

        The times, in ns, are what CLOCK_REALTIME of each host would have shown if nobody had set it since the recording
        began: the offsets between the hosts' clocks are known exactly only after the run, when
        `ringtap.analysis.runs.run.window_on_reference` converts windows that end at these times.
        """
        ends_ns = self.ends_mono_ns()
        gaps_ns = self._gaps_ns() if ends_ns else []
        return [max(map(add, ends, gaps_ns)) for ends in ends_ns]

    def iteration_begins_ns(self) -> list[int]:
        """Return the begin of each iteration but the first: `iteration_ends_ns` and the pause after it."""
        ends_ns, pauses_ns = self.ends_mono_ns(), self._column("pause_ns")
        gaps_ns = self._gaps_ns() if ends_ns else []
        return [max(map(sum, zip(*each, gaps_ns, strict=True))) for each in zip(ends_ns, pauses_ns, strict=False)]

    def ends_mono_ns(self) -> list[tuple[int, ...]]:
        """Return the ends of each iteration that all ranks have ended, rank by rank (CLOCK_MONOTONIC of its host)."""
        return self._column("end_mono_ns")

    def _gaps_ns(self) -> list[int]:
        """Return what leads from CLOCK_MONOTONIC to the times of `iteration_ends_ns`, rank by rank."""
        gaps_ns = {folder: clock_gap_ns(folder.parent) or 0 for folder in self._folders}
        return [gaps_ns[path.parent] for path in self._ranks]

    def _column(self, name: str) -> list[tuple[int, ...]]:
        """Return a column of the step logs at the ends of iterations that all ranks have ended, rank by rank."""
        for folder in self._folders:
            for path in sorted(folder.glob("rank*.rec")):
                if path.suffixes == [".rec"] and path.stat().st_size:  # a new file may still lack its header
                    rank = self._ranks.setdefault(path, _RankEnds())
                    log = open_log(path)
                    self._columns = [field.name for field in log.fields]
                    rank.add(log.tail(rank.read), *map(self._columns.index, ("optimizer", "kind")))
        if self.unstepped():
            return []
        place = self._columns.index(name)
        ranks = [[row[place] for row in rank.ends] for rank in self._ranks.values()]
        return list(zip(*ranks, strict=False))

    def unstepped(self) -> list[str]:
        """Return how many ranks stepped an optimizer by the logs read so far, of each worker where not all did."""
        stepped = {folder.parent.name: sum(path.parent == folder for path in self._ranks) for folder in self._folders}
        return [f"{name} {stepped[name]} of {count}" for name, count in self._expected.items() if stepped[name] < count]


def stalled_s(ends_ns: Sequence[int], now_ns: int) -> float:
    """Return the seconds since the last iteration ended if a job has stalled, otherwise 0.

    Args:
        ends_ns: ends of iterations (CLOCK_REALTIME, ns), at least two.
        now_ns: the present time.
    """
    since_ns = now_ns - ends_ns[-1]
    longest_ns = max(after - before for before, after in pairwise(ends_ns))
    return since_ns / 1e9 if since_ns > _STALLED_ITERATIONS * longest_ns + _LOG_DELAY_S * 1e9 else 0.0
