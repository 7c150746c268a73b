"""Keeps the launcher's connection pools: idle connections, flows that wait for one, the opening of further ones."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ringtap.trafficgen.sender import ipc
from ringtap.trafficgen.sender.ipc import Channel, SharedSlots

if TYPE_CHECKING:
    from ringtap.trafficgen.sender.worker import Destination

_MIN_SPARE = 16
_BUSY_A_SPARE = 4  # busy connections per spare one
_MAX_AT_ONCE = 64


class Waiting(NamedTuple):
    """A flow that is due: number, payload (0: open-ended), CLOCK_MONOTONIC time due."""

    number: int
    size_bytes: int
    due_ns: int


class WorkerHandle:
    """The launcher's side of one sender worker.

    Attributes:
        channel: channel to the worker.
        slots: the flows that the launcher has started on the worker's connections.
        links: the worker's connections by slot.
    """

    def __init__(self, channel: Channel, slots: SharedSlots) -> None:
        self.channel = channel
        self.slots = slots
        self.links: dict[int, PooledConnection] = {}


class PooledConnection:
    """A connection, or in ``new`` mode a socket that is not yet connected.

    Attributes:
        busy: True while it carries a flow.
        once: True if it cannot be used again after its flow.
        sent: bytes of the flow and its header that the launcher has sent.
    """

    __slots__ = ("busy", "file", "once", "route", "sent", "slot", "sock", "worker")

    def __init__(self, route: ConnectionPool, worker: WorkerHandle, slot: int, file: int, once: bool) -> None:
        self.route, self.worker, self.slot, self.file, self.once = route, worker, slot, file, once
        self.sock = socket.socket(fileno=file)
        self.busy = False
        self.sent = 0


class ConnectionPool:
    """A connection pool: all connections from one source to one destination.

    Args:
        index: its number, which the sender workers use too.
        place: its endpoints.
        workers: the sender workers, which open the connections in turn.
        most: most connections at a time.
        new: True if each flow has a connection of its own.

    Attributes:
        waiting: flows that found no idle connection.
        why: reason of the last failed connection, 0 if there was none.
        heard_ns: CLOCK_MONOTONIC of the receiver's last message, 0 without one.
        joined_any: True once a connection (in ``new`` mode a socket) was obtained.
    """

    def __init__(self, index: int, place: Destination, workers: Sequence[WorkerHandle], most: int, new: bool) -> None:
        self.index, self.source, self.destination = index, place.source_index, place.destination_index
        self.address, self.name = place.address, place.name
        self.waiting: deque[Waiting] = deque()
        self.why = 0
        self.heard_ns = 0
        self.joined_any = False
        self.pending = 0
        self._workers = workers
        self._idle: list[list[PooledConnection]] = [[] for _ in workers]
        self._worker_index = {id(worker): at for at, worker in enumerate(workers)}
        self._turn = index
        self._opened_by = index
        self._idle_count = 0
        self._count = 0
        self._most = most
        self._new = new

    def take(self) -> PooledConnection | None:
        """Take the most recently used idle connection of the next sender worker that has one; None if there is none."""
        for _ in self._idle:
            self._turn = (self._turn + 1) % len(self._idle)
            if self._idle[self._turn]:
                self._idle_count -= 1
                return self._idle[self._turn].pop()
        return None

    def give(self, link: PooledConnection) -> None:
        """Add an idle connection."""
        self._idle_count += 1
        self._idle[self._worker_index[id(link.worker)]].append(link)

    def joined(self) -> None:
        """Count a requested connection that has been established."""
        self.pending -= 1
        self.joined_any = True
        self._count += 1

    def refused(self, why: int) -> None:
        """Count a requested connection that could not be made."""
        self.pending -= 1
        self.why = why

    def left(self, link: PooledConnection) -> None:
        """Remove a connection that is gone."""
        self._count -= 1
        if not link.busy:
            idle = self._idle[self._worker_index[id(link.worker)]]
            if link in idle:
                idle.remove(link)
                self._idle_count -= 1

    def open_ahead(self, count: int) -> None:
        """Request up to ``count`` connections, within the limit, from the sender workers in turn."""
        count = min(count, self._most - self._count - self.pending)
        if count <= 0:
            return
        self.pending += count
        share, more = divmod(count, len(self._workers))
        for at in range(len(self._workers)):
            self._opened_by = (self._opened_by + 1) % len(self._workers)
            wanted = share + (at < more)
            if wanted:
                channel = self._workers[self._opened_by].channel
                channel.put(ipc.OPEN, self.index, wanted)
                channel.flush()

    def open_more(self, spares: bool = True) -> None:
        """Request a connection per waiting flow, and spare ones, because a handshake behind a long queue takes long."""
        wanted = len(self.waiting) - self.pending
        if not spares:
            self.open_ahead(min(wanted, _MAX_AT_ONCE))
            return
        spare = _MAX_AT_ONCE if self._new else max(_MIN_SPARE, self.busy() // _BUSY_A_SPARE)
        lacking = spare - self._idle_count - max(0, -wanted)
        if wanted > 0 or lacking > spare // 2:
            self.open_ahead(min(max(0, wanted) + max(0, lacking), _MAX_AT_ONCE))

    def busy(self) -> int:
        """Return the number of connections that carry a flow."""
        return self._count - self._idle_count
