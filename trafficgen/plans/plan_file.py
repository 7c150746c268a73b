"""Flow plan files, read and written as streams (`ringtap.core.flow_plan_format` has the format)."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Protocol

from ringtap.core.errors import UsageError, error_message
from ringtap.core.flow_plan_format import COLUMNS, MAX_HEADER_BYTES, MAX_INT64, Flow, read_header
from ringtap.core.run_files import refuse_existing
from ringtap.core.schema import LOAD_BIN_NS
from ringtap.core.units import counted
from ringtap.trafficgen.outgoing_sockets import transport_problem
from ringtap.trafficgen.protocol import MAX_FLOW_BYTES, parse_address

_WINDOW_NS = 1_000_000
_NS = 1_000_000_000
_FIRST, _FOLLOWED, _DEPENDENT = range(3)


@dataclass(frozen=True)
class PlanRequirements:
    """The requirements of sending a plan.

    Attributes:
        flows: number of flows.
        bytes: payload of all flows; open-ended flows count as 0.
        most_at_once: for each (source, destination), the most flows that start within any 1 ms, plus the earlier
            open-ended ones, plus one flow for each chain of dependent flows that may be active.
        lines: number of lines, which are flows and computations.
        dependent: True if some line waits for another one.
        busiest_bps: highest planned payload rate in a bin of 100 ms, each flow counted in the bin of its start; with
            a pacing rate: that rate times the most flows in progress at once. Dependent flows are not counted,
            because the network sets their pace.
    """

    flows: int
    bytes: int
    most_at_once: dict[tuple[str, str], int]
    lines: int
    dependent: bool
    busiest_bps: float


class RequirementsCounter:
    """Accumulator of a plan's requirements, flow by flow in order; it keeps the starts within 1 ms and a byte per flow.

    Args:
        pacing_bps: pacing rate of each flow, 0: none.
        until_ns: the plan's end.
    """

    def __init__(self, pacing_bps: float, until_ns: int) -> None:
        self.flows = self.bytes = self.lines = 0
        self._marks = bytearray()
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._chains = 0
        self._busiest = _PacedRate(pacing_bps, until_ns) if pacing_bps else _BinRate()

    def add(self, start_ns: int, source: str, destination: str, size_bytes: int, after: Sequence[int]) -> None:
        """Add one line, which waits for the lines ``after``."""
        self.lines += 1
        if not destination:
            self._marks.append(_DEPENDENT if after else _FIRST)
            self._follow(after)
            return
        self.flows += 1
        self.bytes += size_bytes
        pair = self._pairs.get((source, destination))
        if pair is None:
            pair = self._pairs[source, destination] = _Pair()
        if not after:
            self._marks.append(_FIRST)
            pair.add(start_ns, size_bytes)
            self._busiest.add(start_ns, size_bytes)
            return
        self._marks.append(_DEPENDENT)
        self._follow(after)
        pair.waiting += 1

    def needs(self) -> PlanRequirements:
        """Return the requirements of the lines so far."""
        at_once = {names: pair.most + min(pair.waiting, self._chains) for names, pair in self._pairs.items()}
        return PlanRequirements(
            self.flows, self.bytes, at_once, self.lines, self._chains > 0, self._busiest.most_bps()
        )  # fmt: skip

    def _follow(self, after: Sequence[int]) -> None:
        for number in after:
            if self._marks[number] == _FIRST:
                self._marks[number] = _FOLLOWED
                self._chains += 1


class _Pair:
    """The flows from one source to one destination."""

    __slots__ = ("endless", "most", "recent", "waiting")

    def __init__(self) -> None:
        self.recent: deque[int] = deque()
        self.most = self.endless = self.waiting = 0

    def add(self, start_ns: int, size_bytes: int) -> None:
        recent = self.recent
        while recent and recent[0] <= start_ns - _WINDOW_NS:
            recent.popleft()
        if size_bytes:
            recent.append(start_ns)
        else:
            self.endless += 1
        self.most = max(self.most, len(recent) + self.endless)


class _BinRate:
    """The rate of the bin with the most bytes."""

    def __init__(self) -> None:
        self._end_ns = self._bytes = self._most = 0

    def add(self, start_ns: int, size_bytes: int) -> None:
        if start_ns >= self._end_ns:
            self._end_ns, self._bytes = start_ns - start_ns % LOAD_BIN_NS + LOAD_BIN_NS, 0
        self._bytes += size_bytes
        self._most = max(self._most, self._bytes)

    def most_bps(self) -> float:
        return self._most * 8 * _NS / LOAD_BIN_NS


class _PacedRate:
    """The rate of the most flows in progress at once, each at the pacing rate."""

    def __init__(self, pacing_bps: float, until_ns: int) -> None:
        self._pacing_bps, self._until_ns = pacing_bps, until_ns
        self._ends: list[float] = []
        self._most = 0

    def add(self, start_ns: int, size_bytes: int) -> None:
        ends = self._ends
        while ends and ends[0] <= start_ns:
            heappop(ends)
        heappush(ends, start_ns + size_bytes * 8 * _NS / self._pacing_bps if size_bytes else self._until_ns)
        self._most = max(self._most, len(ends))

    def most_bps(self) -> float:
        return self._most * self._pacing_bps


_AFTER = r"[0-9]{1,19}(?:\+[0-9]{1,19})?"
_LINE_PATTERNS = {
    1: re.compile(r"([0-9]{1,19})()\t([^\t\n]+)\t([0-9]{1,19})()\n"),
    2: re.compile(rf"([0-9]{{1,19}})\t([^\t\n]+)\t([^\t\n]+)\t([0-9]{{1,19}})\t(?:-|({_AFTER}))\n"),
    3: re.compile(rf"([0-9]{{1,19}})\t([^\t\n]+)\t([^\t\n]+)\t([0-9]{{1,19}})\t(?:-|({_AFTER}(?:,{_AFTER})*))\n"),
}


def _predecessors(text: str) -> tuple[tuple[int, int], ...]:
    """Parse the column ``after`` of a line that waits for others."""
    found = []
    for each in text.split(","):
        number, _, delay = each.partition("+")
        found.append((int(number), int(delay or 0)))
    return tuple(found)


class PlanLines:
    """Reader of the lines of one file, in order.

    Args:
        path: the file, for messages.
        version: its format version.
        duration_ns: the plan's end, before which every flow starts.
        sources: valid names of the source column, apart from ``-``.
        destinations: valid names of the destination column, apart from ``-``.
    """

    def __init__(
        self, path: Path, version: int, duration_ns: int, sources: Sequence[str], destinations: Sequence[str]
    ) -> None:
        self._path, self._version, self._duration_ns = path, version, duration_ns
        # One string object per name for all lines; version 1 has no source column, so its pattern matches ""
        self.sources = {"-": "", "": ""} | {name: name for name in sources}
        self.destinations = {name: name for name in destinations} | ({"-": ""} if version > 2 else {})
        self._match = _LINE_PATTERNS[version].fullmatch
        self._latest_ns = 0
        self._endless: set[int] = set()

    def read(self, line: str, number: int) -> Flow:
        """Parse one line into a flow.

        Args:
            line: the text with its newline.
            number: its number in the file; flow 0 is on line 2.

        Raises:
            UsageError: the line is wrong; the message names file and line.
        """
        match = self._match(line)
        if match is None:
            raise self._explain(line, number)
        start, source, destination, size, after = match.groups()
        flow = Flow(
            int(start),
            self.sources.get(source, source),
            self.destinations.get(destination, destination),
            int(size),
            _predecessors(after) if after else (),
        )
        if flow.start_ns < self._latest_ns:
            raise self.wrong(number, f"start {flow.start_ns} is before the line above: sort by start")
        self._latest_ns = flow.start_ns
        self._check(flow, number)
        return flow

    def wrong(self, number: int, why: str) -> UsageError:
        """Return the error of a line."""
        return UsageError(f"{self._path} line {number}: {why}")

    def _check(self, flow: Flow, number: int) -> None:
        if flow.start_ns >= self._duration_ns:
            raise self.wrong(number, f"start {flow.start_ns} is not before the plan's end at {self._duration_ns} ns")
        if flow.destination and flow.destination not in self.destinations:
            raise self.wrong(number, f"destination {flow.destination[:80]!r} is not among the header's destinations")
        if flow.source and flow.source not in self.sources:
            raise self.wrong(number, f"source {flow.source[:80]!r} is not among the header's sources")
        if not flow.destination:
            if flow.size_bytes:
                raise self.wrong(number, f"size_bytes is {flow.size_bytes}, but a computation sends nothing: write 0")
        elif not flow.size_bytes:
            if self._version == 1:
                raise self.wrong(number, "size_bytes is 0: a flow has at least 1 byte")
            self._endless.add(number - 2)
        if flow.size_bytes > MAX_FLOW_BYTES:  # the bits above it are flags of the protocol
            raise self.wrong(number, f"size_bytes is too large: a flow has at most {MAX_FLOW_BYTES} bytes")
        for after, delay_ns in flow.after:
            if flow.start_ns + delay_ns > MAX_INT64:
                raise self.wrong(number, f"the delay of after is too large: times go up to {MAX_INT64}")
            if after >= number - 2:
                raise self.wrong(number, f"after {after} is not an earlier flow: this is flow {number - 2}")
            if after in self._endless:
                raise self.wrong(number, f"after {after} names a flow of size 0, which never completes")

    def _explain(self, line: str, number: int) -> UsageError:
        """Return an error with the reason why a line does not match the pattern."""
        columns = line.rstrip("\n").split("\t")
        names = COLUMNS[self._version]
        if len(columns) != len(names) or not line.endswith("\n"):
            count = {3: "three", 5: "five"}[len(names)]
            return self.wrong(number, f"a flow is {count} columns with a tab between: {', '.join(names)}")
        named = dict(zip(names, columns, strict=True))
        dependency = named.pop("after", "-")
        numbers = [("start_ns", named["start_ns"]), ("size_bytes", named["size_bytes"])]
        for each in () if dependency == "-" else dependency.split(",") if self._version > 2 else (dependency,):
            after, plus, delay = each.partition("+")
            numbers += [("after", after), *([("the delay of after", delay)] if plus else [])]
        for name, text in numbers:
            if not (text.isascii() and text.isdigit()):
                return self.wrong(number, f"{name} {text[:40]!r} is not a whole number of 0 or more")
            if len(text) > 19:
                return self.wrong(number, f"{name} {text[:40]!r} is too large")
        return self.wrong(number, f"{'source' if not named.get('source', '-') else 'destination'} is empty")


class FlowSource(Protocol):
    """The content of a plan file: a header with the flow count, and flows that can be iterated repeatedly."""

    @property
    def header(self) -> dict[str, Any]:
        """The file's first line."""

    def flows(self) -> Iterator[Flow]:
        """Yield the flows in order of their starts."""


