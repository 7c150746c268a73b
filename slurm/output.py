"""Looks into the output of a submitted job for what Slurm says about its memory."""

from __future__ import annotations

import re

from ringtap.agents.job.exit_cause import POSSIBLE_CAUSE
from ringtap.run_files import open_regular
from ringtap.slurm.paths import SubmitPaths

_TAIL_BYTES = 1 << 16
# of Slurm 17 to 25: the kernel killed a process in the job's control group, or Slurm itself ended the job
_MEMORY = re.compile(r"^slurmstepd.*(oom.kill|out of memory|exceeded \w* ?memory limit).*", re.IGNORECASE | re.MULTILINE)
_MAX_CHARACTERS = 200


def memory_words(paths: SubmitPaths, job: str) -> str:
    """Return the cause of a job's end by SIGKILL, as far as its output has it.

    Args:
        paths: file names of the run.
        job: id of the job, as in `SubmitPaths.output`.
    """
    path, text = paths.output(job), ""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        pass
    found = _MEMORY.search(text)
    if found:
        return f"Slurm's daemon says: {found[0][:_MAX_CHARACTERS].partition('error: ')[2] or found[0]}"
    return POSSIBLE_CAUSE
