"""The format of flow plans: a line of JSON, then one line per flow (docs/commands/traffic-plans.md).

Version 1 had no ``source`` and no ``after``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ringtap.errors import UsageError
from ringtap.json_validation import NewerFormatError

FORMAT = "ringtap-flow-plan"
VERSION = 2
# separated by tabs, by version
COLUMNS = {
    1: ("start_ns", "destination", "size_bytes"),
    2: ("start_ns", "source", "destination", "size_bytes", "after"),
}
MAX_HEADER_BYTES = 2**24
# The largest number that a plan or a log holds: times, sizes and their sums are signed 64-bit integers
MAX_INT64 = 2**63 - 1


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
        with path.open("rb") as file:
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
