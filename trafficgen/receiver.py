"""The receiver: takes flows on kept connections, discards their data and tells the sender when each was complete."""

from __future__ import annotations

import asyncio
import hmac
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ringtap.errors import MeasurementError, UsageError
from ringtap.trafficgen import protocol
from ringtap.trafficgen.flowlog import FLUSH_S, RECEIVED_FIELDS, STATES, FlowLog
from ringtap.trafficgen.limits import raise_file_limit

_BUFFER_BYTES = 256 * 1024
_HELLO_PATIENCE_S = 60.0  # a congested link may lose a hello several times over
_UNREAD_NOTICES_BYTES = 64 * 1024


@dataclass
class ReceiverCounts:
    """What a receiver saw.

    Attributes:
        connections: connections that gave a right hello.
        refused: connections with a wrong token or version, or beyond the limit.
        malformed: connections dropped for what they sent.
        flows: flows received whole.
        unfinished: flows whose connection ended before their last byte.
        bytes: payload bytes received.
    """

    connections: int = 0
    refused: int = 0
    malformed: int = 0
    flows: int = 0
    unfinished: int = 0
    bytes: int = 0


class Receiver:
    """Serves flows until stopped.

    Args:
        token: senders must give the same one.
        log_path: per-flow record file, or None.
        most_connections: further ones are turned away.
    """

    def __init__(self, token: str = "", log_path: Path | None = None, most_connections: int = 4096) -> None:
        self.digest = protocol.token_digest(token)
        self.most_connections = most_connections
        self.counts = ReceiverCounts()
        # One buffer for all: a connection's bytes are looked at before the next one's are read
        self.buffer = bytearray(_BUFFER_BYTES)
        self.view = memoryview(self.buffer)
        self.peers: set[_Peer] = set()
        self._log_path = log_path
        self._stop = asyncio.Event()
        self._stopped_by = ""
        self._error: MeasurementError | None = None
        self.log = FlowLog(None, RECEIVED_FIELDS, {})

    async def run(self, bind: str) -> dict[str, Any]:
        """Listen on ``bind`` until SIGINT or SIGTERM; returns the summary.

        Raises:
            UsageError: the address is in use or not of this host, or the log cannot be made.
            MeasurementError: the log could not be written to its end.
        """
        loop = asyncio.get_running_loop()
        raise_file_limit(self.most_connections + 64)
        listener = _listen(bind)
        address = protocol.format_address(*listener.getsockname()[:2])
        self.log = FlowLog(self._log_path, RECEIVED_FIELDS, {"source": "receiver", "listening": address})
        server = await loop.create_server(lambda: _Peer(self), sock=listener)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop, number.name)
        began_ns = time.monotonic_ns()
        print(f"listening on {address}", file=sys.stderr, flush=True)
        try:
            self._flush_regularly()
            await self._stop.wait()
        finally:
            server.close()
            for peer in list(self.peers):
                peer.drop()
            self.log.close()
        if self._error is not None:
            raise self._error
        duration_s = (time.monotonic_ns() - began_ns) / 1e9
        return asdict(self.counts) | {"duration_s": duration_s, "stopped_by": self._stopped_by}

    def stop(self, why: str = "") -> None:
        """Make ``run`` end."""
        self._stopped_by = self._stopped_by or why
        self._stop.set()

    def _flush_regularly(self) -> None:
        try:
            self.log.flush()
        except MeasurementError as error:
            self._error = error
            self.stop("log")
        if not self._stop.is_set():
            asyncio.get_running_loop().call_later(FLUSH_S, self._flush_regularly)


class _Peer(asyncio.BufferedProtocol):
    """One connection: a hello, then flows one after the other."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._number = 0
        self._head = bytearray()
        self._welcome = False
        self._flow = 0
        self._size = 0
        self._left = 0
        self._start_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the hello, but not for ever."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._receiver.peers.add(self)
        if len(self._receiver.peers) > self._receiver.most_connections:
            self._refuse(protocol.FULL)
            return
        transport.set_write_buffer_limits(high=_UNREAD_NOTICES_BYTES)
        self._deadline = asyncio.get_running_loop().call_later(_HELLO_PATIENCE_S, self._malformed)

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002
        """Where the transport puts the next bytes."""
        return self._receiver.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Walk through what came: heads are kept together, payload is only counted."""
        view, at = self._receiver.view, 0
        while at < nbytes and self._transport is not None:
            if self._left:
                step = min(self._left, nbytes - at)
                self._left -= step
                self._receiver.counts.bytes += step
                if not self._left:
                    self._complete()
            else:
                whole = protocol.FLOW.size if self._welcome else protocol.HELLO.size
                step = min(whole - len(self._head), nbytes - at)
                self._head += view[at : at + step]
                if len(self._head) == whole:
                    self._read_head()
            at += step

    def pause_writing(self) -> None:
        """The sender reads no notices: read no more of its flows either."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """It reads again."""
        if self._transport is not None:
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Account for what the connection left."""
        if self._transport is not None:
            if self._head:
                self._receiver.counts.malformed += 1
            self._forget()

    def drop(self) -> None:
        """Close at once, logging a flow in progress as unfinished."""
        transport = self._transport
        self._forget()
        if transport is not None:
            transport.abort()

    def _forget(self) -> None:
        receiver = self._receiver
        receiver.peers.discard(self)
        self._transport = None
        if self._deadline is not None:
            self._deadline.cancel()
        if self._left:
            receiver.counts.unfinished += 1
            got = self._size - self._left
            receiver.log.add(self._flow, self._number, self._start_ns, 0, self._size, got, STATES["unfinished"])
            self._left = 0

    def _malformed(self) -> None:
        self._receiver.counts.malformed += 1
        self.drop()

    def _refuse(self, verdict: int) -> None:
        self._receiver.counts.refused += 1
        transport = self._transport
        self._forget()
        if transport is not None:
            transport.write(protocol.NOTICE.pack(protocol.HELLO_NUMBER, verdict))
            transport.close()

    def _read_head(self) -> None:
        head = bytes(self._head)
        self._head.clear()
        if self._welcome:
            self._flow, self._size = protocol.FLOW.unpack(head)
            if not 0 < self._size <= protocol.LARGEST_FLOW_BYTES or self._flow == protocol.HELLO_NUMBER:
                self._malformed()
                return
            self._left = self._size
            self._start_ns = time.time_ns()
            return
        magic, version, digest = protocol.HELLO.unpack(head)
        if magic != protocol.MAGIC:
            self._malformed()
        elif version != protocol.VERSION:
            self._refuse(protocol.WRONG_VERSION)
        elif not hmac.compare_digest(digest, self._receiver.digest):
            self._refuse(protocol.WRONG_TOKEN)
        else:
            self._accept()

    def _accept(self) -> None:
        assert self._transport is not None
        if self._deadline is not None:
            self._deadline.cancel()
        self._welcome = True
        self._receiver.counts.connections += 1
        self._number = self._receiver.counts.connections
        self._transport.write(protocol.NOTICE.pack(protocol.HELLO_NUMBER, protocol.WELCOME))

    def _complete(self) -> None:
        assert self._transport is not None
        finish_ns = time.time_ns()
        receiver = self._receiver
        receiver.counts.flows += 1
        self._transport.write(protocol.NOTICE.pack(self._flow, finish_ns))
        receiver.log.add(
            self._flow, self._number, self._start_ns, finish_ns, self._size, self._size, STATES["finished"]
        )


def _listen(bind: str) -> socket.socket:
    family, address = protocol.resolve(bind)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {bind}: {error.strerror}; choose another --bind HOST:PORT") from error
    return listener
