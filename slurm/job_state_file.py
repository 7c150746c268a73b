"""Reads and writes the state file of a submitted job, and the ids of its steps.

The process of the batch script writes a line per event to the job's state file: ``<seconds since 1970> <event>``, with
the events ``begun on NODE``, ``recording N of M nodes``, ``stopped SIGNAL`` and ``ended CODE``. A job that Slurm
requeues begins again in the same file. Only its own tasks know the id of a step, so the first task of each step writes
it to a file beside the state file.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

from ringtap.core.errors import UsageError
from ringtap.core.terminal_escaping import one_line
from ringtap.core.untrusted_files import open_file, read_whole
from ringtap.slurm.submission_file_names import SubmitPaths


class JobReport(NamedTuple):  # not a dataclass: every rank imports this module before its job begins
    """State of a job according to its state file.

    Attributes:
        job: id of the job; for a task of an array ``<array's id>_<index>``.
        begun_s: time of its last start (seconds since 1970); None if it has not begun.
        node: node on which its script began.
        stopped: signal that has stopped it since; empty if none has.
        exit_code: its exit code; None while it runs, or if it was killed before it wrote the code.
    """

    job: str
    begun_s: int | None = None
    node: str = ""
    stopped: str = ""
    exit_code: int | None = None


def variable(name: str) -> str:
    """Return the value of a variable that Slurm sets in a job.

    Raises:
        UsageError: the variable is not set.
    """
    value = os.environ.get(name)
    if not value:
        raise UsageError(f"${name} is not set: this runs in a job of Slurm, as sbatch starts it")
    return value


def job_id() -> str:
    """Return the id of the job that this process runs in, in the form of `JobReport`."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{variable('SLURM_ARRAY_TASK_ID')}" if array else variable("SLURM_JOB_ID")


def note(paths: SubmitPaths, event: str) -> None:
    """Append an event to the state file of the job that this process runs in."""
    _append(paths.state(job_id()), f"{int(time.time())} {event}\n")


def _append(path: Path, text: str) -> None:
    """Append to a file; a failure is printed and does not end the job."""
    try:
        fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with os.fdopen(fd, "ab", buffering=0) as file:
            file.write(text.encode())
    except OSError as error:
        # handlers of signals come here, and print fails in one that interrupts a print
        with contextlib.suppress(OSError):
            said = f"ringtap: {one_line(str(path))} cannot be written: {error.strerror}\n"
            os.write(2, said.encode(errors="replace"))


def read_report(paths: SubmitPaths, job: str) -> JobReport:
    """Return the report in the state file of a job, which has no file before it begins."""
    report = JobReport(job)
    try:
        text = read_whole(paths.state(job)).decode(errors="replace")
    except OSError:
        return report
    for line in text.splitlines():
        seconds, word, rest = (*line.split(" ", 2), "", "")[:3]
        if word == "begun" and seconds.isdigit():  # a later one means that Slurm requeued the job
            report = JobReport(job, int(seconds), rest.removeprefix("on "))
        elif word == "stopped":
            report = report._replace(stopped=report.stopped or rest)
        elif word == "ended" and rest.lstrip("-").isdigit():
            report = report._replace(exit_code=int(rest))
    return report


def announce_step(paths: SubmitPaths, step: str) -> None:
    """Write the id of the step of which this process is a task, if it is the step's first task."""
    if variable("SLURM_PROCID") == "0":
        _append(paths.step(job_id(), step), variable("SLURM_STEP_ID"))


def signal_step(paths: SubmitPaths, step: str, name: str) -> bool:
    """Send a signal to all tasks of a step by its id, because a signal to srun would kill them.

    Returns:
        True if the step has announced its id.
    """
    try:
        number = read_whole(paths.step(job_id(), step)).decode(errors="replace")
    except OSError:
        number = ""
    if number:
        import subprocess  # not needed by ranks

        command = ["scancel", "--quiet", f"--signal={name}", f"{variable('SLURM_JOB_ID')}.{number}"]
        with contextlib.suppress(OSError):
            subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
    return bool(number)
