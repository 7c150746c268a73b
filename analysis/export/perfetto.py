"""Writes a job's run as a Perfetto trace, on one clock: what each rank and node did, side by side.

The trace is a gzip file of protocol buffers, which ui.perfetto.dev and Perfetto's trace processor open.
"""

from __future__ import annotations

import gzip
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from ringtap.analysis.export.tables import check_length, replacing
from ringtap.analysis.export.trace_writer import TraceWriter, TrackSlice
from ringtap.analysis.job.captured_payload_per_iteration import each_capture
from ringtap.analysis.job.iterations_of_ranks import ALL_PHASES, Work, build, horovod_collectives, logged_passes
from ringtap.analysis.job.run import Job
from ringtap.analysis.job.summary import read_marks
from ringtap.analysis.pcap.export_scan_tables import flow_columns
from ringtap.analysis.process_traces.process_trace import ProcessTrace
from ringtap.analysis.runs.group_steps_into_iterations import process_marks
from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.analysis.runs.run import aligned
from ringtap.analysis.runs.samples_to_iterations import Integers, Numbers, counter_steps
from ringtap.analysis.runs.sockets import socket_log
from ringtap.analysis.runs.traffic_classes import CLASSES
from ringtap.analysis.traffic.flow_logs import FAILED, FINISHED, read_sent
from ringtap.core.append_only_logs import Field
from ringtap.core.errors import UsageError, file_errors
from ringtap.core.installation import lacking
from ringtap.core.json_validation import check, whole
from ringtap.core.run_directory_schema import (
    HOST_REC,
    MARK_RECORD,
    PROCESSES_REC,
    PROFILE_LINE,
    PROFILE_RANGE,
    QDISC_REC,
)
from ringtap.core.units import counted, format_size

# connections of a node with tracks of their own: those that moved most
MAX_FLOWS = 64
# steps of all ranks: about 6 kB of the trace each, and ui.perfetto.dev opens up to 2 GB
MAX_STEPS = 300_000
# flows of one sender of cross traffic: the largest
MAX_SENT = 200_000
# packets of a flow that follow each other within this time are one burst
_GAP_NS = 1_000_000
_CLOCK_VALUES = 200  # of a clock's offset
_ENDS = ("source", "source_port", "destination", "destination_port")
_OF_SOCKET = ("bytes_acked", "bytes_received", "total_retrans")
# folders of logs that are not one record per sample of the node
_NOT_WIDE = {"steps", "sent", "received", "sockets", "qdisc", "clock", "packets"}
_BPS = "bit/s"
_OF_CPU = re.compile(r"cpu\d+\.(busy|iowait|steal)_s")
# of the hundreds of a driver's statistics
_OF_ETHTOOL = re.compile(r".*(_phy|pause|ecn|cnp|drop|discard|error|out_of_buffer|retrans).*")


@dataclass
class Trace:
    """Result of an export as a trace.

    Attributes:
        path: the file.
        iterations: number of iterations of the job.
        slices: number of slices.
        values: number of values of counters.
        size_bytes: size of the file.
        left_out: what was left out or could not be read, one sentence each.
    """

    path: Path
    iterations: int
    slices: int = 0
    values: int = 0
    size_bytes: int = 0
    left_out: list[str] = field(default_factory=list)


def write_perfetto(run: Job, path: Path, others: Sequence[ProcessTrace] = ()) -> Trace:
    """Write a job's run as a Perfetto trace.

    Args:
        run: the job.
        path: the file; an existing one is replaced when the trace is complete.
        others: traces that other tools recorded in processes of this run.

    Raises:
        UsageError: the package perfetto is missing, the run is too long or has no time that is known, a trace of
            another tool is of another run, or the file cannot be written.
    """
    if said := lacking("a Perfetto trace", ("perfetto",)):
        raise UsageError(said)
    check_length(run, MAX_STEPS, "a trace")
    begin_ns = run.logs.window_ns[0]
    if begin_ns <= 0:
        raise UsageError(f"{run.path} holds no iteration and no sample: there is nothing to show")
    trace = Trace(path, int(run.logs.work.phases["iterations"].sum()))
    with file_errors(path, "cannot be written", remedy=": name another file with -o"), replacing(path) as temporary:
        with gzip.open(temporary, "wb", compresslevel=6) as stream:
            writer = TraceWriter(stream, begin_ns)
            _Export(run, writer, trace, others).write()
            writer.flush()
        trace.slices, trace.values, trace.size_bytes = writer.slices, writer.values, temporary.stat().st_size
    if writer.untimed:
        trace.left_out.append(f"{counted(writer.untimed, 'slice or value', 'slices or values')} of times before 1970")
    trace.left_out += [other.left_out for other in others if other.left_out]
    trace.left_out += dict.fromkeys(chain.from_iterable(logs.problems for logs in run.logs.nodes.values()))
    return trace


