"""The structure of a training job, from its packets.

``read_structure`` gives a `Structure`; it is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["read_structure"]

if TYPE_CHECKING:
    from ringtap.analysis.structure.captures import read_structure


def __getattr__(name: str) -> Any:
    """Import what reads captures only when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ringtap.analysis.structure import captures

    return getattr(captures, name)
