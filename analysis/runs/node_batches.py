"""Groups a run's nodes into batches, the unit in which it is read, and keeps a long run's tables in Parquet files.

A run of few iterations is analyzed in memory. A longer one would not fit: each batch then leaves its frames in files,
each written to a temporary name and renamed. A batch with a file whose key fits is not read again, so an analysis that
was interrupted goes on where it ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

import ringtap
from ringtap.analysis.runs.file_fingerprints import fingerprint
from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.core.errors import UsageError
from ringtap.core.installation import install_command
from ringtap.core.json_validation import ShapeError, load_json, whole
from ringtap.core.run_directory import write_json
from ringtap.core.untrusted_files import make_folder, new_file_beside, open_regular, refuse_links, replace_file

# rows of a batch (nodes times iterations): an analysis needs about 2 kB for each
_BATCH_ROWS = 200_000
_BATCH_NODES = 50
# with more rows in all batches, they are kept in files
_MEMORY_ROWS = 300_000
_GROUP_ROWS = 25_000
# processes of this machine that read batches without being asked for: with this one they need less than 2 GB
_MAX_PROCESSES = 3
PARTS = "parts"
# frames of a batch that are parts of the analysis's own tables
TABLES = ("rank_iterations", "node_iterations", "byte_accounts")
SCHEMA = 3

T = TypeVar("T")
Frames = dict[str, pd.DataFrame]
# of a node's log: name of the node, True for a torn record, text
Problem = tuple[str, bool, str]


def batches_of(nodes: Mapping[str, NodeLogs], rows: Mapping[str, int]) -> list[list[str]]:
    """Group the nodes of a run, in order, into batches of bounded size.

    Args:
        nodes: the nodes' logs.
        rows: rows that each node's tables have at most.
    """
    found: list[list[str]] = []
    size = 0
    for name in nodes:
        size += rows[name]
        if not found or size > _BATCH_ROWS or len(found[-1]) == _BATCH_NODES:
            found.append([])
            size = rows[name]
        found[-1].append(name)
    return found or [[]]


def is_long(rows: Mapping[str, int]) -> bool:
    """Return True if the tables of a run do not fit into memory."""
    return sum(rows.values()) > _MEMORY_ROWS


@dataclass(frozen=True)
class BatchTable:
    """A table of one batch, in memory or in a file.

    Attributes:
        held: the table; None: it is in the file.
        path: the file; None: the table is in memory.
    """

    held: pd.DataFrame | None = None
    path: Path | None = None

    def read(self, columns: Sequence[str] | None = None, rows: tuple[int, int] | None = None) -> pd.DataFrame:
        """Return the table.

        Args:
            columns: its columns; None: all.
            rows: only rows whose ``iteration`` is at least the first number and below the second.
        """
        if self.path is None:
            table = self.held if self.held is not None else pd.DataFrame()
            if rows is not None:
                table = table[(table["iteration"] >= rows[0]) & (table["iteration"] < rows[1])]
            return table if columns is None else table[list(columns)]
        filters = None if rows is None else [("iteration", ">=", rows[0]), ("iteration", "<", rows[1])]
        names = None if columns is None else list(columns)
        refuse_links(self.path)
        read: pd.DataFrame = pd.read_parquet(self.path, engine="pyarrow", columns=names, filters=filters)
        return read


class Batches:
    """Nodes of a run in batches, and where their tables are kept.

    Args:
        nodes: the nodes' logs.
        rows: rows that each node's tables have at most.
        folder: folder of the files of a long run.
        workers: processes that read the nodes' logs; None for this one.

    Attributes:
        names: names of the nodes of each batch.
    """

    def __init__(
        self, nodes: Mapping[str, NodeLogs], rows: Mapping[str, int], folder: Path, workers: Executor | None = None
    ) -> None:
        self._nodes, self._workers = nodes, workers
        self.names = batches_of(nodes, rows)
        self._folder = folder if is_long(rows) else None

    @property
    def is_long(self) -> bool:
        """True if the tables are kept in files."""
        return self._folder is not None

    @property
    def processes(self) -> int:
        """Number of processes of this machine that read a long run at best; 1 for a short one."""
        return min(len(os.sched_getaffinity(0)), len(self.names), _MAX_PROCESSES) if self.is_long else 1

    def map(self, work: Callable[..., T], *columns: Iterable[Any]) -> Iterator[T]:
        """Call a module-level function for each row of the columns, as the built-in `map` does, and keep no file."""
        return (self._workers.map if self._workers else map)(work, *columns)

    def each(
        self, step: str, read: Callable[..., Frames], *columns: Iterable[Any], shared: tuple[Any, ...] = ()
    ) -> Iterator[dict[str, BatchTable]]:
        """Read every batch and yield its frames, in order; problems are added to the nodes' logs.

        Args:
            step: name of this step of the analysis.
            read: a module-level function of the nodes' logs, of the batch's value of each column, and of ``shared``.
            *columns: arguments, one value per batch each.
            shared: further arguments, the same for all batches.
        """
        if self._workers is None and self._folder is None and len(self.names) == 1:
            # logs that are open already save a short run a tenth of its time
            nodes = {name: self._nodes[name] for name in self.names[0]}
            frames = read(nodes, *(next(iter(column)) for column in columns), *shared)
            yield {name: BatchTable(held=table) for name, table in frames.items()}
            return
        paths = [[self._nodes[name].path for name in names] for names in self.names]
        numbers = range(len(paths))
        with self._sent(step, shared) as sent:
            make = partial(_make, read, step, self._folder, sent)
            yield from self._noted(self.map(make, numbers, paths, *columns))

    def each_node(self, names: Sequence[str], read: Callable[..., T], *columns: Iterable[Any]) -> Iterator[T]:
        """Read some nodes and yield the results; problems are added to the nodes' logs.

        Args:
            names: names of the nodes.
            read: a module-level function of the node's logs, as for `each`, and of the node's value of each column.
            *columns: arguments, one value per node each.
        """
        paths = [[self._nodes[name].path] for name in names]
        return self._noted(self.map(partial(_read, read), paths, *columns))

    def _noted(self, results: Iterable[tuple[T, list[Problem]]]) -> Iterator[T]:
        """Yield the results, and add the problems to the nodes' logs."""
        for found, problems in results:
            for name, is_torn, text in problems:
                logs = self._nodes[name]
                if is_torn:
                    logs.torn.append(text)
                elif text not in logs.problems:
                    logs.report(text)
            yield found

    @contextlib.contextmanager
    def _sent(self, step: str, values: tuple[Any, ...]) -> Iterator[SharedArguments]:
        """Provide arguments for all batches: of a long run in a file, because each batch would be sent megabytes."""
        if self._folder is None:
            yield SharedArguments("", values)
            return
        key = digest(*values)
        if self._workers is None:
            yield SharedArguments(key, values)
            return
        packed, path = pickle.dumps(values), self._folder / PARTS / f".{step}-{os.getpid()}.pickle"
        try:
            make_folder(path.parent)
            replace_file(path, packed)
        except OSError as error:
            raise _unwritable(self._folder, error) from error
        try:
            yield SharedArguments(key, (), path, hashlib.sha256(packed).hexdigest())
        finally:
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class SharedArguments:
    """Arguments that all batches have in common.

    Attributes:
        key: hash of their values; empty for a short run, which keeps nothing.
        held: the arguments, unless they are in a file.
        path: the file.
        sha256: hash of the file: unpickling another one might run anything.
    """

    key: str
    held: tuple[Any, ...]
    path: Path | None = None
    sha256: str = ""

    def read(self) -> tuple[Any, ...]:
        """Return the arguments."""
        return self.held if self.path is None else _unpickled(self.path, self.sha256)


