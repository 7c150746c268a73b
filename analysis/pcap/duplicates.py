"""Recognizes captures that hold each packet several times, as of a bridge's interfaces together, or of a mirror port.

Such copies look like retransmissions of every byte. No connection sends every byte again: where the share of bytes seen
before is that of two, three or four copies, the packets are copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ringtap.core.units import counted

_MAX_COPIES = 4
_NEAR_COPIES = 0.03
"""Largest difference of the bytes from a whole number of copies: retransmissions of a busy network are below it."""
_MIN_BYTES = 100_000


def has_copies(conversations: npt.NDArray[Any]) -> bool:
    """True if a capture holds each byte of some large TCP flow several times.

    Args:
        conversations: rows of ``scan_dtypes.CONVERSATION``.
    """
    payload, again = (conversations[name].ravel().astype(np.float64) for name in ("payload", "retransmitted_bytes"))
    is_large = (payload >= _MIN_BYTES) & (again > 0)
    copies = payload[is_large] / np.maximum(payload[is_large] - again[is_large], 1)
    whole = np.round(copies)
    return bool(np.any((whole >= 2) & (whole <= _MAX_COPIES) & (np.abs(copies / whole - 1) <= _NEAR_COPIES)))


def copies_note(name: str, counts: Mapping[str, int]) -> list[str]:
    """Return a sentence about the copies in a capture that do not count; an empty list if there are none.

    Args:
        name: name of the capture.
        counts: as in `ringtap.analysis.pcap.scan.Scanned`.
    """
    if not (copies := counts.get("copies")):
        return []
    held = f"{name} holds {counted(copies, 'copy', 'copies')} of packets"
    return [f"{held}, as of several interfaces of a bridge or of a mirror port: each packet counts once"]
