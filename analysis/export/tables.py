"""Writes the tables of a run as Parquet files, CSV files and a DuckDB database, in batches.

Arrow carries each table: integers stay integers, times are nanoseconds as 64-bit integers, and unknown values are null.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import csv, parquet

from ringtap.analysis.job.collector_tables import SampleLog, log_names, logs_of, sample_attrs
from ringtap.analysis.job.run import Job
from ringtap.analysis.runs.node_batches import TABLES
from ringtap.analysis.runs.sockets import address_text
from ringtap.analysis.sweeps.sharing import is_sharing, sharing_points, sharing_tables
from ringtap.analysis.sweeps.sweep import Sweep
from ringtap.core.errors import UsageError

JOB_TABLES = (
    *("phases", "iterations", "rank_iterations", "ranks", "flows", "socket_iterations", "byte_accounts"),
    *("node_iterations", "epochs", "collectors"),
)
SWEEP_TABLES = ("points", "iterations")
# before the name of a log, in the name of its table: samples_host, samples_gpu_gpu0
SAMPLES = "samples_"
_BATCH_ROWS = 1 << 16


@dataclass(frozen=True)
class ExportTable:
    """A table of a run, whose rows are read while they are written.

    Attributes:
        name: name of the table.
        schema: columns and their types; its metadata give pandas back its own types and ``attrs``.
        attrs: units and meaning of the columns, as in Python.
        parts: its rows, part by part.
    """

    name: str
    schema: pa.Schema
    attrs: dict[Any, Any]
    parts: Iterator[pd.DataFrame]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows."""
        for part in self.parts:
            for begin in range(0, len(part), _BATCH_ROWS):
                rows = part.iloc[begin : begin + _BATCH_ROWS].reindex(columns=self.schema.names)
                table = pa.Table.from_pandas(rows, schema=self.schema, preserve_index=False)
                yield from table.combine_chunks().to_batches()


@dataclass(frozen=True)
class ExportedTable:
    """A table that was written.

    Attributes:
        name: name of the table.
        rows: number of rows.
        size_bytes: size of its files; None for a table of a database.
    """

    name: str
    rows: int
    size_bytes: int | None


@dataclass(frozen=True)
class Export:
    """Result of an export.

    Attributes:
        tables: the tables that were written.
        left_out: name of each table that the run does not have -> the reason.
    """

    tables: list[ExportedTable] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def write_parquet(run: Job | Sweep, folder: Path) -> Export:
    """Write each table of a run as a Parquet file of a folder."""
    return _write_files(run, folder, ".parquet", parquet.ParquetWriter)


def write_csv(run: Job | Sweep, folder: Path) -> Export:
    """Write each table of a run as a CSV file of a folder; unknown values are empty cells."""
    return _write_files(run, folder, ".csv", csv.CSVWriter)


def _write_files(run: Job | Sweep, folder: Path, suffix: str, open_writer: Callable[[Path, pa.Schema], Any]) -> Export:
    export = Export()
    for table in _tables(run, export.left_out):
        folder.mkdir(parents=True, exist_ok=True)
        path, rows = folder / f"{table.name}{suffix}", 0
        with replacing(path) as temporary, open_writer(temporary, table.schema) as writer:
            for batch in table.batches():
                writer.write_batch(batch)
                rows += batch.num_rows
        export.tables.append(ExportedTable(table.name, rows, path.stat().st_size))
    return export


def write_duckdb(run: Job | Sweep, path: Path) -> Export:
    """Write the tables of a run into a DuckDB database; comments on its columns say what they mean.

    Raises:
        UsageError: DuckDB cannot write the file.
    """
    import duckdb

    export = Export()
    try:
        with replacing(path) as temporary, duckdb.connect(str(temporary)) as database:
            for table in _tables(run, export.left_out):
                name = _quoted(table.name)
                database.register("batches", pa.RecordBatchReader.from_batches(table.schema, table.batches()))
                database.execute(f"CREATE TABLE {name} AS SELECT * FROM batches").fetchall()
                database.unregister("batches")
                for column, meaning in table.attrs["columns"].items():
                    unit = table.attrs["units"].get(column)
                    comment = _quoted(f"{meaning} [{unit}]" if unit and unit not in meaning else meaning, "'")
                    database.execute(f"COMMENT ON COLUMN {name}.{_quoted(column)} IS {comment}").fetchall()
                ((rows,),) = database.execute(f"SELECT count(*) FROM {name}").fetchall()
                export.tables.append(ExportedTable(table.name, rows, None))
    except duckdb.Error as error:
        raise UsageError(f"{path} cannot be written: DuckDB says: {str(error).splitlines()[0]}") from error
    return export


