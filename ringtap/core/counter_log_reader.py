"""Reads the counters of a node's logs: their samples around a window, and their growth within it.

The rule of growth is that of `ringtap.core.counter_growth`. The conductor of a sweep reads windows, too, so NumPy is
not needed; `ringtap.analysis.runs.node_records` maps whole logs for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from ringtap.core.append_only_logs import RecordFile, is_header_torn
from ringtap.core.counter_growth import edge_error, growth, window_growth
from ringtap.core.errors import UsageError
from ringtap.core.json_validation import ShapeError
from ringtap.core.link_counter_sources import columns_of, source_of
from ringtap.core.run_directory import clock_gap_ns, open_log, read_node
from ringtap.core.run_directory_schema import NODE_JSON


class CounterLog:
    """Counters in a log of a node's folder, whose cost depends only on the windows that are read.

    All times are as if the node's clock had not been set (`ringtap.core.run_directory.clock_gap_ns`).

    Args:
        path: the log; one that does not exist, or has no whole header yet, has no counters.

    Attributes:
        file: header of the log; None if it has no samples.
        node: name of the node.
        gap_ns: CLOCK_REALTIME minus CLOCK_MONOTONIC when the node began to record.
        torn: torn last records (0 or 1).

    Raises:
        UsageError: not a record file.
    """

    def __init__(self, path: Path) -> None:
        self.file: RecordFile | None = None
        self._folder, self.torn = path.parents[1], 0
        self.node = self._folder.name
        try:
            self.torn = int(is_header_torn(path))
            if not self.torn:
                file = open_log(path)
                self.torn, self.file = int(file.torn_bytes > 0), file if file.count else None
        except FileNotFoundError:
            pass
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        self._window, self._times_ns, self._packed = (0, 0), list[int](), b""
        self.gap_ns = clock_gap_ns(self._folder) or 0

    def _wraps_at_bits(self, column: str) -> int:
        return self.file.column(column).wraps_at_bits if self.file else 0

    def samples(self, column: str, start_ns: int, end_ns: int) -> tuple[list[int], list[int]]:
        """Return the times and values of a column in a window, and those of one sample before and after it."""
        if self.file is None:
            return [], []
        if self._window != (start_ns, end_ns):
            first = max(self.file.first_from("mono_ns", start_ns - self.gap_ns + 1) - 1, 0)
            last = self.file.first_from("mono_ns", end_ns - self.gap_ns, first)
            self._packed = self.file.packed(first, min(last + 1, self.file.count))
            self._times_ns = [mono_ns + self.gap_ns for mono_ns in self.file.values("mono_ns", self._packed)]
            self._window = start_ns, end_ns
        return self._times_ns, self.file.values(column, self._packed)

    def grown(self, column: str, start_ns: int, end_ns: int) -> float | str:
        """Return the growth of a counter in a window, or the reason that it is not known, as the rest of a sentence."""
        if self.file is None or column not in self.file.index or self.file.column(column).kind != "counter":
            return "was not recorded"
        return window_growth(*self.samples(column, start_ns, end_ns), start_ns, end_ns, self._wraps_at_bits(column))

    def steps(self, column: str, start_ns: int, end_ns: int) -> list[float | None]:
        """Return the growth of a counter from each of `samples` to the next; None where it was reset."""
        width_bits = self._wraps_at_bits(column)
        return [growth(*pair, width_bits) for pair in pairwise(self.samples(column, start_ns, end_ns)[1])]

    def times_ns(self, start_ns: int, end_ns: int) -> list[int]:
        """Return the times of the samples within a window."""
        return [t_ns for t_ns in self.samples("mono_ns", start_ns, end_ns)[0] if start_ns <= t_ns <= end_ns]

    @property
    def newest_ns(self) -> int:
        """Time of the newest sample; 0 without one."""
        return 0 if self.file is None else self.file.tail(self.file.count - 1)[0][1] + self.gap_ns

    @cached_property
    def _mtus(self) -> dict[str, list[int]]:
        """Different MTUs of each interface before and after the run, as its node recorded them."""
        found: dict[str, list[int]] = {}
        with suppress(OSError, ShapeError):
            item = read_node(self._folder / NODE_JSON)
            for facts in (item.get("before") or {}, item.get("after") or {}):
                for nic, values in (facts.get("nics") or {}).items():
                    if (mtu := values.get("mtu")) and mtu not in found.setdefault(nic, []):
                        found[nic].append(mtu)
        return found

    def mtu(self, nic: str, stated: int | None = None) -> int:
        """Return the MTU of an interface.

        Args:
            nic: the interface.
            stated: its MTU as known elsewhere, for a node that recorded none; None: not known.

        Raises:
            UsageError: it is not known, or was changed.
        """
        mtus = self._mtus.get(nic) or ([stated] if stated else [])
        if len(mtus) == 1:
            return mtus[0]
        where = f"the MTU of {nic} of node {self.node}"
        if mtus:
            raise UsageError(f"{where} was changed from {mtus[0]} to {mtus[1]}, so its frames are not known")
        raise UsageError(f"{where} was not recorded, so its frames are not known")

    def as_frames(self, counter: Mapping[str, str], grown: Sequence[float], stated_mtu: int | None) -> float:
        """Return the growth of a counter's columns as bytes of frames.

        Raises:
            UsageError: they depend on an MTU that is not known.
        """
        source = source_of(counter)
        mtu = self.mtu(counter["nic"], stated_mtu) if source.needs_mtu else 0
        assert self.file is not None  # its growth is known
        octets = [self.file.column(column).octets for column in columns_of(counter)]
        return source.to_bytes([amount * each for amount, each in zip(grown, octets, strict=True)], mtu)

    def frame_bytes(
        self, counter: Mapping[str, str], stated_mtu: int | None, start_ns: int, end_ns: int
    ) -> tuple[float, float]:
        """Return the bytes of frames that a counter of run.json counted in a window, and their largest error.

        Args:
            counter: the counter.
            stated_mtu: MTU of its interface as known elsewhere, for a node that recorded none; None: not known.
            start_ns: start of the window.
            end_ns: its end.

        Raises:
            UsageError: they are not known; the message names the counter and the node.
        """
        grown, errors = [], []
        for column in columns_of(counter):
            found = self.grown(column, start_ns, end_ns)
            if isinstance(found, str):
                raise UsageError(f"counter {column} of node {self.node} {found}")
            grown.append(found)
            samples = self.samples(column, start_ns, end_ns)
            errors.append(edge_error(*samples, start_ns, end_ns, self._wraps_at_bits(column)))
        return self.as_frames(counter, grown, stated_mtu), self.as_frames(counter, errors, stated_mtu)
