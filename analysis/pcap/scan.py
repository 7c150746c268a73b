"""Scan of one capture stream in blocks: conversations, rates in bins, RoCE queue pairs and counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ringtap.analysis.pcap.arena import MOST_CONVERSATIONS, Arena
from ringtap.analysis.pcap.kernels import compile
from ringtap.analysis.pcap.kernels import state as ks
from ringtap.analysis.pcap.layout import PACKET
from ringtap.analysis.pcap.section_headers import (
    PCAP_HEADER_BYTES,
    SECTION_HEADER,
    Interface,
    interface_block,
    pcap_header,
    section_header,
)
from ringtap.errors import UsageError

__all__ = ["MOST_CONVERSATIONS", "Scan", "Scanned"]

_USUAL_MOST_KEPT = 262_144  # snap length that tools use for "no limit"


@dataclass(frozen=True)
class Scanned:
    """The contents of a capture.

    Attributes:
        conversations: rows of ``layout.CONVERSATION``, in the order of their first packets.
        cells: rows of ``layout.CELL``; one (flow, bin) may appear several times, and in any order.
        queue_pairs: rows of ``layout.QUEUE_PAIR``.
        counts: number of packets, bytes and anomalies, by name.
        start_ns: beginning of bin 0 since the epoch; a multiple of ``bin_ns``.
        bin_ns: width of a bin.
        first_ns: time of the earliest packet; -1 if there is none.
        last_ns: time of the latest packet; -1 if there is none.
        interfaces: ``name``, ``linktype`` and ``snap_bytes`` of each.
        packets: rows of ``layout.PACKET`` in the capture's order, if they were asked for.
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
        conversations: number of conversations to tell apart; None for `MOST_CONVERSATIONS`.

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
        self._room = Arena(bin_ns, cells, packets, conversations)
        self._walk, self._resume = self._entries["walk"], self._entries["resume"]
        self._started = self._lost = self._big_endian = False
        self._torn = b""  # start of a record that is not complete yet
        self._wanted = PCAP_HEADER_BYTES  # bytes that it needs
        self._passing = self._passed = 0  # bytes of a block still to skip, and those skipped
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
            if self._passing:
                data = self._pass_over(data)
            elif self._torn:
                # a record across two blocks: take what it needs of the second, all of it when searching for a record
                taken = len(data) if self._lost else self._wanted - len(self._torn)
                self._torn += data[:taken].tobytes()
                data = data[taken:]
                if len(self._torn) >= self._wanted:
                    self._torn = self._go(np.frombuffer(self._torn, np.uint8))
            else:
                self._torn = self._go(data)
                return

    def finish(self) -> Scanned:
        """End the stream, and return its results.

        Raises:
            UsageError: it was not a capture.
        """
        if not self._started:
            raise UsageError("is no capture: it is too short" if self._torn else "is no capture: it is empty")
        room, flow = self._room, 0
        if self._lost and self._torn:
            room.state[ks.IS_END] = 1
            self._torn = self._go(np.frombuffer(self._torn, np.uint8))
        while True:
            flow = self._entries["finish"](room.address, flow, 0)
            self._make_room()
            if flow >= 2 * room.word(ks.ROWS):
                break
        self._entries["total"](room.address, room.cells.begin, room.word(ks.CELLS_AT))
        counts = dict(zip(ks.COUNTS, room.state[ks.COUNTED :].tolist(), strict=False))
        left = len(self._torn)
        counts["torn_bytes"] = self._passed if self._passing else 0 if self._lost else left
        counts["corrupt_records"] = self._corrupt_records
        counts["corrupt_bytes"] = self._corrupt_bytes + (left if self._lost else 0)
        (cells, *packets), least = room.rows(), room.word(ks.LEAST_BIN)
        conversations = room.conversations[: room.word(ks.ROWS)]
        queue_pairs = room.queue_pairs[: room.word(ks.QUEUE_PAIR_ROWS)]
        first_ns = room.word(ks.FIRST_NS)
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
        some = room.word(ks.LAST_NS) >= 0
        return Scanned(
            conversations=conversations,
            cells=cells,
            queue_pairs=queue_pairs,
            counts=counts,
            start_ns=(room.word(ks.BASE_BIN) + least) * self._bin_ns if some else 0,
            bin_ns=self._bin_ns,
            first_ns=first_ns,
            last_ns=room.word(ks.LAST_NS),
            interfaces=self._described,
            packets=packets[0] if packets else np.zeros(0, PACKET),
        )

    def _pass_over(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        passed = min(self._passing, len(data))
        self._passing -= passed
        self._passed = self._passed + passed if self._passing else 0
        return data[passed:]

    def _go(self, data: npt.NDArray[np.uint8]) -> bytes:
        """Process bytes that begin with a record, or with the file; return the incomplete tail."""
        if not self._started:
            if len(data) < PCAP_HEADER_BYTES:
                return data.tobytes()
            data = data[self._begin(data[:PCAP_HEADER_BYTES].tobytes()) :]
        used, size, address = 0, len(data), data.ctypes.data
        room, state = self._room, self._room.state
        while True:
            if self._lost:
                passed = self._resume(room.address, address + used, size - used)
                self._corrupt_bytes += passed
                used += passed
                self._lost = bool(state[ks.STOPPED] != ks.MORE)
                if self._lost:
                    break
            used += self._walk(room.address, address + used, size - used)
            stopped = state[ks.STOPPED]
            if stopped == ks.FULL:
                self._make_room()
                continue
            if stopped == ks.SECTION:
                total = self._header(data[used:])
                if total > 0:
                    used += total
                    continue
                if total == 0:
                    break
                stopped = ks.CORRUPT
            if stopped == ks.MORE:
                break
            if stopped == ks.PASS_OVER:
                self._passing, self._passed = room.word(ks.NEEDED), size - used
                return b""
            self._lost = True
            self._corrupt_records += 1
            self._corrupt_bytes += 1
            used += 1
        self._wanted = room.word(ks.NEEDED)
        return data[used:].tobytes()

    def _make_room(self) -> None:
        """Empty the buffers of cells and packets if they are full."""
        room = self._room
        if room.is_full(ks.CELLS_AT):
            self._entries["total"](room.address, room.cells.begin, room.word(ks.CELLS_AT))
        room.make_room()

    def _begin(self, head: bytes) -> int:
        """Detect the format from the first bytes; return how many of them are the header of the file."""
        header = pcap_header(head)
        if header is None and (head[:4] != SECTION_HEADER or section_header(head[:12]) is None):
            raise UsageError("is no capture: pcap and pcapng files are read")
        self._started = True
        self._room.state[ks.MOST_KEPT] = _USUAL_MOST_KEPT
        if header is None:
            self._walk, self._resume = (
                self._entries["walk_blocks"],
                self._entries["resume_blocks"],
            )
            return 0
        self._big_endian, interface = header
        self._room.state[ks.SWAPPED] = int(self._big_endian)
        self._add_interface(interface)
        return PCAP_HEADER_BYTES

    def _header(self, data: npt.NDArray[np.uint8]) -> int:
        """Read a section header or interface block of pcapng.

        Returns:
            Its length; 0 if it is incomplete, -1 if it is damaged.
        """
        if data[:4].tobytes() == SECTION_HEADER:
            header = section_header(data[:12].tobytes())
            if header is None:
                return -1
            if header[1] <= len(data):
                self._big_endian = header[0]
                self._room.state[ks.SWAPPED] = int(header[0])
                self._section = []
                self._room.set_interfaces(())
            total = header[1]
        else:
            total = int.from_bytes(data[4:8].tobytes(), "big" if self._big_endian else "little")
            if total <= len(data):
                interface = interface_block(data[:total].tobytes(), self._big_endian)
                if interface is None:
                    return -1
                self._add_interface(interface)
        if total > len(data):
            self._room.state[ks.NEEDED] = total
            return 0
        return total

    def _add_interface(self, interface: Interface) -> None:
        if len(self._section) < ks.MOST_INTERFACES:
            self._section.append(interface)
            self._room.set_interfaces(self._section)
            snap = min(interface.snap_bytes, ks.MOST_FRAME_BYTES)
            self._room.state[ks.MOST_KEPT] = max(snap, self._room.word(ks.MOST_KEPT))
        if len(self._described) < ks.MOST_INTERFACES:
            self._described.append(interface.described())
