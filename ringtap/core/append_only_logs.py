"""Writes and reads append-only logs: packed records for high rates, JSON Lines for low ones.

A record file is one line of JSON, padded with spaces to a multiple of 64 bytes, then fixed-size little-endian
records. The line describes a record (name, type, unit, width, kind), so ``numpy.memmap`` with ``offset`` set
to the line's length reads the rest. A writer that is killed leaves at most one torn record at the end.
"""

from __future__ import annotations

import json
import os
import re
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import ringtap
from ringtap.core import json_validation
from ringtap.core.counter_growth import growth
from ringtap.core.errors import UsageError
from ringtap.core.untrusted_files import make_folder, open_file, open_regular

FORMAT = "ringtap-records"
VERSION = 1
_ALIGN = 64
_WALK_RECORDS = 4096
_BLOCK_BYTES = 1 << 16
_STRUCT_OF = {"<i8": "q", "<u8": "Q", "<f8": "d", "<i4": "i", "<u4": "I", "<u2": "H", "<u1": "B"}
# Bytes as the kernel gave them (addresses, ports in network order)
_STRUCT_OF |= {f"V{size}": f"{size}s" for size in (2, 4, 16)}
_OCTETS = re.compile(r"(\d+) octets?")

Kind = Literal["time", "index", "counter", "gauge", "saturating"]
_EVERY = (json_validation.Number(1e-9, 1e9), None)
_HEADER: json_validation.Shape = {
    "format": str,
    "version": json_validation.COUNT,
    "record_bytes": json_validation.COUNT,
    "fields": [
        {"name": str, "type": str, "unit": str, "kind": str, "width_bits": json_validation.Number(0, 64, whole=True)}
    ],
    "about": {
        "every_s?": _EVERY,
        "dump_every_s?": _EVERY,
        "asked_by_name_s?": _EVERY,
        "world_size?": (json_validation.Number(0, 2**31, whole=True), None),
        "interfaces?": {str: (str, None)},
        "kinds?": {str: (str, None)},
        "destinations?": ([str], None),
        "sources?": ([str], None),
        "origin_ns?": (json_validation.NS, None),
    },
}
_MAX_HEADER_BYTES = 8 << 20
_MAX_LINE_BYTES = 16 << 20
# types of columns that a reader computes with
INTEGER = frozenset(name for name in _STRUCT_OF if name[1] in "iu")
NUMBER = INTEGER | {"<f8"}
EACH = "*."  # before names of columns of which every source of a file with several has one, as eth0.tx_bytes


@dataclass(frozen=True)
class Field:
    """One column of a record file.

    Attributes:
        name: column name; carries its unit as a suffix where it has one.
        type: NumPy type string, one of ``<i8 <u8 <f8 <i4 <u4 <u2 <u1 V2 V4 V16`` (the last three are raw bytes).
        unit: unit in words (``ns``, ``bytes``, ``packets``).
        kind: meaning of the number over time.
        width_bits: width of the source counter, for wrap; 0 where it does not wrap.
    """

    name: str
    type: str
    unit: str
    kind: Kind
    width_bits: int = 0

    @property
    def octets(self) -> int:
        """Octets per count, as the unit says: 4 for data counters of InfiniBand, 8 for Omni-Path; 1 otherwise."""
        octets = _OCTETS.match(self.unit)
        return int(octets[1]) if octets else 1

    @property
    def wraps_at_bits(self) -> int:
        """Width at which a counter wraps; 0 if it does not: a saturating one stays at its largest value."""
        return self.width_bits if self.kind == "counter" else 0


def append_whole(fd: int, data: bytes, record_bytes: int = 0) -> None:
    """Append data to a file, and leave no torn record: a nearly full disk may take only a part.

    Args:
        fd: the file, open for appending.
        data: a line, or records.
        record_bytes: size of a record; 0 if the data is a single one.

    Raises:
        OSError: not all can be written; a torn record is cut off again, unless another writer's data follows it.
    """
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(fd, left) :]
    except OSError:
        torn, end = (len(data) - len(left)) % (record_bytes or len(data)), os.lseek(fd, 0, os.SEEK_CUR)
        if torn and os.fstat(fd).st_size == end:
            os.ftruncate(fd, end - torn)
        raise


