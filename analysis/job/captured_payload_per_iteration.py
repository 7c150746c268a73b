"""Reads the packet captures of a node: payload by flow, in each iteration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ringtap.analysis.pcap.duplicates import copies_note
from ringtap.analysis.pcap.export_scan_tables import flow_columns, rows_of
from ringtap.analysis.pcap.scan import Scanned
from ringtap.analysis.pcap.scan_captures import scan_packets
from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.analysis.runs.reference_clock import NodeClock
from ringtap.analysis.runs.samples_to_iterations import Borders, Integers, Numbers
from ringtap.core.errors import RingtapError, error_message
from ringtap.core.run_directory_schema import PACKET_DISORDER_NS, PACKETS, PACKETS_RING, WINDOW, WINDOWS_JSONL
from ringtap.core.units import counted

_BATCH = 1 << 20
_TCP = 6
_ENDS = ("source", "source_port", "destination", "destination_port")
_SUMS = ("payload_bytes", "retransmitted_bytes", "frame_bytes", "packets")
_PACKETS = _SUMS.index("packets")


@dataclass
class Packets:
    """TCP packets of a node's captures.

    Attributes:
        flows: one row per interface and direction of a connection: ``interface``, ``source``, ``source_port``,
            ``destination``, ``destination_port``, and sums over the capture: ``payload_bytes``, each byte once,
            ``retransmitted_bytes``, which were captured again, ``frame_bytes``, ``packets``.
        amounts: the same sums in each bin, shape (rows of flows, bins); NaN in bins whose packets were not kept.
        kept: True for each bin whose packets were kept.
        interfaces: names of the captured interfaces; ``any`` stands for all.
        first_ns: time of the first packet by the node's clock; 0 without packets.
        last_ns: time of the last packet; 0 without packets.
        dropped: packets that the kernel or the interface dropped; None: not known.
        others: number of packets without TCP.
        copies: number of packets left out, because the captures hold them several times.
    """

    flows: pd.DataFrame
    amounts: dict[str, Numbers]
    kept: npt.NDArray[np.bool_]
    interfaces: frozenset[str]
    first_ns: int = 0
    last_ns: int = 0
    dropped: int | None = None
    others: int = 0
    copies: int = 0

    @property
    def has_loopback(self) -> bool:
        """True if packets within the node were captured."""
        return not self.interfaces.isdisjoint(("lo", "any"))

    @property
    def has_network(self) -> bool:
        """True if packets to and from other nodes were captured."""
        return bool(self.interfaces - {"lo"})


@dataclass
class _Sums:
    """Sums over one pass through captures."""

    edges_ns: Integers
    bins: int
    numbers: dict[tuple[Any, ...], int] = field(default_factory=dict)
    total: list[Numbers] = field(default_factory=list)
    binned: list[Numbers] = field(default_factory=list)

    def add(self, interface: str, scanned: Scanned, clock: NodeClock) -> None:
        """Add the TCP packets of one capture, in batches of bounded size."""
        conversations = scanned.conversations
        tcp = (conversations["protocol"] == _TCP) & (conversations["layer"] == 0) & (conversations["family"] > 0)
        flows = np.flatnonzero(np.repeat(tcp, 2) & (conversations["packets"].reshape(-1) > 0))
        table = flow_columns(conversations, flows)
        row = np.full(2 * len(conversations), -1, np.int64)
        row[flows] = [
            self.numbers.setdefault((interface, *(item[end] for end in _ENDS)), len(self.numbers))
            for item in rows_of({end: table[end] for end in _ENDS})
        ]
        while len(self.total) < len(self.numbers):
            self.total.append(np.zeros(len(_SUMS)))
            self.binned.append(np.zeros((len(_SUMS), self.bins)))
        amounts = (
            table["payload"] - table["repeated_bytes"],
            table["repeated_bytes"],
            table["bytes"],
            table["packets"],
        )
        for what, values in enumerate(amounts):
            for flow, amount in zip(flows, values, strict=True):
                self.total[row[flow]][what] += amount
        # not in batches if the clock was set: only the order of all packets shows which came after the step
        times_ns = clock.unstepped(scanned.packets["time_ns"]) if clock.steps else scanned.packets["time_ns"]
        for start in range(0, len(scanned.packets), _BATCH):
            packets = scanned.packets[start : start + _BATCH]
            self._bin(packets, times_ns[start : start + _BATCH], row[packets["flow"]])

    def _bin(self, packets: npt.NDArray[Any], times_ns: Integers, row: Integers) -> None:
        bin_of = np.searchsorted(self.edges_ns, times_ns, side="right") - 1
        inside = (row >= 0) & (bin_of >= 0) & (bin_of < self.bins)
        known, number = np.unique(row[inside], return_inverse=True)
        again = packets["repeated_bytes"][inside]
        amounts = (packets["payload"][inside] - again, again, packets["bytes"][inside], None)
        for what, amount in enumerate(amounts):
            cell = number * self.bins + bin_of[inside]
            found = np.bincount(cell, amount, len(known) * self.bins).reshape(len(known), self.bins)
            for flow, sums in zip(known.tolist(), found, strict=True):
                self.binned[flow][what] += sums


def each_capture(logs: NodeLogs) -> Iterator[tuple[str, str, Scanned]]:
    """Yield the interface, the name and a scan of each of a node's captures, with a row per packet.

    What is damaged, and copies of packets that were left out, are noted in the node's problems.
    """
    interface_of = {f"packets/{file}": one.get("interface") for one in _facts(logs) for file in one.get("files") or []}
    for name in logs.captures:
        interface = interface_of.get(name) or interface_in(name)
        try:
            scanned = scan_packets(logs.path / name)
        except (RingtapError, OSError) as error:
            logs.report(f"{logs.name}/{name} was not read: {error_message(error)}")
            continue
        counts = scanned.counts
        if counts["torn_bytes"]:
            logs.torn.append(f"{logs.name}/{name}")
        logs.report(*copies_note(f"{logs.name}/{name}", counts))
        if counts["corrupt_records"]:
            logs.report(
                f"{logs.name}/{name} is damaged: ringtap passed over {counted(counts['corrupt_bytes'], 'byte')} of it"
            )
        yield interface, name, scanned


def read_packets(nodes: Mapping[str, NodeLogs], borders: Borders) -> Packets:
    """Read the captures of a node, the only one."""
    (logs,) = nodes.values()
    sums, first_ns, last_ns, others = _Sums(borders.edges_ns, borders.bins), 0, 0, 0
    copies = 0
    interfaces, undecided_ns = set(), list[int]()
    logs.report(*undecided_warnings(logs))
    for interface, name, scanned in each_capture(logs):
        interfaces.add(interface)
        if name in logs.undecided_captures and scanned.counts["packets"]:
            undecided_ns += scanned.first_ns, scanned.last_ns
        before = sum(total[_PACKETS] for total in sums.total)
        sums.add(interface, scanned, logs.clock)
        packets = scanned.counts["packets"]
        copies += scanned.counts["copies"]
        others += packets - scanned.counts["copies"] - int(sum(total[_PACKETS] for total in sums.total) - before)
        if packets:
            first_ns = min(first_ns or scanned.first_ns, scanned.first_ns)
            last_ns = max(last_ns, scanned.last_ns)
    flows = pd.DataFrame(
        list(sums.numbers), columns=["interface", "source", "source_port", "destination", "destination_port"]
    )
    totals = np.array(sums.total).reshape(len(flows), len(_SUMS))
    binned = np.array(sums.binned).reshape(len(flows), len(_SUMS), borders.bins)
    for column, what in enumerate(_SUMS):
        flows[what] = totals[:, column]
    kept = _kept(logs, borders, first_ns, undecided_ns)
    binned[:, :, ~kept] = np.nan
    amounts = {what: binned[:, column] for column, what in enumerate(_SUMS)}
    return Packets(
        flows, amounts, kept, frozenset(interfaces), first_ns, last_ns, dropped_packets(logs), others, copies
    )


def _kept(logs: NodeLogs, borders: Borders, first_ns: int, undecided_ns: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Return True for each bin whose packets were kept: not deleted at the disk limit, nor far from slow iterations.

    Args:
        logs: the node's logs.
        borders: borders of the bins.
        first_ns: time of the first packet.
        undecided_ns: times of packets in `NodeLogs.undecided_captures`, among them the first and the last.
    """
    begin_ns, end_ns = borders.edges_ns[:-1], borders.edges_ns[1:]
    names = logs.names(WINDOWS_JSONL.format(stem="*"))
    if names or undecided_ns:
        lines = [line for name in names for line in logs.lines(name, WINDOW)]
        spans = sorted((max(line["begin_ns"], line.get("missing_until_ns", 0)), line["end_ns"]) for line in lines)
        if undecided_ns:  # later than all of these; at its ends, packets of files that are gone may be missing
            spans.append((min(undecided_ns) + PACKET_DISORDER_NS, max(undecided_ns) - PACKET_DISORDER_NS))
        if not spans:
            return np.zeros(borders.bins, bool)
        windows_ns = logs.clock.unstepped(np.array(spans, np.int64).reshape(-1)).reshape(-1, 2)
        window = np.searchsorted(windows_ns[:, 0], begin_ns, side="right") - 1  # they do not overlap
        kept: npt.NDArray[np.bool_] = (window >= 0) & (end_ns <= windows_ns[window, 1])
        return kept
    if any(facts.get("deleted_files") for facts in _facts(logs)):
        return begin_ns >= first_ns
    return np.ones(borders.bins, bool)


