"""Trains a model of the thesis itself, data-parallel: ResNet-50, VGG-16, DenseNet-161 or BERT-large.

An ordinary PyTorch DistributedDataParallel script for CPUs (gloo) and CUDA devices (NCCL); with ``--horovod`` the same
training under Horovod. The models are torchvision's and transformers', with random weights. The data are random too,
and are made in memory: each rank trains on one batch of its own again and again, so that no input pipeline limits it.

    torchrun --nproc-per-node 2 real_model.py --model resnet50 --batch 4 --iterations 20
    horovodrun -np 2 --gloo python real_model.py --horovod --model bert-large --batch 1 --sequence 32 --iterations 20
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.nn.functional import cross_entropy

try:
    from scale_model import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BUCKET_BYTES, distribute
    from wide_resnet import Group, HorovodGroup
except ModuleNotFoundError:  # imported as part of ringtap, not run as a script
    from ringtap.examples.scale_model import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BUCKET_BYTES, distribute
    from ringtap.examples.wide_resnet import Group, HorovodGroup

# samples of a rank in an iteration, by model (thesis, Table 2.1)
BATCHES = {"resnet50": 64, "vgg16": 64, "densenet161": 64, "bert-large": 8}
MIN_IMAGE, MAX_SEQUENCE = 64, 512  # smaller images leave nothing to normalise, and BERT-large has 512 positions
CLASSES = 1000
MASK_TOKEN, MASKED_SHARE, NOT_MASKED = 103, 0.15, -100  # BERT's token, its share, and the label without a loss
REPORT_EVERY = 10


def build_model(name: str) -> Any:
    """Build one of the models of `BATCHES` with random weights.

    Raises:
        ImportError: its package cannot be imported.
    """
    if name == "bert-large":
        from transformers import BertConfig, BertForMaskedLM

        return BertForMaskedLM(
            BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
        )
    try:
        import torchvision
    except RuntimeError:
        # a torchvision for CUDA beside a torch without it lacks operators that it wants to describe; no model here has
        # them
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision
    return torchvision.models.get_model(name)


def make_loss(options: argparse.Namespace, group: Group) -> Callable[[Any], Any]:
    """Make this rank's batch; returns a function from the model to the loss of a forward pass."""
    source = torch.Generator().manual_seed(options.seed + group.rank)
    if options.model != "bert-large":
        images = torch.rand(options.batch, 3, options.image, options.image, generator=source).to(group.device)
        classes = torch.randint(CLASSES, (options.batch,), generator=source).to(group.device)
        return lambda model: cross_entropy(model(images), classes)
    shape = (options.batch, options.sequence)
    tokens = torch.randint(MASK_TOKEN + 1, 30_522, shape, generator=source)  # of BERT's vocabulary
    masked = torch.rand(shape, generator=source) < MASKED_SHARE
    masked[:, 0] = True  # a batch without a masked token has no loss
    labels = torch.where(masked, tokens, NOT_MASKED).to(group.device)
    tokens = torch.where(masked, MASK_TOKEN, tokens).to(group.device)
    return lambda model: model(input_ids=tokens, labels=labels).loss


def train(model: Any, optimizer: Any, loss_of: Callable[[Any], Any], options: argparse.Namespace, group: Group) -> None:
    """Train for ``--iterations`` iterations (0: until the process is ended); rank 0 prints a line for every ten."""
    model.train()
    first, start_s = 1, time.perf_counter()
    for number in count(1):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % REPORT_EVERY and number != options.iterations:
            continue
        value = loss.item()  # waits for the device
        iteration_s = (time.perf_counter() - start_s) / (number - first + 1)
        if group.rank == 0:
            print(
                f"Iterations {first} to {number}: Iteration Time = {iteration_s:.4f}, "
                f"Samples/sec = {group.world_size * options.batch / iteration_s:.2f}, Loss = {value:.3f}",
                flush=True,
            )
        if number == options.iterations:
            return
        first, start_s = number + 1, time.perf_counter()


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description="Train a model of the thesis itself on random data, data-parallel.")
    parser.add_argument("--model", required=True, choices=list(BATCHES))
    parser.add_argument("--batch", type=int, help="samples a rank and iteration (Table 2.1: 64, of BERT-large 8)")
    parser.add_argument("--iterations", type=int, default=0, help="iterations to run; 0 runs until ended")
    parser.add_argument("--image", type=int, default=224, help="height and width of the images")
    parser.add_argument("--sequence", type=int, default=128, help="tokens of a sequence (BERT-large)")
    parser.add_argument("--bucket-bytes", type=int, help="size of DDP's buckets, Horovod's fusion threshold (theirs)")
    parser.add_argument("--first-bucket-bytes", type=int, help="size of DDP's first bucket (that of the others)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--horovod", action="store_true", help="average gradients with Horovod instead of DDP")
    options = parser.parse_args(argv)
    if options.batch is None:
        options.batch = BATCHES[options.model]
    if options.batch < 1 or options.iterations < 0:
        parser.error("--batch must be at least 1, --iterations at least 0")
    if options.image < MIN_IMAGE or not 1 <= options.sequence <= MAX_SEQUENCE:
        parser.error(f"--image must be at least {MIN_IMAGE}, --sequence from 1 to {MAX_SEQUENCE}")
    if min(options.bucket_bytes or 1, options.first_bucket_bytes or 1) < 1:
        parser.error("buckets must be at least 1 byte")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Run the job."""
    options = parse_arguments(argv)
    torch.manual_seed(options.seed)
    try:
        plain = build_model(options.model)
    except ImportError as error:
        library = "transformers" if options.model == "bert-large" else "torchvision"
        sys.exit(f"real_model.py: {options.model} needs {library} ({error}): pip install {library}")
    if options.horovod and options.bucket_bytes:
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(options.bucket_bytes))  # read by hvd.init()
    group = HorovodGroup() if options.horovod else Group()
    plain = plain.to(group.device)
    if group.rank == 0:
        parameters = sum(weight.numel() for weight in plain.parameters())
        print(f"Model: {options.model}, {parameters} parameters, {group.world_size} ranks on {group.device.type}")
        print(f"Batch per rank = {options.batch}", flush=True)
    descent = partial(torch.optim.SGD, lr=1e-3)
    if options.horovod:
        model, optimizer = group.distribute(plain, descent)
    else:
        bucket_bytes = options.bucket_bytes or DEFAULT_BUCKET_BYTES
        first_bytes = options.first_bucket_bytes or options.bucket_bytes or DEFAULT_FIRST_BUCKET_BYTES
        model = distribute(plain, bucket_bytes, first_bytes)
        optimizer = descent(model.parameters())
    train(model, optimizer, make_loss(options, group), options, group)
    del model, optimizer
    group.leave()


if __name__ == "__main__":
    main()
