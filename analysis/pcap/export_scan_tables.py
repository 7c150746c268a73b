"""Turns tables of a scan into readable columns (lists and arrays), and writes them to Parquet or CSV files."""

from __future__ import annotations

import csv
import importlib
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ringtap.analysis.pcap.scan_dtypes import ARP, ARP_CUT, NO_ADDRESSES, NOT_IP, RARP, RARP_CUT, ROCE
from ringtap.core.errors import UsageError
from ringtap.core.installation import install_command

Array = npt.NDArray[Any]
Columns = dict[str, Any]
"""Values by column name, all of one length: arrays, or lists with None for missing values."""

OTHERS = "others"
"""Protocol and addresses of the row that sums the packets of conversations beyond the limit."""

_PROTOCOLS = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp6"}
_KINDS = {ROCE: "roce", ARP: "arp", ARP_CUT: "arp", RARP: "rarp", RARP_CUT: "rarp", NOT_IP: "not-ip"}
_FIRST = ("packets", "bytes")
_THEN = (
    "data_packets",
    "data_bytes",
    "segments",
    "retransmitted_bytes",
    "repeated_bytes",
    "out_of_order_bytes",
    "zero_windows",
    "resets",
)
_SUMS = (*_FIRST, "payload", *_THEN)
_DIRECTIONS = ("ab", "ba")


def protocols(rows: Array) -> list[str]:
    """Return the protocol of each conversation: ``tcp``, ``udp``, ``roce``, ``icmp``, ``icmp6``, else ``ip-<number>``.

    Non-IP frames: ``arp``, ``rarp``, else ``not-ip``.
    """
    numbers, kinds, families = (rows[name].tolist() for name in ("protocol", "kind", "family"))
    return [
        OTHERS if not family else _KINDS.get(kind) or _PROTOCOLS.get(number) or f"ip-{number}"
        for number, kind, family in zip(numbers, kinds, families, strict=True)
    ]


def addresses(column: Array, families: Array) -> list[str]:
    """Return IP addresses as text; empty for frames without addresses."""
    names: dict[bytes, str] = {bytes((*bytes(16), NO_ADDRESSES)): ""}
    found = []
    packed = np.ascontiguousarray(column).tobytes()
    for row, family in enumerate(families.tolist()):
        key = packed[16 * row : 16 * row + 16] + bytes((family,))
        name = names.get(key)
        if name is None:
            kind, size = (socket.AF_INET6, 16) if family == 6 else (socket.AF_INET, 4)
            name = names[key] = socket.inet_ntop(kind, key[:size]) if family else OTHERS
        found.append(name)
    return found


def _families(rows: Array, end: str) -> Array:
    """Return the address families of one end; NO_ADDRESSES if ARP's target was cut off."""
    cut = np.isin(rows["kind"], (ARP_CUT, RARP_CUT))
    return np.where(cut, NO_ADDRESSES, rows["family"]) if end == "b" else np.asarray(rows["family"])


def conversation_columns(rows: Array, selected: Array | None = None) -> Columns:
    """Return the columns of conversations, one row each.

    Args:
        rows: rows of ``scan_dtypes.CONVERSATION``.
        selected: mask of the flows that count, shape (2 * rows,); amounts of the others are 0. None: all.
    """
    if selected is None:
        selected = np.ones(2 * len(rows), bool)
    counts = selected.reshape(-1, 2)

    def both(names: Iterable[str]) -> Columns:
        columns = [(name, rows[name].astype(np.int64) * counts) for name in names]
        return {
            f"{name}_{direction}": values[:, side]
            for name, values in columns
            for side, direction in enumerate(_DIRECTIONS)
        }

    # in the documented order of the JSON: packets and bytes of one direction, then of the other
    first = both(_FIRST)
    table: Columns = {"protocol": protocols(rows)}
    for end in ("a", "b"):
        table[end] = addresses(rows[end], _families(rows, end))
        table[f"{end}_port"] = rows[f"{end}_port"].astype(np.int64)
    table |= {f"{name}_{direction}": first[f"{name}_{direction}"] for direction in _DIRECTIONS for name in _FIRST}
    table |= both(["payload"])
    table |= {name: _times(rows[name]) for name in ("first_ns", "last_ns")}
    table |= both(_THEN)
    for side, direction in enumerate(_DIRECTIONS):
        table |= {f"{name}_{direction}": values for name, values in _round_trips(rows, side, counts[:, side]).items()}
    table["handshake_ns"] = _known(rows["handshake_ns"], (rows["handshake_ns"] >= 0) & counts.any(1))
    table["inner"] = rows["layer"] > 0
    return table


def _round_trips(rows: Array, side: int, counts: Array) -> Columns:
    number = rows["rtt_count"][:, side].astype(np.int64)
    known = (number > 0) & counts
    mean = rows["rtt_sum_ns"][:, side] // np.maximum(number, 1)
    least = rows["rtt_min_ns"][:, side]
    return {"rtt_count": number * counts, "rtt_mean_ns": _known(mean, known), "rtt_min_ns": _known(least, known)}


def _times(values: Array) -> Array | list[int | None]:
    """Return times since the epoch; None if no packet has one."""
    return values.astype(np.int64) if (values >= 0).all() else _known(values, values >= 0)


def _known(values: Array, known: Array) -> list[int | None]:
    return [value if is_known else None for value, is_known in zip(values.tolist(), known.tolist(), strict=True)]


