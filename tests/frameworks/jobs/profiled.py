"""Jobs of two ranks for the profiler: ``profiled.py KIND ITERATIONS``; rank 0 prints a digest of what it learnt.

The kinds ``scale_model`` and ``wide_resnet`` print the payload that rank 0 sends in an iteration instead, by the
kernel's counts of its connections.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import os
import signal
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def small_model() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))


def train(replica: Any, iterations: int, before_step: Callable[[], None] = lambda: None, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.SGD(replica.parameters(), lr=0.01)
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(iterations):
        loss = nn.functional.mse_loss(replica(inputs), torch.zeros(32, 8))
        loss.backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()


def ddp(iterations: int) -> Any:
    replica = nn.parallel.DistributedDataParallel(small_model(), bucket_cap_mb=0.1)
    train(replica, iterations)
    return replica


def fsdp(iterations: int) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    replica = FullyShardedDataParallel(small_model(), device_id=torch.device("cpu"))
    train(replica, iterations)
    return replica


def fully_shard(iterations: int) -> Any:
    from torch.distributed.fsdp import fully_shard as shard

    replica = small_model()
    for layer in replica:
        shard(layer)
    shard(replica)
    train(replica, iterations)
    return replica


def collectives(iterations: int) -> Any:
    replica = small_model()

    def average() -> None:
        works = [dist.all_reduce(one.grad, async_op=True) for one in replica.parameters()]
        for work in works:
            work.wait()
        dist.barrier()

    train(replica, iterations, average)
    return replica


def pipeline(iterations: int) -> Any:
    """Train two stages: activations go to rank 1, and their gradients come back."""
    stage = small_model()[:3] if dist.get_rank() == 0 else small_model()[3:]
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


def experts(iterations: int) -> Any:
    """Send rows of activations to the ranks of their experts, other numbers of them in each iteration."""
    replica, rank = small_model(), dist.get_rank()
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    for number in range(iterations):
        rows = [[number % 16, 32 - number % 16], [10 + number % 16, 22 - number % 16]]
        output = replica(torch.ones(32, 64))
        own = [each[rank] for each in rows]
        received = torch.empty(sum(own), 8)
        dist.all_to_all_single(received, output.detach(), own, rows[rank])
        (output.square().mean() + received.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return replica


def compiled(iterations: int) -> Any:
    replica = nn.parallel.DistributedDataParallel(small_model())
    train(torch.compile(replica, backend="eager"), iterations)
    return replica


def profiles_itself(iterations: int) -> Any:
    replica = nn.parallel.DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    train(replica, 8, optimizer=optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        train(replica, 2, optimizer=optimizer)
    assert any(event.key == "gloo:all_reduce" for event in own.key_averages())
    train(replica, iterations, optimizer=optimizer)
    return replica


def traces_itself(iterations: int) -> Any:
    """Train after ringtap's profile is complete, and export a trace of each rank into the folder TRACES."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8))
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    train(replica, 24, optimizer=optimizer)
    schedule = torch.profiler.schedule(wait=1, warmup=2, active=iterations, repeat=1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, schedule=schedule, record_shapes=True) as own:
        for _ in range(iterations + 3):
            train(replica, 1, optimizer=optimizer)
            own.step()
    own.export_chrome_trace(str(Path(os.environ["TRACES"]) / f"rank{dist.get_rank()}.json.gz"))
    return replica


def is_killed(iterations: int) -> Any:
    replica = nn.parallel.DistributedDataParallel(small_model())
    train(replica, 10)
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    train(replica, iterations)
    return replica


def payload_sent() -> int:
    """Acknowledged bytes of all TCP connections of this process."""
    total, left, pause_s = 0, 1, 0.5
    while left:  # until everything is acknowledged: the other rank may be late
        time.sleep(pause_s)
        total, left, pause_s = 0, 0, 0.01
        for path in [path for path in Path("/proc/self/fd").iterdir() if path.resolve().name.startswith("socket:")]:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as one:
                if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                    waiting = bytearray(4)
                    fcntl.ioctl(one, termios.TIOCOUTQ, waiting)
                    left += struct.unpack("=i", waiting)[0]
                    information = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("<Q", information, 120)[0]
    return total


def print_payload(step: Callable[[], object], iterations: int) -> None:
    for _ in range(4):
        step()
    before = payload_sent()
    for _ in range(iterations):
        step()
    sent = payload_sent() - before
    dist.barrier()  # a rank that ends closes the connections of the other one
    if dist.get_rank() == 0:
        print("sent", sent / iterations, flush=True)


def scale_model(iterations: int) -> Any:
    from ringtap.examples import scale_model as example

    layers = example.model_layers("resnet50", 100)
    replica = example.distribute(example.build_model(layers, 0.02, dist.get_rank()), 262_144, 10_486)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.001)

    def step() -> None:
        replica(torch.ones(1, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    print_payload(step, iterations)
    return replica


def wide_resnet(iterations: int) -> Any:
    from ringtap.examples.wide_resnet import build_model

    replica = nn.parallel.DistributedDataParallel(build_model(10, 1))
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.001)
    pictures = torch.randn(4, 1, 28, 28)

    def step() -> None:
        replica(pictures).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    print_payload(step, iterations)
    return replica


KINDS = (
    ddp, fsdp, fully_shard, collectives, pipeline, experts, compiled, profiles_itself, traces_itself, is_killed,
    scale_model, wide_resnet,
)  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kind, iterations = sys.argv[1:]
    trained = {each.__name__: each for each in KINDS}[kind](int(iterations))
    if dist.get_rank() == 0:
        values = b"".join(
            (one.to_local() if hasattr(one, "to_local") else one).detach().numpy().tobytes()
            for one in trained.parameters()
        )
        print("digest", hashlib.sha256(values).hexdigest(), flush=True)
    # The model holds the group, whose threads would at times meet an interpreter that is gone.
    del trained
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