def _quoted(text: str, mark: str = '"') -> str:
    """Return a name, or with ``'`` a text, in SQL."""
    return mark + text.replace(mark, 2 * mark) + mark


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the name of a temporary file beside a path; move it there at the end, and remove it after an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _tables(run: Job | Sweep, left_out: dict[str, str]) -> Iterator[ExportTable]:
    """Yield the tables of a run; add the names of those that it does not have to ``left_out``, with the reasons.

    Raises:
        UsageError: the run has none of its tables.
    """
    any_found = False
    for name, read in _readers(run).items():
        try:
            table = read()
        except UsageError as error:
            left_out[name] = str(error)
            continue
        if table is None:
            left_out[name] = "it has no rows"
        else:
            any_found = True
            yield table
    if not any_found:
        raise nothing(run, left_out)


def nothing(run: Job | Sweep, left_out: Iterable[str]) -> UsageError:
    """Return the error about a run that has none of its tables."""
    return UsageError(f"{run.path} has nothing to export: there are no rows in {', '.join(left_out)}")


def _readers(run: Job | Sweep) -> Mapping[str, Callable[[], ExportTable | None]]:
    """Return the function that reads each table, which gives None if the table is empty."""
    if isinstance(run, Job):
        logs = {SAMPLES + log.replace("/", "_"): log for log in _logs(run)}
        parts_of = {name: partial(_whole, run, name) for name in JOB_TABLES}
        if run.logs.batches.is_long:
            parts_of |= {name: partial(run.logs.in_batches, name) for name in TABLES}
        return {name: partial(_parted, name, parts) for name, parts in parts_of.items()} | {
            name: partial(_sampled, name, run, log) for name, log in logs.items()
        }
    if is_sharing(run.run):
        tables = sharing_tables(sharing_points(run.run))
        return {name: partial(_parted, name, partial(iter, [table])) for name, table in tables.items()}
    return {name: partial(_parted, name, partial(_whole, run, name)) for name in SWEEP_TABLES}


def _logs(job: Job) -> list[str]:
    """Return the names of the logs of samples, and of the collectors that should have written one."""
    names = log_names(job.logs.nodes)
    have = {name.partition("/")[0] for name in names} | {"steps", "clock", "packets"}
    return names + sorted({name for node in job.logs.nodes.values() for name in node.collectors} - have)


def _whole(run: Job | Sweep, name: str) -> Iterator[pd.DataFrame]:
    yield getattr(run, name)


def _parted(name: str, parts: Callable[[], Iterator[pd.DataFrame]]) -> ExportTable | None:
    """Return a table of one frame, or of a long run, which is in files, batch by batch; None if it is empty."""
    first = next((table for table in parts() if len(table)), None)
    if first is None:
        return None
    return _table(name, [pa.Schema.from_pandas(first, preserve_index=False)], first.attrs, parts())


def check_length(job: Job, most_steps: int, what: str) -> None:
    """Refuse a run that is too long for a format, before it is analyzed.

    Raises:
        UsageError: its ranks have more steps.
    """
    if job.logs.recorded_steps > most_steps:
        raise UsageError(
            f"{job.path} has {job.logs.recorded_steps:,} steps of its ranks, and {what} of up to {most_steps:,} can be "
            "written: --to parquet, csv and duckdb write a run of any length"
        )


def _sampled(name: str, job: Job, log: str) -> ExportTable | None:
    """Return the samples of a log, with addresses as text and ports as numbers; None if it is empty."""
    logs = logs_of(job.logs.nodes, log)
    schemas = [pa.Schema.from_pandas(_readable(one, slice(0)), preserve_index=False).remove_metadata() for one in logs]
    parts = (
        _readable(one, slice(begin, begin + _BATCH_ROWS)) for one in logs for begin in range(0, len(one), _BATCH_ROWS)
    )
    return _table(name, schemas, sample_attrs(logs), parts)


def _table(
    name: str, schemas: Sequence[pa.Schema], attrs: dict[Any, Any], parts: Iterator[pd.DataFrame]
) -> ExportTable:
    """Return a table whose columns are those of all schemas.

    Raises:
        UsageError: a column has types in them that no type includes.
    """
    # a column of objects without a value is one of texts
    fields = [[one.with_type(pa.string()) if pa.types.is_null(one.type) else one for one in each] for each in schemas]
    try:
        schema = pa.unify_schemas([pa.schema(each) for each in fields], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UsageError(f"the logs of its nodes differ: {error}") from error
    metadata = {**(schemas[0].metadata or {}), b"PANDAS_ATTRS": json.dumps(attrs).encode()}
    return ExportTable(name, schema.with_metadata(metadata), attrs, parts)


def _readable(log: SampleLog, rows: slice) -> pd.DataFrame:
    """Return samples of a log with raw bytes as numbers (ports) and as text (addresses)."""
    table = log.table(rows)
    for item in log.log.file.fields:
        if item.type == "V2":
            table[item.name] = np.array([int.from_bytes(raw, "big") for raw in table[item.name]], np.uint16)
        elif item.type == "V16" and "family" in table:
            texts = [address_text(family, raw) for family, raw in zip(table["family"], table[item.name], strict=True)]
            table[item.name] = pd.Series(texts, dtype=object)
        elif item.type.startswith("V"):
            table[item.name] = pd.Series([raw.hex() for raw in table[item.name]], dtype=object)
    return table
