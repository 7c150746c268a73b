"""Joins the records of ranks to a job's iterations on one clock, with each rank's computation and communication."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ringtap.analysis.runs.exposed_communication import MOMENTS, compared_ns, exposed_ns, is_synced
from ringtap.analysis.runs.group_steps_into_iterations import find_phases, process_marks
from ringtap.analysis.runs.node_batches import Batches, BatchTable, Frames
from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.analysis.runs.read_binary_records import Records
from ringtap.analysis.runs.reference_clock import NodeClock
from ringtap.analysis.runs.run import (
    JobRun,
    aligned,
    join_iterations,
    longest_phase,
    read_optimizers,
    read_processes,
    read_steps,
    step_ends,
    with_spans,
)
from ringtap.analysis.runs.samples_to_iterations import Integers, Numbers, add_up, shares
from ringtap.core.clock_steps import CLOCK_STEP_NS
from ringtap.core.errors import RingtapError, UsageError, error_message
from ringtap.core.json_validation import whole
from ringtap.core.run_completeness import missing_ranks
from ringtap.core.run_directory_schema import BUCKETS, PASS_LOGS
from ringtap.core.units import counted

PHASES = ("compute_s", "forward_s", "backward_s", "communication_s", "exposed_s", "overlap_s")
_COLUMNS = ["process", "place", "forward_start_ns", "ready_ns", *PHASES, "syncs", "synced_bytes"]
_NUMBERS = [*PHASES, "synced_bytes"]
_PASS = ("module", *MOMENTS, "forward_ns", "backward_ns", "comm_ns", "overlap_ns")
_TIMED_BY = {"ddp": "DDP", "horovod": "Horovod"}
# about the passes of a stretch
_ABOUT = ["gradient_bytes", "rebuilt_at", "comm_hook", "source"]
_EARLY = 10  # index of the last iteration in which DDP may change its buckets


@dataclass(frozen=True)
class Phases:
    """Computation and communication of the ranks.

    Attributes:
        table: one row per process and iteration (``place``): ``forward_start_ns`` and ``ready_ns`` (the last
            gradient was ready) on the reference clock, 0: not known; ``syncs``, the number of synchronised passes;
            ``synced_bytes``, the gradient bytes handed over in them; and the `PHASES` in seconds. Empty for ``ddp`` and
            ``horovod``, of which each batch of nodes has its own.
        source: ``ddp``; ``horovod``, whose forward passes are not timed, so that ``compute_s`` is of the backward
            passes; ``timeline``, Horovod's, of rank 0 alone; or ``none``.
        why: a sentence if ``source`` is ``none`` or some ranks are not covered.
        gradient_bytes: bytes that a rank hands over in one synchronisation of every module; None: not known.
        comm_hook: the communication hooks that exchange them instead of DDP's own all-reduce; empty: none.
        rebuilt_at: the last early iteration (up to the tenth) in which DDP changed its buckets; 0 without changes.
    """

    table: pd.DataFrame
    source: str
    why: str
    gradient_bytes: float | None = None
    comm_hook: str = ""
    rebuilt_at: int = 0


def logged_passes(run: JobRun, marks: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """Return the passes that were logged by DDP, or of Horovod's optimizers, by number of the process.

    Args:
        run: the run.
        marks: records that end an iteration of the processes, on the reference clock, as `JobRun.marks`.

    Returns:
        Per process: ``forward_start_ns``, ``backward_start_ns``, ``backward_end_ns``, ``comm_start_ns`` and
        ``comm_end_ns`` on the reference clock, 0: not known; ``forward_ns``, negative: not known; and ``synced``, True
        if gradients were exchanged. Processes without such a log are absent.
    """
    tables = {}
    files = dict(enumerate(run.step_files))
    for process, rows in marks.groupby("process").indices.items():
        logs, stem = _step_log(files[int(str(process))], run.nodes)
        _, records = _pass_log(logs, stem)
        if records is not None:
            table = pd.DataFrame(_passes(int(str(process)), records, logs, marks.iloc[rows], {}))
            synced = is_synced(table["backward_start_ns"], table["comm_start_ns"], table["comm_end_ns"])
            tables[int(str(process))] = table.assign(synced=synced)
    return tables


def _step_log(path: Path, nodes: Mapping[str, NodeLogs]) -> tuple[NodeLogs, str]:
    """Return the node of a step log, and the names of its process's logs without their suffixes."""
    return nodes[whole(path.parent.parent.name)], f"steps/{path.name.removesuffix('.rec')}"


def _pass_log(logs: NodeLogs, stem: str) -> tuple[str, Records | None]:
    """Return the records of the passes of a process, and their source; None: there are none."""
    for source, suffix in PASS_LOGS.items():
        found = logs.records(f"{stem}{suffix}")
        if found is not None and len(found[1]):
            return source, found[1]
    return "", None


