"""Reads facts about a process: its rank in the job, its command if it is the user's own, its sockets and resources."""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Mapping
from pathlib import Path

from ringtap.collectors.kernel_files import PROC
from ringtap.core.isolated_python import short_command
from ringtap.core.secret_masking import mask_words
from ringtap.core.terminal_escaping import readable

# Most specific first, as in the step recorder: a launcher within a Slurm step leaves that step's SLURM_PROCID
_RANK = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_MAX_CHARACTERS = 200
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MIN_FIELDS = 22  # up to the resident pages
# its second number is the run delay of the process's main thread
_SCHEDULING = "schedstat"
_SOCKET = "socket:["  # link of an open socket, before its inode


def user_name() -> str:
    """Return the name of this process's user; its number if it has none."""
    import getpass  # for which no job waits

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())


def rank_in(environment: Mapping[str, str]) -> int | None:
    """Return the rank that an environment gives a process in its job; None if no launcher has set one."""
    numbers = (environment.get(name, "") for name in _RANK)
    return next((int(text) for text in numbers if text.isascii() and text.isdigit()), None)


def environment_of(pid: int, proc: Path = PROC) -> dict[str, str]:
    """Return a process's initial environment; empty if it cannot be read."""
    try:
        variables = (proc / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(variable.partition("=")[::2] for variable in variables)


def rank_of(pid: int, proc: Path = PROC) -> int | None:
    """Return the rank in a process's initial environment; None if it has none, or the environment cannot be read."""
    return rank_in(environment_of(pid, proc))


def socket_inodes(pid: int, proc: Path = PROC) -> set[int]:
    """Return the inodes of a process's open sockets; none if it has ended or is another user's."""
    folder = proc / str(pid) / "fd"
    inodes: set[int] = set()
    try:
        names = os.listdir(folder)  # noqa: PTH208 -- a Path for each of thousands would cost more than the look-up
    except OSError:
        return inodes
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")  # noqa: PTH115
        except OSError:  # closed meanwhile
            continue
        if target.startswith(_SOCKET):
            inodes.add(int(target[len(_SOCKET) : -1]))
    return inodes


def command_of(pid: int, proc: Path = PROC) -> str:
    """Return the command line in one line, shortened, with secrets masked; empty if it cannot be read."""
    try:
        words = (proc / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    shown = short_command([readable(word.decode(errors="surrogateescape")) for word in words])
    return " ".join(mask_words(shown))[:_MAX_CHARACTERS]


def counts_run_delay(proc: Path = PROC) -> bool:
    """Return True if the kernel counts how long a thread waits for a processor."""
    return (proc / "self" / _SCHEDULING).exists()


class Process:
    """A recorded process, read from its open files, so that a reused pid is never mistaken for it.

    Raises:
        OSError: the process has ended, or cannot be read.
    """

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self.pid = pid
        folder, self._scheduling_fd = proc / str(pid), -1
        self._fd = os.open(folder / "stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.parent = int(self._words()[1])
            with contextlib.suppress(OSError):
                self._scheduling_fd = os.open(folder / _SCHEDULING, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(self._fd)
            raise

    def read(self) -> tuple[float, int, int, float]:
        """Return CPU seconds (user and system, all threads), resident bytes, threads, and run delay.

        The run delay is how long the main thread was ready to run but waited for a processor, in seconds; NaN if the
        kernel does not count it.

        Raises:
            OSError: the process has ended.
        """
        words, run_delay_s = self._words(), math.nan
        if self._scheduling_fd >= 0:
            run_delay_s = int(os.pread(self._scheduling_fd, 4096, 0).split()[1]) / 1e9
        cpu_s = (int(words[11]) + int(words[12])) / _TICKS_PER_S
        return cpu_s, int(words[21]) * _PAGE_BYTES, int(words[17]), run_delay_s

    def _words(self) -> list[bytes]:
        """Return the fields after the name, which may contain any characters: state, parent, …"""
        text = os.pread(self._fd, 4096, 0)
        words = text[text.rfind(b")") + 1 :].split()
        if len(words) < _MIN_FIELDS or words[0] in (b"Z", b"X"):
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        return words

    def close(self) -> None:
        """Close the files."""
        os.close(self._fd)
        if self._scheduling_fd >= 0:
            os.close(self._scheduling_fd)
