"""Reads the headers of pcap and pcapng files, and writes pcapng.

Sources: draft-ietf-opsawg-pcap and draft-ietf-opsawg-pcapng. Compiled kernels read the packets themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringtap.analysis.pcap.kernels import scan_state as ks
from ringtap.core.capture_file_formats import (
    BYTE_ORDER,
    ENHANCED_BLOCK,
    INTERFACE_BLOCK,
    PCAP_HEADER,
    PCAP_MAGICS,
    PCAPNG_VERSION,
    SECTION_HEADER,
)

_LENGTH_UNKNOWN = -1
_COMMENT, _APPLICATION = 1, 4
_IF_NAME, _IF_DESCRIPTION, _IF_TSRESOL, _IF_TSOFFSET = 2, 3, 9, 14
_ISB_IFDROP, _ISB_OSDROP = 5, 7
_NANOSECONDS = b"\x09"
_MAX_OPTION_BYTES = 2**16 - 4
_PACKET_WORDS = 8  # of a block without captured bytes and options


class Interface(NamedTuple):
    """The interface that packets were captured on.

    Attributes:
        name: name in the capture; empty if it has none.
        linktype: LINKTYPE of its frames.
        snap_bytes: length that packets were cut to; 0: not cut.
        scale: conversion of ticks to nanoseconds with ``by``: TIMES, DIVIDED or POWER_OF_TWO of ``kernels.state``.
        by: nanoseconds per tick, ticks per nanosecond, or n for ticks of 2^-n s.
        offset_ns: added to every time.
    """

    name: str
    linktype: int
    snap_bytes: int
    scale: int = ks.TIMES
    by: int = 1000
    offset_ns: int = 0

    def described(self) -> dict[str, Any]:
        """Return a description of the interface for users."""
        return {"name": self.name, "linktype": self.linktype, "snap_bytes": self.snap_bytes}


def pcap_header(head: bytes) -> tuple[bool, Interface] | None:
    """Return the byte order of a pcap file (True for big-endian) and its interface; None if it is not a pcap file."""
    if head[:4] not in PCAP_MAGICS or len(head) < PCAP_HEADER.size:
        return None
    order, tick_ns = PCAP_MAGICS[head[:4]]
    snap, link = struct.unpack_from(f"{order}II", head, 16)
    return order == ">", Interface("", link & 0xFFFF, snap, ks.TIMES, tick_ns)


def section_header(block: bytes) -> tuple[bool, int] | None:
    """Return a section's byte order (True for big-endian) and the length of its header block; None if it is invalid.

    Args:
        block: its first 12 bytes.
    """
    order = next((order for order in "<>" if block[8:12] == struct.pack(f"{order}I", BYTE_ORDER)), None)
    if order is None:
        return None
    (total,) = struct.unpack_from(f"{order}I", block, 4)
    return None if total < 28 or total % 4 or total > ks.MAX_BLOCK_BYTES else (order == ">", total)


def interface_block(block: bytes, big_endian: bool) -> Interface | None:
    """Return the interface that a complete block, with its length at both ends, describes; None if it is damaged."""
    order = ">" if big_endian else "<"
    if len(block) < 20:
        return None
    link, snap = struct.unpack_from(f"{order}H2xI", block, 8)
    name, scale, by, offset = "", ks.TIMES, 1000, 0
    for code, value in _each_option(block[16:-4], order):
        if code == _IF_NAME:
            name = value.decode("utf-8", "replace")[:64]
        elif code == _IF_TSRESOL and value:
            scale, by = _resolution(value[0])
        elif code == _IF_TSOFFSET and len(value) == 8:
            (offset,) = struct.unpack(f"{order}q", value)
    # an offset too large for nanoseconds in 64 bits is ignored
    return Interface(name, link, snap, scale, by, offset * 1_000_000_000 if abs(offset) < 2**32 else 0)


def dropped_packets(block: bytes, big_endian: bool) -> tuple[int, int] | None:
    """Return the interface of a complete block of statistics, and the packets that it dropped since its start.

    The block has its length at both ends.

    Returns:
        None if the block is damaged or does not count them.
    """
    order = ">" if big_endian else "<"
    if len(block) < 24:
        return None
    (number,) = struct.unpack_from(f"{order}I", block, 8)
    counts = {
        code: struct.unpack(f"{order}Q", value)[0]
        for code, value in _each_option(block[20:-4], order)
        if code in (_ISB_IFDROP, _ISB_OSDROP) and len(value) == 8
    }
    return (number, sum(counts.values())) if counts else None


def _resolution(value: int) -> tuple[int, int]:
    power = value & 0x7F
    if value & 0x80:
        return (ks.POWER_OF_TWO, min(power, 62)) if power else (ks.TIMES, 10**9)
    return (ks.TIMES, 10 ** (9 - power)) if power <= 9 else (ks.DIVIDED, 10 ** min(power - 9, 18))


def _each_option(data: bytes, order: str) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        code, size = struct.unpack_from(f"{order}HH", data, at)
        if code == 0:
            return
        yield code, data[at + 4 : at + 4 + size]
        at += 4 + size + -size % 4


def section(application: str, comment: str) -> bytes:
    """Return the block that begins a pcapng file, in this machine's order."""
    body = struct.pack("<IHHq", BYTE_ORDER, *PCAPNG_VERSION, _LENGTH_UNKNOWN)
    return _block(SECTION_HEADER, body + _options({_COMMENT: comment, _APPLICATION: application}))


