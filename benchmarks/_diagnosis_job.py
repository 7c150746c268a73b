"""A rank of a DDP or Horovod job that computes and sends as told, with a fault in some of its iterations.

_diagnosis_job.py SPECIFICATION TIMES, both JSON; rank 0 writes the end of each iteration to TIMES, one a line.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import scale_model
import torch
import torch.distributed as dist


class BusyPace(scale_model.Pace):
    """Uses a processor instead of sleeping."""

    def wait(self, position: int) -> None:
        """Compute until the layer at this position of the pass has had its time of a processor."""
        if position == 0:
            self._start_s = time.thread_time()
        while time.thread_time() < self._start_s + self._due_s[position]:
            pass


class Slowness:
    """Makes a rank compute for longer, or pause, in the iterations of a fault."""

    def __init__(self, rank: int, item: dict[str, Any], model: Any) -> None:
        self._rank, self._item, self._fault = rank, item, item["fault"]
        self._random = random.Random(1000 * item["seed"] + rank)
        self._paces = [(pace, list(pace._due_s)) for pace in (model[0].forward_pace, model[0].backward_pace)]
        if self._fault["kind"] == "busy node":
            processors, is_mine = sorted(os.sched_getaffinity(0)), self._fault["rank"] == rank
            os.sched_setaffinity(0, processors[-1:] if is_mine else processors[:-1] or processors)
            for pace, _ in self._paces if is_mine else ():
                pace.__class__ = BusyPace

    def begin(self, number: int) -> None:
        """Prepare an iteration."""
        begin, end = self._item["affected"]
        mine = begin <= number < end and self._fault.get("rank", self._rank) == self._rank
        kind, factor = self._fault["kind"], 1 + self._item["uneven"] * (2 * self._random.random() - 1)
        if mine and kind in ("slow rank", "two at once"):
            factor *= 1 + self._fault["share"]
        pause_s = 0.0
        if mine and kind == "pauses" and self._random.random() < self._fault["often"]:
            pause_s = self._fault["seconds"]
        for pace, due_s in self._paces:
            pace._due_s = [factor * seconds + pause_s * (pace is self._paces[1][0]) for seconds in due_s]
        if mine and kind == "stalls" and number % self._fault["every"] == 0:
            time.sleep(self._fault["seconds"])
        if mine and kind == "checkpoints" and number % self._fault["every"] == 0:
            with tempfile.TemporaryFile() as file:
                torch.save(torch.zeros(self._fault["bytes"], dtype=torch.uint8), file)
                os.fsync(file.fileno())


def main() -> None:
    """Run the rank."""
    item, times = json.loads(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    if item["times"] == "horovod":
        import horovod.torch as hvd

        hvd.init()
        rank = hvd.rank()
    else:
        rank, _ = scale_model.join_group()
    layers = scale_model.equal_layers(item["parameters"], item["layers"])
    chain = scale_model.build_model(layers, item["compute_s"], rank)
    slowness = Slowness(rank, item, chain)
    model, optimizer = chain, torch.optim.SGD(chain.parameters(), lr=1e-3)
    if item["times"] == "horovod":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=chain.named_parameters())
    else:
        model = scale_model.distribute(chain, item["bucket_bytes"], item["bucket_bytes"])
    activation = torch.ones(1, requires_grad=True)
    with Path(times).open("a", buffering=1) if rank == 0 else contextlib.nullcontext() as log:
        for number in range(item["iterations"]):
            slowness.begin(number)
            model(activation).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if log:
                log.write(f"{time.monotonic()}\n")
    del model
    gc.collect()
    if item["times"] == "horovod":
        hvd.shutdown()
    else:
        dist.destroy_process_group()
    os._exit(0)  # the interpreter looks for garbage for longer than a job here takes


if __name__ == "__main__":
    gc.disable()
    main()
