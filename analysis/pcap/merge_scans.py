"""Merges scans: the files of one capture point, or the captures of several nodes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ringtap.analysis.pcap.captured_traffic import Traffic
from ringtap.analysis.pcap.scan import Cells, Scanned
from ringtap.analysis.pcap.scan_dtypes import CELL, CONVERSATION, PACKET, QUEUE_PAIR
from ringtap.core.errors import UsageError
from ringtap.core.units import counted

_TOGETHER = 1 << 20  # cells processed together
_Mask = npt.NDArray[np.bool_]
# values that mean "none" in fields by direction, if not 0
_NONE = {"rtt_min_ns": -1}


def align(traffics: Sequence[Traffic], offsets_ns: Sequence[int]) -> Traffic:
    """Merge captures of several nodes onto one clock.

    A packet between two of the nodes is in both captures. Each flow is taken from the capture in which it has
    the most payload, which is the sender's if packets were lost. On a tie, the capture of the sending node wins; a node
    is recognized by the address that most of its packets have. A RoCE queue pair is chosen likewise, by its packets.

    Args:
        traffics: one per node, read with bins of the same width; their filters apply.
        offsets_ns: lead of each node's clock over the reference clock, subtracted from its times (``offset_ns`` in
            ``clock/clock.json``).

    Returns:
        One traffic on the reference clock. Its ``counts`` are the sums over all captures.

    Raises:
        UsageError: there are no captures, not one offset per capture, or the widths of the bins differ.
    """
    _check_together([traffic.scanned for traffic in traffics], offsets_ns)
    kept = _best_flows(traffics)
    pairs = _best_queue_pairs([traffic.scanned for traffic in traffics])
    parts = [_only(traffic.scanned, mine, own) for traffic, mine, own in zip(traffics, kept, pairs, strict=True)]
    files = [name for traffic in traffics for name in traffic.files]
    leads = [lead + offset for traffic, offset in zip(traffics, offsets_ns, strict=True) for lead in traffic.leads_ns]
    left_out = [text for traffic in traffics for text in traffic.left_out]
    return Traffic(merge(parts, list(offsets_ns)), files, leads_ns=leads, left_out=left_out)


def _check_together(parts: Sequence[Scanned], offsets_ns: Sequence[int]) -> None:
    check_offsets(offsets_ns, len(parts))
    if len({part.bin_ns for part in parts}) > 1:
        raise UsageError("the captures have bins of different widths: read them with the same bin_s")


def check_offsets(offsets_ns: Sequence[int], captures: int) -> None:
    """Check that there is a clock offset for each capture, and any capture; else raise UsageError."""
    if not captures or len(offsets_ns) != captures:
        raise UsageError(
            f"{counted(len(offsets_ns), 'clock offset')} for {counted(captures, 'capture')}: give one for each"
        )


def _best_flows(traffics: Sequence[Traffic]) -> list[_Mask]:
    """Return, for each capture, a mask of the flows to take from it."""
    best: dict[bytes, tuple[tuple[int, bool], int, int]] = {}
    for number, traffic in enumerate(traffics):
        rows = traffic.scanned.conversations
        own = _busiest_address(rows)
        selected = np.flatnonzero(traffic.selected & (rows["packets"].reshape(-1) > 0))
        payload = rows["payload"].reshape(-1)
        for flow, key, source in zip(selected.tolist(), *_keys(rows, selected), strict=True):
            rank = (int(payload[flow]), source == own)
            if key not in best or rank > best[key][0]:
                best[key] = (rank, number, flow)
    kept = [np.zeros(2 * len(traffic.scanned.conversations), bool) for traffic in traffics]
    for _, number, flow in best.values():
        kept[number][flow] = True
    return kept


def _keys(rows: npt.NDArray[Any], flows: npt.NDArray[np.int64]) -> tuple[list[bytes], list[bytes]]:
    """Return keys that identify flows across captures, and their source addresses."""
    mine, back = rows[flows // 2], flows % 2 == 1
    ends = np.empty(len(flows), [("s", "V16"), ("d", "V16"), ("p", "u2"), ("q", "u2"), ("r", "V3")])
    for name, (forward, reverse) in {
        "s": ("a", "b"),
        "d": ("b", "a"),
        "p": ("a_port", "b_port"),
        "q": ("b_port", "a_port"),
    }.items():
        ends[name] = np.where(back, mine[reverse], mine[forward])
    ends["r"] = np.stack([mine[name] for name in ("protocol", "layer", "family")], 1).view("V3")[:, 0]
    return [key.tobytes() for key in ends], [source.tobytes() for source in ends["s"]]


def _busiest_address(rows: npt.NDArray[Any]) -> bytes:
    seen: dict[bytes, int] = {}
    for end in ("a", "b"):
        for address, packets in zip(rows[end], rows["packets"].sum(1).tolist(), strict=True):
            seen[address.tobytes()] = seen.get(address.tobytes(), 0) + packets
    return max(seen, key=lambda address: seen[address], default=b"")


def _best_queue_pairs(parts: Sequence[Scanned]) -> list[_Mask]:
    best: dict[tuple[Any, ...], tuple[int, int, int]] = {}
    for number, part in enumerate(parts):
        columns = [part.queue_pairs[name].tolist() for name in ("family", "queue_pair", "source", "destination")]
        for row, packets in enumerate(part.queue_pairs["packets"].tolist()):
            key = tuple(column[row] for column in columns)
            if key not in best or packets > best[key][0]:
                best[key] = (packets, number, row)
    kept = [np.zeros(len(part.queue_pairs), bool) for part in parts]
    for _, number, row in best.values():
        kept[number][row] = True
    return kept


def _only(scanned: Scanned, flows: _Mask, pairs: _Mask) -> Scanned:
    """Return a scan with these flows and queue pairs; rows of other flows are zeroed, so that numbers do not change."""
    rows = scanned.conversations.copy()
    for name in rows.dtype.names or ():
        if rows[name].ndim == 2:
            rows[name][~flows.reshape(-1, 2)] = _NONE.get(name, 0)
    with tempfile.TemporaryFile() as file:
        number = 0
        for at in range(0, len(scanned.cells), _TOGETHER):
            part = scanned.cells[at : at + _TOGETHER]
            part = part[flows[part["flow"]]]
            number += len(part)
            file.write(part.tobytes())
        file.flush()
        cells = np.memmap(file, CELL, "r", shape=(number,)) if number else np.empty(0, CELL)
    return replace(scanned, conversations=rows, cells=cells, queue_pairs=scanned.queue_pairs[pairs])


_Rows = npt.NDArray[Any]
_KIND = ("protocol", "kind", "layer", "family")
# summed fields of a conversation, by direction
_SUMS = [name for name in CONVERSATION.names or () if CONVERSATION[name].shape and name not in _NONE]
_QUEUE_PAIR_KEY = ("family", "queue_pair", "source", "destination")
_QUEUE_PAIR_SUMS = ("packets", "bytes", "payload", "acknowledgements", "naks", "cnps", "psn_gaps", "psn_repeats")


def merge(parts: Sequence[Scanned], offsets_ns: Sequence[int] | None = None) -> Scanned:
    """Merge scans; conversations with the same ends become one, regardless of which end sent first in each part.

    Numbers of packets and bytes, round trips and counts are added up, so a packet in two parts counts twice. TCP is not
    followed across the border of two files: retransmitted bytes whose first copy is in another file, and handshakes
    and round trips that end in another, are not counted.

    Args:
        parts: at least one scan; a part may itself be merged.
        offsets_ns: lead of each part's clock, subtracted from its times; None for 0. A cell is moved to the bin that
            covers most of it.

    Returns:
        One scan. Conversations are in the order of their first packets; ``a`` is the sender of the first packet.

    Raises:
        UsageError: there are no parts, not one offset per part, or their bins have different widths.
    """
    leads_ns = [0] * len(parts) if offsets_ns is None else list(offsets_ns)
    _check_together(parts, leads_ns)
    bin_ns = parts[0].bin_ns
    timed = [(part, offset) for part, offset in zip(parts, leads_ns, strict=True) if part.last_ns >= 0]
    first_ns = min((part.first_ns - offset for part, offset in timed), default=-1)
    leads_ns = [offset if part.last_ns >= 0 else 0 for part, offset in zip(parts, leads_ns, strict=True)]
    parts = [part if part.last_ns >= 0 else _at(part, first_ns) for part in parts]
    conversations, flows = _conversations(parts, leads_ns)
    start_ns = min(((part.start_ns - offset) // bin_ns * bin_ns for part, offset in timed), default=0)
    begins = [part.start_ns - offset - start_ns for part, offset in zip(parts, leads_ns, strict=True)]
    shifts = [(2 * begin + bin_ns) // (2 * bin_ns) for begin in begins]
    counts: dict[str, int] = {}
    for part in parts:
        for name, number in part.counts.items():
            counts[name] = counts.get(name, 0) + number
    return Scanned(
        conversations=conversations,
        cells=MergedCells(list(zip((part.cells for part in parts), flows, shifts, strict=True))),
        queue_pairs=_queue_pairs(parts, leads_ns),
        counts=counts,
        start_ns=start_ns,
        bin_ns=bin_ns,
        first_ns=first_ns,
        last_ns=max((part.last_ns - offset for part, offset in timed), default=-1),
        interfaces=_distinct([interface for part in parts for interface in part.interfaces]),
        packets=_packets(parts, flows, leads_ns),
    )


def _at(part: Scanned, time_ns: int) -> Scanned:
    """Return a part without packet times, with all its packets set to one time."""
    rows, pairs, packets = part.conversations.copy(), part.queue_pairs.copy(), part.packets.copy()
    for table, name in ((rows, "first_ns"), (rows, "last_ns"), (pairs, "first_ns"), (pairs, "last_ns")):
        table[name] = time_ns
    packets["time_ns"] = time_ns
    start_ns = max(time_ns, 0) // part.bin_ns * part.bin_ns
    return replace(part, conversations=rows, queue_pairs=pairs, packets=packets, start_ns=start_ns)


def _distinct(interfaces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [interface for number, interface in enumerate(interfaces) if interface not in interfaces[:number]]


def _ends(rows: _Rows, which: str) -> npt.NDArray[np.bytes_]:
    """Return address and port of one end as comparable strings of 18 bytes."""
    text = np.zeros((len(rows), 18), np.uint8)
    text[:, :16] = np.ascontiguousarray(rows[which]).view(np.uint8).reshape(-1, 16)
    text[:, 16:] = rows[f"{which}_port"].astype(">u2").view(np.uint8).reshape(-1, 2)
    return text.view("S18")[:, 0]


def _grouped(keys: _Rows, first_ns: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Group equal keys, in the order of their first times; return each row's group and each group's first row."""
    by_time = np.argsort(first_ns, kind="stable")
    _, first, inverse = np.unique(keys[by_time], return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.intp)
    order = np.argsort(first, kind="stable")
    rank[order] = np.arange(len(first))
    group = np.empty(len(keys), np.intp)
    group[by_time] = rank[inverse.reshape(-1)]
    return group, by_time[first[order]]


