"""Flow plan files: a line of JSON, then a flow a line; written and read as a stream (docs/traffic-plans.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from ringtap.errors import UsageError
from ringtap.trafficgen.flow import FORMAT, MOST, VERSION, Flow
from ringtap.trafficgen.planlines import PlanLines
from ringtap.trafficgen.planneeds import NeedsTally, PlanNeeds
from ringtap.trafficgen.protocol import parse_address
from ringtap.units import counted

_LONGEST_HEADER = 2**24
_LARGEST_DSCP = 63


class Plan(Protocol):
    """What can be written as a plan file: a header that counts the flows, and the flows, walked any number of times."""

    @property
    def header(self) -> dict[str, Any]:
        """The file's first line."""

    def flows(self) -> Iterator[Flow]:
        """The flows in order of their starts."""


def write_plan(plan: Plan, path: Path, force: bool = False) -> None:
    """Write a plan's file, under a temporary name until it is whole.

    Raises:
        UsageError: the file exists and ``force`` is not set, or it cannot be written.
    """
    if path.exists() and not force:
        raise UsageError(f"{path} exists: name another file or add --force")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(plan.header) + "\n")
            for start_ns, source, destination, size_bytes, after, delay_ns in plan.flows():
                waits = "-" if after < 0 else f"{after}+{delay_ns}" if delay_ns else after
                file.write(f"{start_ns}\t{source or '-'}\t{destination}\t{size_bytes}\t{waits}\n")
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


class PlanFile:
    """A flow plan on disk. Its header is read and checked at once, its flows by ``check`` and ``flows``.

    Attributes:
        path: the file.
        header: its first line.
        version: its format version, 1 or 2.
        duration_ns: length of the plan.
        sources: every address that flows are bound to; flow logs refer to them by index.
        destinations: ``host:port`` of every destination, likewise.

    Raises:
        UsageError: it cannot be read, is no flow plan, or is one of a newer version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = self._read_header()
        self.version: int = self.header["version"]
        self.duration_ns = self._number("duration_ns")
        self.sources = self._read_sources()
        self.destinations = self._read_destinations()
        self._check_transport()

    def check(self) -> PlanNeeds:
        """Read every line once, so that a bad one is found before the first flow is sent.

        Raises:
            UsageError: a line is wrong (the message names it), or the file does not hold what its header says.
        """
        lines, number = self._lines(), 1
        needs = NeedsTally(self.header.get("transport", {}).get("pacing_bps", 0), self.duration_ns)
        for number, line in self._text():
            flow = lines.read(line, number)
            needs.add(flow.start_ns, flow.source, flow.destination, flow.size_bytes, flow.after)
        asked = (self._number("flows"), self._number("bytes"))
        if (needs.flows, needs.bytes) != asked:
            raise UsageError(
                f"{self.path} holds {counted(needs.flows, 'flow')} of {counted(needs.bytes, 'byte')}, but the header "
                f"says {asked[0]} of {asked[1]}: it was cut short or edited (line {number} is its last); write it again"
            )
        return needs.needs()

    def flows(self) -> Iterator[Flow]:
        """The flows in order of their starts, fast: only what could mislead a sender is looked at again.

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
                start, source, destination, size, waits = line.split("\t")
                start_ns, size_bytes, after, delay_ns = int(start), int(size), -1, 0
                if waits != "-\n":
                    number_text, _, delay = waits.partition("+")
                    after, delay_ns = int(number_text), int(delay or 0)
                flow = new(Flow, (start_ns, sources[source], destinations[destination], size_bytes, after, delay_ns))
                sound = start_ns >= latest_ns and size_bytes >= 0 and -1 <= after < number - 2 and delay_ns >= 0
            except (ValueError, KeyError):
                sound = False
            if not sound:
                flow = lines.read(line, number)
                if flow.start_ns < latest_ns:
                    raise lines.wrong(number, f"start {flow.start_ns} is before the line above: sort by start")
            latest_ns = flow.start_ns
            yield flow

    def _lines(self) -> PlanLines:
        return PlanLines(self.path, self.version, self.duration_ns, self.sources, self.destinations)

    def _text(self) -> Iterator[tuple[int, str]]:
        """The lines below the header with their numbers; bytes that are not UTF-8 make a line wrong, not the file."""
        try:
            with self.path.open("r", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
                file.readline(_LONGEST_HEADER)
                yield from enumerate(file, start=2)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be read: {error}") from error

    def _wrong(self, why: str) -> UsageError:
        return UsageError(f"{self.path} line 1: {why}")

    def _read_header(self) -> dict[str, Any]:
        try:
            with self.path.open("rb") as file:
                line = file.readline(_LONGEST_HEADER)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be read: {error.strerror}") from error
        try:
            header = json.loads(line, object_pairs_hook=self._object)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{self.path} is no flow plan: line 1 is not JSON") from error
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise UsageError(f"{self.path} is no flow plan: line 1 does not say format {FORMAT!r}")
        version = header.get("version")
        if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= VERSION:
            raise UsageError(f"{self.path} has plan format {version}; this ringtap reads 1 to {VERSION}: upgrade")
        return header

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise self._wrong(f"the header names {twice!r} twice")
        return dict(pairs)

    def _number(self, key: str) -> int:
        value = self.header.get(key)
        if not _is_whole(value, 0, MOST):
            raise self._wrong(f"{key} must be a whole number from 0 to {MOST}")
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
        valid: dict[str, Callable[[object], bool]] = {
            "congestion_control": _is_word,
            "dscp": lambda value: _is_whole(value, 0, _LARGEST_DSCP),
            "send_buffer_bytes": lambda value: _is_whole(value, 1, 2**31 - 1),
            "pacing_bps": lambda value: _is_whole(value, 1, MOST),
        }
        for name, value in transport.items():
            if name not in valid or not valid[name](value):
                raise self._wrong(f"transport {name} {value!r} is not usable: it may have {', '.join(valid)}")
        if self.header.get("load_counts", "payload") not in ("payload", "wire"):
            raise self._wrong("load_counts must be payload or wire")


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value.split()) == 1 and value == value.strip()
