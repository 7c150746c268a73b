"""Defines the format of flow plans: a line of JSON, then one line per flow (docs/commands/traffic-plans.md).

Version 1 had no ``source`` and no ``after``, version 2 one flow in ``after`` and no computations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

FORMAT = "ringtap-flow-plan"
VERSION = 3
# Plans without several flows in ``after``, computations and iterations have this version, which older readers know
BASIC_VERSION = 2
# separated by tabs, by version
COLUMNS = {
    1: ("start_ns", "destination", "size_bytes"),
    2: ("start_ns", "source", "destination", "size_bytes", "after"),
    3: ("start_ns", "source", "destination", "size_bytes", "after"),
}
MAX_HEADER_BYTES = 2**24
# The largest number that a plan or a log holds: times, sizes and their sums are signed 64-bit integers
MAX_INT64 = 2**63 - 1
MAX_FLOW_BYTES = 2**62 - 1  # the two bits above are flags of the protocol between sender and receiver

# Flow lists of HPCC's traffic_gen: the number of flows, then one line per flow with these columns, sorted by start
FLOW_LIST_COLUMNS = ("src", "dst", "priority", "dport", "bytes", "start_s")
_FLOW_LIST_PRIORITY = 3


class Flow(NamedTuple):
    """One line of a plan: a flow, or a computation, which sends nothing and is complete when it is due.

    Attributes:
        start_ns: nanoseconds after the sender's launch; a flow that waits for others starts no earlier.
        source: address that the sending socket binds to; empty: any host that sends the plan, unbound.
        destination: ``host:port``; empty: a computation.
        size_bytes: payload; 0: until the plan's end.
        after: for each earlier line that must be complete first: its number (from 0), and the nanoseconds from its
            completion to this one's start. A flow is complete when it has been received.
    """

    start_ns: int
    source: str
    destination: str
    size_bytes: int
    after: tuple[tuple[int, int], ...] = ()


class Operation(NamedTuple):
    """One line of an iteration, from which the lines of a plan with iterations are made.

    Attributes:
        rank: rank that computes or sends.
        peer: rank that receives; -1: a computation.
        size_bytes: payload; 0 for a computation.
        after: as in `Flow`. The number of a later operation, or of this one, means that of the iteration before.
    """

    rank: int
    peer: int
    size_bytes: int
    after: tuple[tuple[int, int], ...]


def flow_list_line(source: int, destination: int, port: int, size_bytes: int, start_ns: int) -> str:
    """Return a flow's line in an HPCC flow list, without a newline; the start is exact to the nanosecond."""
    seconds, rest_ns = divmod(start_ns, 1_000_000_000)
    return f"{source} {destination} {_FLOW_LIST_PRIORITY} {port} {size_bytes} {seconds}.{rest_ns:09d}"


# Numbers of a header's ``transport`` by name: smallest and largest value, and the range in words
_TRANSPORT_NUMBERS = {
    "dscp": (0, 63, "from 0 to 63"),
    "send_buffer_bytes": (1, 2**31 - 1, "from 1 byte to 2 GiB"),
    "pacing_bps": (1, MAX_INT64, "1 bit/s or more"),
}


def transport_problem(values: Mapping[str, object]) -> tuple[str, str] | None:
    """Return the first option of a plan's ``transport`` that cannot be used, and what it must be; None if all can."""
    for name, value in values.items():
        if name == "congestion_control":
            if not isinstance(value, str) or not value.isprintable() or value.split() != [value]:
                return name, "must be a name"
        elif name not in _TRANSPORT_NUMBERS:
            return name, f"is none of congestion_control, {', '.join(_TRANSPORT_NUMBERS)}"
        else:
            least, most, words = _TRANSPORT_NUMBERS[name]
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                return name, f"must be {words}"
    return None
