"""Reads the counters of a node over the last seconds, and calculates rates from them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

from ringtap.analysis.runs.growing_files import Record
from ringtap.core.append_only_logs import RecordFile

# a cookie, a process, or several columns together
Key = Any

RATE_WINDOW_NS = 900_000_000  # polls are about a second apart
_KEPT = 16
_MAX_KEYS = 10_000
_BASE_RECORDS = 256


class RecentWideLog:
    """A record file with one record per sample, which holds the values of all sources side by side.

    Attributes:
        file: its header.
        missed: sampling slots without a record among the records read.
        last: the newest record; None before the first.
    """

    def __init__(self, file: RecordFile, first: Record | None) -> None:
        self.file = file
        self.missed = 0
        self._first = first
        self._every_ns = float(file.about.get("every_s") or 0) * 1e9
        self._mono = self.file.index.get("mono_ns", 0)
        self._recent: deque[Record] = deque(maxlen=_KEPT)
        self.last: Record | None = None

    def feed(self, batch: list[Record]) -> None:
        """Add the records of a poll; the last of each poll is kept, and the first of the first poll."""
        self._count_missed(batch)
        if not self._recent:
            self._recent.append(batch[0])
        self._recent.append(batch[-1])
        self.last = batch[-1]

    def _count_missed(self, batch: list[Record]) -> None:
        if self._every_ns <= 0:
            return
        mono, every = self._mono, self._every_ns
        before = self.last[mono] if self.last else batch[0][mono]
        for record in batch:
            gap = record[mono] - before
            if gap > 1.75 * every:
                self.missed += round(gap / every) - 1
            before = record[mono]

    @property
    def t_ns(self) -> int:
        """CLOCK_REALTIME of the newest record, 0 before the first."""
        return int(self.last[self.file.index["t_ns"]]) if self.last else 0

    @property
    def mono_ns(self) -> int:
        """CLOCK_MONOTONIC of the newest record, 0 before the first."""
        return int(self.last[self._mono]) if self.last else 0

    def value(self, name: str) -> float | None:
        """Return the newest value of a column; None if there is none."""
        number = self.file.index.get(name)
        return None if number is None or self.last is None else float(self.last[number])

    def total(self, name: str) -> float | None:
        """Return the growth of a counter since the file's first record."""
        if name not in self.file.index or self.last is None or self._first is None:
            return None
        return self.file.grown(name, self._first, self.last)

    def rate(self, name: str) -> float | None:
        """Return a counter's rate per second over about the last second; None before two samples."""
        if name not in self.file.index or self.last is None:
            return None
        before = self._reference()
        seconds = (self.last[self._mono] - before[self._mono]) / 1e9
        grown = self.file.grown(name, before, self.last)
        return None if grown is None or seconds <= 0 else grown / seconds

    def _reference(self) -> Record:
        """Return the newest kept record that is at least a window older than the last one, else the oldest."""
        assert self.last is not None
        latest = self.last[self._mono] - RATE_WINDOW_NS
        for record in reversed(self._recent):
            if record[self._mono] <= latest:
                return record
        return self._recent[0]


