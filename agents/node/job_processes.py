"""Finds the processes of the jobs that an agent records, and tells whether they live."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringtap.collectors.kernel_files import PROC, stat_of

_COST_SHARE = 0.002  # of one core, for looking through all processes
_MIN_PAUSE_S = 1.0


@dataclass
class JobProcess:
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
    fields = stat_of(pid)
    return "" if not fields or fields[0] in "ZX" else fields[19]


def descendants(pids: Iterable[int]) -> list[int]:
    """Those of these processes that exist, and all their descendants."""
    found: dict[int, None] = {}
    pending = list(pids)
    while pending:
        pid = pending.pop()
        if pid in found:
            continue
        try:
            threads = list(Path(f"/proc/{pid}/task").iterdir())
        except OSError:
            continue
        found[pid] = None
        for thread in threads:
            with contextlib.suppress(OSError):
                pending += map(int, (thread / "children").read_text().split())
    return list(found)


class StartedByDaemons:
    """Finds the processes of a job that daemons started for it, such as slurmstepd, raylet or a container's shim.

    They do not descend from the job's command, but their environment names the run and the node. It is read once for
    each program that a process executes. Only processes of this user and in this network namespace count.

    Args:
        run: the run directory.
        node: the node's name.
        proc: where processes are listed.
    """

    def __init__(self, run: Path, node: str, proc: Path = PROC) -> None:
        self._variables = {os.fsencode(f"RINGTAP_RUN={run}"), os.fsencode(f"RINGTAP_NODE={node}")}
        self._proc = proc
        # pid -> program, and whether its environment names the run; None while the kernel still loads the program
        self._known: dict[int, tuple[str, bool | None]] = {}
        self._found: list[int] = []
        self._due_s = 0.0
        self._lock = threading.Lock()

    def pids(self) -> list[int]:
        """Return the processes, as of a second ago at most, or longer where many processes run."""
        with self._lock:
            if time.monotonic() >= self._due_s:
                begun_s = time.thread_time()
                self._look()
                pause_s = max(_MIN_PAUSE_S, (time.thread_time() - begun_s) / _COST_SHARE)
                self._due_s = time.monotonic() + pause_s
            return list(self._found)

    def _look(self) -> None:
        user, known = os.geteuid(), dict[int, tuple[str, bool | None]]()
        with contextlib.suppress(OSError):
            namespace = os.readlink(self._proc / "self" / "ns" / "net")  # noqa: PTH115 -- of thousands of processes
            for name in filter(str.isdigit, os.listdir(self._proc)):  # noqa: PTH208
                folder = f"{self._proc}/{name}"
                with contextlib.suppress(OSError):  # it has ended, or may not be read
                    if os.stat(folder).st_uid != user:  # noqa: PTH116
                        continue
                    program = os.readlink(f"{folder}/exe")  # noqa: PTH115
                    before = self._known.get(int(name))
                    if before is None or before[0] != program or before[1] is None:
                        is_here = os.readlink(f"{folder}/ns/net") == namespace  # noqa: PTH115
                        before = program, is_here and self._names_run(folder)
                    known[int(name)] = before
        self._known = known
        self._found = [pid for pid, (_, is_own) in known.items() if is_own]

    def _names_run(self, folder: str) -> bool | None:
        with open(f"{folder}/environ", "rb") as file:  # noqa: PTH123
            environment = file.read()
        # execve links the program first, and the environment last
        return self._variables <= set(environment.split(b"\0")) if environment else None
