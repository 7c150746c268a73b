"""Flow plan files: a line of JSON, then a flow a line; written whole, read as a stream (docs/traffic.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringtap.errors import UsageError
from ringtap.trafficgen.plans import FORMAT, MOST, VERSION, Flow, FlowPlan
from ringtap.trafficgen.protocol import parse_address

_LONGEST_HEADER = 2**20


def write_plan(plan: FlowPlan, path: Path, force: bool = False) -> None:
    """Write a plan's file, under a temporary name until it is whole.

    Raises:
        UsageError: the file exists and ``force`` is not set, or it cannot be written.
    """
    if path.exists() and not force:
        raise UsageError(f"{path} exists: name another file or add --force")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="ascii") as file:
            file.write(json.dumps(plan.header) + "\n")
            for flow in plan.flows():
                file.write(f"{flow.start_ns}\t{flow.destination}\t{flow.size_bytes}\n")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


class PlanFile:
    """A flow plan on disk. Its header is read and checked at once, its flows by ``check`` and ``flows``.

    Attributes:
        path: the file.
        header: its first line.
        duration_ns: length of the plan.
        destinations: ``host:port`` of every destination; flow logs refer to them by index.

    Raises:
        UsageError: it cannot be read, is no flow plan, or is one of a newer version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = self._read_header()
        self.duration_ns = self._number("duration_ns")
        self.destinations = self._read_destinations()

    def check(self) -> None:
        """Read every line once, so that a bad one is found before the first flow is sent.

        Raises:
            UsageError: a line is wrong (the message names it), or the file does not hold what its header says.
        """
        flows, total = 0, 0
        for flow in self.flows():
            flows += 1
            total += flow.size_bytes
        asked = (self._number("flows"), self._number("bytes"))
        if (flows, total) != asked:
            raise UsageError(
                f"{self.path} holds {flows} flows of {total} bytes but its header says {asked[0]} of {asked[1]}: "
                "it was cut short or edited; write it again with 'ringtap traffic plan'"
            )

    def flows(self) -> Iterator[Flow]:
        """The flows in order of their starts.

        Raises:
            UsageError: a line is wrong; the message names file and line.
        """
        known = {destination: destination for destination in self.destinations}
        latest = 0
        try:
            with self.path.open("r", encoding="utf-8", newline="\n") as file:
                file.readline(_LONGEST_HEADER)
                for number, line in enumerate(file, start=2):
                    flow = self._parse(line, number, known)
                    if flow.start_ns < latest:
                        raise self._wrong(number, f"start {flow.start_ns} is before the line above: sort by start")
                    latest = flow.start_ns
                    yield flow
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{self.path} cannot be read: {error}") from error

    def _parse(self, line: str, number: int, known: dict[str, str]) -> Flow:
        columns = line.rstrip("\n").split("\t")
        if len(columns) != 3 or not line.endswith("\n"):
            raise self._wrong(number, "a flow is three columns with a tab between: start_ns, destination, size_bytes")
        start_ns = self._integer(columns[0], number, "start_ns")
        size_bytes = self._integer(columns[2], number, "size_bytes")
        if start_ns >= self.duration_ns:
            raise self._wrong(number, f"start {start_ns} is not before the plan's end at {self.duration_ns} ns")
        if size_bytes < 1:
            raise self._wrong(number, "size_bytes is 0: a flow has at least 1 byte")
        if columns[1] not in known:
            raise self._wrong(number, f"destination {columns[1][:80]!r} is not among the header's destinations")
        return Flow(start_ns, known[columns[1]], size_bytes)

    def _integer(self, text: str, number: int, name: str) -> int:
        if not (text.isascii() and text.isdigit()):
            raise self._wrong(number, f"{name} {text[:40]!r} is not a whole number of 0 or more")
        if len(text) > 19 or int(text) > MOST:
            raise self._wrong(number, f"{name} {text[:40]!r} is too large")
        return int(text)

    def _wrong(self, number: int, why: str) -> UsageError:
        return UsageError(f"{self.path} line {number}: {why}")

    def _read_header(self) -> dict[str, Any]:
        try:
            with self.path.open("rb") as file:
                header = json.loads(file.readline(_LONGEST_HEADER))
        except OSError as error:
            raise UsageError(f"{self.path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{self.path} is no flow plan: line 1 is not JSON") from error
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise UsageError(f"{self.path} is no flow plan: line 1 does not say format {FORMAT!r}")
        version = header.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise UsageError(f"{self.path} has plan format {version}; this ringtap reads up to {VERSION}: upgrade")
        return header

    def _number(self, key: str) -> int:
        value = self.header.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST:
            raise self._wrong(1, f"{key} must be a whole number from 0 to {MOST}")
        return value

    def _read_destinations(self) -> list[str]:
        destinations = self.header.get("destinations")
        if not isinstance(destinations, list) or not destinations:
            raise self._wrong(1, "destinations must be a list with at least one host:port")
        for destination in destinations:
            if not isinstance(destination, str) or parse_address(destination)[1] == 0:
                raise self._wrong(1, f"destination {destination!r} must be host:port with a port from 1")
        if len(set(destinations)) != len(destinations):
            raise self._wrong(1, "destinations names one of them twice")
        return destinations
