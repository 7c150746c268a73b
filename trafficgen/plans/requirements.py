"""Requirements of a plan on the host that sends it, gathered in one pass over its flows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

_WINDOW_NS = 1_000_000
_BIN_NS = 100_000_000
_NS = 1_000_000_000
_FIRST, _FOLLOWED, _DEPENDENT = range(3)


@dataclass(frozen=True)
class PlanRequirements:
    """The requirements of sending a plan.

    Attributes:
        flows: number of flows.
        bytes: payload of all flows; open-ended flows count as 0.
        most_at_once: for each (source, destination), the most flows that start within any 1 ms, plus the earlier
            open-ended ones, plus one waiting flow for each possible chain of them.
        dependent: True if some flow waits for another one.
        busiest_bps: highest planned payload rate over the plan's 100 ms bins, each flow counted where it starts; with
            a pacing rate: that rate times the most flows in progress at once. Flows that wait for others are not
            counted, since the network sets their pace.
    """

    flows: int
    bytes: int
    most_at_once: dict[tuple[str, str], int]
    dependent: bool
    busiest_bps: float


class RequirementsCounter:
    """Accumulator of a plan's requirements, flow by flow in order; keeps the flows of 1 ms, and one byte per flow.

    Args:
        pacing_bps: pacing rate of each flow, 0: none.
        until_ns: the plan's end.
    """

    def __init__(self, pacing_bps: float, until_ns: int) -> None:
        self.flows = self.bytes = 0
        self._marks = bytearray()
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._chains = 0
        self._busiest = _PacedRate(pacing_bps, until_ns) if pacing_bps else _BinRate()

    def add(self, start_ns: int, source: str, destination: str, size_bytes: int, after: int) -> None:
        """Add one flow."""
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

    def needs(self) -> PlanRequirements:
        """Return the requirements of the flows so far."""
        at_once = {names: pair.most + min(pair.waiting, self._chains) for names, pair in self._pairs.items()}
        return PlanRequirements(self.flows, self.bytes, at_once, self._chains > 0, self._busiest.most_bps())


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
            self._end_ns, self._bytes = start_ns - start_ns % _BIN_NS + _BIN_NS, 0
        self._bytes += size_bytes
        self._most = max(self._most, self._bytes)

    def most_bps(self) -> float:
        return self._most * 8 * _NS / _BIN_NS


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
