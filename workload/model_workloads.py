"""Makes workloads of models with known tensors: data-parallel training with DDP's buckets, without any run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ringtap.core.thesis_neural_networks import BUCKET_BYTES, FIRST_BUCKET_BYTES, FORWARD_SHARE, ModelProfile
from ringtap.workload.execution_trace import Collective, Node, NodeType
from ringtap.workload.workload import Workload


def bucket_bounds(sizes_bytes: Iterable[int], bucket_bytes: int, first_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the begin and the end of each of DDP's buckets among gradients in the order in which they become ready.

    DDP closes a bucket when it has reached its size.

    Args:
        sizes_bytes: bytes of each gradient.
        bucket_bytes: size of a bucket.
        first_bytes: size of the first one.
    """
    begin, end, size_bytes, limit = 0, 0, 0, first_bytes
    for end, each in enumerate(sizes_bytes, 1):
        size_bytes += each
        if size_bytes >= limit:
            yield begin, end
            begin, size_bytes, limit = end, 0, bucket_bytes
    if size_bytes:
        yield begin, end


def buckets(
    profile: ModelProfile, bucket_bytes: int = BUCKET_BYTES, first_bytes: int = FIRST_BUCKET_BYTES
) -> Iterator[tuple[int, float]]:
    """Yield DDP's buckets in the order of the backward pass: bytes, and share of that pass until each is full.

    Args:
        profile: the model.
        bucket_bytes: size of a bucket.
        first_bytes: size of the first one.
    """
    tensors = [tensor for layer in reversed(profile.layers) for tensor in reversed(layer)]
    for begin, end in bucket_bounds((tensor.bytes for tensor in tensors), bucket_bytes, first_bytes):
        bucket = tensors[begin:end]
        yield sum(tensor.bytes for tensor in bucket), sum(tensor.backward_share for tensor in bucket)


def model_workload(profile: ModelProfile, workers: int, compute_s: float | None = None) -> Workload:
    """Return an iteration of data-parallel training of a model.

    The forward pass takes a third of the computation. Gradients become ready during the backward pass. The all-reduce
    of a bucket begins when its gradients are ready and the one before has ended, as on one communicator.

    Args:
        profile: the model.
        workers: number of workers.
        compute_s: forward and backward pass, in s; None: the profile's.
    """
    workload = bucket_workload(list(buckets(profile)), workers, profile.compute_s if compute_s is None else compute_s)
    workload.about |= {
        "model": profile.name,
        "assumptions": [
            f"forward pass: {FORWARD_SHARE:.3g} of the computation",
            f"DDP's buckets: the first of {FIRST_BUCKET_BYTES} bytes, the others of {BUCKET_BYTES}",
            "collectives of a worker one after the other",
        ],
    }
    return workload


def bucket_workload(every: Sequence[tuple[int, float]], workers: int, compute_s: float) -> Workload:
    """Return an iteration of data-parallel training, as `model_workload` does, from its buckets.

    Args:
        every: bytes of each bucket, and its share of the backward pass, as from `buckets`.
        workers: number of workers.
        compute_s: forward and backward pass, in s.
    """
    total = sum(share for _, share in every)
    backward_us = compute_s * (1 - FORWARD_SHARE) * 1e6
    nodes = [Node(1, "forward", NodeType.COMP, duration_us=round(compute_s * FORWARD_SHARE * 1e6))]
    nodes[0].attributes["is_cpu_op"] = False
    computed, before = 1, 0
    for number, (size_bytes, share) in enumerate(every):
        backward = Node(
            2 * number + 2, f"backward{number}", NodeType.COMP, [computed],
            duration_us=round(backward_us * share / total), attributes={"is_cpu_op": False},
        )  # fmt: skip
        attributes = {"is_cpu_op": False, "comm_type": int(Collective.ALL_REDUCE), "comm_size": size_bytes}
        after = [backward.id, before] if before else [backward.id]
        reduce = Node(2 * number + 3, f"bucket{number}", NodeType.COMM_COLL, after, attributes=dict(attributes))
        nodes += [backward, reduce]
        computed, before = backward.id, reduce.id
    copies = [[replace(node, control_deps=[*node.control_deps], attributes={**node.attributes}) for node in nodes]
              for _ in range(workers)]  # fmt: skip
    return Workload(copies, {}, {"workers": workers, "compute_s": compute_s})
