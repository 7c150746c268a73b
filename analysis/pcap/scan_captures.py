"""Reads captures, several at once in threads or workers; the kernels release the interpreter's lock."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path

import numpy as np

from ringtap.analysis.pcap import scan_cache as caches
from ringtap.analysis.pcap.byte_sources import CaptureStream, expand
from ringtap.analysis.pcap.captured_traffic import Traffic
from ringtap.analysis.pcap.duplicates import has_copies
from ringtap.analysis.pcap.kernels import compile
from ringtap.analysis.pcap.merge_scans import check_offsets, merge
from ringtap.analysis.pcap.parallel_scan import feed_parts
from ringtap.analysis.pcap.scan import Scan, Scanned
from ringtap.analysis.pcap.scan_dtypes import CELL, CONVERSATION
from ringtap.core.check_api_arguments import paths_of
from ringtap.core.errors import MeasurementError, RingtapWarning, UsageError
from ringtap.core.units import duration_s

Progress = Callable[[int, int | None], None]
"""Called with the bytes read and the total; None if the total is not known."""

LOG = logging.getLogger("ringtap")
_TICK_S = 0.1
_STOP_S = 2.0  # limit of the wait for threads to stop; one may be blocked on a pipe
_MAX_THREADS = 8  # each holds 200 MB at worst
_FEW_CELLS = 1 << 16
_MIN_PARTS_BYTES = 1 << 27  # of a file that several threads scan
_Path = str | os.PathLike[str]


def read_captures(
    paths: _Path | Sequence[_Path],
    filter: str | None = None,
    *,
    bin_s: float | str = 0.001,
    offsets_ns: Sequence[int] | None = None,
    progress: Progress | None = None,
    cache: bool = True,
    workers: Executor | None = None,
) -> Traffic:
    """Read packet captures: pcap and pcapng, plain or packed with gzip, zstd, xz, bzip2 or lz4.

    Several files are parts of one capture, in the order of their first packets: the files of tcpdump's -C, -W or -G,
    or the captures of several interfaces. A packet that is in two of them counts twice. One that a file holds several
    times, as it was captured at all interfaces of a bridge, counts once.

    Args:
        paths: files or pipes, ``-`` for standard input, globs, or directories with captures.
        filter: keep only the flows that this filter in tcpdump's language accepts (`Traffic.select`).
        bin_s: width of the bins of rates, in seconds or as text such as ``100ms``.
        offsets_ns: lead of each file's clock, subtracted from its times; one for each path, which then must be a
            single file.
        progress: called in the calling thread, ten times a second, or with ``workers`` after each file.
        cache: keep the results of files of 1 MiB and more, beside the file or in the cache folder, and reuse them.
        workers: processes that read one file each; None for threads of this process.

    Raises:
        UsageError: a file is missing, not a capture or damaged from its start, or there are no packets at all.
        MeasurementError: the results could not be written, usually because the disk is full.
    """
    words = paths_of(paths, "capture")
    if filter is not None:
        check_filter(filter)
    bin_ns = round(duration_s(bin_s, "a width of bins") * 1e9)
    if not 1_000 <= bin_ns <= 3_600_000_000_000:
        raise UsageError(f"bins of {bin_ns / 1e9:g} s are not possible: 1 µs to 1 h")
    files, left_out = expand(words)
    if offsets_ns is not None:
        check_offsets(offsets_ns, len(files))
    parts = _Reading(files, bin_ns, cache, workers).run(progress or _no_progress)
    names = ["standard input" if path is None else str(path) for path in files]
    leads_ns = [0] * len(parts) if offsets_ns is None else list(offsets_ns)
    order = sorted(range(len(parts)), key=lambda number: parts[number].first_ns - leads_ns[number])
    whole = parts[0]
    if len(parts) > 1 or offsets_ns is not None:
        whole = merge([parts[number] for number in order], [leads_ns[number] for number in order])
    if not whole.counts["packets"]:
        held = f"{names[0]} holds" if len(names) == 1 else f"the {len(names)} captures hold"
        raise UsageError("; ".join([f"{held} no packets{_why_none(whole.counts)}", *left_out]))
    leads_ns = [leads_ns[number] for number in order]
    traffic = Traffic(whole, [names[number] for number in order], leads_ns=leads_ns, left_out=left_out)
    return _warn(traffic if filter is None else traffic.select(filter))


def check_filter(words: str) -> None:
    """Check a filter before the captures are read.

    Raises:
        UsageError: the filter is wrong.
    """
    from ringtap.analysis.pcap.flow_filter import matches

    matches(words, np.zeros(0, CONVERSATION))


def _why_none(counts: dict[str, int]) -> str:
    if counts["corrupt_bytes"]:
        which = "the first record has an impossible length (more than 16 MiB, or than the capture keeps of a packet)"
        return f" that can be read: {which}, and no valid one follows it"
    if counts["malformed"]:
        return f" that can be read: the {counts['malformed']:,} there are contradict themselves"
    torn = counts["torn_bytes"]
    return f", only the beginning of one: the last {torn:,} bytes of the file" if torn else ""


def _no_progress(done_bytes: int, total_bytes: int | None) -> None:
    pass


def _warn(traffic: Traffic) -> Traffic:
    """Warn of captures that could be read only in part."""
    from ringtap.analysis.pcap.capture_text import damage

    lines = [f"{', '.join(traffic.files[:3])}: {line}" for line in damage(traffic.counts)]
    for line in (*traffic.left_out, *lines):
        warnings.warn(line, RingtapWarning, stacklevel=3)
    return traffic


def scan_file(path: Path, bin_ns: int, cache: bool) -> Scanned | None:
    """Scan one capture for another process; None if the result is large and its cache lies beside the capture."""
    (found,) = _Reading([path], bin_ns, cache, cores=1).run(_no_progress)
    if cache and len(found.cells) >= _FEW_CELLS and caches.places(path)[0].is_file():
        kept = caches.load(path, path.stat(), bin_ns)
        if kept is not None:
            return None
    return replace(found, cells=np.asarray(found.cells))


def scan_packets(path: Path, conversations: int | None = None) -> Scanned:
    """Scan one capture with a row per packet (`Scanned.packets`), for uses that need the time of each packet.

    As for `read_captures`, a packet that the capture holds several times counts once.

    Args:
        path: a file.
        conversations: number of conversations to distinguish; None for `MAX_CONVERSATIONS`.

    Raises:
        UsageError: it cannot be read, or is not a capture.
    """
    compile.entries(LOG.info)

    def scan(without_copies: bool) -> Scanned:
        stream = CaptureStream(path)
        try:
            return feed(stream, Scan(packets=True, conversations=conversations, without_copies=without_copies))
        finally:
            stream.close()

    return _counting_once(scan, _size(path))


def _counting_once(scan: Callable[[bool], Scanned], size: int | None) -> Scanned:
    """Scan a capture, and if it holds packets several times, scan it again without their copies.

    Args:
        scan: scans it; called with True to leave out copies.
        size: its size; None for a pipe, which cannot be read again.
    """
    scanned = scan(False)
    return scan(True) if size is not None and has_copies(scanned.conversations) else scanned


def feed(
    stream: CaptureStream,
    scan: Scan,
    stop: threading.Event | None = None,
    progress: Progress | None = None,
    *,
    threads: int = 1,
) -> Scanned:
    """Feed a capture to a scan and return its results.

    Args:
        stream: the capture.
        scan: a scan that has not begun.
        stop: set by another thread to stop the reading.
        progress: called after each block.
        threads: number of threads that scan a large file that is not compressed.

    Raises:
        UsageError: it cannot be read, or is not a capture.
    """
    blocks = stream.blocks()
    if threads > 1 and (stream.total_bytes or 0) >= _MIN_PARTS_BYTES and stream.is_plain:
        stop = stop or threading.Event()
        with _naming(stream.name):
            blocks = stream.rest(feed_parts(stream, scan, threads, stop))
    for block in blocks:
        with _naming(stream.name):
            scan.feed(block)
        if stop is not None and stop.is_set():
            raise _StoppedError
        if progress is not None:
            progress(stream.read_bytes, stream.total_bytes)
    with _naming(stream.name):
        scanned = scan.finish()
    return replace(scanned, counts=scanned.counts | stream.troubles)


class _StoppedError(Exception):
    """Stop of the reading, after an interrupt by the user or an error in another thread."""


class _Reading:
    """The files of one call, read by threads or workers while the calling thread shows progress."""

    def __init__(
        self,
        files: Sequence[Path | None],
        bin_ns: int,
        cache: bool,
        workers: Executor | None = None,
        cores: int | None = None,
    ) -> None:
        self._workers = workers
        self._cores = min(cores or len(os.sched_getaffinity(0)), _MAX_THREADS)
        self._files, self._bin_ns, self._cache = files, bin_ns, cache
        self._found: list[Scanned | None] = [None] * len(files)
        self._sizes = [_size(path) for path in files]
        self._streams: dict[int, CaptureStream] = {}
        self._finished_bytes = 0
        self._todo: list[int] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._error: BaseException | None = None

    def run(self, progress: Progress) -> list[Scanned]:
        """Return the result of each file, in order."""
        for number, path in enumerate(self._files):
            if self._cache and path is not None and self._sizes[number] is not None:
                about = path.stat()
                self._found[number] = caches.load(path, about, self._bin_ns) if caches.is_kept(about) else None
        # threads take from the end: the largest file first, so that it does not finish long after the others
        todo = [number for number, found in enumerate(self._found) if found is None]
        self._todo = sorted(todo, key=lambda number: self._sizes[number] or 0)
        if self._todo and self._workers is not None:
            self._by_workers(self._workers, progress)
        elif self._todo:
            compile.entries(LOG.info)
            self._in_threads(progress)
        if self._error is not None:
            raise self._error
        return [found for found in self._found if found is not None]

    def _by_workers(self, workers: Executor, progress: Progress) -> None:
        order = self._todo[::-1]
        files = [path for number in order if (path := self._files[number]) is not None]
        sizes = [size for number in order if (size := self._sizes[number]) is not None]
        if len(sizes) < len(order):
            raise UsageError("a pipe is read by this process alone: leave --dask out")
        compile.entries(LOG.info)  # once, and not by every worker at the same time
        absolute = [path.absolute() for path in files]
        found = workers.map(scan_file, absolute, repeat(self._bin_ns), repeat(self._cache))
        for done, (number, path) in enumerate(zip(order, files, strict=True), start=1):
            try:
                scanned = next(found)
            except (UsageError, MeasurementError) as error:
                raise type(error)(str(error).replace(str(path.absolute()), str(path))) from error
            if scanned is None:
                scanned = caches.load(path, path.stat(), self._bin_ns)
            if scanned is None:
                raise UsageError(
                    f"a worker's results beside {path} cannot be read here: it needs the same version of ringtap"
                )
            self._found[number] = scanned if len(self._files) == 1 else _on_disk(scanned)
            progress(sum(sizes[:done]), sum(sizes))

    def _in_threads(self, progress: Progress) -> None:
        total: int | None = 0
        for number in self._todo:
            size = self._sizes[number]
            total = None if total is None or size is None else total + size
        count = min(len(self._todo), self._cores)
        self._threads_per_file = self._cores // count
        threads = [threading.Thread(target=self._work, name="ringtap-scan", daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            running = True
            while running and not self._stop.is_set():
                max(threads, key=threading.Thread.is_alive).join(_TICK_S)
                running = any(thread.is_alive() for thread in threads)
                with self._lock:
                    done = self._finished_bytes + sum(stream.read_bytes for stream in self._streams.values())
                progress(done, total)
        finally:
            self._stop.set()
            deadline_s = time.monotonic() + _STOP_S
            for thread in threads:
                thread.join(max(0.0, deadline_s - time.monotonic()))

    def _work(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                if not self._todo:
                    return
                number = self._todo.pop()
            try:
                self._found[number] = self._scan(number)
            except BaseException as error:
                with self._lock:
                    self._error = self._error or error
                self._stop.set()

    def _scan(self, number: int) -> Scanned:
        return _counting_once(partial(self._scan_once, number), self._sizes[number])

    def _scan_once(self, number: int, without_copies: bool) -> Scanned:
        path = self._files[number]
        stream = CaptureStream(path)
        with self._lock:
            self._streams[number] = stream
        pending = None
        try:
            if self._cache and path is not None and stream.about is not None and caches.is_kept(stream.about):
                pending = caches.Pending(path, stream.about, self._bin_ns)
            cells = None if pending is None else pending.cells
            scan = Scan(self._bin_ns, cells, without_copies=without_copies)
            # the threads of one file would not know of each other's packets
            threads = 1 if without_copies else self._threads_per_file
            scanned = feed(stream, scan, self._stop, threads=threads)
            if pending is not None:
                return pending.keep(scanned)
            return scanned if len(self._files) == 1 else _on_disk(scanned)
        except OSError as error:
            folder = tempfile.gettempdir() if pending is None or path is None else path.parent
            why = f"cannot be written to {folder}: {error.strerror or error}"
            raise MeasurementError(f"the scan of {stream.name} {why}; make room there, or use wider bins") from error
        finally:
            if pending is not None:
                pending.close()
            stream.close()
            with self._lock:
                self._finished_bytes += self._streams.pop(number).read_bytes


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Put the file's name before the message of a UsageError."""
    try:
        yield
    except UsageError as error:
        raise type(error)(f"{name} {error}") from error


def _size(path: Path | None) -> int | None:
    """Return the size of a file in bytes; None for a pipe."""
    return path.stat().st_size if path is not None and path.is_file() else None


def _on_disk(scanned: Scanned) -> Scanned:
    """Move the cells, if many, to an unnamed temporary file, so that hundreds of files together fit in memory."""
    if isinstance(scanned.cells, np.memmap) or len(scanned.cells) < _FEW_CELLS:
        return scanned
    with tempfile.TemporaryFile() as file:
        file.write(np.asarray(scanned.cells).data)
        file.flush()
        return replace(scanned, cells=np.memmap(file, CELL, "r", shape=len(scanned.cells)))
