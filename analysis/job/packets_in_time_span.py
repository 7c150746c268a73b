"""Reads packets that a run recorded in an iteration or a span of time, from all its nodes and on one clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import ringtap
from ringtap.analysis.job.captured_payload_per_iteration import interface_in, lost_packets, undecided_warnings
from ringtap.analysis.job.iterations_of_ranks import check_iteration
from ringtap.analysis.pcap.capture_text import damage
from ringtap.analysis.pcap.flow_filter import matches
from ringtap.analysis.pcap.kernels.scan_state import MAX_NS
from ringtap.analysis.pcap.scan_captures import Progress, check_filter, scan_packets
from ringtap.analysis.pcap.single_packets import CapturedPackets, CapturePoint, Integers, Slice, read_packets
from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.core.errors import UsageError
from ringtap.core.run_directory_schema import PACKETS
from ringtap.core.units import counted, format_duration

if TYPE_CHECKING:
    from ringtap.analysis.job.run import Job

_HOW = "record them with 'ringtap run --collect default,packets'"


@dataclass(frozen=True)
class _Capture:
    """A capture of a node: its file below the node's folder, and the facts that the capture program left."""

    logs: NodeLogs
    name: str
    facts: Mapping[str, Any]

    @property
    def interface(self) -> str:
        return str(self.facts.get("interface") or interface_in(self.name))


class PointSpan(NamedTuple):
    """Time in which packets were recorded at a point of a sweep, by the reference clock.

    Attributes:
        name: the point in words.
        sweep: name of the sweep.
        begin_ns: begin of the time.
        end_ns: its end.
        shares_clock: True if all hosts have one clock, as those of a testbed do.
    """

    name: str
    sweep: str
    begin_ns: int
    end_ns: int
    shares_clock: bool


def read_slice(
    job: Job,
    iteration: int | None = None,
    filter: str | None = None,
    *,
    span: PointSpan | None = None,
    progress: Progress | None = None,
) -> Slice:
    """Read the packets that a run recorded.

    Args:
        job: the run.
        iteration: number of an iteration; None for the whole recording.
        filter: keep only the packets that this filter in tcpdump's language accepts.
        span: the time of a point, in place of an iteration.
        progress: as for `read_captures`.

    Raises:
        UsageError: there is no such iteration, no packet of it, or no packets in the run; or the filter is wrong.
    """
    if filter is not None:
        check_filter(filter)
    name = "" if span is None else span.name
    if iteration is not None:
        iteration = check_iteration(job.path, job.logs.work.iterations, iteration)
        name = f"iteration {iteration}"
    captures = [capture for logs in job.logs.nodes.values() for capture in _captures(logs)]
    if not captures:
        raise UsageError(f"{job.path} has no packets: {_reason(job)}")
    points = [_point(job, capture, iteration, span) for capture in captures]
    accepts, warnings = None if filter is None else partial(matches, filter), dict[str, None]()
    found = read_packets(points, accepts, progress, warnings.setdefault)
    if not len(found):
        what = name or str(job.path)
        if accepts is not None and len(read_packets(points, progress=progress, skipped=warnings.setdefault)):
            raise UsageError(f"no packet of {what} matches {filter!r}")
        raise UsageError(f"no packet of {what} was captured{_captured(job, captures, bool(name))}")
    clock, error_ns = _clock(job, tuple(dict.fromkeys(capture.logs.name for capture in captures)))
    if span is not None and span.shares_clock:
        clock, error_ns = "times by the clock that all hosts share", 0.0
    run = job.path.resolve().name if span is None else span.sweep
    found.about = "; ".join((f"{run}, {name or 'all packets'}", clock, f"ringtap {ringtap.__version__}"))
    found.comments |= _comments(job, found, iteration)
    warnings |= dict.fromkeys(_warnings(captures, points, found))
    if filter is None:
        seen = {one.node for one in found.interfaces}
        missing = (point.node for point in points if point.node not in seen)
        warnings |= dict.fromkeys(f"{node} captured no packet of {name or 'the job'}" for node in missing)
    return Slice(found, name, clock, error_ns, tuple(warnings))


def _captures(logs: NodeLogs) -> Iterator[_Capture]:
    facts: dict[str, dict[str, Any]] = {}
    for path in logs.names("packets/*.json"):
        item = logs.json(path, PACKETS)
        # only a node's own capture has these, and names no files while it keeps packets around slow iterations
        own = logs.captures if item.get("files") is None else logs.undecided_captures
        facts |= dict.fromkeys([*(f"packets/{name}" for name in item.get("files") or ()), *own], item)
    for path in logs.captures:
        yield _Capture(logs, path, facts.get(path, {}))


def _point(job: Job, capture: _Capture, iteration: int | None, span: PointSpan | None) -> CapturePoint:
    logs = capture.logs
    begin_ns, end_ns = 0, MAX_NS
    if iteration is not None:  # the borders by which the analysis counts
        at = int(job.logs.borders.bin_of[iteration])
        begin_ns, end_ns = job.logs.borders_at[logs.name].edges_ns[at : at + 2].tolist()
    elif span is not None:
        begin_ns, end_ns = logs.clock.from_reference(np.array(span[2:4], np.int64)).tolist()
    return CapturePoint(
        logs.path / capture.name,
        begin_ns,
        end_ns,
        logs.clock.to_reference,
        logs.clock.unstepped if logs.clock.steps else None,
        logs.name,
        capture.interface,
    )


