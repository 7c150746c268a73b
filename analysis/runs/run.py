"""Reads run directories as typed tables (docs/reference/run-directory.md is the contract)."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ringtap.analysis.runs.group_steps_into_iterations import find_phases, process_marks
from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.analysis.runs.read_binary_records import map_records, read_records
from ringtap.analysis.runs.samples_to_iterations import Integers
from ringtap.core.append_only_logs import each_json_line
from ringtap.core.check_api_arguments import path_of
from ringtap.core.clock_steps import CLOCK_STEP_NS, clock_set_ns
from ringtap.core.errors import UsageError
from ringtap.core.json_validation import ShapeError, check, whole
from ringtap.core.run_directory import RunDirectory, process_age_ns, read_points
from ringtap.core.run_directory_schema import OPTIMIZER, POINTS_JSONL, RUN_JSON, SERIES, pass_source
from ringtap.core.units import counted

# a restarted process with the same pid (in a new process namespace) has a number at the end
_STEP_FILE = re.compile(r"rank([0-9]{1,9})-([0-9]{1,9})(?:-[0-9]+)?\.rec")
_PACKED = re.compile(r"(.+\.(rec|jsonl)|node\.json)\.(gz|bz2|xz|zst|lz4|zip)")
_STEP_COLUMNS = {"node": "object", "rank": "int64", "pid": "int64", "process": "int64"}
_STEP_COLUMNS |= dict.fromkeys(("optimizer", "step", "start_ns", "end_ns", "start_mono_ns", "end_mono_ns"), "int64")
_STEP_COLUMNS |= {"kind": "int64", "backwards": "int64", "pause_ns": "int64", "passes_ns": "int64"}
_SWEEP_PLAN = {"scale": float, "capacity_bps": float, "topology": dict, "models": [{"parameters": int}]}


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
        return [path for path in found if not pass_source(path.name)]

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
    def nodes(self) -> dict[str, NodeLogs]:
        """The nodes' logs by name."""
        folders = sorted(path for path in self.path.glob("nodes/*") if path.is_dir())
        return {whole(path.name): NodeLogs(path.absolute()) for path in folders}

    @cached_property
    def ranks(self) -> int:
        """Number of ranks of the phase that `iterations` is of."""
        return self._phase[1]

    @property
    def marks(self) -> pd.DataFrame:
        """Records that end an iteration of the training phase that took the most time.

        They are those of `ringtap.analysis.runs.group_steps_into_iterations.process_marks` at times as from `aligned`,
        with ``stretch``, ``phase``, ``generation`` and ``rank`` by
        `ringtap.analysis.runs.group_steps_into_iterations.find_phases`.
        """
        return self._phase[0]

    @cached_property
    def iterations(self) -> pd.DataFrame:
        """Iterations of this phase on the reference clock, one row each, in order of time.

        Columns: ``generation``, ``stretch``, ``step``, ``start_ns``, ``end_ns`` and ``iteration_s``.
        """
        return _joined_iterations(self.marks).drop(columns="phase")

    @cached_property
    def _phase(self) -> tuple[pd.DataFrame, int]:
        steps = aligned(self.steps, self.nodes)
        marks, stretches = process_marks(steps, read_optimizers(dict(enumerate(self.step_files))))
        members, phases = find_phases(with_spans(self.processes, steps), stretches)
        names = ["stretch", "phase", "generation", "rank"]
        marks = marks.assign(**{name: members[name].to_numpy()[marks["stretch"]] for name in names})
        if not len(phases):
            return marks, 0
        shown = longest_phase(phases, _joined_iterations(marks))
        return marks[marks["phase"] == shown], int(phases["ranks"][shown])

    @cached_property
    def ends_ns(self) -> Integers:
        """Ends of iterations as a sweep times them (``own_end_ns`` of `aligned`) and on the reference clock, (n, 2)."""
        by = self.marks.groupby(["stretch", "index"])
        return by[["own_end_ns", "end_ns"]].max().to_numpy(np.int64)

    def by_node(self, node: str, t_ns: Sequence[int] | Integers) -> Integers:
        """Convert times of the reference clock to those of a node's `ringtap.core.counter_log_reader.CounterLog`."""
        times_ns = np.asarray(t_ns, np.int64)
        return self.nodes[node].clock.from_reference(times_ns) if node in self.nodes else times_ns


def aligned(steps: pd.DataFrame, nodes: Mapping[str, NodeLogs]) -> pd.DataFrame:
    """Convert the times of steps to the reference clock (`ringtap.analysis.runs.reference_clock`).

    Returns:
        The steps with ``start_ns`` and ``end_ns`` on the reference clock, and ``own_end_ns``, the end by the node's
        clock as if it had not been set.
    """
    columns = {name: steps[name].to_numpy(np.int64).copy() for name in ("start_ns", "end_ns")}
    columns["own_end_ns"] = columns["end_ns"].copy()
    for node, rows in steps.groupby("node").indices.items():
        logs, mine = nodes[str(node)], steps.iloc[rows]
        if not logs.clock.steps and _was_set(mine):
            logs.report(
                f"the clock of {node} was set during the run and clock/clock.json does not say when: its steps and "
                "samples are timed by CLOCK_MONOTONIC, all its other times are as the clock showed them"
            )
        for side in ("start", "end"):
            own_ns = logs.clock.unstepped(columns[f"{side}_ns"][rows], mine[f"{side}_mono_ns"].to_numpy(np.int64))
            columns[f"{side}_ns"][rows] = logs.clock.to_reference(own_ns)
        columns["own_end_ns"][rows] = own_ns
    return steps.assign(**columns)