def _logged(
    files: Mapping[int, Path], marks: pd.DataFrame, nodes: Mapping[str, NodeLogs]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return computation and communication by the logs of passes, and a row about each stretch that has passes.

    The second table has ``gradient_bytes``, of the modules that ran in the stretch, ``rebuilt_at``, ``comm_hook``, the
    names of the communication hooks by which these exchange their gradients, and ``source``, of the log.
    """
    parts, about = [], []
    ends_ns = marks["end_ns"].to_numpy(np.int64)
    stretch, index = (marks[name].to_numpy(np.int64) for name in ("stretch", "index"))
    for process, own_rows in marks.groupby("process").indices.items():
        rows = np.asarray(own_rows, np.int64)
        logs, stem = _step_log(files[int(str(process))], nodes)
        source, records = _pass_log(logs, stem)
        if records is None:
            continue
        changes = logs.lines(f"{stem}.buckets.jsonl", BUCKETS)
        gradients = _gradient_bytes(changes)
        passes = _passes(int(str(process)), records, logs, marks.iloc[rows], gradients)
        parts.append(passes)
        modules = pd.DataFrame({"stretch": stretch[rows[passes["place"]]], "module": passes["module"]})
        at_ns = logs.clock.on_reference(np.array([line["t_ns"] for line in changes], np.int64))
        changed = rows[np.minimum(np.searchsorted(ends_ns[rows], at_ns), len(rows) - 1)]
        hooks = {line.get("module"): line["comm_hook"] for line in changes if line.get("comm_hook")}
        for number, own in modules.drop_duplicates().groupby("stretch")["module"]:
            total = sum(gradients.get(module, 0.0) for module in own.tolist())
            exchange = ", ".join(sorted({str(hooks[module]) for module in own.tolist() if module in hooks}))
            rebuilt = index[changed[stretch[changed] == number]]
            rebuilt_at = int(rebuilt[rebuilt <= _EARLY].max(initial=0))
            about.append((number, float(total), rebuilt_at, exchange, source))
    table = pd.DataFrame(about, columns=["stretch", *_ABOUT]).set_index("stretch")
    if not parts:
        return _empty(), table
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return _by_iteration(columns)[_COLUMNS], table


def _gradient_bytes(changes: list[dict[str, object]]) -> dict[object, float]:
    """Return the bytes of each module's buckets after their last change."""
    last: dict[object, float] = {}
    for line in changes:
        buckets = line.get("bucket_bytes")
        last[line.get("module")] = float(sum(buckets)) if isinstance(buckets, list) else 0.0
    return last


def _passes(
    process: int, records: Records, logs: NodeLogs, marks: pd.DataFrame, gradients: dict[object, float]
) -> dict[str, npt.NDArray[Any]]:
    """Return the records of a process's passes, each once, on the reference clock, with its iteration (``place``)."""
    table: dict[str, npt.NDArray[Any]] = {name: np.asarray(records[name], np.int64) for name in _PASS}
    ends_ns = marks["end_ns"].to_numpy(np.int64)
    ahead_ns, unset = _ahead(records, logs.clock)
    # where DDP samples rarely, its log repeats the last sample
    samples = np.column_stack([table["module"], *(table[name] for name in MOMENTS)])
    first = np.sort(np.unique(samples, axis=0, return_index=True)[1])
    table = {name: values[first] for name, values in table.items()}
    for name in MOMENTS:
        if ahead_ns is None:
            table[name] = logs.clock.on_reference(table[name])
        else:
            table[name] = np.where(table[name] == 0, 0, table[name] - ahead_ns[first])
    seen_ns = np.max([table[name] for name in MOMENTS], axis=0)
    index = np.searchsorted(ends_ns, seen_ns)
    kept = (seen_ns > 0) & (index < len(ends_ns)) & unset[first]
    table = {name: values[kept] for name, values in table.items()}
    table["bytes"] = np.array([gradients.get(module) or np.nan for module in table["module"].tolist()], np.float64)
    return table | {"place": index[kept], "process": np.full(int(kept.sum()), process)}


def _ahead(records: Records, clock: NodeClock) -> tuple[Integers | None, npt.NDArray[np.bool_]]:
    """Return the offset of DDP's clock from the reference at each record, and a mask of records without a clock step.

    The offset is None for logs without CLOCK_MONOTONIC, of versions before 0.2.
    """
    unset = np.ones(len(records), bool)
    if not {"t_ns", "mono_ns"} <= set(records.dtype.names or ()):
        return None, unset
    t_ns, mono_ns = (np.asarray(records[name], np.int64) for name in ("t_ns", "mono_ns"))
    offset_ns, ahead_ns = t_ns - mono_ns, t_ns - clock.on_reference(t_ns, mono_ns)
    # of a record with a pause between its two readings, the offset is not that of both records beside it
    middle_ns = np.median([offset_ns[:-2], offset_ns[1:-1], offset_ns[2:]], axis=0).astype(np.int64)
    paused = 1 + np.flatnonzero(np.abs(offset_ns[1:-1] - middle_ns) >= CLOCK_STEP_NS)
    offset_ns[paused], ahead_ns[paused] = middle_ns[paused - 1], ahead_ns[paused - 1]
    was_set = np.abs(np.diff(offset_ns)) >= CLOCK_STEP_NS
    unset[1:] &= ~was_set
    unset[2:] &= ~was_set[:-1]  # DDP may report an iteration in the next one
    return ahead_ns, unset


def _by_iteration(passes: dict[str, npt.NDArray[Any]]) -> pd.DataFrame:
    """Sum the times of passes in each iteration of each process."""
    table = pd.DataFrame(passes)
    forward_ns = table["forward_ns"].where(table["forward_ns"] >= 0)
    synced = is_synced(*(table[f"{name}_ns"] for name in ("backward_start", "comm_start", "comm_end")))
    exposed = exposed_ns(
        synced, *(table[f"{name}_ns"] for name in ("backward_end", "comm_start", "comm_end", "comm", "overlap"))
    )
    seconds = {
        "forward_s": forward_ns,
        "backward_s": table["backward_ns"],
        "compute_s": forward_ns.fillna(0) + table["backward_ns"],
        "communication_s": table["comm_ns"].where(synced, 0),
        "exposed_s": exposed,
        "overlap_s": table["overlap_ns"].where(synced, 0),
    }
    synced_bytes = table["bytes"].where(synced, 0.0)
    by = ["process", "place"]
    result = pd.DataFrame({name: values / 1e9 for name, values in seconds.items()})
    result = result.assign(syncs=synced.astype(np.int64), **{name: table[name] for name in by})
    sums = result.groupby(by)[[*PHASES, "syncs"]].sum(min_count=1)
    sums["synced_bytes"] = synced_bytes.groupby([table[name] for name in by]).sum(min_count=1)
    within = table.groupby(by)
    sums["ready_ns"] = within["backward_end_ns"].max()
    sums["forward_start_ns"] = within["forward_start_ns"].min()
    return sums.reset_index()


def _empty() -> pd.DataFrame:
    kinds = dict.fromkeys(_COLUMNS, "int64") | dict.fromkeys(_NUMBERS, "float64")
    return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in kinds.items()})[_COLUMNS]


