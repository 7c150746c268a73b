"""ResNet-50 that trains with and without recording, in alternating blocks: ``overhead_job.py DEVICE PAIRS``.

It runs under ``ringtap run``. Between two blocks the hook's functions are removed from PyTorch or put back, and the
agent is stopped or continued, as in ``benchmarks/overhead.py``. It prints the pairs and the number of recorded steps.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from _overhead_job import Recording, agent_pid
from job import Job
from resnet50 import resnet50
from torch.nn.functional import cross_entropy

# device -> images of a batch, their side, iterations of a block, and those after a switch that do not count
SIZES = {"cuda": (64, 224, 20, 3), "cpu": (1, 64, 1, 0)}
WARM_UP = 10


def measure(device: str, count: int) -> dict[str, Any]:
    """Train, and return the pairs of blocks and the number of recorded steps."""
    batch, side, iterations, settle = SIZES[device]
    job = Job(device)
    model = torch.nn.parallel.DistributedDataParallel(resnet50().to(job.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(batch, 3, side, side, device=job.device)
    classes = torch.randint(1000, (batch,), device=job.device)
    recording = Recording(model, agent_pid())

    def iterate(times: int) -> float:
        """Return the seconds per iteration."""
        job.clock.wait()
        begin_s = time.perf_counter()
        for _ in range(times):
            cross_entropy(model(images), classes).backward()
            optimizer.step()
            optimizer.zero_grad()
        job.clock.wait()
        return (time.perf_counter() - begin_s) / max(times, 1)

    def block(on: bool) -> dict[str, float]:
        gc.collect(0)
        recording.turn(on)
        iterate(settle)
        gc.disable()
        mean_s = iterate(iterations)
        gc.enable()
        recording.check(on)
        return {"mean_s": mean_s}

    iterate(WARM_UP)
    order, pairs = random.Random(1), []
    try:
        for _ in range(count):
            arms = order.sample(["with", "without"], 2)
            pairs.append({arm: block(arm == "with") for arm in arms})
    finally:
        recording.turn(True)
    return {"pairs": pairs, "recorded": WARM_UP + count * (settle + iterations)}


def main() -> None:
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    gc.collect()  # the model, which holds the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
