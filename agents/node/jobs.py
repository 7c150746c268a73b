"""The jobs that an agent records: their processes, and whether they live."""

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
