"""Sends on one connection of a sender worker, one flow at a time."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from typing import TYPE_CHECKING

from ringtap.trafficgen import protocol
from ringtap.trafficgen.outgoing_sockets import TcpState, tcp_state, unacked_bytes
from ringtap.trafficgen.sender import ipc
from ringtap.trafficgen.sender.ipc import FlowState
from ringtap.trafficgen.sender.options import PAYLOAD, PAYLOAD_BYTES
from ringtap.trafficgen.statistics import Ending

if TYPE_CHECKING:
    from ringtap.trafficgen.sender.worker import SenderWorker

_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
_BACK_PRESSURE = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS)
_HEAD_BYTES = protocol.FLOW.size
_NOTICE_BYTES = protocol.NOTICE.size
_READ_BYTES = 4096
_ENDLESS = 2**62
_NO_FLOW = -1


class SenderConnection:
    """A connection of a sender worker.

    The launcher starts flows on it; ``carry_on`` sends the rest of a flow. A connection ends in one of two ways: the
    launcher drops it (``gone``), or it breaks, the launcher gets a LOST message and answers with ``gone``.
    """

    __slots__ = (
        "_broken",
        "_dropped",
        "_file",
        "_finished",
        "_first_byte_ns",
        "_flow",
        "_head",
        "_is_established",
        "_last_sent_ns",
        "_left",
        "_notices",
        "_retransmits",
        "_route",
        "_sent",
        "_slot",
        "_sock",
        "_welcome",
        "_worker",
        "_writing",
    )

    def __init__(self, worker: SenderWorker, sock: socket.socket, slot: int, route: int) -> None:
        self._worker, self._sock, self._slot, self._route = worker, sock, slot, route
        self._file = sock.fileno()
        self._head = worker.hello
        self._notices = b""
        self._flow: FlowState | None = None  # set while this worker sends a part of the flow
        self._left = self._sent = self._retransmits = 0
        self._first_byte_ns = self._last_sent_ns = 0
        self._finished = _NO_FLOW
        self._is_established = self._welcome = self._writing = self._dropped = False
        self._broken = 0

    def connect(self, address: tuple[str, int]) -> None:
        """Start connecting."""
        code = self._sock.connect_ex(address)
        self._worker.register(self, self._file, _IN | _OUT)
        self._writing = True
        if code not in (0, errno.EINPROGRESS):
            self._break(code)

    def start(self, code: int) -> None:
        """Take over a connection that the launcher has started to connect for its only flow."""
        self._flow = self._worker.slots.load(self._slot)
        size_bytes = self._flow.size_bytes
        word = (size_bytes or protocol.OPEN_ENDED) | protocol.LAST
        self._head = self._worker.hello + protocol.FLOW.pack(self._flow.number, word)
        self._left = size_bytes or _ENDLESS
        self._worker.register(self, self._file, _IN | _OUT)
        self._writing = True
        if code:
            self._break(code)

    def carry_on(self, count: int) -> None:
        """Send the rest of a flow; the launcher has sent the first ``count`` bytes of header and payload."""
        flow = self._flow = self._worker.slots.load(self._slot)
        head = protocol.FLOW.pack(flow.number, flow.size_bytes or protocol.OPEN_ENDED)
        self._head = head[count:]
        self._sent = max(0, count - _HEAD_BYTES)
        self._left = (flow.size_bytes or _ENDLESS) - self._sent
        self._first_byte_ns = flow.start_ns if count else 0
        self._last_sent_ns = flow.start_ns
        if not self._broken:
            self._push()

    def event(self, events: int) -> None:
        """Handle events that epoll reported."""
        if events & _OUT:
            if self._is_established:
                self._push()
            else:
                self._connected()
        if events & ~_OUT and not self._broken and self._slot >= 0:
            self._read()

    def finish(self) -> None:
        """End an open-ended flow, at the plan's end."""
        if self._flow is not None and not self._flow.size_bytes and self._left and self._is_established:
            self._left = 0
            self._stop_writing()
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError as error:
                self._break(error.errno or errno.EPIPE)

    def gone(self, sent: int, silent_ns: int) -> None:
        """Handle the launcher's notice that it has dropped the connection.

        Args:
            sent: bytes of a flow and its header that the launcher had sent; -1: no flow.
            silent_ns: the flow counts as failed if the receiver has been silent since this CLOCK_MONOTONIC time.
        """
        if sent != _NO_FLOW:
            self._record_unfinished(sent, silent_ns)
        self._dropped = True
        if self._broken or sent != _NO_FLOW or self._finished == _NO_FLOW or not self._worker.new:
            self.close()
        # Otherwise the receiver closes first, so that its own port stays in TIME_WAIT

    def end(self) -> None:
        """Close, after the launcher has reported every flow in progress, unless the receiver is about to close."""
        if self._slot >= 0 and not self._dropped:
            self.close()

    def close(self) -> None:
        """Close the connection and release its slot."""
        self._worker.unregister(self._file)
        self._sock.close()
        if self._slot >= 0:
            self._worker.release(self._slot)
            self._slot = -1

    def _connected(self) -> None:
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._break(code)
            return
        self._is_established = True
        self._push()

    def _push(self) -> None:
        """Send as much as the kernel accepts in one call; epoll reports when it accepts more."""
        head, left, now_ns = self._head, self._left, time.monotonic_ns()
        try:
            if head:
                count = self._sock.sendmsg((head, PAYLOAD[: min(left, PAYLOAD_BYTES)]))
            elif self._worker.payload_file >= 0:
                count = os.sendfile(self._file, self._worker.payload_file, 0, min(left, PAYLOAD_BYTES))
            else:
                count = self._sock.send(PAYLOAD[: min(left, PAYLOAD_BYTES)])
        except OSError as error:
            if error.errno not in _BACK_PRESSURE:
                self._break(error.errno or errno.EPIPE)
                return
            count = 0
        of_head = min(count, len(head))
        if of_head:
            self._head = head[of_head:]
        if count > of_head:
            self._moved(now_ns, count - of_head)
        if self._head or self._left:
            self._start_writing()
        else:
            self._stop_writing()

    def _moved(self, now_ns: int, size_bytes: int) -> None:
        self._first_byte_ns = self._first_byte_ns or now_ns
        self._last_sent_ns = now_ns
        self._sent += size_bytes
        self._left -= size_bytes
        self._worker.outcome.moved(now_ns, size_bytes)

    def _read(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._break(error.errno or errno.ECONNRESET)
            return
        if not data:
            self._hung_up()
            return
        if self._notices:
            data = self._notices + data
        whole = len(data) - len(data) % _NOTICE_BYTES
        self._notices = data[whole:]
        for number, value in protocol.NOTICE.iter_unpack(data[:whole]):
            if self._broken:
                return
            self._handle_notice(number, value)

    def _hung_up(self) -> None:
        if self._dropped:
            self.close()
        elif self._finished != _NO_FLOW and self._worker.new:
            # The flow is finished, and the launcher's GONE, which is on its way, will close this connection
            self._worker.unregister(self._file)
            self._broken = protocol.CLOSED
        else:
            self._break(protocol.CLOSED)

    def _handle_notice(self, number: int, value: int) -> None:
        if number == protocol.HELLO_NUMBER and not self._welcome:
            if value != protocol.WELCOME:
                self._break(-value if value < -protocol.CLOSED else protocol.NO_RECEIVER)
                return
            if not self._worker.new:
                try:
                    self._worker.line.put_file(self._slot, self._route, self._file)
                except OSError as error:
                    self._break(error.errno or errno.EMFILE)
                    return
            self._welcome = True
            self._worker.heard_ns[self._route] = time.monotonic_ns()
            return
        flow = self._flow or self._worker.slots.load(self._slot)
        if not self._welcome or number != flow.number or number == self._finished or self._left:
            self._break(protocol.NO_RECEIVER)
            return
        self._complete(flow, value)

    def _complete(self, flow: FlowState, received_ns: int) -> None:
        now_ns = time.monotonic_ns()
        self._finished = flow.number
        self._worker.heard_ns[self._route] = now_ns
        sent = flow.size_bytes or self._sent
        first_byte_ns = self._first_byte_ns or flow.start_ns
        endpoints = self._worker.places[self._route]
        end = Ending("finished", first_byte_ns, now_ns, received_ns, sent, sent)
        self._worker.outcome.ended(flow, end, self._tcp(), endpoints.source_index, endpoints.destination_index)
        self._worker.line.put(ipc.FREE, self._slot, flow.number, now_ns)
        self._flow = None
        self._sent = self._first_byte_ns = self._last_sent_ns = 0

    def _record_unfinished(self, sent: int, silent_ns: int) -> None:
        flow = self._flow or self._worker.slots.load(self._slot)
        if flow.number == self._finished:
            return  # it has finished: the launcher's message crossed this worker's
        payload = max(self._sent, sent - _HEAD_BYTES, 0)
        acked = 0
        if payload:
            acked = min(payload, max(0, payload - unacked_bytes(self._sock)))
        heard_ns = max(self._worker.heard_ns[self._route], self._last_sent_ns, flow.start_ns)
        failed = self._broken or heard_ns <= silent_ns
        if failed:
            self._worker.failed(self._route, self._broken)
        first_byte_ns = self._first_byte_ns or (flow.start_ns if sent > 0 else 0)
        end = Ending("failed" if failed else "unfinished", first_byte_ns, 0, 0, payload, acked)
        endpoints = self._worker.places[self._route]
        self._worker.outcome.ended(flow, end, self._tcp(), endpoints.source_index, endpoints.destination_index)

    def _tcp(self) -> TcpState:
        """Return the connection's state, with the retransmissions since the last flow."""
        tcp = tcp_state(self._sock)
        before, self._retransmits = self._retransmits, max(self._retransmits, tcp.retransmits)
        return tcp._replace(retransmits=max(0, tcp.retransmits - before))

    def _break(self, why: int) -> None:
        """Handle a broken connection: notify the launcher once."""
        if self._broken:
            return
        self._broken = why
        self._worker.unregister(self._file)
        if self._worker.new or self._welcome:
            self._worker.line.put(ipc.LOST, self._slot, why)
        else:
            self._worker.line.put(ipc.REFUSED, self._route, why)
            self.close()

    def _start_writing(self) -> None:
        if not self._writing:
            self._writing = True
            self._worker.epoll.modify(self._file, _IN | _OUT)

    def _stop_writing(self) -> None:
        if self._writing:
            self._writing = False
            self._worker.epoll.modify(self._file, _IN)
