"""Records TCP connections of this network namespace, from the kernel's socket diagnostics, without privilege.

For a dump of all connections the kernel walks its whole hash table: 0.15 to 1.3 ms on a machine with 262,144 buckets,
however few connections there are. All connections are therefore read three times per second at most, by a dump only if
some may be new, and in between only the busy ones. Answers are stored unchanged, and only if they differ from the last
ones.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ringtap.collectors import inet_diag_layout as layout
from ringtap.collectors.closing_sockets import ClosingSockets
from ringtap.collectors.collector_interface import Check, Context
from ringtap.collectors.kernel_files import PROC
from ringtap.collectors.netlink import (
    DUMP,
    DUMP_INTERRUPTED,
    SOCK_DIAG,
    NetlinkSocket,
    aligned,
    is_done,
    message_at,
    request,
)
from ringtap.collectors.process_facts import command_of, rank_of, socket_inodes
from ringtap.core.append_only_logs import HoldingRecordWriter, JsonLinesWriter
from ringtap.core.errors import error_message
from ringtap.core.run_directory_schema import OWNERS_JSONL, SOCKETS_REC

_MIN_PAUSE_S = 1.0
_COST_SHARE = 0.01  # share of one core, at most
_TRIES = 3  # a socket that no process of the job holds by then belongs to another one


class SocketOwners:
    """Recorder of ``owners.jsonl``: one line per socket of the recorded processes.

    A look-up reads the open files of every recorded process, at most once a second and in a thread of its own.

    Args:
        path: the file.
        pids: returns the pids of the recorded processes; may be expensive.

    Attributes:
        failure: error that ended the look-ups early; empty if none did.
    """

    proc: Path = PROC

    def __init__(self, path: Path, pids: Callable[[], list[int]]) -> None:
        self._log = JsonLinesWriter(path)
        self._pids = pids
        self._wanted: dict[int, int] = {}  # inode -> look-ups so far
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="socket owners", daemon=True)
        self.failure = ""
        self._thread.start()

    def want(self, inode: int) -> None:
        """Request the look-up of an inode; 0 (a connection that has not been accepted) has no owner."""
        if inode:
            with self._lock:
                self._wanted.setdefault(inode, 0)
            self._news.set()

    def close(self) -> None:
        """Look up the remaining inodes, and close the file."""
        self._stop.set()
        self._news.set()
        self._thread.join()
        self._log.close()

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                self._news.wait()
                self._news.clear()
                begun_s = time.thread_time()
                self._look_up()
                self._stop.wait(max(_MIN_PAUSE_S, (time.thread_time() - begun_s) / _COST_SHARE))
            self._look_up()
        except OSError as error:  # for example a full disk; the sockets are recorded nevertheless
            self.failure = error_message(error)

    def _look_up(self) -> None:
        """Look for the wanted inodes in one pass over the open files of the recorded processes."""
        with self._lock:
            wanted = set(self._wanted)
        if not wanted:
            return
        found: dict[int, int] = {}
        for pid in sorted(self._pids()):  # a child also has its parent's sockets open: the parent is the owner
            for inode in socket_inodes(pid, self.proc) & wanted:
                found.setdefault(inode, pid)
        people = {pid: (rank_of(pid, self.proc), command_of(pid, self.proc)) for pid in set(found.values())}
        now_ns = time.time_ns()
        for inode, pid in found.items():
            rank, command = people[pid]
            self._log.append({"t_ns": now_ns, "inode": inode, "pid": pid, "rank": rank, "command": command})
        with self._lock:
            for inode in wanted:
                self._wanted[inode] += 1
                if inode in found or self._wanted[inode] >= _TRIES:
                    del self._wanted[inode]
            if self._wanted:
                self._news.set()


APART = 1024  # bytes of the buffer for the answer to one query
_STAMP = struct.Struct("<qq")
_HEAD_BYTES = 8
_IDENTITY = slice(20, 20 + layout.IDENTITY_BYTES)  # in a message
_QUEUES_BYTES = 16
_INODE = slice(12, 16)  # in the queues
_CARRIED = struct.Struct("<QQ")  # bytes_acked, bytes_received
_CARRIED_AT = 120  # offset in a record after the identity
_BUSY_BYTES = 16_384  # a connection that carried this much within two seconds counts as busy
_WITHIN_NS = 2_000_000_000
BUSY_NS = 10_000_000_000  # time for which it counts as busy; an iteration may take that long

_Row = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]


class SocketTable:
    """The connections of a network namespace.

    Args:
        want: called with the inode of a connection that is new, or that a process has accepted since.
        asked_most: most connections to query individually.
        awaits_ends: whether the last counters of a connection that vanished may come later, with `take_ends`.

    Attributes:
        asked: the connections to query individually.
        question: the request messages for them, one after another.
        interrupted: messages of dumps during which the kernel's table changed.
        ends: connections whose last counters were told.
    """

    def __init__(self, want: Callable[[int], None], asked_most: int, awaits_ends: bool = False) -> None:
        self._awaits_ends = awaits_ends
        self._end_layouts: dict[bytes, layout.MessageLayout] = {}
        self._leaving: dict[bytes, bytes] = {}  # vanished, and their ends have not been told yet
        self.ends = 0
        self._want, self._asked_most = want, asked_most
        self._known: dict[bytes, bytes] = {}  # identity -> contents of its last record
        self._current = self._known  # connections found in this sample: the same dict, or a new one during a dump
        self._family: dict[bytes, bytes] = {}
        self._request: dict[bytes, bytes] = {}
        self._changed: set[bytes] = set()  # since the last dump
        self._since: dict[bytes, tuple[int, int]] = {}  # identity -> time, and bytes carried until then
        self._busy: dict[bytes, tuple[int, float]] = {}  # identity -> end of being busy, and rate
        self._layouts: dict[bytes, layout.MessageLayout] = {}  # by the first bytes of a message
        self._parts: list[bytes] = []  # of this sample's records
        self._stamp, self._now_ns = b"", 0
        self.asked: list[bytes] = []
        self.question = b""
        self.interrupted = 0

    def __len__(self) -> int:
        return len(self._known)

    def begin(self, t_ns: int, mono_ns: int) -> None:
        """Begin a sample, with the times for its records."""
        self._stamp, self._now_ns = _STAMP.pack(t_ns, mono_ns), mono_ns

    def records(self) -> bytes:
        """Return the sample's packed records."""
        if not self._parts:
            return b""
        records = b"".join(self._parts)
        self._parts.clear()
        return records

    def take_ends(self, messages: Iterable[bytes]) -> None:
        """Record the last counters of connections that the kernel has destroyed; unknown ones are left out."""
        is_asked = False
        for message in messages:
            identity = message[_IDENTITY]
            last = self._leaving.pop(identity, None)
            if last is None:
                newest, last = self._current.pop(identity, None), self._known.pop(identity, None)
                last = newest or last  # a dump may have met it
                is_asked |= identity in self._busy
            if last is None:
                continue
            self.ends += 1
            head = message[:_HEAD_BYTES]
            form = self._end_layouts.get(head) or layout.learn_layout(memoryview(message), 0, len(message), APART)
            if form is not None:
                self._end_layouts[head] = form
                _, who, _, _, _, before, after = form.unpack.unpack(message.ljust(form.step, b"\0"))
                stable = last[:_QUEUES_BYTES] + before + after + form.fill  # the kernel has cleared inode and queues
                if stable != last:
                    self._parts += (self._stamp, who, identity, stable)
                    last = stable
            self._vanish(identity, last)
        if is_asked:
            self._choose()

    def settle(self) -> None:
        """Record the connections that vanished in an earlier sample, and whose ends were not told."""
        for identity, stable in self._leaving.items():
            self._vanish(identity, stable)
        self._leaving.clear()

    def begin_dump(self) -> None:
        """Begin a dump of all connections; those that it does not contain have vanished."""
        self._current = {}

    def end_dump(self) -> None:
        """End a dump: record vanished connections, and choose the busy ones."""
        known, self._known = self._known, self._current
        for identity in known.keys() - self._known.keys():
            self._miss(identity, known[identity])
        self.choose_busy()

    def choose_busy(self) -> None:
        """Choose the busy connections, when all have been read."""
        for identity in self._changed:
            self._weigh(identity)
        self._changed.clear()
        self._choose()

    def break_off_dump(self) -> None:
        """Abandon a dump whose rest is lost; no connection counts as vanished."""
        self._known.update(self._current)
        self._current = self._known

    def take(self, data: memoryview, length: int) -> bool:
        """Process one datagram of a dump; return True if more follow.

        Raises:
            OSError: the kernel refused the request.
        """
        position = 0
        while True:
            head = bytes(data[position : position + _HEAD_BYTES])
            form = self._layouts.get(head)
            if form is not None:
                end = length - (length - position) % form.step
                kept = self._keep(form.unpack.iter_unpack(data[position:end]), head, form)
                if kept:
                    position += kept * form.step
                    continue
            size, kind, flags = message_at(data, position, length)
            if not size:
                return not is_done(kind)
            self._learn(data, position, size, kind)
            if flags & DUMP_INTERRUPTED:  # every message of such a dump has this flag and is handled here
                self.interrupted += 1
                self._layouts.pop(head, None)
            position += aligned(size)

    @property
    def names(self) -> list[bytes]:
        """All connections."""
        return list(self._known)

    def question_for(self, names: Iterable[bytes]) -> bytes:
        """Return the request messages for connections, one after another."""
        return b"".join([self._request[identity] for identity in names])

    def take_answers(self, data: memoryview, asked: Sequence[bytes]) -> None:
        """Process the answers about connections in the order of the requests, at multiples of `APART` bytes.

        Raises:
            OSError: the kernel refused the request.
        """
        count = len(asked)
        number = vanished = 0
        while number < count:
            position = number * APART
            head = bytes(data[position : position + _HEAD_BYTES])
            form = self._layouts.get(head)
            kept = 0
            if form is not None:
                kept = self._keep(form.unpack_apart.iter_unpack(data[position : count * APART]), head, form)
            if not kept:
                vanished += self._take_one(data[position : position + APART], asked[number])
            number += kept or 1
        if vanished:
            self._choose()

    def _take_one(self, data: memoryview, identity: bytes) -> bool:
        """Process an answer of unknown layout; return True if the connection has vanished."""
        try:
            size, kind, _ = message_at(data, 0, len(data))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            size = kind = 0
        if size and self._learn(data, 0, size, kind):
            return False
        stable = self._known.pop(identity, None)
        if stable is not None:
            self._miss(identity, stable)
        return True

    def _learn(self, data: memoryview, position: int, size: int, kind: int) -> bool:
        """Keep one message whose layout is not known yet; return True if it had a tcp_info."""
        if kind not in (layout.BY_FAMILY, layout.COMPATIBLE):
            return False
        form = layout.learn_layout(data, position, size, APART)
        if form is None:
            return False
        head = bytes(data[position : position + _HEAD_BYTES])
        self._layouts[head] = form
        whole = bytes(data[position : position + size]).ljust(form.step, b"\0")
        return bool(self._keep(form.unpack.iter_unpack(whole), head, form))

    def _keep(self, rows: Iterable[_Row], head: bytes, form: layout.MessageLayout) -> int:
        """Make records of the rows that changed; return the number of rows before the first of another layout."""
        known, current, changed = self._known, self._current, self._changed
        parts, stamp = self._parts, self._stamp
        info_head, fill = form.info_head, form.fill
        count = 0
        for found, who, identity, queues, attribute, before, after in rows:
            if found != head or attribute != info_head:
                break
            count += 1
            stable = queues + before + after + fill
            last = known.get(identity)
            if last != stable:
                parts += (stamp, who, identity, stable)
                changed.add(identity)
                if last is None or last[_INODE] != stable[_INODE]:
                    self._meet(identity, who[:1], stable)
            current[identity] = stable
        return count

    def _meet(self, identity: bytes, family: bytes, stable: bytes) -> None:
        self._family[identity] = family
        self._request[identity] = request(layout.BY_FAMILY, 0, layout.one_request(family[0], identity))
        self._want(int.from_bytes(stable[_INODE], "little"))

    def _miss(self, identity: bytes, stable: bytes) -> None:
        """Note that a connection has vanished; its end may be told until the next sample."""
        if self._awaits_ends:
            self._leaving[identity] = stable
            self._changed.discard(identity)
            self._busy.pop(identity, None)
        else:
            self._vanish(identity, stable)

    def _vanish(self, identity: bytes, stable: bytes) -> None:
        """Write the last record of a connection: state 0 and its last known values."""
        self._parts += (self._stamp, self._family.pop(identity) + b"\0\0\0", identity, stable)
        self._request.pop(identity)
        self._changed.discard(identity)
        self._since.pop(identity, None)
        self._busy.pop(identity, None)

    def _weigh(self, identity: bytes) -> None:
        """Update whether a connection that changed counts as busy."""
        now_ns = self._now_ns
        carried = sum(_CARRIED.unpack_from(self._known[identity], _CARRIED_AT))
        begun_ns, before = self._since.setdefault(identity, (now_ns, carried))
        if carried - before >= _BUSY_BYTES:
            self._busy[identity] = (now_ns + BUSY_NS, (carried - before) / max(1, now_ns - begun_ns))
            self._since[identity] = (now_ns, carried)
        elif now_ns - begun_ns > _WITHIN_NS:
            self._since[identity] = (now_ns, carried)

    def _choose(self) -> None:
        """Choose the connections to query until the next dump: the busy ones, or the busiest if there are too many."""
        self._busy = {identity: busy for identity, busy in self._busy.items() if busy[0] > self._now_ns}
        self.asked = list(self._busy)
        if len(self.asked) > self._asked_most:
            self.asked.sort(key=lambda identity: self._busy[identity][1], reverse=True)
            del self.asked[self._asked_most :]
        self.question = self.question_for(self.asked)


