"""The job whose iterations are timed: two ranks of the scale model on this machine, started without torchrun.

``python _overhead_job.py ITERATIONS COMPUTE_S`` prints, as JSON, the seconds of each iteration of rank 0.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

RANKS = 2


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


def _train(iterations: int, compute_s: float) -> None:
    import _checkout  # noqa: F401
    import torch
    import torch.distributed as dist

    from ringtap.examples.scale_model import build_model, distribute, join_group

    torch.set_num_threads(1)
    rank, _ = join_group()
    model = distribute(build_model(1_383_574, 16, compute_s, rank), 250_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    activation = torch.ones(1, requires_grad=True)
    ends = [time.perf_counter()]
    for _ in range(iterations):
        model(activation).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    if rank == 0:
        print(json.dumps([round(after - before, 6) for before, after in pairwise(ends)]), flush=True)
    del model  # before the group, as in the scale model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        _train(int(sys.argv[1]), float(sys.argv[2]))
    else:
        sys.exit(_launch())
