"""Starts a command in the place of this process: its terminal, signals, stops and exit code pass through."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ringtap.collectors.kernel_files import stat_of
from ringtap.core.terminal_escaping import one_line, shell_word

_SI_KERNEL = 0x80
STOPS = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
# Not passed on: signals that cannot be blocked, that the processor raises, or that Python ignores, and SIGCHLD
_OWN = {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ),
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS, signal.SIGABRT),
}
FORWARDED = {number for number in signal.valid_signals() if number not in _OWN}
_KNOWN = FORWARDED | {signal.SIGCHLD}
ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_GENERATIONS = 64  # most ancestors of a sender that are looked up
_WAKER_POLL_S = 0.05
_WITHOUT_FILE_S = 0.05
_SIGSET_BYTES = 128  # of sigset_t, in glibc and musl
_STOPPED = ("T", "t")  # states of /proc/PID/stat: by a signal, by a debugger

_mask_before: Collection[int] | None = None


def block_signals() -> None:
    """Block the signals that are passed on; call it before starting anything that can be interrupted."""
    global _mask_before
    _mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED | {signal.SIGCHLD})


def spawn(
    command: list[str],
    environment: Mapping[str, str],
    *,
    prepare: Callable[[], None] | None = None,
) -> int:
    """Start a command with this process's open files, group, folder and original signal mask; returns its pid.

    If the command cannot be run, the child prints one sentence and exits with 127 (not found) or 126, as a shell does.

    Args:
        command: the command and its arguments.
        environment: its environment.
        prepare: called in the child before it becomes the command.

    Raises:
        OSError: no process can be forked.
    """
    pid = os.fork()
    if pid == 0:
        if prepare:
            with contextlib.suppress(OSError):
                prepare()
        become(command, environment)
    return pid


def become(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by a command; on failure, print one sentence and exit as a shell does."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python itself ignores them
        signal.signal(number, signal.SIG_DFL)
    if _mask_before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _mask_before)
    code = 126
    try:
        os.execvpe(command[0], command, environment)
    except (FileNotFoundError, NotADirectoryError) as error:
        code, reason = 127, error.strerror
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        # a shell skips a folder of $PATH that this user may not read
        if os.sep not in command[0] and shutil.which(command[0], os.F_OK, environment.get("PATH")) is None:
            code, reason = 127, os.strerror(errno.ENOENT)
    with contextlib.suppress(OSError):
        said = f"ringtap: {one_line(command[0])} cannot be run: {reason}{_remedy(command[0])}\n"
        os.write(2, said.encode(errors="replace"))
    os._exit(code)


def _remedy(program: str) -> str:
    """Return how to run a script that was named like a program, with a colon before it; empty if it is none."""
    if not program.endswith(".py") or not Path(program).is_file():
        return ""
    return f": write python3 {shell_word(program)}"


class SignalRelay:
    """Relay of the signals that reach this process alone to a spawned command, until the command ends.

    Args:
        pid: the command, a child of this process; 0 for none, where other children are to be reaped.

    Attributes:
        ended_by: the last signal that asked the job to end, passed on or sent by the terminal.
        reaped: pids of other children that have ended.
        watch: tells which signals have reached the command too; None: it is not known.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended_by: int | None = None
        self.reaped: set[int] = set()
        self.watch: GroupWatch | None = None
        self._status: int | None = None
        self._waker = 0

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the command's end, for at most so many seconds; returns its wait status, None if it still runs."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while self._status is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            info = signal.sigwaitinfo(_KNOWN) if left is None else take_signal(_KNOWN, left)
            if info is None:
                if self.watch:
                    self.watch.tend()
                continue
            if info.si_signo == signal.SIGCHLD:
                self.reap()
            else:
                self._pass_on(info)
        return self._status

    def reap(self) -> None:
        """Reap the children that have ended, and stop this process too if the command has stopped."""
        with contextlib.suppress(ChildProcessError):
            while True:  # every child: the first process of a container inherits orphans
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
                if not pid:
                    return
                if pid == self.pid and os.WIFSTOPPED(status):
                    self._stop_too(os.WSTOPSIG(status))
                elif pid == self.pid:
                    self._status = status
                elif not os.WIFSTOPPED(status):
                    self.reaped.add(pid)

    def _stop_too(self, number: int) -> None:
        """Stop like the command, so that the shell sees its job stopped; returns when continued.

        A waker process watches the command: a stopped process would not notice that it was continued or killed alone.
        """
        has_continued = self._take_continue()
        if _proc_is_own():
            has_continued = state_of(self.pid) not in _STOPPED
        if has_continued:
            return
        self._waker = _start_waker(self.pid)
        if number in STOPS:
            # send it before unblocking: if the terminal's is pending too, they count as one, and stop only once
            os.kill(os.getpid(), number)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
            signal.pthread_sigmask(signal.SIG_BLOCK, {number})
        elif self._waker:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._waker:
            os.kill(self._waker, signal.SIGKILL)
            os.waitpid(self._waker, 0)
        self._take_continue()  # if left pending, it would seem to end the next stop

    def _take_continue(self) -> bool:
        """Pass on a pending SIGCONT; returns True if there was one."""
        info = signal.sigtimedwait({signal.SIGCONT}, 0)
        if info:
            self._pass_on(info)
        return info is not None

    def _pass_on(self, info: signal.struct_siginfo) -> None:
        number = info.si_signo
        if number in ENDING:
            self.ended_by = number
        if number == signal.SIGCONT and info.si_pid == self._waker:
            return
        if info.si_code == _SI_KERNEL:  # signals from a terminal reach the whole process group
            if self.watch:
                self.watch.forget(number)
            return
        if self._is_of_job(info.si_pid) or (self.watch and self.watch.reached_group(number, info.si_pid)):
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _is_of_job(self, pid: int) -> bool:
        """True if the sender is the command or its descendant, whose signals to the group have reached the job."""
        for _ in range(_GENERATIONS):
            if pid == self.pid:
                return True
            if pid <= 1:
                return False
            pid = parent_of(pid)
        return False


