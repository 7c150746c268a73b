"""Reads the parts of a submitted sweep: one run directory per series, each written by its own job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringtap.core.errors import UsageError
from ringtap.core.json_validation import ShapeError, check
from ringtap.core.run_directory import RunDirectory, read_points
from ringtap.core.run_directory_schema import RUN_JSON, VARIANTS
from ringtap.core.sweep_plans.training_jobs import series_name
from ringtap.slurm.submission_file_names import SubmitPaths


@dataclass(frozen=True)
class Part:
    """One series of a submitted sweep, with the points measured so far.

    Attributes:
        index: index of the series in the plan and in the job array.
        series: name of the series.
        path: run directory of the series; may not exist yet.
        info: content of its run.json; empty if there is none.
        points: the measured windows.
        rejected: the windows that were measured again.
        missing: loads without a point, as shares of the capacity: those of the plan, or the next one that was chosen.
    """

    index: int
    series: str
    path: Path
    info: dict[str, Any]
    points: list[dict[str, Any]]
    rejected: list[dict[str, Any]]
    missing: tuple[float, ...]


def part_paths(run: RunDirectory) -> list[tuple[str, Path]]:
    """Return the series of a submitted sweep in the plan's order, each with its run directory.

    Raises:
        UsageError: the run is not a submitted sweep.
    """
    paths = SubmitPaths(run.path)
    if run.info.get("kind") != "sweep" or not paths.folder.is_dir():
        raise UsageError(f"{run.path} is not a submitted sweep: ringtap submit PLAN.toml makes one")
    names = planned_series(whole_plan(run))
    return [(name, paths.parts / f"{index:03d}-{name}") for index, name in enumerate(names)]


def planned_series(plan: dict[str, Any]) -> list[str]:
    """Return the names of a plan's series, in the order in which they are measured."""
    models = [[model.get(key) or "" for key in ("name", *VARIANTS)] for model in plan["models"]]
    return [series_name(name, kind, *rest) for name, *rest in models for kind in plan["traffic"]]


def whole_plan(run: RunDirectory) -> dict[str, Any]:
    """Return the plan of a sweep, with its models, kinds of traffic and loads.

    Raises:
        UsageError: run.json has no valid plan.
    """
    plan: dict[str, Any] | None = run.info.get("plan")
    try:
        check(plan, {"models": list, "traffic": list, "loads": list}, "its plan")
    except ShapeError as error:
        raise UsageError(f"{run.path / 'run.json'} cannot be used: {error}") from error
    return plan or {}


def read_parts(run: RunDirectory) -> list[Part]:
    """Read all parts of a submitted sweep in the plan's order, including incomplete ones.

    Raises:
        UsageError: the run is not a submitted sweep, or a file of a part is damaged.
    """
    parts = enumerate(part_paths(run))
    plan = whole_plan(run)
    return [_read_part(path, index, name, plan) for index, (name, path) in parts]


def missing_loads(plan: dict[str, Any], info: dict[str, Any], series: str, done: set[int | None]) -> tuple[float, ...]:
    """Return the loads of a series that are still to be measured, as far as they are known.

    Args:
        plan: the plan.
        info: content of the run.json of the run that measures the series.
        series: name of the series.
        done: steps that have a point.
    """
    missing = tuple(load for step, load in enumerate(plan["loads"]) if step not in done)
    next_load = (info.get("chosen_loads") or {}).get(series, {}).get("load")
    return missing if missing or next_load is None else (next_load,)


def _read_part(path: Path, index: int, series: str, plan: dict[str, Any]) -> Part:
    info = RunDirectory.open(path).info if (path / RUN_JSON).is_file() else {}
    points, rejected = (read_points(path / f"{name}.jsonl")[0] for name in ("points", "rejected"))
    done = {point.get("step") for point in points}
    missing = missing_loads(plan, info, series, done)
    return Part(index, series, path, info, points, rejected, missing)
