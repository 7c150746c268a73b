"""Reads, checks and writes flow plan files as streams (`ringtap.core.flow_plan_format` has the format)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import islice, repeat
from operator import le
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ringtap.core.errors import UsageError, file_errors
from ringtap.core.flow_plan_format import (
    COLUMNS,
    FORMAT,
    MAX_FLOW_BYTES,
    MAX_HEADER_BYTES,
    MAX_INT64,
    VERSION,
    Flow,
    transport_problem,
)
from ringtap.core.host_port import parse_address
from ringtap.core.json_validation import NewerFormatError
from ringtap.core.units import counted
from ringtap.core.untrusted_files import open_regular, refuse_existing

_MAX_DIGITS = len(str(MAX_INT64))
_WAIT = rf"[0-9]{{1,{_MAX_DIGITS}}}(?:\+[0-9]{{1,{_MAX_DIGITS}}})?"
_AFTER = {2: re.compile(rf"{_WAIT}\n"), 3: re.compile(rf"{_WAIT}(?:,{_WAIT})*\n")}  # by version
_BLOCK_BYTES = 1 << 15
_new_flow = tuple.__new__  # twice as fast as the constructor


class PlanFile:
    """A flow plan on disk; the constructor reads and checks its header, ``flows`` its lines.

    Attributes:
        path: the file.
        header: its first line.
        version: its format version.
        kind: kind of traffic.
        duration_ns: length of the plan.
        iterations: equal parts of the lines, of which each is an iteration of a training job; 0: it has none.
        max_connections: most connections from a source to a destination at a time; 0: as the sender likes.
        sources: every address that flows are bound to; flow logs refer to them by index.
        destinations: ``host:port`` of every destination; flow logs refer to them by index.

    Raises:
        UsageError: the file cannot be read, is not a flow plan, has a newer version, or its header is wrong.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = self._read_header()
        self.version: int = self.header["version"]
        self.kind: str = self.header.get("kind", "plan")
        if not isinstance(self.kind, str):
            raise self.wrong(1, "kind must be a text")
        self.duration_ns = self._number("duration_ns", least=1)
        self.iterations = self._number("iterations") if self.version > 2 and "iterations" in self.header else 0
        self.max_connections = self._number("max_connections") if "max_connections" in self.header else 0
        self.sources = self._read_sources()
        self.destinations = self._read_destinations()
        self._counts = self._number("flows"), self._number("bytes")
        self._check_transport()

    def flows(self) -> Iterator[Flow]:
        """Yield the lines in order of their starts.

        Raises:
            UsageError: a line is wrong (the message names it), or the lines do not match the header's counts.
        """
        for columns in self.columns():
            yield from map(_new_flow, repeat(Flow), zip(*columns, strict=True))

    def columns(self) -> Iterator[FlowColumns]:
        """Yield the columns of some thousand lines at a time, likewise."""
        lines = _Lines(self)
        count = flows = total_bytes = latest_ns = 0
        for block in self._blocks():
            columns = lines.plain(block, latest_ns) or lines.checked(block, latest_ns, count)
            yield columns
            latest_ns = columns.start_ns[-1]
            count += len(block)
            flows += len(block) - columns.destination.count("")
            total_bytes += sum(columns.size_bytes)
        counts, stated = (flows, total_bytes), self._counts
        if counts != stated:
            raise UsageError(
                f"{self.path} holds {counted(flows, 'flow')} of {counted(total_bytes, 'byte')}, but flows and bytes "
                f"in line 1 say {stated[0]} of {stated[1]}: it was cut short or edited (line {count + 1} is its "
                "last); write it again"
            )
        if self.iterations and count % self.iterations:
            raise self.wrong(1, f"iterations {self.iterations} do not divide the {counted(count, 'line')}")

    def wrong(self, number: int, why: str) -> UsageError:
        """Return the error of a line, by its number in the file."""
        return UsageError(f"{self.path} line {number}: {why}")

    def _blocks(self) -> Iterator[list[str]]:
        """Yield the lines below the header, many at a time; bytes that are not UTF-8 invalidate their line only."""
        with (
            file_errors(self.path),
            open_regular(self.path) as file,
            TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="\n") as text,
        ):
            text.readline(MAX_HEADER_BYTES)
            while block := text.readlines(_BLOCK_BYTES):
                yield block

    def _read_header(self) -> dict[str, Any]:
        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for name, value in pairs:
                if name in found:
                    raise self.wrong(1, f"the header names {name!r} twice")
                found[name] = value
            return found

        with file_errors(self.path), open_regular(self.path) as file:
            line = file.readline(MAX_HEADER_BYTES)
        try:
            header = json.loads(line, object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{self.path} is not a flow plan: line 1 is not JSON") from error
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise UsageError(f"{self.path} is not a flow plan: line 1 does not say format {FORMAT!r}")
        version = header.get("version")
        if type(version) is not int or version < 1:
            raise self.wrong(1, f"version must be a whole number from 1 to {VERSION}")
        if version > VERSION:
            raise NewerFormatError(self.path, header.get("ringtap"), version, VERSION)
        return header

    def _number(self, key: str, least: int = 0) -> int:
        value = self.header.get(key)
        if type(value) is not int or not least <= value <= MAX_INT64:
            raise self.wrong(1, f"{key} must be a whole number from {least} to {MAX_INT64}")
        return value

    def _read_destinations(self) -> list[str]:
        destinations = self.header.get("destinations")
        if not isinstance(destinations, list) or not destinations:
            raise self.wrong(1, "destinations must be a list with at least one host:port")
        for destination in destinations:
            if not _is_destination(destination):
                raise self.wrong(1, f"destination {destination!r} must be host:port with a port from 1")
        if len(set(destinations)) != len(destinations):
            raise self.wrong(1, "destinations names one of them twice")
        return destinations

    def _read_sources(self) -> list[str]:
        sources = self.header.get("sources", [])
        if not isinstance(sources, list) or not all(_is_word(source) and source != "-" for source in sources):
            raise self.wrong(1, "sources must be a list of addresses")
        if len(set(sources)) != len(sources):
            raise self.wrong(1, "sources names one of them twice")
        return sources

    def _check_transport(self) -> None:
        transport = self.header.get("transport", {})
        if not isinstance(transport, dict):
            raise self.wrong(1, "transport must be an object")
        problem = transport_problem(transport)
        if problem is not None:
            raise self.wrong(1, f"transport {problem[0]} {transport[problem[0]]!r} is not usable: it {problem[1]}")
        if self.header.get("load_counts", "payload") not in ("payload", "wire"):
            raise self.wrong(1, "load_counts must be payload or wire")


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value.split()) == 1 and value == value.strip()


