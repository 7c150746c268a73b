"""The sender's kept connections: a pool a destination, each connection carrying one flow at a time.

Plain non-blocking sockets on the event loop's readiness calls, not transports: the first bytes of a flow go to the
kernel within the launch, and what the kernel took is known to the byte.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Protocol

from ringtap.errors import UsageError
from ringtap.trafficgen import protocol
from ringtap.trafficgen.sockets import SocketOptions, congestion_control, errno_words, outgoing_socket, unacked_bytes

_CHUNK_BYTES = 256 * 1024
# Noise, so that no link or tunnel compresses it away
_PAYLOAD = memoryview(Random(0).randbytes(_CHUNK_BYTES))
_LEAST_SPARE = 16
_BUSY_A_SPARE = 4  # one idle connection for so many busy ones
_MOST_AT_ONCE = 8
_BACK_PRESSURE = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS)


class SentFlow:
    """A flow whose time has come: what was meant, and what became of it.

    Attributes:
        number: line of the plan, from 0.
        destination: index among the plan's destinations.
        size_bytes: payload.
        due_ns: CLOCK_MONOTONIC time at which it was to start.
        start_ns: CLOCK_REALTIME when its first byte went to the kernel, 0 before.
        lateness_ns: first byte after ``due_ns``.
        sent_bytes: payload that the kernel took.
        acked_bytes: payload that the receiver's kernel acknowledged, counted when the flow ends.
        received_ns: the receiver's CLOCK_REALTIME when it had everything, 0 before.
        finish_ns: CLOCK_REALTIME when this side read that, 0 before.
        moved_ns: CLOCK_MONOTONIC when the kernel last took bytes of it, 0 before.
    """

    __slots__ = (
        "acked_bytes",
        "destination",
        "due_ns",
        "finish_ns",
        "lateness_ns",
        "moved_ns",
        "number",
        "received_ns",
        "sent_bytes",
        "size_bytes",
        "start_ns",
    )

    def __init__(self, number: int, destination: int, size_bytes: int, due_ns: int) -> None:
        self.number = number
        self.destination = destination
        self.size_bytes = size_bytes
        self.due_ns = due_ns
        self.start_ns = self.lateness_ns = self.sent_bytes = 0
        self.acked_bytes = self.received_ns = self.finish_ns = self.moved_ns = 0


class FlowEnds(Protocol):
    """Who is told how flows end, and is given a chance to launch the due ones between two chunks of a long send."""

    def launch_due(self) -> None:
        """Start every flow whose time has come."""

    def finished(self, flow: SentFlow) -> None:
        """The receiver has all of it."""

    def failed(self, flow: SentFlow, why: str) -> None:
        """It never will."""


class Pool:
    """The connections to one destination.

    Attributes:
        name: ``host:port`` as the plan has it.
        waiting: flows that found no free connection.
        why: why the last connection that failed did, empty while none has.
        last_notice_ns: CLOCK_MONOTONIC of the last notice from the receiver, 0 without one and when connecting failed.
        opened: connections opened so far.
    """

    def __init__(self, name: str, ends: FlowEnds, token: str, options: SocketOptions, most: int) -> None:
        self.name = name
        self.family, self.address = protocol.resolve(name)
        self.ends = ends
        self.hello = protocol.hello(token)
        self.options = options
        self.waiting: deque[SentFlow] = deque()
        self.why = ""
        self.last_notice_ns = 0
        self.opened = 0
        self._most = most
        self._unanswered = 0
        self._unconnected = 0
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()

    def open_ahead(self, count: int) -> None:
        """Open connections before flows need them."""
        for _ in range(min(count, self._most - len(self._all))):
            self._open()

    def connecting(self) -> bool:
        """Whether some connection has no answer to its hello yet."""
        return self._unanswered > 0

    def noticed(self, answers_hello: bool) -> None:
        """The receiver has sent a notice."""
        self._unanswered -= answers_hello
        self.last_notice_ns = time.monotonic_ns()

    def carry(self, flow: SentFlow) -> None:
        """Send a flow on an idle connection, or on the first to be free or connected."""
        if self._idle:
            self._idle.pop().carry(flow)
        else:
            self.waiting.append(flow)
        self._open_more()

    def outstanding(self) -> list[SentFlow]:
        """Flows in progress or waiting."""
        flows = [connection.flow for connection in self._all if connection.flow is not None]
        return [*flows, *self.waiting]

    def probe(self) -> None:
        """Try the socket options.

        Raises:
            UsageError: the kernel refuses the congestion control or the source address.
        """
        outgoing_socket(self.family, self.options).close()

    def connected(self, connection: Connection) -> None:
        """A connection stands; flows may use it before its hello is answered."""
        self._unconnected -= 1
        self.free(connection)

    def free(self, connection: Connection) -> None:
        """A connection has nothing to carry."""
        if self.waiting:
            connection.carry(self.waiting.popleft())
        else:
            self._idle.append(connection)

    def lost(self, connection: Connection, why: str) -> None:
        """A connection is gone, and the flow it carried with it."""
        self._all.discard(connection)
        self._unanswered -= not connection.welcome
        if connection in self._idle:
            self._idle.remove(connection)
        if connection.stands:
            self.why = why
        else:
            self._unconnected -= 1
            self._no_connection(why)
        if connection.flow is not None:
            self.ends.failed(connection.flow, f"{self.name}: {why}")
        self._open_more(spares=False)

    def close(self) -> None:
        """Close every connection, after noting what the kernel knows of the flows on them."""
        for connection in list(self._all):
            connection.close()
        self._all.clear()
        self._idle.clear()

    def congestion_control(self) -> str:
        """The congestion control that the kernel says is in force, empty when no connection stands."""
        for connection in self._all:
            return connection.congestion_control()
        return ""

    def _open_more(self, spares: bool = True) -> None:
        """Open a connection for every waiting flow, and some more: behind a long queue a handshake takes long."""
        wanted = len(self.waiting) - self._unconnected
        if spares and self.last_notice_ns:
            busy = len(self._all) - len(self._idle) - self._unconnected
            wanted += max(_LEAST_SPARE, busy // _BUSY_A_SPARE) - len(self._idle)
        self.open_ahead(min(wanted, _MOST_AT_ONCE))

    def _no_connection(self, why: str) -> None:
        """A connection that was to carry a flow or be a spare could not be made."""
        self.why = why
        self.last_notice_ns = 0
        if len(self.waiting) > self._unconnected:
            self.ends.failed(self.waiting.popleft(), f"{self.name}: {why}")

    def _open(self) -> None:
        self.opened += 1
        try:
            sock = outgoing_socket(self.family, self.options)
        except (OSError, UsageError) as error:
            self._no_connection(str(error))
            return
        connection = Connection(self, sock)
        self._all.add(connection)
        self._unanswered += 1
        self._unconnected += 1
        connection.connect()


class Connection:
    """One kept connection.

    Attributes:
        flow: what it carries, None while idle.
        stands: whether the handshake is done.
        welcome: whether the receiver has answered the hello.
    """

    def __init__(self, pool: Pool, sock: socket.socket) -> None:
        self.flow: SentFlow | None = None
        self.stands = False
        self.welcome = False
        self._pool = pool
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._head = pool.hello
        self._notices = b""
        self._writing = False

    def connect(self) -> None:
        """Begin to connect."""
        code = self._sock.connect_ex(self._pool.address)
        if code in (0, errno.EINPROGRESS):
            self._want_write(self._connected)
        else:
            # Told from the loop, so that no pool is changed under the hands of who asked for the connection
            self._loop.call_soon(self._lose, errno_words(code))

    def carry(self, flow: SentFlow) -> None:
        """Start to send a flow."""
        self.flow = flow
        self._head += protocol.FLOW.pack(flow.number, flow.size_bytes)
        self._push()

    def close(self) -> None:
        """Close, after asking the kernel how much of the flow the receiver's kernel has."""
        if self._sock.fileno() < 0:
            return
        if self.flow is not None:
            self.flow.acked_bytes = max(0, self.flow.sent_bytes - unacked_bytes(self._sock))
        self._stop_writing()
        self._loop.remove_reader(self._sock)
        self._sock.close()

    def congestion_control(self) -> str:
        """What the kernel says is in force."""
        return congestion_control(self._sock)

    def _connected(self) -> None:
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self._stop_writing()
        if code:
            self._lose(errno_words(code))
            return
        self.stands = True
        self._loop.add_reader(self._sock, self._read)
        self._pool.connected(self)
        if self.flow is None:
            self._push()

    def _push(self) -> None:
        """Hand the kernel one chunk; the rest follows when the loop has seen to the others."""
        flow, head = self.flow, self._head
        left = flow.size_bytes - flow.sent_bytes if flow is not None else 0
        real_ns, now_ns = time.time_ns(), time.monotonic_ns()
        chunk = _PAYLOAD[:left]
        try:
            taken = self._sock.sendmsg((head, chunk)) if head else self._sock.send(chunk)
        except OSError as error:
            if error.errno not in _BACK_PRESSURE:
                self._loop.call_soon(self._lose, errno_words(error.errno))
                return
            taken = 0
        of_head = min(taken, len(head))
        self._head = head[of_head:]
        if flow is not None and taken:
            if not flow.start_ns:
                flow.start_ns, flow.lateness_ns = real_ns, now_ns - flow.due_ns
            flow.moved_ns = now_ns
            flow.sent_bytes += taken - of_head
            left -= taken - of_head
        if self._head or left:
            self._want_write(self._push_on)
        else:
            self._stop_writing()

    def _push_on(self) -> None:
        self._pool.ends.launch_due()
        if self._writing:
            self._push()

    def _read(self) -> None:
        self._pool.ends.launch_due()
        try:
            data = self._sock.recv(4096)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(errno_words(error.errno))
            return
        if not data:
            self._lose("it closed the connection")
            return
        self._notices += data
        while len(self._notices) >= protocol.NOTICE.size:
            number, value = protocol.NOTICE.unpack_from(self._notices)
            self._notices = self._notices[protocol.NOTICE.size :]
            if not self._heed(number, value):
                return

    def _heed(self, number: int, value: int) -> bool:
        """Act on a notice; False when it ended the connection."""
        flow = self.flow
        if number == protocol.HELLO_NUMBER and not self.welcome:
            if value != protocol.WELCOME:
                self._lose(protocol.VERDICTS.get(value, "it refused the connection"))
                return False
            self.welcome = True
            self._pool.noticed(answers_hello=True)
            return True
        if not self.welcome or flow is None or number != flow.number or flow.sent_bytes != flow.size_bytes:
            self._lose("it does not answer as a ringtap receiver does")
            return False
        flow.finish_ns, flow.received_ns, flow.acked_bytes = time.time_ns(), value, flow.size_bytes
        self.flow = None
        self._pool.noticed(answers_hello=False)
        self._pool.ends.finished(flow)
        self._pool.free(self)
        return True

    def _lose(self, why: str) -> None:
        if self._sock.fileno() < 0:
            return
        self.close()
        self._pool.lost(self, why)

    def _want_write(self, call: Callable[[], None]) -> None:
        if not self._writing:
            self._writing = True
            self._loop.add_writer(self._sock, call)

    def _stop_writing(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock)
