"""Runs a sender worker: opens connections, sends the rest of flows that the launcher starts, reads notices.

Each thread runs one asyncio loop. The connections have an epoll object of their own inside the loop, so that a busy
worker handles them in batches, at a fraction of the cost of one callback per connection.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NamedTuple

from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.sent_flow_log import FIELDS as SENT_FIELDS
from ringtap.trafficgen import protocol
from ringtap.trafficgen.flow_log import FLUSH_S, FlowLog
from ringtap.trafficgen.outgoing_sockets import outgoing_socket
from ringtap.trafficgen.sender import ipc
from ringtap.trafficgen.sender.connection import SenderConnection
from ringtap.trafficgen.sender.ipc import Channel
from ringtap.trafficgen.sender.options import PAYLOAD
from ringtap.trafficgen.statistics import FlowStatistics

if TYPE_CHECKING:
    from ringtap.trafficgen.sender.sender import SendPlan, WorkerLink

_MAX_EVENTS = 256
_CLOSING_S = 1.0


class Destination(NamedTuple):
    """The endpoints of a connection pool: source address, address family, address, name, indexes in the plan."""

    source: str
    family: int
    address: tuple[str, int]
    name: str
    source_index: int
    destination_index: int


class Report(NamedTuple):
    """A sender worker's final message: the error of its log, empty if there was none, and its flow statistics."""

    error: str
    outcome: FlowStatistics


class SenderWorker:
    """A sender worker: ``asyncio.run(SenderWorker(...).run(...))`` in a thread or process of its own.

    Args:
        link: its link to the launcher.
        setup: the checked plan and the options for sending it.

    Attributes:
        line: channel to the launcher.
        slots: the flows that the launcher starts on the connections.
        places: endpoints by connection pool (route).
        hello: first bytes on every connection.
        epoll: epoll object of the connections.
        outcome: flow statistics of this worker.
        heard_ns: by connection pool, CLOCK_MONOTONIC of the receiver's last notice.
    """

    def __init__(self, link: WorkerLink, setup: SendPlan) -> None:
        options = setup.options
        self.line, self.slots, self.places, self.hello = Channel(link.workers), link.slots, setup.places, setup.hello
        self.outcome = FlowStatistics(options.capacity_bps)
        self.new = options.connections == "new"
        self.heard_ns = [0] * len(setup.places)
        self.epoll = select.epoll()
        self.payload_file = _payload_file() if options.method == "sendfile" else -1
        self._log_path, self._transport = options.log_path, setup.transport
        self._free = list(range(setup.most_per_worker - 1, -1, -1))
        self._connections: dict[int, SenderConnection] = {}
        self._by_file: dict[int, SenderConnection] = {}
        self._ended = asyncio.Event()
        self._begun = self._ending = False
        self._error = ""

    async def run(self, control: Connection, lock: threading.Lock) -> None:
        """Serve the launcher until it sends END or is gone, then report to ``control``, which ``lock`` guards."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self.line.fileno(), self._handle_messages)
        loop.add_reader(self.epoll.fileno(), self._events)
        await self._ended.wait()
        # asyncio.run goes round the loop after this, and the launcher may still send if the log could not be written
        for file in (self.line.fileno(), self.epoll.fileno()):
            loop.remove_reader(file)
        for connection in list(self._connections.values()):
            connection.close()
        self._flush()
        with lock, suppress(OSError):
            control.send(Report(self._error, self.outcome.without_log()))

    def register(self, connection: SenderConnection, file: int, events: int) -> None:
        """Start watching a connection."""
        self._by_file[file] = connection
        self.epoll.register(file, events)

    def unregister(self, file: int) -> None:
        """Stop watching a connection."""
        if self._by_file.pop(file, None) is not None:
            self.epoll.unregister(file)

    def release(self, slot: int) -> None:
        """Free a slot for reuse."""
        del self._connections[slot]
        self._free.append(slot)
        if self._ending and not self._connections:
            self._ended.set()

    def failed(self, route: int, why: int) -> None:
        """Record the reason of a failed flow, if it is the first one."""
        if not self.outcome.first_failure:
            self.outcome.first_failure = f"{self.places[route].name}: {protocol.failure_words(why)}"

    def _handle_messages(self) -> None:
        for what, place, first, second in self.line.messages():
            if what == ipc.REST:
                self._connections[place].carry_on(first)
            elif what == ipc.START:
                self._connections[place].start(first)
            elif what == ipc.GONE:
                self._connections[place].gone(first, second)
            elif what == ipc.OPEN:
                for _ in range(first):
                    self._open(place)
            elif what == ipc.BEGIN:
                self._begin(first, second)
            elif what == ipc.FINISH:
                for connection in list(self._connections.values()):
                    connection.finish()
            elif what == ipc.END:
                self._end()
        if self.line.ended and not self._ending:
            self._ended.set()
        self._send_messages()

    def _end(self) -> None:
        """End when the receiver has closed the connections of the last flows, or after ``_CLOSING_S``."""
        for connection in list(self._connections.values()):
            connection.end()
        loop, self._ending = asyncio.get_running_loop(), True
        loop.remove_reader(self.line.fileno())
        loop.call_later(_CLOSING_S if self._connections else 0, self._ended.set)

    def _events(self) -> None:
        if not self._begun:  # on a busy machine, BEGIN may still be unread when the first connection has events
            self._handle_messages()
        files = self._by_file
        for file, events in self.epoll.poll(0, _MAX_EVENTS):
            connection = files.get(file)
            if connection is not None:
                connection.event(events)
        self._send_messages()

    def _send_messages(self) -> None:
        """Send the queued messages; retry a little later with those that do not fit."""
        if not self.line.flush() and not self._ended.is_set():
            asyncio.get_running_loop().call_later(0.001, self._send_messages)

    def _open(self, route: int) -> None:
        place = self.places[route]
        if not self._free:
            self.line.put(ipc.REFUSED, route, errno.EMFILE)
            return
        try:
            sock = outgoing_socket(place.family, self._transport, place.source)
        except (OSError, UsageError) as error:
            code = error.errno if isinstance(error, OSError) else getattr(error.__cause__, "errno", None)
            self.line.put(ipc.REFUSED, route, code or errno.EINVAL)
            return
        slot = self._free[-1]
        if self.new:
            try:
                self.line.put_file(slot, route, sock.fileno())
            except OSError as error:
                sock.close()
                self.line.put(ipc.REFUSED, route, error.errno or errno.EMFILE)
                return
        self._free.pop()
        connection = self._connections[slot] = SenderConnection(self, sock, slot, route)
        self.outcome.connections += 1
        if not self.new:
            connection.connect(place.address)

    def _begin(self, origin_ns: int, origin_real_ns: int) -> None:
        self._begun = True
        try:
            log = FlowLog(self._log_path, SENT_FIELDS, None)
        except UsageError as error:
            self._error = str(error)
            return
        self.outcome.begin(log, origin_ns, origin_real_ns)
        self._flush_regularly()

    def _flush_regularly(self) -> None:
        self._flush()
        if not self._ended.is_set():
            asyncio.get_running_loop().call_later(FLUSH_S, self._flush_regularly)

    def _flush(self) -> None:
        try:
            self.outcome.flush()
        except MeasurementError as error:
            self._error = self._error or str(error)
            self._ended.set()


def _payload_file() -> int:
    file = os.memfd_create("payload")
    os.write(file, PAYLOAD)
    return file