def _is_destination(value: object) -> bool:
    try:
        return isinstance(value, str) and _is_word(value) and parse_address(value)[1] > 0
    except UsageError:
        return False


class FlowColumns(NamedTuple):
    """Lines of a plan by columns, each as in `ringtap.core.flow_plan_format.Flow`."""

    start_ns: list[int]
    source: list[str]
    destination: list[str]
    size_bytes: list[int]
    after: list[tuple[tuple[int, int], ...]]


class _Lines:
    """Checks the lines of a plan; each depends on those before it.

    Attributes:
        sources: the address by the word in its column; one object for all lines.
        destinations: likewise.
    """

    def __init__(self, plan: PlanFile) -> None:
        self._plan, self._version = plan, plan.version
        self.sources = {"-": ""} | {name: name for name in plan.sources}
        self.destinations = {name: name for name in plan.destinations} | ({"-": ""} if plan.version > 2 else {})
        self._endless: set[int] = set()

    def plain(self, block: Sequence[str], latest_ns: int) -> FlowColumns | None:
        """Return the columns of lines that are right, and of which none waits for another, is endless or a computation.

        Each step is one call for all lines: this takes a third of the time of `checked`, which tells what is wrong.
        """
        columns = [] if self._version == 1 else "".join(block).replace("\n", "\n\t").split("\t")
        if len(columns) != 5 * len(block) + 1 or columns[4::5].count("-\n") != len(block):
            return None
        starts, sizes = columns[:-1:5], columns[3::5]
        digits = "".join(starts) + "".join(sizes)
        if not (digits.isascii() and digits.isdigit() and max(map(len, starts + sizes)) <= _MAX_DIGITS):
            return None
        try:
            start_ns, size_bytes = list(map(int, starts)), list(map(int, sizes))
            source = list(map(self.sources.__getitem__, columns[1::5]))
            destination = list(map(self.destinations.__getitem__, columns[2::5]))
        except (ValueError, KeyError):
            return None
        is_sorted = latest_ns <= start_ns[0] and all(map(le, start_ns, islice(start_ns, 1, None)))
        if not (is_sorted and start_ns[-1] < self._plan.duration_ns and all(destination)):
            return None
        if not 0 < min(size_bytes) <= max(size_bytes) <= MAX_FLOW_BYTES:
            return None
        return FlowColumns(start_ns, source, destination, size_bytes, [()] * len(block))

    def checked(self, block: Sequence[str], latest_ns: int, count: int) -> FlowColumns:
        """Return the columns of lines, each checked by itself.

        Args:
            block: the lines.
            latest_ns: start of the line before them.
            count: number of lines before them.

        Raises:
            UsageError: one is wrong; the message names file, line and column.
        """
        is_first_version, end_ns = self._version == 1, self._plan.duration_ns
        sources, destinations = self.sources, self.destinations
        rows = []
        for number, line in enumerate(block, count):
            try:
                if is_first_version:
                    start, to, size = line[:-1].split("\t")
                    from_, dependency = "-", f"-{line[-1:]}"
                else:
                    start, from_, to, size, dependency = line.split("\t")
                source, destination, digits = sources[from_], destinations[to], start + size
                # int() takes signs, blanks and other scripts' digits, too
                if not (digits.isascii() and digits.isdigit() and len(start) <= _MAX_DIGITS >= len(size)):
                    raise ValueError(line)
                start_ns, size_bytes = int(start), int(size)
                after = () if dependency == "-\n" else self.predecessors(dependency)
            except (ValueError, KeyError) as error:
                raise self.explained(number, line) from error
            flow = _new_flow(Flow, (start_ns, source, destination, size_bytes, after))
            if after or not (latest_ns <= start_ns < end_ns and 0 < size_bytes <= MAX_FLOW_BYTES and destination):
                self.check(number, flow, latest_ns)
            rows.append(flow)
            latest_ns = start_ns
        return FlowColumns(*map(list, zip(*rows, strict=True)))

    def predecessors(self, text: str) -> tuple[tuple[int, int], ...]:
        """Parse the column ``after`` of a line that waits for others, with its newline.

        Raises:
            ValueError: it is wrong.
        """
        if not _AFTER[self._version].fullmatch(text):
            raise ValueError(text)
        found = (each.partition("+") for each in text.split(","))
        return tuple((int(number), int(delay or 0)) for number, _, delay in found)

    def check(self, count: int, flow: Flow, latest_ns: int) -> None:
        """Check the values of a line.

        Args:
            count: number of lines before it.
            flow: the line.
            latest_ns: start of the line before it.

        Raises:
            UsageError: one is wrong; the message names file, line and column.
        """
        start_ns, _, destination, size_bytes, after = flow
        if start_ns < latest_ns:
            raise self._wrong(count, f"start_ns {start_ns} is before the line above: sort by start_ns")
        if start_ns >= self._plan.duration_ns:
            raise self._wrong(count, f"start_ns {start_ns} is not before the plan's end at {self._plan.duration_ns} ns")
        if size_bytes > MAX_FLOW_BYTES:
            raise self._wrong(count, f"size_bytes is too large: a flow has at most {MAX_FLOW_BYTES} bytes")
        for earlier, delay_ns in after:
            if start_ns + delay_ns > MAX_INT64:
                raise self._wrong(count, f"the delay of after is too large: times go up to {MAX_INT64}")
            if earlier >= count:
                raise self._wrong(count, f"after {earlier} is not an earlier flow: this is flow {count}")
            if earlier in self._endless:
                raise self._wrong(count, f"after {earlier} names a flow of size 0, which never completes")
        if destination and not size_bytes:
            if self._version == 1:
                raise self._wrong(count, "size_bytes is 0: a flow has at least 1 byte")
            self._endless.add(count)
        if size_bytes and not destination:
            raise self._wrong(count, f"size_bytes is {size_bytes}, but a computation sends nothing: write 0")

    def _wrong(self, count: int, why: str) -> UsageError:
        return self._plan.wrong(count + 2, why)

    def explained(self, count: int, line: str) -> UsageError:
        """Return the error of a line that cannot be parsed, with the first column that is wrong."""
        columns, names = line.rstrip("\n").split("\t"), COLUMNS[self._version]
        if len(columns) != len(names) or not line.endswith("\n"):
            number = {3: "three", 5: "five"}[len(names)]
            return self._wrong(count, f"a flow is {number} columns with a tab between: {', '.join(names)}")
        named = dict(zip(names, columns, strict=True))
        dependency = named.pop("after", "-")
        numbers = [("start_ns", named["start_ns"]), ("size_bytes", named["size_bytes"])]
        for each in () if dependency == "-" else dependency.split(",") if self._version > 2 else (dependency,):
            after, plus, delay = each.partition("+")
            numbers += [("after", after), *([("the delay of after", delay)] if plus else [])]
        for name, text in numbers:
            if not (text.isascii() and text.isdigit()):
                return self._wrong(count, f"{name} {text[:40]!r} is not a whole number of 0 or more")
            if len(text) > _MAX_DIGITS:
                return self._wrong(count, f"{name} {text[:40]!r} is too large")
        name = "destination" if named.get("source", "-") in self.sources else "source"
        if not named[name]:
            return self._wrong(count, f"{name} is empty")
        return self._wrong(count, f"{name} {named[name][:80]!r} is not among the header's {name}s")


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
