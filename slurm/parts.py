"""The parts of a submitted sweep: one run directory a series, each written by a job of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringtap.errors import UsageError
from ringtap.records import read_json_lines
from ringtap.rundir import RunDirectory, read_json
from ringtap.slurm.paths import SubmitPaths


@dataclass(frozen=True)
class Part:
    """One series of a submitted sweep, as far as it is measured.

    Attributes:
        index: its place in the plan, and in the job array.
        series: its name.
        path: its run directory; need not be there yet.
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


def part_path(paths: SubmitPaths, index: int, series: str) -> Path:
    """The run directory of a series."""
    return paths.parts / f"{index:03d}-{series}"


def read_parts(run: RunDirectory) -> list[Part]:
    """All parts of a submitted sweep, in the plan's order; those that are being written as far as they have come.

    Raises:
        UsageError: the run is no submitted sweep, or a file of a part is damaged.
    """
    plan, paths = run.info.get("plan"), SubmitPaths(run.path)
    if run.info.get("kind") != "sweep" or not isinstance(plan, dict) or not paths.folder.is_dir():
        raise UsageError(f"{run.path} is no submitted sweep: ringtap submit PLAN.toml makes one")
    series = [f"{model['name']}-{kind}" for model in plan["models"] for kind in plan["traffic"]]
    return [_read_part(part_path(paths, index, name), index, name, plan["loads"]) for index, name in enumerate(series)]


def _read_part(path: Path, index: int, series: str, loads: list[float]) -> Part:
    info = read_json(path / "run.json") if (path / "run.json").is_file() else {}
    points, rejected = (read_json_lines(path / f"{name}.jsonl")[0] for name in ("points", "rejected"))
    done = {point.get("step") for point in points}
    missing = tuple(load for step, load in enumerate(loads) if step not in done)
    return Part(index, series, path, info, points, rejected, missing)
