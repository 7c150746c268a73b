"""A data-parallel training job cut down to what the network sees of it.

An ordinary PyTorch DistributedDataParallel script. The model is a chain of layers with the parameter tensors of a real
model, or of equal layers. A layer's forward and backward pass sleep instead of computing, as if an accelerator did the
work, and the backward pass yields gradients of the tensors' sizes. Buckets, overlap, all-reduce and the optimizer step
are PyTorch's own.

    torchrun --nproc-per-node 3 scale_model.py --model vgg16 --scale 100 --compute-s 0.2
    torchrun --nproc-per-node 3 scale_model.py --parameters 1383574 --layers 16 --compute-s 0.2 --bucket-bytes 250000
"""

from __future__ import annotations

import argparse
import gc
import inspect
import os
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

# None of the objects that importing torch makes is garbage: to look through them takes a fifth of the import.
gc.disable()
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group, which its default arguments would keep
from torch import nn
from torch.nn.parallel import DistributedDataParallel

gc.freeze()
gc.enable()

FORWARD_SHARE = 1 / 3
_MIB = 1 << 20
# DDP's, unless a job asks for another size
DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BUCKET_BYTES = 25 * _MIB, _MIB


class LayerShape(NamedTuple):
    """Tensors of a layer and its share of the compute time.

    Attributes:
        sizes: elements of each tensor.
        forward_share: share of the forward pass.
        backward_share: share of the backward pass.
    """

    sizes: tuple[int, ...]
    forward_share: float
    backward_share: float


class Pace:
    """Lets the layers of one pass end at fixed times after the pass began.

    The deadlines are absolute, so neither Python's own time nor a sleep that lasts too long adds up over the layers.

    Args:
        pass_s: seconds that the whole pass takes.
        shares: share of each layer in it, in the order in which the layers run.
    """

    def __init__(self, pass_s: float, shares: Sequence[float]) -> None:
        self._due_s = [pass_s * share for share in accumulate(shares)]
        self._start_s = 0.0

    def wait(self, position: int) -> None:
        """Sleep until the layer at this position of the pass (0 is the first to run) is due."""
        now_s = time.monotonic()
        if position == 0:
            self._start_s = now_s
        left_s = self._start_s + self._due_s[position] - now_s
        if left_s > 0:
            time.sleep(left_s)

    def hold(self, position: int, until_s: float) -> None:
        """Let the layer at this position, and so those behind it, begin at ``until_s`` at the earliest."""
        if position:
            self._start_s = max(self._start_s, until_s - self._due_s[position - 1])


class Compute(torch.autograd.Function):  # type: ignore[misc]
    """Sleeps where an accelerator would compute; passes its input on and hands out gradients for the weights."""

    @staticmethod
    def forward(ctx: Any, activation: Any, layer: Layer, *weights: Any) -> Any:  # noqa: ARG004
        """Wait for the layer's share of the forward pass."""
        ctx.layer = layer
        layer.forward_pace.wait(layer.position)
        return activation.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        """Wait for the layer's share of the backward pass; only then are its gradients ready for DDP."""
        layer = ctx.layer
        layer.backward_pace.wait(layer.layers - 1 - layer.position)
        return gradient, None, *reversed(layer.gradients)


class Layer(nn.Module):  # type: ignore[misc]
    """One layer: flat weights and its place in the two passes."""

    def __init__(
        self, gradients: Sequence[Any], position: int, layers: int, forward_pace: Pace, backward_pace: Pace
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(gradient.numel())) for gradient in gradients)
        self.gradients = tuple(gradients)
        self.position = position
        self.layers = layers
        self.forward_pace = forward_pace
        self.backward_pace = backward_pace

    def forward(self, activation: Any) -> Any:
        """Take the layer's share of the forward pass."""
        # the last one first: autograd accumulates gradients in this order, and DDP's buckets begin at the last tensor
        return Compute.apply(activation, self, *reversed(self.weights))


def equal_layers(parameters: int, layers: int) -> list[LayerShape]:
    """Cut ``parameters`` into equal layers; the first ones take the remainder, one each."""
    size, rest = divmod(parameters, layers)
    return [LayerShape((size + (number < rest),), 1 / layers, 1 / layers) for number in range(layers)]


def scaled_sizes(sizes: Sequence[int], scale: float) -> list[int]:
    """Divide sizes by ``scale`` so that also their sums from the first on are divided by it, to within rounding.

    No size becomes 0; what is added thereby is taken from the next large ones.
    """
    scaled: list[int] = []
    given = 0
    for total in accumulate(sizes):
        scaled.append(max(1, round(total / scale) - given))
        given += scaled[-1]
    return scaled


