"""Plans that replay observed flows, from an earlier run's log or from a packet capture."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_format import MAX_INT64, Flow
from ringtap.core.records import open_records
from ringtap.trafficgen.plans.common import PlanOutline
from ringtap.trafficgen.plans.kind import DURATION, FROM, SCALE, TO, Option, TrafficKind, duration_ns

_MS = 1_000_000
_Endpoints = tuple[str, int, str, int]
ReadSegments = Callable[[Path], Iterable[tuple[int, _Endpoints, int]]]
"""Reader of the TCP packets with payload of a capture, in its order: time in ns, source address and port, destination
address and port, payload in bytes."""


class SeenFlows:
    """Observed flows in memory, 24 bytes each: start, size, and numbers for source and destination.

    Attributes:
        sources: number of each source by name, ascending; an empty name: unbound.
        destinations: number of each destination by name, ascending.
        span_ns: time from the origin to the end of the last flow, as far as it is known.
    """

    def __init__(self) -> None:
        self.sources: dict[str, int] = {}
        self.destinations: dict[str, int] = {}
        self.span_ns = 0
        self._starts_ns, self._sizes = array("q"), array("q")
        self._by, self._to = array("I"), array("I")

    def __len__(self) -> int:
        return len(self._starts_ns)

    def numbers(self, source: str, destination: str) -> tuple[int, int]:
        """Return the numbers of two names; a new name gets a new number."""
        by = self.sources.setdefault(source, len(self.sources))
        return by, self.destinations.setdefault(destination, len(self.destinations))

    def add(self, start_ns: int, by: int, to: int, size_bytes: int) -> None:
        """Add one flow; its source and destination are given by number."""
        self._starts_ns.append(start_ns)
        self._sizes.append(size_bytes)
        self._by.append(by)
        self._to.append(to)
        self.span_ns = max(self.span_ns, start_ns + 1)

    def ordered(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield start, source number, destination number and size of each flow, in order of the starts."""
        for index in sorted(range(len(self)), key=self._starts_ns.__getitem__):
            yield self._starts_ns[index], self._by[index], self._to[index], self._sizes[index]