def flow_columns(rows: Array, flows: Array) -> Columns:
    """Return the columns of flows, one row per direction of a conversation.

    Args:
        rows: rows of ``scan_dtypes.CONVERSATION``.
        flows: numbers of the flows wanted.
    """
    mine, side = rows[flows // 2], flows % 2
    table: Columns = {"protocol": protocols(mine)}
    for name, ends in (("source", ("a", "b")), ("destination", ("b", "a"))):
        families = np.where(side == 0, _families(mine, ends[0]), _families(mine, ends[1]))
        table[name] = addresses(np.where(side == 0, mine[ends[0]], mine[ends[1]]), families)
        ports = np.where(side == 0, mine[f"{ends[0]}_port"], mine[f"{ends[1]}_port"])
        table[f"{name}_port"] = ports.astype(np.int64)
    number = np.arange(len(mine))
    table |= {name: mine[name][number, side].astype(np.int64) for name in _SUMS}
    table |= {name: _times(mine[name]) for name in ("first_ns", "last_ns")}
    trips = [_round_trips(mine, direction, np.ones(len(mine), bool)) for direction in (0, 1)]
    for name in trips[0]:
        table[name] = [trips[direction][name][row] for row, direction in enumerate(side.tolist())]
    table["inner"] = mine["layer"] > 0
    return table


def queue_pair_columns(rows: Array) -> Columns:
    """Return the columns of RoCE queue pairs, one row per direction; ``queue_pair`` is the destination's number."""
    table: Columns = {name: addresses(rows[name], rows["family"]) for name in ("source", "destination")}
    table |= {name: rows[name].astype(np.int64) for name in rows.dtype.names or () if name not in ("family", *table)}
    return table | {name: _times(rows[name]) for name in ("first_ns", "last_ns")}


def rows_of(columns: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Return the rows of a table as plain values."""
    lists = [values.tolist() if isinstance(values, np.ndarray) else values for values in columns.values()]
    names = list(columns)
    return (dict(zip(names, row, strict=True)) for row in zip(*lists, strict=True))


class NewFile:
    """A file that appears under its name when it is complete.

    Args:
        path: its path.
        mode: ``w`` for text, ``wb`` for bytes.

    Attributes:
        stream: the file, under a temporary name.

    Raises:
        UsageError: it cannot be written.
    """

    def __init__(self, path: Path, mode: str = "wb") -> None:
        self._path = path
        with self.checked():
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
        self._part = Path(name)
        self.stream: IO[Any] = os.fdopen(handle, mode)

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Raise a UsageError in place of an OSError."""
        try:
            yield
        except OSError as error:
            raise UsageError(f"{self._path} cannot be written: {error.strerror or error}") from error

    def __enter__(self) -> NewFile:
        return self

    def write(self, data: Any) -> None:
        """Append text or bytes."""
        with self.checked():
            self.stream.write(data)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            with self.checked():
                self.stream.close()
                if kind is None:
                    mask = os.umask(0)
                    os.umask(mask)
                    self._part.chmod(0o666 & ~mask)
                    self._part.replace(self._path)
        finally:
            self._part.unlink(missing_ok=True)


class TableFile:
    """A table file that is written in pieces and appears under its name when it is complete.

    Args:
        path: ``.parquet`` or ``.csv``.
        force: True to replace an existing file.

    Raises:
        UsageError: the name has no known suffix, the file exists, or it cannot be written.
    """

    def __init__(self, path: Path, force: bool = False) -> None:
        check_table(path, force)
        self._is_parquet = path.suffix == ".parquet"
        self._writer: Any = None
        self._file = NewFile(path, "wb" if self._is_parquet else "w")

    def __enter__(self) -> TableFile:
        return self

    def add(self, columns: Columns) -> None:
        """Append rows."""
        with self._file.checked():
            self._parquet(columns) if self._is_parquet else self._csv(columns)

    def _parquet(self, columns: Columns) -> None:
        table = importlib.import_module("pyarrow").table(columns)
        if self._writer is None:
            parquet = importlib.import_module("pyarrow.parquet")
            self._writer = parquet.ParquetWriter(self._file.stream, table.schema)
        self._writer.write_table(table.cast(self._writer.schema))

    def _csv(self, columns: Columns) -> None:
        if self._writer is None:
            self._writer = csv.writer(self._file.stream, lineterminator="\n")
            self._writer.writerow(columns)
        lists = [values.tolist() if isinstance(values, np.ndarray) else values for values in columns.values()]
        self._writer.writerows(zip(*lists, strict=True))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if self._writer is not None and self._is_parquet:
                with self._file.checked():
                    self._writer.close()
        except UsageError as failed:
            self._file.__exit__(UsageError, failed, None)
            raise
        self._file.__exit__(kind, error, at)


def check_new(path: Path, force: bool) -> None:
    """Check, before any work, that a file can be written.

    Raises:
        UsageError: it exists and must not be replaced, or its folder does not exist.
    """
    if path.is_dir() or (path.exists() and not force):
        raise UsageError(
            f"{path} is there already: choose another name" + ("" if path.is_dir() else ", or give --force")
        )
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not a directory: {path.name} cannot be written there")


def check_table(path: Path, force: bool) -> None:
    """Check, before any work, that a table can be written.

    Raises:
        UsageError: the name has no known suffix, pyarrow is missing, the file exists, or its folder does not.
    """
    if path.suffix not in (".parquet", ".csv"):
        raise UsageError(f"{path} names no table format: its name must end in .parquet or .csv")
    check_new(path, force)
    if path.suffix == ".parquet":
        try:
            importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise UsageError(
                f"pyarrow, which writes {path.name}, is not installed: name it .csv, or {install_command('report')}"
            ) from error