def mend_last_line(fd: int, is_whole: Callable[[bytes], bool]) -> None:
    """Make sure that a file of lines ends with a line end before more is appended.

    Args:
        fd: the file, open for reading and appending.
        is_whole: returns True for a whole last line, which then gets its line end; another one is cut off.

    Raises:
        OSError: the file cannot be read or written.
    """
    end, tail = os.fstat(fd).st_size, b""
    while len(tail) < end and b"\n" not in tail:
        start = max(0, end - len(tail) - _BLOCK_BYTES)
        tail = os.pread(fd, end - len(tail) - start, start) + tail
    line = tail.rpartition(b"\n")[2]
    if line and is_whole(line):
        append_whole(fd, b"\n")
    elif line:
        os.ftruncate(fd, end - len(line))


def cut_torn_record(path: Path) -> RecordFile:
    """Cut the torn last record off a record file that one writer will append to; return the file as it is then.

    Raises:
        UsageError: not a record file.
        OSError: it cannot be written.
    """
    found = open_records(path)
    if found.torn_bytes:
        os.truncate(path, found.offset + found.count * found.record_bytes)
    return replace(found, torn_bytes=0)


def _is_json(line: bytes) -> bool:
    try:
        json_validation.parse_json(line)
    except ValueError:
        return False
    return True


