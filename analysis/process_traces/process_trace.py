"""Holds a trace that another tool recorded in one process of a job, by the wall clock of the process's node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ringtap.analysis.export.trace_writer import Fact, TrackSlice
from ringtap.analysis.runs.samples_to_iterations import Integers
from ringtap.core.errors import UsageError
from ringtap.core.json_validation import whole
from ringtap.core.units import format_size

END_UNKNOWN = "end not recorded"  # note on operations of no length
MAX_OPERATIONS = 500_000
_MAX_NAME = 200  # characters


@dataclass
class ProcessTrace(ABC):
    """A trace of one process.

    Attributes:
        path: the file.
        tool: the tool that recorded it.
        rank: rank of the process; None: the file does not say.
        begin_ns: begins of its spans, CLOCK_REALTIME of the node, ascending.
        length_ns: lengths.
        track: number of each span's track in ``tracks``.
        tracks: names of tracks.
        left_out: what the tool did not keep, as a sentence; empty: nothing that the file tells of.
    """

    path: Path
    tool: str
    rank: int | None
    begin_ns: Integers
    length_ns: Integers
    track: Integers
    tracks: list[str]
    left_out: str

    @abstractmethod
    def slices(self, track: int, begin_ns: Integers) -> Iterator[TrackSlice]:
        """Yield the slices of a track.

        Args:
            track: number of the track.
            begin_ns: begins of all spans of the trace by the clock of the slices.
        """

    @property
    def origin(self) -> str:
        """The process that recorded it, as a clause."""
        return "it does not say of which rank it is" if self.rank is None else f"it is of rank {self.rank}"

    def is_of(self, rank: int, pid: int, host: str, is_only: bool) -> bool:  # noqa: ARG002
        """Return True if a process may have recorded it.

        Args:
            rank: rank of the process.
            pid: its process id.
            host: host name of its node; empty if it is not known.
            is_only: True if the job has no other rank.
        """
        return is_only if self.rank is None else rank == self.rank


@dataclass
class OperationTrace(ProcessTrace):
    """A trace of operations.

    Attributes:
        pid: process id; None: the file does not say.
        host: host name of the node; empty: the file does not say.
        operations: the operations, in the order of ``begin_ns``, by the clock of the node.
    """

    pid: int | None
    host: str
    operations: list[TrackSlice]

    @property
    def origin(self) -> str:
        """The process that recorded it, as a clause."""
        return super().origin if self.pid is None else f"it is of process {self.pid} on {self.host}"

    def is_of(self, rank: int, pid: int, host: str, is_only: bool) -> bool:
        """Return True if a process may have recorded it; arguments as for `ProcessTrace.is_of`."""
        if self.pid is None:
            return super().is_of(rank, pid, host, is_only)
        return pid == self.pid and host in ("", self.host)

    def slices(self, track: int, begin_ns: Integers) -> Iterator[TrackSlice]:
        """Yield the operations of a track; arguments as for `ProcessTrace.slices`."""
        for number in np.flatnonzero(self.track == track).tolist():
            one, begin = self.operations[number], int(begin_ns[number])
            yield one._replace(begin_ns=begin, end_ns=begin + one.end_ns - one.begin_ns)


class OperationReader:
    """Collector of the operations of one file.

    Args:
        path: the file.
        tool: the tool that recorded it.

    Attributes:
        operations: the operations so far.
    """

    def __init__(self, path: Path, tool: str) -> None:
        self._path, self._tool = path, tool
        self.operations: list[TrackSlice] = []
        self._track_of: list[int] = []
        self._pending: list[int] = []
        self._tracks: dict[str, int] = {}

    def add(
        self,
        span_ns: tuple[int, int | None],
        title: tuple[str, int | None, str],
        track: str,
        facts: dict[str, Fact | None],
    ) -> None:
        """Add an operation.

        Args:
            span_ns: begin and end, CLOCK_REALTIME of the node; no end (None): it ends with the last that is known.
            title: its name, its bytes (None: not known), and a note; empty if there is none.
            track: name of its track.
            facts: further facts; those that are None are left out.

        Raises:
            UsageError: the file has too many.
        """
        if len(self.operations) == MAX_OPERATIONS:
            raise UsageError(f"{self._path} has more than {MAX_OPERATIONS:,} operations: record fewer iterations")
        self._track_of.append(self._tracks.setdefault(_text(track), len(self._tracks)))
        name, size, note = title
        parts = [_text(name), "" if size is None else format_size(size), _text(note)]
        text = ", ".join(part for part in parts if part)
        known = [
            (key, _text(fact) if isinstance(fact, str) else fact) for key, fact in facts.items() if fact is not None
        ]
        begin_ns, end_ns = span_ns
        if end_ns is None:
            self._pending.append(len(self.operations))
        self.operations.append(TrackSlice(begin_ns, max(begin_ns, end_ns or 0), text, self._tool, facts=known))

    def trace(self, rank: int | None, pid: int | None = None, host: str = "", left_out: str = "") -> OperationTrace:
        """Return the trace of all operations; arguments as for `OperationTrace`."""
        last_ns = max(one.end_ns for one in self.operations)
        for number in self._pending:
            self.operations[number] = self.operations[number]._replace(end_ns=last_ns)
        begin_ns, end_ns = (np.array([one[end] for one in self.operations], np.int64) for end in (0, 1))
        order = np.argsort(begin_ns, kind="stable")
        spans = (begin_ns[order], (end_ns - begin_ns)[order], np.array(self._track_of, np.int64)[order])
        found = [self.operations[number] for number in order]
        return OperationTrace(self._path, self._tool, rank, *spans, list(self._tracks), left_out, pid, host, found)


def _text(text: str) -> str:
    return str(whole(text[:_MAX_NAME]))