@dataclass(frozen=True)
class MadePlan:
    """The content of a plan file that is made: its header, and a function that yields its flows from the first one."""

    header: dict[str, Any]
    flows: Callable[[], Iterator[Flow]]


def write_plan(plan: FlowSource, path: Path, force: bool = False) -> None:
    """Write a plan's file, under a temporary name until it is complete.

    Raises:
        UsageError: the file exists and ``force`` is not set, or it cannot be written.
    """
    refuse_existing(path, force)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(plan.header) + "\n")
            for start_ns, source, destination, size_bytes, after in plan.flows():
                dependency = ",".join(f"{number}+{delay_ns}" if delay_ns else f"{number}" for number, delay_ns in after)
                line = (start_ns, source or "-", destination or "-", size_bytes, dependency or "-")
                file.write("{}\t{}\t{}\t{}\t{}\n".format(*line))
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


class PlanFile:
    """A flow plan on disk; the constructor reads and checks its header, ``check`` and ``flows`` read its flows.

    Attributes:
        path: the file.
        header: its first line.
        version: its format version.
        duration_ns: length of the plan.
        iterations: equal parts of the lines, of which each is an iteration of a training job; 0: it has none.
        max_connections: most connections from a source to a destination at a time; 0: as the sender likes.
        sources: every address that flows are bound to; flow logs refer to them by index.
        destinations: ``host:port`` of every destination; flow logs refer to them by index.

    Raises:
        UsageError: the file cannot be read, is not a flow plan, or has a newer version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_header(self.path)
        self.version: int = self.header["version"]
        self.duration_ns = self._number("duration_ns")
        self.iterations = self._number("iterations") if self.version > 2 and "iterations" in self.header else 0
        self.max_connections = self._number("max_connections") if "max_connections" in self.header else 0
        self.sources = self._read_sources()
        self.destinations = self._read_destinations()
        self._check_transport()

    def check(self) -> PlanRequirements:
        """Read every line once, so that errors are found before the first flow is sent.

        Raises:
            UsageError: a line is wrong (the message names it), or the flows do not match the header's counts.
        """
        lines, number = self._lines(), 1
        needs = RequirementsCounter(self.header.get("transport", {}).get("pacing_bps", 0), self.duration_ns)
        for number, line in self._text():
            flow = lines.read(line, number)
            needs.add(
                flow.start_ns, flow.source, flow.destination, flow.size_bytes, [after for after, _ in flow.after]
            )  # fmt: skip
        flows, total = self._number("flows"), self._number("bytes")
        if (needs.flows, needs.bytes) != (flows, total):
            raise UsageError(
                f"{self.path} holds {counted(needs.flows, 'flow')} of {counted(needs.bytes, 'byte')}, but the header "
                f"says {flows} of {total}: it was cut short or edited (line {number} is its last); write it again"
            )
        if self.iterations and needs.lines % self.iterations:
            raise self._wrong(f"iterations {self.iterations} do not divide the {counted(needs.lines, 'line')}")
        return needs.needs()

    def flows(self) -> Iterator[Flow]:
        """Yield the flows in order of their starts; for speed, only values that could mislead a sender are checked.

        Raises:
            UsageError: a line is wrong; the message names file and line.
        """
        lines, latest_ns, new = self._lines(), 0, tuple.__new__
        sources, destinations = lines.sources, lines.destinations
        if self.version == 1:
            yield from (lines.read(line, number) for number, line in self._text())
            return
        for number, line in self._text():
            try:
                start, source, destination, size, dependency = line.split("\t")
                start_ns, size_bytes, is_valid = int(start), int(size), True
                after: tuple[tuple[int, int], ...] = ()
                if dependency != "-\n":
                    after = _predecessors(dependency)
                    is_valid = all(0 <= earlier < number - 2 and delay_ns >= 0 for earlier, delay_ns in after)
                flow = new(Flow, (start_ns, sources[source], destinations[destination], size_bytes, after))
                is_valid = is_valid and start_ns >= latest_ns and size_bytes >= 0
            except (ValueError, KeyError):
                is_valid = False
            if not is_valid:
                flow = lines.read(line, number)
                if flow.start_ns < latest_ns:
                    raise lines.wrong(number, f"start {flow.start_ns} is before the line above: sort by start")
            latest_ns = flow.start_ns
            yield flow

    def _lines(self) -> PlanLines:
        return PlanLines(self.path, self.version, self.duration_ns, self.sources, self.destinations)

    def _text(self) -> Iterator[tuple[int, str]]:
        """Yield the lines below the header with their numbers; bytes that are not UTF-8 invalidate their line only."""
        try:
            with self.path.open("r", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
                file.readline(MAX_HEADER_BYTES)
                yield from enumerate(file, start=2)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be read: {error_message(error)}") from error

    def _wrong(self, why: str) -> UsageError:
        return UsageError(f"{self.path} line 1: {why}")

    def _number(self, key: str) -> int:
        value = self.header.get(key)
        if not _is_whole(value, 0, MAX_INT64):
            raise self._wrong(f"{key} must be a whole number from 0 to {MAX_INT64}")
        return int(value)  # type: ignore[arg-type]

    def _read_destinations(self) -> list[str]:
        destinations = self.header.get("destinations")
        if not isinstance(destinations, list) or not destinations:
            raise self._wrong("destinations must be a list with at least one host:port")
        for destination in destinations:
            if not _is_word(destination) or parse_address(destination)[1] == 0:
                raise self._wrong(f"destination {destination!r} must be host:port with a port from 1")
        if len(set(destinations)) != len(destinations):
            raise self._wrong("destinations names one of them twice")
        return destinations

    def _read_sources(self) -> list[str]:
        sources = self.header.get("sources", [])
        if not isinstance(sources, list) or not all(_is_word(source) and source != "-" for source in sources):
            raise self._wrong("sources must be a list of addresses")
        if len(set(sources)) != len(sources):
            raise self._wrong("sources names one of them twice")
        return sources

    def _check_transport(self) -> None:
        transport = self.header.get("transport", {})
        if not isinstance(transport, dict):
            raise self._wrong("transport must be an object")
        problem = transport_problem(transport)
        if problem is not None:
            raise self._wrong(f"transport {problem[0]} {transport[problem[0]]!r} is not usable: it {problem[1]}")
        if self.header.get("load_counts", "payload") not in ("payload", "wire"):
            raise self._wrong("load_counts must be payload or wire")


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value.split()) == 1 and value == value.strip()
