"""Rank of a small job with a given communication pattern: gradients of a model at 1:100, computation replaced by sleep.

python _pattern_job.py PATTERN MODEL ITERATIONS COUNTS, in the environment that torchrun gives its ranks
"""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from ringtap.examples.scale_model import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_FIRST_BUCKET_BYTES,
    build_model,
    distribute,
    join_group,
    model_layers,
    train,
)
from ringtap.workload.gradient_exchange import exchange_gradients

SCALE, COMPUTE_S, MICRO_BATCHES = 100, 0.1, 4


def data_parallel(pattern: str, model: str, iterations: int, counts: dict[str, int]) -> None:
    """Train with DistributedDataParallel; ``gloo`` is its own all-reduce."""
    built = build_model(model_layers(model, SCALE), COMPUTE_S, dist.get_rank())
    distributed = distribute(built, DEFAULT_BUCKET_BYTES // SCALE, DEFAULT_FIRST_BUCKET_BYTES // SCALE)
    if pattern != "gloo":
        exchange_gradients(distributed, pattern, **counts)
    train(distributed, iterations)
    del distributed
    gc.collect()


def units(model: str) -> list[int]:
    """Return the elements of each layer, a multiple of the number of workers."""
    workers = dist.get_world_size()
    return [-(-sum(layer.sizes) // workers) * workers for layer in model_layers(model, SCALE)]


def fully_sharded(model: str) -> None:
    """Run an iteration of FSDP: gather each layer's parameters twice, and scatter the sums of its gradients."""
    sizes, workers = units(model), dist.get_world_size()
    whole, part = torch.zeros(max(sizes)), torch.zeros(max(sizes) // workers)

    def gather(size: int) -> None:
        dist.all_gather_into_tensor(whole[:size], part[: size // workers])

    for size in sizes:
        gather(size)
        time.sleep(COMPUTE_S / 3 / len(sizes))
    for size in reversed(sizes):
        gather(size)
        time.sleep(COMPUTE_S * 2 / 3 / len(sizes))
        dist.reduce_scatter_tensor(part[: size // workers], whole[:size])
    time.sleep(COMPUTE_S / 3)


def exchange_tokens(model: str) -> None:
    """Run an iteration with experts: tokens to all workers and back."""
    size = sum(units(model))
    given, taken = torch.zeros(size), torch.zeros(size)
    for _ in range(2):
        time.sleep(COMPUTE_S / 10)
        dist.all_to_all_single(taken, given)
    time.sleep(COMPUTE_S)


def pipeline(model: str) -> None:
    """Run an iteration of a pipeline: activations of each micro-batch forward, then their gradients backward."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    activations = torch.zeros(sum(units(model)) // 4 // MICRO_BATCHES)
    for before, after in ((rank - 1, rank + 1), (rank + 1, rank - 1)):
        for _ in range(MICRO_BATCHES):
            if 0 <= before <= last:
                dist.recv(activations, before)
            time.sleep(COMPUTE_S / 20)
            if 0 <= after <= last:
                dist.send(activations, after)
    dist.barrier()
    time.sleep(COMPUTE_S)


OTHERS: dict[str, Any] = {"fsdp": fully_sharded, "all-to-all": exchange_tokens, "pipeline": pipeline}


def main() -> None:
    """Run the rank."""
    pattern, model, iterations, counts = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
    torch.set_num_threads(1)
    join_group()
    if pattern in OTHERS:
        for _ in range(iterations):
            OTHERS[pattern](model)
    else:
        data_parallel(pattern, model, iterations, counts)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
