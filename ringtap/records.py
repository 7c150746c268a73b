"""Append-only logs: packed records for high rates, JSON Lines for low ones.

A record file is one line of JSON, padded with spaces to a multiple of 64 bytes, then fixed-size little-endian
records. The line says what a record holds (name, type, unit, width, kind), so ``numpy.memmap`` with ``offset`` set
to the line's length reads the rest. A writer that is killed leaves at most one torn record at the end.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ringtap.errors import UsageError

FORMAT = "ringtap-records"
VERSION = 1
_ALIGN = 64
_STRUCT_OF = {"<i8": "q", "<u8": "Q", "<f8": "d", "<i4": "i", "<u4": "I"}

Kind = Literal["time", "index", "counter", "gauge", "saturating"]


@dataclass(frozen=True)
class Field:
    """One column of a record file.

    Attributes:
        name: column name; carries its unit as a suffix where it has one.
        type: NumPy type string, one of ``<i8 <u8 <f8 <i4 <u4``.
        unit: unit in words (``ns``, ``bytes``, ``packets``).
        kind: what the number means over time.
        width_bits: width of the source counter, for wrap; 0 where it does not wrap.
    """

    name: str
    type: str
    unit: str
    kind: Kind
    width_bits: int = 0


class RecordWriter:
    """Appends packed records; every record is handed to the kernel at once, so SIGKILL loses none.

    Args:
        path: file to create; its folder is made if missing.
        fields: the columns, in order.
        about: further facts for the header (collector, source, period).

    Raises:
        FileExistsError: the file is there already: two writers never share a file.
    """

    def __init__(self, path: Path, fields: Sequence[Field], about: dict[str, Any]) -> None:
        self._struct = struct.Struct("<" + "".join(_STRUCT_OF[field.type] for field in fields))
        header = {"format": FORMAT, "version": VERSION, "record_bytes": self._struct.size}
        header |= {"fields": [asdict(field) for field in fields], "about": about}
        line = json.dumps(header).encode()
        line += b" " * (-(len(line) + 1) % _ALIGN) + b"\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.write(self._fd, line)

    def append(self, *values: float) -> None:
        """Append one record; values in the order of the fields."""
        os.write(self._fd, self._struct.pack(*values))

    def append_many(self, records: Iterable[Sequence[float]]) -> None:
        """Append records in one write, for logs whose rate forbids a write a record."""
        os.write(self._fd, b"".join(self._struct.pack(*values) for values in records))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


@dataclass(frozen=True)
class RecordFile:
    """A record file as read: its header and where its records lie.

    Attributes:
        path: the file.
        fields: the columns.
        about: the header's further facts.
        offset: byte offset of the first record.
        record_bytes: size of a record.
        count: whole records present.
        torn_bytes: bytes of a torn last record, 0 when the file ends cleanly.
    """

    path: Path
    fields: tuple[Field, ...]
    about: dict[str, Any]
    offset: int
    record_bytes: int
    count: int
    torn_bytes: int

    def tail(self, start: int = 0) -> list[tuple[Any, ...]]:
        """Records from number ``start`` to the last whole one, as tuples."""
        layout = struct.Struct("<" + "".join(_STRUCT_OF[field.type] for field in self.fields))
        with self.path.open("rb") as file:
            file.seek(self.offset + start * self.record_bytes)
            data = file.read(max(0, self.count - start) * self.record_bytes)
        return list(layout.iter_unpack(data))


def open_records(path: Path) -> RecordFile:
    """Read a record file's header and count its records.

    Raises:
        UsageError: not a record file, or one of a newer version.
    """
    with path.open("rb") as file:
        line = file.readline()
    try:
        header = json.loads(line)
        if header["format"] != FORMAT:
            raise ValueError
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a ringtap record file") from error
    if header["version"] > VERSION:
        raise UsageError(f"{path} has record format {header['version']}; this ringtap reads up to {VERSION}: upgrade")
    size = int(header["record_bytes"])
    count, torn = divmod(path.stat().st_size - len(line), size)
    fields = tuple(Field(**field) for field in header["fields"])
    return RecordFile(path, fields, header["about"], len(line), size, count, torn)


class JsonLinesWriter:
    """Appends one JSON object a line, each handed to the kernel at once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def append(self, item: dict[str, Any]) -> None:
        """Append one object."""
        os.write(self._fd, json.dumps(item, separators=(",", ":"), allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Read a JSON Lines file; returns the objects and the number of torn last lines (0 or 1).

    Raises:
        UsageError: a line other than the last is not JSON.
    """
    if not path.exists():
        return [], 0
    lines = path.read_bytes().split(b"\n")
    items: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            items.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                return items, 1
            raise UsageError(f"{path} line {number} is not JSON") from error
    return items, 0