@lru_cache(maxsize=1)
def _unpickled(path: Path, sha256: str) -> tuple[Any, ...]:
    try:
        with open_regular(path) as file:
            packed = file.read()
    except OSError as error:
        raise UsageError(
            f"the workers cannot read {path}: {error.strerror}; name a folder that they have, too, with "
            "ringtap analyze -o DIR"
        ) from error
    if hashlib.sha256(packed).hexdigest() != sha256:
        raise UsageError(f"{path} was changed during the analysis: keep others from writing to this folder")
    values: tuple[Any, ...] = pickle.loads(packed)
    return values


def _make(
    read: Callable[..., Frames],
    step: str,
    folder: Path | None,
    shared: SharedArguments,
    number: int,
    paths: list[Path],
    *arguments: Any,
) -> tuple[dict[str, BatchTable], list[Problem]]:
    if folder is None:
        frames, problems = _read(read, paths, *arguments, *shared.read())
        return {name: BatchTable(held=table) for name, table in frames.items()}, problems
    key = {"schema": SCHEMA, "ringtap": ringtap.__version__, "arguments": digest(*arguments, shared.key)}
    key |= {"inputs": {path.name: fingerprint(path) for path in paths}}
    record = folder / PARTS / f"{step}-{number:05d}.json"
    try:
        found = load_json(record)
        problems = [(str(name), bool(torn), str(text)) for name, torn, text in found["problems"]]
        known = {whole(path.name) for path in paths}
        is_whole = all(_size(folder / name) == size for name, size in found["bytes"].items())
        if found["key"] == key and is_whole and known.issuperset(name for name, _, _ in problems):
            return {name: BatchTable(path=folder / path) for name, path in found["frames"].items()}, problems
    except (OSError, ShapeError, LookupError, TypeError, ValueError, AttributeError):
        pass
    frames, problems = _read(read, paths, *arguments, *shared.read())
    places = {
        name: f"{name}.parquet/{number:05d}.parquet"
        if name in TABLES
        else f"{PARTS}/{step}-{number:05d}-{name}.parquet"
        for name in frames
    }
    try:
        make_folder(record.parent)
        record.unlink(missing_ok=True)
        for name, table in frames.items():
            write_table(table, folder / places[name])
        sizes = {place: _size(folder / place) for place in places.values()}
        write_json(record, {"key": key, "frames": places, "bytes": sizes, "problems": problems})
    except OSError as error:
        raise _unwritable(folder, error) from error
    return {name: BatchTable(path=folder / place) for name, place in places.items()}, problems


