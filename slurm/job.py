"""Job of a submission, as it describes itself: its state file, and the ids of its steps.

The process of the batch script writes a line per event to the job's state file: ``<seconds since 1970> <event>``, with
the events ``begun on NODE``, ``recording N of M nodes``, ``stopped SIGNAL`` and ``ended CODE``. A job that Slurm
requeues begins again in the same file. Slurm tells the id of a step to its tasks only, so the first task of each step
writes it beside the state file.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

from ringtap.errors import UsageError
from ringtap.slurm.paths import SubmitPaths


class JobReport(NamedTuple):  # no dataclass: every rank imports this module before its job begins
    """State of a job as its own state file has it.

    Attributes:
        job: its id; for a task of an array ``<array's id>_<index>``.
        begun_s: when it began last (seconds since 1970); None if it has not.
        node: the node that its script began on.
        stopped: the signal that has asked it to stop since; empty for none.
        exit_code: its exit code; None while it runs, or if it was killed before it could write it.
    """

    job: str
    begun_s: int | None = None
    node: str = ""
    stopped: str = ""
    exit_code: int | None = None


def variable(name: str) -> str:
    """A variable that Slurm sets in a job.

    Raises:
        UsageError: it is not set.
    """
    value = os.environ.get(name)
    if not value:
        raise UsageError(f"${name} is not set: this runs in a job of Slurm, as sbatch starts it")
    return value


def job_id() -> str:
    """The id of the job that this process runs in, as `JobReport` names it."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{variable('SLURM_ARRAY_TASK_ID')}" if array else variable("SLURM_JOB_ID")


def note(paths: SubmitPaths, event: str) -> None:
    """Append an event to the state file of the job that this process runs in."""
    _append(paths.state(job_id()), f"{int(time.time())} {event}\n")


def _append(path: Path, text: str) -> None:
    """Append to a file; a failure is told, and no reason for the job to end."""
    try:
        with path.open("ab", buffering=0) as file:
            file.write(text.encode())
    except OSError as error:
        print(f"ringtap: {path} cannot be written: {error.strerror}", file=sys.stderr)


def read_report(paths: SubmitPaths, job: str) -> JobReport:
    """Read the state file of a job; a job that has not begun has none."""
    report = JobReport(job)
    try:
        text = paths.state(job).read_text(errors="replace")
    except OSError:
        return report
    for line in text.splitlines():
        seconds, word, rest = (*line.split(" ", 2), "", "")[:3]
        if word == "begun" and seconds.isdigit():  # again, if Slurm requeued it
            report = JobReport(job, int(seconds), rest.removeprefix("on "))
        elif word == "stopped":
            report = report._replace(stopped=report.stopped or rest)
        elif word == "ended" and rest.lstrip("-").isdigit():
            report = report._replace(exit_code=int(rest))
    return report


def announce_step(paths: SubmitPaths, step: str) -> None:
    """Write the id of the step that this process is a task of, if it is the first one."""
    if variable("SLURM_PROCID") == "0":
        _append(paths.step(job_id(), step), variable("SLURM_STEP_ID"))


def signal_step(paths: SubmitPaths, step: str, name: str) -> bool:
    """Send a signal to all tasks of a step, by its id, because a signal to srun would kill them.

    Returns:
        True if the step has announced its id.
    """
    try:
        number = paths.step(job_id(), step).read_text()
    except OSError:
        number = ""
    if number:
        import subprocess  # not needed by ranks

        command = ["scancel", "--quiet", f"--signal={name}", f"{variable('SLURM_JOB_ID')}.{number}"]
        with contextlib.suppress(OSError):
            subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
    return bool(number)
