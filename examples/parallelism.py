"""Trains one model under another parallelism than data parallelism: sharded (FSDP), pipeline, or tensor parallelism.

An ordinary PyTorch script for CPUs (gloo), with PyTorch's own implementations. The model is a chain of the feed-forward
blocks of a transformer, the data are random and the same for any number of ranks. So the losses are those of a single
process, to rounding.

    torchrun --nproc-per-node 4 parallelism.py --kind pipeline --iterations 20
    python parallelism.py --kind pipeline --iterations 20
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import gelu, mse_loss

try:
    from scale_model import join_group
except ModuleNotFoundError:  # imported as part of ringtap, not run as a script
    from ringtap.examples.scale_model import join_group

EXPANSION = 4  # of a transformer's feed-forward block
REPORT_EVERY = 10

# from a batch's inputs and targets, both of shape (samples, width), to this rank's part of the loss
Step = Callable[[Any, Any], Any]


class Block(nn.Module):  # type: ignore[misc]
    """Feed-forward block of a transformer with its residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, EXPANSION * width)
        self.down = nn.Linear(EXPANSION * width, width)

    def forward(self, activation: Any) -> Any:
        """Return activations of the same shape."""
        return activation + self.down(gelu(self.up(self.norm(activation))))


def sharded(model: Any, _: argparse.Namespace) -> tuple[Any, Step]:
    """Shard parameters, gradients and optimizer state; a block's parameters are gathered when it needs them (ZeRO-3).

    Every rank trains with its part of the batch.
    """
    mesh, rank, ranks = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank(), dist.get_world_size()
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def step(inputs: Any, targets: Any) -> Any:
        loss = mse_loss(model(inputs.chunk(ranks)[rank]), targets.chunk(ranks)[rank])
        loss.backward()
        return loss / ranks

    return model, step


def pipeline(model: Any, options: argparse.Namespace) -> tuple[Any, Step]:
    """Give each rank some of the blocks; micro-batches pass forward and backward in turn (1F1B)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    blocks = len(model) // ranks
    part = model[rank * blocks : (rank + 1) * blocks]
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, options.microbatches, loss_fn=mse_loss)

    def step(inputs: Any, targets: Any) -> Any:
        losses: list[Any] = []
        given = (inputs,) if rank == 0 else ()
        schedule.step(*given, **({"target": targets, "losses": losses} if rank == ranks - 1 else {}))
        return torch.stack(losses).mean() if losses else torch.zeros(())

    return part, step


def tensor(model: Any, _: argparse.Namespace) -> tuple[Any, Step]:
    """Cut the first matrix of each block by columns and the second one by rows, as Megatron-LM does."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def step(inputs: Any, targets: Any) -> Any:
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        return loss / ranks

    return model, step


KINDS = {"fsdp": sharded, "pipeline": pipeline, "tensor": tensor}


def train(part: Any, step: Step, options: argparse.Namespace) -> None:
    """Train for ``--iterations`` iterations (0: until the process is ended); rank 0 prints a line for every ten."""
    optimizer = torch.optim.SGD(part.parameters(), lr=options.lr)
    source = torch.Generator().manual_seed(options.seed)
    start_s = time.perf_counter()
    for number in count(1):
        inputs, targets = torch.randn(2, options.batch, options.width, generator=source)
        optimizer.zero_grad()
        loss = step(inputs, targets).detach()
        optimizer.step()
        if number % REPORT_EVERY == 0 or number == options.iterations:
            dist.all_reduce(loss)
            if dist.get_rank() == 0:
                iteration_s = (time.perf_counter() - start_s) / number
                print(f"Iteration {number}: loss {loss.item():.9f}, {iteration_s:.4f} s each", flush=True)
        if number == options.iterations:
            return


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description="Train under sharded, pipeline or tensor parallelism, on CPUs.")
    parser.add_argument("--kind", required=True, choices=list(KINDS))
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model (4)")
    parser.add_argument("--width", type=int, default=256, help="width of the model (256)")
    parser.add_argument("--batch", type=int, default=64, help="samples of an iteration, of all ranks together (64)")
    parser.add_argument("--microbatches", type=int, default=4, help="micro-batches of a batch, for pipeline (4)")
    parser.add_argument("--iterations", type=int, default=0, help="iterations to run; 0 runs until ended")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate (0.1)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    if min(options.layers, options.width, options.batch, options.microbatches) < 1 or options.iterations < 0:
        parser.error("--layers, --width, --batch and --microbatches must be at least 1, --iterations at least 0")
    return options


def misfit(options: argparse.Namespace, ranks: int) -> str:
    """Return the reason that the model cannot be cut for a number of ranks; empty if it can."""
    parts = {
        "fsdp": [("--batch", options.batch, ranks)],
        "pipeline": [("--layers", options.layers, ranks), ("--batch", options.batch, options.microbatches)],
        "tensor": [("--width", EXPANSION * options.width, ranks)],
    }
    for name, size, divisor in parts[options.kind]:
        if size % divisor:
            return f"{name}: {size} cannot be cut into {divisor} equal parts"
    if options.kind == "pipeline" and options.microbatches < ranks:
        return f"--microbatches {options.microbatches} is below the {ranks} ranks of the pipeline"
    return ""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the job."""
    options = parse_arguments(argv)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)  # the same weights on every rank
    model = nn.Sequential(*(Block(options.width) for _ in range(options.layers)))
    rank, ranks = join_group()
    if problem := misfit(options, ranks):
        sys.exit(f"parallelism.py: {problem}" if rank == 0 else 1)
    if rank == 0:
        parameters = sum(weight.numel() for weight in model.parameters())
        print(f"{options.kind}: {ranks} ranks, {parameters} parameters in {options.layers} blocks", flush=True)
    part, step = KINDS[options.kind](model, options)
    train(part, step, options)
    del part, step, model  # they hold the group
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
