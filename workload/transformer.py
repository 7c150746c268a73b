"""Makes workloads of transformers under tensor, pipeline and data parallelism, from a short specification.

Parameters, FLOPs and communication are those of Narayanan et al., "Efficient large-scale language model training on GPU
clusters using Megatron-LM", SC'21 (arXiv 2104.04473), with a feed-forward layer of any size. b, s, h, f and V are the
samples of a micro-batch, the sequence length, and the sizes of hidden state, feed-forward layer and vocabulary. A
forward pass of a micro-batch has 24 b s h^2 + 4 b s^2 h FLOPs per layer for f = 4 h, and 2 b s h V for the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from ringtap.core.installation import shipped_example
from ringtap.core.toml_tables import PlanTables
from ringtap.core.units import parse_duration_s
from ringtap.workload.command_options import MAX_RANKS_PER_HOST
from ringtap.workload.execution_trace import Collective, Node, NodeType, Value
from ringtap.workload.message_graph import divided
from ringtap.workload.scaling import Scaling
from ringtap.workload.workload import Workload

MAX_LAYOUT_NODES = 5_000_000
MAX_PASS_S = 86_400.0
SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True)
class TransformerLayout:
    """A transformer, and how its training is divided among ranks.

    Tensor-parallel ranks are neighbours, then come data-parallel ones, then the stages of the pipeline, as in
    Megatron-LM.

    Attributes:
        layers: transformer layers.
        hidden_size: elements of the hidden state.
        feed_forward_size: elements between the two matrices of a feed-forward layer.
        attention_heads: heads of a layer.
        vocabulary_size: tokens of the vocabulary.
        sequence_length: tokens of a sample.
        tensor_parallel: ranks that share each layer.
        pipeline_parallel: stages of the pipeline.
        data_parallel: replicas.
        micro_batch_size: samples of a micro-batch.
        micro_batches: micro-batches of a replica in an iteration.
        schedule: order of the micro-batches, one of `SCHEDULES`.
        activation_bytes: bytes of an element of an activation.
        gradient_bytes: bytes of an element of a gradient.
        recompute: True if the backward pass computes the activations of the layers again.
        flop_per_s: peak rate of a rank's processor.
        utilisation: share of that rate that computations reach.
        optimizer_s: time of the optimizer, in s.
        gpus_per_node: ranks at each host; None: not given.
    """

    layers: int
    hidden_size: int
    feed_forward_size: int
    attention_heads: int
    vocabulary_size: int
    sequence_length: int
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    micro_batch_size: int
    micro_batches: int
    schedule: str
    activation_bytes: int
    gradient_bytes: int
    recompute: bool
    flop_per_s: float
    utilisation: float
    optimizer_s: float
    gpus_per_node: int | None

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def parameters(self) -> int:
        """Parameters of the model, equation 2: 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h)) for f = 4 h."""
        return sum(map(self.stage_parameters, range(self.pipeline_parallel)))

    def stage_parameters(self, stage: int) -> int:
        """Parameters of a stage; the first one has the embeddings of words and positions."""
        h, f = self.hidden_size, self.feed_forward_size
        layer = 4 * h * (h + 1) + 2 * h * f + f + h + 4 * h  # attention, feed-forward, two layer norms
        embeddings = (self.vocabulary_size + self.sequence_length) * h if stage == 0 else 0
        return self.layers // self.pipeline_parallel * layer + embeddings

    @property
    def activations_bytes(self) -> int:
        """Bytes of the activations between two layers of a micro-batch, b s h elements."""
        return self.micro_batch_size * self.sequence_length * self.hidden_size * self.activation_bytes

    def forward_flop(self, stage: int) -> Iterator[tuple[str, int]]:
        """Yield the parts of a stage's forward pass of a micro-batch: name, and FLOPs of its tensor-parallel ranks."""
        tokens, h = self.micro_batch_size * self.sequence_length, self.hidden_size
        for _ in range(self.layers // self.pipeline_parallel):
            yield "attention", 4 * tokens * h * (2 * h + self.sequence_length)
            yield "feed-forward", 4 * tokens * h * self.feed_forward_size
        if stage == self.pipeline_parallel - 1:
            yield "logits", 2 * tokens * h * self.vocabulary_size

    def backward_flop(self, stage: int) -> Iterator[tuple[str, int]]:
        """Yield the parts of a stage's backward pass of a micro-batch in its order, as `forward_flop` does."""
        for name, flop in reversed(list(self.forward_flop(stage))):
            yield name, flop * (3 if self.recompute and name != "logits" else 2)

    @property
    def flop(self) -> int:
        """FLOPs of an iteration; with ``recompute`` and f = 4h equation 3: 96 B s l h^2 (1 + s/6h + V/16lh)."""
        stages = range(self.pipeline_parallel)
        micro_batch = sum(
            flop for i in stages for each in (self.forward_flop, self.backward_flop) for _, flop in each(i)
        )
        return micro_batch * self.micro_batches * self.data_parallel

    def duration_s(self, flop: int) -> float:
        """Return the time in which the tensor-parallel ranks of a stage compute some FLOPs."""
        return flop / (self.tensor_parallel * self.flop_per_s * self.utilisation)

    def order(self, stage: int) -> list[tuple[bool, int]]:
        """Return the passes of a stage in order: True for a backward pass, and number of the micro-batch.

        With 1F1B, a stage begins with a forward pass for each stage behind it. Backward and forward passes alternate
        then, so that a stage keeps the activations of at most ``pipeline_parallel`` micro-batches.
        """
        count = self.micro_batches
        ahead = count if self.schedule == "gpipe" else min(self.pipeline_parallel - 1 - stage, count)
        found = [(False, number) for number in range(ahead)]
        for number in range(count):
            if number + ahead < count:
                found.append((False, number + ahead))
            found.append((True, number))
        return found

    def assumptions(self) -> list[str]:
        """Return what the workload assumes, one sentence each."""
        again = "the forward pass of the layers again, and " if self.recompute else ""
        found = [
            "parameters, FLOPs and bytes by the formulas of Narayanan et al. (SC'21)",
            f"computations reach {self.utilisation:.3g} of {self.flop_per_s:g} FLOP/s",
            f"backward pass: {again}twice the time of the forward pass",
        ]
        if self.tensor_parallel > 1:
            found += [
                "two all-reduces of activations per layer in each pass of a micro-batch, without overlap",
                "no all-reduces of embeddings, of the loss, or of activations that are computed again",
                "all parameters, also of biases and layer norms, are divided among tensor-parallel ranks",
            ]
        if self.pipeline_parallel > 1:
            found += [
                f"schedule {self.schedule}; a rank computes nothing while it sends to other stages or receives",
                "every rank of a stage sends all activations of a micro-batch, or their gradients",
                "the first stage has the embeddings, the last one the logits; they do not reduce a shared gradient",
            ]
        if self.data_parallel > 1:
            found.append("one all-reduce of the gradients of a rank, after its last backward pass")
        if not self.optimizer_s:
            found.append("the optimizer takes no time")
        return found + Scaling(gpus_per_node=self.gpus_per_node).assumptions()


def read_layout(path: str | PathLike[str]) -> TransformerLayout:
    """Read and check a specification in TOML; examples/NAME is one that ships with ringtap.

    Raises:
        UsageError: the file cannot be read, or has a wrong key or value (the message names its line).
    """
    file = PlanTables(shipped_example(path) or Path(path), {"model", "layout", "processor"}, set())
    model, layout, processor = (file.one(name, needed=True) for name in ("model", "layout", "processor"))
    hidden_size = model.integer("hidden_size", ..., 1, 2**20)
    found = TransformerLayout(
        layers=model.integer("layers", ..., 1, 10_000),
        hidden_size=hidden_size,
        feed_forward_size=model.integer("feed_forward_size", 4 * hidden_size, 1, 2**22),
        attention_heads=model.integer("attention_heads", ..., 1, 2**20),
        vocabulary_size=model.integer("vocabulary_size", ..., 1, 2**30),
        sequence_length=model.integer("sequence_length", ..., 1, 2**24),
        tensor_parallel=layout.integer("tensor_parallel", 1, 1, 4096),
        pipeline_parallel=layout.integer("pipeline_parallel", 1, 1, 4096),
        data_parallel=layout.integer("data_parallel", 1, 1, 4096),
        micro_batch_size=layout.integer("micro_batch_size", ..., 1, 4096),
        micro_batches=layout.integer("micro_batches", ..., 1, 1_000_000),
        schedule=layout.text("schedule", SCHEDULES[0], SCHEDULES),
        activation_bytes=layout.integer("activation_bytes", 2, 1, 8),
        gradient_bytes=layout.integer("gradient_bytes", 4, 1, 8),
        recompute=layout.take("recompute", bool, True, lambda _: True, "true or false"),
        flop_per_s=processor.number("flop_per_s", ..., 1e6, 1e18),
        utilisation=processor.number("utilisation", ..., 0.001, 1),
        optimizer_s=processor.quantity("optimizer", "0s", parse_duration_s),
        gpus_per_node=processor.integer("gpus_per_node", 0, 1, MAX_RANKS_PER_HOST) or None,
    )
    for table in (model, layout, processor):
        table.finish()
    for key, count, whole in (
        ("pipeline_parallel", found.pipeline_parallel, "layers"),
        ("tensor_parallel", found.tensor_parallel, "attention_heads"),
        ("tensor_parallel", found.tensor_parallel, "feed_forward_size"),
    ):
        if getattr(found, whole) % count:
            layout.fail(key, f"= {count} does not divide {whole} = {getattr(found, whole)}")
    if hidden_size % found.attention_heads:
        model.fail("attention_heads", f"= {found.attention_heads} does not divide hidden_size = {hidden_size}")
    longest_s = max(found.optimizer_s, *(
        found.duration_s(sum(flop for _, flop in found.backward_flop(stage)))
        for stage in {0, found.pipeline_parallel - 1}
    ))  # fmt: skip
    if longest_s > MAX_PASS_S:
        processor.fail("flop_per_s", f"is too low, or the optimizer too long: one pass takes {longest_s:.3g} s")
    count = found.ranks * (2 * found.micro_batches * (_nodes_of_pass(found) + 2) + 2)
    if count > MAX_LAYOUT_NODES:
        layout.fail(
            "micro_batches",
            f"= {found.micro_batches} gives up to {count:,} nodes on {found.ranks:,} ranks, of which "
            f"{MAX_LAYOUT_NODES:,} are possible: simulate fewer micro-batches or replicas",
        )
    return found


def _nodes_of_pass(layout: TransformerLayout) -> int:
    """Return the most nodes of a pass of a stage, without messages."""
    return 1 if layout.tensor_parallel == 1 else 4 * layout.layers // layout.pipeline_parallel + 1


class _Part(NamedTuple):
    """A computation of a pass."""

    name: str  # its part of the layer; empty for the whole pass
    duration_us: int  # its time
    is_reduced: bool  # True if the tensor-parallel ranks reduce its result


def _parts(layout: TransformerLayout, stage: int, is_backward: bool) -> list[_Part]:
    """Return the computations of a pass in order; their whole microseconds add up to the rounded time of the pass."""
    every = list(layout.backward_flop(stage) if is_backward else layout.forward_flop(stage))
    if layout.tensor_parallel == 1:  # nothing is between the layers
        every = [("", sum(flop for _, flop in every))]
    ends_us = [round(1e6 * layout.duration_s(flop)) for flop in accumulate((flop for _, flop in every), initial=0)]
    return [
        _Part(f" {name}".rstrip(), end - begin, layout.tensor_parallel > 1 and name != "logits")
        for (name, _), (begin, end) in zip(every, pairwise(ends_us), strict=True)
    ]


def layout_workload(layout: TransformerLayout, name: str) -> Workload:
    """Return an iteration of the training of a transformer.

    Args:
        layout: the transformer, and how it is divided.
        name: name of the model.
    """
    t, d, p = layout.tensor_parallel, layout.data_parallel, layout.pipeline_parallel
    tensor_groups = [[t * first + i for i in range(t)] for first in range(d * p)] if t > 1 else []
    data_groups = [[t * (d * stage + i) + j for i in range(d)] for stage in range(p) for j in range(t)] if d > 1 else []
    groups = {str(number): ranks for number, ranks in enumerate([*tensor_groups, *data_groups], 1)}
    traces = []
    for stage in range(p):
        parts = [_parts(layout, stage, is_backward) for is_backward in (False, True)]
        shares = [layout.gradient_bytes * count for count in divided(layout.stage_parameters(stage), t).tolist()]
        for rank in range(t * d * stage, t * d * (stage + 1)):
            data_group = len(tensor_groups) + 1 + t * stage + rank % t
            trace = _TraceBuilder(layout, stage, rank)
            traces.append(trace.nodes(parts, str(rank // t + 1), str(data_group), shares[rank % t]))
    about = {
        "model": name,
        "workers": layout.ranks,
        "layout": asdict(layout),
        "model_parameters": layout.parameters,
        "flop": layout.flop,
        "compute_s": max(sum(node.duration_us for node in trace) for trace in traces) / 1e6,
        "assumptions": layout.assumptions(),
    }
    if layout.gpus_per_node is not None:
        about["gpus_per_node"] = layout.gpus_per_node
    return Workload(traces, groups, about)


class _TraceBuilder:
    """The trace of a rank."""

    def __init__(self, layout: TransformerLayout, stage: int, rank: int) -> None:
        self._layout, self._stage, self._rank = layout, stage, rank
        self._nodes: list[Node] = []

    def _add(self, name: str, kind: NodeType, after: list[int], duration_us: int, **attributes: Value) -> int:
        number = len(self._nodes) + 1
        attributes["is_cpu_op"] = False
        self._nodes.append(Node(number, name, kind, [*after], duration_us=duration_us, attributes=attributes))
        return number

    def _reduce(self, name: str, after: list[int], group: str, size_bytes: int) -> int:
        kind = int(Collective.ALL_REDUCE)
        return self._add(name, NodeType.COMM_COLL, after, 0, comm_type=kind, comm_size=size_bytes, pg_name=group)

    def _message(self, kind: NodeType, after: list[int], is_backward: bool, number: int) -> list[int]:
        """Add the message before or after a pass, if another stage takes part, and return its id in a list."""
        is_send = kind == NodeType.COMM_SEND
        other = self._stage + (1 if is_send != is_backward else -1)
        if not 0 <= other < self._layout.pipeline_parallel:
            return []
        peer = self._rank + (other - self._stage) * self._layout.tensor_parallel * self._layout.data_parallel
        attributes: dict[str, Value] = {"comm_dst" if is_send else "comm_src": peer}
        attributes |= {"comm_tag": 2 * number + is_backward, "comm_size": self._layout.activations_bytes}
        return [self._add("gradients" if is_backward else "activations", kind, after, 0, **attributes)]

    def nodes(self, parts: list[list[_Part]], tensor_group: str, data_group: str, gradients_bytes: int) -> list[Node]:
        """Return the nodes, from the computations of a forward and of a backward pass, and names of groups."""
        computed: list[int] = []
        sent: list[int] = []
        for is_backward, number in self._layout.order(self._stage):
            # what a pass needs is received while the result of the one before is sent
            received = self._message(NodeType.COMM_RECV, computed, is_backward, number)
            after = [*computed, *sent, *received]
            for part in parts[is_backward]:
                title = f"{'backward' if is_backward else 'forward'}{number}{part.name}"
                after = [self._add(title, NodeType.COMP, after, part.duration_us)]
                if part.is_reduced:
                    after = [self._reduce("tensor-parallel", after, tensor_group, self._layout.activations_bytes)]
            computed = after
            sent = self._message(NodeType.COMM_SEND, computed, is_backward, number)
        if self._layout.data_parallel > 1:
            computed = [self._reduce("data-parallel", computed, data_group, gradients_bytes)]
        if self._layout.optimizer_s:
            self._add("optimizer", NodeType.COMP, computed, round(1e6 * self._layout.optimizer_s))
        return self._nodes
