"""Asks Slurm for the states of jobs, in one query, and says what each state means."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from ringtap.core.errors import MeasurementError, last_line
from ringtap.core.parent_death import run_helper

WAITING, RUNNING, ENDED, UNKNOWN = "waiting", "running", "ended", "unknown"
# All base states and flags of Slurm 25.11: the job's state for ringtap, and what it means
STATES: dict[str, tuple[str, str]] = {
    "PENDING": (WAITING, "it waits to start"),
    "CONFIGURING": (WAITING, "its nodes are being made ready"),
    "POWER_UP_NODE": (WAITING, "its nodes are being switched on"),
    "LAUNCH_FAILED": (WAITING, "it could not be started on its nodes"),
    "RECONFIG_FAIL": (WAITING, "its nodes could not be made ready"),
    "REQUEUED": (WAITING, "it goes back into the queue"),
    "REQUEUE_FED": (WAITING, "its federation puts it back into the queue"),
    "REQUEUE_HOLD": (WAITING, "it is back in the queue, held until 'scontrol release'"),
    "SPECIAL_EXIT": (WAITING, "it is back in the queue because of how it ended, held until 'scontrol release'"),
    "RESV_DEL_HOLD": (WAITING, "it is held because its reservation was deleted"),
    "EXPEDITING": (WAITING, "it is back in the queue, before all others"),
    "RUNNING": (RUNNING, "it runs"),
    "SUSPENDED": (RUNNING, "its processes stand still, and other jobs may use its processors"),
    "STOPPED": (RUNNING, "its processes stand still, and it keeps its processors"),
    "SIGNALING": (RUNNING, "a signal is being sent to it"),
    "RESIZING": (RUNNING, "its number of nodes is being changed"),
    "STAGE_OUT": (RUNNING, "its files are being copied from the burst buffer"),
    "COMPLETING": (RUNNING, "it is ending"),
    "UPDATE_DB": (RUNNING, "it is being written to Slurm's accounts"),
    "COMPLETED": (ENDED, "it ended with exit code 0"),
    "FAILED": (ENDED, "it failed"),
    "CANCELLED": (ENDED, "it was cancelled"),
    "TIMEOUT": (ENDED, "its time limit was over"),
    "DEADLINE": (ENDED, "it could not end before its deadline"),
    "PREEMPTED": (ENDED, "another job took its nodes"),
    "NODE_FAIL": (ENDED, "a node of it failed"),
    "BOOT_FAIL": (ENDED, "its nodes could not be started"),
    "OUT_OF_MEMORY": (ENDED, "it used more memory than it may"),
    "REVOKED": (UNKNOWN, "another cluster of the federation has it: ask there"),
}
FORGOTTEN = "FORGOTTEN"
_ANSWER_S = 30.0


@dataclass(frozen=True)
class SlurmJobState:
    """State of a job according to Slurm.

    Attributes:
        state: Slurm's name of the state, such as ``PENDING``; ``FORGOTTEN`` if Slurm no longer knows the job, or keeps
            no accounts.
        reason: Slurm's reason for the state; empty if there is none.
        nodes: nodes that the job has or had, in Slurm's notation.
    """

    state: str
    reason: str = ""
    nodes: str = ""

    @property
    def kind(self) -> str:
        """State of the job for ringtap: ``waiting``, ``running``, ``ended``, or ``unknown``."""
        return ENDED if self.state == FORGOTTEN else STATES.get(self.state, (UNKNOWN, ""))[0]

    def sentence(self) -> str:
        """Return what Slurm says, and what it means."""
        if self.state == FORGOTTEN:
            return "Slurm does not know it any more"
        meaning = STATES.get(self.state, (UNKNOWN, "a state that this ringtap does not know"))[1]
        reason = f" ({self.reason})" if self.reason else ""
        place = f" on {self.nodes}" if self.nodes and self.kind == RUNNING else ""
        return f"Slurm says {self.state}{reason}: {meaning}{place}"


def ask_slurm(jobs: Sequence[str], owner: int | None = None) -> dict[str, SlurmJobState]:
    """Query the controller once for the states of jobs, and the accounting for those that it has forgotten.

    Args:
        jobs: ids of the jobs; those of array tasks are ``<array's id>_<index>``.
        owner: uid of the jobs' owner. A job of another user with the same id is another cluster's, or a later one.

    Raises:
        MeasurementError: the controller is not reachable from here, or does not answer.
    """
    ids = ",".join(dict.fromkeys(job.partition("_")[0] for job in jobs))
    command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={ids}", "--format=%i|%T|%r|%N|%U"]
    try:
        done = run_helper(command, _ANSWER_S)
    except OSError as error:
        raise MeasurementError(f"Slurm cannot be asked from here: squeue: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(f"Slurm has not answered within {_ANSWER_S:.0f} s: ask again later") from error
    if done.returncode and "Invalid job id" not in done.stderr:
        raise MeasurementError(f"Slurm gave no answer: {last_line(done.stderr)}")
    found = {}
    for line in done.stdout.splitlines():
        job, state, reason, nodes, uid = (*line.split("|"), "", "", "", "")[:5]
        if owner is None or uid in ("", str(owner)):
            found[job] = SlurmJobState(state, "" if reason == "None" else reason, nodes)
    forgotten = [job for job in jobs if job not in found]
    if forgotten:
        found |= _ask_accounting(forgotten)
    return {job: found.get(job, SlurmJobState(FORGOTTEN)) for job in jobs}


def _ask_accounting(jobs: Sequence[str]) -> dict[str, SlurmJobState]:
    """Look up jobs that the controller has forgotten in Slurm's accounting, which not every cluster has.

    Jobs that live according to it are left out: the controller knows all that do.
    """
    command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(jobs)}"]
    try:
        done = run_helper([*command, "--format=JobID,State,NodeList"], _ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = [line.split("|") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    # "CANCELLED by 1001" has the user in it
    found = {row[0]: SlurmJobState(row[1].partition(" ")[0], "", row[2]) for row in rows if len(row) == 3}
    return {job: answer for job, answer in found.items() if answer.kind not in (WAITING, RUNNING)}