class RecordWriter:
    """Writer of packed records; every record is handed to the kernel at once, so SIGKILL loses none.

    Args:
        path: file to create; its folder is made if missing.
        fields: the columns, in order.
        about: further facts for the header (collector, source, period); None: append to a file that another thread or
            process of the same program has created with these columns.

    Raises:
        FileExistsError: the file exists: two writers never share a file.
    """

    def __init__(self, path: Path, fields: Sequence[Field], about: dict[str, Any] | None) -> None:
        self._struct = struct.Struct("<" + "".join(_STRUCT_OF[field.type] for field in fields))
        if about is None:
            self._fd = open_file(path, os.O_WRONLY | os.O_APPEND)
            return
        header = {"format": FORMAT, "version": VERSION, "ringtap": ringtap.__version__}
        header |= {"record_bytes": self._struct.size, "fields": [asdict(field) for field in fields], "about": about}
        line = json.dumps(header).encode()
        line += b" " * (-(len(line) + 1) % _ALIGN) + b"\n"
        make_folder(path.parent)
        self._fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        try:
            append_whole(self._fd, line)
        except OSError:
            os.close(self._fd)
            path.unlink()
            raise

    def append(self, *values: float) -> None:
        """Append one record; values in the order of the fields."""
        self._write(self._struct.pack(*values))

    def append_packed(self, records: bytes) -> None:
        """Append records that are packed already, in one write: for collectors that pass on the kernel's own bytes."""
        self._write(records)

    def append_many(self, records: Iterable[Sequence[float]]) -> None:
        """Append records in one write, for logs whose rate forbids a write per record."""
        pack = self._struct.pack
        self._write(b"".join([pack(*values) for values in records]))

    def _write(self, data: bytes) -> None:
        append_whole(self._fd, data, self._struct.size)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class HoldingRecordWriter(RecordWriter):
    """Writer that hands records to the kernel ten times a second instead of one by one, for frequent samples.

    A write costs more than the sample that it stores. SIGKILL can lose a tenth of a second of records.
    """

    _HOLD_NS = 100_000_000

    def __init__(self, path: Path, fields: Sequence[Field], about: dict[str, Any] | None) -> None:
        super().__init__(path, fields, about)
        self._held: list[bytes] = []
        self._written_ns = 0

    def hold(self, records: bytes, mono_ns: int) -> None:
        """Append the packed records of a sample taken at ``mono_ns``; call it for empty ones, too.

        They are written at once if the last write was long ago, else with those of a later sample.
        """
        if records:
            self._held.append(records)
        if self._held and mono_ns - self._written_ns >= self._HOLD_NS:
            self._written_ns = mono_ns
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        if self._held:
            records = b"".join(self._held)
            self._held.clear()
            self._write(records)

    def close(self) -> None:
        """Write what is held, and close the file."""
        try:
            self.flush()
        finally:
            super().close()


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

    @cached_property
    def _layout(self) -> str:
        return "<" + "".join(_STRUCT_OF[field.type] for field in self.fields)

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each column in a record, by name."""
        return {field.name: number for number, field in enumerate(self.fields)}

    def column(self, name: str) -> Field:
        """Return a column."""
        return self.fields[self.index[name]]

    def grown(self, name: str, before: Sequence[Any], after: Sequence[Any]) -> float | None:
        """Return the growth of a counter from one record to a later one; None if it was reset in between."""
        number = self.index[name]
        return growth(before[number], after[number], self.fields[number].wraps_at_bits)

    def packed(self, start: int = 0, end: int | None = None) -> bytes:
        """Return the records from number ``start`` to before ``end``, or to the last whole one, as they lie there."""
        count = (self.count if end is None else end) - start
        with open_regular(self.path) as file:
            file.seek(self.offset + start * self.record_bytes)
            return file.read(max(0, count) * self.record_bytes)

    def tail(self, start: int = 0, end: int | None = None) -> list[tuple[Any, ...]]:
        """Return the records that `packed` returns, as tuples."""
        return list(struct.iter_unpack(self._layout, self.packed(start, end)))

    def values(self, name: str, packed: bytes) -> list[Any]:
        """Return a column of packed records, without unpacking the others."""
        number = self.index[name]
        sizes = [struct.calcsize("<" + _STRUCT_OF[field.type]) for field in self.fields]
        before, after = sum(sizes[:number]), sum(sizes[number + 1 :])
        layout = f"<{before}x{_STRUCT_OF[self.fields[number].type]}{after}x"
        return [value for (value,) in struct.iter_unpack(layout, packed)]

    def first_from(self, name: str, value: int, low: int = 0) -> int:
        """Return the number of the first record from ``low`` on that has at least a value in an ascending column."""
        with open_regular(self.path) as file:

            def value_at(place: int) -> Any:
                file.seek(self.offset + place * self.record_bytes)
                return self.values(name, file.read(self.record_bytes))[0]

            return bisect_left(range(self.count), value, low, key=value_at)

    def walk(self) -> Iterator[tuple[Any, ...]]:
        """Yield every whole record in order, without holding the file in memory."""
        left = self.count
        with open_regular(self.path) as file:
            file.seek(self.offset)
            while left:
                data = file.read(min(left, _WALK_RECORDS) * self.record_bytes)
                yield from struct.iter_unpack(self._layout, data)
                left -= min(left, _WALK_RECORDS)


def is_header_torn(path: Path) -> bool:
    """Return True if a record file ends within its header, which its writer may still be writing.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        line = file.readline(_MAX_HEADER_BYTES)
    return not line.endswith(b"\n") and len(line) < _MAX_HEADER_BYTES


