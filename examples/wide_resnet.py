"""Trains a Wide ResNet on FashionMNIST, data-parallel: a job that truly learns.

An ordinary PyTorch DistributedDataParallel script for CPUs (gloo) and CUDA devices (NCCL); with ``--horovod`` the same
training under Horovod. The data are the four IDX files of FashionMNIST (or MNIST) in ``--data``; without that option a
set of the same shape is generated from the seed.

    torchrun --nproc-per-node 2 wide_resnet.py --epochs 5 --images 3000 --depth 10 --width 1
    horovodrun -np 2 --gloo python wide_resnet.py --horovod --epochs 5 --images 3000 --depth 10 --width 1
"""

from __future__ import annotations

import argparse
import gc
import gzip
import math
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group, which its default arguments would keep
from torch import nn
from torch.nn.functional import cross_entropy, interpolate, relu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 10
SIDE = 28
IMAGES_MAGIC = 0x803
LABELS_MAGIC = 0x801
VALIDATION_SHARE = 1 / 6


class DataError(Exception):
    """The data folder does not hold what it should."""


@dataclass(frozen=True)
class Split:
    """Pictures as bytes, (N, 28, 28), and their classes, (N,)."""

    images: Any
    labels: Any


# ---- data


def read_idx(path: Path, magic: int, shape: tuple[int, ...]) -> Any:
    """Read an IDX file of bytes, plain or gzipped.

    Args:
        path: the file; a name that ends in ``.gz`` is unpacked.
        magic: the number it must start with.
        shape: sizes wanted of the dimensions after the first.

    Returns:
        A tensor of bytes, (N, *shape).

    Raises:
        DataError: it is something else, or not whole.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    header = struct.Struct(f">{2 + len(shape)}I")
    if len(data) < header.size:
        raise DataError(f"{path} is cut short: {len(data)} bytes, and the header alone takes {header.size}")
    found_magic, *sizes = header.unpack_from(data)
    if found_magic != magic:
        raise DataError(f"{path} starts with {found_magic:#x}, where an IDX file of this kind starts with {magic:#x}")
    if tuple(sizes[1:]) != shape:
        raise DataError(f"{path} holds items of {sizes[1:]}, where {list(shape)} are wanted")
    content = bytearray(data[header.size :])
    if not content or len(content) != math.prod(sizes):
        raise DataError(f"{path} announces {sizes[0]} items ({math.prod(sizes)} bytes) and holds {len(content)} bytes")
    return torch.frombuffer(content, dtype=torch.uint8).reshape(sizes)


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"{folder} has no {name} or {name}.gz; leave out --data to train on a generated set")


def load_split(folder: Path, prefix: str) -> Split:
    """Load one half of the set; ``prefix`` is ``train`` or ``t10k``.

    Raises:
        DataError: a file is missing or damaged, or pictures and labels do not match.
    """
    images = read_idx(_find(folder, f"{prefix}-images-idx3-ubyte"), IMAGES_MAGIC, (SIDE, SIDE))
    labels = read_idx(_find(folder, f"{prefix}-labels-idx1-ubyte"), LABELS_MAGIC, ())
    if len(images) != len(labels):
        raise DataError(f"{folder}: {len(images)} {prefix} pictures, but {len(labels)} labels")
    if int(labels.max()) >= CLASSES:
        raise DataError(f"{folder}: a {prefix} label is {int(labels.max())}, and there are {CLASSES} classes")
    return Split(images, labels.long())


def generate(images: int, seed: int) -> tuple[Split, Split]:
    """Make a set that can be learned: a smooth pattern a class, shifted, dimmed and drowned in noise.

    Args:
        images: training pictures; a sixth as many are made for validation.
        seed: seed of everything random in it.
    """
    source = torch.Generator().manual_seed(seed)
    coarse = torch.rand(CLASSES, 1, 7, 7, generator=source)
    patterns = interpolate(coarse, size=(SIDE, SIDE), mode="bilinear", align_corners=False)[:, 0]

    def split(count: int) -> Split:
        labels = torch.randint(CLASSES, (count,), generator=source)
        pictures = patterns[labels]
        shifts = torch.randint(-2, 3, (count, 2), generator=source).tolist()
        moved = torch.stack([torch.roll(one, shift, (0, 1)) for one, shift in zip(pictures, shifts, strict=True)])
        brightness = 0.6 + 0.4 * torch.rand(count, 1, 1, generator=source)
        noise = 0.25 * torch.randn(count, SIDE, SIDE, generator=source)
        return Split(((moved * brightness + noise).clamp(0, 1) * 255).to(torch.uint8), labels)

    return split(images), split(max(CLASSES, int(images * VALIDATION_SHARE)))


def to_dataset(split: Split, mean: float, deviation: float) -> Any:
    """Standardise the pictures and add the channel that convolutions want."""
    pictures = ((split.images.float() / 255 - mean) / deviation).unsqueeze(1)
    return TensorDataset(pictures, split.labels)


# ---- model


class Block(nn.Module):  # type: ignore[misc]
    """Two 3x3 convolutions, normalised before each, around a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inside)
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        same = inside == outside and stride == 1
        self.shortcut = None if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Any) -> Any:
        """Apply the block."""
        ready = relu(self.norm1(x))
        kept = x if self.shortcut is None else self.shortcut(ready)
        return kept + self.conv2(relu(self.norm2(self.conv1(ready))))


