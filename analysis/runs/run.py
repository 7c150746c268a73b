"""Run directories as typed tables (docs/reference/run-directory.md is the contract)."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pandas as pd

from ringtap.analysis.runs.phases import find_phases, process_marks
from ringtap.core.arguments import path_of
from ringtap.core.errors import UsageError
from ringtap.core.json_validation import ShapeError, check, whole
from ringtap.core.records import RecordFile, each_json_line, is_header_torn
from ringtap.core.run_files import open_regular
from ringtap.core.rundir import RunDirectory, clock_gap_ns, open_log, process_age_ns, read_points
from ringtap.core.schema import OPTIMIZER, POINTS_JSONL, RUN_JSON
from ringtap.core.units import counted

# a restarted process with the same pid (in a new process namespace) has a number at the end
_STEP_FILE = re.compile(r"rank([0-9]{1,9})-([0-9]{1,9})(?:-[0-9]+)?\.rec")
_PACKED = re.compile(r"(.+\.(rec|jsonl)|node\.json)\.(gz|bz2|xz|zst|lz4|zip)")
_DDP_SUFFIX = ".ddp.rec"
_STEP_COLUMNS = {"node": "object", "rank": "int64", "pid": "int64", "process": "int64"}
_STEP_COLUMNS |= dict.fromkeys(("optimizer", "step", "start_ns", "end_ns", "start_mono_ns", "end_mono_ns"), "int64")
_STEP_COLUMNS |= {"kind": "int64", "backwards": "int64", "pause_ns": "int64", "passes_ns": "int64"}
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
        if is_header_torn(path):
            return None, np.empty(0, np.dtype([("t_ns", "<i8")])), 1
        with open_regular(path) as stream:
            file = open_log(path)
            return file, map_file(file, stream), int(file.torn_bytes > 0)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def map_file(file: RecordFile, stream: BinaryIO) -> Records:
    """Map the records of an open record file into memory."""
    dtype = np.dtype([(field.name, field.type) for field in file.fields])
    if file.count < 1:
        return np.empty(0, dtype)
    return np.memmap(stream, dtype=dtype, mode="r", offset=file.offset, shape=(file.count,))


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


def _refuse_packed(path: Path, *patterns: str) -> None:
    """Refuse logs that somebody packed, because a run without them would look whole."""
    every = (one for pattern in patterns for one in path.glob(pattern))
    if found := sorted(str(one.relative_to(path)) for one in every if _PACKED.fullmatch(one.name)):
        which = (
            f"{found[0]} is packed"
            if len(found) == 1
            else f"{found[0]} and {counted(len(found) - 1, 'other log')} are packed"
        )
        raise UsageError(f"{path} cannot be read as a whole: {which}; unpack it, for example with gunzip")


class JobRun:
    """One job's run directory.

    Attributes:
        path: the directory.
        info: its run.json; empty if the job was killed before writing it.
        torn: torn last records dropped so far, by file relative to ``path``; grows as tables are read.
    """

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        _refuse_packed(path, "*", "nodes/*/*", "nodes/*/*/*")
        self.path = path
        self.info = info
        self.torn: dict[str, int] = {}

    @cached_property
    def step_files(self) -> list[Path]:
        """Step logs of the ranks; ``process`` in `steps` is an index into this list."""
        found = sorted(self.path.glob("nodes/*/steps/*.rec"))
        return [path for path in found if not path.name.endswith(_DDP_SUFFIX)]

    @cached_property
    def processes(self) -> pd.DataFrame:
        """The processes of the step logs, as from `read_processes`."""
        return read_processes(dict(enumerate(self.step_files)))

    @cached_property
    def steps(self) -> pd.DataFrame:
        """Optimizer steps of all ranks, one row per step.

        Columns: ``node``, ``rank``, ``pid``, ``process`` (number of its file), ``optimizer``, ``step``, then
        ``start_ns`` and ``end_ns`` (CLOCK_REALTIME), ``start_mono_ns`` and ``end_mono_ns`` (CLOCK_MONOTONIC), ``kind``
        (0 a step, 1 a step that AMP skipped, 2 a mark set by the program), ``backwards`` (backward passes since the
        previous record of this process), ``pause_ns`` (pause after the step, by a grid of iterations) and ``passes_ns``
        (time of the step in forward and backward passes). The last three are 0 in logs without them.
        """
        table, torn = read_steps(dict(enumerate(self.step_files)))
        self.torn |= {str(path.relative_to(self.path)): 1 for path in torn}
        return table

    @cached_property
    def ranks(self) -> int:
        """Number of ranks of the phase that `iterations` is of."""
        return self._phase[1]

    @property
    def iterations(self) -> pd.DataFrame:
        """Iterations of the training phase that took the most time, one row each, in order of time.

        Columns: ``generation``, ``stretch``, ``step``, ``start_ns``, ``end_ns`` and ``iteration_s``, all by
        CLOCK_MONOTONIC, shifted to CLOCK_REALTIME of each node when its recording began. So they are not affected by a
        clock that is set during the run.
        """
        return self._phase[0]

    @cached_property
    def _phase(self) -> tuple[pd.DataFrame, int]:
        files = dict(enumerate(self.step_files))
        marks, phases = find_iterations(self._never_set(self.steps), self.processes, read_optimizers(files))
        iterations = joined_iterations(marks)
        if not len(phases):
            return iterations.drop(columns="phase"), 0
        shown = longest_phase(phases, iterations)
        kept = iterations[iterations["phase"] == shown].drop(columns="phase")
        return kept.reset_index(drop=True), int(phases["ranks"][shown])

    def _never_set(self, steps: pd.DataFrame) -> pd.DataFrame:
        """Return steps at the times that the clocks would have shown if nobody had set them during the run."""
        gaps_ns = {whole(path.parts[-3]): clock_gap_ns(path.parents[1]) for path in self.step_files}
        known_ns = {node: gap_ns for node, gap_ns in gaps_ns.items() if gap_ns is not None}
        return steps.assign(**{f"{side}_ns": monotonic(steps, side, known_ns) for side in ("start", "end")})


def find_iterations(
    steps: pd.DataFrame, processes: pd.DataFrame, optimizers: Mapping[tuple[int, int], str]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Find the iterations of all phases of a job.

    Args:
        steps: as `JobRun.steps`; their ``start_ns`` and ``end_ns`` of all nodes by one clock.
        processes: as `JobRun.processes`.
        optimizers: as from `read_optimizers`.

    Returns:
        The records that end an iteration (the first table of `ringtap.analysis.runs.phases.process_marks`), with
        ``stretch``, ``phase``, ``generation`` and ``rank`` by `ringtap.analysis.runs.phases.find_phases`; its phases.
    """
    steady = {f"steady_{side}_ns": monotonic(steps, side) for side in ("start", "end")}
    steps = steps.assign(**steady)
    marks, stretches = process_marks(steps, optimizers)
    members, phases = find_phases(with_spans(processes, steps), stretches)
    names = ["stretch", "phase", "generation", "rank"]
    return marks.assign(**{name: members[name].to_numpy()[marks["stretch"]] for name in names}), phases


