"""Finds the training phases of a job: which recorded steps are its iterations, and which ranks make them together.

A *training phase* is a world of ranks, the optimizers that step together, and a stretch of time. The rules and the
evidence that each needs are in docs/reference/iterations.md:

1. Each process has *stretches* of steps (`find_stretches`): the steps of one optimizer, the rounds of several that
   alternate, or the marks of ``ringtap.step()``.
2. Processes of one *world* are the ranks of one process group or of one launch, which ran at the same time
   (`find_worlds`). A later world of the same size, started by the same command, is the same job, started again.
3. Stretches of the ranks of a world are one stretch of the job. Those with alike optimizers are one phase
   (`find_phases`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ringtap.core.run_directory_schema import MARK_RECORD, MAX_STEPS_IN_A_ROW, REGULAR_SHARE, SKIPPED_RECORD
from ringtap.core.units import counted

# `mode` of a stretch: what ends its iterations
EACH, ROUND, MOST, MARKED = "step", "round", "most frequent optimizer", "mark"
_MAX_NAMED = 3
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stretch:
    """Consecutive step records of one process whose iterations end by one rule.

    Attributes:
        begin: its first record.
        end: the record after its last one.
        ends: the records that end an iteration, ascending.
        mode: `EACH` if each step ends an iteration; `ROUND` if the last step of each round of several optimizers does;
            `MOST` if these make no regular rounds, and each step of the one with the most steps does; `MARKED` if the
            program marks its iterations.
        counts: steps in an iteration, by optimizer; 0 for an optimizer that steps at irregular times.
    """

    begin: int
    end: int
    ends: Integers
    mode: str
    counts: Mapping[int, int]


def find_stretches(optimizers: Integers, kinds: Integers) -> list[Stretch]:
    """Split the step records of a process, in their order, into stretches.

    If the process marks its iterations, marks count. Steps before the first mark or after the last one that no usual
    iteration holds are stretches of their own.

    Args:
        optimizers: number of the optimizer of each record.
        kinds: ``kind`` of each record.

    Returns:
        Stretches in order, which together hold every record once.
    """
    marks = np.flatnonzero(kinds == MARK_RECORD)
    if not len(marks):
        return list(_split(optimizers, 0))
    usual = int(np.diff(marks).max()) if len(marks) > 1 else int(marks[0]) + 1
    first = max(0, int(marks[0]) + 1 - usual)
    end = int(marks[-1]) + 1
    if len(kinds) - end < usual:
        end = len(kinds)
    within = optimizers[first:end][kinds[first:end] != MARK_RECORD]
    counts = dict.fromkeys(np.unique(within).tolist(), 0)
    return [
        *_split(optimizers[:first], 0),
        Stretch(first, end, marks, MARKED, counts),
        *_split(optimizers[end:], end),
    ]


def _split(optimizers: Integers, offset: int) -> Iterator[Stretch]:
    """Yield the stretches of steps without marks; ``offset`` is the number of the first record."""
    if not len(optimizers):
        return
    heads = np.flatnonzero(np.concatenate(([True], optimizers[1:] != optimizers[:-1])))
    lengths = np.diff(np.append(heads, len(optimizers)))
    runs = optimizers[heads]
    # a run of many steps of one optimizer is a stretch of its own, and so are optimizers that others do not interrupt
    is_long = lengths > MAX_STEPS_IN_A_ROW
    if len(runs) == 1:
        alone = is_long | True
    else:
        last = pd.Series(np.arange(len(runs))).groupby([runs, np.cumsum(is_long), is_long])
        reach = np.maximum.accumulate(last.transform("max").to_numpy())
        closes = reach == np.arange(len(runs))
        closes |= is_long
        closes[:-1] |= is_long[1:]
        alone = closes & np.concatenate(([True], closes[:-1]))
    place = 0
    while place < len(runs):
        after = place + 1 if alone[place] else place + int(np.argmax(closes[place:])) + 1
        begin = int(heads[place])
        end = int(heads[after]) if after < len(heads) else len(optimizers)
        if after == place + 1:
            yield Stretch(
                offset + begin, offset + end, np.arange(offset + begin, offset + end), EACH, {int(runs[place]): 1}
            )
        else:
            yield _rounds(runs[place:after].tolist(), lengths[place:after].tolist(), offset + begin)
        place = after


def _rounds(runs: list[int], lengths: list[int], begin: int) -> Stretch:
    """Return a stretch of several optimizers that alternate.

    A round ends before an optimizer steps that has stepped in it already, and not just before. An incomplete last round
    ends no iteration.

    Args:
        runs: the optimizer of each run of steps.
        lengths: number of steps of each run.
        begin: the first record.
    """
    period = runs.index(runs[0], 1)
    if runs[period:] == runs[:-period] and len(set(runs[:period])) == period:
        heads = list(range(0, len(runs), period))
    else:
        heads, seen = [0], {runs[0]}
        for number in range(1, len(runs)):
            if runs[number] in seen:
                heads.append(number)
                seen.clear()
            seen.add(runs[number])
    edges = np.cumsum([0, *lengths])
    rounds = []
    for head, after in zip(heads, [*heads[1:], len(runs)], strict=True):
        rounds.append(tuple(zip(runs[head:after], lengths[head:after], strict=True)))
    usual = Counter(tuple(sorted(each)) for each in rounds).most_common(1)[0][0]
    is_usual = [tuple(sorted(each)) == usual for each in rounds]
    steps = dict(usual)
    is_whole = is_usual[-1] or not all(count <= steps.get(optimizer, 0) for optimizer, count in rounds[-1])
    whole = len(rounds) if is_whole else len(rounds) - 1
    end = begin + int(edges[-1])
    if sum(is_usual) >= REGULAR_SHARE * whole:
        ends = begin + edges[[*heads[1:], len(runs)][:whole]] - 1
        return Stretch(begin, end, ends.astype(np.int64), ROUND, steps)
    totals = Counter[int]()
    for optimizer, length in zip(runs, lengths, strict=True):
        totals[optimizer] += length
    most = max(totals, key=lambda optimizer: (totals[optimizer], -optimizer))
    ends = begin + np.flatnonzero(np.repeat(runs, lengths) == most)
    return Stretch(begin, end, ends.astype(np.int64), MOST, {optimizer: int(optimizer == most) for optimizer in totals})


def process_marks(
    steps: pd.DataFrame, optimizers: Mapping[tuple[int, int], str] | None = None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Find the iterations of each process.

    Args:
        steps: as from `ringtap.analysis.runs.run.aligned`, or those of one node.
        optimizers: a description of each optimizer by number of the process and of the optimizer, equal for alike ones.

    Returns:
        The step records that end an iteration, by process and time, with ``stretch`` (row of the second table),
        ``index`` (from 0 in the stretch), ``place`` (from 0 in the process), ``skipped`` (AMP skipped a step of the
        iteration), ``backwards`` (its backward passes), ``optimizers`` (optimizers of the stretch) and ``optimizer_ns``
        (time in its steps, without the passes within these).

        The stretches, in order: ``process``, ``part`` (from 0 in the process), ``begin_ns``, ``end_ns``,
        ``iterations`` (ends of these), ``steps``, ``left_out`` (steps after the last iteration), ``mode``, and ``what``
        (its optimizers and their steps in words).
    """
    steps = steps.sort_values("process", kind="stable", ignore_index=True)  # records of a process stay in order
    process, optimizer, kind = (steps[name].to_numpy(np.int64) for name in ("process", "optimizer", "kind"))
    start_ns, end_ns = (steps[f"{side}_ns"].to_numpy(np.int64) for side in ("start", "end"))
    is_step = kind != MARK_RECORD
    spent_ns = steps["end_mono_ns"].to_numpy(np.int64) - steps["start_mono_ns"].to_numpy(np.int64)
    if "passes_ns" in steps:
        spent_ns = np.maximum(spent_ns - steps["passes_ns"].to_numpy(np.int64), 0)
    amounts = {
        "skipped": (kind == SKIPPED_RECORD).astype(np.int64),
        "backwards": steps["backwards"].to_numpy(np.int64),
        "optimizer_ns": spent_ns * is_step,
    }
    sums = {name: np.concatenate(([0], np.cumsum(values))) for name, values in amounts.items()}
    stepped = np.concatenate(([0], np.cumsum(is_step)))
    begins = np.flatnonzero(np.concatenate(([True], process[1:] != process[:-1]))) if len(process) else process
    ends_of: list[Integers] = []
    rows: list[dict[str, Any]] = []
    for first, after in zip(begins.tolist(), [*begins[1:].tolist(), len(process)], strict=False):
        number = int(process[first])
        for part, found in enumerate(find_stretches(optimizer[first:after], kind[first:after])):
            begin, end, ends = first + found.begin, first + found.end, first + found.ends
            what = _in_words(found, number, optimizers or {})
            row = {"process": number, "part": part, "begin_ns": int(start_ns[begin]), "end_ns": int(end_ns[end - 1])}
            row |= {"iterations": len(ends), "steps": int(stepped[end] - stepped[begin])}
            row["left_out"] = int(stepped[end] - stepped[ends[-1] + 1]) if len(ends) else row["steps"]
            rows.append(row | {"mode": found.mode, "what": what, "first": begin, "optimizers": len(found.counts)})
            ends_of.append(ends)
    stretches = pd.DataFrame(rows, columns=[*_STRETCH, "first", "optimizers"]).astype(_STRETCH)
    at = np.concatenate([np.empty(0, np.int64), *ends_of])
    of = np.repeat(np.arange(len(ends_of)), [len(ends) for ends in ends_of])
    heads = np.concatenate(([True], of[1:] != of[:-1])) if len(of) else np.empty(0, bool)
    before = np.where(heads, stretches["first"].to_numpy(np.int64)[of], np.concatenate(([0], at[:-1] + 1))[: len(at)])
    marks = steps.iloc[at].assign(stretch=of, optimizers=stretches["optimizers"].to_numpy(np.int64)[of])
    marks["index"] = np.arange(len(at)) - np.repeat(
        np.flatnonzero(heads), np.diff(np.append(np.flatnonzero(heads), len(at)))
    )
    marks = marks.assign(**{name: total[at + 1] - total[before] for name, total in sums.items()})
    marks["skipped"] = marks["skipped"] > 0
    marks["place"] = marks.groupby("process").cumcount()
    return marks.reset_index(drop=True), stretches.drop(columns=["first", "optimizers"])


