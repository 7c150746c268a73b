"""Keeps the packets around slow iterations: copies the wanted windows out of a ring of capture files.

A file of the ring is decided once no iteration that is still to end can ask for its packets. What lies in a window goes
to the window's own file, and the file of the ring is deleted.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from ringtap.collectors.slow_iterations import SlowIteration
from ringtap.core.append_only_logs import JsonLinesWriter
from ringtap.core.capture_file_formats import PCAP_HEADER, PCAP_RECORD
from ringtap.core.run_directory_schema import PACKET_DISORDER_NS, WINDOWS_JSONL

_LISTED = 100  # slow iterations of a window that are listed; all are counted


def first_packet_ns(path: Path) -> int | None:
    """Return the time of a capture file's first packet; None if it has none."""
    with path.open("rb") as file:
        data = file.read(PCAP_HEADER.size + PCAP_RECORD.size)
    if len(data) < PCAP_HEADER.size + PCAP_RECORD.size:
        return None
    seconds, nanoseconds, _, _ = PCAP_RECORD.unpack_from(data, PCAP_HEADER.size)
    return int(seconds * 10**9 + nanoseconds)


def _spans(data: mmap.mmap, begin_ns: int, end_ns: int) -> Iterator[tuple[int, int, int]]:
    """Yield begin, end and number of packets of each run of records whose times lie between two times."""
    unpack, at, size, start, packets = PCAP_RECORD.unpack_from, PCAP_HEADER.size, len(data), 0, 0
    while at + 16 <= size:
        seconds, nanoseconds, kept, _ = unpack(data, at)
        following = at + 16 + kept
        if following > size:  # torn
            break
        if begin_ns <= seconds * 1_000_000_000 + nanoseconds <= end_ns:
            start, packets = start or at, packets + 1
        elif packets:
            yield start, at, packets
            start = packets = 0
        at = following
    if packets:
        yield start, at, packets


@dataclass
class _Window:
    """A span of time whose packets are kept, CLOCK_REALTIME."""

    begin_ns: int
    end_ns: int
    packets: int = 0
    files: list[str] = field(default_factory=list)
    slow: list[SlowIteration] = field(default_factory=list)
    slow_count: int = 0


class PacketWindows:
    """The windows of one capture.

    Args:
        folder: the folder of the windows' files, which are ``<stem>-<n>.pcap``, and of ``<stem>-windows.jsonl``.
        stem: begin of their names.
        around_ns: time before and after a slow iteration.
        begin_ns: begin of the capture, CLOCK_REALTIME.
        file_bytes: size after which a window goes on in another file.
    """

    def __init__(self, folder: Path, stem: str, around_ns: int, begin_ns: int, file_bytes: int) -> None:
        self._folder, self._stem, self._around_ns, self._file_bytes = folder, stem, around_ns, file_bytes
        self._windows: list[_Window] = []  # those not closed yet, in order of time
        self._numbers = count()
        self._lost_until_ns, self._lost_why = begin_ns, "the capture began later"
        self._log = JsonLinesWriter(folder.parent / WINDOWS_JSONL.format(stem=stem))
        self.closed = 0

    def add(self, slow: Sequence[SlowIteration]) -> None:
        """Want the packets around these iterations; windows that overlap become one."""
        for one in slow:
            window = _Window(one.begin_ns - self._around_ns, one.end_ns + self._around_ns)
            apart = [
                other for other in self._windows if other.end_ns < window.begin_ns or other.begin_ns > window.end_ns
            ]
            for other in self._windows:
                if other not in apart:
                    window.begin_ns, window.end_ns = (
                        min(window.begin_ns, other.begin_ns),
                        max(window.end_ns, other.end_ns),
                    )
                    window.packets += other.packets
                    window.files += other.files
                    window.slow += other.slow
                    window.slow_count += other.slow_count
            window.slow = [*window.slow, one][:_LISTED]
            window.slow_count += 1
            self._windows = sorted([*apart, window], key=lambda window: window.begin_ns)

    def lose(self, path: Path, following: Path) -> None:
        """Delete a file of the ring before it is decided, because the disk limit asks for it."""
        self._lost_until_ns = first_packet_ns(following) or self._lost_until_ns
        self._lost_why = "the disk limit was reached"
        path.unlink()

    def decide(self, ring: Sequence[Path], reached_ns: int) -> None:
        """Copy the windows' packets out of the files that no later iteration can want, and delete these files.

        Args:
            ring: files of the ring, oldest first; the last one is still written.
            reached_ns: time until which all slow iterations have been added.
        """
        horizon_ns = reached_ns - self._around_ns
        for path, following in pairwise(ring):
            end_ns = first_packet_ns(following)
            if end_ns is None or end_ns + PACKET_DISORDER_NS > horizon_ns:
                return
            self._copy(path, end_ns + PACKET_DISORDER_NS)
            path.unlink()
            self._close(end_ns - PACKET_DISORDER_NS)

    def finish(self, ring: Sequence[Path]) -> None:
        """Decide all files after the capture's end, and close all windows."""
        for path in ring:
            self._copy(path, None)
            path.unlink()
        self._close(None)
        self._log.close()

    def _copy(self, path: Path, end_ns: int | None) -> None:
        """Copy what the windows want of a file whose packets are before ``end_ns``."""
        first_ns = first_packet_ns(path)
        if first_ns is None:
            return
        for window in self._windows:
            if window.end_ns >= first_ns - PACKET_DISORDER_NS and (end_ns is None or window.begin_ns <= end_ns):
                with (
                    path.open("rb") as file,
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
                    memoryview(data) as view,  # written without a copy, which may be as large as the file
                ):
                    for start, end, packets in _spans(data, window.begin_ns, window.end_ns):
                        with view[start:end] as records:
                            self._append(window, data[: PCAP_HEADER.size], records)
                        window.packets += packets

    def _append(self, window: _Window, header: bytes, records: memoryview) -> None:
        path = self._folder / window.files[-1] if window.files else None
        if path is None or not path.exists() or path.stat().st_size >= self._file_bytes:
            path = self._folder / f"{self._stem}-{next(self._numbers)}.pcap"
            window.files.append(path.name)
            path.write_bytes(header)
        with path.open("ab") as file:
            file.write(records)

    def _close(self, before_ns: int | None) -> None:
        """Write a line for each window that ended before a time, or for all."""
        while self._windows and (before_ns is None or self._windows[0].end_ns < before_ns):
            window = self._windows.pop(0)
            item: dict[str, Any] = {"begin_ns": window.begin_ns, "end_ns": window.end_ns, "files": window.files}
            item |= {"packets": window.packets, "slow_iterations": window.slow_count}
            names = ("rank", "step", "begin_ns", "end_ns", "threshold_s")
            item["iterations"] = [dict(zip(names, one, strict=True)) for one in window.slow]
            missing = window.begin_ns < self._lost_until_ns
            self._log.append(
                item | ({"missing_until_ns": self._lost_until_ns, "why": self._lost_why} if missing else {})
            )
            self.closed += 1
