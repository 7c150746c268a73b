"""Runs a training job with and without recording, in alternating blocks of iterations.

``python _overhead_job.py KIND LIMIT_S SEED`` runs two ranks, each on a core of its own, under ``ringtap
run``. Between two blocks it switches the recording: the hook's functions are removed from PyTorch or put back, and in
the job that communicates the agent is stopped (SIGSTOP) or continued. The two arms of a pair of blocks follow each
other in random order, so that they see the same machine. When its time is over, the job prints the pairs as JSON.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401 -- first: lets the others import ringtap
import psutil
from _overhead_pairs import COMPUTE_S, RANKS

_WARM_UP = 20  # iterations in which DDP rebuilds its buckets, and caches and the allocator fill
_MIN_PAIRS = 12
DDP_SAMPLES_EVERY = 100  # iterations, PyTorch's default
_FIGURES = ("mean_s", "cpu_s")


@dataclass(frozen=True)
class Block:
    """Iterations between two switches.

    Attributes:
        settle: iterations after the switch that count for neither arm.
        count: measured iterations.
        stops_agent: True if the switch also stops and continues the agent.
    """

    settle: int
    count: int
    stops_agent: bool


# The agent takes a sample every 0.1 s, so the switch can include it only if blocks last longer. In the job that
# computes, only neighbouring iterations agree within a few per cent: there the switch affects only the hook, and the
# cost of the agent is its CPU time.
_BLOCKS = {"computes": Block(0, 1, False), "communicates": Block(1, 3, True)}


def _launch() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    shared["GLOO_SOCKET_IFNAME"] = "lo"
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(RANKS)
    ]
    return max(abs(rank.wait()) for rank in ranks)


class Recording:
    """Switch of this rank's hook, and of the agent if its pid is not 0."""

    def __init__(self, model: Any, agent: int) -> None:
        import torch
        from torch.optim import optimizer

        self._model, self._autograd = model, torch.autograd
        self._hooks = [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
        self._installed = [dict(hooks) for hooks in self._hooks]
        self._backward = torch.autograd.backward
        if not all(self._installed) or not hasattr(self._backward, "__wrapped__"):
            raise SystemExit("the job did not load the hook, so there is nothing to switch")
        self._agent = agent
        # the hook makes DDP sample each iteration only where this is free; else PyTorch's default stays
        self._samples_every = 1 if next(model.parameters()).device.type == "cpu" else DDP_SAMPLES_EVERY

    def turn(self, on: bool) -> None:
        """Install the hook's functions or PyTorch's own; continue or stop the agent."""
        for hooks, installed in zip(self._hooks, self._installed, strict=True):
            hooks.clear()
            if on:
                hooks.update(installed)
        self._autograd.backward = self._backward if on else self._backward.__wrapped__
        self._model._set_ddp_runtime_logging_sample_rate(self._samples_every if on else DDP_SAMPLES_EVERY)
        if self._agent:
            os.kill(self._agent, signal.SIGCONT if on else signal.SIGSTOP)

    def check(self, on: bool) -> None:
        """Check that the agent is in the state that this arm requires."""
        if self._agent:
            state = Path(f"/proc/{self._agent}/stat").read_text().rpartition(")")[2].split()[0]
            if (state != "T") != on:
                raise SystemExit(f"the agent is in state {state} in a block {'with' if on else 'without'} it")


def agent_pid() -> int:
    """Return the pid of the agent: the process with the run's directory on its command line outside our session."""
    run = os.environ["RINGTAP_RUN"]
    with_run = [one.pid for one in psutil.process_iter(["cmdline"]) if run in (one.info["cmdline"] or ())]
    found = [pid for pid in with_run if os.getsid(pid) != os.getsid(0)]
    if len(found) != 1:
        raise SystemExit(f"{len(found)} agents found instead of one")
    return found[0]


def _computing(rank: int) -> tuple[Any, Any, int]:
    """Return matrix products that keep a core busy for about 20 ms, mostly within its caches, and 5 MB to exchange.

    The time that the hook adds does not depend on the length of an iteration. Iterations of 20 ms instead of 80 ms
    measure it eight times as precisely in the same time.
    """
    import torch

    torch.manual_seed(rank)
    layers = [torch.nn.Sequential(torch.nn.Linear(768, 768), torch.nn.ReLU()) for _ in range(2)]
    return torch.nn.Sequential(*layers), torch.randn(384, 768), 250_000


def _communicating(rank: int) -> tuple[Any, Any, int]:
    """Return the scale model of a job on accelerators: 80 ms of sleep as computation, and 4 MB in 16 buckets."""
    import torch

    from ringtap.examples.scale_model import build_model, equal_layers

    layers = equal_layers(1_000_000, 16)
    return build_model(layers, COMPUTE_S, rank), torch.ones(1, requires_grad=True), 250_000


class Job:
    """One rank of the job: it joins the group and runs the blocks.

    Args:
        kind: ``computes`` or ``communicates``.
    """

    def __init__(self, kind: str) -> None:
        import torch

        from ringtap.examples.scale_model import distribute, join_group

        torch.set_num_threads(1)
        self.rank, _ = join_group()
        model, self._batch, bucket_bytes = (_computing if kind == "computes" else _communicating)(self.rank)
        self._model = distribute(model, bucket_bytes, bucket_bytes)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-6)
        self._kind, self._block = kind, _BLOCKS[kind]
        self._agent = psutil.Process(agent_pid()) if self.rank == 0 else None
        self._recording = Recording(self._model, self._agent.pid if self._agent and self._block.stops_agent else 0)
        self.recorded = _WARM_UP
        self.agent_cpu_share = 0.0

    def _iterate(self) -> None:
        self._model(self._batch).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _reduce(self, pair: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        """Combine a pair of blocks over the ranks: the mean of times, the sum of CPU times."""
        import torch

        values = torch.tensor([[block[key] for key in _FIGURES] for block in pair.values()], dtype=torch.float64)
        torch.distributed.all_reduce(values)
        values[:, 0] /= RANKS
        return {arm: dict(zip(_FIGURES, row, strict=True)) for arm, row in zip(pair, values.tolist(), strict=True)}

    def _is_continued(self, count: int, passed_s: float, limit_s: float) -> bool:
        """Return True if another pair follows: there are too few, or rank 0 finds that there is time."""
        import torch

        wanted = torch.tensor(float(count < _MIN_PAIRS or passed_s < limit_s))
        torch.distributed.broadcast(wanted, 0)
        return bool(wanted)

    def measure(self, limit_s: float, seed: int) -> list[dict[str, dict[str, float]]]:
        """Run pairs of blocks until ``limit_s`` have passed."""
        for _ in range(_WARM_UP):
            self._iterate()
        order = random.Random(seed)
        pairs: list[dict[str, dict[str, float]]] = []
        begun_s, agent_cpu_s = time.monotonic(), self._agent_cpu_s()
        try:
            while self._is_continued(len(pairs), time.monotonic() - begun_s, limit_s):
                arms = order.sample(["with", "without"], 2)
                pairs.append(self._reduce({arm: self._run_block(arm == "with") for arm in arms}))
        finally:
            self._recording.turn(True)
        self.agent_cpu_share = (self._agent_cpu_s() - agent_cpu_s) / (time.monotonic() - begun_s)
        return pairs

    def _agent_cpu_s(self) -> float:
        if self._agent is None:
            return 0.0
        used = self._agent.cpu_times()
        return used.user + used.system

    def _run_block(self, on: bool) -> dict[str, float]:
        """Run one block, without garbage collection, which would affect one of the arms by chance."""
        gc.collect(0)
        self._recording.turn(on)
        for _ in range(self._block.settle):
            self._iterate()
        gc.disable()
        cpu_ns, begun_s = time.process_time_ns(), time.perf_counter()
        for _ in range(self._block.count):
            self._iterate()
        wall_s, cpu_ns = time.perf_counter() - begun_s, time.process_time_ns() - cpu_ns
        gc.enable()
        self._recording.check(on)
        self.recorded += (self._block.settle + self._block.count) * on
        used = (wall_s, cpu_ns / 1e9)
        return {key: value / self._block.count for key, value in zip(_FIGURES, used, strict=True)}


def _train(kind: str, limit_s: float, seed: int) -> None:
    import torch.distributed as dist

    job = Job(kind)
    pairs = job.measure(limit_s, seed)
    if job.rank == 0:
        results: dict[str, Any] = {"pairs": pairs, "recorded": job.recorded}
        # the CPU time of an agent that is stopped half of the time is not its cost
        results["agent_cpu_share"] = None if _BLOCKS[kind].stops_agent else job.agent_cpu_share
        print(json.dumps(results), flush=True)
    del job  # DDP's model must be freed before the process group, as in the scale model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
        _train(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(_launch())
