"""Whose a socket is: inode to process to rank, looked up off the sampling path when a new inode appears."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ringtap.collectors.host_processes import PROC, command_of, rank_of
from ringtap.records import JsonLinesWriter

_LEAST_PAUSE_S = 1.0
_COST_SHARE = 0.01  # of one core, at most
_TRIES = 3  # a socket that none of the job's processes holds by then belongs to somebody else
_PREFIX = "socket:["


class SocketOwners:
    """Writes ``owners.jsonl``: one line a socket of the recorded processes.

    A look-up reads the open files of every recorded process, at most once a second and in a thread of its own.

    Args:
        path: the file.
        pids: gives the recorded processes; may be costly.

    Attributes:
        failure: what ended the look-ups early, if anything did.
    """

    proc: Path = PROC

    def __init__(self, path: Path, pids: Callable[[], list[int]]) -> None:
        self._log = JsonLinesWriter(path)
        self._pids = pids
        self._wanted: dict[int, int] = {}  # inode -> look-ups so far
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="socket owners", daemon=True)
        self.failure = ""
        self._thread.start()

    def want(self, inode: int) -> None:
        """Have an inode looked up soon; 0 (a connection that nobody has accepted) has no owner."""
        if inode:
            with self._lock:
                self._wanted.setdefault(inode, 0)
            self._news.set()

    def close(self) -> None:
        """Look up what is still wanted, and close the file."""
        self._stop.set()
        self._news.set()
        self._thread.join()
        self._log.close()

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                self._news.wait()
                self._news.clear()
                begun_s = time.thread_time()
                self._look_up()
                self._stop.wait(max(_LEAST_PAUSE_S, (time.thread_time() - begun_s) / _COST_SHARE))
            self._look_up()
        except OSError as error:  # a full disk, say; the sockets are recorded all the same
            self.failure = error.strerror or str(error)

    def _look_up(self) -> None:
        """One pass over the open files of the recorded processes."""
        with self._lock:
            wanted = set(self._wanted)
        if not wanted:
            return
        found: dict[int, int] = {}
        for pid in sorted(self._pids()):  # a child has its parent's sockets open, too: the parent is the owner
            for inode in self._inodes(pid) & wanted:
                found.setdefault(inode, pid)
        people = {pid: (rank_of(pid, self.proc), command_of(pid, self.proc)) for pid in set(found.values())}
        now_ns = time.time_ns()
        for inode, pid in found.items():
            rank, command = people[pid]
            self._log.append({"t_ns": now_ns, "inode": inode, "pid": pid, "rank": rank, "command": command})
        with self._lock:
            for inode in wanted:
                self._wanted[inode] += 1
                if inode in found or self._wanted[inode] >= _TRIES:
                    del self._wanted[inode]
            if self._wanted:
                self._news.set()

    def _inodes(self, pid: int) -> set[int]:
        """The sockets that a process has open; none where it is gone or another user's."""
        folder = self.proc / str(pid) / "fd"
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
            if target.startswith(_PREFIX):
                inodes.add(int(target[len(_PREFIX) : -1]))
        return inodes
