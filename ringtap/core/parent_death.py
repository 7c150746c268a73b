"""Ends the helper processes of ringtap with the process that started them, whatever ends that: also SIGKILL."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subprocess import CompletedProcess

_PR_SET_PDEATHSIG = 1
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux alone has it


def die_with_parent(number: int = signal.SIGKILL) -> Callable[[], None]:
    """Return the function that a child process calls after fork (``preexec_fn``) to get a signal when its parent ends.

    The parent is the thread that forks: it must outlive the child. The signal is for the child alone, not for what it
    starts. The kernel forgets it when the child changes its user or becomes a program with capabilities.

    Args:
        number: the signal.
    """
    parent = os.getpid()

    def prepare() -> None:
        # 0: the parent is in another PID namespace
        if _prctl is not None and not _prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) and os.getppid() not in (parent, 0):
            os.kill(os.getpid(), number)  # it ended before the call

    return prepare


def run_helper(command: Sequence[str], timeout_s: float, **options: Any) -> CompletedProcess[str]:
    """Run a program without input, which ends with this process, and return its exit code and what it printed.

    Args:
        command: the program and its arguments.
        timeout_s: time after which it is killed.
        **options: further ones of `subprocess.run`.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it has not ended in time.
    """
    import subprocess  # takes 5 ms, for which no job waits

    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        preexec_fn=die_with_parent(),
        check=False,
        **options,
    )