def _text(columns: Sequence[_Rows]) -> npt.NDArray[np.bytes_]:
    """Join columns into one byte string per row."""
    rows = len(columns[0])
    parts = [np.ascontiguousarray(column).view(np.uint8).reshape(rows, -1) for column in columns]
    whole = np.ascontiguousarray(np.concatenate(parts, axis=1))
    return whole.view(f"S{whole.shape[1]}")[:, 0]


def _conversations(parts: Sequence[Scanned], leads_ns: Sequence[int]) -> tuple[_Rows, list[npt.NDArray[np.uint32]]]:
    """Merge the conversations of all parts; return them and, for each part, the new numbers of its flows."""
    rows = np.concatenate([part.conversations for part in parts])
    if not len(rows):
        return np.zeros(0, CONVERSATION), [np.zeros(0, np.uint32) for _ in parts]
    lead_ns = np.repeat(np.array(leads_ns, np.int64), [len(part.conversations) for part in parts])
    first_ns, last_ns = rows["first_ns"] - lead_ns, rows["last_ns"] - lead_ns
    a, b = _ends(rows, "a"), _ends(rows, "b")
    turned = a > b
    low, high = np.where(turned, b, a), np.where(turned, a, b)
    group, first = _grouped(_text([*(rows[name] for name in _KIND), low, high]), first_ns)
    turned ^= turned[first][group]  # now: in the opposite direction to the first of the group
    merged = np.zeros(len(first), CONVERSATION)
    for name in (*_KIND, "a", "b", "a_port", "b_port"):
        merged[name] = rows[name][first]
    for name in _SUMS:
        np.add.at(merged[name], group, np.where(turned[:, None], rows[name][:, ::-1], rows[name]))
    least = np.where(turned[:, None], rows["rtt_min_ns"][:, ::-1], rows["rtt_min_ns"])
    merged["rtt_min_ns"] = _least(group, len(first), least)
    merged["handshake_ns"] = _earliest(group, len(first), rows["handshake_ns"], first_ns)
    merged["first_ns"] = first_ns[first]
    merged["last_ns"] = np.iinfo(np.int64).min
    np.maximum.at(merged["last_ns"], group, last_ns)
    flows = (group * 2)[:, None] + (np.arange(2) ^ turned[:, None])
    ends = np.cumsum([len(part.conversations) for part in parts])[:-1]
    return merged, [part.reshape(-1).astype(np.uint32) for part in np.split(flows, ends)]


