"""Reads the spans of a Kineto trace, the file that torch.profiler exports in Chrome's trace event format."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ringtap.analysis.export.trace_writer import TrackSlice
from ringtap.analysis.process_traces.process_trace import ProcessTrace
from ringtap.analysis.runs.samples_to_iterations import Integers
from ringtap.core.errors import UsageError
from ringtap.core.json_validation import COUNT, NS, Number, Shape, check, whole
from ringtap.core.large_json import members
from ringtap.core.run_directory_schema import FORMER_CATEGORIES, GPU_CATEGORIES

MAX_SPANS, MAX_EVENTS = 5_000_000, 20_000_000
_MAX_DEPTH = 64  # spans within spans; deeper ones are beside them
_US = Number(0, 2**52)
_EVENT: Shape = {"name": str, "ts": _US, "dur": _US}
_OF_GPU = GPU_CATEGORIES | {"gpu_user_annotation"}


@dataclass
class KinetoTrace(ProcessTrace):
    """Spans of a trace; its tracks are threads, and streams of GPUs.

    Attributes:
        name: number of each span's name in ``names``.
        names: names of operations, kernels and annotations.
    """

    name: Integers
    names: list[str]

    def slices(self, track: int, begin_ns: Integers) -> Iterator[TrackSlice]:
        """Yield the spans of a track that lie within no other, each with those within it.

        Arguments are those of `ProcessTrace.slices`.
        """
        rows = np.flatnonzero(self.track == track)
        begins, lengths = begin_ns[rows], self.length_ns[rows]
        outer: list[tuple[TrackSlice, list[TrackSlice]]] = []  # open spans with their parts
        for row in np.lexsort((-lengths, begins)).tolist():
            begin = int(begins[row])
            end = begin + int(lengths[row])
            while outer and outer[-1][0].end_ns <= begin:
                last, _ = outer.pop()
                if not outer:
                    yield last
            parts: list[TrackSlice] = []
            one = TrackSlice(begin, end, self.names[self.name[rows[row]]], self.tool, parts=parts)
            is_within = not outer or (end <= outer[-1][0].end_ns and len(outer) < _MAX_DEPTH)
            if not is_within:
                yield one
                continue
            if outer:
                outer[-1][1].append(one)
            outer.append((one, parts))
        yield from (one for one, _ in outer[:1])


@dataclass
class _Columns:
    """Columns of the spans that were read so far."""

    begin_us: array[float] = field(default_factory=lambda: array("d"))
    length_us: array[float] = field(default_factory=lambda: array("d"))
    name: array[int] = field(default_factory=lambda: array("q"))
    track: array[int] = field(default_factory=lambda: array("q"))
    names: dict[str, int] = field(default_factory=dict)
    tracks: dict[str, int] = field(default_factory=dict)

    def add(self, event: Any) -> None:
        """Add an event, if it is a span."""
        check(event, {"ph": str})
        kind = event.get("cat")
        if event["ph"] != "X" or kind == "Trace":
            return
        check(event, _EVENT)
        kind = FORMER_CATEGORIES.get(kind, kind)
        thread = str(event.get("tid"))[:40]
        title = f"thread {thread}"
        if kind in _OF_GPU:
            # PyTorch before 1.11 calls streams "stream 7" rather than 7
            title = f"GPU {str(event.get('pid'))[:40]} stream {thread.removeprefix('stream ')}"
        self.begin_us.append(event["ts"])
        self.length_us.append(event["dur"])
        self.name.append(self.names.setdefault(whole(event["name"]), len(self.names)))
        self.track.append(self.tracks.setdefault(whole(title), len(self.tracks)))


def read_kineto(path: Path) -> KinetoTrace:
    """Read the spans of a trace, as JSON or compressed with gzip.

    Raises:
        UsageError: it cannot be read, is damaged, or has no span or too many.
    """
    columns, rank, base_ns, number = _Columns(), None, 0, 0
    try:
        for key, value in members(path, "traceEvents"):
            if key == "traceEvents":
                number += 1
                columns.add(value)
                if len(columns.name) > MAX_SPANS or number > MAX_EVENTS:
                    raise UsageError(
                        f"{path} has more than {MAX_SPANS:,} spans or {MAX_EVENTS:,} events: profile fewer iterations"
                    )
            elif key == "distributedInfo":
                check(value, {"rank?": COUNT})
                rank = value.get("rank")
            elif key == "baseTimeNanoseconds":
                check(value, NS, key)
                base_ns = value
    except (ValueError, TypeError, AttributeError) as error:
        where = f"{path}, event {number}" if number else str(path)
        raise UsageError(f"{where} is damaged ({error}): export the trace anew") from error
    if not columns.name:
        raise UsageError(f"{path} has no span: it is not a trace of torch.profiler")
    begin_ns = base_ns + np.rint(np.array(columns.begin_us) * 1e3).astype(np.int64)
    length_ns = np.rint(np.array(columns.length_us) * 1e3).astype(np.int64)
    order = np.argsort(begin_ns, kind="stable")
    name, track = (np.array(column, np.int64)[order] for column in (columns.name, columns.track))
    spans = (begin_ns[order], length_ns[order], track, list(columns.tracks))
    return KinetoTrace(path, "torch.profiler", rank, *spans, "", name, list(columns.names))
