"""Measures delivered payload over time, from a capture, interface counters or a sender's log, and its rates."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ringtap.analysis.pcap.duplicates import copies_note
from ringtap.analysis.pcap.export_scan_tables import flow_columns, rows_of
from ringtap.analysis.pcap.scan_captures import scan_packets
from ringtap.analysis.runs.read_binary_records import read_records
from ringtap.analysis.runs.samples_to_iterations import Borders, counter_steps, growth, longest_gaps_ns
from ringtap.analysis.traffic.flow_logs import SenderLogs
from ringtap.analysis.traffic.plan_bursts import Windows
from ringtap.core.errors import UsageError, file_errors
from ringtap.core.ethernet import IPV4, IPV6, family_of, headers_bytes
from ringtap.core.flow_plan_table import FlowTable, Integers, Numbers
from ringtap.core.host_port import parse_address
from ringtap.core.run_directory import open_log
from ringtap.core.run_directory_schema import FLOW_HEADER_BYTES, LOAD_BIN_NS
from ringtap.core.units import counted


@dataclass(frozen=True)
class Passed:
    """Payload bytes delivered, as a function of the time since the launch.

    Attributes:
        source: ``capture``, ``nic`` or ``log``.
        at_ns: times, ascending.
        total_bytes: total bytes at each of these times.
        steps: True if bytes arrive at these times, False if they arrive evenly between them.
        headers_at_ns: times of flow headers, ascending; ``total_bytes`` includes them, the results exclude them.
        notes: remarks for the reader of the numbers.
    """

    source: str
    at_ns: Integers
    total_bytes: Numbers
    steps: bool
    headers_at_ns: Integers
    notes: tuple[str, ...] = ()

    @classmethod
    def of_bins(cls, payload: np.ndarray, bin_ns: int, begin_ns: int = 0, scale: float = 1.0) -> Passed:
        """Return captured payload, shape (bins,), times a scale, whose first bin begins at a time."""
        edges = begin_ns + np.arange(len(payload) + 1, dtype=np.int64) * bin_ns
        total = np.concatenate(([0.0], np.cumsum(payload, dtype=np.float64))) * scale
        return cls("capture", edges, total, False, np.empty(0, np.int64))

    def until(self, when_ns: Integers | Numbers) -> Numbers:
        """Return the payload bytes delivered up to each of the times, without flow headers."""
        if not len(self.at_ns):
            return np.zeros(len(when_ns))
        if self.steps:
            sums = np.concatenate(([0.0], self.total_bytes))
            total = sums[np.searchsorted(self.at_ns, when_ns)]
        else:
            total = np.interp(when_ns, self.at_ns, self.total_bytes)
        return np.asarray(total - FLOW_HEADER_BYTES * np.searchsorted(self.headers_at_ns, when_ns), np.float64)

    def between(self, edges_ns: Integers) -> Numbers:
        """Return the payload bytes between each time and the next; NaN where counters were read too rarely to tell."""
        if self.source != "nic":
            return np.diff(self.until(edges_ns))
        borders = Borders(edges_ns, np.arange(len(edges_ns) - 1))
        return growth(self.at_ns, np.diff(self.total_bytes), borders, longest_gaps_ns(borders, self.sample_ns))

    @property
    def sample_ns(self) -> float:
        """The typical time between two readings; 0 for a capture or a log."""
        return float(np.median(np.diff(self.at_ns))) if self.source == "nic" and len(self.at_ns) > 1 else 0.0


def from_log(sent: SenderLogs) -> Passed:
    """Return the payload of a sender's log, with each flow's bytes spread evenly from its first byte to its finish.

    The bytes of an unfinished flow are spread to the end of the log.
    """
    moved = sent.moved
    begin = sent.first_byte_ns[moved]
    end = np.where(sent.finish_ns[moved] > 0, sent.finish_ns[moved], sent.last_ns)
    end = np.maximum(end, begin + 1)
    rates = sent.received_bytes[moved] / (end - begin)
    times = np.concatenate((begin, end))
    order = np.argsort(times, kind="stable")
    times = times[order]
    slopes = np.cumsum(np.concatenate((rates, -rates))[order])
    totals = np.concatenate(([0.0], np.cumsum(slopes[:-1] * np.diff(times)))) if len(times) else np.empty(0)
    return Passed("log", times, totals, False, np.empty(0, np.int64))


def from_capture(
    path: Path, destinations: Collection[str], sources: Collection[str], origin_ns: int, headers_at_ns: Integers
) -> Passed:
    """Return the TCP payload of a capture that goes to the plan's destinations (and comes from its sources, if any).

    Args:
        path: a capture with the clock of the sender's host.
        destinations: ``host:port``.
        sources: addresses or names of hosts; empty: any.
        origin_ns: time of the launch, CLOCK_REALTIME.
        headers_at_ns: time after the launch at which each flow's header was sent.

    Raises:
        UsageError: the file is not a capture, or contains no payload of the plan.
    """
    wanted = {end for name in destinations for end in _endpoints(name)}
    allowed = {address for source in sources for address, _ in _endpoints(f"{source}:0", "source")}
    scanned = scan_packets(path)
    table = flow_columns(scanned.conversations, np.arange(2 * len(scanned.conversations)))
    is_of_plan = np.array(
        [
            item["protocol"] == "tcp"
            and (item["destination"], item["destination_port"]) in wanted
            and (not allowed or item["source"] in allowed)
            for item in rows_of(table)
        ],
        bool,
    )
    packets = scanned.packets[is_of_plan[scanned.packets["flow"]] & (scanned.packets["payload"] > 0)]
    if not len(packets):
        raise UsageError(
            f"{path} has no payload to {', '.join(sorted(destinations)[:3])}: capture where and when they pass"
        )
    at_ns = packets["time_ns"] - origin_ns
    totals = np.cumsum(packets["payload"], dtype=np.float64)
    if (np.diff(at_ns) < 0).any():  # packets from several CPUs may be slightly out of order
        at_ns = np.maximum.accumulate(at_ns)
    return Passed("capture", at_ns, totals, True, np.sort(headers_at_ns), _capture_notes(path, scanned.counts))


def _capture_notes(path: Path, counts: Mapping[str, int]) -> tuple[str, ...]:
    notes = copies_note(str(path), counts)
    if counts["torn_bytes"]:
        notes.append(f"{path} ends within a packet: it was cut off after {counted(counts['packets'], 'packet')}")
    if counts["corrupt_records"]:
        notes.append(f"{path} is damaged: {counted(counts['corrupt_bytes'], 'byte')} of it passed over")
    if counts["cut_by_snap"]:
        notes.append(f"{path} has {counted(counts['cut_by_snap'], 'packet')} cut before the end of their headers")
    return tuple(notes)


def _endpoints(name: str, what: str = "destination") -> set[tuple[str, int]]:
    """Return every address and port that a ``host:port`` stands for."""
    host, port = parse_address(name)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"the plan's {what} {name} is not known here, so its packets cannot be found") from error
    return {(str(address[4][0]), int(address[4][1])) for address in found}


def _families(destinations: Collection[str]) -> set[int]:
    """Return the families of addresses that may lead to some destinations."""
    found = set[int]()
    for name in destinations:
        try:
            found |= {family_of(address) for address, _ in _endpoints(name)}
        except UsageError:
            found |= {IPV4, IPV6}
    return found


def from_nic(path: Path, interface: str, destinations: Collection[str], launch_ns: int, until_ns: int) -> Passed:
    """Return the bytes of an interface's counters minus a header per packet, in the direction with more bytes.

    Args:
        path: ``nic.rec`` of the sender's host in a run directory.
        interface: name of the interface.
        destinations: ``host:port`` of the plan, whose packets have the headers of its family of addresses. If it is not
            known, those of IPv4 are subtracted, and a note says by how much this may be too few.
        launch_ns: time of the launch, CLOCK_MONOTONIC.
        until_ns: time after the launch that the log must reach; what it counted in the `LOAD_BIN_NS` after it is kept.

    Raises:
        UsageError: no such log or interface, it does not reach from the launch to that time, or a counter was reset.
    """
    with file_errors(path):
        table, torn = read_records(path)
    if "mono_ns" not in table or f"{interface}.tx_bytes" not in table:
        known = sorted({name.rpartition(".")[0] for name in table.columns if "." in name})
        raise UsageError(f"{path} has no interface {interface!r}" + (f", but {', '.join(known)}" if known else ""))
    # by the clock that is never set, as the times of the sender's log are
    at_ns = np.maximum.accumulate(table["mono_ns"].to_numpy(np.int64) - launch_ns)
    if len(at_ns) < 2 or at_ns[0] > 0 or at_ns[-1] < until_ns:
        raise UsageError(
            f"{path} does not reach from the launch to the end of the plan and its last flow: record on the sender's "
            "host, and end the recording after the sender"
        )
    within = slice(np.searchsorted(at_ns, 0, "right") - 1, np.searchsorted(at_ns, until_ns + LOAD_BIN_NS) + 1)
    at_ns, table = at_ns[within], table.iloc[within]
    families = _families(destinations)
    each = headers_bytes(IPV6 if families == {IPV6} else IPV4)
    file, delivered, packets = open_log(path), {}, {}
    for direction in ("tx", "rx"):
        names = [f"{interface}.{direction}_{what}" for what in ("bytes", "packets")]
        steps = [
            counter_steps(values[:-1], values[1:], file.column(name).wraps_at_bits)
            for name, values in ((name, table[name].to_numpy()) for name in names)
        ]
        if np.isnan(steps).any():
            raise UsageError(
                f"{path}: a {direction} counter of {interface} was reset while the plan was sent, so its growth is not "
                "known: send it again"
            )
        payload = np.concatenate(([0.0], np.cumsum(steps[0] - each * steps[1])))
        delivered[direction], packets[direction] = np.maximum.accumulate(payload), int(steps[1].sum())
    direction = max(delivered, key=lambda name: delivered[name][-1])
    notes = [f"{interface} counted {direction}; {each} B per packet subtracted; includes all its traffic"]
    if len(families) != 1:
        more = (headers_bytes(IPV6) - each) * packets[direction]
        notes.append(
            f"which of the {counted(packets[direction], 'packet')} are IPv6 is not known: the payload is up to "
            f"{counted(more, 'byte')} less"
        )
    if torn:
        notes.append(f"{path} ends in a torn record, which was dropped")
    return Passed("nic", at_ns, delivered[direction], False, np.empty(0, np.int64), tuple(notes))


WIDTH = 18  # samples of the moving average in figure B-5
COUNT = 60_000  # samples of figure 3-8
_WINDOW_NS = 1_000_000
_PERIODS = 6
_SPAN_NS, _SPAN_WINDOWS = 60_000_000, 25
_BINS = 80


@dataclass(frozen=True)
class InjectionRates:
    """Instantaneous injection rates of one transmission.

    Attributes:
        label: name of the transmission.
        source: ``capture``, ``nic`` or ``log``.
        window_ns: time over which each rate is averaged.
        values_bps: the rates.
    """

    label: str
    source: str
    window_ns: float
    values_bps: Numbers


def window_ns(plan: FlowTable, windows: Windows | None, passed: Passed) -> float:
    """Return the width of the moving average: a burst's length, or 1 ms; more if that contains under 18 readings."""
    burst = float(windows.edges_ns[1] - windows.edges_ns[0]) if windows is not None else 0.0
    return min(max(burst or _WINDOW_NS, WIDTH * passed.sample_ns), float(plan.duration_ns))