def horovod_collectives(logs: NodeLogs) -> pd.DataFrame | None:
    """Return the collectives of the Horovod timeline of a node, on the reference clock; None without one.

    Columns are those of `ringtap.analysis.job.horovod_timeline.load_timeline`.
    """
    from ringtap.analysis.job.horovod_timeline import read_timeline

    for name in logs.names("horovod/*timeline*.json"):
        try:
            timeline = read_timeline(logs.path / name)
        except (RingtapError, OSError, ValueError) as error:
            logs.report(f"{logs.name}/{name} cannot be used: {error_message(error)}")
            continue
        if len(timeline):
            return _on_reference(timeline, logs)
    return None


def _on_reference(timeline: pd.DataFrame, logs: NodeLogs) -> pd.DataFrame:
    # Horovod reads CLOCK_REALTIME once, at its start, and then uses a clock that is never set
    first_ns = timeline["start_ns"].to_numpy(np.int64)[:1]
    ahead_ns = int((first_ns - logs.clock.unstepped(first_ns))[0])
    columns = {}
    for name in ("start_ns", "end_ns", "transport_start_ns", "transport_end_ns"):
        known = timeline[name].notna().to_numpy()
        times_ns = logs.clock.to_reference(timeline[name].fillna(0).to_numpy(np.int64) - ahead_ns)
        columns[name] = pd.Series(times_ns, index=timeline.index).astype("Int64").where(known)
    return timeline.assign(**columns)


def _horovod(marks: pd.DataFrame, nodes: Mapping[str, NodeLogs]) -> Phases | None:
    """Return the communication by Horovod's timeline, which rank 0 alone writes; None without one.

    Args:
        marks: those of rank 0, with its ``node``.
        nodes: the nodes' logs.
    """
    for logs in nodes.values():
        rows = marks[marks["node"] == logs.name]
        if len(rows) and (timeline := horovod_collectives(logs)) is not None:
            return _by_timeline(timeline, rows)
    return None


def _by_timeline(timeline: pd.DataFrame, marks: pd.DataFrame) -> Phases:
    """Split each iteration of rank 0 by the collectives of the timeline.

    Communication during the optimizer's step is exposed, because Horovod's wrapper synchronises there. Communication
    before the step is hidden behind the backward pass.
    """
    begin, end = merged_spans(*(timeline[name].to_numpy(np.int64) for name in ("start_ns", "end_ns")))
    parts = []
    for process, rows in marks.groupby("process"):
        edges = np.concatenate(([rows["start_ns"].iloc[0] - 1], rows["end_ns"].to_numpy(np.int64)))
        total_s = _covered_s(begin, end, edges)
        steps = np.column_stack((rows["start_ns"], rows["end_ns"])).ravel()
        optimizer_s = _covered_s(begin, end, np.maximum.accumulate(steps))[::2]
        table = pd.DataFrame({"place": rows["place"].to_numpy(), "communication_s": total_s, "exposed_s": optimizer_s})
        parts.append(table.iloc[1:].assign(process=process))
    table = pd.concat(parts, ignore_index=True)
    table["overlap_s"] = table["communication_s"] - table["exposed_s"]
    table = table.assign(compute_s=np.nan, forward_s=np.nan, backward_s=np.nan, ready_ns=0, forward_start_ns=0)
    table["syncs"] = (table["communication_s"] > 0).astype(np.int64)
    table["synced_bytes"] = np.nan
    why = "Horovod's timeline is of rank 0 alone; it does not time compute"
    found = Phases(table[_COLUMNS], "timeline", why)
    reduced = timeline[timeline["operation"].str.upper().str.contains("ALLREDUCE")]
    steps_seen = len(marks)
    if len(reduced) and "bytes" in reduced and reduced["bytes"].sum() > 0:
        # every tensor once per iteration: the sum over tensors of their size
        by_tensor = reduced.groupby("tensor")["bytes"].agg(["max", "count"])
        often = by_tensor[by_tensor["count"] >= steps_seen / 2]
        gradient_bytes = float(often["max"].sum())
        if gradient_bytes:
            synced = found.table.assign(synced_bytes=found.table["syncs"] * gradient_bytes)
            found = replace(found, gradient_bytes=gradient_bytes, table=synced)
    return found