def _least(group: npt.NDArray[np.intp], groups: int, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the least value of each group; -1 stands for none."""
    most = np.iinfo(np.int64).max
    least = np.full((groups, *values.shape[1:]), most)
    np.minimum.at(least, group, np.where(values < 0, most, values))
    return np.where(least == most, -1, least)


def _earliest(
    group: npt.NDArray[np.intp], groups: int, values: npt.NDArray[np.int64], first_ns: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return, for each group, the value of the earliest row that has one (not -1)."""
    found = np.full(groups, -1, np.int64)
    rows = np.flatnonzero(values >= 0)
    rows = rows[np.argsort(first_ns[rows], kind="stable")][::-1]
    found[group[rows]] = values[rows]
    return found


class MergedCells:
    """Cells of several scans, read with the flow numbers and bins of the merged scan; nothing is copied before.

    Args:
        parts: for each scan its cells, the new numbers of its flows, and what is added to its bins.
    """

    def __init__(self, parts: Sequence[tuple[Cells, npt.NDArray[np.uint32], int]]) -> None:
        self._parts = parts
        self._ends = np.cumsum([0, *(len(cells) for cells, _, _ in parts)]).tolist()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, wanted: slice) -> _Rows:
        first, last, _ = wanted.indices(len(self))
        found = [np.empty(0, CELL)]
        for (cells, flows, shift), begin, end in zip(self._parts, self._ends, self._ends[1:], strict=False):
            if max(first, begin) < min(last, end):
                some = np.array(cells[max(first - begin, 0) : min(last, end) - begin])
                some["flow"] = flows[some["flow"]]
                some["bin"] += shift
                found.append(some)
        return found[1] if len(found) == 2 else np.concatenate(found)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> _Rows:
        return self[:]