def joined_iterations(marks: pd.DataFrame) -> pd.DataFrame:
    """Return the iterations of all phases, as from `join_iterations`, with ``phase`` and ``generation``.

    Args:
        marks: the first table of `find_iterations`.
    """
    members = marks.drop_duplicates(["stretch", "rank"])
    iterations = join_iterations(step_ends(marks), members.groupby("stretch").size())
    of = members.drop_duplicates("stretch").set_index("stretch")[["phase", "generation"]]
    return iterations.join(of, on="stretch")


def with_spans(processes: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return the processes that stepped with ``begin_ns``, the start of the process, and ``end_ns``, its last step."""
    column = "steady_{}_ns" if "steady_end_ns" in steps else "{}_ns"
    by = steps.groupby("process")
    first_end_ns, last_ns = by[column.format("end")].min(), by[column.format("end")].max()
    found = processes.loc[first_end_ns.index]
    begin_ns = np.minimum(by[column.format("start")].min(), first_end_ns - found["age_ns"])
    return found.assign(begin_ns=begin_ns, end_ns=last_ns)


def longest_phase(phases: pd.DataFrame, iterations: pd.DataFrame) -> int:
    """Return the number of the phase whose iterations took the most time of all its ranks; ties: the most steps."""
    seconds = iterations.groupby("phase")["iteration_s"].sum().reindex(phases.index, fill_value=0.0) * phases["ranks"]
    return int(phases.assign(seconds=seconds).sort_values(["seconds", "steps"], kind="stable").index[-1])


def read_processes(files: Mapping[int, Path]) -> pd.DataFrame:
    """Read the headers of step logs of ranks.

    Args:
        files: the logs by number of the process.

    Returns:
        By number of the process: ``node``, ``rank``, ``pid``, ``age_ns`` (its age at the first step, 0: not known),
        ``world_size`` (0: not known), ``group`` (``torch``, ``horovod`` or empty), ``address`` (where its ranks met;
        empty: not known) and ``command`` (checksum, -1: not known).
    """
    rows: dict[int, dict[str, Any]] = {}
    for number, path in files.items():
        rank, pid = _rank_and_pid(path)
        about: Mapping[str, Any] = {}
        age_ns = 0
        with contextlib.suppress(UsageError, OSError):  # reading its steps reports it
            file = map_records(path)[0]
            about, age_ns = (file.about, process_age_ns(file)) if file else ({}, 0)
        row: dict[str, Any] = {"node": whole(path.parent.parent.name), "rank": rank, "pid": pid}
        row["age_ns"] = age_ns
        for name, (kind, absent) in _ABOUT.items():
            row[name] = about[name] if isinstance(about.get(name), kind) else absent
        rows[number] = row
    table = pd.DataFrame.from_dict(rows, orient="index", columns=list(_PROCESS))
    return table.astype({name: kind for name, kind in _PROCESS.items() if kind == "int64"})


_PROCESS = {"node": "object", "rank": "int64", "pid": "int64", "age_ns": "int64", "world_size": "int64"}
_PROCESS |= {"group": "object", "address": "object", "command": "int64"}
# of the header: type, and the value if it is absent
_ABOUT: dict[str, tuple[type, Any]] = {"world_size": (int, 0), "group": (str, ""), "address": (str, "")}
_ABOUT["command"] = (int, -1)


def _rank_and_pid(path: Path) -> tuple[int, int]:
    match = _STEP_FILE.fullmatch(path.name)
    if match is None:
        raise UsageError(f"{path} is not named rank<R>-<pid>.rec")
    return int(match[1]), int(match[2])


def read_optimizers(files: Mapping[int, Path]) -> dict[tuple[int, int], str]:
    """Return the optimizers in words, by number of the process and of the optimizer.

    Those of runs of 0.2 and before are not known.

    Args:
        files: step logs by number of the process.
    """
    found = {}
    for number, path in files.items():
        with contextlib.suppress(UsageError, OSError):
            for line in each_json_line(path.with_name(f"{path.name.removesuffix('.rec')}.optimizers.jsonl"), OPTIMIZER):
                if line.item is not None:
                    found[number, int(line.item["optimizer"])] = _optimizer_in_words(line.item)
    return found


def _optimizer_in_words(line: dict[str, Any]) -> str:
    elements = line.get("elements")
    if elements is None:
        return str(line["class"])
    trained = line.get("trained", elements)
    return f"{line['class']} of {elements:,} parameters" + (f" ({trained:,} trained)" if trained != elements else "")


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
        rank, pid = _rank_and_pid(path)
        try:
            table, torn = read_records(path)
        except FileNotFoundError as error:  # a dangling symbolic link
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        torn_files += [path] * torn
        if len(table):
            node = whole(path.parent.parent.name)
            parts.append(table.assign(rank=rank, pid=pid, node=node, process=number))
    if not parts:
        return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in _STEP_COLUMNS.items()}), torn_files
    steps = pd.concat(parts, ignore_index=True)
    absent = dict.fromkeys(("kind", "backwards", "pause_ns", "passes_ns"), 0)
    steps = steps.assign(**{name: 0 for name in absent if name not in steps}).fillna(absent)
    return steps.astype(_STEP_COLUMNS)[list(_STEP_COLUMNS)], torn_files


def monotonic(steps: pd.DataFrame, side: str, gaps_ns: Mapping[str, int] | None = None) -> pd.Series[int]:
    """Return the times of steps by CLOCK_MONOTONIC, shifted to each node's first CLOCK_REALTIME.

    Args:
        steps: as `JobRun.steps`.
        side: ``start`` or ``end``.
        gaps_ns: CLOCK_REALTIME minus CLOCK_MONOTONIC of nodes; the others' first step tells.
    """
    first = steps.loc[steps.groupby("node")["start_mono_ns"].idxmin()].set_index("node")
    origin = (first["start_ns"] - first["start_mono_ns"]).to_dict() | dict(gaps_ns or {})
    return steps[f"{side}_mono_ns"] + steps["node"].map(origin).astype("int64")


def step_ends(marks: pd.DataFrame) -> pd.DataFrame:
    """Return the number of ranks that ended each step, ``ranks``, and its last ``end_ns`` and ``steady_ns``."""
    steady = "steady_end_ns" if "steady_end_ns" in marks else "end_ns"
    by = marks.groupby(["stretch", "index"])
    return by.agg(ranks=("rank", "nunique"), end_ns=("end_ns", "max"), steady_ns=(steady, "max")).reset_index()


def join_iterations(ends: pd.DataFrame, ranks: pd.Series[int]) -> pd.DataFrame:
    """Return the iterations of a job from the ends of the steps of all ranks.

    Iteration i lasts from the end of step i-1 to the end of step i at the slowest rank. Steps that not every rank ended
    are left out, and so is the first of a stretch, because nothing marks its beginning.

    Args:
        ends: as from `step_ends`, of all ranks, all by one clock.
        ranks: number of ranks of each stretch.

    Returns:
        ``stretch``, ``step``, ``start_ns``, ``end_ns`` and ``iteration_s``, one row per iteration.
    """
    ends = ends[ends["ranks"].to_numpy() == ranks.reindex(ends["stretch"]).to_numpy()]
    stretch, step, end_ns, steady_ns = (
        ends[name].to_numpy(dtype=np.int64) for name in ("stretch", "index", "end_ns", "steady_ns")
    )
    follows = (stretch[1:] == stretch[:-1]) & (step[1:] == step[:-1] + 1)
    start, end = end_ns[:-1][follows], end_ns[1:][follows]
    columns = {"stretch": stretch[1:][follows], "step": step[1:][follows], "start_ns": start, "end_ns": end}
    return pd.DataFrame({**columns, "iteration_s": np.diff(steady_ns)[follows] / 1e9})


_EDGE_NS = 1_000_000


def within_window(
    start_ns: npt.NDArray[np.int64], end_ns: npt.NDArray[np.int64], window_ns: tuple[int, int]
) -> npt.NDArray[np.bool_]:
    """Tell which iterations lie within a window, whose edges are ends of iterations.

    A process reads its two clocks one after the other, so edges by the one are a little off by the other: by less than
    1 ms. The tolerance is below a quarter of the shortest iteration.

    Args:
        start_ns: starts of the iterations.
        end_ns: their ends.
        window_ns: start and end of the window.
    """
    shortest_ns = int((end_ns - start_ns).min()) if len(start_ns) else 0
    off_ns = min(_EDGE_NS, max(shortest_ns, 0) // 4)
    return np.asarray((start_ns >= window_ns[0] - off_ns) & (end_ns <= window_ns[1] + off_ns))


class SweepRun:
    """A sweep's run directory.

    Attributes:
        path: the directory.
        info: its run.json.
        torn_lines: torn last lines of points.jsonl (0 or 1).
    """

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        _refuse_packed(path, "*")
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
