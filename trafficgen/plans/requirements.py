"""What a plan will ask of the host that sends it, gathered in one walk over its flows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

_WINDOW_NS = 1_000_000
_BIN_NS = 100_000_000
_NS = 1_000_000_000
_FIRST, _FOLLOWED, _DEPENDENT = range(3)


@dataclass(frozen=True)
class PlanNeeds:
    """What sending a plan takes.

    Attributes:
        flows: how many.
        bytes: payload of all; open-ended flows count nothing.
        most_at_once: for each (source, destination), the most flows that start within any 1 ms, plus the open-ended
            ones before, plus as many waiting flows as there can be chains of them.
        dependent: some flow waits for another one.
        busiest_bps: highest planned payload rate over the plan's 100 ms bins, each flow counted where it starts; with
            a pacing rate: the most flows under way at one time by it. Flows that wait for others count nothing: they
            follow the network.
    """

    flows: int
    bytes: int
    most_at_once: dict[tuple[str, str], int]
    dependent: bool
    busiest_bps: float


class NeedsTally:
    """Gathers a plan's needs, flow by flow in order; holds the flows of 1 ms and a byte for each flow.

    Args:
        pacing_bps: rate that each flow is held to, 0 when none is.
        until_ns: the plan's end.
    """

    def __init__(self, pacing_bps: float, until_ns: int) -> None:
        self.flows = self.bytes = 0
        self._marks = bytearray()
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._chains = 0
        self._busiest = _PacedRate(pacing_bps, until_ns) if pacing_bps else _BinRate()

    def add(self, start_ns: int, source: str, destination: str, size_bytes: int, after: int) -> None:
        """Count one flow."""
        self.flows += 1
        self.bytes += size_bytes
        pair = self._pairs.get((source, destination))
        if pair is None:
            pair = self._pairs[source, destination] = _Pair()
        if after < 0:
            self._marks.append(_FIRST)
            pair.add(start_ns, size_bytes)
            self._busiest.add(start_ns, size_bytes)
            return
        self._marks.append(_DEPENDENT)
        if self._marks[after] == _FIRST:
            self._marks[after] = _FOLLOWED
            self._chains += 1
        pair.waiting += 1

    def needs(self) -> PlanNeeds:
        """The sums so far."""
        at_once = {names: pair.most + min(pair.waiting, self._chains) for names, pair in self._pairs.items()}
        return PlanNeeds(self.flows, self.bytes, at_once, self._chains > 0, self._busiest.most_bps())


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
    """The fullest bin."""

    def __init__(self) -> None:
        self._end_ns = self._bytes = self._most = 0

    def add(self, start_ns: int, size_bytes: int) -> None:
        if start_ns >= self._end_ns:
            self._end_ns, self._bytes = start_ns - start_ns % _BIN_NS + _BIN_NS, 0
        self._bytes += size_bytes
        self._most = max(self._most, self._bytes)

    def most_bps(self) -> float:
        return self._most * 8 * _NS / _BIN_NS


class _PacedRate:
    """The most flows under way, each at the same rate."""

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
