"""Records interface counters of this network namespace, by one read of /proc/net/dev for all, and link states.

/proc/net shows the namespace of the process; /sys/class/net would show that of the mount, which may be another one.
One read takes 5 µs for two interfaces (seven files of /sys: 8 µs per interface) and, unlike netlink, no lock.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

from ringtap.collectors.collector_interface import Check, Context
from ringtap.collectors.netlink import (
    DUMP,
    HEADER_BYTES,
    ROUTE,
    NetlinkSocket,
    attributes,
    request,
)
from ringtap.core.append_only_logs import Field, HoldingRecordWriter, JsonLinesWriter
from ringtap.core.run_directory_schema import NIC_REC, TIME_FIELDS
from ringtap.core.units import counted

# /proc/net/dev's columns after the name; receive drops include packets missed because a buffer was full
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
_MOST_APPEARED = 1000  # interfaces of containers come and go; the first ones are told
_COLUMNS = 17  # the name and sixteen numbers
_HEADING_LINES = 2
_READ_BYTES = 1 << 16
_SURE_BYTES = 3500  # the kernel returns a page at a time: a read of less than this is complete

# linux/rtnetlink.h and linux/if_link.h
_NEW_LINK, _GET_LINK, _LINK_GROUP = 16, 18, 1
_IFINFO = struct.Struct("=BxHiII")
_UP = 1
_NAME, _OPERSTATE, _CARRIER, _CARRIER_CHANGES = 3, 16, 33, 35
_OPERSTATES = ("unknown", "notpresent", "down", "lowerlayerdown", "testing", "dormant", "up")
_LOOK_EVERY_NS = 100_000_000


class LinkWatch:
    """Recorder of ``nic/links.jsonl``: the initial state of every link, and each change of it.

    After a change notification of the kernel (rtnetlink), all links are read, ten times per second at most. Shorter
    changes show in ``carrier_changes``.

    Args:
        path: the file.

    Raises:
        OSError: the kernel provides no such notifications.
    """

    def __init__(self, path: Path) -> None:
        self._known: dict[str, dict[str, Any]] = {}
        self._netlink = NetlinkSocket(ROUTE)
        try:
            self._news = NetlinkSocket(ROUTE)
            try:
                self._news.join(_LINK_GROUP)
                found = self._look()
            except OSError:
                self._news.close()
                raise
        except OSError:
            self._netlink.close()
            raise
        self._log = JsonLinesWriter(path)
        self._write(found)
        self._has_news, self._look_ns = False, 0

    def sample(self, mono_ns: int) -> None:
        """Write the changes, ten times per second at most."""
        if mono_ns < self._look_ns:
            return
        self._look_ns = mono_ns + _LOOK_EVERY_NS
        if self._news.drain() or self._has_news:
            self._has_news = False
            try:
                self._write(self._look())
            except OSError:  # the kernel's answer was lost: ask again
                self._has_news = True

    def _look(self) -> dict[str, dict[str, Any]]:
        """Read the states of all links, by name."""
        found: dict[str, dict[str, Any]] = {}

        def take(kind: int, data: memoryview, begin: int, end: int) -> None:
            if kind == _NEW_LINK:
                name, state = _link(data, begin, end)
                found[name] = state

        self._netlink.dump_each(request(_GET_LINK, DUMP, _IFINFO.pack(0, 0, 0, 0, 0)), take)
        return found

    def _write(self, found: dict[str, dict[str, Any]]) -> None:
        """Write the states that differ from the known ones; a link that is gone is written as down."""
        gone = {"up": False, "carrier": False, "operstate": "notpresent"}
        found |= {nic: self._known[nic] | gone for nic in self._known.keys() - found.keys()}
        times = {"t_ns": time.time_ns(), "mono_ns": time.monotonic_ns()}
        for nic, state in sorted(found.items()):
            if self._known.get(nic) != state:
                self._log.append({**times, "nic": nic, **state})
        self._known = found

    def close(self) -> None:
        """Close the file and the sockets."""
        self._netlink.close()
        self._news.close()
        self._log.close()


def _link(data: memoryview, begin: int, end: int) -> tuple[str, dict[str, Any]]:
    """Return the name and state in a message about a link."""
    begin += HEADER_BYTES
    flags = _IFINFO.unpack_from(data, begin)[3]
    values = {kind: bytes(data[at : at + size]) for kind, at, size in attributes(data, begin + _IFINFO.size, end)}
    number = {
        kind: int.from_bytes(values[kind], sys.byteorder) if kind in values else None
        for kind in (_OPERSTATE, _CARRIER, _CARRIER_CHANGES)
    }
    operstate = number[_OPERSTATE] or 0
    return values[_NAME].rstrip(b"\0").decode(errors="replace"), {
        "up": bool(flags & _UP),
        "carrier": bool(number[_CARRIER]),
        "operstate": _OPERSTATES[operstate] if operstate < len(_OPERSTATES) else str(operstate),
        "carrier_changes": number[_CARRIER_CHANGES],
    }


def record_bytes(nics: int) -> int:
    """Return the size of a record for so many interfaces."""
    return 8 * (len(TIME_FIELDS) + nics * len(_COUNTERS))


class NicCollector:
    """Recorder of all interfaces' counters in ``nic/nic.rec``, and of ``nic/links.jsonl``.

    docs/reference/run-directory.md describes both.
    """

    name = "nic"
    slow = False
    source = Path("/proc/net/dev")

    _links: LinkWatch | None

    def __init__(self, context: Context) -> None:
        self._path = context.folder / NIC_REC
        self.every_s = context.every_s
        self._appeared_ns: dict[str, int] = {}
        self._vanished_ns: dict[str, int] = {}

    def check(self) -> Check:
        """Check that the counters can be read, and of which interfaces."""
        try:
            lines = self.source.read_bytes().splitlines()[_HEADING_LINES:]
        except OSError as error:
            return Check("unavailable", f"{self.source} cannot be read: {error.strerror}", "mount /proc")
        names = sorted(line.partition(b":")[0].strip().decode() for line in lines)
        if not names:
            return Check("unavailable", "this network namespace has no interface", "record in the job's namespace")
        return Check("ok", f"{counted(len(names), 'interface')}: {', '.join(names)}")

    def start(self) -> None:
        """Open the log and take the first sample; the columns are those of the interfaces present now."""
        self._fd = os.open(self.source, os.O_RDONLY | os.O_CLOEXEC)
        lines = os.pread(self._fd, _READ_BYTES, 0).splitlines()
        self._first = len(b" ".join(lines[:_HEADING_LINES]).split())
        words = self._words()
        self._nics = sorted(name.decode().rstrip(":") for name in words[self._first :: _COLUMNS])
        self._learn(words)
        fields = list(TIME_FIELDS)
        for nic in self._nics:
            fields += [Field(f"{nic}.{name}", "<u8", unit, "counter", 64) for name, _, unit in _COUNTERS]
        about = {"collector": self.name, "source": str(self.source), "every_s": self.every_s, "nics": self._nics}
        self._pack = struct.Struct(f"<qq{len(self._where)}Q").pack
        self._writer = HoldingRecordWriter(self._path, fields, about)
        self._links, self._links_why = None, ""
        try:
            self._links = LinkWatch(self._path.with_name("links.jsonl"))
        except OSError as error:
            self._links_why = f"the kernel tells nothing of links: {error.strerror}"
        self.sample()

    def sample(self) -> None:
        """Record the counters of all interfaces."""
        t_ns, mono_ns = time.time_ns(), time.monotonic_ns()
        words = self._words()
        if words[self._first :: _COLUMNS] != self._names:
            self._learn(words)
        self._last = self._values(words)
        self._writer.hold(self._pack(t_ns, mono_ns, *self._last), mono_ns)
        if self._links is not None:
            self._links.sample(mono_ns)

    def stop(self) -> dict[str, Any]:
        """Take a last sample and close; return which interfaces appeared later (not recorded) or vanished, and when."""
        try:
            self.sample()
        finally:
            self._writer.close()
            os.close(self._fd)
            if self._links is not None:
                self._links.close()
        facts = {"nics": len(self._nics), "appeared_ns": self._appeared_ns, "vanished_ns": self._vanished_ns}
        return facts | ({"links_not_watched": self._links_why} if self._links_why else {})

    def _words(self) -> list[bytes]:
        """Return the words of the whole file."""
        text = os.pread(self._fd, _READ_BYTES, 0)
        if len(text) > _SURE_BYTES:
            while more := os.pread(self._fd, _READ_BYTES, len(text)):
                text += more
        return text.split()

    def _learn(self, words: list[bytes]) -> None:
        """Learn the positions of each interface's numbers after the interfaces have changed."""
        self._names = words[self._first :: _COLUMNS]
        places = {name.decode().rstrip(":"): self._first + _COLUMNS * row for row, name in enumerate(self._names)}
        self._where = [
            places[nic] + 1 + column if nic in places else None for nic in self._nics for _, column, _ in _COUNTERS
        ]
        self._gone = any(place is None for place in self._where)
        if not self._gone:
            self._select = itemgetter(*[place for place in self._where if place is not None])
        now_ns = time.time_ns()
        for nic in list(places.keys() - set(self._nics))[: _MOST_APPEARED - len(self._appeared_ns)]:
            self._appeared_ns.setdefault(nic, now_ns)
        for nic in set(self._nics) - places.keys():
            self._vanished_ns.setdefault(nic, now_ns)

    def _values(self, words: list[bytes]) -> list[int]:
        """Return the numbers to record; an interface that is gone keeps its last ones, which means no traffic."""
        if not self._gone:
            return list(map(int, self._select(words)))
        return [
            last if place is None else int(words[place]) for place, last in zip(self._where, self._last, strict=True)
        ]
