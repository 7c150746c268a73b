"""Rank of a scale model that sends its gradients by each method in turn; times messages and iterations.

python _order_job.py MODEL SCALE ROUNDS ITERATIONS SETTINGS, in the environment that torchrun gives its ranks
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise

import torch
import torch.distributed as dist
from pyroute2 import IPRoute
from pyroute2.netlink import rtnl

from ringtap.core.models import GRADIENT_BYTES, profile_named
from ringtap.examples.scale_model import (
    LayerShape,
    build_model,
    equal_layers,
    join_group,
    model_layers,
    train_scheduled,
)
from ringtap.workload.gradient_scheduler import TensorScheduler

# a message has 16 elements: gloo cuts an all-reduce of two ranks into four segments, and leaves out empty ones
MESSAGES, MESSAGE_BYTES, COUNTED_ITERATIONS, CREDIT_BYTES = 50, 16 * GRADIENT_BYTES, 2, 1 << 20

IGNORED = 2


def iterations_s(
    layers: list[LayerShape],
    compute_s: float,
    iterations: int,
    method: str,
    piece_bytes: int = 0,
    credit_bytes: int = 0,
) -> list[float]:
    """Return the times of iterations, each a backward pass and the next forward pass.

    The first iterations are not counted: one ends before the second forward pass, and in the next TCP begins slowly.
    """
    model = build_model(layers, compute_s, dist.get_rank())
    ends_s: list[float] = []
    model[-1].register_forward_hook(lambda *_: ends_s.append(time.monotonic()))
    train_scheduled(model, TensorScheduler(list(model), method, piece_bytes, credit_bytes), iterations + IGNORED)
    return [after_s - before_s for before_s, after_s in pairwise(ends_s[1:])]


def sent_bytes() -> int:
    """Return the bytes that this host has sent, as its limit counts them: with the headers of each segment."""
    with IPRoute() as netlink:
        index = netlink.link_lookup(ifname=os.environ["GLOO_SOCKET_IFNAME"])[0]
        root = next(each for each in netlink.get_qdiscs(index=index) if each["parent"] == rtnl.TC_H_ROOT)
    return int(root.get_attr("TCA_STATS2").get_attr("TCA_STATS_BASIC")["bytes"])


def iteration_bytes(layers: list[LayerShape], method: str, *sizes_bytes: int) -> float:
    """Return the bytes that this host sends in an iteration of a method's messages without computation."""
    before_bytes = sent_bytes()
    iterations_s(layers, 0, COUNTED_ITERATIONS, method, *sizes_bytes)
    return (sent_bytes() - before_bytes) / (COUNTED_ITERATIONS + IGNORED)


def main() -> None:
    """Run the rank; rank 0 prints a JSON object with a list per measurement.

    ``alone`` has times in s of iterations of small messages, ``overhead`` the same with all in flight, and each method
    its iterations. ``sent_bytes`` are those of an iteration: of all gradients in a message, then of each method.
    """
    name, scale, rounds, iterations = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    settings: dict[str, tuple[int, int]] = json.loads(sys.argv[5])
    torch.set_num_threads(1)
    rank, _ = join_group()
    layers, compute_s = model_layers(name, scale), profile_named(name).compute_s
    small = equal_layers(MESSAGES * MESSAGE_BYTES // GRADIENT_BYTES, 1)
    whole = equal_layers(sum(sum(layer.sizes) for layer in layers), 1)
    counted = [iteration_bytes(whole, "fifo")]
    counted += [iteration_bytes(layers, method, *sizes_bytes) for method, sizes_bytes in settings.items()]
    found: dict[str, list[list[float]]] = {each: [] for each in ("alone", "overhead", *settings)}
    found["sent_bytes"] = [counted]
    for _ in range(rounds):
        for method, (piece_bytes, credit_bytes) in settings.items():
            found["alone"].append(iterations_s(small, 0, iterations, "p3", MESSAGE_BYTES))
            found["overhead"].append(iterations_s(small, 0, iterations, "bytescheduler", MESSAGE_BYTES, CREDIT_BYTES))
            found[method].append(iterations_s(layers, compute_s, iterations, method, piece_bytes, credit_bytes))
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
