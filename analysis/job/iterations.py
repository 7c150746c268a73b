"""Iterations of a job on one clock, and what each rank did in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ringtap.analysis.job.logs import NodeLogs
from ringtap.analysis.job.phases import PHASES, Phases, phases_of
from ringtap.analysis.runs import JobRun, iterations_of, marks_and_processes, monotonic

# The first iteration allocates and finds the order of gradients; after it DDP rebuilds its buckets, in the second.
WARM_UP_ITERATIONS = 2
# what a clock without a record was set by, at least, to be told from two readings that something came between
_LEAST_SET_NS, _MOST_SLEW = 100_000_000, 500e-6


@dataclass(frozen=True)
class Work:
    """What the ranks' own records say.

    Attributes:
        iterations: one row an iteration, in order of time (`ringtap.analysis.job.run.Job.iterations`).
        rank_iterations: one row an iteration and rank.
        source: where compute and communication come from: ``ddp``, ``horovod`` or ``none``.
        why: a sentence where ``source`` is ``none``, or where a part is missing.
        gradient_bytes: bytes that a rank hands to all-reduce at each synchronisation of every module; None: not known.
        processes: the processes that stepped (`ringtap.analysis.runs.marks_and_processes`).
        world_size: ranks that the job has, as these say themselves.
    """

    iterations: pd.DataFrame
    rank_iterations: pd.DataFrame
    source: str
    why: str
    gradient_bytes: float | None
    processes: pd.DataFrame
    world_size: int


def build(run: JobRun, nodes: Mapping[str, NodeLogs]) -> Work:
    """Join the ranks' records of a run."""
    steps = _aligned(run.steps, nodes)
    marks, found = marks_and_processes(steps)
    phases = phases_of(run, marks, nodes)
    iterations = iterations_of(_with_beginnings(marks, phases))
    ranks = _rank_iterations(marks, iterations, phases)
    iterations = _with_ranks(iterations, ranks, phases, nodes)
    size = max([found["rank"].nunique(), *(_world_size(nodes[node]) for node in found["node"].unique())])
    return Work(iterations, ranks, phases.source, phases.why, phases.gradient_bytes, found, size)


def _world_size(node: NodeLogs) -> int:
    """The number of ranks by the step logs of a node; 0 where they do not say."""
    logs = [found[0].about for name in node.names("steps/rank*.rec") if (found := node.records(name))]
    return max((size for about in logs if isinstance(size := about.get("world_size"), int)), default=0)


def _aligned(steps: pd.DataFrame, nodes: Mapping[str, NodeLogs]) -> pd.DataFrame:
    """Steps with their times on the reference node's clock.

    Where a node's clock was set and nothing recorded when, they go by CLOCK_MONOTONIC.
    """
    columns = {name: steps[name].to_numpy(np.int64).copy() for name in ("start_ns", "end_ns")}
    for node, rows in steps.groupby("node").indices.items():
        logs, mine = nodes[str(node)], steps.iloc[rows]
        unknown = not (logs.clock.reference or logs.clock.steps) and _was_set(mine)
        if unknown:
            logs.problems.append(
                f"the clock of {node} was set during the run and clock/clock.json does not say when: its steps are "
                "timed by CLOCK_MONOTONIC, all else that it recorded is as the clock showed it"
            )
        for name, values in columns.items():
            mono_ns = mine[name.replace("_ns", "_mono_ns")].to_numpy(np.int64)
            if unknown:
                values[rows] = monotonic(mine, name.removesuffix("_ns"))
            else:
                values[rows] = logs.clock.on_reference(values[rows], mono_ns)
    return steps.assign(**columns)


def _was_set(steps: pd.DataFrame) -> bool:
    """Tell if a node's clock was set between its steps, by more than slewing or a pause between two readings."""
    steps = steps.sort_values("end_mono_ns")
    gap_ns, mono_ns = (steps["end_ns"] - steps["end_mono_ns"]).to_numpy(), steps["end_mono_ns"].to_numpy()
    return bool((np.abs(np.diff(gap_ns)) > _LEAST_SET_NS + np.diff(mono_ns) * _MOST_SLEW).any())


def _with_beginnings(marks: pd.DataFrame, phases: Phases) -> pd.DataFrame:
    """The marks, and before each process's first one its first forward pass, where all ranks know of it."""
    first = phases.table[(phases.table["index"] == 0) & (phases.table["forward_start_ns"] > 0)]
    begins = first.set_index("process")["forward_start_ns"]
    processes = marks.drop_duplicates("process")
    known = processes["process"].isin(begins.index)
    whole = known.groupby(processes["generation"]).transform("all")
    heads = processes[whole].assign(index=-1)
    heads["end_ns"] = heads["process"].map(begins).astype("int64")
    return pd.concat([marks, heads], ignore_index=True).sort_values(["process", "index"], ignore_index=True)


