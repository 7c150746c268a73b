"""Recognizes captures that hold each packet several times, as of a bridge's interfaces together, or of a mirror port.

Such copies look like retransmissions of every byte. No connection sends every byte again: where the share of bytes seen
before is that of two, three or four copies, the packets are copies.
"""

from __future__ import annotations

from collections.abc import Iterable

_MAX_COPIES = 4
_NEAR_COPIES = 0.03
"""Largest difference of the bytes from a whole number of copies: retransmissions of a busy network are below it."""
_MIN_BYTES = 100_000


def has_copies(flows: Iterable[tuple[int, int]]) -> bool:
    """True if a capture holds each byte of some large TCP flow several times.

    Args:
        flows: payload, with the bytes that were seen before, and these bytes, of each flow.
    """
    return any(_copies(*flow) > 1 for flow in flows)


def _copies(payload: int, retransmitted: int) -> int:
    """Return how often a capture holds each byte of a flow; 1 if no whole number of copies fits."""
    if payload < _MIN_BYTES or retransmitted <= 0:
        return 1
    copies = payload / max(payload - retransmitted, 1)
    whole = round(copies)
    return whole if 2 <= whole <= _MAX_COPIES and abs(copies / whole - 1) <= _NEAR_COPIES else 1
