"""Rank of a scale model that sends its gradients by each method in turn; times messages and iterations.

python _order_job.py MODEL SCALE ROUNDS ITERATIONS SETTINGS, in the environment that torchrun gives its ranks
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise

import torch
import torch.distributed as dist

from ringtap.examples.scale_model import (
    LayerShape,
    build_model,
    equal_layers,
    join_group,
    model_layers,
    train_scheduled,
)
from ringtap.models import GRADIENT_BYTES, profile_named
from ringtap.workload.tensor_scheduler import TensorScheduler

MESSAGES, WHOLE_ITERATIONS, CREDIT_BYTES = 100, 3, 1 << 20


def iterations_s(
    layers: list[LayerShape],
    compute_s: float,
    iterations: int,
    method: str,
    piece_bytes: int = 0,
    credit_bytes: int = 0,
) -> list[float]:
    """Return the times of iterations, each a backward pass and the next forward pass.

    The first iteration is not counted: PyTorch imports modules, and TCP begins slowly.
    """
    model = build_model(layers, compute_s, dist.get_rank())
    ends_s: list[float] = []
    model[-1].register_forward_hook(lambda *_: ends_s.append(time.monotonic()))
    train_scheduled(model, TensorScheduler(list(model), method, piece_bytes, credit_bytes), iterations + 2)
    return [after_s - before_s for before_s, after_s in pairwise(ends_s[1:])]


def main() -> None:
    """Run the rank; rank 0 prints a JSON object of times in s: for each round, those of its iterations.

    ``alone`` is an iteration of messages of one element, ``overhead`` the same with all in flight, and ``whole`` one
    with all gradients in a message.
    """
    name, scale, rounds, iterations = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    settings: dict[str, tuple[int, int]] = json.loads(sys.argv[5])
    torch.set_num_threads(1)
    rank, _ = join_group()
    layers, compute_s = model_layers(name, scale), profile_named(name).compute_s
    small, whole = (equal_layers(size, 1) for size in (MESSAGES, sum(sum(layer.sizes) for layer in layers)))
    times_s: dict[str, list[list[float]]] = {each: [] for each in ("alone", "overhead", "whole", *settings)}
    for _ in range(rounds):
        times_s["alone"].append(iterations_s(small, 0, iterations, "p3", GRADIENT_BYTES))
        times_s["overhead"].append(iterations_s(small, 0, iterations, "bytescheduler", GRADIENT_BYTES, CREDIT_BYTES))
        times_s["whole"].append(iterations_s(whole, 0, WHOLE_ITERATIONS, "fifo"))
        for method, (piece_bytes, credit_bytes) in settings.items():
            times_s[method].append(iterations_s(layers, compute_s, iterations, method, piece_bytes, credit_bytes))
    if rank == 0:
        print(json.dumps(times_s))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
