"""Starting a command so that it does not notice: terminal, signals and exit code pass through."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping

_SI_KERNEL = 0x80
FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}


def block_signals() -> None:
    """Hold back the signals that `relay` passes on; call it before anything that can be interrupted is started."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED | {signal.SIGCHLD})


def spawn(command: list[str], environment: Mapping[str, str], *, end_with_parent: bool = False) -> int:
    """Start a command with this process's files, group and folder; returns its pid.

    Where the command cannot be run the child prints one sentence and exits with 127 (not found) or 126, as a shell
    does.
    """
    pid = os.fork()
    if pid:
        return pid
    if end_with_parent:
        from ringtap.agents.lab import namespaces

        namespaces.die_with_parent(signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        print(f"ringtap: {command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        sys.stderr.flush()
    os._exit(127)


def relay(pid: int) -> int:
    """Wait for a spawned command, passing signals on; returns its exit code (128 + signal where one ended it)."""
    while True:
        info = signal.sigwaitinfo(FORWARDED | {signal.SIGCHLD})
        if info.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
        elif info.si_code != _SI_KERNEL:  # a terminal's own signals reach the whole process group
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, info.si_signo)


def wait_for_end(seconds: float | None) -> None:
    """Wait for one of the forwarded signals, or so many seconds."""
    if seconds is None:
        signal.sigwaitinfo(FORWARDED)
    else:
        signal.sigtimedwait(FORWARDED, seconds)
