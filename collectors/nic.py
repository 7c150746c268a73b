"""Interface counters of this network namespace, all interfaces by one read of /proc/net/dev.

/proc/net shows the namespace of the process; /sys/class/net would show that of the mount, which may be another one.
One read takes 5 µs for two interfaces (seven files of /sys: 8 µs an interface) and, unlike netlink, no lock.
"""

from __future__ import annotations

import os
import struct
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

from ringtap.collectors.base import Check, Context
from ringtap.records import Field, HoldingRecordWriter

# /proc/net/dev's columns after the name; drops of the receiving side include packets missed for want of a buffer
_COUNTERS = (
    ("rx_bytes", 0, "bytes"),
    ("tx_bytes", 8, "bytes"),
    ("rx_packets", 1, "packets"),
    ("tx_packets", 9, "packets"),
    ("rx_errors", 2, "packets"),
    ("tx_errors", 10, "packets"),
    ("rx_drops", 3, "packets"),
    ("tx_drops", 11, "packets"),
)
_COLUMNS = 17  # the name and sixteen numbers
_HEADING_LINES = 2
_READ_BYTES = 1 << 16
_SURE_BYTES = 3500  # the kernel hands out a page at a time: less than that is all there is


class NicCollector:
    """Writes ``nic/nic.rec``: every interface's counters (docs/run-directory.md)."""

    name = "nic"
    slow = False
    source = Path("/proc/net/dev")

    def __init__(self, context: Context) -> None:
        self._path = context.folder / "nic" / "nic.rec"
        self.every_s = context.every_s
        self._appeared_ns: dict[str, int] = {}
        self._vanished_ns: dict[str, int] = {}

    def check(self) -> Check:
        """Whether the counters can be read, and of which interfaces."""
        try:
            lines = self.source.read_bytes().splitlines()[_HEADING_LINES:]
        except OSError as error:
            return Check("unavailable", f"{self.source} cannot be read: {error.strerror}", "mount /proc")
        names = sorted(line.partition(b":")[0].strip().decode() for line in lines)
        if not names:
            return Check("unavailable", "this network namespace has no interface", "record in the job's namespace")
        return Check("ok", f"{len(names)} interfaces: {', '.join(names)}")

    def start(self) -> None:
        """Open the log and take the first sample; its columns are the interfaces that are there now."""
        self._fd = os.open(self.source, os.O_RDONLY | os.O_CLOEXEC)
        lines = os.pread(self._fd, _READ_BYTES, 0).splitlines()
        self._first = len(b" ".join(lines[:_HEADING_LINES]).split())
        words = self._words()
        self._nics = sorted(name.decode().rstrip(":") for name in words[self._first :: _COLUMNS])
        self._learn(words)
        fields = [Field("t_ns", "<i8", "ns", "time"), Field("mono_ns", "<i8", "ns", "time")]
        for nic in self._nics:
            fields += [Field(f"{nic}.{name}", "<u8", unit, "counter", 64) for name, _, unit in _COUNTERS]
        about = {"collector": self.name, "source": str(self.source), "every_s": self.every_s, "nics": self._nics}
        self._pack = struct.Struct(f"<qq{len(self._where)}Q").pack
        self._writer = HoldingRecordWriter(self._path, fields, about)
        self.sample()

    def sample(self) -> None:
        """Record the counters of all interfaces."""
        t_ns, mono_ns = time.time_ns(), time.monotonic_ns()
        words = self._words()
        if words[self._first :: _COLUMNS] != self._names:
            self._learn(words)
        self._last = self._values(words)
        self._writer.hold(self._pack(t_ns, mono_ns, *self._last), mono_ns)

    def stop(self) -> dict[str, Any]:
        """Take a last sample and close; names interfaces that appeared later (not recorded) or vanished, and when."""
        try:
            self.sample()
        finally:
            self._writer.close()
            os.close(self._fd)
        return {"nics": len(self._nics), "appeared_ns": self._appeared_ns, "vanished_ns": self._vanished_ns}

    def _words(self) -> list[bytes]:
        """The whole file in words."""
        text = os.pread(self._fd, _READ_BYTES, 0)
        if len(text) > _SURE_BYTES:
            while more := os.pread(self._fd, _READ_BYTES, len(text)):
                text += more
        return text.split()

    def _learn(self, words: list[bytes]) -> None:
        """Where each interface's numbers stand among the words, now that the interfaces are others than before."""
        self._names = words[self._first :: _COLUMNS]
        places = {name.decode().rstrip(":"): self._first + _COLUMNS * row for row, name in enumerate(self._names)}
        self._where = [
            places[nic] + 1 + column if nic in places else None for nic in self._nics for _, column, _ in _COUNTERS
        ]
        self._gone = any(place is None for place in self._where)
        if not self._gone:
            self._select = itemgetter(*[place for place in self._where if place is not None])
        now_ns = time.time_ns()
        for nic in places.keys() - set(self._nics):
            self._appeared_ns.setdefault(nic, now_ns)
        for nic in set(self._nics) - places.keys():
            self._vanished_ns.setdefault(nic, now_ns)

    def _values(self, words: list[bytes]) -> list[int]:
        """The numbers to record; an interface that has gone keeps its last ones, which is no traffic."""
        if not self._gone:
            return list(map(int, self._select(words)))
        return [
            last if place is None else int(words[place]) for place, last in zip(self._where, self._last, strict=True)
        ]
