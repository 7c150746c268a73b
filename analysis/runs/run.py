"""Run directories as typed tables (docs/reference/run-directory.md is the contract)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ringtap.arguments import path_of
from ringtap.errors import UsageError
from ringtap.json_validation import ShapeError, check, open_regular, whole
from ringtap.records import RecordFile
from ringtap.rundir import RunDirectory, open_log, process_age_ns, read_points
from ringtap.schema import POINTS_JSONL, RUN_JSON

# a restarted process with the same pid (in a new process namespace) has a number at the end
_STEP_FILE = re.compile(r"rank([0-9]{1,9})-([0-9]{1,9})(?:-[0-9]+)?\.rec")
_DDP_SUFFIX = ".ddp.rec"
_STEP_COLUMNS = {"node": "object", "rank": "int64", "pid": "int64", "process": "int64"}
_STEP_COLUMNS |= dict.fromkeys(("optimizer", "step", "start_ns", "end_ns", "start_mono_ns", "end_mono_ns"), "int64")
_STEP_COLUMNS |= {"kind": "int64", "backwards": "int64", "pause_ns": "int64", "age_ns": "int64"}
_MAX_HEADER_BYTES = 8 << 20
# `kind` of a step record
STEP, SKIPPED, MARK = 0, 1, 2
_SWEEP_PLAN = {"scale": float, "capacity_bps": float, "topology": dict, "models": [{"parameters": int}]}
Records = npt.NDArray[Any]


def map_records(path: Path) -> tuple[RecordFile | None, Records, int]:
    """Map a record file into memory without reading it; raw bytes (``V16``) come as NumPy voids.

    Returns:
        The header (None if the job was killed while writing it), the records as a structured array, and the number
        of torn last records (0 or 1).

    Raises:
        FileNotFoundError: the file is missing.
        UsageError: the file cannot be read, is not a record file, is of a newer version, or its content does not match
            its name.
    """
    try:
        with open_regular(path) as stream:
            torn_header = not stream.readline(_MAX_HEADER_BYTES).endswith(b"\n")
        if torn_header:
            return None, np.empty(0, np.dtype([("t_ns", "<i8")])), 1
        file = open_log(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    dtype = np.dtype([(field.name, field.type) for field in file.fields])
    if file.count < 1:
        return file, np.empty(0, dtype), int(file.torn_bytes > 0)
    records = np.memmap(path, dtype=dtype, mode="r", offset=file.offset, shape=(file.count,))
    return file, records, int(file.torn_bytes > 0)


def read_records(path: Path) -> tuple[pd.DataFrame, int]:
    """Read a record file.

    Returns:
        The records, one column per field with its type, and the number of torn last records (0 or 1). Fields of raw
        bytes, such as addresses and ports, are ``bytes`` in network order: ``int.from_bytes(sport, "big")`` is a port.

    Raises:
        UsageError: not a record file, one of a newer version, or a header that contradicts itself.
    """
    file, records, torn = map_records(path)
    if file is None:
        return pd.DataFrame(), torn
    return pd.DataFrame({name: _column(records[name]) for name in records.dtype.names or ()}), torn


def _column(values: Records) -> Records:
    """Copy a column into memory, with NumPy's voids as ``bytes``, because pandas cannot hold voids."""
    if values.dtype.kind != "V":
        return np.array(values)
    column = np.empty(len(values), object)
    column[:] = [bytes(value) for value in values]
    return column


