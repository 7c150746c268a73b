"""Jobs that time themselves by the clock of their device: ``job.py KIND DEVICE ITERATIONS``.

``DEVICE`` is ``cuda`` (times by CUDA events) or ``cpu`` (by the host's clock). Rank 0 prints one JSON object: the times
of the ends of its iterations, and of the first and last bucket of each exchange of gradients where it has any.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group, which its default arguments would keep
from torch import nn

INFINITE = (2, 5)  # iterations of ``amp`` whose gradients are infinite


class DeviceClock:
    """Marks in the order of the device's work, read when all is over.

    CUDA events have times of the device's own clock. It is compared with the host's when the clock is made, and again
    by `compare`, while the device does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._compared: list[tuple[int, Any]] = []
        self.compare()

    def mark(self) -> Any:
        """Mark the end of what the current stream has been given so far."""
        if not self._is_cuda:
            return time.time_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Wait until the device has done all that the current stream was given."""
        if self._is_cuda:
            self.mark().synchronize()

    def compare(self) -> None:
        """Compare the clocks: an event is recorded between two readings of the host's; the closest two of twenty."""
        if not self._is_cuda:
            return
        found = []
        for _ in range(20):
            self.wait()
            before_ns = time.time_ns()
            event = self.mark()
            event.synchronize()
            after_ns = time.time_ns()
            found.append((after_ns - before_ns, (before_ns + after_ns) // 2, event))
        self._compared.append(min(found, key=lambda one: one[0])[1:])

    def at_ns(self, mark: Any) -> int:
        """Return the time of a mark by CLOCK_REALTIME."""
        if not self._is_cuda:
            return int(mark)
        mark.synchronize()
        (first_ns, first), (last_ns, last) = self._compared[0], self._compared[-1]
        return first_ns + round((last_ns - first_ns) * first.elapsed_time(mark) / first.elapsed_time(last))


class Job:
    """A rank of the job."""

    def __init__(self, device: str) -> None:
        dist.init_process_group("nccl" if device == "cuda" and os.environ["WORLD_SIZE"] == "1" else "gloo")
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        if device == "cuda":
            torch.cuda.set_device(self.device)
        torch.manual_seed(3)
        self.ends: list[Any] = []
        self.exchanges: list[list[Any]] = []
        self.facts: dict[str, Any] = {}
        self.clock = DeviceClock(self.device)

    def model(self) -> Any:
        layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)]
        return nn.Sequential(*layers, nn.Linear(512, 8)).to(self.device)

    def replica(self) -> Any:
        return nn.parallel.DistributedDataParallel(self.model(), bucket_cap_mb=1)

    def train(self, model: Any, iterations: int, waits: bool = True, after: Callable[[], None] = lambda: None) -> None:
        """Train.

        Args:
            model: the model.
            iterations: number of iterations.
            waits: the host waits for the device in each one, as for a loss that is printed.
            after: called after each one.
        """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        inputs = torch.randn(256, 512, device=self.device)
        for _ in range(iterations):
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.ends.append(self.clock.mark())
            after()
            if waits:
                self.clock.wait()
        self.clock.wait()


def ddp(job: Job, iterations: int) -> Any:
    """Train with DDP, whose communication hook marks when each exchange begins and ends on the device."""
    model = job.replica()

    def exchange(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            job.exchanges.append([job.clock.mark()])
        own = job.exchanges[-1]
        data = bucket.buffer().div_(dist.get_world_size())

        def end(future: Any) -> Any:
            own.append(job.clock.mark())  # on a stream that waits for the exchange
            return future.value()[0]

        return dist.all_reduce(data, async_op=True).get_future().then(end)

    # DDP compares annotations with classes
    exchange.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    model.register_comm_hook(None, exchange)
    job.train(model, iterations)
    return model


def queued(job: Job, iterations: int) -> Any:
    """Train with DDP, without waiting for the device."""
    model = job.replica()
    job.train(model, iterations, waits=False)
    return model


def amp(job: Job, iterations: int) -> Any:
    """Train in mixed precision; the loss scaler skips the steps of `INFINITE`."""
    model = job.replica()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(job.device.type, init_scale=256.0)
    precision = torch.float16 if job.device.type == "cuda" else torch.bfloat16
    for number in range(iterations):
        with torch.autocast(job.device.type, dtype=precision):
            loss = model(torch.randn(256, 512, device=job.device)).square().mean()
        scaler.scale(loss * float("inf") if number in INFINITE else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        job.ends.append(job.clock.mark())
    job.facts["scale"] = scaler.get_scale()
    return model


def compiled(job: Job, iterations: int) -> Any:
    """Train a model of torch.compile."""
    backend = "inductor" if job.device.type == "cuda" else "aot_eager"
    model = nn.parallel.DistributedDataParallel(torch.compile(job.model(), backend=backend), bucket_cap_mb=1)
    job.train(model, iterations)
    from torch._dynamo.utils import counters

    job.facts["graphs"] = counters["stats"]["unique_graphs"]
    return model


def fsdp(job: Job, iterations: int) -> Any:
    """Train with FullyShardedDataParallel."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(job.model(), device_id=job.device)
    job.train(model, iterations)
    return model


def fully_shard(job: Job, iterations: int) -> Any:
    """Train with FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as shard

    model, mesh = job.model(), init_device_mesh(job.device.type, (dist.get_world_size(),))
    for layer in model:
        shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    job.train(model, iterations)
    return model


def profiled(job: Job, iterations: int) -> Any:
    """Train, profile all but the first five iterations with torch.profiler, and export its trace into TRACES."""
    model = job.replica()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if job.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=3, warmup=2, active=iterations - 5, repeat=1)
    with torch.profiler.profile(activities=activities, schedule=schedule) as own:
        job.train(model, iterations, after=own.step)
    own.export_chrome_trace(str(Path(os.environ["TRACES"]) / f"rank{dist.get_rank()}.json.gz"))
    return model


KINDS = (ddp, queued, amp, compiled, fsdp, fully_shard, profiled)


def main() -> None:
    kind, device, iterations = sys.argv[1:]
    torch.set_num_threads(1)
    job = Job(device)
    model = {each.__name__: each for each in KINDS}[kind](job, int(iterations))
    job.clock.wait()
    job.clock.compare()
    if dist.get_rank() == 0:
        at_ns = job.clock.at_ns
        # of an exchange: its begin, and the end of the last bucket
        exchanges = [(at_ns(begin), max(at_ns(end) for end in ends)) for begin, *ends in job.exchanges]
        print(json.dumps({"ends_ns": [at_ns(end) for end in job.ends], "exchanges_ns": exchanges} | job.facts))
    # the model holds the group, whose threads would at times meet an interpreter that is gone
    job.exchanges.clear()
    del model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