_READ_ALL_EVERY_NS = 300_000_000
_READ_ALL_COST = 50  # that takes a fiftieth of a core's time at most
_DUMP_EVERY_NS = 10_000_000_000  # at least: a connection may come without being opened here (CRIU)
_ASKED_INSTEAD = 128  # connections that are asked for by name instead of a dump; for more, a dump may cost less
_ASKED_MOST = 32  # queries in one sample: 0.06 ms with warm caches, 0.15 ms with cold ones
_FAILURES_MOST = 10  # in a row


class SocketsCollector:
    """Recorder of ``sockets/sockets.rec``, a record for each connection that changed, and ``sockets/owners.jsonl``."""

    name = "sockets"
    slow = False

    def __init__(self, context: Context) -> None:
        self._context = context
        self.every_s = context.every_s
        self._all_due_ns = self._dump_due_ns = 0
        self._failures = 0
        self._facts = {"all_read": 0, "dumps": 0, "samples": 0, "lost_answers": 0, "most_connections": 0}

    def check(self) -> Check:
        """Check that the kernel answers, and how much of tcp_info it has."""
        if sys.byteorder != "little":
            return Check("unavailable", "records of sockets are the kernel's own bytes, and this machine is big-endian")
        try:
            netlink, requests = _connect()
            netlink.close()
            absent = layout.absent_fields(_kernel_info_bytes())
        except OSError as error:
            return Check(
                "unavailable",
                f"the kernel refuses socket diagnostics: {error.strerror}",
                "ask the administrator to load the modules inet_diag and tcp_diag (modprobe tcp_diag); "
                "in a container, to allow netlink sockets",
            )
        if absent:
            return Check("degraded", f"this kernel's tcp_info is old: it lacks {', '.join(absent)}", "a newer kernel")
        how = "one walk for IPv4 and IPv6" if len(requests) == 1 else "IPv4 and IPv6 apart"
        return Check("ok", f"TCP connections of this network namespace, {how}")

    def start(self) -> None:
        """Open the socket and the logs and take the first sample."""
        self._netlink, self._requests = _connect()
        self._slots = [self._netlink.buffer[at : at + APART] for at in range(0, _ASKED_MOST * APART, APART)]
        info_bytes = _kernel_info_bytes()
        about = {
            "collector": self.name,
            "source": "NETLINK_SOCK_DIAG, INET_DIAG_INFO",
            "every_s": self.every_s,
            "dump_every_s": max(self.every_s, _READ_ALL_EVERY_NS / 1e9),
            "asked_by_name_most": _ASKED_MOST,
            "asked_by_name_s": BUSY_NS / 1e9,
            "kernel_tcp_info_bytes": info_bytes,
            "absent": layout.absent_fields(info_bytes),
        }
        self._writer = HoldingRecordWriter(self._context.folder / SOCKETS_REC, layout.FIELDS, about)
        self._owners = SocketOwners(self._context.folder / OWNERS_JSONL, self._context.pids)
        self._closing: ClosingSockets | None = None
        with contextlib.suppress(OSError):  # then the last bytes of a connection are missing
            self._closing = ClosingSockets()
        self._table = SocketTable(self._owners.want, _ASKED_MOST, awaits_ends=self._closing is not None)
        self._opened = OpenedConnections()
        self._opened_before: tuple[int, int] | None = None
        self.sample()

    def sample(self) -> None:
        """Record the connections that changed.

        Raises:
            OSError: the disk is full, or the kernel has not answered ten times in a row.
        """
        now_ns = time.monotonic_ns()
        self._table.begin(time.time_ns(), now_ns)
        self._facts["samples"] += 1
        self._take_ends()
        self._table.settle()
        try:
            if now_ns >= self._all_due_ns:
                self._read_all(now_ns)
            elif self._table.asked:
                self._ask(self._table.question, self._table.asked)
            self._failures = 0
        except OSError as error:  # for example answers that did not fit (ENOBUFS): the next sample is a dump
            self._facts["lost_answers"] += 1
            self._failures += 1
            self._all_due_ns = self._dump_due_ns = 0
            self._table.break_off_dump()
            self._netlink.drain()
            if self._failures >= _FAILURES_MOST:
                raise OSError(error.errno, f"the kernel's socket diagnostics fail: {error.strerror}") from error
        self._writer.hold(self._table.records(), now_ns)

    def stop(self) -> dict[str, Any]:
        """Take a last sample of all connections and close; return the numbers of samples, dumps and losses."""
        self._all_due_ns = 0
        try:
            self.sample()
            self._take_ends()
            self._table.settle()
            self._writer.hold(self._table.records(), time.monotonic_ns())
        finally:
            self._netlink.close()
            self._opened.close()
            if self._closing:
                self._closing.close()
            self._writer.close()
            self._owners.close()
        facts = self._facts | {"interrupted_messages": self._table.interrupted, "ends": self._table.ends}
        if self._closing:
            facts |= {"lost_ends": self._closing.lost, "pauses": self._closing.pauses}
        return facts | ({"owners_stopped": self._owners.failure} if self._owners.failure else {})

    def _read_all(self, now_ns: int) -> None:
        """Read all connections: by name, unless some may be new, or there are many."""
        begun_ns = time.thread_time_ns()
        opened = self._opened.read()
        none_new = opened is not None and opened == self._opened_before and now_ns < self._dump_due_ns
        if none_new and len(self._table) <= _ASKED_INSTEAD:
            names = self._table.names
            for first in range(0, len(names), _ASKED_MOST):
                some = names[first : first + _ASKED_MOST]
                self._ask(self._table.question_for(some), some)
            self._table.choose_busy()
        else:
            self._dump()
            self._opened_before, self._dump_due_ns = opened, now_ns + _DUMP_EVERY_NS
        self._facts["all_read"] += 1
        self._facts["most_connections"] = max(self._facts["most_connections"], len(self._table))
        cost_ns = time.thread_time_ns() - begun_ns
        every_ns = int(self.every_s * 1e9)
        # half a period early, because samples are slightly early or late
        self._all_due_ns = now_ns + max(_READ_ALL_EVERY_NS, every_ns, cost_ns * _READ_ALL_COST) - every_ns // 2

    def _dump(self) -> None:
        self._table.begin_dump()
        for message in self._requests:
            self._netlink.dump(message, self._table.take)
        self._take_ends()  # of connections that ended meanwhile
        self._table.end_dump()
        self._facts["dumps"] += 1

    def _take_ends(self) -> None:
        if self._closing:
            self._table.take_ends(self._closing.take())

    def _ask(self, question: bytes, asked: Sequence[bytes]) -> None:
        """Query connections by name; each answer is a datagram of its own."""
        receive = self._netlink.receive_into
        self._netlink.send(question)
        for slot in self._slots[: len(asked)]:
            receive(slot)
        self._table.take_answers(self._netlink.buffer, asked)


