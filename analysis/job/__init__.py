"""The join of a job and its network, iteration by iteration.

``open_job`` gives a `Job`; both are imported when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Job", "open_job"]

if TYPE_CHECKING:
    from ringtap.analysis.job.run import Job, open_job


def __getattr__(name: str) -> Any:
    """Import what reads runs only when it is asked for: ``ringtap analyze --help`` needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ringtap.analysis.job import run

    return getattr(run, name)
