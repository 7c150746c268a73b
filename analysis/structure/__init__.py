"""Structure of a training job, inferred from its packets.

``read_structure`` returns a `Structure`; it is imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["read_structure"]

if TYPE_CHECKING:
    from ringtap.analysis.structure.captures import read_structure


def __getattr__(name: str) -> Any:
    """Import the reader of captures on first access."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ringtap.analysis.structure import captures

    return getattr(captures, name)
