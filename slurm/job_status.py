"""Status of a submission's jobs: by their own records in the run directory, and by Slurm's answer when asked."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringtap.errors import MeasurementError, UsageError
from ringtap.json_validation import COUNT, Shape, Text
from ringtap.rundir import read_json
from ringtap.slurm.paths import SubmitPaths

_ANSWER_S = 30.0
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
ALIVE = ("RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")


_REQUEST: Shape = {"jobs?": [{"id": Text(r"\w[\w.+-]{0,63}", "a job's id")}], "tasks?": [[COUNT]]}


@dataclass(frozen=True)
class JobReport:
    """State of a job as its own script has written it.

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


@dataclass(frozen=True)
class Answer:
    """State of a job according to Slurm.

    Attributes:
        state: Slurm's name of it, such as ``PENDING``; ``FORGOTTEN`` where Slurm no longer knows the job.
        reason: Slurm's reason for it; empty for none.
        nodes: the nodes it has or had, as Slurm writes them.
    """

    state: str
    reason: str = ""
    nodes: str = ""


def read_request(paths: SubmitPaths) -> dict[str, Any]:
    """Read submit/request.json: the request, ``jobs`` with the id of each submission, ``tasks`` with its series.

    Raises:
        UsageError: it is damaged.
    """
    item: dict[str, Any] = read_json(paths.request, _REQUEST)
    if "tasks" in item and len(item["tasks"]) != len(item.get("jobs") or []):
        raise UsageError(f"{paths.request} cannot be used: it has other tasks than jobs")
    return item


def read_account(paths: SubmitPaths, job: str) -> JobReport:
    """Read the state file of a job; a job that has not begun has none."""
    account = JobReport(job)
    try:
        text = paths.state(job).read_text(errors="replace")
    except OSError:
        return account
    for line in text.splitlines():
        seconds, word, rest = (*line.split(" ", 2), "", "")[:3]
        if word == "begun" and seconds.isdigit():  # again, if Slurm requeued it
            account = JobReport(job, int(seconds), rest.removeprefix("on "))
        elif word == "stopped":
            account = JobReport(job, account.begun_s, account.node, account.stopped or rest)
        elif word == "ended" and rest.lstrip("-").isdigit():
            account = JobReport(job, account.begun_s, account.node, account.stopped, int(rest))
    return account


def ask_slurm(jobs: Sequence[str]) -> dict[str, Answer]:
    """Query the controller once for the states of jobs.

    Args:
        jobs: their ids, tasks of arrays as ``<array's id>_<index>``.

    Raises:
        MeasurementError: it is not reachable from here, or does not answer.
    """
    ids = ",".join(dict.fromkeys(job.partition("_")[0] for job in jobs))
    command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={ids}", "--format=%i|%T|%r|%N"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ANSWER_S)
    except OSError as error:
        raise MeasurementError(f"Slurm cannot be asked from here: squeue: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(f"Slurm has not answered within {_ANSWER_S:.0f} s: ask again later") from error
    if done.returncode and "Invalid job id" not in done.stderr:
        words = (done.stderr.strip().splitlines() or ["no words"])[-1]
        raise MeasurementError(f"Slurm gave no answer: {words}")
    found = {}
    for line in done.stdout.splitlines():
        job, state, reason, nodes = (*line.split("|"), "", "", "", "")[:4]
        found[job] = Answer(state, "" if reason == "None" else reason, nodes)
    return {job: found.get(job, Answer("FORGOTTEN")) for job in jobs}