def take_signal(numbers: Collection[int], seconds: float) -> signal.struct_siginfo | None:
    """Take one of these blocked signals, after waiting for it for at most so many seconds; return None if none came."""
    # sigtimedwait of CPython returns unset data, which may look like another signal, if a stop of this process outlasts
    # its time: it does not wait here
    ready, descriptor = select.poll(), _open_signal_file(numbers)
    if descriptor >= 0:
        ready.register(descriptor, select.POLLIN)
    ready.poll(1e3 * (seconds if descriptor >= 0 else min(seconds, _WITHOUT_FILE_S)))
    if descriptor >= 0:
        os.close(descriptor)  # where few files may be open, others need it
    return signal.sigtimedwait(numbers, 0)


def _open_signal_file(numbers: Collection[int]) -> int:
    """Open a file that is readable while one of these signals is pending; return -1 if it cannot be opened."""
    try:
        libc = ctypes.CDLL(None)
        mask = ctypes.create_string_buffer(_SIGSET_BYTES)
        libc.sigemptyset(mask)
        for number in numbers:
            libc.sigaddset(mask, int(number))
        return int(libc.signalfd(-1, mask, os.O_CLOEXEC | os.O_NONBLOCK))
    except (OSError, AttributeError):
        return -1


def parent_of(pid: int) -> int:
    """The parent's pid; 0 if there is no such process or no visible parent."""
    fields = stat_of(pid)
    return int(fields[1]) if len(fields) > 1 else 0


def state_of(pid: int) -> str:
    """The letter of a process's state in /proc/PID/stat; empty if there is no such process."""
    return "".join(stat_of(pid)[:1])


def _proc_is_own() -> bool:
    """True if /proc shows the pids of this process's namespace; in a testbed it may show another one's."""
    try:
        return str(Path("/proc/self").readlink()) == str(os.getpid())
    except OSError:
        return False


def _start_waker(job: int) -> int:
    """Fork a process that continues this one when the job is no longer stopped; returns its pid, 0 on failure.

    It has its own session, so that a signal that stops the process group does not stop it.
    """
    parent = os.getpid()
    if not _proc_is_own():
        return 0
    try:
        pid = os.fork()
    except OSError:
        return 0
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setsid()
            os.closerange(0, 1 << 20)
            with contextlib.suppress(OSError):
                Path("/proc/self/comm").write_text("ringtap-waker")
            while os.getppid() == parent:
                if state_of(parent) == "T" and state_of(job) not in _STOPPED:
                    os.kill(parent, signal.SIGCONT)
                time.sleep(_WAKER_POLL_S)
        os._exit(0)
    return pid


