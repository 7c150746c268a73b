"""One capture stream, scanned in blocks: conversations, rates in bins, RoCE queue pairs and counts.

Formats: the libpcap file format (draft-ietf-opsawg-pcap) and pcapng (draft-ietf-opsawg-pcapng).
"""

from __future__ import annotations

import struct
import tempfile
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ringtap.analysis.pcap import compiled, kernel_state
from ringtap.analysis.pcap.layout import CELL, CONVERSATION, QUEUE_PAIR
from ringtap.errors import UsageError

MOST_CONVERSATIONS = 2**19
"""Conversations told apart in one capture; packets of further ones are summed in one row of family 0."""

_CELLS_AT_ONCE = 2**14
_CELLS_IN_MEMORY = 2**22
# magic as it lies in the file -> (other byte order than the machine's, nanoseconds a tick)
_MAGICS = {
    b"\xd4\xc3\xb2\xa1": (0, 1000),
    b"\xa1\xb2\xc3\xd4": (1, 1000),
    b"\x4d\x3c\xb2\xa1": (0, 1),
    b"\xa1\xb2\x3c\x4d": (1, 1),
}
_LEAST_MOST_KEPT = 262_144  # what tools take for "no limit"


@dataclass(frozen=True)
class Scanned:
    """What a capture holds.

    Attributes:
        conversations: rows of ``layout.CONVERSATION``, in the order of their first packets.
        cells: rows of ``layout.CELL``; one (flow, bin) may appear several times, and in any order.
        queue_pairs: rows of ``layout.QUEUE_PAIR``.
        counts: packets, bytes and every anomaly by name.
        start_ns: where bin 0 begins, since the epoch; a multiple of ``bin_ns``.
        bin_ns: width of a bin.
        first_ns: time of the earliest packet; -1 when there is none.
        last_ns: time of the latest packet; -1 when there is none.
        interfaces: ``name``, ``linktype`` and ``snap_bytes`` of each.
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


class Scan:
    """State of one capture stream.

    Args:
        bin_ns: width of the bins.
        cells: an empty file for the cells that memory shall not hold; a temporary one without it.

    Raises:
        UsageError: what the kernels need is not installed.
    """

    def __init__(self, bin_ns: int = 1_000_000, cells: BinaryIO | None = None) -> None:
        self._entries = compiled.entries()
        self._bin_ns = bin_ns
        self._store = _Cells(cells)
        self._head = bytearray()
        self._torn = bytearray()
        self._started = False
        self._stopped = False
        self._corrupt_bytes = 0
        self.interfaces: list[dict[str, Any]] = []
        self._rows = np.zeros(MOST_CONVERSATIONS + 1, CONVERSATION)
        self._work = _aligned((MOST_CONVERSATIONS + 1) * 2 * kernel_state.DIRECTION_BYTES)
        self._slots = _aligned(MOST_CONVERSATIONS * 16 << kernel_state.SLOT_SHIFT)
        state = np.zeros(kernel_state.WORDS, np.int64)
        state[kernel_state.CONVERSATIONS] = self._rows.ctypes.data
        state[kernel_state.DIRECTIONS] = self._work.ctypes.data
        state[kernel_state.SLOTS] = self._slots.ctypes.data
        state[kernel_state.SLOT_MASK] = kernel_state.FIRST_SLOTS - 1
        state[kernel_state.MOST_ROWS] = MOST_CONVERSATIONS
        state[kernel_state.CELLS_AT] = self._store.address
        state[kernel_state.CELLS_END] = self._store.address + _CELLS_AT_ONCE * CELL.itemsize
        state[kernel_state.BIN_NS] = bin_ns
        state[kernel_state.BASE_BIN] = kernel_state.NO_BIN
        state[kernel_state.BIN_START_NS] = 2**62
        state[kernel_state.FIRST_NS] = 2**62
        state[kernel_state.LAST_NS] = -1
        self._state = state
        self._state_address = state.ctypes.data

    def feed(self, block: memoryview) -> None:
        """Take the next bytes of the stream; it may be split anywhere.

        Raises:
            UsageError: the stream is no capture.
        """
        if not self._started:
            self._head += block
            if len(self._head) < 24:
                return
            self._begin(bytes(self._head[:24]))
            self._started = True
            block = memoryview(self._head)[24:]
        data = np.frombuffer(block, np.uint8)
        at = 0
        while self._torn and at < len(data):
            wanted = int(self._state[kernel_state.NEEDED]) - len(self._torn)
            part = data[at : at + wanted]
            self._torn += part.tobytes()
            at += len(part)
            if len(part) < wanted:
                return
            joined = np.frombuffer(bytes(self._torn), np.uint8)
            if self._walk(joined.ctypes.data, len(joined)):
                self._torn.clear()
        if at < len(data):
            address = data.ctypes.data
            used = self._walk(address + at, len(data) - at)
            self._torn += data[at + used :].tobytes()

    def _walk(self, address: int, size: int) -> int:
        """Run the kernel over a block until it needs more bytes; returns the bytes used up."""
        used = 0
        walk, state = self._entries["walk"], self._state
        while True:
            used += walk(self._state_address, address + used, size - used)
            if state[kernel_state.STOPPED] == kernel_state.MORE:
                return used
            if state[kernel_state.STOPPED] == kernel_state.CORRUPT:
                self._corrupt_bytes += size - used
                return size
            self._take_cells()

    def _take_cells(self) -> None:
        at = int(self._state[kernel_state.CELLS_AT])
        self._store.take((at - self._store.address) // CELL.itemsize)
        self._state[kernel_state.CELLS_AT] = self._store.address

    def _begin(self, head: bytes) -> None:
        if head[:4] not in _MAGICS:
            raise UsageError("is no capture: pcap and pcapng files are read")
        swapped, tick_ns = _MAGICS[head[:4]]
        snap, link = struct.unpack(">II" if swapped else "<II", head[16:24])
        self._state[kernel_state.SWAPPED] = swapped
        self._state[kernel_state.TICK_NS] = tick_ns
        self._state[kernel_state.LINK] = link & 0xFFFF
        self._state[kernel_state.MOST_KEPT] = max(min(snap, kernel_state.MOST_FRAME_BYTES), _LEAST_MOST_KEPT)
        self.interfaces.append({"name": "", "linktype": link & 0xFFFF, "snap_bytes": snap})

    def finish(self) -> Scanned:
        """The stream has ended.

        Raises:
            UsageError: it was no capture.
        """
        if not self._started:
            raise UsageError("is no capture: it is empty" if not self._head else "is no capture: it is too short")
        flow, state = 0, self._state
        while True:
            flow = self._entries["finish"](self._state_address, flow, 0)
            self._take_cells()
            if flow >= 2 * state[kernel_state.ROWS]:
                break
        counts = {name: int(state[kernel_state.COUNTED + number]) for number, name in enumerate(kernel_state.COUNTS)}
        counts["torn_bytes"] = len(self._torn)
        counts["corrupt_bytes"] = self._corrupt_bytes
        cells = self._store.all()
        least = int(state[kernel_state.LEAST_BIN])
        if least < 0:
            cells["bin"] -= np.uint32(least & 0xFFFFFFFF)
        some = counts["packets"] > 0
        return Scanned(
            conversations=self._rows[: int(state[kernel_state.ROWS])].copy(),
            cells=cells,
            queue_pairs=np.zeros(0, QUEUE_PAIR),
            counts=counts,
            start_ns=(int(state[kernel_state.BASE_BIN]) + least) * self._bin_ns if some else 0,
            bin_ns=self._bin_ns,
            first_ns=int(state[kernel_state.FIRST_NS]) if some else -1,
            last_ns=int(state[kernel_state.LAST_NS]) if some else -1,
            interfaces=self.interfaces,
        )


class _Cells:
    """Cells as they come: some in memory, the rest in a file."""

    def __init__(self, file: BinaryIO | None) -> None:
        self._buffer = np.empty(_CELLS_AT_ONCE, CELL)
        self.address = self._buffer.ctypes.data
        self._file = file
        self._parts: list[npt.NDArray[Any]] = []
        self._in_memory = 0
        self._in_file = 0

    def take(self, number: int) -> None:
        if self._in_file == 0 and self._in_memory + number <= _CELLS_IN_MEMORY:
            self._parts.append(self._buffer[:number].copy())
            self._in_memory += number
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile()
        for part in self._parts:
            self._file.write(part.data)
        self._file.write(self._buffer[:number].data)
        self._in_file += self._in_memory + number
        self._in_memory = 0
        self._parts.clear()

    def all(self) -> npt.NDArray[Any]:
        if self._in_file == 0:
            return np.concatenate([np.empty(0, CELL), *self._parts])
        assert self._file is not None
        self._file.flush()
        return np.memmap(self._file, CELL, "r+", shape=(self._in_file,))


def _aligned(size: int) -> npt.NDArray[np.uint8]:
    """Zeroed bytes that begin at a cache line; the system gives memory only to those that are written."""
    room = np.zeros(size + 64, np.uint8)
    skipped = -room.ctypes.data % 64
    return room[skipped : skipped + size]
