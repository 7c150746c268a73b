"""Scans one capture stream in blocks: conversations, rates in bins, RoCE queue pairs and counts.

The kernels process packets, in memory that is reserved for the largest number of conversations; the system allocates
its pages as they are written. Python reads the headers of files, sections and interfaces (`formats`), as they are few.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ringtap.analysis.pcap import formats
from ringtap.analysis.pcap.kernels import compile
from ringtap.analysis.pcap.kernels import scan_state as ks
from ringtap.analysis.pcap.scan_dtypes import CELL, CONVERSATION, PACKET, PICK, QUEUE_PAIR
from ringtap.core.capture_file_formats import PCAP_HEADER, SECTION_HEADER, STATISTICS_BLOCK
from ringtap.core.errors import UsageError

MAX_CONVERSATIONS = 2**18
"""Conversations distinguished in one capture, at most; packets of further ones are summed in one row of family 0."""

_CELLS_IN_MEMORY = (96 << 20) // CELL.itemsize
_PACKETS_IN_MEMORY = 2**22
_PICKS_IN_MEMORY = 2**20
_LARGE_BYTES = 4 << 20  # from here on, NumPy asks for large pages
_BODY_WORDS_IN_MEMORY = 2 * ks.MAX_BLOCK_BYTES // 4
MAX_PICKED_BYTES = 2 << 30
"""Captured bytes of the packets that can be picked, at most."""
TOO_MUCH = f"more than {MAX_PICKED_BYTES >> 30} GiB of these packets: choose a shorter time or a filter"
_ACROSS_PARTS = (
    ks.N_FRAGMENTS,
    ks.N_BAD_TIME,
    ks.N_NO_TIME,
    ks.N_JUMPS,
    ks.N_OVER_LIMIT,
    ks.N_QUEUE_PAIRS,
    ks.QUEUE_PAIR_ROWS,
)
_KEPT_CONVERSATIONS = 1 << 13  # from one part to the next: each part walks over them
# MAXIMUM_SNAPLEN of libpcap and WTAP_MAX_PACKET_SIZE_STANDARD of Wireshark, the limit for all link types read here
_USUAL_MAX_KEPT = 262_144


class TooMuchError(UsageError):
    """More is picked than `MAX_PICKED_BYTES`."""


@dataclass(frozen=True)
class Pick:
    """Choice of packets whose captured bytes a scan keeps; only these are decoded.

    Attributes:
        begin_ns: earliest time, by the clock of the capturing host.
        end_ns: time that the latest is before.
        accepts: maps rows of ``scan_dtypes.CONVERSATION`` to a mask of the flows to keep; None: all packets, also those
            of no flow.
    """

    begin_ns: int = 0
    end_ns: int = ks.MAX_NS
    accepts: Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]] | None = None


class Cells(Protocol):
    """Rows of ``scan_dtypes.CELL``, read in slices because they may not fit in memory: an array, or merged arrays."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, wanted: slice, /) -> npt.NDArray[Any]:
        """Return rows that follow one another."""


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
        picks: rows of ``scan_dtypes.PICK`` in the capture's order, if packets were picked.
        bodies: their captured bytes one after another, each padded with zeros to whole words, as ``<u4``.
    """

    conversations: npt.NDArray[Any]
    cells: Cells
    queue_pairs: npt.NDArray[Any]
    counts: dict[str, int]
    start_ns: int
    bin_ns: int
    first_ns: int
    last_ns: int
    interfaces: list[dict[str, Any]] = field(default_factory=list)
    packets: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(0, PACKET))
    picks: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(0, PICK))
    bodies: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, "<u4"))


class Scan:
    """Scanner of one capture stream; several may run in parallel threads.

    Args:
        bin_ns: width of the bins.
        cells: an empty file for the cells that exceed the buffer in memory; a temporary one if None.
        packets: True to keep a row per packet too.
        conversations: number of conversations to distinguish; None for `MAX_CONVERSATIONS`.
        pick: packets whose bytes are kept; then no others are decoded. Not together with ``packets``.
        segments: number of TCP segments to write down, for a scan that another one joins (`begin_part`); 0: they are
            followed at once.
        without_copies: True to count packets once that are captured at several interfaces.

    Attributes:
        bin_ns: width of the bins.

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
        pick: Pick | None = None,
        segments: int = 0,
        without_copies: bool = False,
    ) -> None:
        self._entries = compile.entries()
        self.bin_ns = bin_ns
        self._arena = Arena(bin_ns, cells, packets, conversations, pick, segments, without_copies)
        self._walk, self._resume = self._entries.walk, self._entries.resume
        self._started = self._searching = self._big_endian = False
        self._torn = b""  # start of a record that is not complete yet
        self._wanted = PCAP_HEADER.size  # number of bytes that it needs
        self._to_skip = self._skipped = 0  # bytes of a block to skip, and bytes skipped
        self._corrupt_records = self._corrupt_bytes = 0
        self._section: list[formats.Interface] = []
        self._described: list[dict[str, Any]] = []
        self._dropped: dict[tuple[int, int], int] = {}  # by the first interface of the section, and its own number

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
        arena = self._arena
        if self._searching and self._torn:
            arena.state[ks.IS_END] = 1
            self._torn = self._process(np.frombuffer(self._torn, np.uint8))
        self.close_cells()
        self._entries.total(arena.address, arena.cells.begin, arena.word(ks.CELLS_AT))
        counts = dict(zip(ks.COUNTS, arena.state[ks.COUNTED :].tolist(), strict=False))
        left = len(self._torn)
        counts["torn_bytes"] = self._skipped if self._to_skip else 0 if self._searching else left
        # those of interfaces, and those before packets, may be the same
        counts["dropped"] = max(sum(self._dropped.values()), counts.pop("dropped_before_packets"))
        counts["corrupt_records"] = self._corrupt_records
        counts["corrupt_bytes"] = self._corrupt_bytes + (left if self._searching else 0)
        rows_of, least = arena.rows(), arena.word(ks.MIN_BIN)
        cells, packets = rows_of[ks.CELLS_AT], rows_of.get(ks.PACKETS_AT, np.zeros(0, PACKET))
        conversations = arena.conversations[: arena.word(ks.ROWS)]
        queue_pairs = arena.queue_pairs[: arena.word(ks.QUEUE_PAIR_ROWS)]
        first_ns = arena.word(ks.FIRST_NS)
        if (conversations["first_ns"] < 0).any():
            # packets without a time before the first that has one count at its time
            cells["bin"][cells["bin"] == ks.UNKNOWN_BIN] = 0
            for rows in (conversations["first_ns"], conversations["last_ns"], queue_pairs["first_ns"]):
                rows[rows < 0] = first_ns
            queue_pairs["last_ns"] = np.maximum(queue_pairs["last_ns"], first_ns)
            packets["time_ns"] = np.maximum(packets["time_ns"], first_ns)
        if least < 0:
            cells["bin"] -= least
        is_timed = arena.word(ks.LAST_NS) >= 0
        return Scanned(
            conversations=conversations,
            cells=cells,
            queue_pairs=queue_pairs,
            counts=counts,
            start_ns=(arena.word(ks.BASE_BIN) + least) * self.bin_ns if is_timed else 0,
            bin_ns=self.bin_ns,
            first_ns=first_ns,
            last_ns=arena.word(ks.LAST_NS),
            interfaces=self._described,
            packets=packets,
            picks=rows_of.get(ks.PICKS_AT, np.zeros(0, PICK)),
            bodies=rows_of.get(ks.BODIES_AT, np.zeros(0, "<u4")),
        )

    def close_cells(self) -> None:
        """Close the open cells of all flows."""
        flow = 0
        while True:
            flow = self._entries.finish(self._arena.address, flow, 0)
            self._make_room()
            if flow >= 2 * self._arena.word(ks.ROWS):
                break

    @property
    def wanted_bytes(self) -> int:
        """Number of bytes known to be missing of a record that has begun; 0 between records."""
        if self._torn and not self._searching:
            return self._wanted - len(self._torn)
        return self._to_skip

    def begin_part(self, whole: Scan, is_joined: bool) -> None:
        """Begin anew, with the format and the interfaces that another scan has found at the start of the stream.

        Args:
            whole: that scan.
            is_joined: True if it joined what this one scanned before; the conversations are then kept.
        """
        self._arena.clear(is_joined)
        self._walk, self._resume, self._big_endian = whole._walk, whole._resume, whole._big_endian
        self._started, self._searching = True, False
        self._torn, self._to_skip = b"", 0
        self._corrupt_records = self._corrupt_bytes = 0
        self._section, self._described, self._dropped = list(whole._section), [], {}
        self._arena.set_interfaces(self._section)
        for word in (ks.SWAPPED, ks.MAX_KEPT):
            self._arena.state[word] = whole._arena.word(word)
        self._near_ns = whole._arena.word(ks.LAST_NS)

    def find_record(self, block: memoryview) -> int | None:
        """Return the number of bytes before the first record in a block; None if none is found."""
        state, data = self._arena.state, np.frombuffer(block, np.uint8)
        state[ks.LAST_NS] = self._near_ns
        skipped = self._resume(self._arena.address, data.ctypes.data, len(data))
        state[ks.LAST_NS] = -1
        return skipped if state[ks.STOPPED] == ks.MORE else None

    def join(self, part: Scan) -> bool:
        """Add the results of the stream's next part, whose cells are closed.

        Returns:
            False if they depend on more of the bytes before than the state of TCP, and nothing was added: on fragments,
            RoCE's packet numbers, times that are missing or go back, interfaces, damage, or limits.
        """
        arena, other = self._arena, part._arena
        begin_ns = other.word(ks.BASE_BIN) * self.bin_ns
        if (
            any(other.word(word) for word in _ACROSS_PARTS)
            or not 0 <= arena.word(ks.LAST_NS) <= other.word(ks.FIRST_NS)
            or begin_ns - arena.word(ks.BIN_START_NS) > ks.JUMP_NS
            or arena.word(ks.ROWS) + other.word(ks.ROWS) > arena.word(ks.MAX_ROWS)
            or any(scan._torn or scan._to_skip or scan._searching for scan in (self, part))
            or part._corrupt_records
            or part._described
            or (part._section, part._big_endian) != (self._section, self._big_endian)
            or other.word(ks.MAX_KEPT) != arena.word(ks.MAX_KEPT)
            or other.cells.rows_in_file
        ):
            return False
        self._dropped |= part._dropped
        self._make_room(other.word(ks.CELLS_AT) - other.cells.begin)
        self._entries.join(arena.address, other.address, other.joined_flows.ctypes.data)
        return True

    def _skip(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        skipped = min(self._to_skip, len(data))
        self._to_skip -= skipped
        self._skipped = self._skipped + skipped if self._to_skip else 0
        return data[skipped:]

    def _process(self, data: npt.NDArray[np.uint8]) -> bytes:
        """Process bytes that begin with a record, or with the file; return the incomplete tail."""
        if not self._started:
            if len(data) < PCAP_HEADER.size:
                return data.tobytes()
            data = data[self._read_file_header(data[: PCAP_HEADER.size].tobytes()) :]
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

    def _make_room(self, cells_bytes: int = 0) -> None:
        """Empty the buffers of cells and packets if they are full, or if that many cells do not fit."""
        arena = self._arena
        if arena.is_full(ks.CELLS_AT, cells_bytes):
            self._entries.total(arena.address, arena.cells.begin, arena.word(ks.CELLS_AT))
        arena.make_room(cells_bytes)

    def _read_file_header(self, head: bytes) -> int:
        """Detect the format from the first bytes; return the length of the file header."""
        header = formats.pcap_header(head)
        if header is None and (
            int.from_bytes(head[:4], "little") != SECTION_HEADER or formats.section_header(head[:12]) is None
        ):
            raise UsageError("is not a capture: pcap and pcapng files are read")
        self._started = True
        self._arena.state[ks.MAX_KEPT] = _USUAL_MAX_KEPT
        if header is None:
            self._walk, self._resume = self._entries.walk_blocks, self._entries.resume_blocks
            return 0
        self._big_endian, interface = header
        self._arena.state[ks.SWAPPED] = int(self._big_endian)
        self._add_interface(interface)
        return PCAP_HEADER.size

    def _read_block(self, data: npt.NDArray[np.uint8]) -> int:
        """Read a block of pcapng: a section header, an interface or its statistics.

        Returns:
            Its length; 0 if it is incomplete, -1 if it is damaged.
        """
        if int.from_bytes(data[:4].tobytes(), "little") == SECTION_HEADER:
            header = formats.section_header(data[:12].tobytes())
            if header is None:
                return -1
            if header[1] <= len(data):
                self._big_endian = header[0]
                self._arena.state[ks.SWAPPED] = int(header[0])
                self._arena.state[ks.PICK_INTERFACES] += len(self._section)
                self._section = []
                self._arena.set_interfaces(())
            total = header[1]
        else:
            order: Literal["big", "little"] = "big" if self._big_endian else "little"
            kind, total = (int.from_bytes(data[at : at + 4].tobytes(), order) for at in (0, 4))
            if total <= len(data) and kind == STATISTICS_BLOCK:
                if (dropped := formats.dropped_packets(data[:total].tobytes(), self._big_endian)) is not None:
                    self._dropped[self._arena.word(ks.PICK_INTERFACES), dropped[0]] = dropped[1]
            elif total <= len(data):
                interface = formats.interface_block(data[:total].tobytes(), self._big_endian)
                if interface is None:
                    return -1
                self._add_interface(interface)
        if total > len(data):
            self._arena.state[ks.NEEDED] = total
            return 0
        return total

    def _add_interface(self, interface: formats.Interface) -> None:
        if len(self._section) < ks.MAX_INTERFACES:
            self._arena.set_interfaces([interface], len(self._section))
            self._section.append(interface)
            snap = min(interface.snap_bytes, ks.MAX_FRAME_BYTES)
            self._arena.state[ks.MAX_KEPT] = max(snap, self._arena.word(ks.MAX_KEPT))
        if len(self._described) < ks.MAX_INTERFACES:
            self._described.append(interface.described())


class Arena:
    """State and tables of one scan, by the arguments of `Scan`."""

    def __init__(
        self,
        bin_ns: int,
        cells: BinaryIO | None,
        packets: bool,
        conversations: int | None,
        pick: Pick | None,
        segments: int,
        without_copies: bool,
    ) -> None:
        limit = MAX_CONVERSATIONS if conversations is None else conversations
        most = limit + 1  # plus the row of the others
        self.conversations = _untouched(most * CONVERSATION.itemsize).view(CONVERSATION)
        self.queue_pairs = _untouched(ks.MAX_QUEUE_PAIRS * QUEUE_PAIR.itemsize).view(QUEUE_PAIR)
        self.cells = Spill(CELL, _CELLS_IN_MEMORY, cells)
        self._pick = pick
        # word of the state that points into a buffer -> the buffer, and the bytes that the next packet may add to it
        self._spills = {ks.CELLS_AT: (self.cells, ks.ROOM * CELL.itemsize)}
        if packets:
            self._spills[ks.PACKETS_AT] = Spill(PACKET, _PACKETS_IN_MEMORY, None), ks.ROOM * PACKET.itemsize
        if pick is not None:
            self._spills[ks.PICKS_AT] = Spill(PICK, _PICKS_IN_MEMORY, None), PICK.itemsize
            bodies = Spill(np.dtype("<u4"), _BODY_WORDS_IN_MEMORY, None)
            self._spills[ks.BODIES_AT] = bodies, ks.MAX_BLOCK_BYTES + 4
            self._checked = dict.fromkeys((ks.PICKS_AT, ks.BODIES_AT), 0)
        interfaces = _untouched(ks.MAX_INTERFACES * ks.INTERFACE_BYTES)
        self._interfaces = interfaces.view(np.int64).reshape(ks.MAX_INTERFACES, -1)
        blocks = {
            ks.DIRECTIONS: most * 2 * ks.DIRECTION_BYTES,
            ks.HOLES: most * 2 * ks.MAX_HOLES * ks.HOLE_BYTES,
            ks.SLOTS: max(limit * ks.SLOTS_A_ROW * 4, ks.FIRST_SLOTS) << ks.SLOT_SHIFT,
            ks.FRAGMENTS: ks.FRAGMENT_SLOTS << ks.FRAGMENT_SHIFT,
            ks.QUEUE_PAIR_WORK: ks.MAX_QUEUE_PAIRS * ks.QUEUE_PAIR_WORK_BYTES,
            ks.QUEUE_PAIR_SLOTS: ks.QUEUE_PAIR_SLOT_COUNT * 4,
        }
        if without_copies:
            blocks[ks.RECENT] = ks.RECENT_SLOTS << ks.RECENT_SHIFT
        self._blocks = {word: _untouched(size) for word, size in blocks.items()}
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
        if pick is not None:
            self.state[ks.PICK_FROM_NS], self.state[ks.PICK_TO_NS] = max(pick.begin_ns, 0), min(pick.end_ns, ks.MAX_NS)
        for word, (spill, _) in self._spills.items():
            self.state[word], self.state[word + 1] = spill.begin, spill.end
        self.state[ks.CELLS_BEGIN] = self.cells.begin
        if segments:
            self._segments = np.empty(segments * ks.SEGMENT_BYTES, np.uint8)
            self.state[ks.SEGMENTS_AT] = self.state[ks.SEGMENTS_BEGIN] = self._segments.ctypes.data
            self.state[ks.RUNS_AT] = self._segments.ctypes.data + self._segments.nbytes
            self.joined_flows = np.empty(limit, np.int64)
        self._initial = self.state.copy()

    def clear(self, keep_conversations: bool) -> None:
        """Empty the state and the tables, as far as they were used; the conversations may be kept, if they are few."""
        rows, pairs = self.word(ks.ROWS), self.word(ks.QUEUE_PAIR_ROWS)
        if keep_conversations and rows <= _KEPT_CONVERSATIONS:
            kept = [(word, self.word(word)) for word in (ks.ROWS, ks.JOINED_ROWS, ks.SLOT_MASK)]
            self.state[:] = self._initial
            for word, value in kept:
                self.state[word] = value
            return
        self.conversations[:rows].view(np.uint8)[:] = 0
        self.queue_pairs[:pairs].view(np.uint8)[:] = 0
        self._blocks[ks.DIRECTIONS][: rows * 2 * ks.DIRECTION_BYTES] = 0
        self._blocks[ks.SLOTS][: self.word(ks.SLOT_MASK) + 1 << ks.SLOT_SHIFT] = 0
        if self.word(ks.N_FRAGMENTS):
            self._blocks[ks.FRAGMENTS][:] = 0
        if pairs:
            self._blocks[ks.QUEUE_PAIR_SLOTS][:] = 0
        self.cells.rows_in_file = 0
        self.state[:] = self._initial

    def word(self, number: int) -> int:
        """Return a word of the state."""
        return int(self.state[number])

    def is_full(self, word: int, added_bytes: int = 0) -> bool:
        """True if the buffer that a word of the state points into may not hold what the next packet adds, or more."""
        return self.word(word) + max(self._spills[word][1], added_bytes) > self.word(word + 1)

    def make_room(self, cells_bytes: int = 0) -> None:
        """Write the rows of full, or nearly full, buffers to their files, and those of cells if as many do not fit.

        Raises:
            UsageError: too much was picked.
        """
        if self._pick is not None and (self.is_full(ks.PICKS_AT) or self.is_full(ks.BODIES_AT)):
            self._drop_rejected()
        for word, (spill, _) in self._spills.items():
            if self.is_full(word, cells_bytes if word == ks.CELLS_AT else 0):
                spill.empty(self.word(word))
                self.state[word] = spill.begin
                if self._pick is not None and word != ks.CELLS_AT:
                    self._checked[word] = 0
                if word == ks.BODIES_AT and 4 * spill.rows_in_file > MAX_PICKED_BYTES:
                    raise TooMuchError(f"holds {TOO_MUCH}")

    def _drop_rejected(self) -> None:
        """Remove the packets that are not accepted from the buffers of picked packets."""
        if self._pick is None or self._pick.accepts is None:
            return
        (picks, bodies) = (
            self._spills[word][0].in_buffer(self.word(word))[self._checked[word] :] for word in self._checked
        )
        accepted = np.append(False, self._pick.accepts(self.conversations[: self.word(ks.ROWS)]))
        inner = accepted[picks["inner"]] & ~accepted[picks["flow"]]
        for name, source in (("flow", "inner"), ("payload", "inner_payload")):
            picks[name][inner] = picks[source][inner]
        mine = accepted[picks["flow"]]
        for word, rows, kept in (
            (ks.PICKS_AT, picks, picks[mine]),
            (ks.BODIES_AT, bodies, bodies[np.repeat(mine, formats.words_of(picks["kept"]))]),
        ):
            rows[: len(kept)] = kept
            self.state[word] -= (len(rows) - len(kept)) * rows.itemsize
            self._checked[word] += len(kept)

    def rows(self) -> dict[int, npt.NDArray[Any]]:
        """Return the rows of each buffer and its file, by the word of the state that points into it."""
        self._drop_rejected()
        return {word: spill.rows(self.word(word)) for word, (spill, _) in self._spills.items()}

    def set_interfaces(self, interfaces: Sequence[formats.Interface], known: int = 0) -> None:
        """Pass the interfaces of the section to the kernels, behind those that they know."""
        self.state[ks.INTERFACE_COUNT] = known + len(interfaces)
        for row, interface in zip(self._interfaces[known:], interfaces, strict=False):
            row[:6] = (*interface[1:], ks.MAX_NS // interface.by)


class Spill:
    """Rows in order of arrival, in memory while they fit and in a file beyond that.

    Args:
        dtype: data type of the rows.
        most: number of rows to keep in memory.
        file: file for the rows beyond that; a temporary one if None.

    Attributes:
        begin: address of the buffer.
        end: address after it.
        rows_in_file: number of rows in the file.
    """

    def __init__(self, dtype: np.dtype[Any], most: int, file: BinaryIO | None) -> None:
        self._buffer = np.empty(max(most, 2 * ks.ROOM), dtype)
        self.begin: int = self._buffer.ctypes.data
        self.end = self.begin + self._buffer.nbytes
        self._file, self._is_own = file, file is None
        self.rows_in_file = 0

    def __del__(self) -> None:
        if self._is_own and self._file is not None:
            self._file.close()  # rows mapped from it stay valid

    def in_buffer(self, end: int) -> npt.NDArray[Any]:
        """Return the rows in the buffer; ``end`` is the address after the last one."""
        return self._buffer[: (end - self.begin) // self._buffer.itemsize]

    def empty(self, end: int) -> None:
        """Write the rows from the start of the buffer up to an address to the file."""
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed when this is gone
        rows = self.in_buffer(end)
        self._file.write(rows.data)
        self.rows_in_file += len(rows)

    def rows(self, end: int) -> npt.NDArray[Any]:
        """Return all rows, as an array or a map of the file; ``end`` is the address after the buffer's last row."""
        if self.rows_in_file == 0:
            return self.in_buffer(end)
        self.empty(end)
        assert self._file is not None
        self._file.flush()
        return np.memmap(self._file, self._buffer.dtype, "r+", shape=(self.rows_in_file,))


def _untouched(size: int) -> npt.NDArray[np.uint8]:
    """Return zeroed bytes at the begin of a page, of which none exists before it is written.

    np.zeros also takes memory that was used before, and writes all of it. Large tables have large pages, as NumPy's
    arrays do: without them, a scan of many flows takes a fifth longer.
    """
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _LARGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