class ReplayPlan:
    """Observed flows, sent from other sources and to other destinations.

    Args:
        kind: the plan's kind in the header.
        seen: the flows.
        frame: the destinations and sources that replace the observed ones in order, repeatedly if there are fewer;
            empty: the observed ones. A duration of 0: as long as the observation.
        scale: divisor of the sizes; a size is at least 1 byte.
        about: further header keys.

    Attributes:
        header: the plan's first line.

    Raises:
        UsageError: no flow was observed in the requested time, or a plan cannot contain the addresses.
    """

    def __init__(self, kind: str, seen: SeenFlows, frame: PlanOutline, scale: float, about: dict[str, Any]) -> None:
        if not 0 < scale <= 1e6:
            raise UsageError(f"scale {scale} is not usable: it must be above 0 and at most 1,000,000")
        self._to = list(frame.destinations) or list(seen.destinations)
        self._by = list(frame.sources) or list(seen.sources)
        duration_ns = frame.duration_ns or -(-seen.span_ns // _MS) * _MS
        # The names that occur, without repetition
        to = list(dict.fromkeys(self._to[number % len(self._to)] for number in seen.destinations.values()))
        by = list(dict.fromkeys(self._by[number % len(self._by)] for number in seen.sources.values()))
        frame = replace(frame, duration_ns=duration_ns, destinations=to, sources=[name for name in by if name])
        self._seen, self._duration_ns, self._scale = seen, duration_ns, scale
        flows = total = 0
        for flow in self.flows():
            flows, total = flows + 1, total + flow.size_bytes
        if not flows:
            raise UsageError("there is no flow to replay in the requested time")
        frame.check()
        self.header = frame.header(kind, flows, total, scale=scale, **about)

    def flows(self) -> Iterator[Flow]:
        """Yield the flows in order of their starts, up to the duration."""
        to, by, scale = self._to, self._by, self._scale
        for start_ns, source, destination, size_bytes in self._seen.ordered():
            if start_ns >= self._duration_ns:
                return
            scaled_bytes = size_bytes if scale == 1 else max(1, round(size_bytes / scale))
            yield Flow(start_ns, by[source % len(by)], to[destination % len(to)], scaled_bytes)


def read_sent_log(path: Path) -> SeenFlows:
    """Read the flows of a sender's log, each with its actual start time; flows that never started are left out.

    Open-ended flows get the size that they reached.

    Raises:
        UsageError: the file cannot be read, is not a sender's log, or is damaged.
    """
    try:
        log = open_records(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    about = log.about if isinstance(log.about, dict) else {}
    names, origin_ns = [field.name for field in log.fields], about.get("origin_ns")
    wanted = ("start_ns", "finish_ns", "size_bytes", "sent_bytes", "destination")
    destinations, sources = about.get("destinations"), about.get("sources", [])
    if not (isinstance(destinations, list) and isinstance(sources, list) and isinstance(origin_ns, int)):
        raise UsageError(f"{path} is not a log of 'ringtap traffic send'")
    if about.get("source") != "sender" or not {*wanted} <= {*names}:
        raise UsageError(f"{path} is not a log of 'ringtap traffic send'")
    start, finish, size, sent, to = (names.index(name) for name in wanted)
    by = names.index("source") if "source" in names else None
    seen = SeenFlows()
    for record in log.walk():
        if not record[start]:
            continue
        source = "" if by is None or record[by] >= len(sources) else str(sources[record[by]])
        size_bytes = record[size] or record[sent]
        if not 0 <= record[start] - origin_ns <= MAX_INT64 // 4 or record[to] >= len(destinations) or size_bytes < 1:
            raise UsageError(f"{path} is damaged: flow {record[0]} does not fit its header")
        seen.add(record[start] - origin_ns, *seen.numbers(source, str(destinations[record[to]])), size_bytes)
        seen.span_ns = max(seen.span_ns, record[finish] - origin_ns)
    return seen


def read_capture(path: Path, gap_ns: int, read_segments: ReadSegments) -> SeenFlows:
    """Read the flows of a packet capture: each direction of a TCP connection, split at long pauses.

    Retransmitted bytes count again, since the network carried them. Sources and destinations are addresses without
    ports, because the port of one side differs for every connection.

    Args:
        path: a capture.
        gap_ns: longest pause within a flow.
        read_segments: reader of the capture.

    Raises:
        UsageError: the file is not a capture, or is damaged.
        MeasurementError: the capture ends within a packet.
    """
    seen, origin_ns = SeenFlows(), None
    open_flows = _OpenFlows(seen, gap_ns)
    for captured_ns, endpoints, payload_bytes in read_segments(path):
        origin_ns = captured_ns if origin_ns is None else origin_ns
        # Cores that capture in parallel put some packets slightly out of order
        time_ns = max(0, captured_ns - origin_ns)
        open_flows.add(endpoints, time_ns, payload_bytes)
        seen.span_ns = max(seen.span_ns, time_ns + 1)
    open_flows.close()
    return seen


class _OpenFlows:
    """Flows that may continue, each as start, last time, bytes, and the numbers of source and destination."""

    def __init__(self, seen: SeenFlows, gap_ns: int) -> None:
        self._seen, self._gap_ns = seen, gap_ns
        self._open: dict[_Endpoints, list[int]] = {}

    def add(self, endpoints: _Endpoints, time_ns: int, payload_bytes: int) -> None:
        """Add a segment to the open flow of its direction, or begin a new flow."""
        flow = self._open.get(endpoints)
        if flow is not None and time_ns - flow[1] <= self._gap_ns:
            flow[1] = max(flow[1], time_ns)
            flow[2] += payload_bytes
            return
        if flow is not None:
            self._end(flow)
        numbers = self._seen.numbers(endpoints[0], endpoints[2])
        self._open[endpoints] = [time_ns, time_ns, payload_bytes, *numbers]

    def close(self) -> None:
        """End every flow."""
        for flow in self._open.values():
            self._end(flow)

    def _end(self, flow: list[int]) -> None:
        start_ns, _, size_bytes, by, to = flow
        self._seen.add(start_ns, by, to, size_bytes)


_GAP_NS = 100 * _MS


def _replay(given: dict[str, Any], frame: PlanOutline) -> ReplayPlan:
    path = given["replay"]
    if path.suffix == ".rec":
        if "gap" in given:
            raise UsageError("--gap is for captures: a log says where flows end")
        return ReplayPlan("replay", read_sent_log(path), frame, given.get("scale", 1.0), {"replay": path.name})
    if not frame.destinations:
        raise UsageError(
            "a replay of a capture needs --to HOST:PORT: nothing is sent to hosts that are only in a capture"
        )
    gap_ns = given.get("gap", _GAP_NS)
    about = {"replay": path.name, "gap_ns": gap_ns}
    # Sockets of this host cannot bind to sources of the capture
    frame = replace(frame, sources=frame.sources or [""])
    return ReplayPlan(
        "replay", read_capture(path, gap_ns, given["read_segments"]), frame, given.get("scale", 1.0), about
    )


REPLAY = TrafficKind(
    "replay",
    _replay,
    (Option("replay", "FILE", "replay: a sender's log (.rec) or a capture", Path),),
    (
        *(TO, FROM, DURATION, SCALE),
        Option("gap", "TIME", "replay of a capture: a pause that ends a flow (default 100ms)", duration_ns),
    ),
    finds_receivers=True,
)
