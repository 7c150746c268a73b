"""Connects launcher and sender workers: messages and open sockets over a Unix socket pair, and shared slots.

Neither side ever waits for the other: data that does not fit stays queued for the next flush.
"""

from __future__ import annotations

import array
import errno
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

_MESSAGE = struct.Struct("=IIqq")
_READ_BYTES = 64 * _MESSAGE.size  # handling more messages at once takes over 100 µs, and a launch may be due
_MAX_FILES = 64  # passed at once: few, since each is open twice until it is sent; the kernel's limit is 253
_BUFFER_BYTES = 1 << 20

# Launcher to sender worker; "route" is the number of a connection pool
OPEN = 1  # place: route; first: how many connections to open, or to prepare if each flow has its own
REST = 2  # place: slot; first: bytes of its flow that the launcher has sent; the worker sends the rest
START = 3  # place: slot; first: errno of connecting, 0 if in progress: a flow with a connection of its own begins
# Close a connection. place: slot; first: bytes sent of its flow, -1 without one; second: CLOCK_MONOTONIC, the flow
# has failed if the receiver has been silent since then
GONE = 4
BEGIN = 5  # first and second: CLOCK_MONOTONIC and CLOCK_REALTIME of the launch
FINISH = 6  # end open-ended flows: the plan has ended
END = 7  # stop

# Sender worker to launcher
SOCKET = 8  # place: slot; first: route; a file comes with it
FREE = 9  # place: slot; first: number of its finished flow; second: CLOCK_MONOTONIC of the flow's end
LOST = 10  # place: slot; first: errno, or less than 0 for other reasons: its connection broke
REFUSED = 11  # place: route; first: errno, or less than 0 for other reasons: a connection could not be made


class Message(NamedTuple):
    """One message; the meaning of ``place``, ``first`` and ``second`` depends on ``what``."""

    what: int
    place: int
    first: int
    second: int


class Channel:
    """One end of the communication between the launcher and a sender worker.

    Args:
        sock: one of a connected pair of stream sockets.

    Attributes:
        files: sockets received, in the order of their SOCKET messages.
        ended: True if the other side is gone and all that it sent has been read.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._sock = sock
        self._out = bytearray()
        self._queue: deque[tuple[bytes, list[int]]] = deque()
        self._in = b""
        self.files: deque[int] = deque()
        self.ended = False

    def fileno(self) -> int:
        """Return the file descriptor, for ``select``."""
        return self._sock.fileno()

    def put(self, what: int, place: int, first: int = 0, second: int = 0) -> None:
        """Add a message to the next flush."""
        self._out += _MESSAGE.pack(what, place, first, second)

    def put_file(self, place: int, first: int, file: int) -> None:
        """Add a SOCKET message and its file, of which the channel keeps a duplicate until it is sent.

        Raises:
            OSError: this process has reached its limit of open files.
        """
        data, copy = _MESSAGE.pack(SOCKET, place, first, 0), os.dup(file)
        if self._out:
            self._queue.append((bytes(self._out), []))
            self._out.clear()
        if self._queue and 0 < len(self._queue[-1][1]) < _MAX_FILES:
            before, files = self._queue.pop()
            self._queue.append((before + data, [*files, copy]))
        else:
            if self._queue:
                self.flush()
            self._queue.append((data, [copy]))

    def flush(self) -> bool:
        """Send the queued messages; return False if some have to wait."""
        if self._out and not self._queue:
            count = self._send(self._out, [])
            del self._out[:count]
            return not self._out
        if self._out:
            self._queue.append((bytes(self._out), []))
            self._out.clear()
        while self._queue:
            data, files = self._queue[0]
            count = self._send(data, files)
            if not count:
                return False
            for file in files:  # sent with the first byte
                os.close(file)
            self._queue[0] = (data[count:], [])
            if count == len(data):
                self._queue.popleft()
        return True

    def messages(self) -> Iterator[Message]:
        """Yield the messages that have been received."""
        if self._in or not self.ended:
            yield from map(Message._make, _MESSAGE.iter_unpack(self._read()))

    def close(self) -> None:
        """Close this end."""
        self._sock.close()

    def _send(self, data: bytes | bytearray, files: list[int]) -> int:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        try:
            return self._sock.sendmsg([data], ancillary)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:  # the kernel has too many files in flight
                return 0
            # The other side is gone, so the data is discarded; its last messages can still be read
            return len(data)

    def _read(self) -> bytes:
        try:
            data, files, _, _ = socket.recv_fds(self._sock, _READ_BYTES, _MAX_FILES)
        except BlockingIOError:
            return b""
        except OSError:
            data, files = b"", []
        self.files.extend(files)
        if not data:
            self.ended = True
        data = self._in + data
        whole = len(data) - len(data) % _MESSAGE.size
        self._in = data[whole:]
        return data[:whole]


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two sockets of a channel; each side of a fork makes a ``Channel`` of one."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


_SLOT = struct.Struct("=qqqq")
SLOT_BYTES = _SLOT.size


class FlowState(NamedTuple):
    """A flow on a connection: its number, payload (0: open-ended), CLOCK_MONOTONIC times due and launched."""

    number: int
    size_bytes: int
    due_ns: int
    start_ns: int


class SharedSlots:
    """Shared slots of one sender worker, one per connection; created before the fork.

    Args:
        count: most connections at a time.
    """

    def __init__(self, count: int) -> None:
        self._memory = mmap.mmap(-1, max(1, count) * SLOT_BYTES)

    def fill(self, slot: int, number: int, size_bytes: int, due_ns: int, start_ns: int) -> None:
        """Set the current flow of a connection."""
        _SLOT.pack_into(self._memory, slot * SLOT_BYTES, number, size_bytes, due_ns, start_ns)

    def load(self, slot: int) -> FlowState:
        """Return the current or last flow of a connection."""
        return FlowState._make(_SLOT.unpack_from(self._memory, slot * SLOT_BYTES))
