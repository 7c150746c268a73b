"""The memory that the kernels work in.

It is reserved for as many conversations as there may be; the system gives it page by page as it is written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ringtap.analysis.pcap import kernel_state as ks
from ringtap.analysis.pcap.layout import CELL, CONVERSATION, PACKET, QUEUE_PAIR
from ringtap.analysis.pcap.walk_sections import Interface

MOST_CONVERSATIONS = 2**19
"""Conversations told apart in one capture; packets of further ones are summed in one row of family 0."""

_CELLS_AT_ONCE = 2**14
_CELLS_IN_MEMORY = 2**22
_PACKETS_AT_ONCE = 2**14


class Room:
    """State and tables of one scan.

    Args:
        bin_ns: width of a bin.
        cells: file for the cells that memory shall not hold; a temporary one if None.
        packets: whether single packets are wanted too.
    """

    def __init__(self, bin_ns: int, cells: BinaryIO | None, packets: bool) -> None:
        most = MOST_CONVERSATIONS + 1  # and the row of the others
        self.conversations = np.zeros(most, CONVERSATION)
        self.queue_pairs = np.zeros(ks.MOST_QUEUE_PAIRS, QUEUE_PAIR)
        self.cells = Spill(CELL, _CELLS_AT_ONCE, _CELLS_IN_MEMORY, cells)
        self.packets = Spill(PACKET, _PACKETS_AT_ONCE, _CELLS_IN_MEMORY, None) if packets else None
        self._interfaces = np.zeros((ks.MOST_INTERFACES, ks.INTERFACE_BYTES // 8), np.int64)
        blocks = {
            ks.DIRECTIONS: most * 2 * ks.DIRECTION_BYTES,
            ks.HOLES: most * 2 * ks.MOST_HOLES * ks.HOLE_BYTES,
            ks.SLOTS: MOST_CONVERSATIONS * 16 << ks.SLOT_SHIFT,
            ks.FRAGMENTS: ks.FRAGMENT_SLOTS << ks.FRAGMENT_SHIFT,
            ks.QUEUE_PAIR_WORK: ks.MOST_QUEUE_PAIRS * ks.QUEUE_PAIR_WORK_BYTES,
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
        self.state[ks.MOST_ROWS] = MOST_CONVERSATIONS
        self.state[ks.SLOT_MASK] = ks.FIRST_SLOTS - 1
        self.state[ks.BIN_NS] = bin_ns
        self.state[ks.BASE_BIN] = ks.NO_BIN
        self.state[ks.BIN_START_NS] = 2**62
        self.state[ks.FIRST_NS] = self.state[ks.LAST_NS] = -1
        self.state[ks.CELLS_AT], self.state[ks.CELLS_END] = self.cells.begin, self.cells.end
        if self.packets is not None:
            self.state[ks.PACKETS_AT], self.state[ks.PACKETS_END] = self.packets.begin, self.packets.end

    def word(self, number: int) -> int:
        """A word of the state."""
        return int(self.state[number])

    def take(self) -> None:
        """Store what the kernels have put into the buffers, and give these back empty."""
        self.cells.take(self.word(ks.CELLS_AT))
        self.state[ks.CELLS_AT] = self.cells.begin
        if self.packets is not None:
            self.packets.take(self.word(ks.PACKETS_AT))
            self.state[ks.PACKETS_AT] = self.packets.begin

    def set_interfaces(self, interfaces: Sequence[Interface]) -> None:
        """Tell the kernels the interfaces of the section."""
        self.state[ks.INTERFACE_COUNT] = len(interfaces)
        for row, interface in zip(self._interfaces, interfaces, strict=False):
            row[:5] = interface[1:]


class Spill:
    """Rows as they come: some in memory, many in a file without a name.

    Args:
        dtype: of the rows.
        at_once: rows of the buffer that they come in.
        in_memory: most rows to keep there.
        file: where more go; a temporary one if None.
    """

    def __init__(self, dtype: np.dtype[Any], at_once: int, in_memory: int, file: BinaryIO | None) -> None:
        self._buffer = np.empty(at_once, dtype)
        self.begin: int = self._buffer.ctypes.data
        self.end = self.begin + self._buffer.nbytes
        self._most = in_memory
        self._file = file
        self._parts: list[npt.NDArray[Any]] = []
        self._rows_in_memory = self._rows_in_file = 0

    def take(self, end: int) -> None:
        """Take the rows from the begin of the buffer to an address."""
        rows = (end - self.begin) // self._buffer.itemsize
        if self._rows_in_file == 0 and self._rows_in_memory + rows <= self._most:
            self._parts.append(self._buffer[:rows].copy())
            self._rows_in_memory += rows
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the rows that are mapped from it
        for part in (*self._parts, self._buffer[:rows]):
            self._file.write(part.data)
        self._rows_in_file += self._rows_in_memory + rows
        self._rows_in_memory = 0
        self._parts.clear()

    def rows(self) -> npt.NDArray[Any]:
        """All rows: an array, or a map of the file."""
        if self._file is None or self._rows_in_file == 0:
            return np.concatenate([self._buffer[:0], *self._parts])
        self._file.flush()
        return np.memmap(self._file, self._buffer.dtype, "r+", shape=(self._rows_in_file,))


def _aligned(size: int) -> npt.NDArray[np.uint8]:
    """Zeroed bytes that begin where both directions of a conversation share a multiple of their size."""
    room = np.zeros(size + 256, np.uint8)
    skipped = -room.ctypes.data % 256
    return room[skipped : skipped + size]