class _Collective(NamedTuple):
    """A collective of a rank, usually of a bucket of gradients; times on the reference clock."""

    begin_ns: int
    end_ns: int
    name: str
    size_bytes: int | None = None


class _Process(NamedTuple):
    """A process of a rank, and its first and last time on the reference clock."""

    number: int
    rank: int
    pid: int
    logs: NodeLogs
    first_ns: int
    last_ns: int


class _Sources:
    """Communication of a rank from which arrows lead to packets.

    Args:
        spans: begin, end and number of the arrow of each.
    """

    def __init__(self, spans: list[tuple[int, int, int]]) -> None:
        self._spans = sorted(spans)
        self._latest_ns = list(accumulate((end_ns for _, end_ns, _ in self._spans), max))

    def at(self, t_ns: int) -> list[int]:
        """Return the arrows of the communication that runs at a time."""
        found = []
        place = bisect_right(self._spans, t_ns, key=lambda span: span[0]) - 1
        while place >= 0 and self._latest_ns[place] >= t_ns:
            found += [self._spans[place][2]] if self._spans[place][1] >= t_ns else []
            place -= 1
        return found


class _Export:
    """The parts of a trace, in the order in which a viewer lists them."""

    def __init__(self, job: Job, writer: TraceWriter, trace: Trace, others: Sequence[ProcessTrace]) -> None:
        self._job, self._writer, self._trace = job, writer, trace
        self._others: defaultdict[int, list[ProcessTrace]] = defaultdict(list)  # by process
        for other in others:
            self._others[self._process_of(other)].append(other)
        self._sources: dict[int, _Sources] = {}  # by rank
        self._arrows = 0
        self._has_packets = any(logs.captures for logs in job.logs.nodes.values())
        self._first_end = 0  # number of the first socket of the next node, as in the table of flows

    def write(self) -> None:
        """Write the job, its ranks and its nodes."""
        table, track = self._work.iterations, self._writer.process("job")
        self._writer.lanes(track, "iterations", _iterations(table, table["start_ns"], table["end_ns"]))
        self._writer.instants(track, "marks", read_marks(self._job))
        steps = aligned(self._job.logs.run.steps, self._job.logs.nodes)
        passes = logged_passes(self._job.logs.run, process_marks(steps)[0])
        steps_of = steps[steps["kind"] != MARK_RECORD].groupby("process")
        for process, rows in self._work.rank_iterations.groupby("process"):
            own = steps_of.get_group(process) if process in steps_of.groups else steps.iloc[:0]
            self._write_rank(rows, own, passes.get(int(str(process))))
        for logs in self._job.logs.nodes.values():
            self._write_node(logs)

    @cached_property
    def _work(self) -> Work:
        """The iterations of all phases."""
        job = self._job
        return (
            job.logs.work
            if len(job.logs.work.phases) < 2
            else build(job.logs.run, job.logs.nodes, job.logs.batches, ALL_PHASES)
        )

    def _process_of(self, other: ProcessTrace) -> int:
        """Return the process that recorded a trace: of those that may have, the last that began before its end."""
        is_only = len({one.rank for one in self._processes}) == 1
        found = []
        for one in self._processes:
            if other.is_of(one.rank, one.pid, one.logs.info.get("host") or "", is_only):
                begin_ns = one.logs.clock.on_reference(other.begin_ns)
                if begin_ns[0] < one.last_ns and (begin_ns + other.length_ns).max() > one.first_ns:
                    found.append((one.first_ns, one.number))
        if not found:
            where = f"has no time in common with a rank of {self._job.path}"
            raise UsageError(f"{other.path} {where}: {other.origin}")
        return max(found)[1]

    @cached_property
    def _processes(self) -> list[_Process]:
        """The processes of the ranks; one that made no further step may have lived as long as its node was recorded."""
        found = []
        for number, rows in self._work.rank_iterations.groupby("process"):
            logs = self._job.logs.nodes[rows["node"].iloc[0]]
            recorded_ns = logs.clock.to_reference(np.array(logs.recorded_ns))
            first_ns, last_ns = rows[["begin_ns", "step_start_ns"]].min().min(), rows["end_ns"].max()
            rank, pid = int(rows["rank"].iloc[0]), int(rows["pid"].iloc[0])
            times_ns = int(first_ns), max(int(last_ns), int(recorded_ns[1]))
            found.append(_Process(int(str(number)), rank, pid, logs, *times_ns))
        return found

    def _write_rank(self, rows: pd.DataFrame, optimizer_steps: pd.DataFrame, passes: pd.DataFrame | None) -> None:
        """Write the process of a rank.

        Args:
            rows: its rows of `ringtap.analysis.job.iterations_of_ranks.Work.rank_iterations`.
            optimizer_steps: its rows of `ringtap.analysis.runs.run.JobRun.steps`, on the reference clock.
            passes: its passes, as from `logged_passes`; None: not logged.
        """
        rank, pid, logs = int(rows["rank"].iloc[0]), rows["pid"].iloc[0], self._job.logs.nodes[rows["node"].iloc[0]]
        writer, track = self._writer, self._writer.process(f"rank {rank} on {logs.name} (pid {pid})")
        known = rows[rows["begin_ns"].notna()]
        writer.lanes(track, "iterations", _iterations(known, known["begin_ns"], known["end_ns"]))
        exchanges = []
        if passes is None:  # Horovod waits for its collectives when the optimizer steps
            exposed_ns = _pairs(known["begin_ns"], known["step_start_ns"])
        else:
            passes = passes[passes["backward_end_ns"] > 0]  # on a GPU, the times are those at which work was queued
            exposed_ns = _pairs(passes["backward_start_ns"], passes["backward_end_ns"])
            forward = _pairs(passes["forward_start_ns"], passes["forward_start_ns"] + passes["forward_ns"])
            writer.lanes(track, "forward", (TrackSlice(*span, "forward", "computation") for span in forward))
            writer.lanes(track, "backward", (TrackSlice(*span, "backward", "computation") for span in exposed_ns))
            synced = passes[passes["synced"]]
            spans = _pairs(synced["comm_start_ns"], synced["comm_end_ns"])
            exchanges = [_Collective(*span, "communication") for span in spans]
        # the passes that an optimizer asks for come first, and have tracks of their own
        lengths_ns = optimizer_steps["end_mono_ns"] - optimizer_steps["start_mono_ns"] - optimizer_steps["passes_ns"]
        is_own = lengths_ns > 0
        steps = _pairs((optimizer_steps["end_ns"] - lengths_ns)[is_own], optimizer_steps["end_ns"][is_own])
        writer.lanes(track, "optimizer", (TrackSlice(*span, "optimizer step", "computation") for span in steps))
        buckets = sorted(self._collectives(logs, rows), key=lambda one: one.begin_ns)
        begins_ns = [one.begin_ns for one in buckets]
        # arrows lead from the buckets, where they are known
        plain = [bisect_right(begins_ns, one.end_ns) == bisect_left(begins_ns, one.begin_ns) for one in exchanges]
        spans_of: list[tuple[int, int, int]] = []
        for name, found, leads in (("communication", exchanges, plain), ("buckets", buckets, [True] * len(buckets))):
            slices = []
            for one, is_source in zip(found, leads, strict=True):
                arrows = []
                if is_source and self._has_packets:
                    self._arrows += 1
                    arrows = [self._arrows]
                    spans_of.append((one.begin_ns, one.end_ns, self._arrows))
                slices.append(_communication(one, exposed_ns, arrows))
            writer.lanes(track, name, slices)
        self._sources[rank] = _Sources(spans_of)
        for other in self._others[int(rows["process"].iloc[0])]:
            begin_ns = logs.clock.on_reference(other.begin_ns)
            group = writer.track(track, f"{other.tool} {whole(other.path.name)}")
            for number, name in enumerate(other.tracks):
                writer.lanes(group, name, sorted(other.slices(number, begin_ns), key=lambda one: one.begin_ns))

    def _collectives(self, logs: NodeLogs, rows: pd.DataFrame) -> Iterator[_Collective]:
        """Yield the collectives of a rank that its profile or Horovod's timeline timed."""
        path = self._job.logs.run.step_files[int(rows["process"].iloc[0])]
        name = f"steps/{path.name.removesuffix('.rec')}.profile.jsonl"
        for line in logs.lines(name, PROFILE_LINE):
            if line["kind"] == "ranges":
                yield from self._profiled(logs, name, line.get("ranges") or [])
        timeline = horovod_collectives(logs) if rows["rank"].iloc[0] == self._work.processes["rank"].min() else None
        if timeline is None:
            return
        moved = timeline[timeline["transport_start_ns"].notna() & timeline["transport_end_ns"].notna()]
        names = ["transport_start_ns", "transport_end_ns", "transport"]
        for _, tensors in moved.groupby(names):  # those that Horovod sent together
            begin_ns, end_ns, transport = tensors[names].iloc[0]
            size_bytes = tensors["bytes"].sum(min_count=len(tensors))
            size = None if pd.isna(size_bytes) else int(size_bytes)
            yield _Collective(int(begin_ns), int(end_ns), f"{transport}, {counted(len(tensors), 'tensor')}", size)

    def _profiled(self, logs: NodeLogs, name: str, ranges: Sequence[Any]) -> Iterator[_Collective]:
        try:
            items = [dict(zip(PROFILE_RANGE, one, strict=True)) for one in ranges]
            check(items, [PROFILE_RANGE])
        except (TypeError, ValueError) as error:
            logs.report(f"{logs.name}/{name} has damaged times of collectives: {error}")
            return
        times_ns = np.array([item["begin_ns"] for item in items], np.int64)
        for item, begin_ns in zip(items, logs.clock.on_reference(times_ns).tolist(), strict=True):
            yield _Collective(begin_ns, begin_ns + item["length_ns"], item["name"], item["size_bytes"])

    def _write_node(self, logs: NodeLogs) -> None:
        track = self._writer.process(f"node {logs.name}")
        self._write_sent(logs, track)
        self._write_packets(logs, track)
        self._write_sockets(logs, track)
        self._write_queues(logs, track)
        for name in logs.names("*/*.rec"):
            if name.partition("/")[0] not in _NOT_WIDE and name != PROCESSES_REC:
                self._write_samples(logs, track, name)
        self._write_clock(logs, track)

    def _write_sent(self, logs: NodeLogs, parent: int) -> None:
        """Write the flows of cross traffic that a node sent."""
        for name in logs.names("sent/*.rec"):
            sent = logs.read(name, lambda path: read_sent([path]))
            if sent is None:
                continue
            rows = np.flatnonzero(sent.started)
            if len(rows) > MAX_SENT:
                self._trace.left_out.append(
                    f"{logs.name}/{name}: the {MAX_SENT:,} largest of {len(rows):,} flows are shown"
                )
                rows = rows[np.argsort(-sent.received_bytes[rows], kind="stable")[:MAX_SENT]]
            rows = rows[np.argsort(sent.start_ns[rows], kind="stable")]
            is_over = (sent.state == FINISHED) & (sent.finish_ns >= sent.start_ns)
            ends_ns = np.where(is_over, sent.finish_ns, max(sent.last_ns, int(sent.start_ns.max(initial=0))))
            times_ns = (logs.clock.on_reference(sent.origin_ns + column[rows]) for column in (sent.start_ns, ends_ns))
            names = np.where(is_over, "flow", np.where(sent.state == FAILED, "failed flow", "unfinished flow"))[rows]
            facts = zip(sent.flow[rows].tolist(), sent.received_bytes[rows].tolist(), strict=True)
            slices = (
                TrackSlice(begin, end, str(one), "cross traffic", facts=(("flow", number), ("received_bytes", size)))
                for begin, end, one, (number, size) in zip(
                    *(times.tolist() for times in times_ns), names, facts, strict=True
                )
            )
            self._writer.lanes(parent, f"cross traffic {Path(name).stem}", slices)

    def _write_packets(self, logs: NodeLogs, parent: int) -> None:
        """Write the bursts of packets with payload that a node captured."""
        for interface, name, scanned in each_capture(logs):
            packets = scanned.packets[scanned.packets["payload"] > 0]
            times_ns = logs.clock.on_reference(packets["time_ns"])
            sizes = np.bincount(packets["flow"], packets["payload"])
            largest = np.argsort(-sizes, kind="stable")[:MAX_FLOWS]
            largest = largest[sizes[largest] > 0]
            if (left_out := int(np.count_nonzero(sizes)) - len(largest)) > 0:
                self._trace.left_out.append(f"{logs.name}/{name}: {counted(left_out, 'smaller flow')} not shown")
            ends = flow_columns(scanned.conversations, largest)
            group = self._writer.track(parent, f"packets on {interface}")
            for flow, *end in zip(largest.tolist(), *(ends[column] for column in _ENDS), strict=True):
                mine = packets["flow"] == flow
                kind, rank = self._classes.get((logs.name, *end), ("", None))
                sources = self._sources.get(rank) if rank is not None else None
                title = f"{kind} {end[0]}:{end[1]} → {end[2]}:{end[3]}".strip()
                bursts = _bursts(times_ns[mine], packets["payload"][mine], sources)
                self._writer.lanes(group, title, bursts)

    @cached_property
    def _classes(self) -> dict[tuple[Any, ...], tuple[str, int | None]]:
        """Return the class of each flow by node and ends, and at its sender the rank that sends it."""
        found: dict[tuple[Any, ...], tuple[str, int | None]] = {}
        columns = ["source_node", "destination_node", *_ENDS, "traffic_class", "source_rank"]
        for sender, receiver, *ends, kind, rank in self._job.logs.traffic.flows[columns].itertuples(index=False):
            found[(receiver, *ends)] = kind, None
            found[(sender, *ends)] = kind, None if pd.isna(rank) else int(rank)
        return found

    def _write_sockets(self, logs: NodeLogs, parent: int) -> None:
        """Write the rates and retransmissions of a node's connections."""
        log = socket_log(logs)
        if log is None or not len(log.sockets):
            return
        flows = self._job.logs.traffic.flows
        flows = flows[flows["end"].between(self._first_end, self._first_end + len(log.sockets) - 1)]
        flows = flows.assign(end=flows["end"] - self._first_end)
        self._first_end += len(log.sockets)
        flows = flows[flows["payload_bytes"] > 0].nlargest(len(flows), "payload_bytes", keep="first")
        if len(flows) > MAX_FLOWS:
            self._trace.left_out.append(
                f"{logs.name}: the {MAX_FLOWS} largest of {len(flows):,} flows of sockets are shown"
            )
        flows = flows[:MAX_FLOWS].sort_values(
            "traffic_class", key=lambda kinds: kinds.map(CLASSES.index), kind="stable"
        )
        wanted = np.zeros(len(log.sockets), bool)
        wanted[flows["end"]] = True
        parts: list[list[npt.NDArray[Any]]] = []
        for grown in log.growth():
            keep = wanted[grown.end]
            columns = (grown.end, grown.begin_ns, grown.end_ns, *(grown.amounts[name] for name in _OF_SOCKET))
            parts.append([column[keep] for column in columns])
        end, begin_ns, end_ns, *amounts = map(np.concatenate, zip(*parts, strict=True))
        begin_ns, end_ns = (logs.clock.to_reference(times_ns) for times_ns in (begin_ns, end_ns))
        groups: dict[str, int] = {}
        names = ["end", "traffic_class", "measured_at", *_ENDS]
        for number, kind, measured_at, *ends in flows[names].itertuples(index=False):
            mine = np.flatnonzero(end == number)
            mine = mine[np.argsort(begin_ns[mine], kind="stable")]
            acked, received, again = (amount[mine] for amount in amounts)
            if kind not in groups:
                groups[kind] = self._writer.track(parent, f"sockets: {kind}")
            name = f"{ends[0]}:{ends[1]} → {ends[2]}:{ends[3]}"
            bits = 8 * (acked if measured_at == "sender" else received)
            rates = np.rint(bits / (end_ns[mine] - begin_ns[mine]) * 1e9)
            self._writer.counter(groups[kind], name, _BPS, *_held(begin_ns[mine], end_ns[mine], rates))
            if measured_at == "sender":
                total = np.nancumsum(again)
                self._writer.counter(groups[kind], f"{name} retransmissions", "segments", end_ns[mine], total)

    def _write_queues(self, logs: NodeLogs, parent: int) -> None:
        found = logs.records(QDISC_REC)
        if found is None or not len(found[1]):
            return
        file, records = found
        names, group = file.about.get("interfaces") or {}, self._writer.track(parent, "queues")
        keys = np.stack([np.asarray(records[name]).astype(np.int64) for name in ("interface", "handle")], axis=1)
        for interface, handle in np.unique(keys, axis=0).tolist():
            mine = records[(keys == (interface, handle)).all(axis=1)]
            times_ns = logs.clock.to_reference(np.asarray(mine["t_ns"], np.int64))
            title = f"{names.get(str(interface), interface)} {handle >> 16:x}:"
            for name, unit in (("backlog_bytes", "bytes"), ("backlog_packets", "packets")):
                self._writer.counter(group, f"{title} {name}", unit, times_ns, mine[name])
            drops = counter_steps(mine["drops"][:-1], mine["drops"][1:], file.column("drops").wraps_at_bits)
            self._writer.counter(group, f"{title} drops", "packets", times_ns, np.append(0, np.nancumsum(drops)))

    def _write_samples(self, logs: NodeLogs, parent: int, name: str) -> None:
        """Write a log with one record per sample: gauges, and counters as rates."""
        log = logs.wide(name)
        if log is None or len(log) < 2 or "t_ns" not in {item.name for item in log.file.fields}:
            return
        times_ns = logs.clock.to_reference(log.t_ns)
        lengths_s = np.diff(log.t_ns) / 1e9
        lengths_s[lengths_s <= 0] = np.nan
        folder, _, file = name.removesuffix(".rec").partition("/")
        group = self._writer.track(parent, folder if folder == file else f"{folder} {file}")
        cores: dict[str, Numbers] = {}
        for item in log.file.fields:
            if item.kind in ("time", "index") or item.type.startswith("V"):
                continue
            of_cpu = _OF_CPU.fullmatch(item.name) if name == HOST_REC else None
            if of_cpu:
                cores[of_cpu[1]] = cores.get(of_cpu[1], 0.0) + log.steps(item.name) / lengths_s
            elif item.kind == "gauge":
                self._writer.counter(group, item.name, item.unit, times_ns, log.values(item.name))
            elif folder != "ethtool" or _OF_ETHTOOL.fullmatch(item.name):
                title, unit, factor = _rate(item)
                rates = factor * log.steps(item.name) / lengths_s
                self._writer.counter(group, title, unit, times_ns[:-1], np.rint(rates) if unit == _BPS else rates)
        for kind, rates in cores.items():
            self._writer.counter(group, f"cpu {kind}", "processors", times_ns[:-1], rates)

    def _write_clock(self, logs: NodeLogs, parent: int) -> None:
        """Write the offset of a node's clock and the bound of its error, if it was compared with the reference."""
        clock, (begin_ns, end_ns) = logs.clock, logs.recorded_ns
        if clock.error_ns is None or not end_ns:
            return
        own_ns = np.linspace(begin_ns, end_ns, _CLOCK_VALUES).astype(np.int64)
        times_ns = clock.to_reference(own_ns)
        group = self._writer.track(parent, "clock")
        self._writer.counter(group, f"offset from {clock.reference}", "ns", times_ns, own_ns - times_ns)
        self._writer.counter(group, "error bound", "ns", times_ns[:1], np.array([clock.error_ns]))


