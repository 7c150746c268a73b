"""Measure how network traffic slows down distributed deep learning."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = [
    "CongestionModel",
    "FitResult",
    "Traffic",
    "__version__",
    "open_run",
    "read_captures",
    "read_structure",
    "step",
]

if TYPE_CHECKING:
    from ringtap.analysis.model.fit import CongestionModel, FitResult
    from ringtap.analysis.pcap import Traffic, read_captures
    from ringtap.analysis.runs.run import open_run
    from ringtap.analysis.structure import read_structure

_LAZY = {
    "CongestionModel": "ringtap.analysis.model.fit",
    "FitResult": "ringtap.analysis.model.fit",
    "Traffic": "ringtap.analysis.pcap",
    "read_captures": "ringtap.analysis.pcap",
    "read_structure": "ringtap.analysis.structure",
    "open_run": "ringtap.analysis.runs.run",
}


def step() -> None:
    """Mark the end of an iteration of a training loop whose steps ringtap cannot detect by itself.

    For loops without PyTorch's optimizers: JAX, NumPy, a simulation. Under ``ringtap run`` the moment is recorded, and
    the marks count as this process's iterations; without it the call does nothing. Never raises.
    """
    hook = sys.modules.get("ringtap_hook")
    if hook is not None:
        hook.mark()


def __getattr__(name: str) -> Any:
    """Import the analysis only on first access: agents run without NumPy."""
    if name not in _LAZY:
        raise AttributeError(f"module 'ringtap' has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(_LAZY[name]), name)
    except ImportError as error:
        from ringtap import installation

        said = installation.missing(error)
        if said is None:
            raise
        raise ImportError(f"ringtap.{name} cannot be used: {said}", name=error.name) from None
