"""Working memory of the kernels: the state, the tables, and buffers that overflow to files.

It is reserved for the largest number of conversations; the system allocates its pages as they are written.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ringtap.analysis.pcap.kernels import state as ks
from ringtap.analysis.pcap.layout import CELL, CONVERSATION, PACKET, QUEUE_PAIR
from ringtap.analysis.pcap.section_headers import Interface

MOST_CONVERSATIONS = 2**18
"""Conversations told apart in one capture; packets of further ones are summed in one row of family 0."""

_CELLS_IN_MEMORY = (96 << 20) // CELL.itemsize
_PACKETS_IN_MEMORY = 2**22


class Arena:
    """State and tables of one scan.

    Args:
        bin_ns: width of a bin.
        cells: file for the cells that exceed the buffer in memory; a temporary one if None.
        packets: True to keep a row per packet too.
        conversations: number of conversations to tell apart; None for `MOST_CONVERSATIONS`.
    """

    def __init__(self, bin_ns: int, cells: BinaryIO | None, packets: bool, conversations: int | None = None) -> None:
        limit = MOST_CONVERSATIONS if conversations is None else conversations
        most = limit + 1  # plus the row of the others
        self.conversations = np.zeros(most, CONVERSATION)
        self.queue_pairs = np.zeros(ks.MOST_QUEUE_PAIRS, QUEUE_PAIR)
        self.cells = Spill(CELL, _CELLS_IN_MEMORY, cells)
        self._spills = [(self.cells, ks.CELLS_AT)]
        if packets:
            self._spills.append((Spill(PACKET, _PACKETS_IN_MEMORY, None), ks.PACKETS_AT))
        self._interfaces = np.zeros((ks.MOST_INTERFACES, ks.INTERFACE_BYTES // 8), np.int64)
        blocks = {
            ks.DIRECTIONS: most * 2 * ks.DIRECTION_BYTES,
            ks.HOLES: most * 2 * ks.MOST_HOLES * ks.HOLE_BYTES,
            ks.SLOTS: max(limit * ks.SLOTS_A_ROW * 4, ks.FIRST_SLOTS) << ks.SLOT_SHIFT,
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
        self.state[ks.SECRETS : ks.SECRETS + 4] = np.frombuffer(os.urandom(16), np.uint32)
        self.state[ks.MOST_ROWS] = limit
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
            row[:6] = (*interface[1:], ks.MOST_NS // interface.by)


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
    room = np.zeros(size + 256, np.uint8)
    skipped = -room.ctypes.data % 256
    return room[skipped : skipped + size]
