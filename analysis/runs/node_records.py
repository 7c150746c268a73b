"""Reads a node's logs in a run directory, which may be missing, torn, cut off or still being written."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ringtap.analysis.runs.read_binary_records import Records, map_records
from ringtap.analysis.runs.reference_clock import NodeClock, read_clock, steps_of
from ringtap.analysis.runs.samples_to_iterations import (
    Borders,
    Integers,
    Numbers,
    counter_steps,
    growth,
    longest_gaps_ns,
    mean_in,
)
from ringtap.core.append_only_logs import RecordFile, each_json_line
from ringtap.core.clock_steps import clock_set_ns
from ringtap.core.errors import RingtapError, RingtapWarning
from ringtap.core.json_validation import Shape, load_json, whole
from ringtap.core.run_directory import recording_begin
from ringtap.core.run_directory_schema import (
    CLOCK_JSON,
    HOST_REC,
    NIC_REC,
    NODE,
    NODE_JSON,
    PACKETS_RING,
    PROCESS,
    PROCESSES_JSONL,
    PROCESSES_REC,
    QDISC_REC,
    SOCKETS_REC,
)
from ringtap.core.untrusted_files import open_regular

T = TypeVar("T")
_MAX_REPORTED = 5  # damaged lines of one file that are reported individually
# logs of collectors that sample from the beginning of the run to its end
SAMPLED = (NIC_REC, HOST_REC, SOCKETS_REC, QDISC_REC, PROCESSES_REC)


class WideLog:
    """Log with one record per sample: counters and gauges of a node.

    Attributes:
        file: its header.
        t_ns: times of the samples, CLOCK_REALTIME of the node, ascending.
        columns: names of the columns, without times and indices.
    """

    def __init__(self, file: RecordFile, records: Records) -> None:
        self.file = file
        self._records = records
        self.t_ns: Integers = np.maximum.accumulate(np.asarray(records["t_ns"], np.int64))
        self.columns = [field.name for field in file.fields if field.kind not in ("time", "index")]

    def __len__(self) -> int:
        return len(self.t_ns)

    def values(self, column: str) -> npt.NDArray[Any]:
        """Return the samples of a column as recorded."""
        return np.asarray(self._records[column])

    def steps(self, column: str) -> Numbers:
        """Return the growth of a counter from each sample to the next; NaN where it was reset."""
        values = self.values(column)
        return counter_steps(values[:-1], values[1:], self.file.column(column).wraps_at_bits)

    def growth(self, column: str, borders: Borders) -> Numbers:
        """Return the growth of a counter in each bin; NaN for bins in which it is not known."""
        return growth(self.t_ns, self.steps(column), borders, longest_gaps_ns(borders, self._period_ns))

    @cached_property
    def _period_ns(self) -> float:
        """Usual time between samples; 0 without two."""
        return float(np.median(np.diff(self.t_ns))) if len(self) > 1 else 0.0

    def mean(self, column: str, borders: Borders) -> Numbers:
        """Return the mean of a gauge in each bin; NaN for bins that are not covered."""
        return mean_in(self.t_ns, self.values(column), borders)


class NodeLogs:
    """Logs of one node's folder.

    Attributes:
        path: the folder.
        name: the node's name.
        problems: files or lines that could not be read, with reasons, one sentence each; grows as logs are read.
        torn: logs that end in a torn record, which was dropped; grows as logs are read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = whole(path.name)
        self.problems: list[str] = []
        self.torn: list[str] = []
        self._records: dict[str, tuple[RecordFile, Records] | None] = {}

    def _tolerant(self, relative: str, read: Callable[[Path], T], otherwise: T) -> T:
        try:
            return read(self.path / relative)
        except FileNotFoundError:
            return otherwise
        except (RingtapError, OSError, ValueError, KeyError, TypeError) as error:
            self.report(f"{self.name}/{relative} cannot be used: {getattr(error, 'strerror', None) or error}")
            return otherwise

    def report(self, *problems: str) -> None:
        """Add sentences to `problems`, and warn of them."""
        self.problems += problems
        for problem in problems:
            warnings.warn(problem, RingtapWarning, stacklevel=2)

    def read(self, relative: str, read: Callable[[Path], T]) -> T | None:
        """Apply a function to a file; return None if the file is missing or damaged."""
        return self._tolerant(relative, read, None)

    def json(self, relative: str, shape: Shape) -> dict[str, Any]:
        """Read a JSON object of the given shape; empty if the file is missing or damaged."""
        empty: dict[str, Any] = {}
        return self._tolerant(relative, lambda path: load_json(path, shape), empty)

    def lines(self, relative: str, shape: Shape) -> list[dict[str, Any]]:
        """Read a JSON Lines file; invalid lines are dropped and noted in `problems`, a torn last line in `torn`."""

        def read(path: Path) -> list[dict[str, Any]]:
            items: list[dict[str, Any]] = []
            damaged: list[str] = []
            for line in each_json_line(path, shape):
                if line.item is not None:
                    items.append(line.item)
                elif line.torn:
                    self.torn.append(f"{self.name}/{relative}")
                elif len(damaged) < _MAX_REPORTED:
                    damaged.append(f"{self.name}/{relative} line {line.number} is left out: {line.why}")
                else:
                    damaged[-1] = (
                        f"{self.name}/{relative}: {_MAX_REPORTED} or more lines are left out, up to line {line.number}"
                    )
            self.report(*damaged)
            return items

        return self._tolerant(relative, read, [])

    def records(self, relative: str) -> tuple[RecordFile, Records] | None:
        """Map a record file; return None if it is missing, has no whole header or is damaged.

        If the node's clock was set, ``t_ns`` is as if it had not been, except in the ranks' step logs.
        """
        if relative not in self._records:
            self._records[relative] = self._map(relative)
        return self._records[relative]

    def _map(self, relative: str) -> tuple[RecordFile, Records] | None:

        def read(path: Path) -> tuple[RecordFile, Records] | None:
            file, records, torn = map_records(path)
            if torn:
                self.torn.append(f"{self.name}/{relative}")
            # readers of the ranks' step logs convert times themselves
            is_sampled = not relative.startswith("steps/") and len(records)
            if is_sampled and {"t_ns", "mono_ns"} <= set(records.dtype.names or ()):
                ends = records[["t_ns", "mono_ns"]][[0, -1]]
                if self.clock.steps or clock_set_ns((ends["t_ns"] - ends["mono_ns"]).tolist()):
                    records = np.array(records)
                    records["t_ns"] = self.clock.unstepped(records["t_ns"], records["mono_ns"])
            return None if file is None else (file, records)

        return self._tolerant(relative, read, None)

    def wide(self, relative: str) -> WideLog | None:
        """Return a log with one record per sample; None if it is missing, empty or damaged."""
        found = self.records(relative)
        if found is None or not len(found[1]):
            return None
        return self._tolerant(relative, lambda _: WideLog(*found), None)

    def regular(self, names: Iterable[str]) -> list[str]:
        """Return the names of regular files, relative to the folder; the others are noted in `problems`."""
        return [name for name in names if self._tolerant(name, _is_regular, False)]

    def names(self, pattern: str) -> list[str]:
        """Return the files that match a pattern, relative to the folder, in order."""
        return [str(path.relative_to(self.path)) for path in sorted(self.path.glob(pattern))]

    @cached_property
    def captures(self) -> list[str]:
        """Files with packets; `undecided_captures` come last."""
        return self.regular(self.names("packets/*.pcap*")) + self.undecided_captures

    @cached_property
    def undecided_captures(self) -> list[str]:
        """Files with packets of which none is deleted yet, although only those around slow iterations were wanted.

        They stay if the agent was killed.
        """
        return self.regular(self.names(f"{PACKETS_RING}/*.pcap*"))

    @cached_property
    def info(self) -> dict[str, Any]:
        """Content of node.json; empty if the agent was ended before writing it."""
        return self.json(NODE_JSON, NODE)

    @property
    def facts(self) -> list[dict[str, Any]]:
        """Content of node.json about the node before the run and after it."""
        return [self.info.get(when) or {} for when in ("before", "after")]

    @cached_property
    def recorded_ns(self) -> tuple[int, int]:
        """Times of the first and the last sample of any collector, by the node's clock; (0, 0) without samples.

        A log of changes may end long before its collector did.
        """
        times: list[int] = []
        for name in SAMPLED:
            found = self.records(name)
            if found is not None and len(found[1]):
                times += [int(found[1]["t_ns"][0]), int(found[1]["t_ns"][-1])]
        return (min(times), max(times)) if times else (0, 0)

    @property
    def agent_ns(self) -> tuple[int, int]:
        """Times of the agent's start and end, by the node's clock; (0, 0) if one of them is not known."""
        agent = self.info.get("agent") or {}
        begin, end = agent.get("began_ns"), agent.get("ended_ns")
        return (begin, end) if begin and end else (0, 0)

    @cached_property
    def rank_of_pid(self) -> dict[int, int | None]:
        """Known ranks of the job's processes, by process id.

        The rank that a process logs in its process group takes precedence: its environment may have no rank
        (torch.multiprocessing.spawn), or that of its launcher. Processes started by a rank (data loaders) have its
        rank; a process that started several ranks has none (None).
        """
        own: dict[int, int] = {}
        for name in self.names("steps/rank*.rec"):
            about = found[0].about if (found := self.records(name)) else {}
            pid, rank, size = (about.get(key) for key in ("pid", "rank", "world_size"))
            if isinstance(pid, int) and isinstance(rank, int) and isinstance(size, int) and size > 1:
                own[pid] = rank
        parents: dict[int, int] = {}
        reported: dict[int, int] = {}
        for line in self.lines(PROCESSES_JSONL, PROCESS):
            for values, key in ((parents, "parent"), (reported, "rank")):
                if line.get(key) is not None:
                    values[line["pid"]] = line[key]
        started: dict[int, set[int]] = {}
        for pid, rank in own.items():
            for ancestor in _ancestors(pid, parents):
                started.setdefault(ancestor, set()).add(rank)
        ranks = {pid: rank if len(started.get(pid, ())) < 2 else None for pid, rank in reported.items()}
        for pid in parents:
            nearest = next((ancestor for ancestor in _ancestors(pid, parents) if ancestor in own), None)
            ranks |= {} if nearest is None else {pid: own[nearest]}
        return ranks | own

    def covers(self, relative: str, borders: Borders) -> npt.NDArray[np.bool_]:
        """Return a mask of the bins that a log of changes covers; ``borders`` are by the node's clock.

        Its collector is assumed to have run as long as the others, unless node.json reports that it failed.
        """
        begin, end = self.recorded_ns
        found, entry = self.records(relative), self.collectors.get(relative.partition("/")[0], {})
        if found is not None and len(found[1]) and entry.get("state", "ok") not in ("ok", "degraded"):
            begin, end = int(found[1]["t_ns"][0]), int(found[1]["t_ns"][-1])
        return (borders.edges_ns[:-1] >= begin) & (borders.edges_ns[1:] <= end)

    @property
    def done(self) -> bool:
        """True if the agent wrote everything."""
        return (self.path / "DONE").exists()

    @cached_property
    def clock(self) -> NodeClock:
        """Clock of the node by clock/clock.json; without it offset 0, unknown error and the steps in node.json."""
        clock = self.read(CLOCK_JSON, read_clock) or NodeClock(steps=steps_of(self.info.get("clock_steps")))
        return clock.since(recording_begin(self.path))

    @cached_property
    def collectors(self) -> dict[str, dict[str, Any]]:
        """Entries of the collectors in node.json, by name."""
        return self.info.get("collectors") or {}


def _is_regular(path: Path) -> bool:
    open_regular(path).close()
    return True


def _ancestors(pid: int, parents: dict[int, int]) -> list[int]:
    """Return the ancestors of a process, nearest first."""
    found: list[int] = []
    while (pid := parents.get(pid, 0)) and pid not in found:
        found.append(pid)
    return found