def merged_spans(begin_ns: Integers, end_ns: Integers) -> tuple[Integers, Integers]:
    """Merge overlapping spans; empty ones are left out."""
    keep = end_ns > begin_ns
    order = np.argsort(begin_ns[keep], kind="stable")
    begin, end = begin_ns[keep][order], end_ns[keep][order]
    if not len(begin):
        return begin, end
    reach = np.maximum.accumulate(end)
    heads = np.concatenate(([True], begin[1:] > reach[:-1]))
    return begin[heads], reach[np.append(np.flatnonzero(heads)[1:] - 1, len(reach) - 1)]


def _covered_s(begin_ns: Integers, end_ns: Integers, edges_ns: Integers) -> Numbers:
    """Return the seconds of each bin that are covered by spans, which must not overlap."""
    if not len(begin_ns):
        return np.zeros(max(len(edges_ns) - 1, 0))
    bins = max(len(edges_ns) - 1, 0)
    span, bin_of, share = shares(begin_ns, end_ns, edges_ns)
    seconds: Numbers = share * (end_ns - begin_ns)[span] / 1e9
    total: Numbers = add_up(np.zeros(len(span), np.int64), bin_of, seconds, 1, bins).sum(axis=0)
    return total


# The first iteration allocates and finds the order of gradients; DDP rebuilds its buckets in the second.
WARM_UP_ITERATIONS = 2


@dataclass(frozen=True)
class Work:
    """Iterations of a training phase of a job by the records of its ranks.

    Attributes:
        phases: all training phases of the job (`ringtap.analysis.job.run.Job.phases`).
        phase: number of the phase that the others describe; 0 if there is none.
        iterations: one row per iteration, in order of time (`ringtap.analysis.job.run.Job.iterations`).
        ranks: for each batch of nodes, one row per iteration and rank.
        source: source of compute and communication times, as that of `Phases`.
        why: a sentence if ``source`` is ``none`` or a part is missing.
        gradient_bytes, comm_hook: as those of `Phases`.
        processes: the processes of the phase, by number: ``node``, ``rank``, ``pid``, ``steps`` (ends of iterations).
        steps: ends of iterations of all starts of the job, of the rank with the most.
        unclear_ranks: ranks that other processes had during the phase, whose bytes cannot be told apart.
        world_size: number of ranks by the step logs, at least the number of ranks that stepped.
        missing_ranks: the ranks of the job that left no steps, in words; empty if all did.
    """

    phases: pd.DataFrame
    phase: int
    iterations: pd.DataFrame
    ranks: list[BatchTable]
    source: str
    why: str
    gradient_bytes: float | None
    comm_hook: str
    processes: pd.DataFrame
    steps: int
    unclear_ranks: list[int]
    world_size: int
    missing_ranks: str

    @property
    def rank_iterations(self) -> pd.DataFrame:
        """All of ``ranks``, by iteration and rank."""
        return pd.concat([frame.read() for frame in self.ranks]).sort_values(
            ["iteration", "rank"], kind="stable", ignore_index=True
        )


def computation_by(source: str) -> str:
    """Return what ``compute_s`` is of, in words; ``source`` is that of `Phases`."""
    return "backward pass" if source == "horovod" else "compute"


ALL_PHASES = 0
_ENDS = ["process", "stretch", "index", "end_ns"]
# of the batches whose ends of steps are joined: at least so many tasks, and at most so many batches in one
_ENDS_TASKS, _ENDS_BATCHES = 8, 16


