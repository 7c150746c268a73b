"""Follows a run directory that is being written: new records of every node's logs, kept for minutes at most."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ringtap.analysis.live.flows import Owners, SocketTotals
from ringtap.analysis.live.iterations import MAX_KEPT, STEP_FILE, PassTimes, RankSteps, choose_worlds
from ringtap.analysis.live.recent_counters import Keyed, RecentWideLog
from ringtap.analysis.live.recent_traffic import RecentTraffic
from ringtap.analysis.runs.growing_files import Document, LinesTail, Record, RecordTail, TextTail, since
from ringtap.analysis.runs.reference_clock import NodeClock, read_clock
from ringtap.core.append_only_logs import JsonLinesWriter, RecordFile
from ringtap.core.errors import UsageError, error_message
from ringtap.core.json_validation import ShapeError
from ringtap.core.run_directory import process_age_ns, recording_begin
from ringtap.core.run_directory_schema import (
    CLOCK,
    CLOCK_JSON,
    HOST_REC,
    MARK,
    MARKS_JSONL,
    NODE,
    NODE_JSON,
    OWNER,
    OWNERS_JSONL,
    PACKETS,
    PACKETS_JSON,
    PROCESS,
    PROCESSES_JSONL,
    RUN,
    RUN_JSON,
    pass_source,
)

_METERED = ("nic", "infiniband", HOST_REC, "sockets", "steps")
# metrics are cheap because, once a rank has stepped, new files and documents are looked for less often than records
_LOOK_S = 15.0
_SHOWN = (*_METERED, "host", "ethtool", "gpu", "packets", "qdisc")
_MAX_MARKS = 100
_NICENESS = 10
# Reading of a log starts this long before its last record: a queue or an idle socket may not have changed for long, and
# steps are shown as a history
_BACK_S = {"qdisc": 60.0, "sockets": 10.0, "steps": 600.0}
_USUAL_BACK_S = 2.5
_PROCESS_GONE_NS = 200 * 10**9  # longer than three of the longest periods
_PROCESS_SAMPLES = 300  # of a process, once a second


def lower_priority() -> None:
    """Lower the priority of this process, which may share the machine with the job."""
    with suppress(OSError):
        os.nice(_NICENESS)


def write_mark(run: Path, t_ns: int, text: str) -> None:
    """Append a mark to a run.

    Args:
        run: the run directory.
        t_ns: the marked moment, CLOCK_REALTIME.
        text: the mark's text; may be empty.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        (run / RUN_JSON).stat()  # a mark must not recreate a run that was removed meanwhile
        writer = JsonLinesWriter(run / MARKS_JSONL)
        try:
            writer.append({"t_ns": t_ns, "text": text})
        finally:
            writer.close()
    except OSError as error:
        raise UsageError(f"The mark cannot be written to {run}: {error_message(error)}") from error


