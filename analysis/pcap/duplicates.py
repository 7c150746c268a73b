"""Recognizes packets that a capture holds several times, as of a bridge's interfaces together, or of a mirror port.

Such copies look like retransmissions of every byte. No connection sends every byte again: where the share of bytes seen
before is that of two, three or four copies, on each large flow, the packets are copies.
"""

from __future__ import annotations

from collections.abc import Iterable

from ringtap.units import counted

_MAX_COPIES = 4
_NEAR_COPIES = 0.03
"""Largest difference of the bytes from a whole number of copies: retransmissions of a busy network are below it."""
_MIN_BYTES = 100_000


def copies_of(payload: int, retransmitted: int) -> int:
    """Return how often a capture holds each byte of a TCP flow; 1 if no whole number of copies fits.

    Args:
        payload: payload bytes of the flow, with those that were seen before.
        retransmitted: bytes that were seen before.
    """
    if payload < _MIN_BYTES or retransmitted <= 0:
        return 1
    copies = payload / max(payload - retransmitted, 1)
    whole = round(copies)
    return whole if 2 <= whole <= _MAX_COPIES and abs(copies / whole - 1) <= _NEAR_COPIES else 1


def note_of_copies(flows: Iterable[tuple[int, int]]) -> str:
    """Return a sentence if a capture holds each byte of some flows several times; else an empty text.

    Args:
        flows: payload and retransmitted bytes of each flow.
    """
    several = sum(copies_of(*flow) > 1 for flow in flows)
    if not several:
        return ""
    return (
        f"every byte of {counted(several, 'flow')} was captured more than once, as with '-i any' on a bridge or with a "
        "mirror port: packets, bytes, payload and resent bytes count each copy; capture one interface to count one"
    )
