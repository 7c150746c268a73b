"""An absolute alarm clock for the event loop.

The loop's own timers go through epoll, whose time-out is rounded up to a whole millisecond: too coarse for bursts that
last one. A timerfd wakes the same epoll at the nanosecond asked for.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1


class _Spec(ctypes.Structure):
    """The C library's itimerspec."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Alarm:
    """Calls back once the monotonic clock has reached the time last set.

    Args:
        loop: the event loop that runs the callback.
        ring: what to call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._fallback: asyncio.TimerHandle | None = None
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._create()
        if self._fd >= 0:
            loop.add_reader(self._fd, self._rang)

    def set(self, at_ns: int) -> None:
        """Ring at ``at_ns`` of CLOCK_MONOTONIC, or at once if that has passed; replaces the time set before."""
        if self._fd < 0:
            if self._fallback is not None:
                self._fallback.cancel()
            delay_s = (at_ns - time.monotonic_ns()) / 1e9
            self._fallback = self._loop.call_later(max(0.0, delay_s), self._ring)
            return
        seconds, nanoseconds = divmod(max(1, at_ns), 1_000_000_000)
        self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(_Spec(0, 0, seconds, nanoseconds)), None)

    def close(self) -> None:
        """Never ring again."""
        if self._fallback is not None:
            self._fallback.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _create(self) -> int:
        try:
            return int(self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        except AttributeError:
            return -1

    def _rang(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # set anew since it went off
        self._ring()
