"""What is known of each connection: the kernel's answers go in, records of those that changed come out."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Iterable

from ringtap.collectors import sockets_layout as layout
from ringtap.collectors.netlink import DUMP_INTERRUPTED, aligned, is_done, message_at, request

APART = 1024  # bytes of the buffer for an answer to one question
_STAMP = struct.Struct("<qq")
_HEAD_BYTES = 8
_INODE = slice(12, 16)  # of the queues
_CARRIED = struct.Struct("<QQ")  # bytes_acked, bytes_received
_CARRIED_AT = 120  # in what a record holds after the identity
_BUSY_BYTES = 16_384  # a connection that carried so much within two seconds counts as busy
_WITHIN_NS = 2_000_000_000
BUSY_NS = 10_000_000_000  # so long after; an iteration may take that long

_Row = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]


class SocketTable:
    """The connections of a network namespace.

    Args:
        want: called with the inode of a connection that is new, or has been accepted by a process meanwhile.
        asked_most: how many connections to ask for by name at most.

    Attributes:
        asked: the connections to ask for by name.
        question: the messages that do so, one after another.
        interrupted: messages of dumps during which the kernel's table changed.
    """

    def __init__(self, want: Callable[[int], None], asked_most: int) -> None:
        self._want, self._asked_most = want, asked_most
        self._known: dict[bytes, bytes] = {}  # identity -> what its last record holds
        self._current = self._known  # what this sample finds: the same, or a new one during a dump
        self._family: dict[bytes, bytes] = {}
        self._request: dict[bytes, bytes] = {}
        self._changed: set[bytes] = set()  # since the last dump
        self._since: dict[bytes, tuple[int, int]] = {}  # identity -> when, and bytes carried until then
        self._busy: dict[bytes, tuple[int, float]] = {}  # identity -> until when, and how busy
        self._layouts: dict[bytes, layout.Layout] = {}  # by the first bytes of a message
        self._parts: list[bytes] = []  # of this sample's records
        self._stamp, self._now_ns = b"", 0
        self.asked: list[bytes] = []
        self.question = b""
        self.interrupted = 0

    def __len__(self) -> int:
        return len(self._known)

    def begin(self, t_ns: int, mono_ns: int) -> None:
        """A sample begins: the times that its records get."""
        self._stamp, self._now_ns = _STAMP.pack(t_ns, mono_ns), mono_ns

    def records(self) -> bytes:
        """The sample's records, packed."""
        if not self._parts:
            return b""
        records = b"".join(self._parts)
        self._parts.clear()
        return records

    def begin_dump(self) -> None:
        """Everything is being told: what is not has vanished."""
        self._current = {}

    def end_dump(self) -> None:
        """Everything has been told."""
        known, self._known = self._known, self._current
        for identity in known.keys() - self._known.keys():
            self._vanish(identity, known[identity])
        for identity in self._changed:
            self._weigh(identity)
        self._changed.clear()
        self._choose()

    def break_off_dump(self) -> None:
        """The rest of what was being told is lost: nothing has vanished."""
        self._known.update(self._current)
        self._current = self._known

    def take(self, data: memoryview, length: int) -> bool:
        """One datagram of a dump; returns whether more is to come.

        Raises:
            OSError: the kernel's refusal.
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
            if flags & DUMP_INTERRUPTED:  # every message of such a dump says so: each comes by here
                self.interrupted += 1
                self._layouts.pop(head, None)
            position += aligned(size)

    def take_answers(self, data: memoryview) -> None:
        """The answers to the question, `APART` bytes from one to the next, in its order.

        Raises:
            OSError: the kernel's refusal.
        """
        asked, count = self.asked, len(self.asked)
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
        """An answer unlike the others; returns whether it says that the connection has vanished."""
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
            self._vanish(identity, stable)
        return True

    def _learn(self, data: memoryview, position: int, size: int, kind: int) -> bool:
        """Keep one message whose layout is not known yet; returns whether it had a tcp_info."""
        if kind not in (layout.BY_FAMILY, layout.COMPATIBLE):
            return False
        form = layout.learn_layout(data, position, size, APART)
        if form is None:
            return False
        head = bytes(data[position : position + _HEAD_BYTES])
        self._layouts[head] = form
        whole = bytes(data[position : position + size]).ljust(form.step, b"\0")
        return bool(self._keep(form.unpack.iter_unpack(whole), head, form))

    def _keep(self, rows: Iterable[_Row], head: bytes, form: layout.Layout) -> int:
        """Make records of the rows that changed; returns how many rows there were before one of another layout."""
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

    def _vanish(self, identity: bytes, stable: bytes) -> None:
        """The last record of a connection: state 0 and what was last known of it."""
        self._parts += (self._stamp, self._family.pop(identity) + b"\0\0\0", identity, stable)
        self._request.pop(identity)
        self._changed.discard(identity)
        self._since.pop(identity, None)
        self._busy.pop(identity, None)

    def _weigh(self, identity: bytes) -> None:
        """Find out whether a connection that changed carries enough to be asked for by name."""
        now_ns = self._now_ns
        carried = sum(_CARRIED.unpack_from(self._known[identity], _CARRIED_AT))
        begun_ns, before = self._since.setdefault(identity, (now_ns, carried))
        if carried - before >= _BUSY_BYTES:
            self._busy[identity] = (now_ns + BUSY_NS, (carried - before) / max(1, now_ns - begun_ns))
            self._since[identity] = (now_ns, carried)
        elif now_ns - begun_ns > _WITHIN_NS:
            self._since[identity] = (now_ns, carried)

    def _choose(self) -> None:
        """Which connections to ask for until the next dump: the busy ones, of many the busiest."""
        self._busy = {identity: busy for identity, busy in self._busy.items() if busy[0] > self._now_ns}
        self.asked = list(self._busy)
        if len(self.asked) > self._asked_most:
            self.asked.sort(key=lambda identity: self._busy[identity][1], reverse=True)
            del self.asked[self._asked_most :]
        self.question = b"".join([self._request[identity] for identity in self.asked])