def model_layers(name: str, scale: float) -> list[LayerShape]:
    """Return the layers of a model of the thesis, with its tensors divided by ``scale``.

    Raises:
        KeyError: the model has no profile in `ringtap.core.thesis_neural_networks`.
    """
    from ringtap.core.thesis_neural_networks import profile_of

    if (profile := profile_of(name)) is None:
        raise KeyError(name)
    layers = profile.layers
    # from the last tensor on, where DDP's buckets begin, so that the buckets are divided by the scale too
    sizes = iter(scaled_sizes([tensor.parameters for layer in reversed(layers) for tensor in reversed(layer)], scale))
    shapes = [
        LayerShape(
            tuple(next(sizes) for _ in layer)[::-1],
            sum(tensor.forward_share for tensor in layer),
            sum(tensor.backward_share for tensor in layer),
        )
        for layer in reversed(layers)
    ]
    return shapes[::-1]


def build_model(layers: Sequence[LayerShape], compute_s: float, rank: int = 0) -> Any:
    """Build the chain of layers.

    Args:
        layers: the layers, first to last.
        compute_s: seconds of forward and backward pass together.
        rank: gives each worker gradients of its own, so that the all-reduce has something to average.
    """
    largest = max(size for layer in layers for size in layer.sizes)
    values = torch.randn(largest, generator=torch.Generator().manual_seed(rank)) * 1e-3
    forward_pace = Pace(compute_s * FORWARD_SHARE, [layer.forward_share for layer in layers])
    backward_pace = Pace(compute_s * (1 - FORWARD_SHARE), [layer.backward_share for layer in reversed(layers)])
    # All tensors lend the same values: DDP copies them into its buckets, and memory stays small.
    return nn.Sequential(
        *(
            Layer([values[:size] for size in layer.sizes], place, len(layers), forward_pace, backward_pace)
            for place, layer in enumerate(layers)
        )
    )


def join_group() -> tuple[int, int]:
    """Join the job's process group, or make one of a single process; returns rank and world size."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


def distribute(model: Any, bucket_bytes: int, first_bucket_bytes: int) -> Any:
    """Wrap the model for data-parallel training in buckets of at least ``bucket_bytes`` (the last may be smaller).

    Args:
        model: the model.
        bucket_bytes: size at which a bucket is closed.
        first_bucket_bytes: the same of the first bucket. Releases of PyTorch whose DDP has no
            ``bucket_cap_mb_list`` take ``bucket_bytes`` instead.
    """
    sizes_mib = [first_bucket_bytes / _MIB, bucket_bytes / _MIB]
    if "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel).parameters:
        return DistributedDataParallel(model, bucket_cap_mb_list=sizes_mib, gradient_as_bucket_view=True)
    return DistributedDataParallel(model, bucket_cap_mb=sizes_mib[1], gradient_as_bucket_view=True)


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


def train_scheduled(model: Any, scheduler: Any, iterations: int) -> float:
    """Run iterations as `train` does, in which each layer's forward pass waits for its own gradient only.

    Args:
        model: the chain of layers, without DDP.
        scheduler: a `ringtap.workload.torch_gradient_scheduler.TensorScheduler` of its layers.
        iterations: iterations to run; 0: until the process is ended.
    """

    def update(layer: int) -> None:
        """Wait for a layer's gradient, and apply it."""
        since_s = scheduler.wait(layer)
        if since_s is not None:
            with torch.no_grad():
                for parameter in model[layer].parameters():
                    parameter.sub_(parameter.grad, alpha=1e-3)
                    parameter.grad = None
            model[layer].forward_pace.hold(layer, since_s)

    for number, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda _, __, number=number: update(number))
    start_s = time.monotonic()
    train(
        model, iterations
    )  # its optimizer marks the iterations, and finds no gradients, which the scheduler has taken
    for number in range(len(model)):
        update(number)
    scheduler.finish()
    return time.monotonic() - start_s


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description="Train a scale model: real gradients on the wire, compute slept.")
    parser.add_argument("--model", help="resnet50, vgg16, densenet161 or bert-large: its tensors (needs ringtap)")
    parser.add_argument("--scale", type=float, default=100.0, help="divides the tensors of --model, and DDP's buckets")
    parser.add_argument("--parameters", type=int, help="without --model: parameters in all (1383574: VGG-16/100)")
    parser.add_argument("--layers", type=int, help="without --model: equal layers they are spread over (16)")
    parser.add_argument(
        "--compute-s", type=float, nargs="+", default=[0.2], help="seconds of compute an iteration, or of each rank"
    )
    parser.add_argument("--bucket-bytes", type=int, help="bucket size (DDP's default of 25 MiB / scale)")
    parser.add_argument(
        "--first-bucket-bytes", type=int, help="size of the first bucket (that of the others, or DDP's 1 MiB / scale)"
    )
    parser.add_argument("--iterations", type=int, default=0, help="iterations to run; 0 runs until ended")
    parser.add_argument(
        "--schedule",
        metavar="METHOD",
        help="send gradients by fifo, tic, tac, p3 or bytescheduler instead of DDP's buckets (needs ringtap)",
    )
    parser.add_argument("--piece-bytes", type=int, default=0, help="with p3 and bytescheduler: bytes of a message")
    parser.add_argument("--credit-bytes", type=int, default=0, help="with bytescheduler: bytes in flight")
    options = parser.parse_args(argv)
    if options.scale < 1:
        parser.error("--scale must be at least 1")
    if options.model is None:
        options.parameters = 1_383_574 if options.parameters is None else options.parameters
        options.layers = 16 if options.layers is None else options.layers
        if not 1 <= options.layers <= options.parameters:
            parser.error("--layers must be between 1 and --parameters")
    elif options.parameters is not None or options.layers is not None:
        parser.error("--model brings its own tensors: it must stand without --parameters and --layers")
    if options.bucket_bytes is None:
        options.bucket_bytes = round(DEFAULT_BUCKET_BYTES / options.scale)
        options.first_bucket_bytes = options.first_bucket_bytes or round(DEFAULT_FIRST_BUCKET_BYTES / options.scale)
    elif options.first_bucket_bytes is None:
        options.first_bucket_bytes = options.bucket_bytes
    if min(*options.compute_s, options.iterations) < 0 or min(options.bucket_bytes, options.first_bucket_bytes) < 1:
        parser.error("--compute-s and --iterations must not be negative, buckets must be at least 1 byte")
    return options