def build(run: JobRun, nodes: Mapping[str, NodeLogs], batches: Batches, phase: int | None = None) -> Work:
    """Join the ranks' records of a run.

    Args:
        run: the run.
        nodes: the nodes' logs.
        batches: the nodes in batches.
        phase: number of the training phase; None: the one that took the most time; `ALL_PHASES`: all, which may have
            run at the same time.

    Raises:
        UsageError: the run has no such phase.
    """
    files = [
        {number: path for number, path in enumerate(run.step_files) if whole(path.parent.parent.name) in names}
        for names in map(set, batches.names)
    ]
    parts = list(batches.each("steps", read_ranks, files))
    rows = [part["processes"].read() for part in parts]
    known = pd.concat([table for table in rows if len(table)] or rows).set_index("process").sort_index()
    of = [part["stretches"].read().assign(batch=number) for number, part in enumerate(parts)]
    stretches = pd.concat([table for table in of if len(table)] or of, ignore_index=True)
    members, found = find_phases(known, stretches)
    members = members.join(stretches[["batch", "row", "first_forward_ns", "iterations", *_ABOUT]])
    every = _iterations(parts, members, batches)
    every["phase"] = every["stretch"].map(members.drop_duplicates("stretch").set_index("stretch")["phase"])
    table = _with_times(found, every)
    shown = _chosen(run.path, table, every, phase)
    if shown != ALL_PHASES:
        members, every = members[members["phase"] == shown], every[every["phase"] == shown]
    numbers = members.drop_duplicates("stretch").set_index("stretch").sort_index()
    iterations = every.drop(columns="phase").reset_index(drop=True)
    iterations.insert(0, "iteration", np.arange(len(iterations)))
    iterations.insert(1, "generation", iterations["stretch"].map(numbers["generation"]).astype("int64"))
    named = {"node": ("node", "first"), "rank": ("rank", "first"), "pid": ("pid", "first")}
    processes = members.groupby("process").agg(**named, steps=("iterations", "sum"))
    phases = _join_phases(run, parts, members, nodes)
    own = None if phases.source in PASS_LOGS else phases.table
    of_batch = [_own(members, number) for number in range(len(parts))]
    joined = list(
        batches.each(
            "ranks",
            join_ranks,
            *([part[name] for part in parts] for name in ("marks", "phases")),
            of_batch,
            shared=(own, iterations[["iteration", "stretch", "step"]]),
        )
    )
    ranks = [part["ranks"] for part in joined]
    iterations = _with_ranks(iterations, (part["sums"].read() for part in joined), phases)
    iterations = iterations.join(_slowest(ranks, len(iterations), processes, nodes, batches))
    size = max(processes["rank"].nunique(), known.loc[processes.index, "world_size"].max() if len(processes) else 0)
    spans = table.loc[[shown], ["begin_ns", "end_ns"]].to_numpy(np.int64) if shown else np.empty((0, 2), np.int64)
    unclear = _unclear_ranks(known, processes, spans)
    source = (phases.source, phases.why, phases.gradient_bytes, phases.comm_hook)
    steps = int(members.groupby("stretch")["iterations"].max().sum())
    grouped = known[known["group"] != ""]
    missing = missing_ranks(zip(grouped["rank"].tolist(), grouped["world_size"].tolist(), strict=True))
    return Work(table, shown, iterations, ranks, *source, processes, steps, unclear, int(size), missing)


def _own(members: pd.DataFrame, batch: int) -> pd.DataFrame:
    """Return the members of a phase in a batch, by the number of the stretch within the batch."""
    names = ["stretch", "generation", "rank", "node", "pid", "process"]
    return members.loc[members["batch"] == batch, [*names, "row"]].set_index("row")


def _with_times(phases: pd.DataFrame, iterations: pd.DataFrame) -> pd.DataFrame:
    """Add the number of the iterations of each phase, their sum, and the times of those that began with a step."""
    every = iterations.groupby("phase")["iteration_s"]
    table = phases.assign(iterations=every.size().reindex(phases.index, fill_value=0).astype("int64"))
    by = iterations[iterations["step"] > 0].groupby("phase")["iteration_s"]
    for name in ("median", "mean", "min", "max"):
        table[f"iteration_{name}_s"] = getattr(by, name)().reindex(phases.index).astype("Float64")
    return table.assign(iterations_s=every.sum().reindex(phases.index).astype("Float64"))


def _chosen(path: Path, phases: pd.DataFrame, iterations: pd.DataFrame, phase: int | None) -> int:
    if phase is None:
        return longest_phase(phases, iterations) if len(phases) else 0
    if phase != ALL_PHASES and phase not in phases.index:
        known = f"its phases are 1 to {len(phases)}" if len(phases) else "no steps were recorded"
        raise UsageError(f"{path} has no training phase {phase}: {known}")
    return phase


def _unclear_ranks(known: pd.DataFrame, processes: pd.DataFrame, spans: Integers) -> list[int]:
    """Return the ranks that other processes had while a phase ran (``spans``): their sockets are not told apart."""
    others = known[~known.index.isin(processes.index)]
    found: set[int] = set()
    for begin_ns, end_ns in spans.tolist():
        together = others[(others["begin_ns"] < end_ns) & (others["end_ns"] > begin_ns)]
        found |= set(together["rank"].tolist()) & set(processes["rank"].tolist())
    return sorted(found)


def read_ranks(nodes: Mapping[str, NodeLogs], files: Mapping[int, Path]) -> Frames:
    """Read the steps of some nodes.

    Args:
        nodes: the nodes' logs.
        files: their step logs by number of the process.

    Returns:
        ``marks``, the steps that end an iteration of their process, on the reference clock; ``phases``, computation and
        communication by the logs of passes (`Phases.table`); ``processes``, one row per process that stepped;
        ``stretches``, the second table of `ringtap.analysis.runs.group_steps_into_iterations.process_marks` with
        ``first_forward_ns``, ``gradient_bytes``, ``rebuilt_at``, ``comm_hook`` and ``source``, if it has passes.
    """
    steps, torn = read_steps(files)
    for path in torn:
        node = whole(path.parent.parent.name)
        nodes[node].torn.append(f"{node}/steps/{path.name}")
    steps = aligned(steps, nodes)
    marks, stretches = process_marks(steps, read_optimizers(files))
    phases, about = _logged(files, marks, nodes)
    stretches = stretches.join(about)
    processes = with_spans(read_processes(files), steps)
    names = ["process", "stretch", "index", "place", "start_ns", "end_ns", "end_mono_ns", "skipped", "backwards"]
    heads = marks.loc[marks["index"] == 0, ["process", "place", "stretch"]].merge(phases, on=["process", "place"])
    forward = heads[heads["forward_start_ns"] > 0].set_index("stretch")["forward_start_ns"].astype("Int64")
    stretches["first_forward_ns"] = forward.reindex(stretches.index)
    stretches["row"] = np.arange(len(stretches))
    return {
        "marks": marks[[*names, "optimizers", "optimizer_ns"]],
        "phases": phases,
        "processes": processes.rename_axis("process").reset_index(),
        "stretches": stretches,
    }