def relay(pid: int) -> int:
    """Wait for a spawned command, passing signals on; returns its exit code (128 + number if a signal ended it)."""
    status = SignalRelay(pid).wait()
    code = os.waitstatus_to_exitcode(status or 0)
    return code if code >= 0 else 128 - code


def end_as(status: int) -> int:
    """End this process by the signal that ended a command, or else return the command's exit code."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    number = -code
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError, ValueError):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        time.sleep(0.2)
    return 128 + number  # the first process of a container does not end by its own signals


# Launchers that signal the processes of a group one by one take some time from the first to the last. A sender that
# sleeps has finished, one that runs or waits for the disk has not, and one that has ended may be one of several.
_SETTLE_S = {"": 0.1, "Z": 0.1, "R": 0.3, "D": 0.3}  # by the state of the sender
_SETTLE_OTHERWISE_S = 0.02
_SETTLE_POLL_S = 0.002


class GroupWatch:
    """A process in this process group that tells signals to the whole group from signals to one process.

    The supervisor shares its job's process group. A signal to the group has reached the job already; passing it on
    would deliver it twice, and a second SIGTERM interrupts what the first one began. The kernel does not tell a
    receiver which of the two it was. The watch blocks every signal and takes none by itself, so a signal that is
    pending there too was sent to the group. It starts at once, and ends with `close` or with this process.
    """

    def __init__(self) -> None:
        self._pid = 0
        self._pipe = -1
        self._seen = 0
        with contextlib.suppress(OSError):  # without it, a signal to the group is delivered twice
            self._start()

    def _start(self) -> None:
        reader, self._pipe = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # the watch begins with them blocked
        is_watch = False
        try:
            self._pid = os.fork()
            is_watch = self._pid == 0
        finally:
            if not is_watch:
                os.close(reader)
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if is_watch:
            try:
                os.close(self._pipe)
                _run_watch(reader)
            finally:
                os._exit(0)

    def reached_group(self, number: int, sender: int = 0) -> bool:
        """True if a signal that this process has just received was sent to the whole group.

        Args:
            number: the signal.
            sender: pid of the process that sent it; 0 if it is not known.
        """
        begun_s = time.monotonic()
        while not self._pending() >> (number - 1) & 1:
            if time.monotonic() > begun_s + _SETTLE_S.get(state_of(sender), _SETTLE_OTHERWISE_S) or not self._pid:
                return False
            time.sleep(_SETTLE_POLL_S)
        self.forget(number)
        return True

    def _pending(self) -> int:
        """The signals that are pending in the watch, as a mask; 0 without one."""
        try:
            lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("ShdPnd:")).split()[1], 16)
        except (OSError, ValueError, StopIteration):
            return 0

    def forget(self, *numbers: int) -> None:
        """Discard signals that are pending in the watch."""
        if self._pid:
            with contextlib.suppress(OSError):
                os.write(self._pipe, bytes(numbers))

    def tend(self) -> None:
        """Keep the watch ready; call it from time to time while no signal is pending in this process.

        A signal that reached the watch alone is discarded, as it would hide the next one. A watch that was stopped
        alone is continued, and one that was killed is started again.
        """
        if not self._pid:
            return
        pending = self._pending()
        stale, self._seen = pending & self._seen, pending
        self.forget(*(number for number in FORWARDED if stale >> (number - 1) & 1))
        state = state_of(self._pid)
        with contextlib.suppress(OSError):
            if state == "T":
                os.kill(self._pid, signal.SIGCONT)
            elif state in ("", "Z"):
                os.close(self._pipe)
                self._pid = 0
                self._start()

    def close(self) -> None:
        """End the watch."""
        if self._pid:
            with contextlib.suppress(OSError):
                os.close(self._pipe)
            with contextlib.suppress(OSError):
                if parent_of(self._pid) == os.getpid():  # it may be stopped, and would not see the pipe's end
                    os.kill(self._pid, signal.SIGKILL)
                    os.waitpid(self._pid, 0)
            self._pid = 0


def _run_watch(reader: int) -> None:
    """Keep signals pending, and discard those whose numbers the parent writes to the pipe; runs in the watch."""
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
    while numbers := os.read(reader, 64):  # until the writer closes it
        for number in numbers:
            signal.sigtimedwait({number}, 0)


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise KeyboardInterrupt within the block."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
