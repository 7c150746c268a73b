"""JSON lines over the Unix socket between a supervisor and its node's agent."""

from __future__ import annotations

import json
import socket
from typing import Any

from ringtap.shapes import parse_json

_MOST_BYTES = 1 << 20  # of a line: no command is longer


class Connection:
    """One end of the connection; never blocks.

    Args:
        stream: a connected socket.
    """

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.stream.setblocking(False)
        self._data = b""
        self.is_open = True

    def fileno(self) -> int:
        """To be polled for news."""
        return self.stream.fileno()

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come; ``is_open`` is False once the other end is gone."""
        while self.is_open:
            try:
                piece = self.stream.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                piece = b""
            self._data += piece
            if not piece or len(self._data) > _MOST_BYTES:
                self.is_open = False
        *lines, self._data = self._data.split(b"\n")
        messages = []
        for line in lines:
            try:
                message = parse_json(line)
            except ValueError:
                continue
            if isinstance(message, dict):
                messages.append(message)
        return messages

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; one that does not fit into the socket's buffer closes the connection."""
        try:
            self.stream.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            pass  # `receive` finds out, once it has read what the other end said before it went
        except OSError:
            self.is_open = False

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self.stream.close()