def _pairs(begin_ns: pd.Series[Any], end_ns: pd.Series[Any]) -> list[tuple[int, int]]:
    """Return begins and ends that are known (0: not known), in order."""
    begin, end = begin_ns.to_numpy(np.int64), end_ns.to_numpy(np.int64)
    known = (begin > 0) & (end >= begin)
    return sorted(zip(begin[known].tolist(), end[known].tolist(), strict=True))


def _iterations(rows: pd.DataFrame, begin_ns: pd.Series[Any], end_ns: pd.Series[Any]) -> Iterator[TrackSlice]:
    for number, begin, end in zip(rows["iteration"].tolist(), begin_ns.tolist(), end_ns.tolist(), strict=True):
        yield TrackSlice(begin, end, f"iteration {number}", "iteration")


def _communication(one: _Collective, exposed_ns: list[tuple[int, int]], arrows: list[int]) -> TrackSlice:
    """Return a collective with its hidden and its exposed part.

    Args:
        one: the collective.
        exposed_ns: begin of each computation that hides communication, and its end.
        arrows: numbers of its arrows.
    """
    place = bisect_right(exposed_ns, one.begin_ns, key=lambda pair: pair[0]) - 1
    parts: list[TrackSlice] = []
    if place >= 0:
        at_ns = min(max(exposed_ns[place][1], one.begin_ns), one.end_ns)
        spans = ((one.begin_ns, at_ns, "hidden"), (at_ns, one.end_ns, "exposed"))
        parts = [TrackSlice(*span, span[2]) for span in spans if span[1] > span[0]]
    size = "" if one.size_bytes is None else f", {format_size(one.size_bytes)}"
    facts = () if one.size_bytes is None else (("size_bytes", one.size_bytes),)
    return TrackSlice(one.begin_ns, one.end_ns, one.name + size, "communication", arrows, parts, facts)


