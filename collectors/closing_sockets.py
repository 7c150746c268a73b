"""Collects the last counters of TCP connections from the kernel's messages about sockets that it destroys.

What a connection carries between its last sample and its end is in no sample. The kernel tells it to whoever listens to
the groups SKNLGRP_INET_TCP_DESTROY and SKNLGRP_INET6_TCP_DESTROY (linux/sock_diag.h), without privilege.

Each message costs the kernel about 10 µs on the processor that closes the connection. A budget therefore bounds them: a
node on which more connections close is not listened to until the budget has recovered.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque

from ringtap.collectors.netlink import ACKNOWLEDGE, NO_OPERATION, SOCK_DIAG, NetlinkSocket, request

_GROUPS = (1, 3)  # TCP over IPv4, over IPv6
BUDGET = 20_000  # messages at once: 0.2 s of a processor
MEAN_RATE = 100  # per second, over time: 0.1 % of a processor


class ClosingSockets:
    """The messages about connections that end, received by a thread of its own, because the kernel keeps few of them.

    Attributes:
        lost: number of times that messages were lost.
        pauses: number of times that the budget was spent.

    Raises:
        OSError: the kernel does not tell, or no file descriptor is left.
    """

    def __init__(self) -> None:
        self._netlink = NetlinkSocket(SOCK_DIAG)
        try:
            for group in _GROUPS:
                self._netlink.join(group)
        except OSError:
            self._netlink.close()
            raise
        self._messages: deque[bytes] = deque()
        self._left, self._at_s = float(BUDGET), time.monotonic()
        self._stop = threading.Event()
        self.lost = self.pauses = 0
        self._thread = threading.Thread(target=self._work, name="closing sockets", daemon=True)
        self._thread.start()

    def take(self) -> list[bytes]:
        """Return the messages since the last call."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def close(self) -> None:
        """End the thread and close the socket."""
        self._stop.set()
        try:
            self._netlink.send(request(NO_OPERATION, ACKNOWLEDGE, b""))  # its answer wakes the thread
            self._thread.join()
        except OSError:  # then it ends when its wait does
            return
        self._netlink.close()

    def _work(self) -> None:
        buffer, receive = self._netlink.buffer, self._netlink.receive_into
        while not self._stop.is_set():
            try:
                length = receive(buffer)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ENOBUFS):
                    return
                self.lost += error.errno == errno.ENOBUFS
                continue
            self._messages.append(bytes(buffer[:length]))
            if not self._may_continue(time.monotonic()):
                self._pause()

    def _may_continue(self, now_s: float) -> bool:
        """Count one message; returns False if the budget is spent."""
        self._left = min(self._left + (now_s - self._at_s) * MEAN_RATE, BUDGET) - 1
        self._at_s = now_s
        return self._left >= 1

    def _pause(self) -> None:
        """Do not listen until the budget has recovered."""
        self.pauses += 1
        try:
            for group in _GROUPS:
                self._netlink.leave(group)
            self._stop.wait(BUDGET / MEAN_RATE)
            for group in _GROUPS:
                self._netlink.join(group)
        except OSError:
            self._stop.set()
