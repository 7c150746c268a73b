"""Captures of several nodes on one clock, each flow from one of them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ringtap.analysis.pcap.layout import CELL
from ringtap.analysis.pcap.merge import merge
from ringtap.analysis.pcap.scan import Scanned
from ringtap.analysis.pcap.traffic import Traffic
from ringtap.errors import UsageError
from ringtap.units import counted

_TOGETHER = 1 << 20
_Mask = npt.NDArray[np.bool_]
# what a row holds by direction, and the least round trip's word for none
_NONE = {"rtt_min_ns": -1}


def align(traffics: Sequence[Traffic], offsets_ns: Sequence[int]) -> Traffic:
    """Put captures of several nodes together, on one clock.

    A packet between two of the nodes is in both captures. Each flow is taken from the one in which it has most
    payload, which is the sender's where packets were lost; of equals, from that of the node that sends it, told by
    the address that most of its packets have. A RoCE queue pair likewise, by its packets.

    Args:
        traffics: one a node, read with bins of the same width; filters count.
        offsets_ns: how far each node's clock is ahead of the reference, taken off its times (``offset_ns`` in
            ``clock/clock.json``).

    Returns:
        One traffic, on the reference's clock. Its ``counts`` are those of all captures together.

    Raises:
        UsageError: there is not one offset a capture, or the widths of the bins differ.
    """
    if not traffics or len(traffics) != len(offsets_ns):
        raise UsageError(
            f"{counted(len(offsets_ns), 'clock offset')} for {counted(len(traffics), 'capture')}: give one for each"
        )
    if len({traffic.bin_ns for traffic in traffics}) > 1:
        raise UsageError("the captures have bins of different widths: read them with the same bin_s")
    kept = _best_flows(traffics)
    pairs = _best_queue_pairs([traffic.scanned for traffic in traffics])
    parts = [_only(traffic.scanned, mine, own) for traffic, mine, own in zip(traffics, kept, pairs, strict=True)]
    files = [name for traffic in traffics for name in traffic.files]
    return Traffic(merge(parts, list(offsets_ns)), files)


def _best_flows(traffics: Sequence[Traffic]) -> list[_Mask]:
    """Of each capture, the flows that are taken from it."""
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
    """What tells flows apart in every capture, and their sources."""
    mine, back = rows[flows // 2], flows % 2 == 1
    ends = np.empty(len(flows), [("s", "V16"), ("d", "V16"), ("p", "u2"), ("q", "u2"), ("r", "V3")])
    for name, (there, other) in {
        "s": ("a", "b"),
        "d": ("b", "a"),
        "p": ("a_port", "b_port"),
        "q": ("b_port", "a_port"),
    }.items():
        ends[name] = np.where(back, mine[other], mine[there])
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
    """A scan with these flows alone; the rows of the others stay, empty, so that numbers hold."""
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
