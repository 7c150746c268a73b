"""Growth of a logged counter within a time window, from the records around that window."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ringtap.analysis.runs.run import map_records

# Longest gap at an edge of a window, as a share of the window; counters are sampled every 10 ms.
LONGEST_GAP_SHARE = 0.05


class CounterLog:
    """Memory-mapped record file of counters; the cost depends on the windows read, not on the length of the log.

    Attributes:
        torn: torn last records (0 or 1).
    """

    def __init__(self, path: Path) -> None:
        """Map a file into memory.

        Raises:
            UsageError: not a record file.
        """
        file, self._records, self.torn = map_records(path)
        fields = () if file is None else file.fields
        self._widths = {field.name: field.width_bits for field in fields if field.kind == "counter"}

    def __contains__(self, column: str) -> bool:
        return len(self._records) > 0 and column in self._widths

    def grown(self, column: str, start_ns: int, end_ns: int) -> float | str:
        """Return the growth of a counter between two times (CLOCK_REALTIME) in its unit, or the reason it is unknown.

        Interpolation is linear at each edge; narrow counters may wrap once between two samples.
        """
        t_ns = self._records["t_ns"]
        if len(t_ns) < 2 or t_ns[0] > start_ns or t_ns[-1] < end_ns:
            return "does not cover the window"
        first = bisect_right(t_ns, start_ns) - 1
        last = bisect_left(t_ns, end_ns, lo=first)
        # differences first: counters of many bytes do not fit a float
        values: npt.NDArray[np.int64] = np.array(self._records[column][first : last + 1], dtype=np.int64)
        steps = np.subtract(values[1:], values[:-1])
        width_bits = self._widths[column]
        if 0 < width_bits < 63:
            steps = np.remainder(steps, 1 << width_bits)
        if not len(steps) or steps.min() < 0:
            return "ran backwards within the window"
        opening = (int(t_ns[first]), int(t_ns[first + 1]))
        closing = (int(t_ns[last - 1]), int(t_ns[last]))
        longest = LONGEST_GAP_SHARE * (end_ns - start_ns)
        if max(opening[1] - opening[0], closing[1] - closing[0]) > longest:
            return "has a gap at an edge of the window"
        before = (start_ns - opening[0]) / (opening[1] - opening[0])
        after = (closing[1] - end_ns) / (closing[1] - closing[0])
        return float(steps.sum() - before * steps[0] - after * steps[-1])
