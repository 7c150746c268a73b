"""Starts the processes of a benchmark: pinned, with time limits and resource usage; they end with it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from _checkout import ROOT

from ringtap.core.parent_death import die_with_parent

_GRACE_S = 5.0
_INTERRUPTIONS = {signal.SIGINT, signal.SIGTERM}


class BenchmarkError(Exception):
    """A measure that failed; the message is one sentence with the reason."""


@dataclass(frozen=True)
class Ended:
    """The result of a process; CPU time and memory include those of the processes that it waited for itself."""

    code: int
    stdout: str
    stderr: str
    cpu_s: float
    peak_rss_bytes: int
    wall_s: float


class Child:
    """A child process, in a session of its own so that Ctrl-C reaches only the benchmark.

    Args:
        argv: the command line.
        cpus: cores to run on; None: the benchmark's.
        environment: variables added to the benchmark's environment.
    """

    def __init__(self, argv: Sequence[str], cpus: Iterable[int] | None, environment: Mapping[str, str]) -> None:
        self.argv = list(argv)
        chosen = None if cpus is None else set(cpus)
        end_with_benchmark = die_with_parent()

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTIONS)
            if chosen:
                os.sched_setaffinity(0, chosen)
            end_with_benchmark()

        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._stdout, self._stderr = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 -- closed by _reap
        self._begun_s = time.monotonic()
        try:
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=self._stdout,
                stderr=self._stderr,
                start_new_session=True,
                preexec_fn=prepare,  # noqa: PLW1509 -- the benchmark has one thread
                env={**os.environ, "PYTHONPATH": path, **environment},
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise BenchmarkError(f"{self.argv[0]} could not be started: {error}") from error
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._ended: Ended | None = None

    @property
    def name(self) -> str:
        """The shortened command line, for messages."""
        return " ".join(Path(item).name if item.startswith("/") else item for item in self.argv)[:160]

    def errors_so_far(self) -> str:
        """Return the text that the process has written to standard error so far."""
        return _text(self._stderr.fileno())

    def await_it(self, what: Callable[[], bool], name: str, timeout_s: float = 20.0) -> None:
        """Wait until something is true of the process; end it if it is not in time.

        Raises:
            BenchmarkError: it is not true in time, or the process has ended; the message has its last line of errors.
        """
        deadline_s = time.monotonic() + timeout_s
        while not what():
            if self.is_over(0.005) or time.monotonic() > deadline_s:
                raise BenchmarkError(f"'{self.name}' does not {name}: {_last_words(self.end())}")

    def wait(self, timeout_s: float) -> Ended:
        """Wait until the process ends; end it after ``timeout_s``.

        Raises:
            BenchmarkError: it took longer.
        """
        if self._ended is None and not self.is_over(timeout_s):
            self.end()
            raise BenchmarkError(f"'{self.name}' had not ended after {timeout_s:.0f} s and was ended")
        return self._reap()

    def result(self, timeout_s: float) -> Ended:
        """Wait until the process ends successfully.

        Raises:
            BenchmarkError: it took longer, or its exit code was not 0; the message contains its last line of output.
        """
        ended = self.wait(timeout_s)
        if ended.code != 0:
            raise BenchmarkError(f"'{self.name}' ended with {ended.code}: {_last_words(ended)}")
        return ended

    def end(self, number: int = signal.SIGTERM) -> Ended:
        """Send the process a signal to end; after 5 s, kill it and the processes that it started."""
        if self._ended is None and not self.is_over(0):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)
            if not self.is_over(_GRACE_S):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
        return self._reap()

    def is_over(self, timeout_s: float | None) -> bool:
        """Return True if the process ends within ``timeout_s`` (None: no limit)."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))

    def _reap(self) -> Ended:
        if self._ended is None:
            wall_s = time.monotonic() - self._begun_s
            _, status, usage = os.wait4(self.pid, 0)
            code = self._process.returncode = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(ProcessLookupError):  # processes left in its group
                os.killpg(self.pid, signal.SIGKILL)
            os.close(self._pidfd)
            stdout, stderr = _text(self._stdout.fileno()), _text(self._stderr.fileno())
            self._stdout.close()
            self._stderr.close()
            self._ended = Ended(code, stdout, stderr, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, wall_s)
        return self._ended


def _last_words(ended: Ended) -> str:
    return (ended.stderr.strip() or ended.stdout.strip() or "no message").splitlines()[-1]


def _text(fd: int) -> str:
    return os.pread(fd, 2**26, 0).decode(errors="replace")


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTIONS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


class Processes:
    """All processes that the benchmark starts; leaving the ``with`` block ends those that still run.

    Args:
        environment: variables added to the benchmark's environment.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._children: list[Child] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        with _uninterrupted():
            for child in reversed(self._children):
                child.end()

    def start(self, argv: Iterable[object], cpus: Iterable[int] | None = None) -> Child:
        """Start a process; see `Child`."""
        with _uninterrupted():
            child = Child(list(map(str, argv)), cpus, self._environment)
            self._children.append(child)
        return child

    def ringtap(self, *words: object, cpus: Iterable[int] | None = None) -> Child:
        """Start a command of ringtap."""
        return self.start([sys.executable, "-m", "ringtap.cli", *words], cpus)
