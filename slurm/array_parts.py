"""Parts of a submitted sweep: one run directory per series, each written by its own job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringtap.errors import UsageError
from ringtap.json_validation import ShapeError, check
from ringtap.rundir import RunDirectory, read_points
from ringtap.schema import RUN_JSON
from ringtap.slurm.paths import SubmitPaths


@dataclass(frozen=True)
class Part:
    """One series of a submitted sweep, as far as it is measured.

    Attributes:
        index: its place in the plan, and in the job array.
        series: its name.
        path: its run directory; may not exist yet.
        info: the run directory's run.json; empty where there is none.
        points: the windows measured.
        rejected: the windows that were measured again.
        missing: loads of the plan (shares of the capacity) that have no point.
    """

    index: int
    series: str
    path: Path
    info: dict[str, Any]
    points: list[dict[str, Any]]
    rejected: list[dict[str, Any]]
    missing: tuple[float, ...]


def part_paths(run: RunDirectory) -> list[tuple[str, Path]]:
    """The series of a submitted sweep in the plan's order, each with its run directory.

    Raises:
        UsageError: the run is no submitted sweep.
    """
    paths = SubmitPaths(run.path)
    if run.info.get("kind") != "sweep" or not paths.folder.is_dir():
        raise UsageError(f"{run.path} is no submitted sweep: ringtap submit PLAN.toml makes one")
    names = planned_series(whole_plan(run))
    return [(name, paths.parts / f"{index:03d}-{name}") for index, name in enumerate(names)]


def planned_series(plan: dict[str, Any]) -> list[str]:
    """The names of a plan's series, in the order in which they are measured."""
    return [f"{model['name']}-{kind}" for model in plan["models"] for kind in plan["traffic"]]


def whole_plan(run: RunDirectory) -> dict[str, Any]:
    """The plan of a sweep, with its models, kinds of traffic and loads.

    Raises:
        UsageError: run.json has none.
    """
    plan: dict[str, Any] | None = run.info.get("plan")
    try:
        check(plan, {"models": list, "traffic": list, "loads": list}, "its plan")
    except ShapeError as error:
        raise UsageError(f"{run.path / 'run.json'} cannot be used: {error}") from error
    return plan or {}


def read_parts(run: RunDirectory) -> list[Part]:
    """Read all parts of a submitted sweep in the plan's order; a part being written, as far as it is written.

    Raises:
        UsageError: the run is no submitted sweep, or a file of a part is damaged.
    """
    parts = enumerate(part_paths(run))
    loads = whole_plan(run)["loads"]
    return [_read_part(path, index, name, loads) for index, (name, path) in parts]


def _read_part(path: Path, index: int, series: str, loads: list[float]) -> Part:
    info = RunDirectory.open(path).info if (path / RUN_JSON).is_file() else {}
    points, rejected = (read_points(path / f"{name}.jsonl")[0] for name in ("points", "rejected"))
    done = {point.get("step") for point in points}
    missing = tuple(load for step, load in enumerate(loads) if step not in done)
    return Part(index, series, path, info, points, rejected, missing)
