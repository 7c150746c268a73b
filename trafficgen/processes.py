"""The processes of a sender or receiver: forked, heard over pipes, and never outliving the process that made them."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, Protocol

from ringtap.errors import MeasurementError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_END_PATIENCE_S = 5.0


class _Closable(Protocol):
    def close(self) -> None: ...


class Crew:
    """A context manager: signals are turned into ``signalled`` within, and every process has ended after it.

    Args:
        until: when this pipe ends, it is as if a signal had come: the process at its other end is gone.

    Attributes:
        signalled: name of the first SIGINT or SIGTERM that came, empty while none has.
    """

    def __init__(self, until: Connection | None = None) -> None:
        self.signalled = ""
        self._until = until
        self._ears: list[Connection] = []
        self._processes: list[Any] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Crew:
        self._bell, self._clapper = socket.socketpair()
        self._bell.setblocking(False)
        self._clapper.setblocking(False)
        for number in _SIGNALS:
            self._handlers[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        for ear in self._ears:
            ear.close()
        limit_s = time.monotonic() + _END_PATIENCE_S
        for process in self._processes:
            process.join(max(0.1, limit_s - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._bell.close()
        self._clapper.close()

    def start(self, work: Callable[[Connection], None], foreign: Sequence[_Closable] = ()) -> Connection:
        """Fork a process that runs ``work`` with its end of a pipe; returns ours.

        Args:
            work: what it does; it is to end when the pipe does.
            foreign: what it closes first, so that others notice when the owners are gone.
        """
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        not_its_own = [*foreign, *self._ears, ours, self._bell, self._clapper]

        def child() -> None:
            for number in _SIGNALS:  # a terminal's Ctrl-C reaches the whole group; the parent says what is to be done
                signal.signal(number, signal.SIG_IGN)
            for thing in not_its_own:
                thing.close()
            with suppress(BrokenPipeError):
                work(theirs)

        process = context.Process(target=child)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._ears.append(ours)
        return ours

    def listen(self, longest_s: float | None) -> Any:
        """The next word of a process; None after so long (None: for ever), or when a signal has come.

        Raises:
            MeasurementError: a process died.
        """
        limit_s = None if longest_s is None else time.monotonic() + longest_s
        while True:
            left_s = None if limit_s is None else max(0.0, limit_s - time.monotonic())
            until = [] if self._until is None else [self._until]
            ready = wait([self._bell, *until, *self._ears], left_s)
            if self._until in ready:
                self.signalled, self._until = self.signalled or "parent", None
                return None
            for ear in ready:
                if isinstance(ear, Connection):
                    try:
                        return ear.recv()
                    except (EOFError, OSError):
                        self._ears.remove(ear)
                        ear.close()
                        self._see_dead()
            if self._bell in ready:
                self._bell.recv(64)
                return None
            if not ready:
                return None

    def _see_dead(self) -> None:
        for process in self._processes:
            process.join(0.5 if process.exitcode is None else 0)
            if process.exitcode:
                raise MeasurementError(
                    f"one of its processes (pid {process.pid}) ended unexpectedly with {_exit_words(process.exitcode)}"
                )

    def _caught(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.signalled = self.signalled or signal.Signals(number).name
        with suppress(OSError):
            self._clapper.send(b"!")


def _exit_words(code: int) -> str:
    if code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


_PROCESSORS_A_LOOP = 4  # a launcher, the kernel's own work and the job beside us want theirs
_MOST_LOOPS = 4


def raise_file_limit(wanted: int) -> int:
    """Raise the soft limit of open files towards ``wanted``; returns the limit then in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    for limit in ((wanted, max(wanted, hard)), (min(wanted, hard), hard)):  # above the hard limit: root only
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        except (OSError, ValueError):
            continue
        return limit[0]
    return soft


def usual_crew() -> tuple[int, int]:
    """Processes, and threads in each, that suit this host: threads where the interpreter has no global lock."""
    loops = max(1, min(_MOST_LOOPS, len(os.sched_getaffinity(0)) // _PROCESSORS_A_LOOP))
    locked = getattr(sys, "_is_gil_enabled", lambda: True)()
    return (loops, 1) if locked else (1, loops)
