"""The jobs that an agent records: who they are, and whether they live."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
_SHORT_OPTIONS = re.compile(r"-[A-Za-z?]\S*")
_OWN_LETTERS = re.compile(r"([^cmWX]*)(.*)", re.DOTALL)  # up to an option that takes the rest, or the next word
_HOOKLESS = {"I", "E", "S"}


@dataclass
class Job:
    """A process that is recorded.

    Attributes:
        pid: its pid.
        entry: its entry in node.json.
        holds: whether the agent stays for as long as it lives.
        pidfd: a file descriptor of it; -1 where the kernel has none, then its start time tells it from a later one.
    """

    pid: int
    entry: dict[str, Any]
    holds: bool
    pidfd: int = -1
    _started: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.pidfd = os.pidfd_open(self.pid)
        self._started = start_time(self.pid)

    def is_alive(self) -> bool:
        """True if the process lives: neither gone nor waiting for its parent to ask for its code."""
        return bool(self._started) and start_time(self.pid) == self._started

    def close(self) -> None:
        """Note the end."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        self._started = ""
        if self.entry.get("ended_ns") is None:
            self.entry["ended_ns"] = time.time_ns()


def start_time(pid: int) -> str:
    """Start time of a living process, in the kernel's ticks; empty if there is no such pid."""
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if words[0] in (b"Z", b"X") else words[19].decode()


def descendants(pids: Iterable[int]) -> list[int]:
    """The living ones of these processes and all that they started."""
    found: list[int] = []
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        try:
            threads = list(Path(f"/proc/{pid}/task").iterdir())
        except OSError:
            continue
        found.append(pid)
        for thread in threads:
            with contextlib.suppress(OSError):
                waiting += map(int, (thread / "children").read_text().split())
    return found


def hook_obstacle(command: Sequence[str]) -> str:
    """Name the option on a command line that keeps Python from loading the hook; empty if none does."""
    for number, word in enumerate(command):
        name, options = Path(word).name, command[number + 1 :]
        if name == "env" and any(option in ("-", "-i", "--ignore-environment") for option in options[:1]):
            return f"{name} {options[0]} empties the environment of what it starts"
        if not _PYTHON.fullmatch(name):
            continue
        waits = False  # for the word that belongs to an option
        for option in options:
            if not waits and not _SHORT_OPTIONS.fullmatch(option):
                break
            letters, rest = ("", "") if waits else _OWN_LETTERS.fullmatch(option[1:]).groups()  # type: ignore[union-attr]
            waits = rest in ("W", "X")
            if found := set(letters) & _HOOKLESS:
                return f"{name} was started with -{min(found)}, which keeps it from loading ringtap's recorder"
            if rest[:1] in ("c", "m"):
                break
    return ""


def unhooked(pid: int) -> str:
    """Name the obstacle to loading the hook in a running process; empty if there is none or it is no Python."""
    try:
        folder = Path(f"/proc/{pid}")
        if not _PYTHON.fullmatch((folder / "exe").readlink().name):
            return ""
        command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        environment = (folder / "environ").read_bytes()
    except OSError:
        return ""
    if found := hook_obstacle(command):
        return found
    return "" if b"RINGTAP_RUN=" in environment else f"{Path(command[0]).name} was started in another environment"