def _bursts(times_ns: Integers, payload: Integers, sources: _Sources | None) -> Iterator[TrackSlice]:
    """Yield the bursts of a flow's packets, with the arrows that lead to them."""
    order = np.argsort(times_ns, kind="stable")
    times_ns, payload = times_ns[order], payload[order].astype(np.int64)
    edges = np.flatnonzero(np.diff(times_ns) > _GAP_NS) + 1
    firsts = np.append(0, edges)
    lasts = np.append(edges, len(times_ns)) - 1
    sums, counts = np.add.reduceat(payload, firsts), lasts - firsts + 1
    columns = (column.tolist() for column in (times_ns[firsts], times_ns[lasts], sums, counts))
    for begin, end, size, count in zip(*columns, strict=True):
        arrows = [] if sources is None else sources.at(begin)
        facts = (("packets", count), ("payload_bytes", size))
        yield TrackSlice(begin, end, f"{counted(count, 'packet')}, {format_size(size)}", "packets", arrows, facts=facts)


def _held(begin_ns: Integers, end_ns: Integers, values: Numbers) -> tuple[Integers, Numbers]:
    """Return the steps of a rate that is 0 between growths of a counter, as in a log of changes."""
    falls = np.append(begin_ns[1:] > end_ns[:-1], True)
    times_ns = np.concatenate((begin_ns, end_ns[falls]))
    order = np.argsort(times_ns, kind="stable")
    return times_ns[order], np.concatenate((values, np.zeros(np.count_nonzero(falls))))[order]


def _rate(item: Field) -> tuple[str, str, float]:
    """Return the title of a counter's rate, its unit and the factor of its growth per second."""
    if item.unit == "bytes" or item.octets > 1:
        return item.name.removesuffix("_bytes"), _BPS, 8.0 * item.octets
    unit = item.unit.partition(",")[0]
    return item.name, f"{unit}/s" if unit else "1/s", 1.0
