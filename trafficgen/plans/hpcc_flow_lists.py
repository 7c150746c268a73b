"""Reads and writes HPCC's flow lists (traffic_gen): a count, then one line ``src dst 3 dport bytes start_s`` per flow.

HPCC's simulation reads as many flows as the count says, so that what follows may be a comment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_file import FlowSource
from ringtap.core.flow_plan_format import FLOW_LIST_COLUMNS, MAX_INT64, Flow, flow_list_line
from ringtap.core.host_port import parse_address
from ringtap.core.units import counted
from ringtap.core.untrusted_files import new_file
from ringtap.trafficgen.plans.common import NS, PlanOutline
from ringtap.trafficgen.plans.kind import DURATION, NODE, Option, TrafficKind

_UNLISTABLE = ("long-lived", "ring", "workload")
_MS = 1_000_000
_MAX_COUNT_LENGTH = 40
_SECONDS = re.compile(r"[0-9]{1,20}(?:\.[0-9]{0,30})?(?:[eE][+-]?[0-9]{1,2})?")


class FlowListPlan:
    """The flows of an HPCC list, whose nodes are numbered from 0; the list is streamed and may have any length.

    Args:
        path: the list.
        frame: the nodes as sources and destinations; a duration of 0: to the end of the millisecond of the last start.
        nodes: ``host:port`` by node number; each node also sends from its host.

    Attributes:
        header: the plan's first line.

    Raises:
        UsageError: the list cannot be read or a line is wrong (the message names it).
    """

    def __init__(self, path: Path, frame: PlanOutline, nodes: Sequence[str]) -> None:
        self._path, self._nodes = path, list(nodes)
        self._hosts = [parse_address(node)[0] for node in nodes]
        self._duration_ns = frame.duration_ns or MAX_INT64
        self._unread_lines = flows = total = last_ns = 0
        for flow in self.flows():
            flows, total, last_ns = flows + 1, total + flow.size_bytes, flow.start_ns
        unread = self._unread_lines
        if not flows:
            raise UsageError(f"{path} holds no flow that starts within the duration")
        self._duration_ns = frame.duration_ns or (last_ns // _MS + 1) * _MS
        frame = replace(frame, duration_ns=self._duration_ns)
        frame.check()
        about: dict[str, Any] = {"list": path.name, "nodes": self._nodes} | ({"unread_lines": unread} if unread else {})
        self.header = frame.header("list", flows, total, **about)

    def flows(self) -> Iterator[Flow]:
        """Yield the flows in order of their starts, up to the duration."""
        latest_ns = number = 0
        try:
            with self._path.open("r", encoding="ascii") as file:
                count = self._count(file.readline(_MAX_COUNT_LENGTH))
                for number, line in enumerate(islice(file, count), start=1):
                    flow = self._parse(line, number)
                    if flow.start_ns < latest_ns:
                        raise self._wrong(number, "its start is before the line above: sort by start")
                    latest_ns = flow.start_ns
                    if flow.start_ns < self._duration_ns:
                        yield flow
                self._unread_lines = sum(not line.isspace() for line in file)
        except OSError as error:
            raise UsageError(f"{self._path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{self._path} cannot be read: it is not text") from error
        if number < count:
            raise self._wrong(
                0, f"it says {counted(count, 'flow')}, and {number} follow: cut short, or the count is wrong"
            )

    def _count(self, line: str) -> int:
        text = line.strip()
        if not (text.isdigit() and len(text) <= 12):
            raise self._wrong(0, f"it must hold the number of flows, not {text!r}")
        return int(text)

    def _parse(self, line: str, number: int) -> Flow:
        columns = line.split()
        if len(columns) != len(FLOW_LIST_COLUMNS) or not line.endswith("\n"):
            raise self._wrong(number, f"a flow is six columns and a newline: {' '.join(FLOW_LIST_COLUMNS)}")
        for name, text in zip(FLOW_LIST_COLUMNS[:-1], columns, strict=False):
            if not (text.isdigit() and len(text) < 20 and int(text) <= MAX_INT64):
                raise self._wrong(number, f"{name} {text[:40]!r} is not a whole number from 0 to {MAX_INT64}")
        source, destination, size_bytes = int(columns[0]), int(columns[1]), int(columns[4])
        if max(source, destination) >= len(self._nodes):
            raise self._wrong(
                number, f"node {max(source, destination)} has no address: give --node for nodes 0, 1, ..."
            )
        if source == destination:
            raise self._wrong(number, f"node {source} would send to itself")
        if size_bytes < 1:
            raise self._wrong(number, "bytes is 0: a flow has at least 1 byte")
        return Flow(self._start(columns[5], number), self._hosts[source], self._nodes[destination], size_bytes)

    def _start(self, text: str, number: int) -> int:
        """Return the start in ns; decimal arithmetic keeps 9 digits after the point exactly."""
        if not _SECONDS.fullmatch(text):
            raise self._wrong(number, f"start_s {text[:40]!r} is not a number of seconds of 0 or more")
        start_ns = Decimal(text) * NS
        if start_ns >= MAX_INT64 // 4:
            raise self._wrong(number, f"start_s {text[:40]!r} is too large")
        return round(start_ns)

    def _wrong(self, number: int, why: str) -> UsageError:
        return UsageError(f"{self._path} line {number + 1}: {why}")


def write_list(plan: FlowSource, path: Path, force: bool = False) -> dict[str, int]:
    """Write a plan's flows as an HPCC list, with starts to the nanosecond; return the node number of each address.

    A plan that lists nodes keeps their order. Otherwise sources come first (one number for all unbound ones), then
    destinations.

    Raises:
        UsageError: the plan has flows that a list cannot hold, or the file cannot be written.
    """
    header = plan.header
    if header["kind"] in _UNLISTABLE:
        raise UsageError(
            f"a flow list cannot hold a plan of kind {header['kind']}: flows wait for others or have no end"
        )
    nodes: list[str] = header.get("nodes", [])
    hosts = [parse_address(node)[0] for node in nodes]
    if len(set(hosts)) != len(hosts):
        raise UsageError("two nodes share an address: a flow list could not say which of them sends")
    sources = {host: number for number, host in enumerate(hosts or header["sources"] or [""])}
    first = 0 if nodes else len(sources)
    destinations = {name: number for number, name in enumerate(nodes or header["destinations"], first)}
    with new_file(path, force) as file:
        file.write(f"{header['flows']}\n")
        for flow in plan.flows():
            pair, port = (sources[flow.source], destinations[flow.destination]), parse_address(flow.destination)[1]
            file.write(flow_list_line(*pair, port, flow.size_bytes, flow.start_ns) + "\n")
    return {name or "unbound": number for name, number in (sources | destinations).items()}


LIST = TrafficKind(
    "list",
    lambda given, frame: FlowListPlan(given["list"], frame, given["node"]),
    (Option("list", "FILE", "list: an HPCC flow list", Path), NODE),
    (DURATION,),
)
