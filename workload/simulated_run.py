"""Writes a run directory of simulated iterations in the form of a sweep's, for reports and fits beside measurements."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ringtap.core.append_only_logs import Field, JsonLinesWriter, RecordWriter
from ringtap.core.errors import UsageError, file_errors
from ringtap.core.json_validation import NAME
from ringtap.core.run_directory import RunDirectory
from ringtap.core.run_directory_schema import POINTS_JSONL, SIMULATED, STEP_COLUMNS
from ringtap.core.thesis_neural_networks import GRADIENT_BYTES, PROFILES
from ringtap.workload.execution_trace import Collective, NodeType
from ringtap.workload.simulate_under_cross_traffic import SimulatedPoint
from ringtap.workload.workload import Workload, kind_of, size_of

_SUMS = {Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE_SCATTER_BLOCK}
_STEP_FIELDS = [
    Field(name, "<i8", "ns", "time") if name.endswith("_ns") else Field(name, "<i8", "", "index")
    for name in STEP_COLUMNS
]
_PAUSE_NS = 10**9  # between two points
_NOT_COLLECTED = {
    "machines, links and counters": "the iterations are simulated: rates at the bottleneck are those of the simulation",
    "spread under constant cross traffic": "a simulated iteration under a constant load takes the same time again",
}


def parameters_of(workload: Workload) -> int:
    """Return the parameters of a data-parallel model, by the gradients that rank 0 sums up in an iteration.

    Raises:
        UsageError: it sums up nothing.
    """
    sums = [node for node in workload.traces[0] if node.type == NodeType.COMM_COLL and kind_of(node) in _SUMS]
    size_bytes = sum(map(size_of, sums))
    if size_bytes < GRADIENT_BYTES:
        raise UsageError(
            "a run directory needs the parameters of the model, but rank 0 sums up no gradients: leave out -o, or "
            "simulate a workload with all-reduces or reduce-scatters"
        )
    return size_bytes // GRADIENT_BYTES


def write_run(
    path: Path, name: str, workload: Workload, points: Sequence[SimulatedPoint], rate_bps: float, about: dict[str, Any]
) -> None:
    """Write the run directory of simulated points.

    Args:
        path: the directory, empty or absent.
        name: name of the workload.
        workload: the workload.
        points: its points, under one kind of cross traffic or several.
        rate_bps: rate of the bottleneck.
        about: topology and algorithms, for run.json.

    Raises:
        UsageError: the parameters are not known, a name cannot be that of a file, or the directory is not empty or
            cannot be written.
    """
    model = str(workload.about.get("model") or name)
    title = PROFILES[model].title if model in PROFILES else model
    kinds = list(dict.fromkeys(point.traffic for point in points))
    unusable = next((kind for kind in kinds if not re.fullmatch(NAME.pattern, f"{model}-{kind}")), None)
    if unusable is not None:
        raise UsageError(
            f"series {f'{model}-{unusable}'[:80]!r} is not {NAME.description}: rename the model or the plan's kind"
        )
    batch = workload.about.get("batch")
    item = {"name": model, "title": title, "parameters": parameters_of(workload)}
    item |= {"batch": batch if type(batch) is int and batch > 0 else None}
    plan = {"name": f"{name}, simulated", "scale": 1.0, "capacity_bps": rate_bps, "models": [item], "traffic": kinds}
    plan |= {"topology": {"workers": [f"rank{rank}" for rank in range(workload.ranks)]}}
    plan |= {"loads": sorted({point.requested_bps / rate_bps for point in points})}
    bottleneck = {"cross": SIMULATED, "total": SIMULATED}
    run = RunDirectory.create(
        path, "sweep", sys.argv, 0, plan=plan, bottleneck=bottleneck, simulated=about | {"rate_bps": rate_bps}
    )
    run.info["not_collected"] = [{"what": what, "why": why} for what, why in _NOT_COLLECTED.items()]
    with file_errors(path, "cannot be written"):
        lines = JsonLinesWriter(path / POINTS_JSONL)
        for kind in kinds:
            _write_series(run, f"{model}-{kind}", model, [point for point in points if point.traffic == kind], lines)
        lines.close()
        run.finish("complete")


def _write_series(
    run: RunDirectory, series: str, model: str, points: Sequence[SimulatedPoint], lines: JsonLinesWriter
) -> None:
    """Write the steps of the ranks, one point after the other, and the windows of the points."""
    directory, begin_ns, parts = f"series/{series}-1", int(run.info["created_ns"]), []
    for step, point in enumerate(points):
        ends_ns = begin_ns + np.rint(point.simulated.end_s * 1e9).astype(np.int64)
        window_ns = ends_ns[[0, -1]].max(axis=1).tolist()
        lines.append(
            {"series": series, "model": model, "traffic": point.traffic, "directory": directory, "step": step}
            | {"requested_bps": point.requested_bps, "window_start_ns": window_ns[0], "window_end_ns": window_ns[1]}
            | {"iterations": len(ends_ns) - 1, "cross_bps": point.cross_bps}
            | {"total_bps": point.cross_bps + point.training_bps}
        )
        parts.append(ends_ns)
        begin_ns = window_ns[1] + _PAUSE_NS
    for rank, ends_ns in enumerate(np.concatenate(parts).T):
        path = run.path / directory / "nodes" / SIMULATED / "steps" / f"rank{rank}-{rank + 1}.rec"
        writer = RecordWriter(path, _STEP_FIELDS, {"rank": rank})
        steps = np.arange(len(ends_ns))
        writer.append_packed(np.column_stack([steps, 0 * steps, *[ends_ns] * 4]).astype("<i8").tobytes())
        writer.close()