def _packets(parts: Sequence[Scanned], flows: Sequence[npt.NDArray[np.uint32]], leads_ns: Sequence[int]) -> _Rows:
    """Return the single packets of all parts, sorted by time if several parts have some."""
    found = []
    for part, numbers, offset in zip(parts, flows, leads_ns, strict=True):
        if len(part.packets):
            some = np.array(part.packets)
            some["flow"] = numbers[some["flow"]]
            some["time_ns"] -= offset
            found.append(some)
    whole = np.concatenate([np.zeros(0, PACKET), *found])
    return whole[np.argsort(whole["time_ns"], kind="stable")] if len(found) > 1 else whole


def _queue_pairs(parts: Sequence[Scanned], leads_ns: Sequence[int]) -> _Rows:
    rows = np.concatenate([part.queue_pairs for part in parts])
    if not len(rows):
        return np.zeros(0, QUEUE_PAIR)
    lead_ns = np.repeat(np.array(leads_ns, np.int64), [len(part.queue_pairs) for part in parts])
    group, first = _grouped(_text([rows[name] for name in _QUEUE_PAIR_KEY]), rows["first_ns"] - lead_ns)
    merged = rows[first]
    for name in _QUEUE_PAIR_SUMS:
        merged[name] = 0
        np.add.at(merged[name], group, rows[name])
    merged["first_ns"] -= lead_ns[first]
    merged["last_ns"] = np.iinfo(np.int64).min
    np.maximum.at(merged["last_ns"], group, rows["last_ns"] - lead_ns)
    return merged
