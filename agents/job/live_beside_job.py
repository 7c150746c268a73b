"""Implements ``--live``: sends the job's output to a file, and gives ``ringtap live`` the terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ringtap.agents.job.foreground_command import SignalRelay, spawn
from ringtap.core.isolated_python import python_command
from ringtap.core.parent_death import die_with_parent
from ringtap.core.terminal_escaping import shell_word

_VIEW_END_S = 5.0


def keep_output(node_folder: Path) -> Callable[[], None]:
    """Return a function that sends a job's output and errors to ``log/job.out`` and keeps it from the terminal."""
    path = node_folder / "log" / "job.out"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)

    def prepare() -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        if os.isatty(0):
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    return prepare


class LiveView:
    """The live view as a child process; its end does not affect the job or the capture.

    Args:
        run: the run directory.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._pid = 0
        self._is_reported = False
        self._has_terminal = os.isatty(0) and os.isatty(1)
        command = python_command(sys.executable, "ringtap.cli", "live", str(run))
        if not self._has_terminal:
            command.append("--plain")
        with contextlib.suppress(OSError):
            self._pid = spawn(command, os.environ, prepare=die_with_parent(signal.SIGTERM))

    def look(self, reaper: SignalRelay) -> bool:
        """Return True if the view has ended; the first time, tell the user that the recording continues."""
        is_gone = self._is_gone(reaper)
        if is_gone and not self._is_reported:
            self._is_reported = True
            with contextlib.suppress(OSError, ValueError):
                command = f"ringtap live {shell_word(self._run)}"
                message = f"ringtap: the view has ended, the recording goes on; to watch again: {command}"
                print(message, file=sys.stderr, flush=True)
        return is_gone

    def end(self, reaper: SignalRelay) -> None:
        """Wait for the view's end after the run: on a terminal until the user leaves it, elsewhere for at most 5 s."""
        deadline_s = time.monotonic() + _VIEW_END_S
        while not self._is_gone(reaper):
            if not self._has_terminal and time.monotonic() > deadline_s:
                with contextlib.suppress(OSError):
                    os.kill(self._pid, signal.SIGTERM)
                return
            signal.sigtimedwait({signal.SIGCHLD}, 0.2)
            if signal.sigpending() & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}:
                self._has_terminal, deadline_s = False, 0.0

    def _is_gone(self, reaper: SignalRelay) -> bool:
        reaper.reap()
        return not self._pid or self._pid in reaper.reaped
