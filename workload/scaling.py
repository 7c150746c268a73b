"""Scales workloads to other numbers of ranks, batches, models and processors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringtap.core.errors import UsageError
from ringtap.core.units import counted
from ringtap.workload.copy_model_replicas import Replicas, copy_replicas, find_replicas, group_of
from ringtap.workload.execution_trace import Collective, Node, NodeType
from ringtap.workload.workload import SPLITS, WORK, Workload, check_times, is_untimed, kind_of, size_of

_REDUCE_SCATTERS = (Collective.REDUCE_SCATTER, Collective.REDUCE_SCATTER_BLOCK)
_PRECISIONS = (0.5, 1, 2)  # bytes of a parameter by those of its gradient
_GATHERED = (0.5, 1, 2, 4)  # the same, of parameters that are gathered once or twice
_PADDED = 0.05  # of the bytes, by which shards and buckets of all parameters may differ


@dataclass(frozen=True)
class Scaling:
    """Factors between a workload and the scaled one.

    Attributes:
        workers: number of ranks of the scaled one; None: as before.
        gpus_per_node: workers at each host; None: as before.
        batch: factor of the samples of a worker.
        parameters: factor of the parameters.
        compute: factor of the time of all computations, beside those of batch and parameters.
        data_parallel: names or descriptions of the data-parallel groups, where they cannot be told.
    """

    workers: int | None = None
    gpus_per_node: int | None = None
    batch: float = 1.0
    parameters: float = 1.0
    compute: float = 1.0
    data_parallel: tuple[str, ...] = ()

    def assumptions(self, *, has_law: bool = False) -> list[str]:
        """Return what the scaling assumes, one sentence each; with ``has_law``, times by batch size are measured."""
        found = []
        if self.gpus_per_node is not None:
            found.append(f"{self.gpus_per_node} workers at each host, which need no link between them")
        if self.batch != 1 and not has_law:
            found.append(
                f"batch times {self.batch:g}: forward and backward pass take {self.batch:g} times as long, the "
                "optimizer takes its time"
            )
        if self.parameters != 1:
            found.append(
                f"parameters times {self.parameters:g}: collectives have as many times the bytes; computations take "
                "as many times as long"
            )
        if self.compute != 1:
            found.append(f"computations take {self.compute:g} times as long, besides")
        return found


def scale(workload: Workload, scaling: Scaling, others: Sequence[Workload] = ()) -> Workload:
    """Return a scaled workload; its ``about`` has what was assumed.

    Args:
        workload: the workload.
        scaling: the factors.
        others: workloads of the same job with other batch sizes, from which each computation gets its law.

    Raises:
        UsageError: the number of workers changes, and the workload does not say how its ranks share a model. Or the
            others are not of the same job, or the batch or the model of a layout would change.
    """
    if "layout" in workload.about and (scaling.batch, scaling.parameters, scaling.workers) != (1, 1, None):
        raise UsageError(
            "the workload is of a layout: change batch, model and ranks in its TOML file, and write it anew"
        )
    traces, groups, about = workload.traces, dict(workload.groups), dict(workload.about)
    new = scaling.assumptions(has_law=bool(others))
    if others:
        traces, law = _by_batch(workload, others, scaling.batch)
        new.append(law)
    elif scaling.batch != 1:
        traces = [[_longer(node, 1 if node.name == "optimizer" else scaling.batch) for node in each] for each in traces]
    if scaling.workers is not None:
        replicas = find_replicas(workload, scaling.data_parallel)
        resized, said = _among(replace(workload, traces=traces), replicas, scaling.workers)
        copied = copy_replicas(resized, replicas, scaling.workers)
        traces, groups, about = copied.traces, copied.groups, copied.about
        new += said
        about["workers"] = scaling.workers
    if scaling.gpus_per_node is not None:
        about["gpus_per_node"] = scaling.gpus_per_node
    factor = scaling.parameters * scaling.compute
    scaled = [[_scaled(node, factor, scaling.parameters) for node in trace] for trace in traces]
    about["assumptions"] = [*about.get("assumptions", []), *new]
    if "compute_s" in about:
        about["compute_s"] = max(sum(node.duration_us for node in trace) for trace in scaled) / 1e6
    if about.get("batch"):
        about["batch"] = round(about["batch"] * scaling.batch)
    for name in ("iteration_s", "variation"):  # of the run, not of what became of it
        about.pop(name, None)
    return Workload(scaled, groups, about)


def with_times(workload: Workload, flop_per_s: float, bytes_per_s: float | None = None) -> Workload:
    """Return a workload in which computations with operations and bytes, but without a duration, have one.

    A computation takes its operations over the rate of a processor, or its bytes over that of its memory if that is
    longer (the roofline of Williams, Waterman and Patterson, 2009).

    Args:
        workload: the workload.
        flop_per_s: rate of a rank's processor.
        bytes_per_s: rate of its memory; None: it is no limit.

    Raises:
        UsageError: the time of a node stays unknown.
    """
    traces, timed = [], 0
    for trace in workload.traces:
        nodes, now_us = [], 0.0
        for node in trace:
            operations, size_bytes = (float(node.attributes.get(name, 0)) for name in WORK)  # type: ignore[arg-type]
            if node.type == NodeType.COMP and is_untimed(node) and (operations or bytes_per_s):
                timed += 1
                end_us = now_us + 1e6 * max(operations / flop_per_s, size_bytes / bytes_per_s if bytes_per_s else 0)
                # rounded in sum, so that many short computations keep their length
                attributes = {name: value for name, value in node.attributes.items() if name not in WORK}
                nodes.append(replace(node, duration_us=round(end_us) - round(now_us), attributes=attributes))
                now_us = end_us
            else:
                nodes.append(node)
        traces.append(nodes)
    memory = f" or its bytes over {bytes_per_s:g} byte/s, whichever is longer" if bytes_per_s else ""
    said = f"{counted(timed, 'computation')}: its operations over {flop_per_s:g} operations/s{memory}"
    about = workload.about | {"assumptions": [*workload.about.get("assumptions", []), said]}
    found = replace(workload, traces=traces, about=about)
    check_times(found)
    return found


def _among(workload: Workload, replicas: Replicas, ranks: int) -> tuple[Workload, list[str]]:
    """Return a workload with the shards that its ranks have among another number of ranks, and what is assumed.

    Sharded training gathers parameters and reduces gradients of as many elements, possibly in another precision: an
    all-gather is of shards if a reduce-scatter has its total. ZeRO reduces in buckets that are no layers: what is left
    is of shards if its sum is that of the other reduce-scatters, or of the all-reduces if there are none, for one or
    two gathers of each parameter. Other all-gathers are of data that each rank has of its own.
    """
    replicas.check_number(ranks)
    before, after = len(replicas.ranks), ranks // replicas.size
    traces, numbers = [], Counter[bool]()
    for rank, trace in enumerate(workload.traces):
        sizes: dict[int, int] = {}
        by_group = defaultdict[str, list[Node]](list)
        for node in trace:
            if node.type == NodeType.COMM_COLL and group_of(node) in replicas.spanning:
                by_group[group_of(node)].append(node)
        for nodes in by_group.values():
            members = len(workload.members(nodes[0]))
            totals, shards = _shards(nodes, members)
            sizes |= {number: -(-totals[number] * before // (members * after)) for number in shards}
            if rank in replicas.ranks[0]:
                numbers.update(number in shards for number in totals)
        traces.append([
            replace(node, attributes=node.attributes | {"comm_size": sizes[node.id]}) if node.id in sizes else node
            for node in trace
        ])  # fmt: skip
    return replace(workload, traces=traces), _assumed(replicas, workload.ranks, ranks, numbers)


def _assumed(replicas: Replicas, before: int, after: int, numbers: Counter[bool]) -> list[str]:
    """Return what the scaling to another number of ranks assumes."""
    what = "all collectives are data-parallel"
    if replicas.size > 1:
        several = f"{after // replicas.size} replicas of the model, with {replicas.size} ranks each"
        what = f"{several}, instead of {before // replicas.size}; groups of ranks of several replicas are data-parallel"
    said = [f"scaled to {after} ranks: further ranks do what the first {before} do, replica by replica; {what}"]
    if after <= before:
        said = [f"scaled to {after} ranks: each does what it did; {what}"]
    if numbers[True]:
        said.append(
            f"{counted(numbers[True], 'all-gather')} of shards, as reductions have their totals: a rank adds its part "
            "of these; the optimizer takes as long as before"
        )
    if numbers[False]:
        said.append(
            f"{counted(numbers[False], 'all-gather')} of each rank's own data, as no reductions have these totals: a "
            "rank adds as many bytes as before"
        )
    return said


def _shards(nodes: Sequence[Node], members: int) -> tuple[dict[int, int], set[int]]:
    """Return the bytes of all ranks together of each all-gather of a group, and the numbers of those of shards."""
    totals = {node.id: size_of(node) * members for node in nodes if _is(node, Collective.ALL_GATHER) and size_of(node)}
    scattered = [size_of(node) for node in nodes if _is(node, *_REDUCE_SCATTERS)]
    reduced = scattered or [size_of(node) for node in nodes if _is(node, Collective.ALL_REDUCE)]
    left = {number: total for number, total in totals.items() if not _is_of(total, scattered)}
    shards = set(totals) - set(left)
    left_bytes = sum(left.values())
    rest_bytes = sum(size for size in reduced if not _is_of(size, [totals[number] for number in shards]))
    if any(abs(left_bytes - times * rest_bytes) <= _PADDED * left_bytes for times in _GATHERED):
        shards = set(totals)
    return totals, shards


def _is(node: Node, *kinds: Collective) -> bool:
    return node.type == NodeType.COMM_COLL and kind_of(node) in kinds


def _is_of(total_bytes: int, others: Sequence[int]) -> bool:
    """Return True if a collective has as many elements as another one, in the same or another precision."""
    return any(total_bytes == factor * other for other in others for factor in _PRECISIONS)


def _longer(node: Node, factor: float) -> Node:
    return replace(node, duration_us=round(node.duration_us * factor)) if node.type == NodeType.COMP else node


def _by_batch(workload: Workload, others: Sequence[Workload], factor: float) -> tuple[list[list[Node]], str]:
    """Return the traces at another batch size, by the line a + b x batch of each computation, and its description."""
    every = [workload, *others]
    batches = [one.about.get("batch") for one in every]
    if not all(isinstance(batch, int) and batch > 0 for batch in batches):
        raise UsageError("the batch size of a workload is not known: make it with ringtap workload new --batch N")
    known = [int(batch) for batch in batches]  # type: ignore[arg-type]
    if len(set(known)) < 2:
        raise UsageError(f"all workloads have a batch of {known[0]}: a law needs two batch sizes")
    names = [[[node.name for node in trace] for trace in one.traces] for one in every]
    different = next((place for place, each in enumerate(names) if each != names[0]), None)
    if different is not None:
        raise UsageError(f"workload {different + 1} does not have the computations of the first: use the same job")
    target, mean = known[0] * factor, sum(known) / len(known)
    squares = sum((batch - mean) ** 2 for batch in known)
    traces = []
    for rank, trace in enumerate(workload.traces):
        nodes = []
        for place, node in enumerate(trace):
            times = [one.traces[rank][place].duration_us for one in every]
            middle = sum(times) / len(times)
            slope = sum((batch - mean) * time for batch, time in zip(known, times, strict=True)) / squares
            nodes.append(replace(node, duration_us=max(0, round(middle + slope * (target - mean)))))
        traces.append(nodes)
    sizes = ", ".join(map(str, sorted(known)))
    return traces, f"computations at a batch of {target:g} by the line of each through batches of {sizes}"


def _scaled(node: Node, time_factor: float, byte_factor: float) -> Node:
    attributes = dict(node.attributes)
    if "comm_size" in attributes:
        attributes["comm_size"] = round(size_of(node) * byte_factor)
    if SPLITS in attributes:
        splits = [round(size * byte_factor) for size in attributes[SPLITS]]  # type: ignore[union-attr, operator]
        attributes |= {SPLITS: splits, "comm_size": sum(splits)}
    deps = [*node.control_deps], [*node.data_deps]
    return replace(
        node, control_deps=deps[0], data_deps=deps[1], attributes=attributes,
        duration_us=round(node.duration_us * (time_factor if node.type == NodeType.COMP else byte_factor)),
    )  # fmt: skip