def _reason(job: Job) -> str:
    """Return the reasons why a run has no packets, and what to do."""
    table = job.collectors
    mine = table[table["collector"] == "packets"]
    said = [
        f"{node}: {reason or state}" + (f" ({remedy})" if remedy else "")
        for node, state, reason, remedy in mine[["node", "state", "reason", "remedy"]].to_numpy().tolist()
    ]
    return f"{'; '.join(said) or 'no node was recorded'}; {_HOW}"


def _captured(job: Job, captures: list[_Capture], is_part: bool) -> str:
    """Return a clause about the iterations that were captured."""
    if not is_part:
        return ": the captures are empty"
    seen = np.zeros(job.logs.borders.bins, bool)
    for capture in captures:
        try:
            times_ns = scan_packets(capture.logs.path / capture.name).packets["time_ns"]
        except UsageError:  # it is empty, or no capture
            continue
        edges_ns = job.logs.borders_at[capture.logs.name].edges_ns
        bins = np.searchsorted(edges_ns, capture.logs.clock.unstepped(times_ns), side="right") - 1
        seen[np.unique(bins[(bins >= 0) & (bins < len(seen))])] = True
    numbers = np.flatnonzero(seen[job.logs.borders.bin_of]) if len(job.logs.work.iterations) else np.zeros(0, np.int64)
    ranges = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    shown = [str(one[0]) if len(one) == 1 else f"{one[0]} to {one[-1]}" for one in ranges if len(one)]
    return f": the captures hold iterations {', '.join(shown)}" if shown else ": the captures hold no iteration"


def _clock(job: Job, nodes: tuple[str, ...]) -> tuple[str, float | None]:
    """Return whose clock the times are by, and the bound of the error of the others."""
    clocks = {name: job.logs.nodes[name].clock for name in nodes}
    if len(job.logs.nodes) == 1:
        return f"times by the clock of node {nodes[0]}", 0.0
    unknown = [name for name, clock in clocks.items() if clock.error_ns is None]
    if unknown:
        return f"the clocks of {', '.join(unknown)} were not compared with the others", None
    error_ns = max(clock.error_ns or 0.0 for clock in clocks.values())
    reference = next((clock.reference for clock in clocks.values() if clock.reference), nodes[0])
    return f"times by the clock of node {reference}, error at most {format_duration(error_ns / 1e9)}", error_ns


def _comments(job: Job, found: CapturedPackets, iteration: int | None) -> dict[int, str]:
    """Return comments on the first and the last packet of each iteration at each node."""
    table, processes = job.logs.work.iterations, job.logs.work.processes
    start_ns, end_ns = (table[name].to_numpy(np.int64) for name in ("start_ns", "end_ns"))
    comments: dict[int, list[str]] = {}
    node_of = np.array([one.node for one in found.interfaces], object)[found.rows["interface"]]
    for node in dict.fromkeys(one.node for one in found.interfaces):
        ranks = sorted(processes.loc[processes["node"] == node, "rank"].unique().tolist())
        who = f"node {node}" + (f", rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "")
        mine = np.flatnonzero(node_of == node)
        numbers = _iterations_of(found.rows["time_ns"][mine], start_ns, end_ns, iteration)
        known, first = np.unique(numbers, return_index=True)
        last = len(numbers) - 1 - np.unique(numbers[::-1], return_index=True)[1]
        for number, begin, end in zip(known.tolist(), mine[first].tolist(), mine[last].tolist(), strict=True):
            ends = {begin: "first packet", end: "last packet"} if begin != end else {begin: "only packet"}
            for row, place in ends.items() if number >= 0 else ():
                comments.setdefault(row, []).append(f"iteration {number}, {place} here: {who}")
    return {row: "; ".join(texts) for row, texts in comments.items()}


def _iterations_of(times_ns: Integers, start_ns: Integers, end_ns: Integers, iteration: int | None) -> Integers:
    """Return the iteration of each time; -1 between iterations."""
    if iteration is not None:
        return np.full(len(times_ns), iteration, np.int64)
    number = np.searchsorted(start_ns, times_ns, side="right") - 1
    inside = (number >= 0) & (times_ns < np.append(end_ns, 0)[number])
    return np.where(inside, number, -1).astype(np.int64)


def _warnings(captures: list[_Capture], points: list[CapturePoint], found: CapturedPackets) -> Iterator[str]:
    """Yield a sentence for each reason why packets may be missing."""
    for logs in {capture.logs.name: capture.logs for capture in captures}.values():
        yield from undecided_warnings(logs)
    oldest_ns: dict[tuple[str, str], int] = {}
    for point, scanned in zip(points, found.scans, strict=True):
        if scanned.first_ns >= 0:
            key = point.node, point.interface
            oldest_ns[key] = min(oldest_ns.get(key, MAX_NS), scanned.first_ns)
    for capture, point, scanned in zip(captures, points, found.scans, strict=True):
        where = f"the capture of {point.node} on {point.interface}"
        yield from (f"{point.node}/{capture.name}: {line}" for line in damage(scanned.counts))
        began_ns = capture.facts.get("begin_ns") or 0
        if capture.facts.get("deleted_files"):
            began_ns = oldest_ns.get((point.node, point.interface), 0)
        ended_ns = capture.facts.get("end_ns") or MAX_NS
        if ended_ns <= point.begin_ns or began_ns >= point.end_ns:
            continue
        if lost := lost_packets(capture.facts):
            yield f"{where} lost {counted(lost, 'packet')} in all"
        if 0 < point.begin_ns < began_ns:
            yield f"{where} began {format_duration((began_ns - point.begin_ns) / 1e9)} after the beginning of this time"
        if ended_ns < point.end_ns < MAX_NS:
            yield f"{where} ended {format_duration((point.end_ns - ended_ns) / 1e9)} before the end of this time"
