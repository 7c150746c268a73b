"""A training job that runs with and without its recording, in alternating blocks of iterations.

``python _overhead_job.py KIND LIMIT_S HALF_WIDTH_PCT SEED`` runs two ranks under ``ringtap run``. Between two blocks it
switches the recording: the hook's functions are taken out of PyTorch and put back, and the agent is stopped
(SIGSTOP) and continued. Both arms of a pair of blocks follow one another in random order, so that they see the same
machine. It ends when the 95 % interval of the overhead is narrow enough, or when its time is over, and prints the pairs
as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401 -- first: lets the others import ringtap
from _overhead_pairs import instruction_counter, interval

RANKS = 2
_BLOCK_S = 0.25
_WARM_UP = 20  # iterations in which DDP rebuilds its buckets, and caches and the allocator fill
_SETTLE = 3  # iterations after a switch that count for neither arm
_LEAST_PAIRS = 12


def _launch() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(RANKS)
    ]
    return max(abs(rank.wait()) for rank in ranks)


class Recording:
    """The switch of this rank's hook and, on rank 0, of the node's agent."""

    def __init__(self, model: Any, rank: int) -> None:
        import torch
        from torch.optim import optimizer

        self._model, self._autograd = model, torch.autograd
        self._hooks = [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
        self._given = [dict(hooks) for hooks in self._hooks]
        self._backward = torch.autograd.backward
        if not all(self._given) or not hasattr(self._backward, "__wrapped__"):
            raise SystemExit("the hook did not load in the job: there is nothing to switch")
        self._agent = _agent_pid() if rank == 0 else 0

    def turn(self, on: bool) -> None:
        """Put the hook's functions in their places, or PyTorch's own; continue or stop the agent."""
        for hooks, given in zip(self._hooks, self._given, strict=True):
            hooks.clear()
            if on:
                hooks.update(given)
        self._autograd.backward = self._backward if on else self._backward.__wrapped__
        # PyTorch's own rate is each 100th iteration
        self._model._set_ddp_runtime_logging_sample_rate(1 if on else 100)
        if self._agent:
            os.kill(self._agent, signal.SIGCONT if on else signal.SIGSTOP)

    def check(self, on: bool) -> None:
        """See that the agent is in the state that this arm is about."""
        if self._agent:
            words = Path(f"/proc/{self._agent}/stat").read_text().rpartition(")")[2].split()
            if (words[0] != "T") != on:
                raise SystemExit(f"the agent is in state {words[0]} in a block {'with' if on else 'without'} it")


def _agent_pid() -> int:
    """The process with the run's directory on its command line that is in no session of the job's."""
    run = os.environ["RINGTAP_RUN"].encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if run in words and os.getsid(int(folder.name)) != os.getsid(0):
                    found.append(int(folder.name))
            except OSError:
                continue
    if len(found) != 1:
        raise SystemExit(f"one agent was to be found, not {len(found)}")
    return found[0]


def _computing(rank: int) -> tuple[Any, Any, int]:
    """Matrix products that keep a core busy, and few bytes to exchange."""
    import torch

    torch.manual_seed(rank)
    layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(4)]
    return torch.nn.Sequential(*layers), torch.randn(512, 256), 250_000


def _communicating(rank: int) -> tuple[Any, Any, int]:
    """Next to no computation, and 8 MB to exchange in 32 buckets."""
    import torch

    from ringtap.examples.scale_model import build_model

    return build_model(2_000_000, 16, 0.0, rank), torch.ones(1, requires_grad=True), 250_000


class Job:
    """One rank of the job, from joining its group to the end of its blocks.

    Args:
        kind: ``computes`` or ``communicates``.
    """

    def __init__(self, kind: str) -> None:
        import torch

        from ringtap.examples.scale_model import distribute, join_group

        torch.set_num_threads(1)
        self.rank, _ = join_group()
        model, self._batch, bucket_bytes = (_computing if kind == "computes" else _communicating)(self.rank)
        self._model = distribute(model, bucket_bytes)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-6)
        self._recording = Recording(self._model, self.rank)
        self._instructions, self.no_instructions = instruction_counter()
        self.recorded = _WARM_UP
        self.count = 0

    def _iterate(self) -> None:
        self._model(self._batch).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _agreed(self, value: float) -> float:
        """Rank 0's value, on every rank."""
        import torch

        tensor = torch.tensor([value], dtype=torch.float64)
        torch.distributed.broadcast(tensor, 0)
        return float(tensor.item())

    def measure(self, limit_s: float, half_width_pct: float, seed: int) -> list[dict[str, dict[str, Any]]]:
        """Run pairs of blocks until the interval is narrow enough or ``limit_s`` after now."""
        begun_s = time.monotonic()
        for _ in range(_WARM_UP):
            self._iterate()
        self.count = max(4, round(_BLOCK_S / self._agreed((time.monotonic() - begun_s) / _WARM_UP)))
        order = random.Random(seed)
        pairs: list[dict[str, dict[str, Any]]] = []
        try:
            while self._agreed(_goes_on(pairs, half_width_pct, begun_s + limit_s)):
                pairs.append({arm: self._take(arm == "with") for arm in order.sample(["with", "without"], 2)})
        finally:
            self._recording.turn(True)
        return pairs

    def _take(self, on: bool) -> dict[str, Any]:
        """Run one block, without garbage collection, whose turn would fall on one arm or the other by chance."""
        gc.collect(0)
        self._recording.turn(on)
        for _ in range(_SETTLE):
            self._iterate()
        gc.disable()
        before = self._instructions() if self._instructions else None
        cpu_ns, begun_s = time.process_time_ns(), time.perf_counter()
        for _ in range(self.count):
            self._iterate()
        wall_s, cpu_ns = time.perf_counter() - begun_s, time.process_time_ns() - cpu_ns
        after = self._instructions() if self._instructions else None
        gc.enable()
        self._recording.check(on)
        self.recorded += (self.count + _SETTLE) * on
        return {
            "mean_s": wall_s / self.count,
            "cpu_s": cpu_ns / 1e9 / self.count,
            "instructions": None if before is None or after is None else (after - before) / self.count,
        }


def _goes_on(pairs: list[dict[str, dict[str, Any]]], half_width_pct: float, until_s: float) -> bool:
    """Tell if another pair is wanted: the least number in any case, then while it may help and there is time."""
    if len(pairs) < _LEAST_PAIRS:
        return True
    if time.monotonic() > until_s:
        return False
    _, low, high = interval(pairs, "mean_s")
    return high - low > 2 * half_width_pct


def _train(kind: str, limit_s: float, half_width_pct: float, seed: int) -> None:
    import torch.distributed as dist

    job = Job(kind)
    pairs = job.measure(limit_s, half_width_pct, seed)
    others: list[Any] = [None] * RANKS
    dist.all_gather_object(others, pairs)
    if job.rank == 0:
        for number, pair in enumerate(pairs):
            for arm, block in pair.items():
                for key in ("cpu_s", "instructions"):
                    values = [other[number][arm][key] for other in others]
                    block[key] = None if None in values else sum(values)
        said = {"pairs": pairs, "iterations_per_block": job.count, "recorded": job.recorded}
        print(json.dumps(said | {"no_instructions": job.no_instructions}), flush=True)
    del job  # its model must go before the group, as in the scale model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        _train(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(_launch())