class NodeLog:
    """Logs of one node, as far as they have been read.

    Args:
        path: folder of the node.
        is_metered: read only what metrics need, and add up the sockets.
        is_diagnosed: keep the traffic of the last minutes.

    Attributes:
        name: the node.
        path: folder of the node.
        wide: files with one record per sample, by collector and file name.
        keyed: files with one record per item (socket, queue, process), by collector and file name.
        owners: owners of its sockets, and its processes.
        ranks: step records of its ranks, by file.
        mono_ns: the node's newest CLOCK_MONOTONIC in any log.
        bytes: size of its logs by collector.
        totals: totals over its sockets; None unless metered.
        traffic: traffic of its sockets; None unless it is diagnosed.
    """

    def __init__(self, path: Path, is_metered: bool = False, is_diagnosed: bool = True) -> None:
        self.name, self.path = path.name, path
        self.wide: dict[tuple[str, str], RecentWideLog] = {}
        self.keyed = {
            ("sockets", "sockets"): Keyed(("cookie",), gone=("state", 0)),
            ("qdisc", "qdisc"): Keyed(("interface", "handle", "parent"), peaks=("backlog_bytes", "backlog_packets")),
            ("host", "processes"): Keyed(("pid",), stale_ns=_PROCESS_GONE_NS, samples=_PROCESS_SAMPLES),
        }
        self.owners = Owners()
        self.totals = SocketTotals(self.owners) if is_metered else None
        self.traffic = RecentTraffic(self.owners, self.to_reference) if is_diagnosed else None
        self.ranks: dict[Path, RankSteps] = {}
        self.mono_ns = 0
        self.bytes: dict[str, int] = {}
        self.failures: dict[str, str] = {}
        self.node = Document(path / NODE_JSON, NODE)
        self.clock = Document(path / CLOCK_JSON, CLOCK)
        self._node_clock = NodeClock()
        self.packets = Document(path / PACKETS_JSON, PACKETS)
        self.output = TextTail(path / "log" / "job.out")
        self._lines: list[tuple[LinesTail, Callable[[dict[str, Any]], None]]] = [
            (LinesTail(path / OWNERS_JSONL, OWNER), self.owners.add_owner),
            (LinesTail(path / PROCESSES_JSONL, PROCESS), self.owners.add_process),
        ]
        self._look_s = 0.0
        self._tails: dict[Path, RecordTail] = {}
        self._opened: dict[Path, RecordFile] = {}
        self._passes: dict[Path, PassTimes] = {}  # by the path of the step log

    @property
    def done(self) -> bool:
        """True if the node's agent has ended and written ``DONE``."""
        return (self.path / "DONE").exists()

    @property
    def t_ns(self) -> int:
        """The node's newest CLOCK_REALTIME in any log, 0 before the first."""
        steps = (steps.last_end_ns for steps in self.ranks.values())
        return max([0, *steps, *(file.t_ns for file in self._series())])

    @property
    def facts(self) -> dict[str, Any]:
        """Content of node.json about the node before the run."""
        return self.node.item.get("before") or {}

    def _series(self) -> list[RecentWideLog | Keyed]:
        return [*self.wide.values(), *self.keyed.values()]

    def to_reference(self, t_ns: int, mono_ns: int) -> int:
        """Convert a time of this node's clocks to the reference node's clock, as far as the offset is known."""
        return self._node_clock.moment_on_reference(t_ns, mono_ns)

    def poll(self) -> None:
        """Read what was added since the last poll."""
        now_s = time.monotonic()
        if now_s >= self._look_s:
            self._look_s = now_s + (_LOOK_S if self.totals and self.ranks else 0)
            self._poll_documents()
            self._discover()
        for lines, take in self._lines:
            for item in lines.poll():
                take(item)
        for path, tail in self._tails.items():
            for batch in tail.poll():
                if tail.file is not self._opened.get(path):
                    assert tail.file is not None
                    self._open(path, tail, tail.file)
                self._feed(path, batch)
            if tail.failure:
                self.failures[path.parent.name] = tail.failure
        for file in self._series():
            self.mono_ns = max(self.mono_ns, file.mono_ns)
        for series in self.keyed.values():
            series.commit(self.mono_ns)
        sockets, processes = self.keyed["sockets", "sockets"], self.keyed["host", "processes"]
        inodes = self.totals.inodes if self.totals else sockets.values("inode")
        self.owners.forget_ended(inodes, processes.latest.keys() if processes.file else None)

    def _poll_documents(self) -> None:
        self.node.poll()
        if self.totals:
            self.totals.began_ns = (self.node.item.get("agent") or {}).get("began_ns")
        else:
            self.packets.poll()
            self.output.poll()
        if self.clock.poll():
            with suppress(OSError, ShapeError):  # replaced once more: the next poll reads it
                self._node_clock = read_clock(self.clock.path)
        if self._node_clock.gap_ns is None:
            self._node_clock = self._node_clock.since(recording_begin(self.path))

    def _discover(self) -> None:
        """Find new record files, and sum up the bytes that each collector has written."""
        sizes: dict[str, int] = {}
        for folder in _folders(self.path):
            with os.scandir(folder) as entries:
                for entry in entries:
                    try:
                        sizes[folder.name] = sizes.get(folder.name, 0) + entry.stat().st_size
                    except OSError:
                        continue
                    path = folder / entry.name
                    if (
                        path.suffix == ".rec"
                        and path not in self._tails
                        and _is_in(path, _METERED if self.totals else _SHOWN)
                    ):
                        self._tails[path] = RecordTail(path, _begin(path))
        self.bytes = sizes

    def _open(self, path: Path, tail: RecordTail, file: RecordFile) -> None:
        """Prepare for the records of a file whose header is known."""
        self._opened[path] = file
        key = (path.parent.name, path.stem)
        name = STEP_FILE.fullmatch(path.name) if key[0] == "steps" else None
        if name and name[3]:
            return
        if name:
            steps = RankSteps(self.name, int(name[1]), int(name[2]), file, self.to_reference)
            steps.passes = self._passes.setdefault(path, steps.passes)
            self.ranks[path] = steps
            first = tail.first or ()
            if steps.world_size > 1:
                self.owners.step_ranks[steps.pid] = steps.rank
            if first:
                steps.began = _begin_of(file, first)
        elif (series := self._keyed(path)) is not None:
            series.begin(file)
        else:
            self.wide[key] = RecentWideLog(file, tail.first)

    def _keyed(self, path: Path) -> Keyed | None:
        """Return the series a file belongs to; `sockets-2.rec` continues `sockets.rec`."""
        stem = path.stem.rstrip("0123456789").rstrip("-.") or path.stem
        return self.keyed.get((path.parent.name, stem))

    def _feed(self, path: Path, batch: list[Any]) -> None:
        key = (path.parent.name, path.stem)
        if path in self.ranks:
            self.ranks[path].feed(batch)
        elif source := pass_source(path.name):
            # the first pass may precede the first step of the process
            step_log = path.with_name(f"{path.name.partition('.')[0]}.rec")
            times = self._passes.setdefault(step_log, PassTimes(self.to_reference))
            times.source = source
            times.feed(self._opened[path], batch)
        elif (series := self._keyed(path)) is not None:
            if self.traffic and path.parent.name == "sockets":
                self.traffic.feed(self._opened[path], batch, self._tails[path].skipped > 0)
            if self.totals and series.file:
                self.totals.feed(series.file, batch, self._tails[path].skipped > 0)
            else:
                series.feed(batch)
        else:
            self.wide[key].feed(batch)