def shown_span_ns(plan: FlowTable, windows: Windows | None, window: float) -> tuple[int, int]:
    """Return the part of the plan that the figures show: some periods, or 60 ms or more, around its middle."""
    if windows is not None:
        period = int(plan.header["burst_period_ns"])
        whole = plan.duration_ns // period
        shown = min(max(_PERIODS, round(_SPAN_WINDOWS * window / period / 2)), max(whole, 1))
        begin = (whole - shown) // 2 * period
        return max(begin, 0), min(max(begin, 0) + shown * period, plan.duration_ns)
    length = min(plan.duration_ns, max(_SPAN_NS, round(_SPAN_WINDOWS * window)))
    begin = (plan.duration_ns - length) // 2
    return begin, begin + length


def moving_average(passed: Passed, span_ns: tuple[int, int], window: float) -> tuple[Numbers, Numbers]:
    """Return the middles of the windows (ns after the launch) and the mean payload rates in them, in bit/s."""
    step = window / WIDTH
    edges = np.arange(span_ns[0] - window / 2, span_ns[1] + window / 2 + step / 2, step)
    totals = passed.until(edges)
    return (edges[WIDTH:] + edges[:-WIDTH]) / 2, (totals[WIDTH:] - totals[:-WIDTH]) * 8e9 / window


def instantaneous(label: str, passed: Passed, duration_ns: int, window: float) -> InjectionRates:
    """Return the rates at 60,000 instants, spread evenly over a transmission so that their mean is its load."""
    begins = np.linspace(0, max(duration_ns - window, 0), COUNT)
    rates = (passed.until(begins + window) - passed.until(begins)) * 8e9 / window
    return InjectionRates(label, passed.source, window, np.maximum(rates, 0))


def histogram_edges(samples: list[InjectionRates]) -> Numbers:
    """Return the edges of 80 common bins, from 0 to the greatest 99th percentile of the samples' rates above 0."""
    busy = [rates.values_bps[rates.values_bps > 0] for rates in samples]
    top = max((float(np.quantile(values, 0.99)) for values in busy if len(values)), default=1.0)
    return np.linspace(0, top, _BINS + 1)


def counts(samples: InjectionRates, edges_bps: Numbers) -> Integers:
    """Count the samples in each bin, without rates of 0 or above the last edge."""
    return np.histogram(samples.values_bps[samples.values_bps > 0], edges_bps)[0].astype(np.int64)
