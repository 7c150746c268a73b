"""Scans one file with several threads: each scans a part, and joins the results to those of the parts before.

A part begins where a record seems to begin. Whether one does is known when the parts before are joined, in their
order. A part whose results depend on more than the state of TCP before it is scanned again, when that is known.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from ringtap.analysis.pcap.byte_sources import BLOCK_BYTES, CaptureStream
from ringtap.analysis.pcap.kernels.scan_state import LEAST_SEGMENT_BYTES
from ringtap.analysis.pcap.scan import Scan

_PART_BYTES = 1 << 24  # what is written down of its TCP segments fits the third-level cache until it is joined
_SEARCHED_BYTES = (1 << 15, 1 << 20)  # the second holds some packets of segmentation offload
_PART_CONVERSATIONS = 1 << 14  # their tables take 15 MB per scan; a part with more is scanned again
_SCANNED_AHEAD = 1  # parts that may wait for those before them
_MAX_FAILURES = 4  # parts in a row that could not be joined: the rest is then left to one thread


def feed_parts(stream: CaptureStream, scan: Scan, threads: int, stop: threading.Event) -> int:
    """Feed a plain file to a scan, a part after the other.

    Args:
        stream: the file.
        scan: a scan that has not begun.
        threads: number of threads.
        stop: set by another thread to stop the reading.

    Returns:
        The number of bytes fed: less than all if the parts of this file cannot be scanned on their own.

    Raises:
        UsageError: it cannot be read, or is not a capture.
    """
    parts = _Parts(stream, scan, threads, stop)
    with ThreadPoolExecutor(threads, "ringtap-part") as pool:
        running = [pool.submit(parts.work) for _ in range(min(threads, parts.count))]
    for done in running:
        done.result()
    return parts.fed_bytes


class _Part(NamedTuple):
    """A part that has been scanned on its own.

    Attributes:
        scan: its results.
        begin: place in the file at which its first record seemed to begin; None if none was found.
        end: end of its last record.
    """

    scan: Scan
    begin: int | None
    end: int


class _Parts:
    """The parts of a file, which threads take one by one.

    One thread at a time joins the parts that are next; a thread whose part is not takes another one meanwhile.

    Attributes:
        count: number of parts.
        fed_bytes: bytes fed to the scan of the whole, directly or by joining.
    """

    def __init__(self, stream: CaptureStream, scan: Scan, threads: int, stop: threading.Event) -> None:
        self._stream, self._scan, self._stop = stream, scan, stop
        self._total_bytes = stream.total_bytes or 0
        block = memoryview(bytearray(BLOCK_BYTES))  # the first one has the file's header
        self.fed_bytes = self._begin = self._feed(scan, block, 0, BLOCK_BYTES)
        self.count = -(-(self._total_bytes - self._begin) // _PART_BYTES)
        self._taken = self._joined = self._failures = 0
        self._is_over = self._is_joining = False
        self._scanned: dict[int, _Part] = {}
        # scans for the next parts, each with True if its last part was joined
        self._free = [
            (
                Scan(
                    scan.bin_ns,
                    conversations=_PART_CONVERSATIONS,
                    segments=_PART_BYTES // LEAST_SEGMENT_BYTES + 2,  # the last record may end beyond the part
                ),
                False,
            )
            for _ in range(min(threads + _SCANNED_AHEAD, self.count))
        ]
        self._changed = threading.Condition()

    def work(self) -> None:
        """Scan parts and join them until there are none."""
        block = memoryview(bytearray(BLOCK_BYTES))
        try:
            while taken := self._take():
                number, scan = taken
                begin = self._first_record(scan, number)
                end = 0 if begin is None else self._feed(scan, block, begin, self._end_of(number))
                scan.close_cells()
                self._add(number, _Part(scan, begin, end), block)
        except BaseException:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            raise

    def _take(self) -> tuple[int, Scan] | None:
        with self._changed:
            while not self._free and not self._is_over:
                self._changed.wait()
            if self._is_over or self._stop.is_set() or self._taken == self.count:
                return None
            scan, is_joined = self._free.pop()
            scan.begin_part(self._scan, is_joined)
            self._taken += 1
            return self._taken - 1, scan

    def _add(self, number: int, part: _Part, block: memoryview) -> None:
        """Add a part that has been scanned, and join what can be joined unless another thread does so."""
        with self._changed:
            self._scanned[number] = part
            if self._is_joining:
                return
            self._is_joining = True
        while True:
            with self._changed:
                following = None if self._is_over else self._scanned.pop(self._joined, None)
                if following is None:
                    self._is_joining = False
                    return
            is_joined = following.begin == self.fed_bytes and self._scan.join(following.scan)
            if is_joined:
                self.fed_bytes, self._failures = following.end, 0
            else:
                self.fed_bytes = self._feed(self._scan, block, self.fed_bytes, self._end_of(self._joined))
                self._failures += 1
            self._stream.read_bytes = self.fed_bytes
            with self._changed:
                self._joined += 1
                self._is_over = self._is_over or self._failures == _MAX_FAILURES
                self._free.append((following.scan, is_joined))
                self._changed.notify_all()

    def _end_of(self, number: int) -> int:
        return min(self._begin + (number + 1) * _PART_BYTES, self._total_bytes)

    def _first_record(self, part: Scan, number: int) -> int | None:
        """Return where the first record of a part seems to begin."""
        begin = self._begin + number * _PART_BYTES
        if number == 0:
            return begin
        for size in _SEARCHED_BYTES:
            block = memoryview(bytearray(size))
            skipped = part.find_record(block[: self._stream.read_at(block, begin)])
            if skipped is not None:
                return begin + skipped
        return None

    def _feed(self, scan: Scan, block: memoryview, at: int, end: int) -> int:
        """Feed the bytes up to a place to a scan, and those that complete its last record; return where that ends."""
        while not self._stop.is_set():
            wanted = end - at if at < end else scan.wanted_bytes
            data = block[: self._stream.read_at(block[: max(wanted, 0)], at)]
            if not data:
                break
            scan.feed(data)
            at += len(data)
        return at
