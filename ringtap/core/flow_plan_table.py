"""Reads flow plans as arrays, with NumPy (docs/commands/traffic-plans.md specifies the plans)."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ringtap.core.flow_plan_file import PlanFile

Integers = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FlowTable:
    """A flow plan; the arrays have one entry per line, in the plan's order: per flow, and per computation.

    Attributes:
        path: path of its file.
        header: first line of its file.
        kind: kind of traffic.
        start_ns: start after the sender's launch; the earliest possible one if the flow waits for another.
        size_bytes: payload; 0: open-ended, until the plan's end.
        destination: index into the header's destinations; -1: a computation, which sends nothing.
        source: index into the header's sources; -1: the flow is unbound.
        after_start: where the lines that it waits for begin in ``after``, shape (lines + 1,).
        after: numbers of the lines that lines wait for, one after the other.
        delay_ns: time from the end of each of these to the start of the line that waits for it.
    """

    path: Path
    header: dict[str, Any]
    kind: str
    start_ns: Integers
    size_bytes: Integers
    destination: Integers
    source: Integers
    after_start: Integers
    after: Integers
    delay_ns: Integers

    @property
    def duration_ns(self) -> int:
        """The plan's length."""
        return int(self.header["duration_ns"])

    @property
    def destinations(self) -> list[str]:
        """Every ``host:port``."""
        return list(self.header["destinations"])

    @property
    def is_flow(self) -> npt.NDArray[np.bool_]:
        """Mask of the lines that are flows."""
        return self.destination >= 0

    @property
    def waits(self) -> Integers:
        """Number of lines that each line waits for."""
        return np.diff(self.after_start)

    @property
    def sources(self) -> list[str]:
        """Every source address; empty if some flow is unbound."""
        return [] if (self.source < 0).any() else list(self.header.get("sources", []))

    @property
    def bytes(self) -> int:
        """Payload of all flows; open-ended ones count as 0."""
        return int(self.size_bytes.sum())

    @property
    def load_bps(self) -> float:
        """Mean payload rate over the plan."""
        return self.bytes * 8e9 / self.duration_ns

    def planned_bytes(self, edges_ns: Integers) -> Numbers:
        """Return the bytes of the flows that start between each edge and the next."""
        sums = np.concatenate(([0], np.cumsum(self.size_bytes, dtype=np.int64)))
        return np.diff(sums[np.searchsorted(self.start_ns, edges_ns)]).astype(np.float64)


def read_plan(path: Path) -> FlowTable:
    """Read a plan file.

    Raises:
        UsageError: as `PlanFile`, or a line is wrong, or the lines do not match the header's counts.
    """
    plan = PlanFile(path)
    sources = {"": -1} | {name: index for index, name in enumerate(plan.sources)}
    destinations = {"": -1} | {name: index for index, name in enumerate(plan.destinations)}
    parts, waits, counts = [np.empty((4, 0), np.int64)], array("q"), array("q")
    for start_ns, source, destination, size_bytes, after in plan.columns():
        indexes = map(destinations.__getitem__, destination), map(sources.__getitem__, source)
        columns = (start_ns, size_bytes, *indexes)
        parts.append(np.array([np.fromiter(column, np.int64, len(after)) for column in columns]))
        counts.extend(map(len, after))
        for wait in chain.from_iterable(after):
            waits.extend(wait)
    earlier, delays = np.array(waits, np.int64).reshape(-1, 2).T.copy()
    after_start = np.append(0, np.cumsum(np.array(counts, np.int64)))
    starts, sizes, to, from_ = np.concatenate(parts, axis=1)
    return FlowTable(path, plan.header, plan.kind, starts, sizes, to, from_, after_start, earlier, delays)
