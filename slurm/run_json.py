"""Updates of run.json by a batch script, at the beginning and at the end of its job.

``python -m ringtap.slurm.run_json begin RUN`` and ``… end RUN CODE STOPPED``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from ringtap.agents.node.node_json import conclude, node_items
from ringtap.rundir import RunDirectory
from ringtap.terminal import as_command
from ringtap.units import counted

_CAUSES = {
    "": "",
    "USR1": "it was stopped ahead of the time limit",
    "TERM": "it was cancelled, its time was over, or a node failed",
}
WAITING = "submitted; the job has not begun"


def begin(run: RunDirectory) -> None:
    """Record that the job has begun; this node is the reference of the clocks."""
    run.info |= {"status": "running", "why": "", "reference": os.uname().nodename}
    run.save()


def end(run: RunDirectory, code: int, stopped: str) -> int:
    """Record that the job has ended; returns its exit code.

    If a rank fails, Slurm ends the others, and srun's exit code is the greatest of all; the job's is that of the rank
    that failed first, as far as the nodes recorded it.

    Args:
        run: its run directory.
        code: srun's exit code.
        stopped: the signal that told the script to stop: ``USR1``, before the time limit, or ``TERM``; or empty.
    """
    nodes = node_items(run)
    ends = [entry for node in nodes.values() for entry in node.get("jobs") or ()]
    failures = [(entry.get("ended_ns") or 0, entry["exit_code"]) for entry in ends if entry.get("exit_code")]
    first = min(failures)[1] if code and failures else code
    reasons = [_CAUSES[stopped]]
    expected = int(os.environ.get("SLURM_JOB_NUM_NODES", len(nodes)))
    if len(nodes) < expected:
        reasons.append(f"{expected - len(nodes)} of {counted(expected, 'node')} not recorded")
    conclude(run, first, signal.SIGTERM if stopped else None, "; ".join(filter(None, reasons)))
    return first


def main() -> int:
    """Run ``begin`` or ``end``; returns the exit code."""
    verb, path, *more = sys.argv[1:]
    run = RunDirectory.open(Path(path))
    if verb == "begin":
        begin(run)
    else:
        print(end(run, int(more[0]), more[1]))
    return 0


if __name__ == "__main__":
    sys.exit(as_command(main))
