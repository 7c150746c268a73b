"""The jobs that an agent records: their processes, whether they live, and obstacles to loading the hook."""

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
_FLAGS = re.compile(r"([^cmWX]*)(.*)", re.DOTALL)  # flags, then an option that takes the rest or the next word
_HOOKLESS = {"I", "E", "S"}


@dataclass
class Job:
    """A recorded process.

    Attributes:
        pid: its pid.
        entry: its entry in node.json.
        holds: whether the agent runs until this process has ended.
        pidfd: a pidfd for polling; -1 if the kernel has none.
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
        """True if the process lives: it is neither gone nor a zombie, and its start time is the same."""
        return bool(self._started) and start_time(self.pid) == self._started

    def close(self) -> None:
        """Close the pidfd and note the time of the end, unless it is known."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        self._started = ""
        if self.entry.get("ended_ns") is None:
            self.entry["ended_ns"] = time.time_ns()


def start_time(pid: int) -> str:
    """Start time of a process, in clock ticks since boot; empty if there is none or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def descendants(pids: Iterable[int]) -> list[int]:
    """Those of these processes that exist, and all their descendants."""
    found: list[int] = []
    pending = list(pids)
    while pending:
        pid = pending.pop()
        try:
            threads = list(Path(f"/proc/{pid}/task").iterdir())
        except OSError:
            continue
        found.append(pid)
        for thread in threads:
            with contextlib.suppress(OSError):
                pending += map(int, (thread / "children").read_text().split())
    return found


def hook_obstacle(command: Sequence[str]) -> str:
    """Name the option on a command line that keeps Python from loading the hook; empty if none does."""
    for number, word in enumerate(command):
        name, options = Path(word).name, command[number + 1 :]
        if name == "env" and any(option in ("-", "-i", "--ignore-environment") for option in options[:1]):
            return f"{name} {options[0]} empties the environment of what it starts"
        if not _PYTHON.fullmatch(name):
            continue
        is_argument = False  # True if the word belongs to the option before it
        for option in options:
            if not is_argument and not _SHORT_OPTIONS.fullmatch(option):
                break
            flags, rest = ("", "") if is_argument else _FLAGS.fullmatch(option[1:]).groups()  # type: ignore[union-attr]
            is_argument = rest in ("W", "X")
            if found := set(flags) & _HOOKLESS:
                return f"{name} was started with -{min(found)}, which keeps it from loading ringtap's recorder"
            if rest[:1] in ("c", "m"):
                break
    return ""


def unhooked(pid: int) -> str:
    """Name the obstacle to loading the hook in a running process; empty if there is none or it is not Python."""
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