_STRETCH = dict.fromkeys(("process", "part", "begin_ns", "end_ns", "iterations", "steps", "left_out"), "int64")
_STRETCH |= {"mode": "object", "what": "object"}


def _in_words(found: Stretch, process: int, optimizers: Mapping[tuple[int, int], str]) -> str:
    """Return the optimizers of a stretch with their steps in words; without a description, an optimizer's number."""
    names = {number: optimizers.get((process, number), f"optimizer {number}") for number in found.counts}
    if found.mode == EACH:
        return next(iter(names.values()))
    alike = Counter[tuple[str, int]]()
    for number, count in found.counts.items():
        alike[names[number], count] += 1
    parts = []
    for (name, count), several in sorted(alike.items(), key=lambda item: (-item[0][1], item[0][0])):
        words = name if several == 1 else f"{several} × {name}"
        if found.mode == ROUND:
            words = f"{counted(count, 'step')} of {words}" + (" each" if several > 1 else "")
        elif found.mode == MOST and not count:
            words += " at irregular times"
        parts.append(words)
    more = len(parts) - _MAX_NAMED
    text = ", ".join(parts[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
    if found.mode == MARKED:
        text = f"marks of ringtap.step() ({text})" if text else "marks of ringtap.step()"
    return text


def find_worlds(processes: pd.DataFrame) -> pd.DataFrame:
    """Find the worlds of a job: the processes that were the ranks of one process group, or of one launch.

    Processes belong to one world if their logs name the same number of ranks and the same meeting point, and if they
    ran at the same time, each rank once. A process without a process group does not join those that have one. Where one
    rank runs twice at the same time, and nothing tells the two apart, each process is a world of its own.

    A world is the same job as an earlier one, started again, if it has as many ranks, was started by the same command,
    and if no two such worlds ran at the same time.

    Args:
        processes: one row per step log: ``node``, ``rank``, ``pid``, ``world_size`` (0: not known), ``group``,
            ``address``, ``command``, ``begin_ns`` and ``end_ns``.

    Returns:
        By row: ``world`` (from 0, by time), ``job`` (from 0; worlds of one job have the same) and ``generation``
        (number of earlier worlds of the job).
    """
    rank, size = processes["rank"].to_numpy(np.int64), processes["world_size"].to_numpy(np.int64).copy()
    is_unclear = (size < 1) | (rank >= size)
    if is_unclear.any():  # a log has no world, or a rank that its world is too small for: ranks and times must do
        size[:] = 0
    table = processes.assign(size=size, grouped=processes["group"].astype(bool).to_numpy())
    table["port"] = [address.rpartition(":")[2] for address in table["address"]]
    worlds: list[list[int]] = [[row] for row in np.flatnonzero(size == 1).tolist()]
    several = table.reset_index(drop=True)[size != 1]
    for _, part in several.groupby(["size", "grouped", "port"], sort=False):
        worlds += _by_time(part, ["address", "command"])
    begin_ns, end_ns = (processes[name].to_numpy(np.int64) for name in ("begin_ns", "end_ns"))
    worlds.sort(key=lambda rows: (int(begin_ns[rows].min()), rows))
    return _jobs(table.reset_index(drop=True), worlds, begin_ns, end_ns)


def _by_time(part: pd.DataFrame, keys: Sequence[str]) -> list[list[int]]:
    """Split processes of one size and meeting point into worlds; ``keys`` tell those with the same rank apart."""
    rows = part.sort_values("begin_ns", kind="stable")
    begin_ns, end_ns = rows["begin_ns"].to_numpy(np.int64), rows["end_ns"].to_numpy(np.int64)
    is_later = begin_ns[1:] >= np.maximum.accumulate(end_ns)[:-1]
    found: list[list[int]] = []
    for _, together in rows.groupby(np.concatenate(([0], np.cumsum(is_later)))):
        if together["rank"].is_unique:
            found.append(together.index.tolist())
        elif keys and together[keys[0]].nunique() > 1:
            for _, own in together.groupby(keys[0], sort=False):
                found += _by_time(own, keys[1:])
        elif len(keys) > 1:
            found += _by_time(together, keys[1:])
        else:
            found += _by_rank(together)
    return found


def _by_rank(together: pd.DataFrame) -> list[list[int]]:
    """Split processes, some of the same rank: a rank that begins again begins a new world, if it had ended."""
    found: list[list[int]] = [[]]
    ended: dict[int, int] = {}
    ranks: set[int] = set()
    columns = (together[name].tolist() for name in ("rank", "begin_ns", "end_ns"))
    for row, rank, begin_ns, end_ns in zip(together.index.tolist(), *columns, strict=True):
        if begin_ns < ended.get(rank, begin_ns):
            return [[number] for number in together.index.tolist()]
        if rank in ranks:
            found.append([])
            ranks.clear()
        found[-1].append(row)
        ranks.add(rank)
        ended[rank] = end_ns
    return found


def _jobs(table: pd.DataFrame, worlds: list[list[int]], begin_ns: Integers, end_ns: Integers) -> pd.DataFrame:
    """Number the worlds, and the jobs that were started again."""
    firsts = [min(rows, key=lambda row: (table.at[row, "rank"], row)) for rows in worlds]
    keys = table.loc[firsts, ["size", "grouped", "command", "node"]].copy()
    keys.loc[keys["size"] != 1, "node"] = ""
    keys["begin_ns"] = [int(begin_ns[rows].min()) for rows in worlds]
    keys["end_ns"] = [int(end_ns[rows].max()) for rows in worlds]
    keys["process"] = table.loc[firsts, "node"] + "/" + table.loc[firsts, "pid"].astype(str)
    keys.index = pd.RangeIndex(len(keys))
    job, generation = np.arange(len(worlds)), np.zeros(len(worlds), np.int64)
    for _, same in keys.groupby(["size", "grouped", "command", "node"], sort=False, dropna=False):
        # of worlds at the same time, os.exec alone says which one goes on: it keeps the process
        is_serial = (same["begin_ns"].to_numpy()[1:] >= np.maximum.accumulate(same["end_ns"].to_numpy())[:-1]).all()
        for _, own in [(None, same)] if is_serial else list(same.groupby("process", sort=False)):
            job[own.index], generation[own.index] = own.index[0], np.arange(len(own))
    _, job = np.unique(job, return_inverse=True)
    world = np.zeros(len(table), np.int64)
    for number, rows in enumerate(worlds):
        world[rows] = number
    return pd.DataFrame({"world": world, "job": job[world], "generation": generation[world]})


def find_phases(processes: pd.DataFrame, stretches: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Join the stretches of the ranks of each world, and find the job's training phases.

    Args:
        processes: as for `find_worlds`, by number of the process.
        stretches: the second table of `process_marks`, of all processes.

    Returns:
        By row of ``stretches``: ``stretch`` (number of the stretch of the job, in order of time), ``phase`` (from 1, in
        order of time), ``world``, ``generation``, ``rank``, ``node``, ``pid`` and ``process``.

        The phases, by number: ``what``, ``mode``, ``world_size``, ``begin_ns``, ``end_ns``, ``ranks``, ``starts``
        (of its job in which it occurs), ``stretches``, ``steps`` (all recorded ones, of all ranks), ``left_out`` (those
        of them that end no iteration), ``node`` and ``pid`` of its first process, and ``is_concurrent`` (another job's
        phase ran at the same time).
    """
    of = find_worlds(processes)
    of.index = processes.index
    members = stretches.join(of, on="process").join(processes[["rank", "node", "pid", "world_size"]], on="process")
    number, count = np.full(len(members), -1), 0
    for rows in members.groupby("world", sort=False).indices.values():
        own = _matched(members.iloc[rows])
        number[rows] = own + count
        count += int(own.max()) + 1
    members["stretch"] = number
    first = members.sort_values(["stretch", "rank"], kind="stable").drop_duplicates("stretch").set_index("stretch")
    spans = members.groupby("stretch").agg(begin_ns=("begin_ns", "min"), end_ns=("end_ns", "max"))
    order = spans.sort_values(["begin_ns", "end_ns"], kind="stable").index
    members["stretch"] = members["stretch"].map(pd.Series(np.arange(len(order)), index=order)).astype("int64")
    kinds = first[["job", "mode", "what"]].loc[order].reset_index(drop=True)
    phase = kinds.groupby(["job", "mode", "what"], sort=False).ngroup() + 1
    members["phase"] = phase.to_numpy(np.int64)[members["stretch"]] if len(members) else np.empty(0, np.int64)
    # of an iteration that not every rank ended, no step is in a whole one
    beyond = members["iterations"] - members.groupby("stretch")["iterations"].transform("min")
    each = (members["steps"] - members["left_out"]) // members["iterations"].clip(lower=1)
    members["left_out"] += beyond * each
    by = members.groupby("phase")
    table = by.agg(
        what=("what", "first"),
        mode=("mode", "first"),
        world_size=("world_size", "max"),
        job=("job", "first"),
        begin_ns=("begin_ns", "min"),
        end_ns=("end_ns", "max"),
        ranks=("rank", "nunique"),
        starts=("generation", "nunique"),
        stretches=("stretch", "nunique"),
        steps=("steps", "sum"),
        left_out=("left_out", "sum"),
        node=("node", "first"),
        pid=("pid", "first"),
    )
    table["what"] = first.loc[order, "what"].groupby(phase.to_numpy()).first()
    table["is_concurrent"] = _concurrent(table)
    members = members[["stretch", "phase", "world", "generation", "rank", "node", "pid", "process"]]
    return members, table.drop(columns="job")


def _matched(members: pd.DataFrame) -> Integers:
    """Number the stretches of a world: those of its ranks that belong together have the same number.

    If all ranks have the same number of stretches, these are joined in order, else by the time at which they ran: each
    is joined with the one of the rank with the most stretches that was running in the middle of it.
    """
    parts = members.groupby("process")["part"].size()
    if parts.nunique() == 1:
        return members["part"].to_numpy(np.int64)
    most = members[members["process"] == parts.idxmax()].sort_values("part")
    middle_ns = (members["begin_ns"].to_numpy(np.int64) + members["end_ns"].to_numpy(np.int64)) // 2
    own: Integers = np.minimum(np.searchsorted(most["end_ns"].to_numpy(np.int64), middle_ns), len(most) - 1)
    # two stretches of a rank are not one: the longer one is joined, the other is a stretch of this rank alone
    found = pd.DataFrame({"process": members["process"].to_numpy(), "own": own, "steps": members["steps"].to_numpy()})
    repeated = found.sort_values("steps", ascending=False, kind="stable").duplicated(["process", "own"]).sort_index()
    own[repeated.to_numpy()] = len(most) + np.arange(int(repeated.sum()))
    return own


def _concurrent(phases: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Return a mask of the phases during which a phase of another job ran."""
    found = np.zeros(len(phases), bool)
    spans = phases[["begin_ns", "end_ns", "job"]].to_numpy(np.int64)
    order = np.argsort(spans[:, 0], kind="stable")
    for place, row in enumerate(order):
        end, job = spans[row, 1:]
        for other in order[place + 1 :]:
            if spans[other, 0] >= end:
                break
            if spans[other, 2] != job:
                found[[row, other]] = True
    return found
