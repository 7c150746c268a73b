"""Scan of one capture stream in blocks: conversations, rates in bins, RoCE queue pairs and counts.

The kernels process packets, in memory that is reserved for the largest number of conversations; the system allocates
its pages as they are written. Python reads the headers of files, sections and interfaces, as they are few. Formats:
draft-ietf-opsawg-pcap and draft-ietf-opsawg-pcapng.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from ringtap.analysis.pcap.kernels import compile
from ringtap.analysis.pcap.kernels import state as ks
from ringtap.analysis.pcap.scan_dtypes import CELL, CONVERSATION, PACKET, QUEUE_PAIR
from ringtap.errors import UsageError

MAX_CONVERSATIONS = 2**18
"""Conversations distinguished in one capture, at most; packets of further ones are summed in one row of family 0."""

_CELLS_IN_MEMORY = (96 << 20) // CELL.itemsize
_PACKETS_IN_MEMORY = 2**22
_USUAL_MAX_KEPT = 262_144  # snap length that tools use for "no limit"
_PCAP_HEADER_BYTES = 24
_SECTION_HEADER = b"\x0a\x0d\x0d\x0a"
# magic number in the file -> (byte order, nanoseconds per tick)
_MAGICS = {
    b"\xd4\xc3\xb2\xa1": ("<", 1000),
    b"\xa1\xb2\xc3\xd4": (">", 1000),
    b"\x4d\x3c\xb2\xa1": ("<", 1),
    b"\xa1\xb2\x3c\x4d": (">", 1),
}
_IF_NAME, _IF_TSRESOL, _IF_TSOFFSET = 2, 9, 14


@dataclass(frozen=True)
class Scanned:
    """Results of a scan.

    Attributes:
        conversations: rows of ``scan_dtypes.CONVERSATION``, in the order of their first packets.
        cells: rows of ``scan_dtypes.CELL``; one (flow, bin) may appear several times, and in any order.
        queue_pairs: rows of ``scan_dtypes.QUEUE_PAIR``.
        counts: number of packets, bytes and anomalies, by name.
        start_ns: beginning of bin 0 since the epoch; a multiple of ``bin_ns``.
        bin_ns: width of a bin.
        first_ns: time of the earliest packet; -1 if there is none.
        last_ns: time of the latest packet; -1 if there is none.
        interfaces: ``name``, ``linktype`` and ``snap_bytes`` of each.
        packets: rows of ``scan_dtypes.PACKET`` in the capture's order, if they were asked for.
    """

    conversations: npt.NDArray[Any]
    cells: npt.NDArray[Any]
    queue_pairs: npt.NDArray[Any]
    counts: dict[str, int]
    start_ns: int
    bin_ns: int
    first_ns: int
    last_ns: int
    interfaces: list[dict[str, Any]] = field(default_factory=list)
    packets: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(0, PACKET))


class Scan:
    """Scanner of one capture stream; several may run in parallel threads.

    Args:
        bin_ns: width of the bins.
        cells: an empty file for the cells that exceed the buffer in memory; a temporary one if None.
        packets: True to keep a row per packet too.
        conversations: number of conversations to distinguish; None for `MAX_CONVERSATIONS`.

    Raises:
        UsageError: numba is not installed, or the machine is big-endian.
    """

    def __init__(
        self,
        bin_ns: int = 1_000_000,
        cells: BinaryIO | None = None,
        *,
        packets: bool = False,
        conversations: int | None = None,
    ) -> None:
        self._entries = compile.entries()
        self._bin_ns = bin_ns
        self._arena = Arena(bin_ns, cells, packets, conversations)
        self._walk, self._resume = self._entries["walk"], self._entries["resume"]
        self._started = self._searching = self._big_endian = False
        self._torn = b""  # start of a record that is not complete yet
        self._wanted = _PCAP_HEADER_BYTES  # number of bytes that it needs
        self._to_skip = self._skipped = 0  # bytes of a block to skip, and bytes skipped
        self._corrupt_records = self._corrupt_bytes = 0
        self._section: list[Interface] = []
        self._described: list[dict[str, Any]] = []

    def feed(self, block: memoryview) -> None:
        """Process the next bytes of the stream, which may be split anywhere.

        Raises:
            UsageError: the stream is not a capture.
        """
        data = np.frombuffer(block, np.uint8) if len(block) else np.zeros(0, np.uint8)
        while len(data):
            if self._to_skip:
                data = self._skip(data)
            elif self._torn:
                # a record spans two blocks: take its rest from the second, or all of it when searching for a record
                taken = len(data) if self._searching else self._wanted - len(self._torn)
                self._torn += data[:taken].tobytes()
                data = data[taken:]
                if len(self._torn) >= self._wanted:
                    self._torn = self._process(np.frombuffer(self._torn, np.uint8))
            else:
                self._torn = self._process(data)
                return

    def finish(self) -> Scanned:
        """End the stream, and return its results.

        Raises:
            UsageError: it was not a capture.
        """
        if not self._started:
            raise UsageError("is not a capture: it is too short" if self._torn else "is not a capture: it is empty")
        arena, flow = self._arena, 0
        if self._searching and self._torn:
            arena.state[ks.IS_END] = 1
            self._torn = self._process(np.frombuffer(self._torn, np.uint8))
        while True:
            flow = self._entries["finish"](arena.address, flow, 0)
            self._make_room()
            if flow >= 2 * arena.word(ks.ROWS):
                break
        self._entries["total"](arena.address, arena.cells.begin, arena.word(ks.CELLS_AT))
        counts = dict(zip(ks.COUNTS, arena.state[ks.COUNTED :].tolist(), strict=False))
        left = len(self._torn)
        counts["torn_bytes"] = self._skipped if self._to_skip else 0 if self._searching else left
        counts["corrupt_records"] = self._corrupt_records
        counts["corrupt_bytes"] = self._corrupt_bytes + (left if self._searching else 0)
        (cells, *packets), least = arena.rows(), arena.word(ks.MIN_BIN)
        conversations = arena.conversations[: arena.word(ks.ROWS)]
        queue_pairs = arena.queue_pairs[: arena.word(ks.QUEUE_PAIR_ROWS)]
        first_ns = arena.word(ks.FIRST_NS)
        if (conversations["first_ns"] < 0).any():
            # packets without a time before the first that has one count at its time
            cells["bin"][cells["bin"] == ks.UNKNOWN_BIN] = 0
            for rows in (conversations["first_ns"], conversations["last_ns"], queue_pairs["first_ns"]):
                rows[rows < 0] = first_ns
            queue_pairs["last_ns"] = np.maximum(queue_pairs["last_ns"], first_ns)
            if packets:
                packets[0]["time_ns"] = np.maximum(packets[0]["time_ns"], first_ns)
        if least < 0:
            cells["bin"] -= least
        is_timed = arena.word(ks.LAST_NS) >= 0
        return Scanned(
            conversations=conversations,
            cells=cells,
            queue_pairs=queue_pairs,
            counts=counts,
            start_ns=(arena.word(ks.BASE_BIN) + least) * self._bin_ns if is_timed else 0,
            bin_ns=self._bin_ns,
            first_ns=first_ns,
            last_ns=arena.word(ks.LAST_NS),
            interfaces=self._described,
            packets=packets[0] if packets else np.zeros(0, PACKET),
        )

    def _skip(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        skipped = min(self._to_skip, len(data))
        self._to_skip -= skipped
        self._skipped = self._skipped + skipped if self._to_skip else 0
        return data[skipped:]

    def _process(self, data: npt.NDArray[np.uint8]) -> bytes:
        """Process bytes that begin with a record, or with the file; return the incomplete tail."""
        if not self._started:
            if len(data) < _PCAP_HEADER_BYTES:
                return data.tobytes()
            data = data[self._read_file_header(data[:_PCAP_HEADER_BYTES].tobytes()) :]
        used, size, address = 0, len(data), data.ctypes.data
        arena, state = self._arena, self._arena.state
        while True:
            if self._searching:
                skipped = self._resume(arena.address, address + used, size - used)
                self._corrupt_bytes += skipped
                used += skipped
                self._searching = bool(state[ks.STOPPED] != ks.MORE)
                if self._searching:
                    break
            used += self._walk(arena.address, address + used, size - used)
            stopped = state[ks.STOPPED]
            if stopped == ks.FULL:
                self._make_room()
                continue
            if stopped == ks.SECTION:
                total = self._read_block(data[used:])
                if total > 0:
                    used += total
                    continue
                if total == 0:
                    break
                stopped = ks.CORRUPT
            if stopped == ks.MORE:
                break
            if stopped == ks.PASS_OVER:
                self._to_skip, self._skipped = arena.word(ks.NEEDED), size - used
                return b""
            self._searching = True
            self._corrupt_records += 1
            self._corrupt_bytes += 1
            used += 1
        self._wanted = arena.word(ks.NEEDED)
        return data[used:].tobytes()

    def _make_room(self) -> None:
        """Empty the buffers of cells and packets if they are full."""
        arena = self._arena
        if arena.is_full(ks.CELLS_AT):
            self._entries["total"](arena.address, arena.cells.begin, arena.word(ks.CELLS_AT))
        arena.make_room()

    def _read_file_header(self, head: bytes) -> int:
        """Detect the format from the first bytes; return the length of the file header."""
        header = pcap_header(head)
        if header is None and (head[:4] != _SECTION_HEADER or section_header(head[:12]) is None):
            raise UsageError("is not a capture: pcap and pcapng files are read")
        self._started = True
        self._arena.state[ks.MAX_KEPT] = _USUAL_MAX_KEPT
        if header is None:
            self._walk, self._resume = self._entries["walk_blocks"], self._entries["resume_blocks"]
            return 0
        self._big_endian, interface = header
        self._arena.state[ks.SWAPPED] = int(self._big_endian)
        self._add_interface(interface)
        return _PCAP_HEADER_BYTES

    def _read_block(self, data: npt.NDArray[np.uint8]) -> int:
        """Read a section header or interface block of pcapng.

        Returns:
            Its length; 0 if it is incomplete, -1 if it is damaged.
        """
        if data[:4].tobytes() == _SECTION_HEADER:
            header = section_header(data[:12].tobytes())
            if header is None:
                return -1
            if header[1] <= len(data):
                self._big_endian = header[0]
                self._arena.state[ks.SWAPPED] = int(header[0])
                self._section = []
                self._arena.set_interfaces(())
            total = header[1]
        else:
            total = int.from_bytes(data[4:8].tobytes(), "big" if self._big_endian else "little")
            if total <= len(data):
                interface = interface_block(data[:total].tobytes(), self._big_endian)
                if interface is None:
                    return -1
                self._add_interface(interface)
        if total > len(data):
            self._arena.state[ks.NEEDED] = total
            return 0
        return total

    def _add_interface(self, interface: Interface) -> None:
        if len(self._section) < ks.MAX_INTERFACES:
            self._section.append(interface)
            self._arena.set_interfaces(self._section)
            snap = min(interface.snap_bytes, ks.MAX_FRAME_BYTES)
            self._arena.state[ks.MAX_KEPT] = max(snap, self._arena.word(ks.MAX_KEPT))
        if len(self._described) < ks.MAX_INTERFACES:
            self._described.append(interface.described())


class Arena:
    """State and tables of one scan.

    Args:
        bin_ns: width of a bin.
        cells: file for the cells that exceed the buffer in memory; a temporary one if None.
        packets: True to keep a row per packet too.
        conversations: number of conversations to distinguish; None for `MAX_CONVERSATIONS`.
    """

    def __init__(self, bin_ns: int, cells: BinaryIO | None, packets: bool, conversations: int | None = None) -> None:
        limit = MAX_CONVERSATIONS if conversations is None else conversations
        most = limit + 1  # plus the row of the others
        self.conversations = np.zeros(most, CONVERSATION)
        self.queue_pairs = np.zeros(ks.MAX_QUEUE_PAIRS, QUEUE_PAIR)
        self.cells = Spill(CELL, _CELLS_IN_MEMORY, cells)
        self._spills = [(self.cells, ks.CELLS_AT)]
        if packets:
            self._spills.append((Spill(PACKET, _PACKETS_IN_MEMORY, None), ks.PACKETS_AT))
        self._interfaces = np.zeros((ks.MAX_INTERFACES, ks.INTERFACE_BYTES // 8), np.int64)
        blocks = {
            ks.DIRECTIONS: most * 2 * ks.DIRECTION_BYTES,
            ks.HOLES: most * 2 * ks.MAX_HOLES * ks.HOLE_BYTES,
            ks.SLOTS: max(limit * ks.SLOTS_A_ROW * 4, ks.FIRST_SLOTS) << ks.SLOT_SHIFT,
            ks.FRAGMENTS: ks.FRAGMENT_SLOTS << ks.FRAGMENT_SHIFT,
            ks.QUEUE_PAIR_WORK: ks.MAX_QUEUE_PAIRS * ks.QUEUE_PAIR_WORK_BYTES,
            ks.QUEUE_PAIR_SLOTS: ks.QUEUE_PAIR_SLOT_COUNT * 4,
        }
        self._blocks = {word: _aligned(size) for word, size in blocks.items()}
        self.state = np.zeros(ks.WORDS, np.int64)
        self.address: int = self.state.ctypes.data
        for word, block in self._blocks.items():
            self.state[word] = block.ctypes.data
        self.state[ks.CONVERSATIONS] = self.conversations.ctypes.data
        self.state[ks.QUEUE_PAIRS] = self.queue_pairs.ctypes.data
        self.state[ks.INTERFACES] = self._interfaces.ctypes.data
        self.state[ks.SECRETS : ks.SECRETS + 4] = np.frombuffer(os.urandom(16), np.uint32)
        self.state[ks.MAX_ROWS] = limit
        self.state[ks.SLOT_MASK] = ks.FIRST_SLOTS - 1
        self.state[ks.BIN_NS] = bin_ns
        self.state[ks.BASE_BIN] = ks.NO_BIN
        self.state[ks.BIN_START_NS] = 2**62
        self.state[ks.FIRST_NS] = self.state[ks.LAST_NS] = -1
        for spill, word in self._spills:
            self.state[word], self.state[word + 1] = spill.begin, spill.end

    def word(self, number: int) -> int:
        """Return a word of the state."""
        return int(self.state[number])

    def is_full(self, word: int) -> bool:
        """True if the buffer that a word of the state points into may not hold the rows of the next packet."""
        itemsize = CELL.itemsize if word == ks.CELLS_AT else PACKET.itemsize
        return self.word(word) + ks.ROOM * itemsize > self.word(word + 1)

    def make_room(self) -> None:
        """Write the rows of full, or nearly full, buffers to their files."""
        for spill, word in self._spills:
            if self.is_full(word):
                spill.empty(self.word(word))
                self.state[word] = spill.begin

    def rows(self) -> tuple[npt.NDArray[Any], ...]:
        """Return all cells, and all packets if they were wanted."""
        return tuple(spill.rows(self.word(word)) for spill, word in self._spills)

    def set_interfaces(self, interfaces: Sequence[Interface]) -> None:
        """Pass the interfaces of the section to the kernels."""
        self.state[ks.INTERFACE_COUNT] = len(interfaces)
        for row, interface in zip(self._interfaces, interfaces, strict=False):
            row[:6] = (*interface[1:], ks.MAX_NS // interface.by)


class Spill:
    """Rows in order of arrival, in memory while they fit and in a file beyond that.

    Args:
        dtype: data type of the rows.
        most: number of rows to keep in memory.
        file: file for the rows beyond that; a temporary one if None.
    """

    def __init__(self, dtype: np.dtype[Any], most: int, file: BinaryIO | None) -> None:
        self._buffer = np.empty(max(most, 2 * ks.ROOM), dtype)
        self.begin: int = self._buffer.ctypes.data
        self.end = self.begin + self._buffer.nbytes
        self._file, self._is_own = file, file is None
        self._rows_in_file = 0

    def __del__(self) -> None:
        if self._is_own and self._file is not None:
            self._file.close()  # rows mapped from it stay valid

    def empty(self, end: int) -> None:
        """Write the rows from the start of the buffer up to an address to the file."""
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed when this is gone
        rows = (end - self.begin) // self._buffer.itemsize
        self._file.write(self._buffer[:rows].data)
        self._rows_in_file += rows

    def rows(self, end: int) -> npt.NDArray[Any]:
        """Return all rows, as an array or a map of the file; ``end`` is the address after the buffer's last row."""
        if self._rows_in_file == 0:
            return self._buffer[: (end - self.begin) // self._buffer.itemsize]
        self.empty(end)
        assert self._file is not None
        self._file.flush()
        return np.memmap(self._file, self._buffer.dtype, "r+", shape=(self._rows_in_file,))


def _aligned(size: int) -> npt.NDArray[np.uint8]:
    """Return zeroed bytes at a multiple of 256, the size of the work areas of both directions of a conversation."""
    memory = np.zeros(size + 256, np.uint8)
    skipped = -memory.ctypes.data % 256
    return memory[skipped : skipped + size]


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
    if head[:4] not in _MAGICS or len(head) < _PCAP_HEADER_BYTES:
        return None
    order, tick_ns = _MAGICS[head[:4]]
    snap, link = struct.unpack_from(f"{order}II", head, 16)
    return order == ">", Interface("", link & 0xFFFF, snap, ks.TIMES, tick_ns)


def section_header(block: bytes) -> tuple[bool, int] | None:
    """Return a section's byte order (True for big-endian) and the length of its header block; None if it is invalid.

    Args:
        block: its first 12 bytes.
    """
    order = {b"\x4d\x3c\x2b\x1a": "<", b"\x1a\x2b\x3c\x4d": ">"}.get(block[8:12])
    if order is None:
        return None
    (total,) = struct.unpack_from(f"{order}I", block, 4)
    return None if total < 28 or total % 4 or total > ks.MAX_BLOCK_BYTES else (order == ">", total)


def interface_block(block: bytes, big_endian: bool) -> Interface | None:
    """Return the interface that a complete block describes; None if it is damaged."""
    order = ">" if big_endian else "<"
    if len(block) < 20 or block[-4:] != block[4:8]:
        return None
    link, snap = struct.unpack_from(f"{order}H2xI", block, 8)
    name, scale, by, offset = "", ks.TIMES, 1000, 0
    for code, value in _options(block[16:-4], order):
        if code == _IF_NAME:
            name = value.decode("utf-8", "replace")[:64]
        elif code == _IF_TSRESOL and value:
            scale, by = _resolution(value[0])
        elif code == _IF_TSOFFSET and len(value) == 8:
            (offset,) = struct.unpack(f"{order}q", value)
    # an offset too large for nanoseconds in 64 bits is ignored
    return Interface(name, link, snap, scale, by, offset * 1_000_000_000 if abs(offset) < 2**32 else 0)


def _resolution(value: int) -> tuple[int, int]:
    power = value & 0x7F
    if value & 0x80:
        return (ks.POWER_OF_TWO, min(power, 62)) if power else (ks.TIMES, 10**9)
    return (ks.TIMES, 10 ** (9 - power)) if power <= 9 else (ks.DIVIDED, 10 ** min(power - 9, 18))


def _options(data: bytes, order: str) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        code, size = struct.unpack_from(f"{order}HH", data, at)
        if code == 0:
            return
        yield code, data[at + 4 : at + 4 + size]
        at += 4 + size + -size % 4
