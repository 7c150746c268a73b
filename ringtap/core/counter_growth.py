"""Calculates the growth of counters between samples: one rule for wraps, resets and gaps.

- A counter of fewer than 64 bits that fell has wrapped once.
- A counter of 64 bits, of no known width, or that saturates was reset if it fell, and its growth is not known.
- Between two samples, growth is linear. The growth in a window that begins or ends inside a gap that is longer than
  `longest_gap_ns` is not known.

`ringtap.analysis.runs.samples_to_iterations` has the same rule for whole columns; a test compares the two.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

# Longest gap at an edge of a window, as a share of the window; what came in it is all that can be on the wrong side
MAX_GAP_SHARE = 0.05
# and in sampling periods. One missed sample makes a gap of 2; of 5,066 gaps between samples every 10 ms, 0.1 % were
# longer than 2.5
MAX_GAP_PERIODS = 2.5
MAX_WIDTH_BITS = 64
# of a mean over iterations, from the sampling periods at both ends; above it, samples are too far apart to count
MAX_UNCERTAIN_SHARE = 0.25


def growth(before: float, after: float, width_bits: int) -> float | None:
    """Return the growth of a counter from one sample to the next; None if the counter was reset in between.

    Args:
        before: value of the earlier sample.
        after: value of the later sample.
        width_bits: width of the counter; 0: not known.
    """
    if after >= before:
        return after - before
    return after - before + (1 << width_bits) if 0 < width_bits < MAX_WIDTH_BITS else None


def longest_gap_ns(window_ns: float, period_ns: float = 0.0) -> float:
    """Return the longest gap between two samples within which a window may begin or end.

    Args:
        window_ns: length of the window.
        period_ns: usual time between samples, for windows that follow each other, as iterations do: an edge in it only
            moves growth to a neighbour, and means stay true. 0: a window on its own.
    """
    return max(MAX_GAP_SHARE * window_ns, MAX_GAP_PERIODS * period_ns)


def window_growth(
    t_ns: Sequence[int], values: Sequence[int], start_ns: int, end_ns: int, width_bits: int
) -> float | str:
    """Return the growth of a counter in a window, or the reason that it is not known.

    Args:
        t_ns: times of the samples, ascending.
        values: the samples.
        start_ns: start of the window.
        end_ns: end of the window, later than its start.
        width_bits: width of the counter; 0: not known.

    Returns:
        The growth in the counter's unit, or the reason as the rest of a sentence about the counter.
    """
    if len(t_ns) < 2 or t_ns[0] > start_ns or t_ns[-1] < end_ns:
        return "does not cover the window"
    first = bisect_right(t_ns, start_ns) - 1
    last = bisect_left(t_ns, end_ns, lo=first)
    if last <= first:
        return "has samples out of order"
    steps = []
    for before, after in pairwise(values[first : last + 1]):
        step = growth(before, after, width_bits)
        if step is None:
            return "was reset within the window"
        steps.append(step)
    opening_ns, closing_ns = t_ns[first + 1] - t_ns[first], t_ns[last] - t_ns[last - 1]
    if min(opening_ns, closing_ns) <= 0:
        return "has samples out of order"
    early, late = (start_ns - t_ns[first]) / opening_ns, (t_ns[last] - end_ns) / closing_ns
    longest_ns = longest_gap_ns(end_ns - start_ns)
    if (early and opening_ns > longest_ns) or (late and closing_ns > longest_ns):
        return "has a gap at an edge of the window"
    return sum(steps) - early * steps[0] - late * steps[-1]


def edge_error(t_ns: Sequence[int], values: Sequence[int], start_ns: int, end_ns: int, width_bits: int) -> float:
    """Return the largest error of `window_growth`, in the counter's unit.

    All that was counted between two samples may have come right after the first or right before the second, not evenly.
    """
    error = 0.0
    for edge_ns in (start_ns, end_ns):
        after = bisect_left(t_ns, edge_ns)
        if 0 < after < len(t_ns) and t_ns[after] > edge_ns:
            share = (edge_ns - t_ns[after - 1]) / (t_ns[after] - t_ns[after - 1])
            error += max(share, 1 - share) * (growth(values[after - 1], values[after], width_bits) or 0.0)
    return error
