"""Tells a signal sent to this process alone from one sent to its whole process group.

A supervisor shares the process group of its job. What is sent to the group has reached the job already; passing it on
would deliver it twice, and a second SIGTERM interrupts what the first one began. The kernel does not tell a receiver
which it was. So a third process in the group holds every signal back and never takes one: a signal that is pending
there too was sent to all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from ringtap.agents.relay import parent_of

# Launchers that signal their processes one by one take this long at most from the first to the last
_SETTLE_S = 0.02


class GroupWatch:
    """The process that is never spoken to; started at once, ended by `close` or with this process."""

    def __init__(self) -> None:
        self._pid = 0
        self._pipe = -1
        with contextlib.suppress(OSError):  # without it a signal to the group is passed on once more
            self._start()

    def _start(self) -> None:
        reader, self._pipe = os.pipe()
        try:
            self._pid = os.fork()
        finally:
            if self._pid:
                os.close(reader)
        if self._pid == 0:
            try:
                os.close(self._pipe)
                _hold(reader)
            finally:
                os._exit(0)

    def reached_group(self, number: int) -> bool:
        """Whether a signal that this process has just received was sent to the whole group."""
        if not self._pid:
            return False
        time.sleep(_SETTLE_S)
        try:
            lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
            pending = int(next(line for line in lines if line.startswith("ShdPnd:")).split()[1], 16)
        except (OSError, ValueError, StopIteration):
            return False
        self.forget()
        return bool(pending >> (number - 1) & 1)

    def forget(self) -> None:
        """Let go of the signals that are held back."""
        if self._pid:
            with contextlib.suppress(OSError):
                os.write(self._pipe, b"c")

    def close(self) -> None:
        """End the process."""
        if self._pid:
            with contextlib.suppress(OSError):
                os.close(self._pipe)
            with contextlib.suppress(OSError):
                if parent_of(self._pid) == os.getpid():  # it may be stopped, and would not see the pipe's end
                    os.kill(self._pid, signal.SIGKILL)
                    os.waitpid(self._pid, 0)
            self._pid = 0


def _hold(reader: int) -> None:
    everything = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    signal.pthread_sigmask(signal.SIG_BLOCK, everything)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(3, reader)
    os.closerange(reader + 1, 1 << 20)
    with contextlib.suppress(OSError):
        os.chdir("/")
        Path("/proc/self/comm").write_text("ringtap-group")
    while os.read(reader, 64):  # ends with the writer
        while signal.sigtimedwait(everything, 0):
            pass
