"""Completion notices from local receivers to the sender, for plans with dependent flows.

The sender binds a Unix datagram socket to a path; receivers that were given the path send each finished flow there.
While no sender listens, arrivals concern nobody and are dropped; while one is behind, they are kept.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ringtap.errors import UsageError

_ARRIVAL = struct.Struct("=Qq")  # number of the flow, CLOCK_MONOTONIC of its arrival
_WAIT = (errno.EAGAIN, errno.ENOBUFS)


class Announcer:
    """The receivers' end; a loop each.

    Args:
        path: where the sender listens, if it does.
    """

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._behind: deque[bytes] = deque()

    def tell(self, number: int, at_ns: int) -> None:
        """A flow has arrived; goes out with ``flush``."""
        self._behind.append(_ARRIVAL.pack(number, at_ns))

    def flush(self) -> bool:
        """Send what there is; False when some of it has to wait."""
        while self._behind:
            try:
                self._sock.sendto(self._behind[0], self._path)
            except OSError as error:
                if error.errno in _WAIT:
                    return False
            self._behind.popleft()
        return True

    def close(self) -> None:
        """Close it."""
        self._sock.close()


class Listener:
    """The sender's end.

    Args:
        path: where to listen; a socket that an earlier sender left is replaced.

    Raises:
        UsageError: the path cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owner = os.getpid()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
                path.unlink()
            self._sock.bind(str(path))
        except OSError as error:
            self._sock.close()
            raise UsageError(f"--arrivals {path} cannot be made: {error.strerror or error}") from error

    def fileno(self) -> int:
        """For select."""
        return self._sock.fileno()

    def arrivals(self) -> Iterator[tuple[int, int]]:
        """Number and CLOCK_MONOTONIC time of each flow that has arrived since."""
        with suppress(BlockingIOError):
            while True:
                number, at_ns = _ARRIVAL.unpack(self._sock.recv(_ARRIVAL.size))
                yield number, at_ns

    def close(self) -> None:
        """Close it, and remove the path where this process made it."""
        self._sock.close()
        if os.getpid() == self._owner:
            self._path.unlink(missing_ok=True)
