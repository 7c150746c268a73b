"""Headers of captures: the file header of pcap, and the sections and interfaces of pcapng.

Python reads them, as they are few. Formats: draft-ietf-opsawg-pcap and draft-ietf-opsawg-pcapng.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from ringtap.analysis.pcap.kernels.state import (
    DIVIDED,
    MOST_BLOCK_BYTES,
    POWER_OF_TWO,
    TIMES,
)

PCAP_HEADER_BYTES = 24
SECTION_HEADER = b"\x0a\x0d\x0d\x0a"
# magic number in the file -> (byte order, nanoseconds per tick)
_MAGICS = {
    b"\xd4\xc3\xb2\xa1": ("<", 1000),
    b"\xa1\xb2\xc3\xd4": (">", 1000),
    b"\x4d\x3c\xb2\xa1": ("<", 1),
    b"\xa1\xb2\x3c\x4d": (">", 1),
}
_IF_NAME, _IF_TSRESOL, _IF_TSOFFSET = 2, 9, 14


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
    scale: int = TIMES
    by: int = 1000
    offset_ns: int = 0

    def described(self) -> dict[str, Any]:
        """Description of the interface for users."""
        return {
            "name": self.name,
            "linktype": self.linktype,
            "snap_bytes": self.snap_bytes,
        }


def pcap_header(head: bytes) -> tuple[bool, Interface] | None:
    """Return the byte order of a pcap file (True for big-endian) and its interface; None if it is not a pcap file."""
    if head[:4] not in _MAGICS or len(head) < PCAP_HEADER_BYTES:
        return None
    order, tick_ns = _MAGICS[head[:4]]
    snap, link = struct.unpack_from(f"{order}II", head, 16)
    return order == ">", Interface("", link & 0xFFFF, snap, TIMES, tick_ns)


def section_header(block: bytes) -> tuple[bool, int] | None:
    """Return a section's byte order (True for big-endian) and the length of its header block; None if it is invalid.

    Args:
        block: its first 12 bytes.
    """
    order = {b"\x4d\x3c\x2b\x1a": "<", b"\x1a\x2b\x3c\x4d": ">"}.get(block[8:12])
    if order is None:
        return None
    (total,) = struct.unpack_from(f"{order}I", block, 4)
    return None if total < 28 or total % 4 or total > MOST_BLOCK_BYTES else (order == ">", total)


def interface_block(block: bytes, big_endian: bool) -> Interface | None:
    """Return the interface that a complete block describes; None if it is damaged."""
    order = ">" if big_endian else "<"
    if len(block) < 20 or block[-4:] != block[4:8]:
        return None
    link, snap = struct.unpack_from(f"{order}H2xI", block, 8)
    name, scale, by, offset = "", TIMES, 1000, 0
    for code, value in _options(block[16:-4], order):
        if code == _IF_NAME:
            name = value.decode("utf-8", "replace")[:64]
        elif code == _IF_TSRESOL and value:
            scale, by = _resolution(value[0])
        elif code == _IF_TSOFFSET and len(value) == 8:
            (offset,) = struct.unpack(f"{order}q", value)
    # an offset too large for nanoseconds in 64 bits is damage
    return Interface(
        name,
        link,
        snap,
        scale,
        by,
        offset * 1_000_000_000 if abs(offset) < 2**32 else 0,
    )


def _resolution(value: int) -> tuple[int, int]:
    power = value & 0x7F
    if value & 0x80:
        return (POWER_OF_TWO, min(power, 62)) if power else (TIMES, 10**9)
    return (TIMES, 10 ** (9 - power)) if power <= 9 else (DIVIDED, 10 ** min(power - 9, 18))


def _options(data: bytes, order: str) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        code, size = struct.unpack_from(f"{order}HH", data, at)
        if code == 0:
            return
        yield code, data[at + 4 : at + 4 + size]
        at += 4 + size + -size % 4
