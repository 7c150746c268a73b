"""Scan of one file by several threads: each scans a part of it and joins the results to those of the parts before.

A part begins where a record seems to begin. Whether one does is known when the parts before are joined, in their
order. A part whose results depend on more than the state of TCP before it is scanned again, when that is known.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from ringtap.analysis.pcap.kernels.state import LEAST_SEGMENT_BYTES
from ringtap.analysis.pcap.scan import Scan
from ringtap.analysis.pcap.sources import BLOCK_BYTES, CaptureStream

_PART_BYTES = 1 << 25
_SEARCHED_BYTES = (1 << 15, 1 << 20)  # the second holds some packets of segmentation offload
_PART_CONVERSATIONS = 1 << 14  # their tables take 15 MB per thread; a part with more is scanned again
_MAX_FAILURES = 8  # parts in a row that could not be joined: the rest is then left to one thread


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
    parts = _Parts(stream, scan, stop)
    with ThreadPoolExecutor(threads, "ringtap-part") as pool:
        running = [pool.submit(parts.work) for _ in range(min(threads, parts.count))]
    for done in running:
        done.result()
    return parts.fed_bytes


class _Parts:
    """The parts of a file, which threads take one by one.

    Attributes:
        count: number of parts.
        fed_bytes: bytes fed to the scan of the whole, directly or by joining.
    """

    def __init__(self, stream: CaptureStream, scan: Scan, stop: threading.Event) -> None:
        self._stream, self._scan, self._stop = stream, scan, stop
        self._total_bytes = stream.total_bytes or 0
        block = memoryview(bytearray(BLOCK_BYTES))  # the first one has the file's header
        self.fed_bytes = self._begin = self._feed(scan, block, 0, BLOCK_BYTES)
        self.count = -(-(self._total_bytes - self._begin) // _PART_BYTES)
        self._taken = self._joined = self._failures = 0
        self._is_over = False
        self._turn = threading.Condition()

    def work(self) -> None:
        """Scan parts and join them until there are none."""
        block, is_joined = memoryview(bytearray(BLOCK_BYTES)), False
        part = Scan(
            self._scan.bin_ns,
            conversations=_PART_CONVERSATIONS,
            segments=_PART_BYTES // LEAST_SEGMENT_BYTES + 2,  # the last record may end beyond the part
        )
        try:
            while (number := self._take(part, is_joined)) is not None:
                begin = self._first_record(part, number)
                end = None if begin is None else self._feed(part, block, begin, self._end_of(number))
                part.close_cells()
                with self._turn:
                    while self._joined < number and not self._is_over:
                        self._turn.wait()
                if self._is_over:
                    return
                is_joined = begin == self.fed_bytes and end is not None and self._scan.join(part)
                if is_joined and end is not None:
                    self.fed_bytes, self._failures = end, 0
                else:
                    self.fed_bytes = self._feed(self._scan, block, self.fed_bytes, self._end_of(number))
                    self._failures += 1
                self._stream.read_bytes = self.fed_bytes
                self._pass_turn(is_over=self._failures == _MAX_FAILURES)
        except BaseException:
            self._pass_turn(is_over=True)
            raise

    def _take(self, part: Scan, is_joined: bool) -> int | None:
        with self._turn:
            if self._is_over or self._stop.is_set() or self._taken == self.count:
                return None
            part.begin_part(self._scan, is_joined)
            self._taken += 1
            return self._taken - 1

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

    def _pass_turn(self, is_over: bool) -> None:
        with self._turn:
            self._joined += 1
            self._is_over = self._is_over or is_over
            self._turn.notify_all()
