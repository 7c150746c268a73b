"""Records steps and communication inside a job's processes, without edits to the training code.

It uses the standard library only and is valid for Python 3.8, because the job's interpreter is not ringtap's. It uses
torch only after the job has imported it. No exception reaches the job: a failure is written to ``hook-<pid>.log`` in
the node's ``steps`` folder and ends that recorder, never the job.
"""

from __future__ import annotations

from . import error_log, import_hook, settings


def arm() -> None:
    """Install the import hook that attaches the recorders; sitecustomize calls this once per process."""
    wanted = settings.from_environment()
    if wanted is None:
        return
    try:
        import_hook.install(wanted)
        settings.note_loaded(wanted)
    except Exception:
        error_log.note(wanted, "recorder")


def mark() -> None:
    """Record the end of an iteration of a plain loop; ``ringtap.step()`` calls this in a job that is recorded."""
    wanted = settings.from_environment()
    if wanted is None:
        return
    try:
        if wanted.wants("steps"):
            from . import agent_start, steps

            if not steps.is_made():  # this job may import no module that would have called agent_start.attach
                agent_start.attach(None, wanted)
            steps.recorder(wanted).mark()
    except Exception:
        error_log.note(wanted, "step recorder")


# torch.compile checks this: without it, it would trace into the function, and warn.
mark._torchdynamo_disable = True  # type: ignore[attr-defined]
