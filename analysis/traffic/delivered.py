"""Payload bytes delivered up to any time: from a capture, from an interface's counters, or from a sender's log."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import numpy as np

from ringtap.analysis.pcap.reader import scan_packets
from ringtap.analysis.pcap.tables import flow_columns, rows_of
from ringtap.analysis.runs.run import read_records
from ringtap.analysis.traffic.log import Sent
from ringtap.analysis.traffic.plan import Integers, Numbers
from ringtap.errors import UsageError
from ringtap.ethernet import HEADER_BYTES
from ringtap.units import counted

FLOW_HEADER_BYTES = 16  # what the protocol sends before each flow's payload


@dataclass(frozen=True)
class Passed:
    """Payload bytes delivered, as a function of the time since the launch.

    Attributes:
        source: ``capture``, ``nic`` or ``log``.
        at_ns: times, ascending.
        total_bytes: total bytes at each of these times.
        steps: True if bytes pass at these times, False if they pass evenly between them.
        headers_at_ns: times of flow headers, which ``total_bytes`` includes and the result excludes; ascending.
        notes: remarks for the reader of the numbers.
    """

    source: str
    at_ns: Integers
    total_bytes: Numbers
    steps: bool
    headers_at_ns: Integers
    notes: tuple[str, ...] = ()

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
        """Return the payload bytes between each time and the next."""
        return np.diff(self.until(edges_ns))

    @property
    def sample_ns(self) -> float:
        """The typical time between two readings; 0 for a capture or a log."""
        return float(np.median(np.diff(self.at_ns))) if self.source == "nic" and len(self.at_ns) > 1 else 0.0


def from_log(sent: Sent) -> Passed:
    """Return the payload of a sender's log: each flow's bytes spread evenly from its first byte to its finish.

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
        path: a capture whose clock is that of the sender's host.
        destinations: ``host:port``.
        sources: addresses; empty: any.
        origin_ns: time of the launch, CLOCK_REALTIME.
        headers_at_ns: time after the launch at which each flow's header was sent.

    Raises:
        UsageError: the file is not a capture, or has no payload of the plan.
    """
    wanted = {end for name in destinations for end in _endpoints(name)}
    allowed = {str(ip_address(source)) for source in sources}
    scanned = scan_packets(path)
    table = flow_columns(scanned.conversations, np.arange(2 * len(scanned.conversations)))
    ours = np.array(
        [
            item["protocol"] == "tcp"
            and (item["destination"], item["destination_port"]) in wanted
            and (not allowed or item["source"] in allowed)
            for item in rows_of(table)
        ],
        bool,
    )
    packets = scanned.packets[ours[scanned.packets["flow"]] & (scanned.packets["payload"] > 0)]
    if not len(packets):
        raise UsageError(
            f"{path} has no payload to {', '.join(sorted(destinations)[:3])}: capture where and while they pass"
        )
    at_ns = packets["time_ns"] - origin_ns
    totals = np.cumsum(packets["payload"], dtype=np.float64)
    if (np.diff(at_ns) < 0).any():  # packets of several CPUs may lie a little out of order
        at_ns = np.maximum.accumulate(at_ns)
    return Passed("capture", at_ns, totals, True, np.sort(headers_at_ns), _capture_notes(path, scanned.counts))


def _capture_notes(path: Path, counts: Mapping[str, int]) -> tuple[str, ...]:
    notes = []
    if counts["torn_bytes"]:
        notes.append(f"{path} ends within a packet: it was cut off after {counted(counts['packets'], 'packet')}")
    if counts["corrupt_records"]:
        notes.append(f"{path} is damaged: {counted(counts['corrupt_bytes'], 'byte')} of it passed over")
    if counts["cut_by_snap"]:
        notes.append(f"{path} has {counted(counts['cut_by_snap'], 'packet')} cut before the end of their headers")
    return tuple(notes)


def _endpoints(name: str) -> set[tuple[str, int]]:
    """Return every address and port that a ``host:port`` stands for."""
    host, _, port = name.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise UsageError(f"the plan's destination {name} is not known here, so its packets cannot be found") from error
    return {(str(address[4][0]), int(address[4][1])) for address in found}


def from_nic(path: Path, interface: str, origin_ns: int, until_ns: int) -> Passed:
    """Return the bytes of an interface's counters, minus a header per packet, in the direction that carried more.

    Args:
        path: ``nic.rec`` of a run directory, of the sender's host.
        interface: its name there.
        origin_ns: time of the launch, CLOCK_REALTIME.
        until_ns: end of the comparison, after the launch.

    Raises:
        UsageError: no such log or interface, or the log does not reach from the launch to the end.
    """
    try:
        table, torn = read_records(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if "t_ns" not in table or f"{interface}.tx_bytes" not in table:
        known = sorted({name.rpartition(".")[0] for name in table.columns if "." in name})
        raise UsageError(f"{path} has no interface {interface!r}" + (f", but {', '.join(known)}" if known else ""))
    at_ns = np.maximum.accumulate(table["t_ns"].to_numpy(np.int64) - origin_ns)
    if len(at_ns) < 2 or at_ns[0] > 0 or at_ns[-1] < until_ns:
        raise UsageError(f"{path} does not reach from the launch to the end of the plan: record around the sender")
    counted = {}
    for direction in ("tx", "rx"):
        columns = (table[f"{interface}.{direction}_{what}"].to_numpy(np.float64) for what in ("bytes", "packets"))
        total, packets = (values - values[0] for values in columns)
        counted[direction] = np.maximum.accumulate(total - HEADER_BYTES * packets)
    direction = max(counted, key=lambda name: counted[name][-1])
    notes = [f"{interface} counted {direction}; {HEADER_BYTES} B a packet taken off; all its traffic counts"]
    if torn:
        notes.append(f"{path} ends in a torn record, which was dropped")
    return Passed("nic", at_ns, counted[direction], False, np.empty(0, np.int64), tuple(notes))