def interface(linktype: int, snap_bytes: int, name: str, description: str) -> bytes:
    """Return the block of an interface whose times are nanoseconds."""
    options: dict[int, str | bytes] = {_IF_NAME: name, _IF_DESCRIPTION: description, _IF_TSRESOL: _NANOSECONDS}
    return _block(INTERFACE_BLOCK, struct.pack("<HHI", linktype, 0, snap_bytes) + _options(options))


def _block(kind: int, body: bytes) -> bytes:
    total = len(body) + 12
    return struct.pack("<II", kind, total) + body + struct.pack("<I", total)


def _options(options: dict[int, str | bytes]) -> bytes:
    """Return options, padded; those with an empty value are left out."""
    made = b""
    for code, value in options.items():
        data = (value if isinstance(value, bytes) else value.encode(errors="replace"))[:_MAX_OPTION_BYTES]
        made += struct.pack("<HH", code, len(data)) + data + bytes(-len(data) % 4) if data else b""
    return made + bytes(4) if made else b""


Words = npt.NDArray[np.uint32]


def packets(rows: npt.NDArray[Any], bodies: Sequence[Words], comments: Mapping[int, str]) -> Words:
    """Return the blocks of packets, as words.

    Args:
        rows: ``interface`` (number in the file), ``time_ns``, ``kept`` and ``length`` of each packet; its captured
            bytes begin at word ``at`` of the part ``source`` of ``bodies``.
        bodies: captured bytes, each packet's padded with zeros to whole words.
        comments: comment by number of the row.
    """
    options = {row: np.frombuffer(_options({_COMMENT: text}), "<u4") for row, text in comments.items()}
    kept_words = words_of(rows["kept"])
    total = kept_words + _PACKET_WORDS
    for row, option in options.items():
        total[row] += len(option)
    ends = np.cumsum(total)
    begins, size, time_ns = ends - total, 4 * total, rows["time_ns"].astype(np.uint64)
    made = np.zeros(int(total.sum()), "<u4")
    is_body = np.ones(len(made), bool)
    high, low = time_ns >> np.uint64(32), time_ns & np.uint64(0xFFFFFFFF)
    head = (ENHANCED_BLOCK, size, rows["interface"], high, low, rows["kept"], rows["length"])
    for word, values in enumerate(head):
        made[begins + word], is_body[begins + word] = values, False
    made[ends - 1], is_body[ends - 1] = size, False
    for row, option in options.items():
        place = slice(ends[row] - 1 - len(option), ends[row] - 1)
        made[place], is_body[place] = option, False
    made[is_body] = _in_order(rows, kept_words, bodies)
    return made


def _in_order(rows: npt.NDArray[Any], kept_words: npt.NDArray[np.int64], bodies: Sequence[Words]) -> Words:
    """Return the captured bytes of packets in the order of the rows."""
    begins = np.cumsum(kept_words) - kept_words
    sources, total = np.unique(rows["source"]), int(kept_words.sum())
    shift = rows["at"] - begins
    if len(sources) == 1 and (shift == shift[0]).all():
        body: Words = bodies[sources[0]][shift[0] : shift[0] + total]
        return body
    index, source = np.arange(total) + np.repeat(shift, kept_words), np.repeat(rows["source"], kept_words)
    words = np.zeros(total, "<u4")
    for number in sources.tolist():
        mine = source == number
        words[mine] = bodies[number][index[mine]]
    return words


def words_of(kept: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the words that hold so many bytes."""
    return (kept.astype(np.int64) + 3) // 4
