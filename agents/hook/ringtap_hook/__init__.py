"""The part of ringtap that runs inside a job's processes and records steps and communication of unedited training.

Standard library only and valid for Python 3.8: the job's interpreter is not ringtap's, and torch is looked at only
where the job has imported it. Nothing in here lets an exception out to the job: what fails is written to
``hook-<pid>.log`` in the node's ``steps`` folder and ends that recorder, never the job.
"""

from __future__ import annotations

from . import finder, log, settings


def arm() -> None:
    """Wait for the modules that are recorded; called once a process, by sitecustomize."""
    wanted = settings.from_environment()
    if wanted is None:
        return
    try:
        finder.install(wanted)
        settings.note_loaded(wanted)
    except Exception:
        log.note(wanted, "recorder")


def mark() -> None:
    """Record the end of an iteration of a plain loop; ``ringtap.step()`` calls this in a job that is recorded."""
    wanted = settings.from_environment()
    if wanted is None:
        return
    try:
        if wanted.wants("steps"):
            from . import foreign, steps

            if not steps.is_made():  # a loop that imports nothing else that is waited for
                foreign.attach(None, wanted)
            steps.recorder(wanted).mark()
    except Exception:
        log.note(wanted, "step recorder")


# What torch.compile looks for: within a compiled function it would trace into this, and warn.
mark._torchdynamo_disable = True  # type: ignore[attr-defined]
