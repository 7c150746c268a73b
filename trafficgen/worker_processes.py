"""Forks and ends the processes of a sender or receiver, with messages over pipes, default numbers and file limit."""

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

from ringtap.core.errors import MeasurementError, exit_words

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_END_PATIENCE_S = 5.0


class _Closable(Protocol):
    def close(self) -> None: ...


class WorkerProcesses:
    """Context manager for forked processes: signals set ``signalled`` inside; every process is ended on exit.

    Args:
        until: pipe to a parent process; its end counts as a signal, because that process has ended.

    Attributes:
        signalled: name of the first SIGINT or SIGTERM received, ``parent`` after the end of ``until``, empty before.
    """

    def __init__(self, until: Connection | None = None) -> None:
        self.signalled = ""
        self._until = until
        self._pipes: dict[Connection, Any] = {}  # with the process at the other end
        self._processes: list[Any] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> WorkerProcesses:
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        for number in _SIGNALS:
            self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        deadline_s = time.monotonic() + _END_PATIENCE_S
        for process in self._processes:
            process.join(max(0.1, deadline_s - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._wake_receiver.close()
        self._wake_sender.close()

    def start(self, work: Callable[[Connection], None], foreign: Sequence[_Closable] = ()) -> Connection:
        """Fork a process that runs ``work`` with one end of a pipe; return the other end.

        Args:
            work: function that the process runs; it must return when the pipe ends.
            foreign: objects of other processes; this one closes them first, so that the end of their owners is noticed.
        """
        context = multiprocessing.get_context("fork")
        parent_end, child_end = context.Pipe()
        to_close = [*foreign, *self._pipes, parent_end, self._wake_receiver, self._wake_sender]
        to_close += [] if self._until is None else [self._until]

        def child() -> None:
            for number in _SIGNALS:  # a terminal's Ctrl-C reaches the whole group; only the parent acts on it
                signal.signal(number, signal.SIG_IGN)
            for closable in to_close:
                closable.close()
            with suppress(BrokenPipeError):
                work(child_end)

        process = context.Process(target=child)
        process.start()
        child_end.close()
        self._processes.append(process)
        self._pipes[parent_end] = process
        return parent_end

    def listen(self, timeout_s: float | None) -> Any:
        """Return the next message of a process; None on timeout (``timeout_s`` None: no timeout) or after a signal.

        Raises:
            MeasurementError: a process ended with an error.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            until = [] if self._until is None else [self._until]
            ready = wait([self._wake_receiver, *until, *self._pipes], left_s)
            if self._until in ready:
                self.signalled, self._until = self.signalled or "parent", None
                return None
            for pipe in ready:
                if isinstance(pipe, Connection):
                    try:
                        return pipe.recv()
                    except (EOFError, OSError):
                        pipe.close()
                        _check_end_of(self._pipes.pop(pipe))
            if self._wake_receiver in ready:
                self._wake_receiver.recv(64)
                return None
            if not ready:
                return None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.signalled = self.signalled or signal.Signals(number).name
        with suppress(OSError):
            self._wake_sender.send(b"!")


def _check_end_of(process: Any) -> None:
    """Raise MeasurementError if a process, whose pipe has ended, ended with an error; it ends right after its pipe."""
    process.join(_END_PATIENCE_S)
    if process.exitcode:
        raise MeasurementError(
            f"one of its processes (pid {process.pid}) ended unexpectedly with {exit_words(process.exitcode)}"
        )


_PROCESSORS_A_LOOP = 4  # the launcher, the kernel's own work and the measured job need processors too
_MAX_LOOPS = 4


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
    loops = max(1, min(_MAX_LOOPS, len(os.sched_getaffinity(0)) // _PROCESSORS_A_LOOP))
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    return (loops, 1) if has_gil else (1, loops)
