"""What the launcher has put on each connection: memory that it shares with a carrier.

The launcher fills a connection's slot before its first byte goes out, so whoever hears the receiver's notice finds it
filled; no message is needed for a flow that went out in one piece.
"""

from __future__ import annotations

import mmap
import struct
from typing import NamedTuple

_SLOT = struct.Struct("=qqqq")
SLOT_BYTES = _SLOT.size


class Load(NamedTuple):
    """A flow on a connection: its number, payload (0: open-ended), CLOCK_MONOTONIC times due and launched."""

    number: int
    size_bytes: int
    due_ns: int
    start_ns: int


class Slots:
    """Slots of one carrier; make it before the fork.

    Args:
        count: connections at a time.
    """

    def __init__(self, count: int) -> None:
        self._memory = mmap.mmap(-1, max(1, count) * SLOT_BYTES)

    def fill(self, slot: int, number: int, size_bytes: int, due_ns: int, start_ns: int) -> None:
        """Say what a connection carries from now on."""
        _SLOT.pack_into(self._memory, slot * SLOT_BYTES, number, size_bytes, due_ns, start_ns)

    def load(self, slot: int) -> Load:
        """What a connection carries, or carried last."""
        return Load._make(_SLOT.unpack_from(self._memory, slot * SLOT_BYTES))
