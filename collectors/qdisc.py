"""Records queueing disciplines of this network namespace: sent, queued and dropped packets, by a route netlink dump.

A congested link shows first in a queue's backlog. No privilege is needed. One message of pyroute2 costs more time than
a whole dump does here, so the statistics (linux/gen_stats.h) are recorded as the kernel wrote them.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

from ringtap.collectors.collector_interface import Check, Context
from ringtap.collectors.netlink import DUMP, HEADER_BYTES, ROUTE, NetlinkSocket, attributes, request, take_each
from ringtap.core.append_only_logs import Field, HoldingRecordWriter
from ringtap.core.run_directory_schema import QDISC_REC, TIME_FIELDS

_NEW, _GET = 36, 38  # RTM_NEWQDISC, RTM_GETQDISC
_TC_BYTES = 20  # tcmsg: family and padding, interface, handle, parent, info
DUMP_DISCIPLINES = request(_GET, DUMP, bytes(_TC_BYTES))
_KIND, _STATS2, BASIC, _QUEUE = 1, 7, 1, 3
_BASIC_BYTES, _QUEUE_BYTES = 12, 20  # bytes u64, packets u32; five u32
_KEY = slice(HEADER_BYTES + 4, HEADER_BYTES + 16)  # interface, handle, parent
_STAMP = struct.Struct("<qq")
_MIN_EVERY_S = 0.01  # the kernel serializes these dumps with every change to an interface
_COST = 50  # dumps take a fiftieth of a core's time at most: a NIC with a hundred queues is read less often
_FAILURES_MOST = 10

_FIELDS = (
    *TIME_FIELDS,
    Field("interface", "<u4", "index", "index"),
    Field("handle", "<u4", "", "index"),
    Field("parent", "<u4", "", "index"),
    Field("bytes", "<u8", "bytes", "counter", 64),
    Field("packets", "<u4", "packets", "counter", 32),
    Field("backlog_packets", "<u4", "packets", "gauge"),
    Field("backlog_bytes", "<u4", "bytes", "gauge"),
    Field("drops", "<u4", "packets", "counter", 32),
    Field("requeues", "<u4", "packets", "counter", 32),
    Field("overlimits", "<u4", "events", "counter", 32),
)


def kind_and_statistics(data: memoryview, begin: int, end: int) -> tuple[str, dict[int, int]]:
    """Return the kind in a message about a discipline or class, and the places of its statistics, such as `BASIC`."""
    name, places = "", dict[int, int]()
    for kind, start, size in attributes(data, begin + HEADER_BYTES + _TC_BYTES, end):
        if kind == _KIND:
            name = bytes(data[start : start + size]).rstrip(b"\0").decode(errors="replace")
        elif kind == _STATS2:
            for inner, place, room in attributes(data, start, start + size):
                if room >= {BASIC: _BASIC_BYTES, _QUEUE: _QUEUE_BYTES}.get(inner, 0):
                    places[inner] = place
    return name, places


@dataclass(frozen=True)
class _Layout:
    """Positions of one discipline's statistics in its message, as long as the message keeps its length.

    Attributes:
        head: the message's first bytes: length, type, flags.
        basic: position of the basic statistics.
        queue: position of the queue statistics.
    """

    head: bytes
    basic: int
    queue: int


class QdiscTable:
    """The known disciplines; turns the kernel's answers into records of those whose statistics changed.

    Attributes:
        kinds: ``interface:handle`` -> the discipline's kind.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self._layouts: dict[bytes, _Layout] = {}
        self._known: dict[bytes, bytes] = {}  # interface, handle and parent -> the statistics last recorded
        self._found: set[bytes] = set()  # in this sample
        self._parts: list[bytes] = []
        self._stamp = b""

    def begin(self, t_ns: int, mono_ns: int) -> None:
        """Begin a sample, with the times for its records."""
        self._stamp = _STAMP.pack(t_ns, mono_ns)
        self._found.clear()

    def end(self) -> None:
        """End a sample whose dump is whole: forget the disciplines that are gone."""
        for key in self._known.keys() - self._found:
            del self._known[key], self._layouts[key]

    def records(self) -> bytes:
        """Return the sample's packed records."""
        if not self._parts:
            return b""
        records = b"".join(self._parts)
        self._parts.clear()
        return records

    def take(self, data: memoryview, length: int) -> bool:
        """Process one datagram of a dump; return True if more follow.

        Raises:
            OSError: the kernel refused the request.
        """
        return take_each(data, length, self._keep)

    def _keep(self, kind: int, data: memoryview, begin: int, end: int) -> None:
        """Make a record of a message if its statistics differ from the last ones."""
        if kind != _NEW or end - begin < HEADER_BYTES + _TC_BYTES:
            return
        message = bytes(data[begin:end])
        key = message[_KEY]
        layout = self._layouts.get(key)
        if layout is None or layout.head != message[:8]:
            layout = self._learn(key, message)
            if layout is None:
                return
        self._found.add(key)
        basic, queue = layout.basic, layout.queue
        statistics = message[basic : basic + _BASIC_BYTES] + message[queue : queue + _QUEUE_BYTES]
        if self._known.get(key) != statistics:
            self._known[key] = statistics
            self._parts += (self._stamp, key, statistics)

    def _learn(self, key: bytes, message: bytes) -> _Layout | None:
        """Find the statistics of one discipline, and store its kind; return None if it has no statistics."""
        name, places = kind_and_statistics(memoryview(message), 0, len(message))
        if name:
            index, handle = struct.unpack_from("=II", key)
            # a root comes before the children that share its handle, 0
            self.kinds.setdefault(f"{index}:{handle}", name)
        if BASIC not in places or _QUEUE not in places:
            return None
        self._layouts[key] = layout = _Layout(message[:8], places[BASIC], places[_QUEUE])
        return layout