def _join_phases(
    run: JobRun, parts: Sequence[Mapping[str, BatchTable]], members: pd.DataFrame, nodes: Mapping[str, NodeLogs]
) -> Phases:
    """Return the source of computation and communication of all ranks; of logs, the tables are those of the parts."""
    timed = members[members["gradient_bytes"].notna()]
    if len(timed):
        every = members["process"].nunique()
        missing = every - timed["process"].nunique()
        source = str(timed["source"].mode()[0])
        which = f"{missing} of {counted(every, 'rank process', 'rank processes')}"
        why = f"no {_TIMED_BY[source]} times of {which}" if missing else ""
        sizes = timed.loc[timed["gradient_bytes"] > 0, "gradient_bytes"]
        gradient_bytes = float(sizes.median()) if len(sizes) else None
        hooks = ", ".join(sorted({str(name) for name in timed["comm_hook"] if name}))
        return Phases(_empty(), source, why, gradient_bytes, hooks, int(timed["rebuilt_at"].max()))
    first = members[members["rank"] == members["rank"].min()].drop_duplicates("process").set_index("process")
    rows = [marks[marks["process"].isin(first.index)] for marks in (part["marks"].read() for part in parts)]
    marks = pd.concat(rows) if rows else pd.DataFrame(columns=_ENDS)
    found = _horovod(marks.assign(node=marks["process"].map(first["node"])), nodes)
    return found or Phases(_empty(), "none", _nothing_timed(run.info.get("settings")))


def _nothing_timed(settings: Mapping[str, Any] | None) -> str:
    """Return why nothing timed computation and communication; ``settings`` are those of run.json."""
    recorders = (settings or {}).get("recorders")
    if recorders is None:
        return "neither DDP's own times (--collect ddp) nor Horovod's were recorded"
    if "ddp" not in recorders:
        return "DDP's own times were not recorded (--collect ddp)"
    hint = "" if "horovod" in recorders else " (Horovod on GPUs: --collect horovod)"
    return f"only exchanges by DistributedDataParallel and Horovod are timed, and none was recorded{hint}"


