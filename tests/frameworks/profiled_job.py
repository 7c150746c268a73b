"""Jobs of two ranks for the profiler: ``profiled_job.py KIND [ITERATIONS]``; rank 0 prints a digest of what it learnt."""

from __future__ import annotations

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))


def train(replica: nn.Module, iterations: int, before_step=lambda: None) -> None:  # type: ignore[no-untyped-def]
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(iterations):
        loss = nn.functional.mse_loss(replica(inputs), torch.zeros(32, 8))
        loss.backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()


def ddp(iterations: int) -> nn.Module:
    replica = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.1)
    train(replica, iterations)
    return replica


def fsdp(iterations: int) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    replica = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    train(replica, iterations)
    return replica


def fully_shard(iterations: int) -> nn.Module:
    from torch.distributed.fsdp import fully_shard as shard

    replica = model()
    for layer in replica:
        shard(layer)
    shard(replica)
    train(replica, iterations)
    return replica


def collectives(iterations: int) -> nn.Module:
    replica = model()

    def average() -> None:
        works = [dist.all_reduce(one.grad, async_op=True) for one in replica.parameters()]
        for work in works:
            work.wait()
        dist.barrier()

    train(replica, iterations, average)
    return replica


def pipeline(iterations: int) -> nn.Module:
    """Two stages: activations go to rank 1, and their gradients come back."""
    stage = model()[:3] if dist.get_rank() == 0 else model()[3:]
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    for _ in range(iterations):
        if dist.get_rank() == 0:
            output = stage(torch.ones(32, 64))
            dist.send(output.detach(), dst=1, tag=7)
            gradient = torch.empty_like(output)
            dist.recv(gradient, src=1, tag=8)
            output.backward(gradient)
        else:
            received = torch.empty(32, 256, requires_grad=True)
            dist.recv(received.data, src=0, tag=7)
            stage(received).square().mean().backward()
            dist.isend(received.grad, dst=0, tag=8).wait()
        optimizer.step()
        optimizer.zero_grad()
    return stage


def compiled(iterations: int) -> nn.Module:
    replica = nn.parallel.DistributedDataParallel(model())
    train(torch.compile(replica, backend="eager"), iterations)
    return replica


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    iterations = int(sys.argv[2]) if len(sys.argv) > 2 else 30
    found = {each.__name__: each for each in (ddp, fsdp, fully_shard, collectives, pipeline, compiled)}[sys.argv[1]](
        iterations
    )
    if dist.get_rank() == 0:
        values = b"".join(
            (one.to_local() if hasattr(one, "to_local") else one).detach().numpy().tobytes()
            for one in found.parameters()
        )
        print("digest", hashlib.sha256(values).hexdigest(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
