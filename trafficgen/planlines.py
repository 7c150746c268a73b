"""The lines of a plan file: one flow each, read with an exact complaint about whatever is wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ringtap.errors import UsageError
from ringtap.trafficgen.flow import MOST, Flow
from ringtap.trafficgen.protocol import LARGEST_FLOW_BYTES

_COLUMNS = {1: "start_ns, destination, size_bytes", 2: "start_ns, source, destination, size_bytes, after"}
_PLAIN = {
    1: re.compile(r"([0-9]{1,19})()\t([^\t\n]+)\t([0-9]{1,19})()()\n"),
    2: re.compile(r"([0-9]{1,19})\t([^\t\n]+)\t([^\t\n]+)\t([0-9]{1,19})\t(?:-|([0-9]{1,19})(?:\+([0-9]{1,19}))?)\n"),
}


class PlanLines:
    """Reads the lines of one file in order.

    Args:
        path: the file, for messages.
        version: its format version, 1 or 2.
        duration_ns: the plan's end, before which every flow starts.
        sources: what the source column may name beside ``-``.
        destinations: what the destination column may name.
    """

    def __init__(
        self, path: Path, version: int, duration_ns: int, sources: Sequence[str], destinations: Sequence[str]
    ) -> None:
        self._path, self._version, self._duration_ns = path, version, duration_ns
        # One string a name however many lines have it; version 1 has no source column and matches nothing
        self.sources = {"-": "", "": ""} | {name: name for name in sources}
        self.destinations = {name: name for name in destinations}
        self._plain = _PLAIN[version].fullmatch
        self._latest_ns = 0
        self._endless: set[int] = set()

    def read(self, line: str, number: int) -> Flow:
        """One line as a flow.

        Args:
            line: the text with its newline.
            number: its number in the file; flow 0 is on line 2.

        Raises:
            UsageError: it is wrong; the message names file and line.
        """
        match = self._plain(line)
        if match is None:
            raise self._explain(line, number)
        start, source, destination, size, after, delay = match.groups()
        flow = Flow(
            int(start),
            self.sources.get(source, source),
            self.destinations.get(destination, destination),
            int(size),
            int(after) if after else -1,
            int(delay) if delay else 0,
        )
        if flow.start_ns < self._latest_ns:
            raise self.wrong(number, f"start {flow.start_ns} is before the line above: sort by start")
        self._latest_ns = flow.start_ns
        self._check(flow, number)
        return flow

    def wrong(self, number: int, why: str) -> UsageError:
        """The error for a line."""
        return UsageError(f"{self._path} line {number}: {why}")

    def _check(self, flow: Flow, number: int) -> None:
        if flow.start_ns >= self._duration_ns:
            raise self.wrong(number, f"start {flow.start_ns} is not before the plan's end at {self._duration_ns} ns")
        if flow.destination not in self.destinations:
            raise self.wrong(number, f"destination {flow.destination[:80]!r} is not among the header's destinations")
        if flow.source and flow.source not in self.sources:
            raise self.wrong(number, f"source {flow.source[:80]!r} is not among the header's sources")
        if not flow.size_bytes:
            if self._version == 1:
                raise self.wrong(number, "size_bytes is 0: a flow has at least 1 byte")
            self._endless.add(number - 2)
        if flow.size_bytes > LARGEST_FLOW_BYTES:  # beyond it, the protocol's flags begin
            raise self.wrong(number, f"size_bytes is too large: a flow has at most {LARGEST_FLOW_BYTES} bytes")
        if flow.start_ns + flow.delay_ns > MOST:
            raise self.wrong(number, f"the delay of after is too large: times go up to {MOST}")
        if flow.after < 0:
            return
        if flow.after >= number - 2:
            raise self.wrong(number, f"after {flow.after} is not an earlier flow: this is flow {number - 2}")
        if flow.after in self._endless:
            raise self.wrong(number, f"after {flow.after} names a flow of size 0, which never arrives whole")

    def _explain(self, line: str, number: int) -> UsageError:
        """Why a line is not what the pattern asks for."""
        columns = line.rstrip("\n").split("\t")
        names = _COLUMNS[self._version].split(", ")
        if len(columns) != len(names) or not line.endswith("\n"):
            count = {3: "three", 5: "five"}[len(names)]
            return self.wrong(number, f"a flow is {count} columns with a tab between: {', '.join(names)}")
        named = dict(zip(names, columns, strict=True))
        after, plus, delay = named.pop("after", "-").partition("+")
        numbers = {"start_ns": named["start_ns"], "size_bytes": named["size_bytes"]}
        numbers |= {"after": after} if after != "-" or plus else {}
        numbers |= {"the delay of after": delay} if plus else {}
        for name, text in numbers.items():
            if not (text.isascii() and text.isdigit()):
                return self.wrong(number, f"{name} {text[:40]!r} is not a whole number of 0 or more")
            if len(text) > 19:
                return self.wrong(number, f"{name} {text[:40]!r} is too large")
        return self.wrong(number, f"{'source' if not named.get('source', '-') else 'destination'} is empty")
