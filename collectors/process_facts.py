"""Reads facts about a process: its rank in the job, its command if it is the user's own, and its resources."""

from __future__ import annotations

import errno
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


def rank_of(pid: int, proc: Path = PROC) -> int | None:
    """Return the rank in a process's initial environment; None if it has none, or the environment cannot be read."""
    try:
        variables = (proc / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return rank_in(dict(variable.partition("=")[::2] for variable in variables))


def command_of(pid: int, proc: Path = PROC) -> str:
    """Return the command line in one line, shortened, with secrets masked; empty if it cannot be read."""
    try:
        words = (proc / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    shown = short_command([readable(word.decode(errors="surrogateescape")) for word in words])
    return " ".join(mask_words(shown))[:_MAX_CHARACTERS]


class Process:
    """A recorded process, read from its open ``stat`` file, so that a reused pid is never mistaken for it.

    Raises:
        OSError: the process has ended, or cannot be read.
    """

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self.pid = pid
        self._fd = os.open(proc / str(pid) / "stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.parent = int(self._words()[1])
        except OSError:
            os.close(self._fd)
            raise

    def read(self) -> tuple[float, int, int]:
        """Return CPU seconds (user and system, all threads), resident bytes and threads.

        Raises:
            OSError: the process has ended.
        """
        words = self._words()
        return (int(words[11]) + int(words[12])) / _TICKS_PER_S, int(words[21]) * _PAGE_BYTES, int(words[17])

    def _words(self) -> list[bytes]:
        """Return the fields after the name, which may contain any characters: state, parent, …"""
        text = os.pread(self._fd, 4096, 0)
        words = text[text.rfind(b")") + 1 :].split()
        if len(words) < _MIN_FIELDS or words[0] in (b"Z", b"X"):
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        return words

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
