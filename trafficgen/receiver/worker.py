"""Runs a receiver worker: one loop, which accepts connections on its own socket and serves them in batches."""

from __future__ import annotations

import asyncio
import errno
import select
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NamedTuple

from ringtap.core.errors import MeasurementError, UsageError
from ringtap.trafficgen.flow_log import FLUSH_S, RECEIVED_FIELDS, FlowLog
from ringtap.trafficgen.protocol import token_digest
from ringtap.trafficgen.receiver.connection import ReceiverConnection
from ringtap.trafficgen.sender.completion_notices import Announcer

if TYPE_CHECKING:
    from ringtap.trafficgen.receiver.receiver import ReceiveOptions

_BUFFER_BYTES = 1 << 20
_MAX_EVENTS = 256
_MAX_ACCEPTS = 64
_TICK_S = 1.0
_RETRY_S = 0.0005
_HELLO_PATIENCE_S = 10.0  # a congested link may lose a hello several times: the fifth copy is sent after 6 s
MAX_PENDING_HELLOS = 512
_YOUNG_TICKS = 2  # a busy sender opens thousands of connections before it writes the first hello


@dataclass
class ReceiverCounts:
    """Counts of a receiver.

    Attributes:
        connections: connections with a valid hello.
        refused: connections with a wrong token or version, or beyond the limit.
        malformed: connections that violated the protocol, or were dropped because they sent no hello.
        idle: connections dropped because they were idle for too long.
        flows: flows received completely.
        unfinished: flows whose connection ended before their last byte.
        bytes: payload bytes received.
    """

    connections: int = 0
    refused: int = 0
    malformed: int = 0
    idle: int = 0
    flows: int = 0
    unfinished: int = 0
    bytes: int = 0

    def add(self, other: ReceiverCounts) -> None:
        """Add the counts of another loop."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class AcceptedConnection(NamedTuple):
    """A receiver worker's final message: the error of its log, empty if there was none, and its counts."""

    error: str
    counts: ReceiverCounts


class ReceiverWorker:
    """A receiver worker: ``asyncio.run(ReceiverWorker(...).run(...))`` in a thread or process of its own.

    Args:
        index: number of this loop, from 0.
        options: the receiver's options; it has created the log.
        max_connections: limit of this loop, beyond which connections are refused.
        max_pending_hellos: limit of connections without a valid hello; another one replaces the oldest, unless that
            one was accepted in the last second.

    Attributes:
        buffer: shared by all connections; the bytes of one are processed before those of the next are read.
        tick: seconds since the start.
    """

    def __init__(self, index: int, options: ReceiveOptions, max_connections: int, max_pending_hellos: int) -> None:
        self.digest = token_digest(options.token)
        self.counts = ReceiverCounts()
        self.buffer = bytearray(_BUFFER_BYTES)
        self.view = memoryview(self.buffer)
        self.epoll = select.epoll()
        self.tick = 0
        self.log = FlowLog(options.log_path, RECEIVED_FIELDS, None)
        self._index, self._loops = index, options.workers * options.threads
        self._announcer = None if options.arrivals is None else Announcer(options.arrivals)
        self._most, self._idle_s = max_connections, options.idle_s
        self._max_pending_hellos = max_pending_hellos
        self._connections: dict[int, ReceiverConnection] = {}
        self._pending: dict[int, ReceiverConnection] = {}  # connections without a valid hello, oldest first
        self._ended = asyncio.Event()
        self._error = ""

    async def run(self, listener: socket.socket, control: Connection, lock: threading.Lock) -> None:
        """Serve until ``control`` is readable or closed; then report to it."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._accept_again(listener)
        loop.add_reader(self.epoll.fileno(), self._events, listener)
        loop.add_reader(control.fileno(), self._ended.set)
        self._flush_regularly()
        self._drop_idle()
        await self._ended.wait()
        listener.close()
        for connection in list(self._connections.values()):
            connection.drop()
        self._flush()
        if self._announcer is not None:
            self._announcer.close()
        with lock, suppress(OSError):
            control.send(AcceptedConnection(self._error, self.counts))

    def arrived(self, flow: int) -> None:
        """Notify the sender on this host of a completed flow, which others may wait for."""
        if self._announcer is not None:
            self._announcer.tell(flow, time.monotonic_ns())
            self._announce()

    def admit(self, file: int) -> bool:
        """Admit a connection with a valid hello; return False if the limit is reached."""
        if len(self._connections) - len(self._pending) >= self._most:
            return False
        del self._pending[file]
        return True

    def forget(self, file: int) -> None:
        """Remove a connection that is being closed."""
        del self._connections[file]
        self._pending.pop(file, None)
        self.epoll.unregister(file)

    def connection(self, number: int) -> int:
        """Return the number, among the connections of all loops, of a connection of this loop."""
        return (number - 1) * self._loops + self._index + 1

    def _announce(self) -> None:
        if self._announcer is not None and not self._announcer.flush() and not self._ended.is_set():
            asyncio.get_running_loop().call_later(_RETRY_S, self._announce)

    def _events(self, listener: socket.socket) -> None:
        connections, listening = self._connections, listener.fileno()
        for file, events in self.epoll.poll(0, _MAX_EVENTS):
            if file == listening:
                self._accept(listener)
                continue
            connection = connections.get(file)
            if connection is not None:
                connection.event(events)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    # New connections wait in the kernel until others have been closed
                    self._drop_oldest_pending()
                    self.epoll.unregister(listener.fileno())
                    asyncio.get_running_loop().call_later(_TICK_S, self._accept_again, listener)
                    return
                continue  # the sender closed it before it was accepted
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            file = sock.fileno()
            self._connections[file] = self._pending[file] = ReceiverConnection(self, sock)
            self.epoll.register(file, select.EPOLLIN)
            while len(self._pending) > self._max_pending_hellos and self._drop_oldest_pending():
                pass

    def _drop_oldest_pending(self) -> bool:
        """Drop the oldest connection without a hello, to make room for senders; return False if it is too young."""
        file, oldest = next(iter(self._pending.items()), (-1, None))
        if oldest is None or self.tick - oldest.tick < _YOUNG_TICKS:
            return False
        oldest.event(select.EPOLLIN)  # its hello may have arrived unread
        if self._pending.get(file) is oldest:
            oldest.malformed()
        return True

    def _accept_again(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self.epoll.register(listener.fileno(), select.EPOLLIN)

    def _drop_idle(self) -> None:
        self.tick += 1
        for connection in list(self._connections.values()):
            silent_s = (self.tick - connection.tick) * _TICK_S
            if not connection.welcome and silent_s > min(_HELLO_PATIENCE_S, self._idle_s):
                connection.malformed()
            elif silent_s > self._idle_s:
                self.counts.idle += 1
                connection.drop()
        if not self._ended.is_set():
            asyncio.get_running_loop().call_later(_TICK_S, self._drop_idle)

    def _flush_regularly(self) -> None:
        self._flush()
        if not self._ended.is_set():
            asyncio.get_running_loop().call_later(FLUSH_S, self._flush_regularly)

    def _flush(self) -> None:
        try:
            self.log.flush()
        except (MeasurementError, UsageError) as error:
            self._error = self._error or str(error)
            self._ended.set()
