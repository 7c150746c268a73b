"""The jobs that an agent records: who they are, and whether they live."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


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
        """Whether the process lives: neither gone nor waiting for its parent to ask for its code."""
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
    """When a living process began, in the kernel's ticks; empty where there is none of that pid."""
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
