"""Calculates what sending a flow plan requires: connections at once, and the highest rate."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from ringtap.core.flow_plan_file import PlanFile
from ringtap.core.run_directory_schema import LOAD_BIN_NS

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


def requirements(plan: PlanFile) -> PlanRequirements:
    """Read a whole plan, so that errors are found before the first flow is sent, and return what it requires.

    Raises:
        UsageError: a line is wrong (the message names it), or the lines do not match the header's counts.
    """
    counter = RequirementsCounter(plan.header.get("transport", {}).get("pacing_bps", 0), plan.duration_ns)
    for start_ns, source, destination, size_bytes, after in plan.flows():
        counter.add(start_ns, source, destination, size_bytes, [number for number, _ in after])
    return counter.needs()
