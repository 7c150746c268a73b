"""Carries completion notices from local receivers to the sender, for plans with dependent flows.

The sender binds a Unix datagram socket to a path; receivers that know the path send a notice of each finished flow
there. Without a listening sender, notices are dropped; while its queue is full, they are kept.
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

from ringtap.core.errors import UsageError

_NOTICE = struct.Struct("=Qq")  # number of the flow, CLOCK_MONOTONIC of its completion
_QUEUE_FULL = (errno.EAGAIN, errno.ENOBUFS)


class Announcer:
    """The end of a receiver worker.

    Args:
        path: socket of the sender; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._queue: deque[bytes] = deque()

    def tell(self, number: int, at_ns: int) -> None:
        """Queue the notice of a completed flow for the next ``flush``."""
        self._queue.append(_NOTICE.pack(number, at_ns))

    def flush(self) -> bool:
        """Send the queued notices; return False if some have to wait."""
        while self._queue:
            try:
                self._sock.sendto(self._queue[0], self._path)
            except OSError as error:
                if error.errno in _QUEUE_FULL:
                    return False
            self._queue.popleft()
        return True

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


class Listener:
    """The end of the sender.

    Args:
        path: socket to create; it replaces one that an earlier sender left.

    Raises:
        UsageError: the path cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owner_pid = os.getpid()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
                path.unlink()
            self._sock.bind(str(path))
        except OSError as error:
            self._sock.close()
            raise UsageError(f"--arrivals {path} cannot be created: {error.strerror or error}") from error

    def fileno(self) -> int:
        """Return the file descriptor, for ``select``."""
        return self._sock.fileno()

    def arrivals(self) -> Iterator[tuple[int, int]]:
        """Yield number and CLOCK_MONOTONIC time of each flow completed since the last call."""
        with suppress(BlockingIOError):
            while True:
                notice = self._sock.recv(_NOTICE.size)
                if len(notice) == _NOTICE.size:  # any process of this user may write to the socket
                    number, at_ns = _NOTICE.unpack(notice)
                    yield number, at_ns

    def close(self) -> None:
        """Close the socket; remove its path if this process created it."""
        self._sock.close()
        if os.getpid() == self._owner_pid:
            self._path.unlink(missing_ok=True)