def interface_in(path: str) -> str:
    """Return the interface in the name of a capture, ``<nic>-<n>.pcap``."""
    return Path(path).name.partition(".pcap")[0].rpartition("-")[0]


def undecided_warnings(logs: NodeLogs) -> Iterator[str]:
    """Yield a sentence if a node has packets that it did not decide on."""
    if logs.undecided_captures:
        yield (
            f"{logs.name} has not decided which packets in {PACKETS_RING} are near slow iterations, for its agent was "
            "killed or still records: all of them are counted"
        )


def _facts(logs: NodeLogs) -> list[dict[str, Any]]:
    """Return the facts of a node's captures: one, or a sweep's, which has one for each load and interface."""
    return [logs.json(name, PACKETS) for name in logs.names("packets/*.json")]


def dropped_packets(logs: NodeLogs) -> int | None:
    """Return the number of packets that a node's captures lost; None: not known."""
    known = [lost for facts in _facts(logs) if (lost := lost_packets(facts)) is not None]
    return sum(known) if known else None


def lost_packets(facts: Mapping[str, Any]) -> int | None:
    """Return the packets that a capture lost, by the facts that its program left; None: not known."""
    known = [facts[name] for name in ("dropped_by_kernel", "dropped_by_interface") if facts.get(name) is not None]
    return sum(known) if known else None


def own_addresses(packets: Packets, known: set[str]) -> set[str]:
    """Return the addresses of the capturing node: those ``known`` from its sockets, else the one in most packets."""
    if known:
        return known
    seen: Counter[str] = Counter()
    for side in ("source", "destination"):
        for address, count in zip(packets.flows[side], packets.flows["packets"], strict=True):
            seen[str(address)] += int(count)
    return {seen.most_common(1)[0][0]} if seen else set()
