"""Event logs for TensorBoard: the times, bytes and counters of each iteration, rank and node as scalars.

A log is a file of records: ``tensorboard.Event`` messages, each with its length and checksums. TensorBoard shows each
folder with a log as a run, and the part of a tag before the first ``/`` as a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from ringtap.analysis.export.tables import Export, ExportedTable, nothing, replacing
from ringtap.analysis.job.run import Job
from ringtap.analysis.runs.apportioning import Integers
from ringtap.analysis.sweeps.points import ordered_windows
from ringtap.analysis.sweeps.sweep import Sweep

# TensorBoard reads files with "tfevents" in their names; a name of ringtap's own lets an export replace its own only
_EVENTS = "events.out.tfevents.ringtap-{table}"
_VERSION = "brain.Event:2"


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
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import RecordWriter

    scalars = curves.rows.select_dtypes(["float64", "Float64"])
    tags = [f"{curves.table}/{name}" for name in scalars]
    values = scalars.to_numpy(np.float64, na_value=np.nan)
    writer = RecordWriter(str(path))
    try:
        writer.write(Event(wall_time=curves.t_ns[0] / 1e9, file_version=_VERSION).SerializeToString())
        for step, t_ns, row in zip(curves.steps.tolist(), curves.t_ns.tolist(), values.tolist(), strict=True):
            known = [(tag, value) for tag, value in zip(tags, row, strict=True) if not math.isnan(value)]
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in known])
            writer.write(Event(wall_time=t_ns / 1e9, step=step, summary=summary).SerializeToString())
    finally:
        writer.close()
