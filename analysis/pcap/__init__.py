"""Scans packet captures fast: conversations, rates, RoCE queue pairs.

``read_captures`` returns a `Traffic`; ``align`` merges those of several nodes. Both are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Traffic", "align", "read_captures"]

if TYPE_CHECKING:
    from ringtap.analysis.pcap.captured_traffic import Traffic
    from ringtap.analysis.pcap.merge_scans import align
    from ringtap.analysis.pcap.scan_captures import read_captures

_LAZY = {"Traffic": "captured_traffic", "align": "merge_scans", "read_captures": "scan_captures"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