class JobRun:
    """One job's run directory.

    Attributes:
        path: the directory.
        info: its run.json; empty if the job was killed before writing it.
        torn: torn last records dropped so far, by file relative to ``path``; grows as tables are read.
    """

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        self.path = path
        self.info = info
        self.torn: dict[str, int] = {}

    @cached_property
    def step_files(self) -> list[Path]:
        """Step logs of the ranks; ``process`` in `steps` is an index into this list."""
        found = sorted(self.path.glob("nodes/*/steps/*.rec"))
        return [path for path in found if not path.name.endswith(_DDP_SUFFIX)]

    @cached_property
    def steps(self) -> pd.DataFrame:
        """Optimizer steps of all ranks, one row per step.

        Columns: ``node``, ``rank``, ``pid``, ``process`` (number of its file), ``optimizer``, ``step``, then
        ``start_ns`` and ``end_ns`` (CLOCK_REALTIME), ``start_mono_ns`` and ``end_mono_ns`` (CLOCK_MONOTONIC), ``kind``
        (0 a step, 1 a step that AMP skipped, 2 a mark set by the program), ``backwards`` (backward passes since the
        previous record of this process), ``pause_ns`` (pause after the step, by a grid of iterations) and ``age_ns``
        (age of the process at its first record). The last three are 0 in logs without them.
        """
        table, torn = read_steps(dict(enumerate(self.step_files)))
        self.torn |= {str(path.relative_to(self.path)): 1 for path in torn}
        return table

    @cached_property
    def ranks(self) -> int:
        """Number of ranks with recorded steps."""
        return int(self.steps["rank"].nunique())

    @cached_property
    def iterations(self) -> pd.DataFrame:
        """Iterations of the job, one row each, in order of time, as defined by `iterations_of`.

        Columns: ``generation``, ``step``, ``start_ns``, ``end_ns`` (CLOCK_REALTIME) and ``iteration_s``, which is by
        CLOCK_MONOTONIC and so not affected by a clock that is set during the run.
        """
        steps = self.steps
        steady = {f"steady_{side}_ns": monotonic(steps, side) for side in ("start", "end")}
        return iterations_of(iteration_marks(steps.assign(**steady)))


def read_steps(files: Mapping[int, Path]) -> tuple[pd.DataFrame, list[Path]]:
    """Read step logs of ranks.

    Args:
        files: the logs by number of the process.

    Returns:
        The table of `JobRun.steps`, and the logs that end in a torn record, which was dropped.

    Raises:
        UsageError: a log cannot be read or has another name.
    """
    parts, torn_files = [], []
    for number, path in files.items():
        match = _STEP_FILE.fullmatch(path.name)
        if match is None:
            raise UsageError(f"{path} is not named rank<R>-<pid>.rec")
        try:
            table, torn = read_records(path)
        except FileNotFoundError as error:  # a dangling symbolic link
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        torn_files += [path] * torn
        if len(table):
            about: dict[str, Any] = {"node": whole(path.parent.parent.name), "process": number}
            about["age_ns"] = process_age_ns(open_log(path))
            parts.append(table.assign(rank=int(match[1]), pid=int(match[2]), **about))
    if not parts:
        return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in _STEP_COLUMNS.items()}), torn_files
    steps = pd.concat(parts, ignore_index=True)
    absent = dict.fromkeys(("kind", "backwards", "pause_ns"), 0)
    steps = steps.assign(**{name: 0 for name in absent if name not in steps}).fillna(absent)
    return steps.astype(_STEP_COLUMNS)[list(_STEP_COLUMNS)], torn_files


def monotonic(steps: pd.DataFrame, side: str) -> pd.Series[int]:
    """Return the times of steps by CLOCK_MONOTONIC, shifted to each node's first CLOCK_REALTIME.

    Args:
        steps: as `JobRun.steps`.
        side: ``start`` or ``end``.
    """
    first = steps.loc[steps.groupby("node")["start_mono_ns"].idxmin()].set_index("node")
    origin = first["start_ns"] - first["start_mono_ns"]
    return steps[f"{side}_mono_ns"] + steps["node"].map(origin).astype("int64")


def iteration_marks(steps: pd.DataFrame) -> pd.DataFrame:
    """Return the step records that end an iteration of their rank.

    If a process marks its steps itself, the marks count; else the steps of the optimizer that stepped first, including
    those that AMP skipped. A restarted rank begins a new generation. Of several processes that ran at the same time
    under one rank, which are therefore not ranks of one process group, only one counts.

    Args:
        steps: as `JobRun.steps`.

    Returns:
        The rows of ``steps`` that count, by process and time, with ``index`` (0 for a process's first), ``generation``,
        ``skipped`` (AMP skipped a step since the previous mark), ``backwards`` (passes since the previous mark) and
        ``optimizers`` (number of optimizers of the process).
    """
    return marks_and_processes(steps)[0]


