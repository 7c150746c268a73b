"""The scale model of ``scale_model.py`` as a Horovod job: the same layers and times, Horovod's negotiation and fusion.

An ordinary Horovod script for CPUs (gloo), with the same command line. Horovod's fusion threshold takes the place of
DDP's bucket size: gradients that are ready in the same cycle travel together up to that many bytes.

    horovodrun -np 3 --gloo python horovod_model.py --parameters 1383574 --layers 16 --compute-s 0.2 --iterations 50
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch

try:
    from scale_model import build_model, description, layers_of, parse_arguments
except ModuleNotFoundError:  # imported as part of ringtap, not run as a script
    from ringtap.examples.scale_model import build_model, description, layers_of, parse_arguments


def train(model: Any, iterations: int) -> float:
    """Run ``iterations`` iterations (0: until the process is ended); returns the seconds they took."""
    plain = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
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


def digest(model: Any) -> str:
    """A number that changes with any bit of the parameters, to compare runs by."""
    import hashlib

    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(parameter.detach().numpy().tobytes())
    return total.hexdigest()[:16]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the job."""
    options = parse_arguments(argv)
    layers = layers_of(options)
    torch.set_num_threads(1)
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(options.bucket_bytes))  # read by hvd.init()
    hvd.init()
    model = build_model(layers, options.compute_s[hvd.rank() % len(options.compute_s)], hvd.rank())
    if hvd.rank() == 0:
        print(
            f"Horovod scale model: {hvd.size()} ranks, {description(options, layers)}, "
            f"fusion up to {os.environ['HOROVOD_FUSION_THRESHOLD']} bytes",
            flush=True,
        )
    elapsed_s = train(model, options.iterations)
    if hvd.rank() == 0:
        each_s = elapsed_s / options.iterations
        print(f"{options.iterations} iterations, {each_s:.6f} s each, parameters {digest(model)}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