def layers_of(options: argparse.Namespace) -> list[LayerShape]:
    """Return the layers that the command line asks for; exits with code 2 if there is no such model."""
    if options.model is None:
        return equal_layers(options.parameters, options.layers)
    try:
        return model_layers(options.model, options.scale)
    except KeyError:
        sys.exit(f"scale_model.py: {options.model!r} is not a model with known tensors: give --parameters and --layers")
    except ImportError:
        sys.exit("scale_model.py: --model needs ringtap in this Python: install it, or give --parameters and --layers")


def scheduler_of(model: Any, options: argparse.Namespace) -> Any:
    """Return the scheduler that the command line asks for; exits with code 2 if there is no such one."""
    try:
        from ringtap.core.errors import UsageError
        from ringtap.workload.torch_gradient_scheduler import TensorScheduler
    except ImportError:
        sys.exit("scale_model.py: --schedule needs ringtap in this Python: install it")
    try:
        return TensorScheduler(list(model), options.schedule, options.piece_bytes, options.credit_bytes)
    except UsageError as error:
        print(f"scale_model.py: {error}", file=sys.stderr)
        sys.exit(2)


def description(options: argparse.Namespace, layers: Sequence[LayerShape]) -> str:
    """Return the number of parameters and layers, and the compute time."""
    parameters = sum(sum(layer.sizes) for layer in layers)
    model = f" of {options.model} / {options.scale:g}" if options.model else ""
    compute = " and ".join(map(str, options.compute_s))
    return f"{parameters} parameters in {len(layers)} layers{model}, {compute} s of compute"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the job."""
    options = parse_arguments(argv)
    layers = layers_of(options)
    torch.set_num_threads(1)
    rank, world_size = join_group()
    model = build_model(layers, options.compute_s[rank % len(options.compute_s)], rank)
    sends = f"buckets of {options.bucket_bytes} bytes, the first of {options.first_bucket_bytes}"
    if options.schedule:
        scheduler, sends = scheduler_of(model, options), f"gradients by {options.schedule}"
    else:
        model = distribute(model, options.bucket_bytes, options.first_bucket_bytes)
    if rank == 0:
        print(f"scale model: {world_size} ranks, {description(options, layers)}, {sends}", flush=True)
    if options.schedule:
        elapsed_s = train_scheduled(model, scheduler, options.iterations)
    else:
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
    gc.freeze()  # the interpreter looks for garbage once more at its end
