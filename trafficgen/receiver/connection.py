"""Serves one connection of a receiver worker: a hello, then flows one after the other, counted and discarded."""

from __future__ import annotations

import errno
import hmac
import select
import socket
import time
from typing import TYPE_CHECKING

from ringtap.core.run_directory_schema import FLOW_STATES
from ringtap.trafficgen import protocol

if TYPE_CHECKING:
    from ringtap.trafficgen.receiver.worker import ReceiverWorker

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
# More than this is discarded in the kernel (MSG_TRUNC); less is read together with the next flow's header
_SMALL_BYTES = 1 << 16
_UNREAD_NOTICES_BYTES = 1 << 16
_ENDLESS = 2**62
_FINISHED, _UNFINISHED = FLOW_STATES["finished"], FLOW_STATES["unfinished"]


class ReceiverConnection:
    """A connection of a receiver worker.

    Attributes:
        tick: the worker's tick of the last data; before the hello is complete, the tick when it was accepted.
        welcome: True after a valid hello.
    """

    __slots__ = (
        "_flow",
        "_head",
        "_last",
        "_left",
        "_number",
        "_out",
        "_sender",
        "_size",
        "_sock",
        "_start_ns",
        "_worker",
        "tick",
        "welcome",
    )

    def __init__(self, worker: ReceiverWorker, sock: socket.socket) -> None:
        self.tick = worker.tick
        self.welcome = False
        self._worker, self._sock = worker, sock
        self._head = b""
        self._out = b""
        self._number = self._sender = self._flow = self._size = self._left = self._start_ns = 0
        self._last = False

    def event(self, events: int) -> None:
        """Handle events that epoll reported."""
        if self.welcome:  # a hello has one time limit as a whole, even if it arrives in small pieces
            self.tick = self._worker.tick
        if events & _OUT:
            self._send_notice(b"")
        if events & ~_OUT and self._sock.fileno() >= 0:
            self._receive()

    def drop(self) -> None:
        """Close at once, logging a flow in progress as unfinished."""
        file = self._sock.fileno()
        if file < 0:
            return
        self._worker.forget(file)
        self._sock.close()
        if self._left:
            received = self._size - self._left
            self._worker.counts.unfinished += 1
            size = 0 if self._size == _ENDLESS else self._size
            self._log(0, size, received, _UNFINISHED)
            self._left = 0

    def malformed(self) -> None:
        """Drop a connection that violates the protocol."""
        self._worker.counts.malformed += 1
        self.drop()

    def refuse(self, verdict: int) -> None:
        """Refuse the connection with a verdict."""
        self._worker.counts.refused += 1
        self._last = True
        self._send_notice(protocol.NOTICE.pack(protocol.HELLO_NUMBER, verdict))

    def _receive(self) -> None:
        worker, left = self._worker, self._left
        try:
            if left > _SMALL_BYTES:
                count = self._sock.recv_into(worker.buffer, min(left, len(worker.buffer)), socket.MSG_TRUNC)
            else:
                count = self._sock.recv_into(worker.buffer, _SMALL_BYTES)
        except BlockingIOError:
            return
        except OSError:
            count = 0
            if self._size == _ENDLESS:
                self.drop()  # a reset does not end an open-ended flow properly
                return
        if not count:
            self._hung_up()
        elif left > _SMALL_BYTES:
            self._left -= count
            worker.counts.bytes += count
            if not self._left:
                self._complete()
        else:
            self._process(count)

    def _process(self, count: int) -> None:
        """Process received bytes: assemble headers, count payload."""
        worker, position = self._worker, 0
        while position < count:
            if self._left:
                step = min(self._left, count - position)
                self._left -= step
                worker.counts.bytes += step
                position += step
                if not self._left:
                    self._complete()
            else:
                whole = protocol.FLOW.size if self.welcome else protocol.HELLO.size
                step = min(whole - len(self._head), count - position)
                self._head += worker.view[position : position + step]
                position += step
                if len(self._head) == whole:
                    head, self._head = self._head, b""
                    self._read_head(head)
            if self._sock.fileno() < 0 or (self._last and not self._left):
                return

    def _read_head(self, head: bytes) -> None:
        if not self.welcome:
            self._read_hello(head)
            return
        self._flow, word = protocol.FLOW.unpack(head)
        self._last = bool(word & protocol.LAST)
        size = word & (protocol.OPEN_ENDED - 1)
        self._size = _ENDLESS if word & protocol.OPEN_ENDED else size
        if self._flow == protocol.HELLO_NUMBER or (size != 0) == (self._size == _ENDLESS):
            self.malformed()
            return
        self._left = self._size
        self._start_ns = time.time_ns()

    def _read_hello(self, head: bytes) -> None:
        magic, version, digest, self._sender = protocol.HELLO.unpack(head)
        counts = self._worker.counts
        if magic != protocol.MAGIC:
            self.malformed()
        elif version != protocol.VERSION:
            self.refuse(protocol.WRONG_VERSION)
        elif not hmac.compare_digest(digest, self._worker.digest):
            self.refuse(protocol.WRONG_TOKEN)
        elif not self._worker.admit(self._sock.fileno()):
            self.refuse(protocol.FULL)
        else:
            self.welcome = True
            self.tick = self._worker.tick
            counts.connections += 1
            self._number = counts.connections
            self._send_notice(protocol.NOTICE.pack(protocol.HELLO_NUMBER, protocol.WELCOME))

    def _complete(self) -> None:
        finish_ns = time.time_ns()
        self._worker.counts.flows += 1
        self._worker.arrived(self._flow)
        size = self._size - self._left if self._size == _ENDLESS else self._size
        self._left = 0
        self._log(finish_ns, size, size, _FINISHED)
        self._send_notice(protocol.NOTICE.pack(self._flow, finish_ns))

    def _hung_up(self) -> None:
        if self._size == _ENDLESS and self._left:
            self._last = True
            self._complete()
            return
        if self._head:
            self._worker.counts.malformed += 1
        self.drop()

    def _log(self, finish_ns: int, size: int, received: int, state: int) -> None:
        self._worker.log.add(
            self._flow,
            self._worker.connection(self._number),
            self._sender,
            self._start_ns,
            finish_ns,
            size,
            received,
            state,
        )

    def _send_notice(self, data: bytes) -> None:
        """Send a notice; stop reading from a sender that leaves too many of its notices unread."""
        if self._sock.fileno() < 0:
            return
        was_waiting = bool(self._out)
        out = self._out + data
        try:
            count = self._sock.send(out) if out else 0
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOBUFS):
                self.drop()
                return
            count = 0
        self._out = out[count:]
        if self._last and not self._left and not self._out:
            self.drop()
        elif bool(self._out) != was_waiting or len(self._out) > _UNREAD_NOTICES_BYTES:
            reading = 0 if len(self._out) > _UNREAD_NOTICES_BYTES or self._last else _IN
            self._worker.epoll.modify(self._sock.fileno(), (reading | _OUT) if self._out else _IN)