def _folders(node: Path) -> list[Path]:
    try:
        with os.scandir(node) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir())
    except OSError:
        return []


def _begin(path: Path) -> Callable[[RecordFile], int]:
    """Return the function that chooses the first record to read in a file that already has records."""
    if pass_source(path.name):
        return lambda file: max(0, file.count - MAX_KEPT)
    column = "end_ns" if path.parent.name == "steps" else "mono_ns"
    return since(_BACK_S.get(path.parent.name, _USUAL_BACK_S), column, MAX_KEPT * 20)


def _begin_of(file: RecordFile, first: Record) -> tuple[int, int]:
    """Return the start of the process that made a step log, or of its first step if the log does not hold it.

    It is by CLOCK_REALTIME and by CLOCK_MONOTONIC.
    """
    start_ns, end_ns, mono_ns = (int(first[file.index[name]]) for name in ("start_ns", "end_ns", "end_mono_ns"))
    ago_ns = max(end_ns - start_ns, process_age_ns(file))
    return end_ns - ago_ns, mono_ns - ago_ns


def _is_in(path: Path, wanted: Sequence[str]) -> bool:
    """Return True if a record file holds data of the wanted collectors."""
    folder = path.parent.name
    return (folder in wanted or f"{folder}/{path.name}" in wanted) and (
        folder != "steps" or STEP_FILE.fullmatch(path.name) is not None
    )


class RunFollower:
    """Reader of a run directory; `poll` reads what all its nodes have added.

    Args:
        path: the run directory.
        node: the only node to read; all if empty.
        is_metered: read only what metrics need, and add up the sockets.

    The traffic of the last minutes is kept unless only one node is read: its ranks alone do not say why a job is slow.

    Attributes:
        info: run.json's last readable state.
        nodes: logs of each node, by name.
        marks: the last marks that viewers have made.
    """

    def __init__(self, path: Path, node: str = "", is_metered: bool = False) -> None:
        self.path, self._node, self._is_metered = path, node, is_metered
        self.nodes: dict[str, NodeLog] = {}
        self.marks: deque[dict[str, Any]] = deque(maxlen=_MAX_MARKS)
        self._run = Document(path / RUN_JSON, RUN)
        self._marks = LinesTail(path / MARKS_JSONL, MARK)

    @property
    def info(self) -> dict[str, Any]:
        """run.json's last readable state."""
        return self._run.item

    def poll(self) -> None:
        """Read what was added since the last poll."""
        self._run.poll()
        self.marks.extend(self._marks.poll())
        nodes = self.path / "nodes"
        for folder in [nodes / self._node] if self._node else _folders(nodes):
            if folder.name not in self.nodes:
                self.nodes[folder.name] = NodeLog(folder, self._is_metered, not self._node)
        for node in self.nodes.values():
            node.poll()
        addresses = self.node_of_address
        for node in self.nodes.values():
            if node.traffic and node.mono_ns:
                node.traffic.commit((node.t_ns, node.mono_ns), addresses, node.name)
        if ranks := self.ranks:
            choose_worlds(ranks)  # which of them ran at the same time is known only as they go on

    @property
    def node_of_address(self) -> dict[str, str]:
        """The node of each address of an interface, without loopback."""
        return {
            str(address): node.name
            for node in self.nodes.values()
            for name, nic in node.facts.get("nics", {}).items()
            for address in nic.get("addresses") or ()
            if name != "lo"
        }

    @property
    def ranks(self) -> list[RankSteps]:
        """The step records of all ranks on all nodes."""
        return [steps for node in self.nodes.values() for steps in node.ranks.values()]
