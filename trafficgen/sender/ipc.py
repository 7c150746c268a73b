"""Messages between the launcher and the sender workers: small messages and open sockets over Unix socket pairs.

Neither side ever waits for the other: what does not fit is kept and goes with the next flush.
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
_READ_BYTES = 64 * _MESSAGE.size  # a launch may be due: no more words at a time than are acted on in 100 µs
_MOST_FILES = 64  # passed at once: few, for each is open twice until it has gone; the kernel takes 253
_BUFFER_BYTES = 1 << 20

# Launcher to carrier
OPEN = 1  # place: route; first: how many connections to open, or to prepare where each flow has its own
REST = 2  # place: slot; first: bytes of its flow that the launcher has sent; the carrier sends the others
START = 3  # place: slot; first: errno of connecting, 0 when under way: a flow with a connection of its own begins
# place: slot; first: bytes sent of the flow it carried, -1 without one; second: CLOCK_MONOTONIC since when silence is
# failure: close it
GONE = 4
BEGIN = 5  # first and second: CLOCK_MONOTONIC and CLOCK_REALTIME of the launch
FINISH = 6  # end open-ended flows as a plan's end does
END = 7  # stop

# Carrier to launcher
SOCKET = 8  # place: slot; first: route; a file comes with it
FREE = 9  # place: slot; first: number of the flow that it carried; second: CLOCK_MONOTONIC of its end
LOST = 10  # place: slot; first: errno or less than 0 for a verdict: its connection broke
REFUSED = 11  # place: route; first: errno, or less than 0 for a verdict: a connection was not to be had


class Message(NamedTuple):
    """One message; what ``place``, ``first`` and ``second`` are depends on ``what``."""

    what: int
    place: int
    first: int
    second: int


class Channel:
    """One end.

    Args:
        sock: one of a connected pair of stream sockets.

    Attributes:
        files: sockets received, in the order of their SOCKET messages.
        ended: the other side is gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._sock = sock
        self._out = bytearray()
        self._behind: deque[tuple[bytes, list[int]]] = deque()
        self._in = b""
        self.files: deque[int] = deque()
        self.ended = False

    def fileno(self) -> int:
        """For select."""
        return self._sock.fileno()

    def put(self, what: int, place: int, first: int = 0, second: int = 0) -> None:
        """Add a message to the next flush."""
        self._out += _MESSAGE.pack(what, place, first, second)

    def put_file(self, place: int, first: int, file: int) -> None:
        """Add a SOCKET message and its file, of which the channel keeps a duplicate until it has gone.

        Raises:
            OSError: this process has as many files open as it may.
        """
        data, copy = _MESSAGE.pack(SOCKET, place, first, 0), os.dup(file)
        if self._out:
            self._behind.append((bytes(self._out), []))
            self._out.clear()
        if self._behind and 0 < len(self._behind[-1][1]) < _MOST_FILES:
            before, files = self._behind.pop()
            self._behind.append((before + data, [*files, copy]))
        else:
            if self._behind:
                self.flush()
            self._behind.append((data, [copy]))

    def flush(self) -> bool:
        """Send what there is; False when some of it has to wait."""
        if self._out and not self._behind:
            taken = self._send(self._out, [])
            del self._out[:taken]
            return not self._out
        if self._out:
            self._behind.append((bytes(self._out), []))
            self._out.clear()
        while self._behind:
            data, files = self._behind[0]
            taken = self._send(data, files)
            if not taken:
                return False
            for file in files:  # they go with the first byte
                os.close(file)
            self._behind[0] = (data[taken:], [])
            if taken == len(data):
                self._behind.popleft()
        return True

    def messages(self) -> Iterator[Message]:
        """The messages that have come."""
        if self._in or not self.ended:
            yield from map(Message._make, _MESSAGE.iter_unpack(self._read()))

    def close(self) -> None:
        """Close this end."""
        self._sock.close()

    def _send(self, data: bytes | bytearray, files: list[int]) -> int:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        try:
            return self._sock.sendmsg([data], rights)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:  # the kernel wants files that are on their way to arrive first
                return 0
            # The other side is gone, and nothing is to be told
            self.ended = True
            return len(data)

    def _read(self) -> bytes:
        try:
            data, files, _, _ = socket.recv_fds(self._sock, _READ_BYTES, _MOST_FILES)
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
    """The two sockets of a channel; make them channels on either side of a fork."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


_SLOT = struct.Struct("=qqqq")
SLOT_BYTES = _SLOT.size


class Load(NamedTuple):
    """A flow on a connection: its number, payload (0: open-ended), CLOCK_MONOTONIC times due and launched."""

    number: int
    size_bytes: int
    due_ns: int
    start_ns: int


class Slots:
    """Slots of one carrier; make it before the fork.

    Args:
        count: connections at a time.
    """

    def __init__(self, count: int) -> None:
        self._memory = mmap.mmap(-1, max(1, count) * SLOT_BYTES)

    def fill(self, slot: int, number: int, size_bytes: int, due_ns: int, start_ns: int) -> None:
        """Say what a connection carries from now on."""
        _SLOT.pack_into(self._memory, slot * SLOT_BYTES, number, size_bytes, due_ns, start_ns)

    def load(self, slot: int) -> Load:
        """Flow that a connection carries, or carried last."""
        return Load._make(_SLOT.unpack_from(self._memory, slot * SLOT_BYTES))
