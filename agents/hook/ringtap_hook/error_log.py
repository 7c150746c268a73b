"""Writes the hook's errors into a log beside the records; the hook reports them nowhere else."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .settings import Settings


def note(settings: Settings, what: str) -> None:
    """Write the exception being handled to ``hook-<pid>.log``; ``what`` is the recorder that it ended."""
    try:
        import traceback

        os.makedirs(settings.steps_folder, exist_ok=True)
        path = os.path.join(settings.steps_folder, f"hook-{os.getpid()}.log")
        with open(path, "a", encoding="utf-8") as file:
            if file.tell():  # the last line may be incomplete
                file.write("\n")
            file.write(f"ringtap's {what} stopped; the job goes on\n{traceback.format_exc()}")
    except Exception:  # there is nowhere left to report it
        pass
