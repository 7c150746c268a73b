"""Assigns the growth of counters and the values of gauges between samples to the iterations of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ringtap.core.counter_growth import MAX_GAP_PERIODS, MAX_GAP_SHARE, MAX_WIDTH_BITS
from ringtap.core.errors import UsageError

Numbers = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Borders:
    """The borders of a run's iterations on one clock, as bins of time.

    Attributes:
        edges_ns: edges of the bins, ascending; gaps between two generations of a job are bins too.
        bin_of: number of the bin of each iteration.
    """

    edges_ns: Integers
    bin_of: Integers

    @classmethod
    def of(cls, start_ns: Integers, end_ns: Integers) -> Borders:
        """Return the borders of iterations, which must be in order of time and not overlap.

        Raises:
            UsageError: an iteration ends before it begins.
        """
        if (wrong := np.flatnonzero(end_ns <= start_ns)).size:
            raise UsageError(
                f"iteration {wrong[0]} ends before it begins, by the clocks of the ranks: a step log is damaged; "
                "look at the step logs in nodes/*/steps"
            )
        edges = np.unique(np.concatenate((start_ns, end_ns)))
        return cls(edges, np.searchsorted(edges, start_ns))

    @property
    def bins(self) -> int:
        """Number of bins."""
        return max(len(self.edges_ns) - 1, 0)

    def shifted(self, edges_ns: Integers) -> Borders:
        """Return the same bins on another clock."""
        return Borders(edges_ns, self.bin_of)


def shares(begin_ns: Integers, end_ns: Integers, edges_ns: Integers) -> tuple[Integers, Integers, Numbers]:
    """Split spans of time into their shares of bins.

    Args:
        begin_ns: start of each span.
        end_ns: end of each span, later than its start.
        edges_ns: borders of the bins, ascending.

    Returns:
        For each part of a span that lies in a bin: number of the span, number of the bin, and the part's share of the
        span (0 to 1). Shares of a span add up to 1 unless it reaches beyond the outer borders.
    """
    if len(edges_ns) < 2 or not len(begin_ns):
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
    inside = np.flatnonzero((begin_ns < edges_ns[-1]) & (end_ns > edges_ns[0]))
    begin, end = begin_ns[inside], end_ns[inside]
    first = np.maximum(np.searchsorted(edges_ns, begin, side="right") - 1, 0)
    last = np.minimum(np.searchsorted(edges_ns, end, side="left") - 1, len(edges_ns) - 2)
    parts = last - first + 1
    span = np.repeat(np.arange(len(inside)), parts)
    bin_of = first[span] + np.arange(len(span)) - np.repeat(np.cumsum(parts) - parts, parts)
    overlap = np.minimum(end[span], edges_ns[bin_of + 1]) - np.maximum(begin[span], edges_ns[bin_of])
    return inside[span], bin_of, overlap / (end - begin)[span]


def add_up(group: Integers, bin_of: Integers, amounts: Numbers, groups: int, bins: int) -> Numbers:
    """Sum amounts by group and bin, shape (groups, bins)."""
    sums: Numbers = np.bincount(group * bins + bin_of, weights=amounts, minlength=groups * bins).astype(np.float64)
    return sums.reshape(groups, bins)


def counter_steps(before: npt.NDArray[Any], after: npt.NDArray[Any], width_bits: int) -> Numbers:
    """Return the growth of counters by the rule of `ringtap.core.counter_growth.growth`; NaN where a counter was reset.

    Args:
        before: values of the earlier samples.
        after: values of the later samples, of the same type.
        width_bits: width of the counters; 0: not known.
    """
    fell = after < before
    if after.dtype.kind == "f":
        return np.where(fell, np.nan, after - before)
    # subtract before the conversion: a float does not hold large counters exactly
    steps = after.astype(np.uint64) - before.astype(np.uint64)
    if 0 < width_bits < MAX_WIDTH_BITS:
        return (steps & np.uint64((1 << width_bits) - 1)).astype(np.float64)
    return np.where(fell, np.nan, steps.astype(np.float64))


def longest_gaps_ns(borders: Borders, period_ns: float) -> Numbers:
    """Return `ringtap.core.counter_growth.longest_gap_ns` of each bin."""
    return np.maximum(MAX_GAP_SHARE * np.diff(borders.edges_ns), MAX_GAP_PERIODS * period_ns)


def growth(t_ns: Integers, steps: Numbers, borders: Borders, longest_gap_ns: Numbers | float) -> Numbers:
    """Return the growth of a counter in each bin, linear between samples; NaN for bins in which it is not known.

    It is the rule of `ringtap.core.counter_growth.window_growth` for many windows.

    Args:
        t_ns: times of the samples, ascending.
        steps: growth from each sample to the next, one fewer than times; NaN where it is not known.
        borders: the bins, by the clock of the samples.
        longest_gap_ns: longest gap between samples in which a bin may begin or end, or that of each bin.
    """
    if len(t_ns) < 2 or borders.bins < 1:
        return np.full(borders.bins, np.nan)
    origin = t_ns[0]  # subtract first: a float does not hold nanoseconds since 1970 exactly
    at_ns, edges_ns = (t_ns - origin).astype(np.float64), (borders.edges_ns - origin).astype(np.float64)

    def in_bins(amounts: Numbers) -> Numbers:
        grown = np.concatenate(([0.0], np.cumsum(amounts)))
        return np.asarray(np.diff(np.interp(edges_ns, at_ns, grown, np.nan, np.nan)))

    unknown = np.isnan(steps)
    grown = in_bins(np.where(unknown, 0.0, steps))
    after = np.clip(np.searchsorted(t_ns, borders.edges_ns), 1, len(t_ns) - 1)
    gaps_ns = np.where(t_ns[after] == borders.edges_ns, 0, t_ns[after] - t_ns[after - 1])
    is_unknown = np.maximum(gaps_ns[:-1], gaps_ns[1:]) > longest_gap_ns
    if unknown.any():
        is_unknown |= in_bins(unknown.astype(np.float64)) > 0
    return np.where(is_unknown, np.nan, grown)


def mean_in(t_ns: Integers, values: npt.NDArray[Any], borders: Borders) -> Numbers:
    """Return the mean of a gauge in each bin, held from each sample to the next; NaN for bins that are not covered."""
    if len(t_ns) < 2:
        return np.full(borders.bins, np.nan)
    spans = np.diff(t_ns) / 1e9
    length_s = np.diff(borders.edges_ns) / 1e9
    return growth(t_ns, values[:-1].astype(np.float64) * spans, borders, np.inf) / length_s


def largest_in(t_ns: Integers, values: npt.NDArray[Any], borders: Borders) -> Numbers:
    """Return the largest value of a gauge in each bin, held between samples; NaN before the first sample."""
    result = np.full(borders.bins, np.nan)
    if not len(t_ns) or borders.bins < 1:
        return result
    # from the last sample at or before the bin's start to the last one within it
    first = np.maximum(np.searchsorted(t_ns, borders.edges_ns[:-1], side="right") - 1, 0)
    after = np.searchsorted(t_ns, borders.edges_ns[1:], side="left")
    known = after > first
    padded = np.append(values.astype(np.float64), -np.inf)
    pairs = np.column_stack((first, np.maximum(after, first + 1))).ravel()
    result[known] = np.maximum.reduceat(padded, pairs)[::2][known]
    return result


def plain(value: Any) -> Any:
    """Convert a number for JSON: NumPy types to Python types, NaN, infinity and NA to None."""
    if value is None or value is pd.NA or (isinstance(value, float | np.floating) and not np.isfinite(value)):
        return None
    return value.item() if isinstance(value, np.generic) else value