class OpenedConnections:
    """The numbers of TCP connections that this network namespace has opened and accepted."""

    def __init__(self) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):  # then any connection may be new
            self._fd = os.open(PROC / "thread-self/net/snmp", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> tuple[int, int] | None:
        """Return the numbers; None if they are not known."""
        try:
            text = os.pread(self._fd, 1 << 14, 0)
            names, values = (line.split() for line in text.split(b"\n") if line.startswith(b"Tcp:"))
            active, passive = (int(values[names.index(name)]) for name in (b"ActiveOpens", b"PassiveOpens"))
            return active, passive
        except (OSError, ValueError, IndexError):
            return None

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)


def _connect() -> tuple[NetlinkSocket, list[bytes]]:
    """Return a socket on which the kernel has answered, and the requests for a dump on it.

    Raises:
        OSError: the kernel answers neither kind of request.
    """
    netlink, failures = NetlinkSocket(SOCK_DIAG), []
    for compatible in (True, False):
        kind = layout.COMPATIBLE if compatible else layout.BY_FAMILY
        requests = [request(kind, DUMP, body) for body in layout.dump_requests(compatible)]
        try:
            for message in requests:
                netlink.dump_each(message, lambda *_: None)
            return netlink, requests
        except OSError as error:
            failures.append(error)
    netlink.close()
    raise failures[-1]


def _kernel_info_bytes() -> int:
    """Return the length of this kernel's tcp_info, from an unconnected socket."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return len(probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1024))
