"""Measures one run for a comparison: iteration times, communication, bytes, bursts, incast and sensitivity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ringtap.analysis.job import byte_accounting, flows
from ringtap.analysis.job.iterations_of_ranks import computation_by
from ringtap.analysis.job.run import Job
from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.analysis.runs.run import window_on_reference, within_window
from ringtap.analysis.runs.samples_to_iterations import Borders, Integers, Numbers
from ringtap.analysis.runs.traffic_classes import CLASSES, TRAINING
from ringtap.analysis.statistics.quantiles import quantile_interval
from ringtap.analysis.statistics.two_sample import Estimate
from ringtap.analysis.structure.capture_streams import run_streams
from ringtap.analysis.structure.structure import peak_to_mean
from ringtap.analysis.sweeps.compare_at_equal_loads import AtLoad
from ringtap.analysis.sweeps.points import ordered_windows
from ringtap.analysis.sweeps.sweep import Sweep
from ringtap.core.errors import UsageError
from ringtap.core.run_directory_schema import NIC_REC, QDISC_REC, SOCKETS_REC
from ringtap.core.units import counted, format_duration

SECONDS, BYTES, RATE, SHARE, NUMBER = "s", "bytes", "bit/s", "share", ""
MEDIAN, LOADED = "iteration_median_s", "iteration_loaded_median_s"
P99 = "iteration_p99_s"
_BURST_SCALES_S = (0.001, 0.01, 0.1)
_SOCKET_SCALE_S = 0.1
_LATE = 1.1  # samples up to this share of their period apart count as on time
_NO_PACKETS = "no packets were recorded (--collect default,packets)"
_MAX_PAIRS = 256  # of hosts in captures, those with the most payload
_MAX_CELLS = 1 << 26  # of pairs and bins of 1 ms: 512 MB
_EXCHANGE_SHARE = 0.01  # of the largest payload between two hosts; less is a rendezvous
_PHASES = {
    "compute_s": "compute",
    "communication_s": "communication",
    "exposed_s": "exposed communication",
    "overlap_s": "hidden communication",
}
_LOSSES = {"retransmissions": "retransmitted segments", "queue_drops": "packets dropped in queues"}
_WAYS = {"tx": "sent", "rx": "received"}


@dataclass(frozen=True, eq=False)
class Measure:
    """One measure of a run.

    Attributes:
        name: name of the measure, the same for all runs.
        title: name in texts.
        unit: ``s``, ``bytes``, ``bit/s``, ``share``, or empty for other numbers.
        value: its value; None: not known.
        why: the reason why it is not known, one sentence without its end; else empty.
        samples: its values in order of time, one per iteration; empty if there is one number per run.
        low: lower end of its 95 % interval; None without an interval.
        high: upper end, likewise.
        is_part: True for one host or port, whose sum over all is another measure.
    """

    name: str
    title: str
    unit: str
    value: float | None
    why: str = ""
    samples: Numbers = field(default_factory=lambda: np.empty(0))
    low: float | None = None
    high: float | None = None
    is_part: bool = False

    @property
    def estimate(self) -> Estimate | None:
        """The value with its interval; None without an interval."""
        if self.value is None or self.low is None or self.high is None:
            return None
        return Estimate(self.value, self.low, self.high)


@dataclass(frozen=True, eq=False)
class RunMeasures:
    """Measures of one run.

    Attributes:
        label: name of the run in the comparison.
        path: its directory.
        facts: ``nodes``, ``ranks`` and ``iterations`` (those compared), and ``command``.
        times_s: times of the iterations that the answer compares, in order of time.
        measures: the measures, by name.
        matrix: bytes per iteration, or of the whole recording, from each row to each column; empty if not known.
        matrix_text: description of the matrix, or the reason why there is none.
        notes: limits of these numbers, one sentence each.
        loaded: the series at the load that the answer compares; None for a job, and without such a load.
        under: that load, or ``without cross traffic``, in a sentence; empty for a job.
        why: the reason why there are no times, if the answer asks for them at a load; else empty.
    """

    label: str
    path: Path
    facts: dict[str, Any]
    times_s: Numbers
    measures: Mapping[str, Measure]
    matrix: pd.DataFrame
    matrix_text: str
    notes: tuple[str, ...] = ()
    loaded: AtLoad | None = None
    under: str = ""
    why: str = ""


def measure_job(job: Job, label: str, per_second: bool = False) -> RunMeasures:
    """Measure a job over its iterations after warm-up.

    Args:
        job: the job.
        label: its name in the comparison.
        per_second: give amounts per second and not per iteration.
    """
    found = _measure(job, label, _Span(job, job.logs.measured, per_second))
    averaged = job.logs.averages
    return replace(found, notes=(*found.notes, averaged)) if averaged else found


def measure_series(
    sweep: Sweep, name: str, label: str, row: dict[str, Any], loaded: AtLoad | str | None
) -> RunMeasures:
    """Measure a series of a sweep: its iterations at a load and without cross traffic, and its sensitivity to it.

    Args:
        sweep: the sweep.
        name: name of the series.
        label: its name in the comparison.
        row: its row of `ringtap.analysis.report.findings.overview`.
        loaded: the series at the load that the answer compares, or the reason why it is not known there; None: the
            answer compares iterations without cross traffic.
    """
    series = sweep[name]
    alone = {id(point) for point in series.alone}
    # a resumed sweep has several jobs of a series, and the last one need not have such a point
    directories = list(dict.fromkeys(point.directory for point in series.alone))
    job = Job(sweep.run.job(directories[-1]), sweep.workers) if directories else sweep.job(name)
    windows = [
        (window["window_start_ns"], window["window_end_ns"])
        for window, point in zip(ordered_windows(sweep.run), sweep.measured, strict=True)
        if id(point) in alone and sweep.path / point.directory == job.path
    ]
    earlier_s = [point.iteration_s for point in series.alone if sweep.path / point.directory != job.path]
    table = job.logs.work.iterations
    start_ns, end_ns = (table[column].to_numpy(np.int64) for column in ("start_ns", "end_ns"))
    inside = np.zeros(len(table), bool)
    for begin, end in windows:
        inside |= within_window(start_ns, end_ns, window_on_reference((begin, end), job.logs.run))
    found = _measure(job, label, _Span(job, np.flatnonzero(inside), False), earlier_s)
    notes = list(found.notes)
    if earlier_s:
        notes.append(
            f"{label} has points without cross traffic in {len(directories)} jobs: only its iteration times "
            f"are those of all of them, and the other measures those of {job.path.name}"
        )
    if not inside.any():
        notes.append(f"{label} has no point without cross traffic")
    if series.is_simulated:
        notes.append(f"{label} is simulated: chance means the variation of simulated iterations")
    measures = {one.name: one for one in (*found.measures.values(), *_sensitivity(row))}
    if row["has_cross_traffic"]:
        alone_ones = [measures[name] for name in (MEDIAN, P99)]
        titles = [one.title.replace("iteration,", "iteration without cross traffic,") for one in alone_ones]
        measures |= {one.name: replace(one, title=title) for one, title in zip(alone_ones, titles, strict=True)}
    found = replace(
        found,
        facts=found.facts | {"series": name},
        measures=measures,
        notes=tuple(notes),
        under="without cross traffic",
    )
    if loaded is None:
        return found
    load = f"{row['slowdowns'][-1]['share']:.0%} load"
    is_known = isinstance(loaded, AtLoad)
    times_s = loaded.times_s if isinstance(loaded, AtLoad) else np.empty(0)
    why = "" if isinstance(loaded, AtLoad) else loaded
    median = float(np.median(times_s)) if is_known else None
    first = Measure(LOADED, f"iteration at {load}, median", SECONDS, median, why)
    return replace(
        found,
        measures={LOADED: first} | measures,
        times_s=times_s,
        loaded=loaded if isinstance(loaded, AtLoad) else None,
        under=f"at {load}",
        why=why,
    )


class _Span:
    """Iterations of a job that are compared.

    Args:
        job: the job.
        rows: their rows in its table of iterations; a job without iterations is one span of time.
        per_second: amounts are per second, and not per iteration.
    """

    def __init__(self, job: Job, rows: Integers, per_second: bool) -> None:
        self.job, self.rows, self.per_second = job, rows, per_second
        self.has_iterations = len(job.logs.work.iterations) > 0
        self.bins = job.logs.borders.bin_of[rows] if self.has_iterations else job.logs.borders.bin_of
        self.seconds = np.diff(job.logs.borders.edges_ns)[self.bins] / 1e9
        self.why = ""
        if not len(self.bins):
            self.why = "no iteration of it is compared" if self.has_iterations else "nothing was sampled twice"

    @property
    def unit(self) -> str:
        """Unit of bytes in the span."""
        return RATE if self.per_second else BYTES

    def of_bytes(self, name: str, title: str, per_bin: Numbers | None, why: str, sampled: bool = True) -> Measure:
        """Return bytes per bin as a measure per iteration or second; ``why`` says why they are None, if they are."""
        if per_bin is None or self.why:
            return Measure(name, title, self.unit, None, self.why or why)
        if sampled and self.job.logs.is_too_short:
            return Measure(name, title, self.unit, None, _too_short(self.job))
        values = per_bin[self.bins]
        known = ~np.isnan(values)
        if not known.any():
            return Measure(name, title, self.unit, None, "the log does not cover the iterations, or has gaps")
        values, seconds = values[known], self.seconds[known]
        if self.per_second:
            return Measure(name, title, RATE, float(values.sum() / seconds.sum() * 8), samples=values / seconds * 8)
        return Measure(name, title, BYTES, float(values.mean()), samples=values)

    def of_column(self, name: str, title: str, unit: str, column: str, why: str) -> Measure:
        """Return the mean of a column of the iterations as a measure."""
        return _mean(name, title, unit, self.column(column), self.why or why)

    def column(self, name: str) -> Numbers:
        """Return a column of the compared iterations; NaN where it is not known."""
        table = self.job.logs.work.iterations
        table = table if name in table else self.job.iterations
        return np.asarray(table[name].iloc[self.rows].astype("Float64").to_numpy(np.float64, na_value=np.nan))

    def longest(self) -> tuple[int, int]:
        """Return start and end of the longest time without a gap, on the reference clock."""
        if not self.has_iterations or not len(self.rows):
            return self.job.logs.window_ns if not self.has_iterations else (0, 0)
        table = self.job.logs.work.iterations.iloc[self.rows]
        start, end = (table[name].to_numpy(np.int64) for name in ("start_ns", "end_ns"))
        cuts = np.flatnonzero(start[1:] != end[:-1]) + 1
        firsts, lasts = start[np.append(0, cuts)], end[np.append(cuts, len(end)) - 1]
        at = int(np.argmax(lasts - firsts))
        return int(firsts[at]), int(lasts[at])


def _too_short(job: Job) -> str:
    """Say that samples are too far apart to count per iteration."""
    lengths_s = job.logs.work.iterations["iteration_s"].to_numpy(np.float64)[job.logs.measured]
    each, every = format_duration(float(lengths_s.mean())), format_duration(job.logs.traffic.every_s or 0.0)
    return f"the run is too short: {counted(len(lengths_s), 'iteration')} of {each}, and samples every {every}"


def _why_missing(job: Job, log: str, what: str) -> str:
    """Say why a sampled amount is not known in any iteration.

    Args:
        job: the job.
        log: the log that would hold it, in a node's folder.
        what: what the log samples, in the plural.
    """
    if not any(logs.names(log) for logs in job.logs.nodes.values()):
        return f"no {what} were recorded"
    if job.logs.is_too_short:
        return _too_short(job)
    name, _, _ = log.partition("/")
    every_s = max(float((logs.collectors.get(name) or {}).get("every_s") or 0) for logs in job.logs.nodes.values())
    begin_ns, end_ns = job.logs.window_ns
    if end_ns - begin_ns < 2e9 * every_s:
        lasted, every = format_duration((end_ns - begin_ns) / 1e9), format_duration(every_s)
        return f"the run is too short: it lasted {lasted}, and samples are {every} apart"
    return f"the log of {what} does not cover the iterations, or has gaps"


def _mean(name: str, title: str, unit: str, values: Numbers, why: str) -> Measure:
    known = values[np.isfinite(values)]
    if not len(known):
        return Measure(name, title, unit, None, why)
    return Measure(name, title, unit, float(known.mean()), samples=known)


def _measure(job: Job, label: str, span: _Span, earlier_s: Sequence[Numbers] = ()) -> RunMeasures:
    """Measure a job.

    Args:
        job: the job.
        label: its name in the comparison.
        span: its iterations that are compared.
        earlier_s: times of iterations of other jobs of its series that are compared, too.
    """
    times_s = np.concatenate([*earlier_s, span.column("iteration_s") if span.has_iterations else np.empty(0)])
    parts = [_times(times_s, span), _phases(span), _payload(span), _interfaces(span), _losses(span)]
    found, why, notes = _exchanges(span)
    parts += [_socket_burst(span), _bursts(found, why), _incast(found, why), _fan_in(job)]
    matrix, text = _matrix(span, found)
    facts = {
        "nodes": list(job.logs.nodes),
        "ranks": int(job.logs.work.processes["rank"].nunique()),
        "iterations": len(times_s),
        "command": " ".join(str(word) for word in job.logs.run.info.get("argv") or []),
    }
    measures = {one.name: one for part in parts for one in part}
    phases = job.logs.work.phases
    if len(phases) > 1:
        phase = job.logs.work.phase
        notes.insert(
            0, f"{label} has {len(phases)} training phases; phase {phase} is compared ({phases['what'][phase]})"
        )
    return RunMeasures(label, job.path, facts, times_s, measures, matrix, text, tuple(notes))


def _times(times_s: Numbers, span: _Span) -> Iterator[Measure]:
    why = "" if len(times_s) else span.why or "no whole iteration was recorded"
    median = float(np.median(times_s)) if len(times_s) else None
    yield Measure(MEDIAN, "iteration, median", SECONDS, median, why, times_s)
    p99 = quantile_interval(times_s) if len(times_s) else None
    ends = (None, None) if p99 is None else (p99.low, p99.high)
    value = None if p99 is None else p99.value
    yield Measure(P99, "iteration, p99", SECONDS, value, why, low=ends[0], high=ends[1])


def _phases(span: _Span) -> Iterator[Measure]:
    """Yield the phases that the hook timed; exposed communication is what compute does not hide."""
    work = span.job.logs.work
    why = work.why or "the hook timed no communication"
    for column, title in _PHASES.items():
        what = column, title
        if column == "compute_s" and work.source == "horovod":  # not to be compared with both passes
            what = "backward_s", computation_by(work.source)
        yield span.of_column(*what, SECONDS, column, why)
    if span.has_iterations:
        busy = span.column("communication_s") / span.column("iteration_s")
        yield _mean("duty_cycle", "duty cycle of communication", SHARE, busy, why)


def _payload(span: _Span) -> Iterator[Measure]:
    traffic = span.job.logs.traffic
    for kind in CLASSES:
        title = f"payload of {kind} traffic"
        why = _why_missing(span.job, SOCKETS_REC, "sockets")
        yield span.of_bytes(f"{kind}_bytes", title, traffic.total(f"{kind}_bytes"), why)
    # packets have no sampling, so that their bytes of an iteration are exact
    captured = span.job.logs.captured.by_class.get(TRAINING)
    why = "no captured packet is known to be training traffic" if span.job.logs.captured.packets else _NO_PACKETS
    title = f"payload of {TRAINING} traffic, by packets"
    yield span.of_bytes("packet_training_bytes", title, captured, why, sampled=False)


def _interfaces(span: _Span) -> Iterator[Measure]:
    """Yield bytes by interface counters: of all hosts, of each host, and of each port of a switch."""
    job, why = span.job, "no interface counters were recorded"
    hosts: dict[str, Numbers] = {}
    without = []
    lines: list[tuple[str, str, Numbers | None]] = []
    for node, logs in job.logs.nodes.items():
        counters = logs.wide(NIC_REC)
        if counters is None:
            without.append(node)
            continue
        wires = [name for name in byte_accounting.interfaces(counters, logs) if name != "lo"]
        ports = wires if _is_switch(logs, wires) else []
        for way, text in _WAYS.items():
            columns = {name: f"{name}.{way}_bytes" for name in wires}
            grown = {
                name: counters.growth(column, job.logs.borders_at[node])
                if column in counters.columns
                else np.full(job.logs.borders.bins, np.nan)
                for name, column in columns.items()
            }
            total = np.asarray(sum(grown.values(), np.zeros(job.logs.borders.bins)))
            lines.append((f"nic:{node}:{way}", f"{node}{', all ports' if ports else ' NIC'}, {text}", total))
            lines += [(f"nic:{node}:{port}:{way}", f"{node} port {port}, {text}", grown[port]) for port in ports]
            if not ports:
                hosts[way] = hosts.get(way, np.zeros(job.logs.borders.bins)) + total
    if without and hosts:
        hosts, why = {}, f"no interface counters of {', '.join(without)} were recorded"
    for way, text in _WAYS.items():
        yield span.of_bytes(f"nic:{way}", f"NICs of all hosts, {text}", hosts.get(way), why)
    for name, title, amounts in lines:
        yield replace(span.of_bytes(name, title, amounts, why), is_part=True)


def _is_switch(logs: NodeLogs, wires: list[str]) -> bool:
    """Return True for a node with several ports that ran no job."""
    return len(wires) > 1 and not logs.info.get("jobs")


def _losses(span: _Span) -> Iterator[Measure]:
    sources = {"retransmissions": (SOCKETS_REC, "sockets"), "queue_drops": (QDISC_REC, "queues")}
    for column, title in _LOSSES.items() if span.has_iterations else ():
        yield span.of_column(column, title, NUMBER, column, _why_missing(span.job, *sources[column]))


@dataclass(frozen=True, eq=False)
class _Exchanges:
    """Captured payload between hosts, without cross traffic, in the longest compared time.

    Attributes:
        payload: by sender and receiver, the bytes in each bin, shape (bins,); without pairs that exchange little, such
            as acknowledgements and a rendezvous.
        totals: bytes of all pairs.
        seconds: the time over which they are totals.
        bin_ns: width of a bin.
        bins: number of bins.
    """

    payload: dict[tuple[str, str], Integers]
    totals: dict[tuple[str, str], float]
    seconds: float
    bin_ns: int
    bins: int


def _exchanges(span: _Span) -> tuple[_Exchanges | None, str, list[str]]:
    """Return the captured payload; else the reason, and sentences about missing parts."""
    if not any(logs.captures for logs in span.job.logs.nodes.values()):
        return None, _NO_PACKETS, []
    cross = flows.CrossTrafficDestinations.of(span.job.logs.nodes)
    ports = sorted(cross.ports | {port for _, port in cross.ends})
    try:
        streams, warnings = run_streams(span.job, f"not ({' or '.join(f'port {port}' for port in ports)})")
    except UsageError as error:
        return None, str(error), []
    first, last = ((at_ns - streams.start_ns) // streams.bin_ns for at_ns in span.longest())
    first, last = max(0, first), min(streams.bins, last)
    parts: dict[tuple[str, str], list[tuple[Integers, Integers]]] = {}
    for one in streams.streams:
        inside = (one.bins >= first) & (one.bins < last)
        if inside.any():
            parts.setdefault((one.source, one.destination), []).append((one.bins[inside] - first, one.payload[inside]))
    if not parts:
        return None, "the captures hold no payload in the compared iterations", warnings
    totals = {pair: float(sum(payload.sum() for _, payload in found)) for pair, found in parts.items()}
    largest = sorted(totals, key=lambda pair: -totals[pair])[:_MAX_PAIRS]
    kept = [pair for pair in largest if totals[pair] >= _EXCHANGE_SHARE * totals[largest[0]]]
    bins = min(last - first, _MAX_CELLS // len(kept))
    if bins < last - first:
        warnings.append(f"bursts are those of the first {format_duration(bins * streams.bin_ns / 1e9)} of the captures")
    payload = {pair: np.zeros(bins, np.int64) for pair in kept}
    for pair, sent in payload.items():
        for at, amounts in parts[pair]:
            sent[at[at < bins]] += amounts[at < bins]
    seconds = (last - first) * streams.bin_ns / 1e9
    return _Exchanges(payload, {pair: totals[pair] for pair in largest}, seconds, streams.bin_ns, bins), "", warnings


def _bursts(found: _Exchanges | None, why: str) -> Iterator[Measure]:
    """Yield the peak over the mean rate of the host with the largest one, and the share of time with payload."""
    peaks = pd.DataFrame(columns=["scale_s", "peak_to_mean"])
    share = None
    if found is not None:
        senders: dict[str, Integers] = {}
        for (source, _), payload in found.payload.items():
            senders[source] = senders.get(source, np.zeros(found.bins, np.int64)) + payload
        peaks = peak_to_mean(senders, np.array([0, found.bins]), found.bin_ns)
        share = float(np.any([sent > 0 for sent in senders.values()], axis=0).mean())
    for scale_s in _BURST_SCALES_S:
        values = peaks.loc[peaks["scale_s"] == scale_s, "peak_to_mean"]
        title = f"peak over mean, {format_duration(scale_s)}"
        value = float(values.max()) if len(values) else None
        reason = "" if len(values) else why or "the capture is shorter than two such times"
        yield Measure(f"peak_to_mean:{scale_s:g}", title, NUMBER, value, reason)
    yield Measure("busy_share", "time with payload, 1 ms", SHARE, share, why)


def _socket_burst(span: _Span) -> Iterator[Measure]:
    """Yield the same by sockets, whose samples are 100 ms apart by default: each bin lies between two samples."""
    job, name = span.job, f"peak_to_mean_sockets:{_SOCKET_SCALE_S:g}"
    title = f"peak over mean, {format_duration(_SOCKET_SCALE_S)}, by sockets"
    traffic, peaks, first, why = job.logs.traffic, [], 0, _why_missing(job, SOCKETS_REC, "sockets")
    for node, logs in job.logs.nodes.items():
        known = flows.sockets_of(logs)
        if known is None:
            continue
        count, counters = len(known), logs.wide(NIC_REC)
        mine = traffic.flows[(traffic.flows["traffic_class"] == TRAINING) & (traffic.flows["source_node"] == node)]
        ends = mine.loc[mine["measured_at"] == "sender", "end"].to_numpy(np.int64) - first
        first += count
        if counters is None or not len(ends):
            why = "no training traffic was sampled"
            continue
        begin_ns, end_ns = logs.clock.from_reference(np.array(span.longest(), np.int64)).tolist()
        at_ns = np.unique(counters.t_ns[(counters.t_ns >= begin_ns) & (counters.t_ns <= end_ns)])
        if len(at_ns) <= 2:
            why = _why_missing(job, SOCKETS_REC, "sockets")
            continue
        period_s = float(np.median(np.diff(at_ns))) / 1e9
        if period_s > _SOCKET_SCALE_S * _LATE:
            why = f"sockets were sampled less often than every {format_duration(_SOCKET_SCALE_S)}"
            continue
        edges_ns = at_ns[:: max(1, round(_SOCKET_SCALE_S / period_s))]
        out_of = np.ones(count, np.int64)  # group 1: other traffic
        out_of[ends] = 0
        borders = Borders(edges_ns, np.arange(len(edges_ns) - 1))
        sent = flows.socket_bytes_of(logs, borders, out_of, np.full(count, -1)).amounts["payload_bytes"]
        lengths = np.diff(edges_ns)
        if sent[0].sum() > 0:
            peaks.append(float((sent[0] / lengths).max() / (sent[0].sum() / lengths.sum())))
    yield Measure(name, title, NUMBER, max(peaks, default=None), "" if peaks else why)


def _incast(found: _Exchanges | None, why: str) -> Iterator[Measure]:
    """Yield the number of hosts that send to one host in the same millisecond, where one sends."""
    mean = largest = None
    if found is not None:
        degrees: dict[str, Integers] = {}
        for (_, destination), payload in found.payload.items():
            degrees[destination] = degrees.get(destination, np.zeros(found.bins, np.int64)) + (payload > 0)
        busy = np.concatenate([degree[degree > 0] for degree in degrees.values()])
        mean, largest = float(busy.mean()), float(busy.max())
    yield Measure("incast_mean", "incast degree, mean, 1 ms", NUMBER, mean, why)
    yield Measure("incast_largest", "incast degree, largest, 1 ms", NUMBER, largest, why)


def _fan_in(job: Job) -> Iterator[Measure]:
    """Yield the number of hosts that send training traffic to one host at any time."""
    name, title = "fan_in", "hosts that send to one host, by sockets"
    table = job.flows
    table = table[(table["traffic_class"] == TRAINING) & ~table["local"].astype(bool)]
    if not len(table):
        why = "no training traffic between two hosts was sampled"
        why = why if job.logs.traffic.nodes else _why_missing(job, SOCKETS_REC, "sockets")
        yield Measure(name, title, NUMBER, None, why)
        return
    column = "bytes_per_iteration" if table["bytes_per_iteration"].notna().any() else "payload_bytes"
    ends = [table[f"{side}_node"].fillna(table[side]) for side in ("source", "destination")]
    pairs = table.groupby([ends[0].rename("from_host"), ends[1].rename("to_host")])[column].sum()
    pairs = pairs[pairs >= _EXCHANGE_SHARE * pairs.max()]
    yield Measure(name, title, NUMBER, float(pairs.groupby("to_host").size().max()))


def _matrix(span: _Span, found: _Exchanges | None) -> tuple[pd.DataFrame, str]:
    """Return the training payload between ranks; where sockets do not tell it, the captured one between hosts."""
    job = span.job
    table = job.flows
    table = table[table["traffic_class"] == TRAINING]
    table = table[table[["source_rank", "destination_rank"]].notna().all(axis=1)]
    if not len(table):
        return _matrix_of_hosts(span, found)
    column = "bytes_per_iteration" if table["bytes_per_iteration"].notna().any() else "payload_bytes"
    amounts = table.groupby(["source_rank", "destination_rank"])[column].sum().astype(float)
    per = "per iteration" if column == "bytes_per_iteration" else "over the whole recording"
    return _square(amounts, "rank"), f"payload between ranks {per}"


def _matrix_of_hosts(span: _Span, found: _Exchanges | None) -> tuple[pd.DataFrame, str]:
    if found is None:
        return pd.DataFrame(), "neither sockets of ranks nor packets of the compared iterations were recorded"
    amounts, text = pd.Series(found.totals), "captured payload between hosts"
    if span.has_iterations:  # the captures need not hold whole iterations
        iterations = found.seconds / float(span.column("iteration_s").mean())
        amounts, text = amounts / iterations, f"{text} per iteration"
    return _square(amounts, "host"), text


def _square(amounts: pd.Series[Any], side: str) -> pd.DataFrame:
    names = sorted({name for pair in amounts.index for name in pair})
    square = amounts.unstack().reindex(index=names, columns=names).fillna(0.0)
    return square.rename_axis(index=f"source_{side}", columns=f"destination_{side}")


def _sensitivity(row: dict[str, Any]) -> Iterator[Measure]:
    """Yield the sensitivity of a series to cross traffic, from its row of the report's first screen."""
    for name, found in zip(("middle", "heavy"), row["slowdowns"], strict=True):
        low, high = found["interval"] or (None, None)
        load = f"{found['share']:.0%} load"
        why = found["why"]
        yield Measure(f"slowdown:{name}", f"slowdown at {load}", SHARE, found["slowdown"], why, low=low, high=high)
        low, high = found["mean_interval_s"] or (None, None)
        why = "" if found["mean_s"] else why
        yield Measure(f"mean:{name}", f"iteration at {load}, mean", SECONDS, found["mean_s"], why, low=low, high=high)
    found = row["congestion"]
    low, high = found["interval_share"] or (None, None)
    title = "congestion begins, share of capacity"
    yield Measure("congestion_share", title, SHARE, found["share"], found["why"], low=low, high=high)
    fit = row["fit"]
    yield Measure("fit_n", "exponent n of the fit", NUMBER, fit.get("n"), fit["why"])
    yield Measure("fit_r2", "R² of the fit", NUMBER, fit.get("r2"), fit["why"])