def marks_and_processes(steps: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the result of `iteration_marks`, and the processes that stepped.

    Args:
        steps: as `JobRun.steps`.

    Returns:
        The marks; and by number of the process ``node``, ``rank``, ``pid``, ``steps`` (those that end an iteration),
        ``generation`` (number of earlier starts of the rank), ``alone`` (no other process of this rank ran at the same
        time), ``counts`` (alone, or the one with the most steps of several such processes) and ``median_s`` (time from
        step to step, for processes that are not alone).
    """
    marks = process_marks(steps)
    found = join_processes(process_rows(steps, marks))
    marks = marks[marks["process"].map(found["counts"]).astype(bool)]
    marks = marks.assign(generation=marks["process"].map(found["generation"]).astype("int64"))
    return marks.reset_index(drop=True), found


def process_marks(steps: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of ``steps`` that end an iteration of their process; `iteration_marks` has the columns."""
    steps = steps.sort_values("process", kind="stable", ignore_index=True)  # records of a process stay in order
    process, kind = steps["process"], steps["kind"]
    marked = process.isin(process[kind == MARK])
    stepped_first = process.map(steps[kind != MARK].groupby("process")["optimizer"].first())
    counts = (marked & (kind == MARK)) | (~marked & (kind != MARK) & (steps["optimizer"] == stepped_first))
    sums = (
        steps.assign(skipped=(kind == SKIPPED).astype(np.int64)).groupby("process")[["skipped", "backwards"]].cumsum()
    )
    marks = steps[counts].copy()
    by_process = marks["process"]
    for name in ("skipped", "backwards"):
        total = sums.loc[marks.index, name]
        marks[name] = total - total.groupby(by_process).shift(fill_value=0)
    marks["skipped"] = marks["skipped"] > 0
    marks["index"] = marks.groupby("process").cumcount()
    optimizers = steps[kind != MARK].groupby("process")["optimizer"].nunique()
    marks["optimizers"] = by_process.map(optimizers).fillna(0).astype("int64")
    return marks.reset_index(drop=True)


def process_rows(steps: pd.DataFrame, marks: pd.DataFrame) -> pd.DataFrame:
    """Return the processes of some nodes, for `join_processes`.

    Args:
        steps: as `JobRun.steps`.
        marks: as from `process_marks`.
    """
    column = "steady_{}_ns" if "steady_end_ns" in steps else "{}_ns"
    by = steps.groupby("process")
    table = by.agg(node=("node", "first"), rank=("rank", "first"), pid=("pid", "first"))
    table["steps"] = marks["process"].value_counts().reindex(table.index, fill_value=0)
    first_end_ns = by[column.format("end")].min()
    table["begin_ns"] = np.minimum(by[column.format("start")].min(), first_end_ns - by["age_ns"].first())
    table["end_ns"] = by[column.format("end")].max()
    lengths_s = marks.groupby("process")[column.format("end")].diff() / 1e9
    table["median_s"] = lengths_s.groupby(marks["process"]).median().reindex(table.index)
    return table


def join_processes(table: pd.DataFrame) -> pd.DataFrame:
    """Return the processes of all nodes as described in `marks_and_processes`, from their `process_rows`."""
    begin, end = table["begin_ns"].to_numpy(), table["end_ns"].to_numpy()
    order = np.lexsort((begin, table["rank"].to_numpy()))
    rank, steps_of = table["rank"].to_numpy()[order], table["steps"].to_numpy()[order]
    begin, end = begin[order], end[order]
    groups: list[list[int]] = []  # indices of processes that ran at the same time under one rank
    generation, until = np.zeros(len(order), np.int64), 0
    for row in range(len(order)):
        same_rank = row > 0 and rank[row] == rank[row - 1]
        if same_rank and begin[row] < until:
            groups[-1].append(row)
            generation[row], until = generation[row - 1], max(until, end[row])
            continue
        groups.append([row])
        generation[row], until = generation[row - 1] + 1 if same_rank else 0, end[row]
    alone = np.concatenate([np.full(len(group), len(group) == 1) for group in groups] or [np.empty(0, bool)])
    counts = np.zeros(len(order), bool)
    counts[[max(group, key=lambda row: (steps_of[row], -begin[row])) for group in groups]] = True
    found = table[["node", "rank", "pid", "steps"]].copy()
    for name, values in (("generation", generation), ("alone", alone), ("counts", counts)):
        found[name] = pd.Series(values, index=table.index[order])
    return found.assign(median_s=table["median_s"].mask(found["alone"]))


def iterations_of(marks: pd.DataFrame) -> pd.DataFrame:
    """Return the iterations of a job from the marks of its ranks.

    Iteration i lasts from the end of step i-1 to the end of step i at the slowest rank. Steps that not every rank ended
    are left out, and so is the first, because nothing marks its beginning.

    Args:
        marks: as from `iteration_marks`; ``end_ns`` of all ranks by one clock. The length of an iteration is by
            ``steady_end_ns``, if present.

    Returns:
        ``generation``, ``step``, ``start_ns``, ``end_ns`` and ``iteration_s``, one row per iteration.
    """
    return join_iterations(step_ends(marks), marks.groupby("generation")["rank"].nunique())


def step_ends(marks: pd.DataFrame) -> pd.DataFrame:
    """Return the number of ranks that ended each step, ``ranks``, and its last ``end_ns`` and ``steady_ns``."""
    steady = "steady_end_ns" if "steady_end_ns" in marks else "end_ns"
    by = marks.groupby(["generation", "index"])
    return by.agg(ranks=("rank", "nunique"), end_ns=("end_ns", "max"), steady_ns=(steady, "max")).reset_index()


def join_iterations(ends: pd.DataFrame, ranks: pd.Series[int]) -> pd.DataFrame:
    """Return the iterations of a job as described in `iterations_of`.

    Args:
        ends: as from `step_ends`, of all ranks.
        ranks: number of ranks of each generation.
    """
    ends = ends[ends["ranks"].to_numpy() == ranks.reindex(ends["generation"]).to_numpy()]
    generation, step, end_ns, steady_ns = (
        ends[name].to_numpy(dtype=np.int64) for name in ("generation", "index", "end_ns", "steady_ns")
    )
    follows = (generation[1:] == generation[:-1]) & (step[1:] == step[:-1] + 1)
    start, end = end_ns[:-1][follows], end_ns[1:][follows]
    columns = {"generation": generation[1:][follows], "step": step[1:][follows], "start_ns": start, "end_ns": end}
    return pd.DataFrame({**columns, "iteration_s": np.diff(steady_ns)[follows] / 1e9})


class SweepRun:
    """A sweep's run directory.

    Attributes:
        path: the directory.
        info: its run.json.
        torn_lines: torn last lines of points.jsonl (0 or 1).
    """

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        self.path = path
        self.info = info
        self._windows, self.torn_lines = read_points(path / POINTS_JSONL)
        self._jobs: dict[str, JobRun] = {}

    def __reduce__(self) -> tuple[type[SweepRun], tuple[Path, dict[str, Any]]]:
        """Pickle the path and run.json only; the other process reads the files itself."""
        return SweepRun, (self.path.absolute(), self.info)

    @property
    def plan(self) -> dict[str, Any]:
        """The resolved plan.

        Raises:
            UsageError: run.json has no plan, or the plan lacks keys that the analysis needs.
        """
        plan: dict[str, Any] | None = self.info.get("plan")
        if plan is None:
            raise UsageError(f"{self.path / 'run.json'} has no plan")
        try:
            check(plan, _SWEEP_PLAN, "its plan")
        except ShapeError as error:
            raise UsageError(f"{self.path / 'run.json'} cannot be used: {error}") from error
        return plan

    @property
    def windows(self) -> list[dict[str, Any]]:
        """Lines of points.jsonl: requested load and time, one window per point, with all attempts of a series."""
        return self._windows

    def keep(self, series: str) -> None:
        """Leave out the windows of all other series."""
        self._windows = [window for window in self._windows if window["series"] == series]

    @property
    def series(self) -> list[str]:
        """Names of the series, in the order of their first points."""
        return list(dict.fromkeys(window["series"] for window in self._windows))

    @property
    def torn(self) -> dict[str, int]:
        """Torn last records dropped so far, by file relative to ``path``."""
        found = {f"{name}/{file}": count for name, job in self._jobs.items() for file, count in job.torn.items()}
        return found | ({POINTS_JSONL: self.torn_lines} if self.torn_lines else {})

    def job(self, directory: str) -> JobRun:
        """Return the job run of a series and attempt by its directory, as named in points.jsonl."""
        if directory not in self._jobs:
            path = self.path / directory
            if self.path.resolve() not in path.resolve().parents:
                raise UsageError(f"{self.path / 'points.jsonl'} names {directory!r}, which is outside the sweep")
            info = RunDirectory.open(path).info if (path / RUN_JSON).is_file() else {}
            self._jobs[directory] = JobRun(path, info)
        return self._jobs[directory]


def read_run(path: str | os.PathLike[str]) -> JobRun | SweepRun:
    """Read the run directory of a single job or of a sweep.

    Raises:
        UsageError: not a run directory, one of a newer schema, or of a kind that this version does not know.
    """
    run = RunDirectory.open(path_of(path, "the run"))
    kind = run.info.get("kind")
    if kind == "job":
        return JobRun(run.path, run.info)
    if kind == "sweep":
        return SweepRun(run.path, run.info)
    raise UsageError(f"{run.path} is a run of kind {kind!r}; this ringtap reads jobs and sweeps")
