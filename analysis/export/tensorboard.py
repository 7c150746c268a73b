"""Writes event logs for TensorBoard: times, bytes and counters of each iteration, rank and node as scalars.

A log is a TFRecord file of ``tensorboard.Event`` messages (event.proto and summary.proto of TensorBoard, in protobuf's
encoding). They are encoded here: the packages that write them import torch, which takes seconds. TensorBoard shows
each folder with a log as a run, and the part of a tag before the first ``/`` as a group.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from ringtap.analysis.export.tables import Export, ExportedTable, check_length, nothing, replacing
from ringtap.analysis.job.run import Job
from ringtap.analysis.runs.samples_to_iterations import Integers
from ringtap.analysis.sweeps.points import ordered_windows
from ringtap.analysis.sweeps.sweep import Sweep

# TensorBoard reads files with "tfevents" in their names; a name of ringtap's own lets an export replace its own only
_EVENTS = "events.out.tfevents.ringtap-{table}"
# steps of all ranks of a job, whose tables are held in memory: about 1 kB each
MAX_STEPS = 1_000_000
_VERSION = b"brain.Event:2"


class _Curves(NamedTuple):
    """Rows of one table that make one run of TensorBoard: its folder, their steps, and their times."""

    folder: str
    table: str
    rows: pd.DataFrame
    steps: Integers
    t_ns: Integers


def write_tensorboard(run: Job | Sweep, folder: Path) -> Export:
    """Write event logs: of a job by number of the iteration, of a sweep by load in Mbit/s.

    A scalar is a column of floating-point numbers. TensorBoard keeps them with 32 bits. Unknown values have no point.

    Raises:
        UsageError: the run has no such rows.
    """
    import crc32c  # noqa: F401  # where it is missing, say so before a folder is made

    rows: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for curves in _of_job(run) if isinstance(run, Job) else _of_sweep(run):
        path = folder / curves.folder / _EVENTS.format(table=curves.table)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            _write(temporary, curves)
        rows[curves.table] = rows.get(curves.table, 0) + len(curves.rows)
        sizes[curves.table] = sizes.get(curves.table, 0) + path.stat().st_size
    wanted = ("iterations", "rank_iterations", "node_iterations") if isinstance(run, Job) else ("points",)
    left_out = {name: "it has no rows" for name in wanted if name not in rows}
    if not rows:
        raise nothing(run, left_out)
    return Export([ExportedTable(name, count, sizes[name]) for name, count in rows.items()], left_out)


def _of_job(job: Job) -> Iterator[_Curves]:
    check_length(job, MAX_STEPS, "event logs")
    iterations = job.iterations
    if not len(iterations):
        return
    ends_ns = iterations["end_ns"].to_numpy(np.int64)
    yield _Curves("job", "iterations", iterations, iterations["iteration"].to_numpy(np.int64), ends_ns)
    for rank, rows in job.rank_iterations.groupby("rank"):
        steps, t_ns = (rows[name].to_numpy(np.int64) for name in ("iteration", "end_ns"))
        yield _Curves(f"rank{rank}", "rank_iterations", rows, steps, t_ns)
    for node, rows in job.node_iterations.groupby("node"):
        steps = rows["iteration"].to_numpy(np.int64)
        yield _Curves(f"node-{node}", "node_iterations", rows, steps, ends_ns[steps])


def _of_sweep(sweep: Sweep) -> Iterator[_Curves]:
    points = sweep.points
    ends_ns = np.array([window["window_end_ns"] for window in ordered_windows(sweep.run)], np.int64)
    known = points[points["cross_gbps"].notna()]
    for series, rows in known.groupby("series", sort=False):
        steps = (rows["cross_gbps"].to_numpy(np.float64) * 1e3).round().astype(np.int64)
        yield _Curves(str(series), "points", rows, steps, ends_ns[rows["point"].to_numpy(np.int64)])


def _write(path: Path, curves: _Curves) -> None:
    """Write the event log of some curves: one event per row, with a value per known scalar."""
    scalars = curves.rows.select_dtypes(["float64", "Float64"])
    # Summary.Value: tag = 1 (string), simple_value = 2 (float)
    tags = [_field(0x0A, f"{curves.table}/{name}".encode()) + b"\x15" for name in scalars]
    values = scalars.to_numpy(np.float64, na_value=np.nan)
    with path.open("wb") as file:
        file.write(_record(_event(int(curves.t_ns[0]), 0) + _field(0x1A, _VERSION)))
        for step, t_ns, row in zip(curves.steps.tolist(), curves.t_ns.tolist(), values, strict=True):
            known = np.flatnonzero(~np.isnan(row)).tolist()
            packed = row.astype("<f4")
            summary = b"".join(_field(0x0A, tags[number] + packed[number].tobytes()) for number in known)
            file.write(_record(_event(t_ns, step) + _field(0x2A, summary)))


def _event(t_ns: int, step: int) -> bytes:
    """Return the beginning of an event: wall_time = 1 (double), step = 2 (int64)."""
    return struct.pack("<Bd", 0x09, t_ns / 1e9) + b"\x10" + _varint(step)


def _field(key: int, content: bytes) -> bytes:
    """Return a field of bytes: its key (number and wire type), its length and its content."""
    return bytes([key]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def _record(message: bytes) -> bytes:
    """Return a record: the length, its checksum, the message, its checksum."""
    length = struct.pack("<Q", len(message))
    return length + _checksum(length) + message + _checksum(message)


def _checksum(data: bytes) -> bytes:
    """Return the masked CRC-32C of a TFRecord: rotated right by 15 bits, plus a constant."""
    from crc32c import crc32c

    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
