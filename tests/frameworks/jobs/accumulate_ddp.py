"""Gradient accumulation by hand: two of three micro-batches under no_sync; at the end join() for uneven inputs."""

import gc
import hashlib
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for batch in range(12):
        last = batch % 3 == 2
        with nullcontext() if last else model.no_sync():
            (model(torch.randn(8, 16, generator=generator)).square().mean() / 3).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():  # a validation pass between
        model(torch.ones(1, 16))
    with model.join():
        for _ in range(2 + rank):
            optimizer.zero_grad()
            model(torch.randn(8, 16, generator=generator)).square().mean().backward()
            optimizer.step()
    if rank == 0:
        values = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
        print("parameters", hashlib.sha256(values).hexdigest())
    del model  # before the group, whose threads may else outlive the interpreter and abort
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
