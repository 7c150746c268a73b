"""Job that benchmarks/prediction_jobs.py predicts: a rank trains one of several models, and rank 0 writes its times.

python benchmarks/_prediction_job.py KIND --compute-s S --iterations N [--times FILE]

The forward pass also sleeps, so that processors do not limit the job, however many ranks share them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

KINDS = ("one-large-layer", "convolutions", "transformer", "accumulation", "small-buckets", "fsdp")
_MICRO_BATCHES = 3


def model_of(kind: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a model of 0.8 to 1 million parameters, and an input."""
    if kind == "one-large-layer":
        return nn.Sequential(nn.Linear(64, 6000), nn.ReLU(), nn.Linear(6000, 64), nn.Linear(64, 64)), torch.ones(64, 64)
    if kind == "convolutions":
        channels = (3, 64, 128, 256, 256)
        layers = [nn.Conv2d(a, b, 3, 1 + (a > 3), 1) for a, b in itertools.pairwise(channels)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4096, 10)), torch.ones(8, 3, 32, 32)
    if kind == "transformer":
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0, batch_first=True)
        return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.ones(4, 64, 128)
    return nn.Sequential(*(nn.Linear(400, 400) for _ in range(6))), torch.ones(64, 400)


def distributed(kind: str, model: nn.Module) -> nn.Module:
    """Return the model as its ranks train it together."""
    if kind != "fsdp":
        return DistributedDataParallel(model, bucket_cap_mb=1 if kind == "small-buckets" else 25)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--compute-s", type=float, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--times", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model, inputs = model_of(options.kind)
    model = distributed(options.kind, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    micro_batches = _MICRO_BATCHES if options.kind == "accumulation" else 1
    ends = []
    for _ in range(options.iterations):
        optimizer.zero_grad()
        for number in range(micro_batches):
            with contextlib.nullcontext() if number == micro_batches - 1 else model.no_sync():
                loss = model(inputs).square().mean()
                time.sleep(options.compute_s / micro_batches)
                loss.backward()
        optimizer.step()
        ends.append(time.monotonic())
    if options.times is not None and dist.get_rank() == 0:
        options.times.write_text(json.dumps(ends))
    dist.barrier()


if __name__ == "__main__":
    main()
