"""Tasks of a submitted job's steps: the ranks of the job, and beside them one recorder per node.

``python -m ringtap.slurm.tasks rank RUN OPTIONS -- COMMAND`` and ``… recorder RUN OPTIONS -- PATTERNS``, both with the
options ``--collect`` and ``--every`` of ``ringtap run``.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
import time
from pathlib import Path

from ringtap.schema import NODE_JSON
from ringtap.slurm.job import announce_step, variable
from ringtap.slurm.paths import SubmitPaths
from ringtap.terminal import as_command

_BEGIN_S = 20.0  # longest time until a recording begins
_DONE_S = 10.0  # longest time until a recording is complete after its process has ended


def rank(run: str, arguments: list[str]) -> int:
    """Run and record a command as ``ringtap run --join`` does, with the variables of torch.distributed.

    Args:
        run: the run directory.
        arguments: options of ringtap run, ``--``, and the command.
    """
    announce_step(SubmitPaths(Path(run)), "job")
    os.environ |= {
        "RANK": variable("SLURM_PROCID"),
        "WORLD_SIZE": variable("SLURM_STEP_NUM_TASKS"),
        "LOCAL_RANK": variable("SLURM_LOCALID"),
        "LOCAL_WORLD_SIZE": tasks_by_node(variable("SLURM_STEP_TASKS_PER_NODE"))[int(variable("SLURM_NODEID"))],
    }
    # as python -m ringtap.cli, but without a second interpreter, whose start would delay the job
    sys.argv = ["ringtap", "run", "--join", run, *arguments]
    runpy.run_module("ringtap.cli", run_name="__main__", alter_sys=True)
    return 0


def tasks_by_node(text: str) -> list[str]:
    """Expand Slurm's short form of the number of tasks on each node: ``2(x3),1``."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [count for count, nodes in found for _ in range(int(nodes or 1))]


def recorder(run: str, arguments: list[str]) -> int:
    """Record this node until SIGTERM, then copy the files to keep; a failed recording does not end the job.

    At the end of a step Slurm ends all its processes, so this one waits until the node's recording is complete. It
    copies the files itself because no further step starts in a cancelled job. It prints ``yes`` if the node is being
    recorded, otherwise ``no``.

    Args:
        run: the run directory.
        arguments: options of ringtap capture, ``--``, and patterns below $SLURM_TMPDIR.
    """
    import subprocess  # not needed by ranks, whose start delays the job

    from ringtap.slurm.keep import keep

    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: received.append(number))
    paths, node = SubmitPaths(Path(run)), os.uname().nodename
    announce_step(paths, "agents")
    cut = arguments.index("--")
    folder = paths.run / "nodes" / node
    command = [sys.executable, "-m", "ringtap.cli", "capture", "--join", run, *arguments[:cut]]
    capture = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2)
    deadline_s = time.monotonic() + _BEGIN_S
    while not (begun := (folder / NODE_JSON).exists()) and capture.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.05)
    print("yes" if begun else "no", flush=True)
    if capture.wait() and not received:
        print(f"ringtap: the recording of {node} failed; the job goes on", file=sys.stderr)
    while not received:
        time.sleep(1)
    deadline_s = time.monotonic() + _DONE_S
    while begun and not (folder / "DONE").exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    patterns, disk = arguments[cut + 1 :], os.environ.get("SLURM_TMPDIR")
    if patterns and disk:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would end the copies
        keep(Path(disk), patterns, paths.results / node)
    elif patterns:
        print(f"ringtap: $SLURM_TMPDIR is not set on {node}: nothing can be kept", file=sys.stderr)
    return 0


def main() -> int:
    """Run the task that the first argument names; return its exit code."""
    role, run, *arguments = sys.argv[1:]
    return {"rank": rank, "recorder": recorder}[role](run, arguments)


if __name__ == "__main__":
    sys.exit(as_command(main))
