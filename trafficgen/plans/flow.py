"""One flow of a plan, and the name and version of the plan format."""

from __future__ import annotations

from typing import NamedTuple

FORMAT = "ringtap-flow-plan"
VERSION = 2
# The largest number that a plan or a log holds: times, sizes and their sums are signed 64-bit integers
MOST = 2**63 - 1


class Flow(NamedTuple):
    """One line of a plan.

    Attributes:
        start_ns: nanoseconds after the sender's launch; a flow that waits for another one starts no earlier.
        source: address that the sending socket binds to; empty: any host that sends the plan, unbound.
        destination: ``host:port``.
        size_bytes: payload; 0: until the plan's end.
        after: number (from 0) of an earlier flow that must be received first; -1: none.
        delay_ns: nanoseconds from that flow's completion to this one's start.
    """

    start_ns: int
    source: str
    destination: str
    size_bytes: int
    after: int = -1
    delay_ns: int = 0
