"""Makes plans that replay the flows of an earlier run's log or of a packet capture, or the messages of a workload."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_file import MadePlan
from ringtap.core.flow_plan_format import MAX_INT64, VERSION, Flow, Operation
from ringtap.core.host_port import parse_address
from ringtap.core.sent_flow_log import NO_SOURCE, open_sent_log
from ringtap.core.units import counted
from ringtap.trafficgen.plans.common import NS, PlanOutline
from ringtap.trafficgen.plans.kind import DURATION, FROM, ITERATIONS, NODE, SCALE, TO, Option, TrafficKind
from ringtap.trafficgen.plans.kind import duration_ns as read_ns

_MS = 1_000_000
_Endpoints = tuple[str, int, str, int]
ReadSegments = Callable[[Path], Iterable[tuple[int, _Endpoints, int]]]
"""Reader of the TCP packets with payload of a capture, in its order: time in ns, source address and port, destination
address and port, payload in bytes."""
ReadOperations = Callable[[Path], Sequence[Operation]]
"""Reader of a workload without collectives: the operations of an iteration, each after those that it waits for."""


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


def _replayed(seen: SeenFlows, frame: PlanOutline, given: dict[str, Any], about: dict[str, Any]) -> MadePlan:
    """Return a plan of observed flows, sent from other sources and to other destinations.

    The destinations and sources of the frame replace the observed ones in order, repeatedly if there are fewer; empty:
    the observed ones. Without a duration, it is as long as the observation. A scaled size is at least 1 byte.
    """
    scale = given.get("scale", 1.0)
    if not 0 < scale <= 1e6:
        raise UsageError(f"scale {scale} is not usable: it must be above 0 and at most 1,000,000")
    to, by = list(frame.destinations) or list(seen.destinations), list(frame.sources) or list(seen.sources)
    duration_ns = frame.duration_ns or -(-seen.span_ns // _MS) * _MS

    def flows() -> Iterator[Flow]:
        """Yield the flows in order of their starts, up to the duration."""
        for start_ns, source, destination, size_bytes in seen.ordered():
            if start_ns >= duration_ns:
                return
            scaled_bytes = size_bytes if scale == 1 else max(1, round(size_bytes / scale))
            yield Flow(start_ns, by[source % len(by)], to[destination % len(to)], scaled_bytes)

    # The names that occur, without repetition
    used_to = list(dict.fromkeys(to[number % len(to)] for number in seen.destinations.values()))
    used_by = list(dict.fromkeys(by[number % len(by)] for number in seen.sources.values()))
    frame = replace(frame, duration_ns=duration_ns, destinations=used_to, sources=[name for name in used_by if name])
    count = total = 0
    for flow in flows():
        count, total = count + 1, total + flow.size_bytes
    if not count:
        raise UsageError("there is no flow to replay in the requested time")
    frame.check()
    return MadePlan(frame.header("replay", count, total, scale=scale, **about), flows)


def read_sent_log(path: Path) -> SeenFlows:
    """Read the flows of a sender's log, each with its actual start time; flows that never started are left out.

    Open-ended flows get the size that they reached.

    Raises:
        UsageError: the file cannot be read, is not a sender's log, or is damaged.
    """
    log, seen = open_sent_log(path), SeenFlows()
    for flow in log.flows():
        if not flow.start_ns:
            continue
        start_ns, size_bytes = flow.start_ns - log.origin_ns, flow.size_bytes or flow.sent_bytes
        if not 0 <= start_ns <= MAX_INT64 // 4 or size_bytes < 1:
            raise UsageError(f"{path} is damaged: flow {flow.flow} does not fit its header")
        source = "" if flow.source == NO_SOURCE else log.sources[flow.source]
        seen.add(start_ns, *seen.numbers(source, log.destinations[flow.destination]), size_bytes)
        seen.span_ns = max(seen.span_ns, flow.finish_ns - log.origin_ns)
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
        for flow in self._open.values():
            self._end(flow)

    def _end(self, flow: list[int]) -> None:
        start_ns, _, size_bytes, by, to = flow
        self._seen.add(start_ns, by, to, size_bytes)


_GAP_NS = 100 * _MS


def _replay(given: dict[str, Any], frame: PlanOutline) -> MadePlan:
    path = given["replay"]
    if path.suffix == ".rec":
        if "gap" in given:
            raise UsageError("--gap is for captures: a log says where flows end")
        return _replayed(read_sent_log(path), frame, given, {"replay": path.name})
    if not frame.destinations:
        raise UsageError(
            "a replay of a capture needs --to HOST:PORT: nothing is sent to hosts that are only in a capture"
        )
    gap_ns = given.get("gap", _GAP_NS)
    # Sockets of this host cannot bind to sources of the capture
    frame = replace(frame, sources=frame.sources or [""])
    seen = read_capture(path, gap_ns, given["read_segments"])
    return _replayed(seen, frame, given, {"replay": path.name, "gap_ns": gap_ns})


REPLAY = TrafficKind(
    "replay",
    _replay,
    (Option("replay", "FILE", "replay: a sender's log (.rec) or a capture", Path),),
    (
        *(TO, FROM, DURATION, SCALE),
        Option("gap", "TIME", "replay of a capture: a pause that ends a flow (default 100ms)", read_ns),
    ),
    finds_receivers=True,
)

_LIMIT_NS = 86_400 * NS
# A job's connection carries a message while the receipt of the one before is still being told
_CONNECTIONS = 2


def _workload(given: dict[str, Any], frame: PlanOutline) -> MadePlan:
    """Return iterations of a training job: what each rank computes, as time, and the messages that it sends.

    The destinations are the ranks, in order. After the duration, by default a day, nothing is sent.
    """
    if len(given["from"]) > 1:
        raise UsageError("--from names the workload's directory once")
    path, iterations = Path(given["from"][0]), given["iterations"]
    operations: Sequence[Operation] = given["read_operations"](path)
    workload, nodes = path.resolve().name, list(frame.destinations)
    ranks = 1 + max((max(one.rank, one.peer) for one in operations), default=-1)
    if ranks != len(nodes):
        raise UsageError(
            f"{workload} has {counted(ranks, 'rank')}, servers and switches among them, but "
            f"{counted(len(nodes), 'node')}: give --node ADDRESS:PORT for each rank, in order"
        )
    if iterations < 1:
        raise UsageError(f"--iterations {iterations} is below 1")
    frame = replace(frame, duration_ns=frame.duration_ns or _LIMIT_NS)
    frame.check()
    hosts = [parse_address(node)[0] for node in nodes]

    def flows() -> Iterator[Flow]:
        """Yield the flows and computations, iteration by iteration; only what they wait for gives them a time."""
        count = len(operations)
        for first in range(0, count * iterations, count):
            for number, (rank, peer, size_bytes, after) in enumerate(operations):
                earlier = tuple(
                    (first + other - (count if other >= number else 0), delay_ns)
                    for other, delay_ns in after
                    if first or other < number
                )
                yield Flow(0, hosts[rank], nodes[peer] if peer >= 0 else "", size_bytes, earlier)

    sizes = [one.size_bytes for one in operations if one.peer >= 0]
    about = {"version": VERSION, "workload": workload, "iterations": iterations, "nodes": nodes}
    about["max_connections"] = _CONNECTIONS
    return MadePlan(frame.header("workload", len(sizes) * iterations, sum(sizes) * iterations, **about), flows)


WORKLOAD = TrafficKind("workload", _workload, (FROM, NODE, ITERATIONS), (DURATION,))
