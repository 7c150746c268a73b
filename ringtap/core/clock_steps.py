"""Tells from readings of CLOCK_REALTIME and CLOCK_MONOTONIC whether a clock was set, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median_high

# A change of CLOCK_REALTIME minus CLOCK_MONOTONIC from which the clock was set. Slewing moves both alike
CLOCK_STEP_NS = 1_000_000
_READINGS = 5  # of a median


def clock_set_ns(gaps_ns: Sequence[int]) -> int:
    """Return by how much a clock was set while records were written, forward if positive; 0 if it was not.

    A pause between the two readings of a record changes one difference, a clock that is set all that follow: those of
    some records have a median. Of several steps, it is the largest.

    Args:
        gaps_ns: CLOCK_REALTIME minus CLOCK_MONOTONIC of records, in order of time.
    """
    size = max(1, min(_READINGS, len(gaps_ns) // 2))
    begins = [*range(0, len(gaps_ns) - size, size), max(len(gaps_ns) - size, 0)]
    medians = [median_high(gaps_ns[begin : begin + size]) for begin in begins] if gaps_ns else []
    step_ns = max((after - before for before, after in pairwise(medians)), key=abs, default=0)
    return step_ns if abs(step_ns) >= CLOCK_STEP_NS else 0
