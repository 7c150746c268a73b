"""Calculates what stragglers cost a pipeline-parallel job, from a table of the operations of its ranks.

The operations run again in a simulation, once as long as recorded and once each as long as its kind usually takes. The
method, the dependencies and the columns are those of Lin et al., "Understanding Stragglers in Large Model Training
Using What-if Analysis" (OSDI'25, arXiv 2505.05713), for pipelines with one chunk of the model per stage.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from ringtap.core.errors import UsageError, file_errors
from ringtap.core.terminal_escaping import one_line, text_table
from ringtap.core.units import counted, format_duration
from ringtap.core.untrusted_files import open_regular

COLUMNS = ("rank", "dp_rank", "stage", "step", "optype", "seq_id", "mc", "start_ts", "duration")
_KEY, _TIMES = ["optype", "seq_id", "stage"], ("start_ts", "duration")
MAX_OPERATIONS = 20_000_000
_FORWARD, _BACKWARD = _PASSES = ("forward-compute", "backward-compute")
_TO = {"forward": 1, "backward": -1}  # direction -> next stage
_GATHER, _REDUCE, _EMBEDDING = "params-all-gather", "grads-reduce-scatter", "embedding-grads-all-reduce"
_CLIP = "optimizer-clip-main-grad"
# what follows the last computation of a stage, one after the other
_LAST = ("gc", "layernorm-grads-all-reduce", _EMBEDDING, _REDUCE, _CLIP, "optimizer")
_MESSAGES = {f"{way}-{end}" for way in _TO for end in ("send", "recv")}
_OF_STAGES = {_EMBEDDING, _CLIP}  # of all stages that have them
_OF_REPLICAS = {_GATHER, _REDUCE, _CLIP}  # of all data-parallel ranks
_WAITING = _MESSAGES | _OF_STAGES | _OF_REPLICAS  # begin together; an operation's own time follows the last begin
_MEDIAN = _WAITING | {"layernorm-grads-all-reduce"}  # outliers are of the network
_KINDS = {*_PASSES, *_LAST, *_WAITING}
_CLOCK_S = 0.01  # clocks of ranks differ by less
SLOWEST_SHARE = 0.03  # of the workers, rounded up
_MOST = 5  # lines of a table

Times = npt.NDArray[np.float64]


class PipelineOperation(NamedTuple):
    """An operation of each step and each data-parallel rank.

    Attributes:
        kind: forward-compute, forward-send ...
        number: place among those of its kind, stage and step.
        stage: of the pipeline.
    """

    kind: str
    number: int
    stage: int


class _Event(NamedTuple):
    """Operations that begin together; numbers of operations."""

    members: list[int]
    needs: list[int]  # what ends before
    is_of_replicas: bool  # True if those of all data-parallel ranks begin together


@dataclass(frozen=True)
class Pipeline:
    """The recorded operations of a job.

    Attributes:
        operations: what each data-parallel rank does in a step.
        steps: numbers of the steps.
        dp_ranks: numbers of the data-parallel ranks.
        ranks: rank of each stage (rows) and data-parallel rank (columns).
        recorded_s: recorded time of each step.
        length_s: time of each operation, step and data-parallel rank, without waiting for the others.
    """

    operations: list[PipelineOperation]
    steps: list[int]
    dp_ranks: list[int]
    ranks: npt.NDArray[np.int64]
    recorded_s: Times
    length_s: Times
    _events: list[_Event]

    def step_times(self, length_s: Times) -> Times:
        """Simulate operations of given lengths, and return the time of each step."""
        end_s = np.zeros_like(length_s)
        for members, needs, is_of_replicas in self._events:
            begin_s = end_s[needs].max(axis=0) if needs else np.zeros_like(end_s[0])
            if is_of_replicas:
                begin_s = begin_s.max(axis=-1, keepdims=True)
            end_s[members] = begin_s + length_s[members]
        return np.asarray(end_s.max(axis=(0, 2)))

    def usual_lengths(self) -> Times:
        """Return the lengths without stragglers: of each kind the mean, and of communication the median."""
        kinds = np.array([each.kind for each in self.operations])
        usual_s = np.empty_like(self.length_s)
        for kind in np.unique(kinds):
            of_kind = self.length_s[kinds == kind]
            usual_s[kinds == kind] = np.median(of_kind) if kind in _MEDIAN else of_kind.mean()
        return usual_s


def read_pipeline(path: Path) -> Pipeline:
    """Read a Parquet table of operations, with the columns ``COLUMNS`` and times in seconds.

    Raises:
        UsageError: it cannot be read, is not such a table, or has operations of which the order is not known.
    """
    table = _read(path).sort_values([*_KEY, "step", "dp_rank"])
    steps, replicas = (sorted(table[name].unique().tolist()) for name in ("step", "dp_rank"))
    first = table[(table["step"] == steps[0]) & (table["dp_rank"] == replicas[0])].sort_values(
        "start_ts", kind="stable"
    )
    order = [PipelineOperation(*each) for each in zip(*(first[name] for name in _KEY), strict=True)]
    ends = dict(zip(order, first["end_ts"], strict=True))
    counts = table.groupby(_KEY).size()
    once = table.drop_duplicates([*_KEY, "step", "dp_rank"]).groupby(_KEY).size() == len(steps) * len(replicas)
    if len(wrong := counts[~once | (counts != len(steps) * len(replicas))]):
        kind, number, stage = wrong.index.tolist()[0]
        raise UsageError(
            f"{path} has {kind} {number} of stage {stage} {wrong.iloc[0]} times in {counted(len(steps), 'step')} of "
            f"{counted(len(replicas), 'data-parallel rank')}: keep the steps and ranks that have each one once"
        )
    ranks = table.drop_duplicates(["rank", "stage", "dp_rank"]).sort_values(["stage", "dp_rank"])["rank"].to_numpy()
    if len(ranks) != table["stage"].nunique() * len(replicas):
        raise UsageError(f"{path} has several ranks of a stage and a data-parallel rank: keep one of them")
    places = {each: place for place, each in enumerate(sorted(order))}
    events = _events(path, order, ends, places)
    begin, end = (table[name].to_numpy().reshape(-1, len(steps), len(replicas)) for name in ("start_ts", "end_ts"))
    length_s = (end - begin).astype(np.float64)
    kinds = [each.kind for each in places]
    for members, _, is_of_replicas in events:
        if kinds[members[0]] in _WAITING:
            last = begin[members].max(axis=(0, 2) if is_of_replicas else 0)
            own_s = end[members] - (last[:, None] if is_of_replicas else last)
            length_s[members] = np.where(own_s <= -_CLOCK_S, 0, own_s)
    recorded_s = (end.max(axis=(0, 2)) - begin.min(axis=(0, 2))).astype(np.float64)
    return Pipeline([*places], steps, replicas, ranks.reshape(-1, len(replicas)), recorded_s, length_s, events)


def _read(path: Path) -> pd.DataFrame:
    """Read the table of operations, with ``end_ts``."""
    from pyarrow import ArrowException, parquet

    try:
        with file_errors(path), open_regular(path) as opened:
            file = parquet.ParquetFile(opened)
            if missing := [name for name in COLUMNS if name not in file.schema_arrow.names]:
                raise UsageError(f"{path} has no column {missing[0]!r}: a table of operations has {', '.join(COLUMNS)}")
            if not 0 < file.metadata.num_rows <= MAX_OPERATIONS:
                raise UsageError(f"{path} has {file.metadata.num_rows:,} operations, not 1 to {MAX_OPERATIONS:,}")
            table: pd.DataFrame = file.read(columns=list(COLUMNS)).to_pandas(ignore_metadata=True)
    except ArrowException as error:
        raise UsageError(f"{path} is not a Parquet file that can be read: {one_line(str(error))}") from error
    for name in ("rank", "dp_rank", "stage", "step", "seq_id"):
        if table[name].dtype.kind not in "iu" or table[name].min() < 0:
            raise UsageError(f"{path} has other values than whole numbers from 0 on in its column {name!r}")
    for name in _TIMES:
        if table[name].dtype.kind not in "iuf" or not np.isfinite(table[name]).all() or table["duration"].min() < 0:
            raise UsageError(f"{path} has an operation without a time: each needs start_ts and duration, in seconds")
        if table[name].dtype.kind != "f":
            table[name] = table[name].astype(np.float64)
    table["optype"] = table["optype"].astype(str)
    if unknown := sorted(set(table["optype"]) - _KINDS):
        raise UsageError(
            f"{path} has operations {unknown[0]!r}, of which it is not known what they wait for: known are "
            f"{', '.join(sorted(_KINDS))}"
        )
    if table["mc"].dtype.kind not in "iuf" or table["mc"].max() > 0:
        raise UsageError(f"{path} has several chunks of the model per stage (mc): what they wait for is not known")
    return table.assign(end_ts=table["start_ts"] + table["duration"])


def _events(
    path: Path,
    order: Sequence[PipelineOperation],
    ends: dict[PipelineOperation, float],
    places: dict[PipelineOperation, int],
) -> list[_Event]:
    """Return the operations that begin together, each after those that it needs.

    Args:
        path: the file, for messages.
        order: operations by their begin.
        ends: their ends.
        places: their numbers.
    """
    needs: dict[PipelineOperation, set[PipelineOperation]] = {each: set() for each in order}
    for before, after in _dependencies(path, order, ends):
        needs[after].add(before)
    groups: dict[tuple[Any, ...], list[PipelineOperation]] = defaultdict(list)
    for each in order:
        groups[_group(each)].append(each)
    graph = {name: {_group(need) for each in members for need in needs[each]} for name, members in groups.items()}
    try:
        sequence = [groups[name] for name in TopologicalSorter(graph).static_order()]
    except CycleError as error:
        raise UsageError(f"{path} has operations that wait for each other: leave out its first step") from error
    return [
        _Event(
            [places[each] for each in members],
            sorted({places[need] for each in members for need in needs[each]}),
            members[0].kind in _OF_REPLICAS,
        )
        for members in sequence
    ]


def _group(one: PipelineOperation) -> tuple[Any, ...]:
    """Return what operations that begin together have in common, within a data-parallel rank."""
    way, _, end = one.kind.partition("-")
    if one.kind in _MESSAGES:
        return way, "message", one.number, one.stage - _TO[way] * (end == "recv")  # the stage that sends
    return one[:2] if one.kind in _OF_STAGES else one


def _dependencies(
    path: Path, order: Sequence[PipelineOperation], ends: dict[PipelineOperation, float]
) -> Iterator[tuple[PipelineOperation, PipelineOperation]]:
    """Yield pairs of operations of which the first ends before the second begins; arguments as for `_events`."""
    stages: dict[int, list[PipelineOperation]] = defaultdict(list)
    for each in order:
        stages[each.stage].append(each)
    for number in range(len(stages)):
        of = {kind: [one for one in stages[number] if one.kind == kind] for kind in _KINDS}
        if not of[_FORWARD] or not of[_BACKWARD]:
            raise UsageError(f"{path} has no forward or no backward pass of stage {number}: record all stages")
        computed = [one for one in stages[number] if one.kind in _PASSES]
        chains = [computed, [one for one in stages[number] if one.kind in (_GATHER, _REDUCE)]]
        for way, to in _TO.items():
            passes = of[f"{way}-compute"]
            for end, peer in (("send", number + to), ("recv", number - to)):
                messages = of[f"{way}-{end}"]
                if len(messages) != (len(passes) if 0 <= peer < len(stages) else 0):
                    raise UsageError(
                        f"{path} has {len(messages)} {way}-{end} for {len(passes)} {way}-compute of stage {number} of "
                        f"{len(stages)}: one is needed for each, but none where the pipeline ends"
                    )
                chains.append(messages)
                yield from zip(passes, messages, strict=False) if end == "send" else zip(messages, passes, strict=False)
                if end == "recv":
                    yield from zip(passes, messages[1:], strict=False)
        begun = computed.index(of[_BACKWARD][0])
        if begun > 1:  # messages of the backward pass wait for the forward pass before the last one
            yield from ((computed[begun - 2], one) for end in ("send", "recv") for one in of[f"backward-{end}"][:1])
        yield from ((one, of[_FORWARD][0]) for one in of[_GATHER][-1:])
        chains.append([max(computed, key=lambda one: ends[one]), *(one for kind in _LAST for one in of[kind])])
        for chain in chains:
            yield from pairwise(chain)


def stragglers(pipeline: Pipeline) -> dict[str, Any]:
    """Return what stragglers cost a job.

    Returns:
        ``recorded_step_s``, ``step_s`` (simulated), ``ideal_step_s`` and ``slowdown``, their ratio; the slowdown if
        only some operations took as long as recorded: ``by_step``, ``by_kind``, ``by_stage``, ``by_dp_rank`` and
        ``workers``; and the share of the lost time that is gone without the stragglers of the ``slowest`` workers and
        of the ``last_stage`` (``share``; None if no time is lost).

    Raises:
        UsageError: the operations take no time.
    """
    length_s, ideal_s = pipeline.length_s, pipeline.usual_lengths()
    steps_s, ideal_steps_s = pipeline.step_times(length_s), pipeline.step_times(ideal_s)
    step_s, ideal_step_s = float(steps_s.mean()), float(ideal_steps_s.mean())
    if ideal_step_s <= 0:
        raise UsageError("the operations take no time: give their duration in seconds")
    kinds = np.array([each.kind.replace("send", "message").replace("recv", "message") for each in pipeline.operations])
    stages = np.array([each.stage for each in pipeline.operations])
    replicas = np.array(pipeline.dp_ranks)

    def only(chosen: npt.NDArray[np.bool_]) -> float:
        """Return the slowdown if these operations alone take as long as recorded."""
        return float(pipeline.step_times(np.where(chosen, length_s, ideal_s)).mean()) / ideal_step_s

    def share_of(chosen: npt.NDArray[np.bool_]) -> float | None:
        """Return the share of the lost time that these operations cost."""
        without_s = float(pipeline.step_times(np.where(chosen, ideal_s, length_s)).mean())
        return (step_s - without_s) / (step_s - ideal_step_s) if step_s > ideal_step_s else None

    by_stage = {int(stage): only((stages == stage)[:, None, None]) for stage in np.unique(stages)}
    by_replica = {replica: only(replicas == replica) for replica in pipeline.dp_ranks}
    workers = [
        {"rank": int(rank), "stage": stage, "dp_rank": replica, "slowdown": min(by_stage[stage], by_replica[replica])}
        for stage, row in enumerate(pipeline.ranks) for replica, rank in zip(pipeline.dp_ranks, row, strict=True)
    ]  # fmt: skip
    workers.sort(key=lambda one: (-one["slowdown"], one["rank"]))
    slowest = workers[: math.ceil(SLOWEST_SHARE * len(workers))]
    of_slowest = np.zeros((len(stages), 1, len(replicas)), bool)
    for one in slowest:
        of_slowest |= (stages == one["stage"])[:, None, None] & (replicas == one["dp_rank"])
    last = int(stages.max())
    return {
        "operations": int(length_s.size), "steps": len(pipeline.steps), "ranks": len(workers),
        "stages": last + 1, "dp_ranks": len(replicas),
        "recorded_step_s": float(pipeline.recorded_s.mean()), "step_s": step_s, "ideal_step_s": ideal_step_s,
        "slowdown": step_s / ideal_step_s,
        "by_step": dict(zip(pipeline.steps, (steps_s / ideal_steps_s).tolist(), strict=True)),
        "by_kind": {str(kind): only((kinds == kind)[:, None, None]) for kind in np.unique(kinds)},
        "by_stage": by_stage, "by_dp_rank": by_replica, "workers": workers,
        "slowest": {"ranks": [one["rank"] for one in slowest], "share": share_of(of_slowest)},
        "last_stage": {"stage": last, "share": share_of((stages == last)[:, None, None])},
    }  # fmt: skip


def describe(found: dict[str, Any]) -> list[str]:
    """Return what `stragglers` found as lines of text."""
    first, slowest, last = found["workers"][0], found["slowest"], found["last_stage"]
    answer = (
        f"Stragglers make a step {found['slowdown']:.3f} times as long: {format_duration(found['step_s'])}, and "
        f"{format_duration(found['ideal_step_s'])} if each operation took as long as its kind usually does."
    )
    ranks = ", ".join(map(str, slowest["ranks"]))
    who = (
        "its stragglers" if len(slowest["ranks"]) == 1 else f"those of the slowest {SLOWEST_SHARE:.0%} (ranks {ranks})"
    )
    worker = (
        f"Slowest worker: rank {first['rank']} (stage {first['stage']}, data-parallel rank {first['dp_rank']}). "
        f"Without {who}, {_gone(slowest['share'])}."
    )
    rows = [["slowdown by stragglers of these alone", "times"]]
    for title, name in (("all {}", "by_kind"), ("stage {}", "by_stage"), ("data-parallel rank {}", "by_dp_rank")):
        highest = sorted(found[name].items(), key=lambda one: -one[1])[:_MOST]
        rows += [[title.format(key), f"{value:.3f}"] for key, value in highest]
    job = (
        f"{counted(found['operations'], 'operation')} of {counted(found['ranks'], 'rank')} "
        f"({counted(found['stages'], 'stage')} x {counted(found['dp_ranks'], 'data-parallel rank')}) in "
        f"{counted(found['steps'], 'step')}. A step took {format_duration(found['recorded_step_s'])}, "
        f"{found['recorded_step_s'] / found['step_s'] - 1:+.1%} beside the simulation, which has no delays between "
        "operations."
    )
    stage = f"Without those of the last stage ({last['stage']}), {_gone(last['share'])}."
    return [answer, worker, stage, "", *text_table(rows), "", job]


def _gone(share: float | None) -> str:
    return "nothing changes, as no time is lost" if share is None else f"{share:.1%} of the lost time is gone"
