"""ringtap: what distributed training and a network do to each other, measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["CongestionModel", "FitResult", "__version__", "open_run"]

if TYPE_CHECKING:
    from ringtap.analysis.fit import CongestionModel, FitResult
    from ringtap.analysis.runs import open_run

_LAZY = {
    "CongestionModel": "ringtap.analysis.fit",
    "FitResult": "ringtap.analysis.fit",
    "open_run": "ringtap.analysis.runs",
}


def __getattr__(name: str) -> Any:
    """Import the analysis only when it is asked for: agents run without NumPy."""
    if name not in _LAZY:
        raise AttributeError(f"module 'ringtap' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
