"""Captures scanned at memory speed: conversations, rates, queue pairs.

``read_captures`` gives a `Traffic`, ``align`` puts those of several nodes together; both are imported when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Traffic", "align", "read_captures"]

if TYPE_CHECKING:
    from ringtap.analysis.pcap.merge import align
    from ringtap.analysis.pcap.reader import read_captures
    from ringtap.analysis.pcap.traffic import Traffic

_LAZY = {"Traffic": "traffic", "align": "merge", "read_captures": "reader"}


def __getattr__(name: str) -> Any:
    """Import the readers only when they are asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
