"""Growth of a logged counter within a time window, from the records around that window."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from pathlib import Path

from ringtap.analysis.runs.run import map_records
from ringtap.counters import window_growth


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
        """Return the growth of a counter between two times (CLOCK_REALTIME), or the reason that it is not known."""
        t_ns = self._records["t_ns"]
        # as few samples as the window needs, one beyond each edge
        first = max(bisect_right(t_ns, start_ns) - 1, 0)
        mine = slice(first, bisect_left(t_ns, end_ns, lo=first) + 1)
        times, values = t_ns[mine].tolist(), self._records[column][mine].tolist()
        return window_growth(times, values, start_ns, end_ns, self._widths[column])