def _unwritable(folder: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{folder} cannot be written: {error.strerror}; the tables of a long run need it: name another folder with "
        "ringtap analyze -o DIR"
    )


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _read(read: Callable[..., T], paths: list[Path], *arguments: Any) -> tuple[T, list[Problem]]:
    """Call a function of nodes, and return its result and the problems in their logs."""
    for path in paths:
        if not path.is_dir():
            raise UsageError(f"{path} is not there for the workers: they need the file system that it lies on")
    nodes = {logs.name: logs for logs in map(NodeLogs, paths)}
    result = read(nodes, *arguments)
    return result, [
        (name, torn, text)
        for name, logs in nodes.items()
        for torn in (False, True)
        for text in (logs.torn if torn else logs.problems)
    ]


def write_table(table: pd.DataFrame, path: Path) -> Path:
    """Write a table as Parquet to a temporary name and rename it.

    Raises:
        UsageError: pyarrow is missing.
        OSError: the file cannot be written.
    """
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(
            f"Parquet files need pyarrow, which is not installed here: {install_command('report')} (on Alliance "
            "clusters: module load gcc arrow)"
        ) from error
    make_folder(path.parent)
    temporary = new_file_beside(path)
    # small groups let a reader of some iterations skip the others; a dictionary of numbers costs time and saves little
    texts = [str(name) for name, kind in table.dtypes.items() if not pd.api.types.is_numeric_dtype(kind)]
    table.to_parquet(temporary, engine="pyarrow", index=False, row_group_size=_GROUP_ROWS, use_dictionary=texts)
    temporary.replace(path)
    return path


def digest(*items: Any) -> str:
    """Return a hash of arrays, frames, and plain values in sequences and dictionaries."""
    found = hashlib.sha256()
    for item in items:
        if isinstance(item, np.ndarray) and item.dtype.kind == "O":
            found.update(digest(*item.tolist()).encode())
        elif isinstance(item, np.ndarray):
            found.update(np.ascontiguousarray(item).data)
        elif isinstance(item, pd.DataFrame):
            found.update(np.ascontiguousarray(pd.util.hash_pandas_object(item).to_numpy()).data)
        elif isinstance(item, Mapping):
            found.update(digest(*(part for pair in item.items() for part in pair)).encode())
        elif isinstance(item, list | tuple | frozenset):
            found.update(digest(*(sorted(item) if isinstance(item, frozenset) else item)).encode())
        elif hasattr(item, "__dataclass_fields__"):
            found.update(digest(vars(item)).encode())
        else:
            found.update(json.dumps(item, default=str).encode())
    return found.hexdigest()
