"""Caches the results of a scan, so that a capture need not be scanned again.

A cache file holds the cells, the other two tables, a JSON object that describes its origin, and a trailer with the
lengths. Numbers are little-endian. It is valid for one capture in one state (size, modification time, inode), one width
of bins and one version of the reader; any other file is ignored and written anew.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import struct
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

import ringtap
from ringtap.analysis.pcap.kernels import compile
from ringtap.analysis.pcap.scan import Scanned
from ringtap.analysis.pcap.scan_dtypes import CELL, CONVERSATION, QUEUE_PAIR
from ringtap.core.installation import cache_folder
from ringtap.core.untrusted_files import open_regular, refuse_links

_FORMAT = 1
_MAGIC = b"RTFLOWS\x01"
# rows of cells, conversations and queue pairs; bytes of JSON; checksum of all but the cells; magic
_TRAILER = struct.Struct("<QQQQI8s")
_MIN_CAPTURE_BYTES = 1 << 20  # smaller captures are read in an instant


def is_kept(about: os.stat_result) -> bool:
    """True if a capture is large enough for a cache."""
    return about.st_size >= _MIN_CAPTURE_BYTES


def places(path: Path) -> tuple[Path, Path]:
    """Return the possible paths of a capture's cache: beside it, and in the user's cache folder.

    Neither name contains ``.pcap``, and the name beside the capture begins with a dot, so that usual patterns skip it.
    """
    name = path.name.replace(".", "_")[:180]
    by_name, by_path = (f"{zlib.crc32(os.fsencode(text)):08x}" for text in (path.name, path.resolve()))
    beside = path.parent / f".{name}-{by_name}.ringtap-flows"
    return beside, cache_folder() / "flows" / f"{name}-{by_path}.ringtap-flows"


@functools.cache
def _engine() -> str:
    """Return an identifier that changes with the code that reads captures."""
    number = 0
    for file in sorted({*Path(__file__).parent.rglob("*.py"), *compile.sources()}):
        number = zlib.crc32(file.read_bytes(), number)
    return f"{ringtap.__version__} {number:08x}"


def _key(path: Path, about: os.stat_result, bin_ns: int) -> dict[str, Any]:
    made_from = {"bytes": about.st_size, "mtime_ns": about.st_mtime_ns, "inode": about.st_ino}
    return made_from | {"path": str(path.resolve()), "format": _FORMAT, "engine": _engine(), "bin_ns": bin_ns}


def load(path: Path, about: os.stat_result, bin_ns: int) -> Scanned | None:
    """Return the cached results for a capture; None if there are none.

    Args:
        path: path of the capture.
        about: current status of the capture.
        bin_ns: width of the bins wanted.
    """
    key = _key(path, about, bin_ns)
    for target in places(path):
        found = _read(target, key, {os.getuid(), 0, about.st_uid})
        if found is not None:
            return found
    return None


def _read(target: Path, key: dict[str, Any], trusted: set[int]) -> Scanned | None:
    try:
        with open_regular(target) as file:
            about = os.fstat(file.fileno())
            if about.st_uid not in trusted or about.st_size < _TRAILER.size:
                return None
            file.seek(-_TRAILER.size, os.SEEK_END)
            cells, conversations, queue_pairs, json_bytes, check, magic = _TRAILER.unpack(file.read())
            begin = cells * CELL.itemsize
            sizes = (conversations * CONVERSATION.itemsize, queue_pairs * QUEUE_PAIR.itemsize, json_bytes)
            if magic != _MAGIC or begin + sum(sizes) + _TRAILER.size != about.st_size:
                return None
            file.seek(begin)
            parts = [file.read(size) for size in sizes]
            if zlib.crc32(b"".join(parts)) != check:
                return None
            item = json.loads(parts[2])
            if item.pop("key") != key:
                return None
            return Scanned(
                conversations=np.frombuffer(parts[0], CONVERSATION),
                cells=np.memmap(file, CELL, "r", shape=(cells,)) if cells else np.empty(0, CELL),
                queue_pairs=np.frombuffer(parts[1], QUEUE_PAIR),
                **item,
            )
    except (OSError, ValueError, TypeError, KeyError, OverflowError, struct.error):
        return None


class Pending:
    """Cache file under construction, which is removed unless `keep` succeeds.

    Args:
        path: path of the capture.
        about: status of the capture when it was opened.
        bin_ns: width of the bins.

    Attributes:
        cells: an empty file for cells that exceed memory; None if no cache can be written.
    """

    def __init__(self, path: Path, about: os.stat_result, bin_ns: int) -> None:
        self._path, self._about = path, about
        self._key = _key(path, about, bin_ns)
        self.cells: BinaryIO | None = None
        self._name: Path | None = None
        for self._target in places(path):
            with contextlib.suppress(OSError):
                refuse_links(self._target)
                if self._target.parent != path.parent:
                    self._target.parent.mkdir(parents=True, exist_ok=True)
                handle, name = tempfile.mkstemp(dir=self._target.parent, prefix=".ringtap-")
                self.cells, self._name = os.fdopen(handle, "w+b"), Path(name)
                break

    def keep(self, scanned: Scanned) -> Scanned:
        """Write the rest and move the cache to its path, if the capture has not changed.

        Returns:
            The same scan, its cells mapped from the cache file if it was written.
        """
        if self.cells is None or self._name is None:
            return scanned
        try:
            now = self._path.stat()
            if _key(self._path, now, scanned.bin_ns) != self._key:
                return scanned
            self._write(self.cells, scanned)
            os.fchmod(self.cells.fileno(), now.st_mode & 0o666)
            self.cells.flush()
            cells = np.memmap(self.cells, CELL, "r", shape=len(scanned.cells)) if len(scanned.cells) else scanned.cells
            self._name.replace(self._target)
        except OSError:
            return scanned
        self._name = None
        if self._target.parent != self._path.parent:
            _drop_orphans(self._target)
        return replace(scanned, cells=cells)

    def _write(self, file: BinaryIO, scanned: Scanned) -> None:
        if not isinstance(scanned.cells, np.memmap):  # else the file holds them already
            file.write(np.asarray(scanned.cells).data)
        names = ("counts", "start_ns", "bin_ns", "first_ns", "last_ns", "interfaces")
        item = {"key": self._key} | {name: getattr(scanned, name) for name in names}
        parts = (scanned.conversations.tobytes(), scanned.queue_pairs.tobytes(), json.dumps(item).encode())
        check = 0
        for part in parts:
            file.write(part)
            check = zlib.crc32(part, check)
        rows = (len(scanned.cells), len(scanned.conversations), len(scanned.queue_pairs))
        file.write(_TRAILER.pack(*rows, len(parts[2]), check, _MAGIC))

    def close(self) -> None:
        """Remove the file unless it was kept."""
        if self.cells is not None:
            self.cells.close()
        if self._name is not None:
            self._name.unlink(missing_ok=True)
            self._name = None


def _drop_orphans(new: Path) -> None:
    """Remove the caches of deleted captures from the user's cache folder."""
    for target in new.parent.glob("*.ringtap-flows"):
        try:
            with open_regular(target) as file:
                file.seek(-_TRAILER.size, os.SEEK_END)
                *_, json_bytes, _, magic = _TRAILER.unpack(file.read())
                file.seek(-_TRAILER.size - json_bytes, os.SEEK_END)
                gone = magic != _MAGIC or not Path(json.loads(file.read(json_bytes))["key"]["path"]).exists()
            if gone:
                target.unlink()
        except (OSError, ValueError, TypeError, KeyError, struct.error):
            continue
