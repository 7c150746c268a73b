"""The format of flow plans: a line of JSON, then one line per flow (docs/commands/traffic-plans.md).

Version 1 had no ``source`` and no ``after``, version 2 one flow in ``after`` and no computations.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ringtap.core.errors import UsageError
from ringtap.core.json_validation import NewerFormatError
from ringtap.core.run_files import open_regular

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


def read_header(path: Path) -> dict[str, Any]:
    """Read the first line of a plan file, and check its format and version.

    Raises:
        UsageError: the file cannot be read, is not a plan, has a newer version, or repeats a key in its header.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise UsageError(f"{path} line 1: the header names {name!r} twice")
            found[name] = value
        return found

    try:
        with open_regular(path) as file:
            line = file.readline(MAX_HEADER_BYTES)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    try:
        header = json.loads(line, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a flow plan: line 1 is not JSON") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise UsageError(f"{path} is not a flow plan: line 1 does not say format {FORMAT!r}")
    version = header.get("version")
    if type(version) is not int or version < 1:
        raise UsageError(f"{path} line 1: version must be a whole number from 1 to {VERSION}")
    if version > VERSION:
        raise NewerFormatError(path, header.get("ringtap"), version, VERSION)
    return header
