"""What a batch script has to say in its run's run.json.

``python -m ringtap.slurm.run_file begin RUN`` and ``… end RUN CODE STOPPED``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ringtap.agents.node.run_end import conclude
from ringtap.errors import RingtapError
from ringtap.rundir import RunDirectory

WAITING = "submitted; the job has not begun"


def begin(run: RunDirectory) -> None:
    """The job begins: this node is the one whose clock counts."""
    run.info |= {"status": "running", "why": "", "reference": os.uname().nodename}
    run.save()


def end(run: RunDirectory, code: int, stopped: str) -> None:
    """The job has ended.

    Args:
        run: its run directory.
        code: its exit code.
        stopped: the signal that told the script to stop: ``USR1``, before the time limit, or ``TERM``; or empty.
    """
    if not stopped:
        conclude(run, code, None, "")
    else:
        cause = {"USR1": "it was stopped ahead of the time limit", "TERM": "it was cancelled, or its time was over"}
        conclude(run, code, signal.SIGTERM, cause[stopped])


def main(argv: Sequence[str]) -> int:
    """One of the two; returns the exit code."""
    try:
        run = RunDirectory.open(Path(argv[1]))
        if argv[0] == "begin":
            begin(run)
        else:
            end(run, int(argv[2]), argv[3])
    except RingtapError as error:
        print(f"ringtap: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