def _was_set(steps: pd.DataFrame) -> bool:
    """Return True if a node's clock was set between steps."""
    steps = steps.sort_values("end_mono_ns")
    gaps_ns = (steps["end_ns"] - steps["end_mono_ns"]).to_numpy(np.int64)
    changes = np.flatnonzero(np.abs(np.diff(gaps_ns)) >= CLOCK_STEP_NS)
    return any(clock_set_ns(gaps_ns[max(0, place - 4) : place + 6].tolist()) for place in changes)


def window_on_reference(window_ns: tuple[int, int], *runs: JobRun) -> tuple[int, int]:
    """Convert a window that a sweep recorded to the reference clock.

    While jobs run, their clocks' offsets are not known exactly. A sweep therefore times each rank's end of an iteration
    by the clock of its host, and the edges of a window are the last of such ends. The same iterations have ends on the
    reference clock. A time between ends moves as the nearest one does.

    Args:
        window_ns: its start and end in points.jsonl or shared.jsonl.
        runs: the jobs that ran in it.
    """
    own_ns, ends_ns = np.concatenate([run.ends_ns for run in runs]).T
    if not len(own_ns):
        return window_ns
    start_ns, end_ns = (int(edge + (ends_ns - own_ns)[np.abs(own_ns - edge).argmin()]) for edge in window_ns)
    return start_ns, end_ns


def _joined_iterations(marks: pd.DataFrame) -> pd.DataFrame:
    """Return the iterations of all phases, as from `join_iterations`, with ``phase`` and ``generation``.

    Args:
        marks: as `JobRun.marks`, of all phases.
    """
    members = marks.drop_duplicates(["stretch", "rank"])
    iterations = join_iterations(step_ends(marks), members.groupby("stretch").size())
    of = members.drop_duplicates("stretch").set_index("stretch")[["phase", "generation"]]
    return iterations.join(of, on="stretch")


def with_spans(processes: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return the processes that stepped with ``begin_ns``, the start of the process, and ``end_ns``, its last step."""
    by = steps.groupby("process")
    first_end_ns = by["end_ns"].min()
    found = processes.loc[first_end_ns.index]
    begin_ns = np.minimum(by["start_ns"].min(), first_end_ns - found["age_ns"])
    return found.assign(begin_ns=begin_ns, end_ns=by["end_ns"].max())


def longest_phase(phases: pd.DataFrame, iterations: pd.DataFrame) -> int:
    """Return the number of the phase whose iterations took the most time of all its ranks; ties: the most steps.

    An iteration that did not begin with a step does not count: its beginning is not always known.
    """
    by_phase = iterations[iterations["step"] > 0].groupby("phase")["iteration_s"].sum()
    seconds = by_phase.reindex(phases.index, fill_value=0.0) * phases["ranks"]
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


def step_ends(marks: pd.DataFrame) -> pd.DataFrame:
    """Return the number of ranks that ended each step, ``ranks``, and its last ``end_ns``."""
    by = marks.groupby(["stretch", "index"])
    return by.agg(ranks=("rank", "nunique"), end_ns=("end_ns", "max")).reset_index()


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
    stretch, step, end_ns = (ends[name].to_numpy(dtype=np.int64) for name in ("stretch", "index", "end_ns"))
    follows = (stretch[1:] == stretch[:-1]) & (step[1:] == step[:-1] + 1)
    start, end = end_ns[:-1][follows], end_ns[1:][follows]
    columns = {"stretch": stretch[1:][follows], "step": step[1:][follows], "start_ns": start, "end_ns": end}
    return pd.DataFrame({**columns, "iteration_s": (end - start) / 1e9})


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


def averages_of(run: JobRun) -> str:
    """Say what a job's iterations are taken from, and what reads each load, if it is a series of a sweep; else empty.

    The sentence has no end.
    """
    path = run.path.resolve()
    folder = path.parent.parent
    if path.parent.name != SERIES or not (folder / RUN_JSON).is_file():
        return ""
    try:
        sweep = read_run(folder)
        mine = [] if isinstance(sweep, JobRun) else [one for one in sweep.windows if folder / one["directory"] == path]
    except UsageError:  # a damaged sweep keeps nobody from reading one of its jobs
        return ""
    if not mine:
        return ""
    return (
        f"{run.path.name} is a series of the sweep {folder}: its numbers are averages over "
        f"{counted(len(mine), 'window')} of different loads, settling and warm-up; ringtap report {folder} shows each "
        "load"
    )
