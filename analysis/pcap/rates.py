"""Rates by flow, by pair of hosts or in total, computed some bins at a time because they may not fit in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ringtap.analysis.pcap.tables import Columns

Integers = npt.NDArray[np.int64]
Cells = npt.NDArray[Any]

_TOGETHER = 1 << 18  # approximate number of cells processed together


@dataclass(frozen=True)
class Groups:
    """Groups of flows whose rates are wanted.

    Attributes:
        keys: columns that name the groups.
        of_flow: group number of each flow of the scan; -1 if the flow does not count.
    """

    keys: dict[str, npt.NDArray[Any]]
    of_flow: Integers

    @property
    def count(self) -> int:
        """Number of groups, 1 at least."""
        return max(1, int(self.of_flow.max(initial=-1)) + 1)


@dataclass(frozen=True)
class Bins:
    """Bins that each cover one or more bins of the scan.

    Attributes:
        start_ns: start of the first bin, a multiple of the width.
        width_ns: width of a bin.
        skipped: number of scan bins that the first bin covers before the first bin of the scan.
        factor: number of scan bins per bin.
    """

    start_ns: int
    width_ns: int
    skipped: int
    factor: int

    def of(self, cells: Cells) -> Integers:
        """Return the bin of each cell."""
        return np.asarray((cells["bin"].astype(np.int64) + self.skipped) // self.factor)


def batches(walk: Callable[[], Iterator[Cells]], bins: Bins, groups: Groups, what: str) -> Iterator[Columns]:
    """Yield the rates of the groups, in order of time and group, where there was something to count.

    Args:
        walk: returns the cells in pieces, the same pieces on each call.
        bins: the bins wanted.
        groups: the groups wanted.
        what: the amount, a field of ``layout.CELL``.

    Yields:
        ``t_ns``, the key columns and ``rate_bps`` (``rate_pps``); at least once, maybe without rows.
    """
    name, scale = ("rate_pps", 1e9) if what.endswith("packets") else ("rate_bps", 8e9)
    windows, ranges = _windows(walk, bins)
    for first, last in windows:
        marks, amounts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for cells, (least, most) in zip(walk(), ranges, strict=True):
            if most < first or least >= last:
                continue
            place, group = bins.of(cells), groups.of_flow[cells["flow"]]
            mine = (place >= first) & (place < last) & (group >= 0)
            marks.append(place[mine] * groups.count + group[mine])
            amounts.append(cells[what][mine].astype(np.int64))
        mark, row = np.unique(np.concatenate(marks), return_inverse=True)
        total = np.bincount(row, np.concatenate(amounts), len(mark))
        mark, total = mark[total > 0], total[total > 0]
        columns: Columns = {"t_ns": bins.start_ns + mark // groups.count * bins.width_ns}
        columns |= {key: values[mark % groups.count] for key, values in groups.keys.items()}
        yield columns | {name: total * scale / bins.width_ns}


def _windows(walk: Callable[[], Iterator[Cells]], bins: Bins) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return ranges of bins with about `_TOGETHER` cells each, and the range of bins of each piece.

    If a clock was set, bins may far outnumber cells; the ranges therefore begin at cells sampled in order of time.
    """
    step = max(1, _TOGETHER // 64)
    marks, ranges = [], []
    for cells in walk():
        place = np.sort(bins.of(cells))
        marks.append(place[::step])
        ranges.append((int(place[0]), int(place[-1])))
    every = np.unique(np.sort(np.concatenate([np.zeros(1, np.int64), *marks]))[:: _TOGETHER // step])
    edges = [*every.tolist(), max((last for _, last in ranges), default=0) + 1]
    return list(itertools.pairwise(edges)), ranges
