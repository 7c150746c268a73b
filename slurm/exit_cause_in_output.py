"""Finds in the output of a submitted job why it ended: what Slurm says of its memory, a shell of a command."""

from __future__ import annotations

import re

from ringtap.agents.job.exit_cause import CANNOT_RUN, KILLED, POSSIBLE_CAUSE, SHELL_CAUSE
from ringtap.core.untrusted_files import read_tail
from ringtap.slurm.submission_file_names import SubmitPaths

_TAIL_BYTES = 1 << 16
# of Slurm 17 to 25: Slurm itself ended the job; a line without figures may follow
_MEMORY_FIGURES = re.compile(r"^slurmstepd[^:]*: (?:error: )?(.*exceeded memory limit \(\d+ > \d+\).*)", re.I | re.M)
# also without figures, or the kernel killed a process in the job's control group
_MEMORY = re.compile(
    r"^slurmstepd[^:]*: (?:error: )?(.*(?:oom.kill|out of memory|exceeded \w* ?memory limit).*)", re.I | re.M
)
# of shells, env and ringtap
_NO_COMMAND = re.compile(
    r"^(.+: (?:(?:command )?not found|command not found: .+|permission denied|no such file or directory)|"
    r".+ cannot be run: .+)$",
    re.I | re.M,
)
_MAX_CHARACTERS = 200


def killed_or_not_run(paths: SubmitPaths, job: str, code: int) -> str:
    """Return why a job was killed or could not run a command, as far as its output has it; empty for other ends.

    Args:
        paths: file names of the run.
        job: id of the job, as in `SubmitPaths.output`.
        code: its exit code.
    """
    if code == KILLED:
        daemon = "Slurm's daemon"
        found = _quoted(paths, job, _MEMORY_FIGURES, daemon) or _quoted(paths, job, _MEMORY, daemon)
        return found or POSSIBLE_CAUSE
    if code in CANNOT_RUN:
        return _quoted(paths, job, _NO_COMMAND, "its output") or SHELL_CAUSE
    return ""


def _quoted(paths: SubmitPaths, job: str, pattern: re.Pattern[str], who: str) -> str:
    found = pattern.findall(read_tail(paths.output(job), _TAIL_BYTES))
    return f"{who} says: {found[-1][:_MAX_CHARACTERS]}" if found else ""
