"""Analysis of a job and its network per iteration.

``open_job`` returns a `Job`; both are imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Job", "open_job"]

if TYPE_CHECKING:
    from ringtap.analysis.job.run import Job, open_job


def __getattr__(name: str) -> Any:
    """Import the run reader on first access: ``ringtap analyze --help`` does not need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ringtap.analysis.job import run

    return getattr(run, name)
