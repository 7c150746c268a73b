"""A data-parallel training job cut down to what the network sees of it.

An ordinary PyTorch DistributedDataParallel script. The model is a chain of equal layers; a layer's forward and backward
pass sleep instead of computing, as if an accelerator did the work, and the backward pass yields a gradient of the
layer's size. Buckets, overlap, all-reduce and the optimizer step are PyTorch's own.

    torchrun --nproc-per-node 3 scale_model.py --parameters 1383574 --layers 16 --compute-s 0.2 --bucket-bytes 250000
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FORWARD_SHARE = 1 / 3
_MIB = 1 << 20


class Pace:
    """Lets the layers of one pass end at fixed times after the pass began.

    The deadlines are absolute, so neither Python's own time nor a sleep that lasts too long adds up over the layers.

    Args:
        pass_s: seconds that the whole pass takes.
        layers: layers in it.
    """

    def __init__(self, pass_s: float, layers: int) -> None:
        self._layer_s = pass_s / layers
        self._start_s = 0.0

    def wait(self, position: int) -> None:
        """Sleep until the layer at this position of the pass (0 is the first to run) is due."""
        now_s = time.monotonic()
        if position == 0:
            self._start_s = now_s
        left_s = self._start_s + (position + 1) * self._layer_s - now_s
        if left_s > 0:
            time.sleep(left_s)


class Compute(torch.autograd.Function):  # type: ignore[misc]
    """Sleeps where an accelerator would compute; passes its input on and hands out a gradient for the weight."""

    @staticmethod
    def forward(ctx: Any, activation: Any, weight: Any, layer: Layer) -> Any:  # noqa: ARG004
        """Wait for the layer's share of the forward pass."""
        ctx.layer = layer
        layer.forward_pace.wait(layer.position)
        return activation.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, Any, None]:
        """Wait for the layer's share of the backward pass; only then is its gradient ready for DDP."""
        layer = ctx.layer
        layer.backward_pace.wait(layer.layers - 1 - layer.position)
        return gradient, layer.gradient, None


class Layer(nn.Module):  # type: ignore[misc]
    """One layer: a flat weight and its place in the two passes."""

    def __init__(self, gradient: Any, position: int, layers: int, forward_pace: Pace, backward_pace: Pace) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(gradient.numel()))
        self.gradient = gradient
        self.position = position
        self.layers = layers
        self.forward_pace = forward_pace
        self.backward_pace = backward_pace

    def forward(self, activation: Any) -> Any:
        """Take the layer's share of the forward pass."""
        return Compute.apply(activation, self.weight, self)


def layer_sizes(parameters: int, layers: int) -> list[int]:
    """Cut ``parameters`` into equal layers; the first ones take the remainder, one each."""
    size, rest = divmod(parameters, layers)
    return [size + (number < rest) for number in range(layers)]


def build_model(parameters: int, layers: int, compute_s: float, rank: int = 0) -> Any:
    """Build the chain of layers.

    Args:
        parameters: parameters in all.
        layers: layers they are spread over.
        compute_s: seconds of forward and backward pass together.
        rank: gives each worker gradients of its own, so that the all-reduce has something to average.
    """
    sizes = layer_sizes(parameters, layers)
    values = torch.randn(sizes[0], generator=torch.Generator().manual_seed(rank)) * 1e-3
    forward_pace = Pace(compute_s * FORWARD_SHARE, layers)
    backward_pace = Pace(compute_s * (1 - FORWARD_SHARE), layers)
    # All layers lend the same values: DDP copies them into its buckets, and memory stays small.
    return nn.Sequential(
        *(Layer(values[:size], place, layers, forward_pace, backward_pace) for place, size in enumerate(sizes))
    )


def join_group() -> tuple[int, int]:
    """Join the job's process group, or make one of a single process; returns rank and world size."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


def distribute(model: Any, bucket_bytes: int) -> Any:
    """Wrap the model for data-parallel training in buckets of at least ``bucket_bytes`` (the last may be smaller)."""
    # Older releases start with a bucket of 1 MiB whatever was asked for, which a scale model would feel.
    dist._DEFAULT_FIRST_BUCKET_BYTES = min(dist._DEFAULT_FIRST_BUCKET_BYTES, bucket_bytes)
    return DistributedDataParallel(model, bucket_cap_mb=bucket_bytes / _MIB, gradient_as_bucket_view=True)


def train(model: Any, iterations: int) -> float:
    """Run ``iterations`` iterations (0: until the process is ended); returns the seconds they took."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    # Requires a gradient, so that the backward pass reaches the first layer like any other.
    activation = torch.ones(1, requires_grad=True)
    start_s = time.monotonic()
    done = 0
    while iterations == 0 or done < iterations:
        model(activation).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
    return time.monotonic() - start_s


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description="Train a scale model: real gradients on the wire, compute slept.")
    parser.add_argument("--parameters", type=int, default=1_383_574, help="parameters in all (default: VGG-16/100)")
    parser.add_argument("--layers", type=int, default=16, help="equal layers they are spread over")
    parser.add_argument("--compute-s", type=float, default=0.2, help="seconds of compute an iteration")
    parser.add_argument("--bucket-bytes", type=int, default=250_000, help="DDP bucket size")
    parser.add_argument("--iterations", type=int, default=0, help="iterations to run; 0 runs until ended")
    options = parser.parse_args(argv)
    if not 1 <= options.layers <= options.parameters:
        parser.error("--layers must be between 1 and --parameters")
    if options.compute_s < 0 or options.bucket_bytes < 1 or options.iterations < 0:
        parser.error("--compute-s and --iterations must not be negative, --bucket-bytes must be at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Run the job."""
    options = parse_arguments(argv)
    torch.set_num_threads(1)
    rank, world_size = join_group()
    model = distribute(build_model(options.parameters, options.layers, options.compute_s, rank), options.bucket_bytes)
    if rank == 0:
        print(
            f"scale model: {world_size} ranks, {options.parameters} parameters in {options.layers} layers, "
            f"{options.compute_s} s of compute, buckets of {options.bucket_bytes} bytes",
            flush=True,
        )
    elapsed_s = train(model, options.iterations)
    if rank == 0:
        print(f"{options.iterations} iterations, {elapsed_s / options.iterations:.6f} s each", flush=True)
    # The model holds the group; were it left to the interpreter's end, the group's threads would at times meet an
    # interpreter that is gone, and abort the process.
    del model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