class QdiscCollector:
    """Recorder of ``qdisc/qdisc.rec``: a record of each queueing discipline whenever its statistics have changed."""

    name = "qdisc"
    slow = False

    def __init__(self, context: Context) -> None:
        self._path = context.folder / QDISC_REC
        self.every_s = max(context.every_s, _MIN_EVERY_S)
        self._table = QdiscTable()
        self._due_ns = 0
        self._failures = 0
        self._facts: dict[str, Any] = {"samples": 0, "lost_answers": 0}

    def check(self) -> Check:
        """Check that the kernel answers, and which disciplines there are."""
        try:
            netlink = NetlinkSocket(ROUTE)
        except OSError as error:
            return Check(
                "unavailable",
                f"the kernel refuses route netlink: {error.strerror}",
                "run outside the sandbox that forbids netlink sockets",
            )
        try:
            table = QdiscTable()
            netlink.dump(DUMP_DISCIPLINES, table.take)
        except OSError as error:
            return Check(
                "unavailable",
                f"the kernel has no queueing disciplines to tell of: {error.strerror}",
                "a kernel with CONFIG_NET_SCHED",
            )
        finally:
            netlink.close()
        kinds = sorted(set(table.kinds.values()))
        if not kinds:
            return Check("degraded", "no interface of this network namespace has a queueing discipline")
        return Check("ok", f"queueing disciplines: {', '.join(kinds)}")

    def start(self) -> None:
        """Open the log and take the first sample."""
        self._netlink = NetlinkSocket(ROUTE)
        now_ns = time.monotonic_ns()
        self._sample(now_ns)  # finds the kinds for the log's header
        about = {
            "collector": self.name,
            "source": "RTM_GETQDISC, TCA_STATS2",
            "every_s": self.every_s,
            "interfaces": {str(index): name for index, name in socket.if_nameindex()},
            "kinds": dict(self._table.kinds),
        }
        self._writer = HoldingRecordWriter(self._path, _FIELDS, about)
        self._writer.hold(self._table.records(), now_ns)

    def sample(self) -> None:
        """Record the disciplines that changed.

        Raises:
            OSError: the disk is full, or the kernel has not answered ten times in a row.
        """
        now_ns = time.monotonic_ns()
        if now_ns >= self._due_ns:
            self._sample(now_ns)
            self._writer.hold(self._table.records(), now_ns)

    def stop(self) -> dict[str, Any]:
        """Take a last sample and close; return the counts and the kinds, with those that appeared since the start."""
        self._due_ns = 0
        try:
            self.sample()
        finally:
            self._netlink.close()
            self._writer.close()
        return self._facts | {"kinds": self._table.kinds}

    def _sample(self, now_ns: int) -> None:
        begun_ns = time.thread_time_ns()
        self._table.begin(time.time_ns(), now_ns)
        self._facts["samples"] += 1
        try:
            self._netlink.dump(DUMP_DISCIPLINES, self._table.take)
            self._table.end()
            self._failures = 0
            pause_ns = (time.thread_time_ns() - begun_ns) * _COST
            if pause_ns > self.every_s * 1e9:
                self._due_ns = now_ns + pause_ns
        except OSError as error:
            self._facts["lost_answers"] += 1
            self._failures += 1
            if self._failures >= _FAILURES_MOST:
                raise OSError(error.errno, f"the kernel tells no queueing disciplines: {error.strerror}") from error