def open_records(path: Path, needed: Mapping[str, frozenset[str]] | None = None) -> RecordFile:
    """Read a record file's header and count its records.

    Args:
        path: the file.
        needed: columns that the caller relies on, with the types that each may have; a name may begin with `EACH`.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        UsageError: not a record file, one of a newer version, or one without these columns.
    """
    with open_regular(path) as file:
        line = file.readline(_MAX_HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size
    try:
        header = json_validation.parse_json(line)
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise json_validation.ShapeError("its first line does not say that it is one")
        if isinstance(header.get("version"), int) and header["version"] > VERSION:
            raise json_validation.NewerFormatError(path, header.get("ringtap"), header["version"], VERSION)
        json_validation.check(header, _HEADER)
        fields = tuple(Field(**{name: field[name] for name in Field.__annotations__}) for field in header["fields"])
        _check_fields(fields, header["record_bytes"], needed or {})
    except ValueError as error:
        raise UsageError(f"{path} is not a ringtap record file: {error}") from error
    count, torn = divmod(max(size - len(line), 0), header["record_bytes"])
    return RecordFile(path, fields, header["about"], len(line), header["record_bytes"], count, torn)


def _check_fields(fields: Sequence[Field], record_bytes: int, needed: Mapping[str, frozenset[str]]) -> None:
    types = {field.name: field.type for field in fields}
    for field in fields:
        if field.type not in _STRUCT_OF or field.kind not in get_args(Kind):
            raise json_validation.ShapeError(f"its column {field.name!r} has an unknown type or kind")
        if field.type[0] == "V" and field.kind != "index":
            raise json_validation.ShapeError(f"its column {field.name!r} is a {field.kind} of raw bytes")
    if not fields or len(types) < len(fields):
        raise json_validation.ShapeError("it has no columns" if not fields else "two of its columns have the same name")
    size = struct.calcsize("<" + "".join(_STRUCT_OF[field.type] for field in fields))
    if record_bytes != size:
        raise json_validation.ShapeError(
            f"it says that its records have {record_bytes} bytes, but its columns need {size}"
        )
    lacking = [name for name, allowed in needed.items() if EACH not in name and types.get(name) not in allowed]
    each = {name.removeprefix(EACH): allowed for name, allowed in needed.items() if EACH in name}
    sources = {field.name.rpartition(".")[0] for field in fields if field.kind not in ("time", "index")}
    for source in sorted(sources) if each else ():
        if not any(types.get(f"{source}.{name}") in allowed for name, allowed in each.items()):
            lacking.append(f"{source}.{next(iter(each))}".lstrip("."))
    if lacking:
        raise json_validation.ShapeError(f"it has no usable column {', '.join(lacking[:3])}: it holds something else")


class JsonLinesWriter:
    """Writer of one JSON object per line, each handed to the kernel at once.

    A torn last line of an earlier writer is cut off first; a whole one without a line end gets one.
    """

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        self._fd = open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            mend_last_line(self._fd, _is_json)
        except OSError:
            os.close(self._fd)
            raise

    def append(self, item: dict[str, Any]) -> None:
        """Append one object."""
        append_whole(self._fd, json.dumps(item, separators=(",", ":"), allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class JsonLine(NamedTuple):
    """A line of a JSON Lines file.

    Attributes:
        number: line number, from 1.
        item: the object; None if the line is not an object of the required shape.
        why: the error; empty if there is an object.
        torn: True for a last line without a line end.
    """

    number: int
    item: dict[str, Any] | None
    why: str
    torn: bool


def each_json_line(path: Path, shape: json_validation.Shape = None) -> Iterator[JsonLine]:
    """Yield every line of a JSON Lines file except empty ones; a line of more than 16 MiB comes in pieces.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        number = 0
        while data := file.readline(_MAX_LINE_BYTES):
            number += 1
            if not data.strip():
                continue
            try:
                item = json_validation.parse_json(data)
                json_validation.check(item, dict if shape is None else shape)
            except json_validation.ShapeError as error:
                yield JsonLine(number, None, str(error), not data.endswith(b"\n"))
            except ValueError:
                yield JsonLine(number, None, "it is not JSON", not data.endswith(b"\n"))
            else:
                yield JsonLine(number, item, "", False)


def read_json_lines(path: Path, shape: json_validation.Shape = None) -> tuple[list[dict[str, Any]], int]:
    """Read a JSON Lines file whose objects have a shape; return them and the number of torn last lines (0 or 1).

    A missing file counts as empty.

    Raises:
        UsageError: it cannot be read, or a line other than a torn last one is not such an object.
    """
    items: list[dict[str, Any]] = []
    try:
        for line in each_json_line(path, shape):
            if line.item is not None:
                items.append(line.item)
            elif line.torn:
                return items, 1
            else:
                raise UsageError(f"{path} line {line.number} cannot be used: {line.why}")
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    return items, 0