def _rank_iterations(marks: pd.DataFrame, iterations: pd.DataFrame, phases: Phases) -> pd.DataFrame:
    """Each rank's part in each iteration."""
    numbers = iterations.assign(iteration=np.arange(len(iterations)))[["iteration", "generation", "step"]]
    rows = marks.rename(columns={"index": "place", "start_ns": "step_start_ns"})
    rows["begin_ns"] = rows["end_ns"].astype("Int64").groupby(rows["process"]).shift()
    rows = rows.merge(numbers, left_on=["generation", "place"], right_on=["generation", "step"])
    times = {name: phases.table[name].astype("Int64") for name in ("forward_start_ns", "ready_ns")}
    known = phases.table.assign(**{name: values.mask(values == 0) for name, values in times.items()})
    rows = rows.merge(known, how="left", left_on=["process", "place"], right_on=["process", "index"])
    rows["begin_ns"] = rows["begin_ns"].fillna(rows["forward_start_ns"])  # before the first step
    rows["optimizer_s"] = (rows["end_ns"] - rows["step_start_ns"]) / 1e9
    names = ["iteration", "rank", "node", "pid", "process", "place", "begin_ns", "end_ns", "step_start_ns", "ready_ns"]
    names += ["optimizer_s", *PHASES, "syncs", "synced_bytes", "skipped", "backwards", "optimizers"]
    result = rows.sort_values(["iteration", "rank"], ignore_index=True)[names]
    return result.astype(dict.fromkeys(["optimizer_s", *PHASES, "synced_bytes"], "Float64") | {"syncs": "Int64"})


def _with_ranks(
    iterations: pd.DataFrame, ranks: pd.DataFrame, phases: Phases, nodes: Mapping[str, NodeLogs]
) -> pd.DataFrame:
    """The iterations with what their ranks did in them."""
    table = iterations.copy()
    by = ranks.groupby("iteration")
    table["warm_up"] = table["step"] <= max(WARM_UP_ITERATIONS - 1, phases.rebuilt_at)
    table["skipped"] = by["skipped"].any().reindex(table.index, fill_value=False)
    table["backwards"] = by["backwards"].max().reindex(table.index, fill_value=0)
    table["optimizers"] = by["optimizers"].max().reindex(table.index, fill_value=0)
    table["compute_s"] = by["compute_s"].max()
    for name in ("communication_s", "exposed_s", "overlap_s"):
        table[name] = by[name].mean()
    table["exposed_least_s"] = by["exposed_s"].min()
    slowest = _slowest(ranks, nodes)
    return table.join(slowest)


def _slowest(ranks: pd.DataFrame, nodes: Mapping[str, NodeLogs]) -> pd.DataFrame:
    """The rank that the others waited for: whose last gradient was ready last, else whose step ended last."""
    counts = ranks.groupby("iteration")["rank"].transform("count")
    ranks = ranks[counts > 1]
    known = ranks["ready_ns"].notna().groupby(ranks["iteration"]).transform("all")
    at_ns = ranks["ready_ns"].where(known, ranks["end_ns"]).astype("int64")
    rows = ranks.assign(at_ns=at_ns, by_ready=known)
    rows = rows.sort_values(["iteration", "at_ns"], kind="stable")
    last = rows.groupby("iteration").tail(1).set_index("iteration")
    others = rows[rows.duplicated("iteration", keep="last")]
    # from the first one, so that a float holds it
    earliest = rows.groupby("iteration")["at_ns"].first()
    behind = (others["at_ns"] - others["iteration"].map(earliest)).groupby(others["iteration"]).median()
    ended = ranks.loc[ranks.groupby("iteration")["end_ns"].idxmax()].set_index("iteration")["rank"]
    result = pd.DataFrame({"last_rank": ended, "slowest_rank": last["rank"]}, dtype="Int64")
    result["slowest_by_s"] = ((last["at_ns"] - earliest - behind) / 1e9).astype("Float64")
    errors = last["node"].map({name: node.clock.error_ns for name, node in nodes.items()}).astype("Float64")
    alone = ranks.groupby("iteration")["node"].nunique() == 1
    error_s = (errors + _worst_error(nodes)) / 1e9
    result["clock_error_s"] = error_s.where(~alone, 0.0)
    result["slowest_by_ready"] = last["by_ready"]
    return result


def _worst_error(nodes: Mapping[str, NodeLogs]) -> Any:
    """The largest error of a clock, in ns; NA where one is not known."""
    errors = [node.clock.error_ns for node in nodes.values()]
    return pd.NA if not errors or None in errors else max(error for error in errors if error is not None)
