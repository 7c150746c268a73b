"""HTTP server on a socket that listens already: it logs nothing, and its connections are bounded."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TEXT = "text/plain; charset=utf-8"
_MAX_CONNECTIONS = 64
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
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own; close it if there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection until it ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

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

    def answer(self, status: int, content_type: str, body: bytes) -> None:
        """Send a whole answer."""
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
