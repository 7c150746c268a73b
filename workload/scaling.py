"""Scaling of data-parallel workloads to other numbers of workers, batches, models and processors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringtap.errors import UsageError
from ringtap.workload.execution_trace import Node, NodeType
from ringtap.workload.workload import Workload, kind_of, size_of


@dataclass(frozen=True)
class Scaling:
    """Factors between a workload and the scaled one.

    Attributes:
        workers: number of workers of the scaled one; None: as before.
        batch: factor of the samples of a worker.
        parameters: factor of the parameters.
        compute: factor of the time of all computations, beside those of batch and parameters.
    """

    workers: int | None = None
    batch: float = 1.0
    parameters: float = 1.0
    compute: float = 1.0

    def assumptions(self) -> list[str]:
        """Return what the scaling assumes, one sentence each."""
        found = []
        if self.workers is not None:
            found.append(f"scaled to {self.workers} workers: every worker computes and reduces what rank 0 did")
        if self.batch != 1:
            found.append(f"batch times {self.batch:g}: computations take {self.batch:g} times as long")
        if self.parameters != 1:
            found.append(
                f"parameters times {self.parameters:g}: collectives have as many times the bytes; computations take "
                "as many times as long"
            )
        if self.compute != 1:
            found.append(f"computations take {self.compute:g} times as long, besides")
        return found


def scale(workload: Workload, scaling: Scaling) -> Workload:
    """Return a scaled workload; its ``about`` has what was assumed.

    Raises:
        UsageError: the number of workers changes and the workload is not data-parallel: its ranks differ, or it has
            groups or messages between two ranks.
    """
    traces = workload.traces
    if scaling.workers is not None:
        _check_data_parallel(workload)
        traces = [traces[0]] * scaling.workers
    factor = scaling.batch * scaling.parameters * scaling.compute
    about = dict(workload.about)
    about["assumptions"] = [*about.get("assumptions", []), *scaling.assumptions()]
    if scaling.workers is not None:
        about["workers"] = scaling.workers
    if "compute_s" in about:
        about["compute_s"] *= factor
    scaled = [[_scaled(node, factor, scaling.parameters) for node in trace] for trace in traces]
    return Workload(scaled, dict(workload.groups), about)


def _scaled(node: Node, time_factor: float, byte_factor: float) -> Node:
    attributes = dict(node.attributes)
    if "comm_size" in attributes:
        attributes["comm_size"] = round(size_of(node) * byte_factor)
    deps = [*node.control_deps], [*node.data_deps]
    return replace(
        node, control_deps=deps[0], data_deps=deps[1], duration_us=round(node.duration_us * time_factor),
        attributes=attributes,
    )  # fmt: skip


def _check_data_parallel(workload: Workload) -> None:
    advice = "scale the layout that the job was started with, or leave the number of workers as it is"
    if workload.groups:
        raise UsageError(f"the workload has groups of ranks ({', '.join(list(workload.groups)[:3])}): {advice}")
    first = _shape(workload.traces[0])
    for rank, trace in enumerate(workload.traces):
        for node in trace:
            if node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
                raise UsageError(f"{workload.where(rank, node)} is a message between two ranks: {advice}")
        if _shape(trace) != first:
            raise UsageError(f"ranks 0 and {rank} take part in different collectives: {advice}")


def _shape(trace: Sequence[Node]) -> list[tuple[int, int]]:
    return [(kind_of(node), size_of(node)) for node in trace if node.type == NodeType.COMM_COLL]
