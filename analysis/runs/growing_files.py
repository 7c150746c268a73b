"""Reads files of a running job as they grow: record files, JSON Lines, text, and JSON files that are replaced.

Each poll returns only what was added since the previous poll. Files are opened anew at each poll, because network file
systems show another node's writes only in a freshly opened file.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ringtap.core.append_only_logs import RecordFile, is_header_torn
from ringtap.core.errors import UsageError
from ringtap.core.json_validation import Shape, ShapeError, check, load_json, parse_json
from ringtap.core.run_directory import open_log
from ringtap.core.untrusted_files import open_regular

_BATCH_BYTES = 1 << 20
_TEXT_BYTES = 16 << 10
_TEXT_LINES = 200
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

Record = tuple[Any, ...]


class _FileState:
    """Size and inode of a file, to detect growth, truncation and replacement."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._inode = -1

    def update(self) -> bool:
        """Update the file's size; return True if the file was replaced or truncated."""
        try:
            status = self.path.stat()
        except OSError:  # missing: earlier content is kept
            return False
        replaced = self._inode not in (-1, status.st_ino) or status.st_size < self.size
        self.size, self._inode = status.st_size, status.st_ino
        return replaced


class RecordTail:
    """Incremental reader of a record file.

    Args:
        path: the file; it need not exist yet.
        begin: returns the number of the first record to read, for the file as first seen; None: from the first record.

    Attributes:
        file: header and layout; None until the header and the first record are complete.
        first: the file's first record, once there is one.
        skipped: number of records before the first that was read.
        failure: reason that the file cannot be read, one sentence; empty while it can.
    """

    def __init__(self, path: Path, begin: Callable[[RecordFile], int] | None = None) -> None:
        self.path = path
        self.file: RecordFile | None = None
        self.first: Record | None = None
        self.skipped = 0
        self.failure = ""
        self._begin = begin
        self._state = _FileState(path)
        self._next = 0

    def poll(self) -> Iterator[list[Record]]:
        """Yield the complete records that were added, in batches of bounded size."""
        if self._state.update():
            self.file, self.first, self.failure, self._begin, self._next = None, None, "", None, 0
        if self.failure or (self.file is None and not self._open()):
            return
        assert self.file is not None
        count = (self._state.size - self.file.offset) // self.file.record_bytes
        batch = max(1, _BATCH_BYTES // self.file.record_bytes)
        while self._next < count:
            end = min(count, self._next + batch)
            try:
                records = self.file.tail(self._next, end)
            except OSError:
                return
            if not records:
                return
            self._next += len(records)
            yield records

    def _open(self) -> bool:
        """Read the header; return True if it and the first record are complete."""
        try:
            if is_header_torn(self.path):
                return False
            self.file = open_log(self.path)
            if self.file.count < 1:
                self.file = None  # `begin` needs a file with records
                return False
            self.first = self.file.tail(0, 1)[0]
            self._next = self.skipped = self._begin(self.file) if self._begin else 0
        except UsageError as error:
            self.failure = str(error)
        except OSError:
            return False
        return self.file is not None


def since(seconds: float, column: str, most: int) -> Callable[[RecordFile], int]:
    """Return a ``begin`` for `RecordTail`: the last ``seconds`` by a column in ns, but at most ``most`` records."""

    def begin(file: RecordFile) -> int:
        newest_ns = int(file.tail(file.count - 1)[0][file.index[column]])
        first = file.first_from(column, newest_ns - round(seconds * 1e9), max(0, file.count - most))
        return min(first, file.count - 1)

    return begin


class LinesTail:
    """Incremental reader of a JSON Lines file, from its beginning.

    Args:
        path: the file; it need not exist yet.
        shape: required shape of its objects.

    Attributes:
        damaged: number of complete lines without such an object.
    """

    def __init__(self, path: Path, shape: Shape) -> None:
        self.path = path
        self.damaged = 0
        self._shape = shape
        self._state = _FileState(path)
        self._next = 0
        self._overlong = False

    def poll(self) -> Iterator[dict[str, Any]]:
        """Yield the objects that were added; an incomplete last line is read once it is complete."""
        if self._state.update():
            self._next, self._overlong = 0, False
        while self._next < self._state.size:
            try:
                with open_regular(self.path) as file:
                    file.seek(self._next)
                    data = file.read(min(_BATCH_BYTES, self._state.size - self._next))
            except OSError:
                return
            lines, newline, _ = data.rpartition(b"\n")
            if not newline:
                if len(data) < _BATCH_BYTES:
                    return
                self._next += len(data)  # skip an overlong line
                self._overlong = True
                continue
            self._next += len(lines) + 1
            yield from self._objects(lines)

    def _objects(self, lines: bytes) -> Iterator[dict[str, Any]]:
        for line in lines.split(b"\n"):
            damaged, self._overlong = self._overlong, False
            if not line and not damaged:
                continue
            try:
                item: dict[str, Any] = {} if damaged else parse_json(line)
                check(item, self._shape)
            except ValueError:
                damaged = True
            if damaged:
                self.damaged += 1
            else:
                yield item


class TextTail:
    """Last lines of a job's output as a terminal shows them: without colours, redrawn lines in their last state."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state = _FileState(path)
        self._next = 0
        self._lines: deque[str] = deque(maxlen=_TEXT_LINES)
        self._open_line = b""

    def poll(self) -> None:
        """Read the text that was added; only the end of a large addition."""
        if self._state.update():
            self._next, self._open_line = 0, b""
        start = max(self._next, self._state.size - _TEXT_BYTES)
        if start >= self._state.size:
            return
        try:
            with open_regular(self.path) as file:
                file.seek(start)
                data = file.read(self._state.size - start)
        except OSError:
            return
        if start > self._next:  # text was skipped: begin at a whole line
            data, self._open_line = data.partition(b"\n")[2] or data, b""
        self._next = self._state.size
        *lines, rest = (self._open_line + data).split(b"\n")
        self._lines.extend(_shown(line) for line in lines)
        self._open_line = rest[-_TEXT_BYTES:]

    @property
    def lines(self) -> tuple[str, ...]:
        """Last lines, including the one being written."""
        last = _shown(self._open_line)
        return (*self._lines, last) if last else tuple(self._lines)


def _shown(line: bytes) -> str:
    """Return the text that a terminal shows of a line, which a progress bar may have redrawn."""
    parts = [part for part in line.decode(errors="replace").split("\r") if part]
    return _ESCAPES.sub("", parts[-1]).expandtabs() if parts else ""


class Document:
    """Reader of a small JSON file that is replaced as a whole; ``item`` is its last readable state of the ``shape``."""

    def __init__(self, path: Path, shape: Shape) -> None:
        self.path = path
        self._shape = shape
        self.item: dict[str, Any] = {}
        self._seen: tuple[int, int, int] | None = None

    def poll(self) -> bool:
        """Read the file again if it was replaced; return True if it was."""
        try:
            status = self.path.stat()
            seen = (status.st_ino, status.st_size, status.st_mtime_ns)
            if seen == self._seen:
                return False
            self.item = load_json(self.path, self._shape)
        except (OSError, ShapeError):
            return False
        self._seen = seen
        return True