class Keyed:
    """A record file with one record per item (socket, queue, process) that changed since its last record.

    An item that is absent from a sample is unchanged, so its rate is taken over the node's own time, which advances.

    Args:
        key: the columns that identify an item.
        gone: a column and the value that marks an item as gone.
        peaks: gauges whose largest value since the last poll is kept too.
        stale_ns: time without a record after which an item is gone; 0 if an unchanged item has none.
        samples: records of each item to keep, beside those for its rates.

    Attributes:
        latest: newest record by key.
        file: header of the newest file; None before the first.
    """

    def __init__(
        self,
        key: tuple[str, ...],
        gone: tuple[str, int] | None = None,
        peaks: tuple[str, ...] = (),
        stale_ns: int = 0,
        samples: int = 0,
    ) -> None:
        self._key_names, self._gone, self._peak_names, self._stale_ns = key, gone, peaks, stale_ns
        self.file: RecordFile | None = None
        self.latest: dict[Key, Record] = {}
        self.t_ns = 0
        self.mono_ns = 0
        self._history: dict[Key, deque[tuple[int, Record]]] = {}
        self._base: dict[Key, Record] = {}
        self._max_samples = samples
        self._samples: dict[Key, deque[Record]] = defaultdict(lambda: deque(maxlen=samples))
        self._changed: set[Key] = set()
        self._next_peaks: dict[tuple[Key, str], float] = {}
        self._peaks: dict[tuple[Key, str], float] = {}
        self._ticks: deque[int] = deque(maxlen=_KEPT)

    def begin(self, file: RecordFile) -> None:
        """Begin a new file; if its columns differ from those of the previous one, known records are dropped."""
        if self.file is None or list(file.index) != list(self.file.index):
            self.latest.clear()
            self._history.clear()
            self._base.clear()
            self._samples.clear()
        self.file = file
        self._key = [file.index[name] for name in self._key_names]
        self._mono, self._t = file.index["mono_ns"], file.index["t_ns"]
        for record in file.tail(0, min(file.count, _BASE_RECORDS)):
            self._base.setdefault(self._key_of(record), record)

    def _key_of(self, record: Record) -> Key:
        return record[self._key[0]] if len(self._key) == 1 else tuple(record[number] for number in self._key)

    def feed(self, batch: Iterable[Record]) -> None:
        """Add records of the newest file."""
        assert self.file is not None
        record = None
        for record in batch:
            key = self._key_of(record)
            if key not in self._history:
                self._history[key] = deque([(record[self._mono], record)], maxlen=_KEPT)
            self.latest[key] = record
            if self._max_samples:
                self._samples[key].append(record)
            self._changed.add(key)
            for name in self._peak_names:
                value = record[self.file.index[name]]
                self._next_peaks[key, name] = max(value, self._next_peaks.get((key, name), value))
        if record is not None:
            self.t_ns, self.mono_ns = max(self.t_ns, record[self._t]), max(self.mono_ns, record[self._mono])

    def commit(self, now_mono_ns: int) -> None:
        """End a poll: store the newest records at the node's time, and drop the items that are gone."""
        self._ticks.append(now_mono_ns)
        for key in self._changed:
            record = self.latest[key]
            if self._gone and self.file and record[self.file.index[self._gone[0]]] == self._gone[1]:
                self._forget(key)
                continue
            history = self._history[key]
            history.append((now_mono_ns, record))
            while len(history) > 2 and history[1][0] <= now_mono_ns - RATE_WINDOW_NS:
                history.popleft()
        self._changed.clear()
        self._peaks, self._next_peaks = self._next_peaks, {}
        if self._stale_ns and self.file:
            for key in [key for key, last in self.latest.items() if last[self._mono] < now_mono_ns - self._stale_ns]:
                self._forget(key)
        if len(self.latest) > _MAX_KEYS:
            oldest = sorted(self.latest, key=lambda key: int(self.latest[key][self._mono]))
            for key in oldest[: len(oldest) - _MAX_KEYS]:
                self._forget(key)

    def _forget(self, key: Key) -> None:
        for kept in (self.latest, self._history, self._base, self._samples):
            kept.pop(key, None)

    def value(self, key: Key, name: str) -> float | None:
        """Return the newest value of a column."""
        number = self.file.index.get(name) if self.file else None
        return None if number is None else float(self.latest[key][number])

    def values(self, name: str) -> set[Any]:
        """Return the newest values of a column over all items."""
        return {record[self.file.index[name]] for record in self.latest.values()} if self.file else set()

    def active(self) -> list[Key]:
        """Return the keys that changed within the window of the rates."""
        since = self._since()
        return [key for key, history in self._history.items() if history[-1][0] > since]

    def _since(self) -> int:
        """Return the node's time at which the current rates begin."""
        if not self._ticks:
            return 0
        latest = self._ticks[-1] - RATE_WINDOW_NS
        return next((tick for tick in reversed(self._ticks) if tick <= latest), 0)

    def total(self, key: Key, name: str) -> float | None:
        """Return the growth of a counter since the recording began; None for counters that appeared later."""
        if self.file is None or name not in self.file.index or key not in self._base:
            return None
        return self.file.grown(name, self._base[key], self.latest[key])

    def peak(self, key: Key, name: str) -> float | None:
        """Return the largest value of a gauge in the last poll's records; the newest value if it did not change."""
        return self._peaks.get((key, name), self.value(key, name))

    def samples(self, key: Key, name: str) -> list[tuple[int, int, float]]:
        """Return CLOCK_REALTIME, CLOCK_MONOTONIC and the value of a column of each kept sample of an item."""
        if self.file is None or name not in self.file.index:
            return []
        number = self.file.index[name]
        return [(record[self._t], record[self._mono], record[number]) for record in self._samples.get(key, ())]

    def rate(self, key: Key, name: str) -> float | None:
        """Return a counter's rate per second over about the node's last second; None if it is too new."""
        if self.file is None or name not in self.file.index or not self._ticks:
            return None
        now, since = self._ticks[-1], self._since()
        history = self._history[key]
        before = next((record for tick, record in reversed(history) if tick <= since), None)
        if before is None:
            since, before = history[0]
        seconds = (now - since) / 1e9
        grown = self.file.grown(name, before, self.latest[key])
        return None if grown is None or seconds <= 0.01 else grown / seconds