def build_model(depth: int, width: int) -> Any:
    """Build WRN-depth-width for grey pictures; depth is 6n + 4, with n blocks in each of the three groups."""
    channels = [16, 16 * width, 32 * width, 64 * width]
    layers: list[Any] = [nn.Conv2d(1, channels[0], 3, padding=1, bias=False)]
    for group, stride in enumerate((1, 2, 2)):
        for number in range((depth - 4) // 6):
            first = number == 0
            inside = channels[group] if first else channels[group + 1]
            layers.append(Block(inside, channels[group + 1], stride if first else 1))
    head = [nn.BatchNorm2d(channels[3]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(channels[3], CLASSES))


# ---- training


class Group:
    """This process's place in a job of DistributedDataParallel, and its device.

    Without the variables of a launcher or of srun it is a job of a single process.
    """

    def __init__(self) -> None:
        os.environ |= variables_of_srun(os.environ)
        self.device = own_device()
        backend = own_backend(self.device)
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def distribute(self, model: Any, make_optimizer: Callable[[Any], Any]) -> tuple[Any, Any]:
        """The model and its optimizer, with gradients averaged over the ranks."""
        shared = DistributedDataParallel(model)
        return shared, make_optimizer(shared.parameters())

    def all_reduce(self, values: Any) -> Any:
        """Sums over the ranks."""
        dist.all_reduce(values)
        return values

    def largest(self, value: float) -> float:
        """The largest of the ranks' values."""
        found = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found.item())

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier()

    def leave(self) -> None:
        """End the group, after everything that holds it."""
        gc.collect()  # the model, which holds the group: otherwise its threads may outlive the interpreter and abort
        dist.destroy_process_group()


class HorovodGroup(Group):
    """The same under Horovod."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self._hvd = hvd
        self.device = own_device(hvd.local_rank())
        self.rank, self.world_size = hvd.rank(), hvd.size()

    def distribute(self, model: Any, make_optimizer: Callable[[Any], Any]) -> tuple[Any, Any]:
        """The model and its optimizer, with gradients averaged over the ranks."""
        self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        named = model.named_parameters()
        return model, self._hvd.DistributedOptimizer(make_optimizer(model.parameters()), named_parameters=named)

    def all_reduce(self, values: Any) -> Any:
        """Sums over the ranks."""
        return self._hvd.allreduce(values, op=self._hvd.Sum)

    def largest(self, value: float) -> float:
        """The largest of the ranks' values."""
        return float(max(self._hvd.allgather_object(value)))

    def barrier(self) -> None:
        """Wait for every rank."""
        self._hvd.barrier()

    def leave(self) -> None:
        """End the group."""
        self._hvd.shutdown()


def variables_of_srun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables of a task that srun has started; empty for one task, and if they are set already."""
    if "RANK" in environment or environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return {}
    first = re.sub(r"\[(\d+).*", r"\1", environment["SLURM_STEP_NODELIST"].split(",")[0])  # "n[01-03,07]": n01
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "MASTER_ADDR": environment.get("MASTER_ADDR", first),
        "MASTER_PORT": environment.get("MASTER_PORT", str(20_000 + int(environment["SLURM_JOB_ID"]) % 10_000)),
    }


def own_device(local_rank: int | None = None) -> Any:
    """The device this rank computes on: a CUDA device, or the CPU.

    Slurm may show each of its tasks another device alone (``--gpus-per-task``), and ranks may be more than devices.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank = int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def own_backend(device: Any) -> str:
    """NCCL if each rank of this host has a CUDA device of its own, else gloo: NCCL refuses two ranks on one device."""
    is_alone = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
    return "nccl" if device.type == "cuda" and is_alone else "gloo"


def train_epoch(model: Any, loader: Any, optimizer: Any, device: Any) -> int:
    """Train on this rank's share of the pictures; returns how many these were."""
    model.train()
    seen = 0
    for pictures, labels in loader:
        loss = cross_entropy(model(pictures.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += len(labels)
    return seen


def validate(model: Any, loader: Any, group: Group) -> tuple[float, float]:
    """Mean loss and accuracy over every rank's share of the validation pictures."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=group.device)  # loss, correct, pictures
    with torch.no_grad():
        for pictures, labels in loader:
            classes = labels.to(group.device)
            scores = model(pictures.to(group.device))
            sums[0] += cross_entropy(scores, classes, reduction="sum")
            sums[1] += (scores.argmax(1) == classes).sum()
            sums[2] += len(labels)
    loss, correct, count = group.all_reduce(sums).tolist()
    return loss / count, correct / count


def time_all_reduce(values: int, group: Group) -> float:
    """Seconds that one all-reduce of ``values`` 32-bit numbers takes at the slowest rank, nothing else going on."""
    buffer = torch.zeros(values, device=group.device)
    group.barrier()  # so that waiting for a late rank does not count as communication
    start_s = time.perf_counter()
    group.all_reduce(buffer)
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    return group.largest(time.perf_counter() - start_s)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description="Train a Wide ResNet on FashionMNIST, data-parallel.")
    parser.add_argument("--data", type=Path, help="folder with the four IDX files; without it a set is generated")
    parser.add_argument("--images", type=int, default=6000, help="training pictures to generate")
    parser.add_argument("--epochs", type=int, default=10, help="epochs at most")
    parser.add_argument("--batch", type=int, default=64, help="pictures a rank and step")
    parser.add_argument("--depth", type=int, default=16, help="layers: 6n + 4")
    parser.add_argument("--width", type=int, default=2, help="widening factor")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--target-accuracy", type=float, default=0.85, help="validation accuracy to stop at")
    parser.add_argument("--patience", type=int, default=2, help="epochs in a row that must reach it")
    parser.add_argument("--workers", type=int, default=0, help="loader processes a rank")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--horovod", action="store_true", help="average gradients with Horovod instead of DDP")
    options = parser.parse_args(argv)
    if options.depth < 10 or (options.depth - 4) % 6:
        parser.error("--depth must be 10, 16, 22, 28, ...")
    if min(options.images, options.epochs, options.batch, options.width, options.patience) < 1 or options.workers < 0:
        parser.error("--images, --epochs, --batch, --width and --patience must be at least 1, --workers at least 0")
    return options


def make_loaders(options: argparse.Namespace, group: Group) -> tuple[Any, Any, Any]:
    """Load or generate the data; returns training loader, its sampler and validation loader of this rank.

    Raises:
        DataError: the data folder is at fault, or the set is too small for a batch a rank.
    """
    if options.data is None:
        train, validation = generate(options.images, options.seed)
        origin = f"generated from seed {options.seed}"
    else:
        train, validation = load_split(options.data, "train"), load_split(options.data, "t10k")
        origin = f"read from {options.data}"
    if len(train.labels) < group.world_size * options.batch or len(validation.labels) < group.world_size:
        raise DataError(f"the set is too small for {group.world_size} ranks with batches of {options.batch}")
    if group.rank == 0:
        print(f"Data: {len(train.labels)} training and {len(validation.labels)} validation pictures, {origin}")
    values = train.images.float() / 255
    scale = float(values.mean()), max(float(values.std()), 1e-6)
    training_set = to_dataset(train, *scale)
    sampler = DistributedSampler(training_set, group.world_size, group.rank, seed=options.seed, drop_last=True)
    loader = DataLoader(training_set, options.batch, sampler=sampler, num_workers=options.workers, drop_last=True)
    # Dealt out without padding, so that the sums over the ranks count every picture once.
    mine = Split(validation.images[group.rank :: group.world_size], validation.labels[group.rank :: group.world_size])
    return loader, sampler, DataLoader(to_dataset(mine, *scale), 4 * options.batch)


def run(options: argparse.Namespace, group: Group) -> None:
    """Train until the target accuracy is reached or the epochs are over; rank 0 prints a line an epoch."""
    loader, sampler, validation = make_loaders(options, group)
    torch.manual_seed(options.seed)
    plain = build_model(options.depth, options.width).to(group.device)
    parameters = sum(weight.numel() for weight in plain.parameters())
    descent = partial(torch.optim.SGD, lr=options.learning_rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
    model, optimizer = group.distribute(plain, descent)
    if group.rank == 0:
        name = f"WRN-{options.depth}-{options.width}"
        print(f"Model: {name}, {parameters} parameters, {group.world_size} ranks on {group.device.type}", flush=True)
    cumulative_s, reached = 0.0, 0
    for epoch in range(1, options.epochs + 1):
        sampler.set_epoch(epoch)
        start_s = time.perf_counter()
        images = train_epoch(model, loader, optimizer, group.device) * group.world_size
        loss, accuracy = validate(model, validation, group)
        epoch_s = time.perf_counter() - start_s
        cumulative_s += epoch_s
        all_reduce_s = time_all_reduce(parameters, group)
        reached = reached + 1 if accuracy >= options.target_accuracy else 0
        if group.rank == 0:
            print(
                f"Epoch = {epoch}: Cumulative Time = {cumulative_s:.3f}, Epoch Time = {epoch_s:.3f}, "
                f"Images/sec = {images / epoch_s:.2f}, Validation Loss = {loss:.3f}, "
                f"Validation Accuracy = {accuracy:.3f}\n"
                f"Communication Time (all_reduce): {all_reduce_s:.6f} seconds",
                flush=True,
            )
        if reached == options.patience:
            if group.rank == 0:
                print(f"Early stopping after epoch {epoch}", flush=True)
            break


def main(argv: Sequence[str] | None = None) -> None:
    """Run the job."""
    options = parse_arguments(argv)
    group = HorovodGroup() if options.horovod else Group()
    try:
        run(options, group)
    except DataError as error:
        raise SystemExit(f"wide_resnet.py: {error}") from error
    group.leave()


if __name__ == "__main__":
    main()
