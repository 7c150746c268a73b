"""Processes of a sender or receiver: forking, messages over pipes, termination; and their number and file limit."""

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


class WorkerProcesses:
    """A context manager for forked processes: inside, signals set ``signalled``; on exit, every process has ended.

    Args:
        until: the end of this pipe counts as a signal, because the process at its other end has ended.

    Attributes:
        signalled: name of the first SIGINT or SIGTERM received, ``parent`` after the end of ``until``, empty before.
    """

    def __init__(self, until: Connection | None = None) -> None:
        self.signalled = ""
        self._until = until
        self._ears: list[Connection] = []
        self._processes: list[Any] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> WorkerProcesses:
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
        """Fork a process that runs ``work`` with one end of a pipe; return the other end.

        Args:
            work: function that the process runs; it must return when the pipe ends.
            foreign: objects that the process closes first, so that other processes notice when their owners end.
        """
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        not_its_own = [*foreign, *self._ears, ours, self._bell, self._clapper]

        def child() -> None:
            for number in _SIGNALS:  # a terminal's Ctrl-C reaches the whole group; only the parent acts on it
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
        """Return the next message of a process; None on timeout (``longest_s`` None: no timeout) or after a signal.

        Raises:
            MeasurementError: a process ended with an error.
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


_PROCESSORS_A_LOOP = 4  # the launcher, the kernel's own work and the measured job need processors too
_MOST_LOOPS = 4


def raise_file_limit(wanted: int) -> int:
    """Raise the soft limit of open files towards ``wanted``; return the resulting limit, at most ``wanted``."""
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


def usual_workers() -> tuple[int, int]:
    """Return the default numbers of processes and of threads in each; threads only if the interpreter has no GIL."""
    loops = max(1, min(_MOST_LOOPS, len(os.sched_getaffinity(0)) // _PROCESSORS_A_LOOP))
    locked = getattr(sys, "_is_gil_enabled", lambda: True)()
    return (loops, 1) if locked else (1, loops)
