"""Serves HTTP on a socket that listens already, with bounded connections and without a log.

On a loopback address, the server answers only requests that name this machine. A waiting connection makes room for a
new one.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ringtap.core.http_listen_address import is_loopback, names_loopback

TEXT = "text/plain; charset=utf-8"
_MAX_CONNECTIONS = 64
_IDLE_S = 30.0  # a connection without a request, or one that takes no more bytes
_LOOK_S = 2.0  # for the end of what is served


class ListeningHttpServer(ThreadingHTTPServer):
    """HTTP server with a thread per connection, on a listening socket.

    Args:
        listener: the socket.
        handler: class of its request handlers.
    """

    daemon_threads = True
    timeout = _LOOK_S

    def __init__(self, listener: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("", 0), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.is_public = not is_loopback(str(listener.getsockname()[0]).partition("%")[0])
        # of each open connection, True while it waits for a request; the one that has waited longest is first
        self._waits: dict[Any, bool] = {}
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own; if there are too many, the one that has waited longest ends."""
        with self._lock:
            if len(self._waits) >= _MAX_CONNECTIONS:
                longest = next((one for one, waits in self._waits.items() if waits), None)
                if longest is None:
                    self.shutdown_request(request)
                    return
                del self._waits[longest]
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    longest.shutdown(socket.SHUT_RDWR)
            self._waits[request] = True
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection until it ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._waits.pop(request, None)

    def note(self, request: Any, *, waits: bool) -> None:
        """Note that a connection waits for a request, or that it has got a whole one."""
        with self._lock:
            if self._waits.pop(request, None) is not None:  # else it has to end
                self._waits[request] = waits

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that go away."""

    def serve_while(self, is_wanted: Callable[[], bool]) -> None:
        """Serve for as long as ``is_wanted`` returns True."""
        with self:
            while is_wanted():
                self.handle_request()


class QuietHandler(BaseHTTPRequestHandler):
    """Handler of requests that keeps connections and logs nothing, because the terminal is the job's."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    timeout = _IDLE_S
    server: ListeningHttpServer

    def handle_one_request(self) -> None:
        """Wait for a request, and answer it."""
        self.server.note(self.connection, waits=True)
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Read a request; refuse one to a loopback address that names another host: its page came from elsewhere."""
        if not super().parse_request():
            return False
        hosts = self.headers.get_all("Host") or []
        if not self.server.is_public and (len(hosts) != 1 or not names_loopback(hosts[0])):
            self.close_connection = True  # what follows may be the rest of a body
            self.answer(403, TEXT, b"This is for 127.0.0.1 and localhost only\n")
            return False
        if "Content-Length" not in self.headers:
            self.server.note(self.connection, waits=False)
        return True

    def answer(self, status: int, content_type: str, body: bytes) -> None:
        """Send a whole answer."""
        self.server.note(self.connection, waits=False)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