def _iterations(parts: Sequence[Mapping[str, BatchTable]], members: pd.DataFrame, batches: Batches) -> pd.DataFrame:
    """Return the iterations of all phases of a job (`ringtap.analysis.runs.run.join_iterations`).

    A stretch also has the iteration before its first steps if all of its ranks recorded their first forward pass.
    """
    marks, own = [part["marks"] for part in parts], [_own(members, number) for number in range(len(parts))]
    size = min(max(len(marks) // _ENDS_TASKS, 1), _ENDS_BATCHES)
    some = [slice(begin, begin + size) for begin in range(0, len(marks), size)]
    ends = _join_ends(batches.map(_ends_in, [marks[rows] for rows in some], [own[rows] for rows in some]))
    stepped = members[members["iterations"] > 0].groupby("stretch")
    heads = stepped["first_forward_ns"]
    first = heads.max()[heads.count() == heads.size()].astype("int64").reset_index(name="end_ns")
    ranks = stepped["rank"].nunique()
    first = first.assign(index=-1, ranks=first["stretch"].map(ranks))
    ends = pd.concat([first[list(ends)], ends]).sort_values(["stretch", "index"], kind="stable")
    return join_iterations(ends, ranks)


def _join_ends(parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Join the ends of steps of different ranks, one part at a time: those of a day are large."""
    by = ["stretch", "index"]
    ends = pd.DataFrame(columns=[*by, "ranks", "end_ns"]).astype("int64")
    for own in parts:
        both = pd.concat([ends, own]).groupby(by)
        ends = both.agg({"ranks": "sum", "end_ns": "max"}).reset_index()
    return ends


def _ends_in(marks_of: Sequence[BatchTable], members_of: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the ends of steps (`ringtap.analysis.runs.run.step_ends`) of the ranks of some batches."""
    return _join_ends(
        step_ends(_assigned(frame.read(_ENDS), members)) for frame, members in zip(marks_of, members_of, strict=True)
    )


def _assigned(marks: pd.DataFrame, members: pd.DataFrame) -> pd.DataFrame:
    """Return the marks of the stretches of ``members`` (`_own`), with the columns of these instead of their own."""
    own = marks["stretch"].to_numpy(np.int64)
    rows = members.index.get_indexer(pd.Index(own))
    marks = marks[rows >= 0].reset_index(drop=True)
    columns = {str(name): values.to_numpy()[rows[rows >= 0]] for name, values in members.items()}
    return marks.assign(**columns)


def check_iteration(path: Path, iterations: pd.DataFrame, iteration: Any) -> int:
    """Return the number of an iteration of the run at ``path``.

    Raises:
        UsageError: the run has no such iteration.
    """
    last = len(iterations) - 1
    if not (hasattr(iteration, "__index__") and 0 <= iteration.__index__() <= last):
        known = f"the iterations are 0 to {last}" if last >= 0 else "the run has none"
        raise UsageError(f"{path} has no iteration {iteration}: {known}")
    return int(iteration)


def join_ranks(
    _nodes: Mapping[str, NodeLogs],
    marks_of: BatchTable,
    phases_of: BatchTable,
    members: pd.DataFrame,
    horovod: pd.DataFrame | None,
    numbers: pd.DataFrame,
) -> Frames:
    """Join the iterations of some nodes' ranks.

    Args:
        marks_of: ``marks`` of `read_ranks`.
        phases_of: ``phases`` of it.
        members: their stretches of the phase, by number of the stretch in ``marks_of``: ``stretch`` of the job,
            ``generation``, ``rank``, ``node``, ``pid`` and ``process``.
        horovod: computation and communication by Horovod's timeline, instead of ``phases_of``; None: by the logs.
        numbers: ``iteration``, ``stretch`` and ``step`` of the job's iterations.

    Returns:
        ``ranks``, the times of each rank in each iteration; ``sums``, what `_with_ranks` joins of them.
    """
    marks = _assigned(marks_of.read(), members)
    ranks = _rank_iterations(marks, numbers, phases_of.read() if horovod is None else horovod)
    spent_s = ranks["compute_s"] + ranks["exposed_s"] + ranks["optimizer_s"]
    by = ranks.assign(unattributed_s=ranks["iteration_s"] - spent_s).groupby("iteration")
    sums = pd.DataFrame({"skipped": by["skipped"].any(), "exposed_least_s": by["exposed_s"].min()})
    for name in ("backwards", "optimizers", "compute_s"):
        sums[name] = by[name].max()
    for name in _MEANS:
        sums[name], sums[f"{name}_count"] = by[name].sum(min_count=1), by[name].count()
    return {"ranks": ranks, "sums": sums.reset_index()}


_MEANS = ("communication_s", "exposed_s", "overlap_s", "unattributed_s")
# how the other ``sums`` of batches are joined
_JOINED: dict[str, np.ufunc] = {
    **dict.fromkeys(("skipped", "backwards", "optimizers", "compute_s"), np.fmax),
    "exposed_least_s": np.fmin,
}


def _rank_iterations(marks: pd.DataFrame, numbers: pd.DataFrame, phases: pd.DataFrame) -> pd.DataFrame:
    """Return the times of each rank in each iteration."""
    rows = marks.rename(columns={"index": "step", "start_ns": "step_start_ns"})
    by = [rows["process"], rows["stretch"]]
    rows["begin_ns"] = rows["end_ns"].astype("Int64").groupby(by).shift()
    rows["iteration_s"] = rows["end_mono_ns"].groupby(by).diff() / 1e9
    rows = rows.merge(numbers, on=["stretch", "step"])
    times = {name: phases[name].astype("Int64") for name in ("forward_start_ns", "ready_ns")}
    known = phases.assign(**{name: values.mask(values == 0) for name, values in times.items()})
    rows = rows.merge(known, how="left", on=["process", "place"])
    rows["begin_ns"] = rows["begin_ns"].fillna(rows["forward_start_ns"])  # before the first step
    rows["iteration_s"] = rows["iteration_s"].astype("Float64").fillna((rows["end_ns"] - rows["begin_ns"]) / 1e9)
    rows["optimizer_s"] = rows["optimizer_ns"] / 1e9
    names = ["iteration", "rank", "node", "pid", "process", "place", "begin_ns", "end_ns", "iteration_s"]
    names += ["step_start_ns", "ready_ns", "optimizer_s", *PHASES, "syncs", "synced_bytes"]
    names += ["skipped", "backwards", "optimizers"]
    result = rows.sort_values(["iteration", "rank"], ignore_index=True)[names]
    return result.astype(dict.fromkeys(["optimizer_s", *PHASES, "synced_bytes"], "Float64") | {"syncs": "Int64"})


def _with_ranks(iterations: pd.DataFrame, parts: Iterable[pd.DataFrame], phases: Phases) -> pd.DataFrame:
    """Add the times of the ranks to the iterations, from the ``sums`` of `join_ranks`."""
    table = iterations.copy()
    joined = {name: np.full(len(table), np.nan) for name in _JOINED}
    joined |= {f"{name}{end}": np.zeros(len(table)) for name in _MEANS for end in ("", "_count")}
    for part in parts:
        rows = part["iteration"].to_numpy(np.int64)
        for name, so_far in joined.items():
            own = part[name].to_numpy(np.float64, na_value=np.nan)
            so_far[rows] = _JOINED[name](so_far[rows], own) if name in _JOINED else so_far[rows] + np.nan_to_num(own)
    # the first of a stretch lacks what came before its forward pass
    is_first = table["stretch"] == table.groupby("generation")["stretch"].transform("min")
    table["warm_up"] = (table["step"] == 0) | is_first & (
        table["step"] <= max(WARM_UP_ITERATIONS - 1, phases.rebuilt_at)
    )
    table["skipped"] = np.nan_to_num(joined["skipped"]) > 0
    for name in ("backwards", "optimizers"):
        table[name] = np.clip(np.nan_to_num(joined[name]), 0, 2**53).astype(np.int64)  # a damaged log has any number
    table["compute_s"] = joined["compute_s"]
    for name in _MEANS:
        count = joined[f"{name}_count"]
        table[name] = joined[name] / np.where(count > 0, count, np.nan)
    table["exposed_least_s"] = joined["exposed_least_s"]
    return table.astype(dict.fromkeys(["compute_s", *_MEANS, "exposed_least_s"], "Float64"))


_BLOCK_ROWS = 2_000_000  # ranks times iterations that are compared at a time
_SLOWEST = {"last_rank": "Int64", "slowest_rank": "Int64", "slowest_by_s": "Float64", "clock_error_s": "Float64"}
_SLOWEST |= {"slowest_by_ready": "bool"}


def _slowest(
    ranks: Sequence[BatchTable],
    iterations: int,
    processes: pd.DataFrame,
    nodes: Mapping[str, NodeLogs],
    batches: Batches,
) -> pd.DataFrame:
    """Find the slowest rank of each iteration, in blocks of iterations."""
    known = processes[["rank", "node"]].copy()
    known["error_ns"] = known["node"].map({name: node.clock.error_ns for name, node in nodes.items()}).astype("Float64")
    known["node"] = pd.factorize(known["node"])[0]
    length = max(1, _BLOCK_ROWS // max(known["rank"].nunique(), 1))
    blocks = [(begin, begin + length) for begin in range(0, max(iterations, 1), length)]
    return pd.concat(batches.map(partial(_slowest_in, ranks, known, _worst_error(nodes)), blocks))


def _slowest_in(
    ranks: Sequence[BatchTable], processes: pd.DataFrame, worst_error_ns: Any, block: tuple[int, int]
) -> pd.DataFrame:
    """Find the slowest rank of each iteration: the last with all gradients ready or, if not known, to end its step.

    Args:
        ranks: ``ranks`` of `join_ranks`, of all nodes.
        processes: ``rank``, ``node`` (any number) and ``error_ns`` of the node's clock, by number of the process.
        worst_error_ns: largest error of a clock; NA if one is not known.
        block: the first iteration, and that after the last.
    """
    names = ["iteration", "process", "ready_ns", "end_ns"]
    table = pd.concat([frame.read(names, block) for frame in ranks], ignore_index=True)
    iteration, end_ns = (table[name].to_numpy(np.int64) for name in ("iteration", "end_ns"))
    process = processes.index.get_indexer(pd.Index(table["process"]))
    rank, node = (processes[name].to_numpy(np.int64)[process] for name in ("rank", "node"))
    ready_ns, is_ready = table["ready_ns"].to_numpy(np.int64, na_value=0), table["ready_ns"].notna().to_numpy()
    # iterations with several ranks
    least, length = block[0], block[1] - block[0]
    by_ready = np.bincount(iteration[~is_ready] - least, minlength=length) == 0
    at_ns = compared_ns(by_ready[iteration - least], ready_ns, end_ns)
    order = np.lexsort((rank, at_ns, iteration))
    order = order[np.bincount(iteration - least, minlength=length)[iteration[order] - least] > 1]
    iteration, at_ns, end_ns, rank, node = (values[order] for values in (iteration, at_ns, end_ns, rank, node))
    numbers, begins, counts = np.unique(iteration, return_index=True, return_counts=True)
    if not len(numbers):
        return pd.DataFrame(index=pd.Index([], name="iteration"), columns=list(_SLOWEST)).astype(_SLOWEST)
    last = begins + counts - 1
    # median of all but the last, relative to the first rank, so that a float is exact
    others_ns = sum(at_ns[begins + (counts - more) // 2] - at_ns[begins] for more in (2, 1)) / 2
    is_last_end = end_ns == np.repeat(np.maximum.reduceat(end_ns, begins), counts)
    errors_ns = processes["error_ns"].array[process[order][last]] + worst_error_ns
    result = {
        "last_rank": np.minimum.reduceat(np.where(is_last_end, rank, np.iinfo(np.int64).max), begins),
        "slowest_rank": rank[last],
        "slowest_by_s": (at_ns[last] - at_ns[begins] - others_ns) / 1e9,
        "clock_error_s": errors_ns / 1e9,
        "slowest_by_ready": by_ready[numbers - least],
    }
    found = pd.DataFrame(result, index=pd.Index(numbers, name="iteration")).astype(_SLOWEST)
    is_alone = np.maximum.reduceat(node, begins) == np.minimum.reduceat(node, begins)
    found.loc[is_alone, "clock_error_s"] = 0.0
    return found


def _worst_error(nodes: Mapping[str, NodeLogs]) -> Any:
    """Return the largest error of a clock, in ns; NA if one is not known."""
    errors = [node.clock.error_ns for node in nodes.values()]
    return pd.NA if not errors or None in errors else max(error for error in errors if error is not None)
