"""Host worker, which serves the controller on a host: ``python -m ringtap.agents.hosts.worker [FOLDER]``.

It starts and signals commands, sends the files of a run's folders to the controller, and writes the files that the
controller sends. It exchanges frames on its standard input and output. It ends when its input ends, or when it has
received nothing for 30 s, and ends all that it has started within a few seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import selectors
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ringtap
from ringtap.agents.hosts import frames
from ringtap.agents.hosts.frames import Frame
from ringtap.agents.hosts.lease import Lease
from ringtap.agents.hosts.processes import HostProcesses
from ringtap.agents.hosts.sync import FolderSync
from ringtap.agents.node import agent_socket

_ROUND_S = 0.5
# passes over the folders take at most a twentieth of a core
_WALK_SHARE = 20
_WAITING_BYTES = 1 << 20
_MARK = ".ringtap"  # in each folder of a run, locked by flock while its host worker lives


class HostWorker:
    """Host worker of one controller."""

    def __init__(self) -> None:
        self._children, self._mirror, self._lease = HostProcesses(), FolderSync(), Lease()
        self._unpacker = frames.Unpacker()
        self._out = bytearray()
        self._ended: list[tuple[Iterator[Frame], dict[str, Any]]] = []  # rest of output, and exit frames
        self._round: Iterator[Frame] | None = None
        self._due: list[dict[str, Any]] = []  # sent when this pass is over
        self._next: list[dict[str, Any]] = []  # sent when the next pass is over
        self._next_s = 0.0
        self._heard_s = self._said_s = time.monotonic()
        self._over = False
        self._made: list[Path] = []
        self._owned: dict[str, int] = {}  # descriptor of the lock that protects each folder from being cleaned
        self._wake, self._waker = os.pipe()

    def serve(self) -> None:
        """Serve until the controller disconnects."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._end)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for fd in (self._wake, self._waker):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        facts = {"protocol": frames.PROTOCOL, "ringtap": ringtap.__version__, "workdir": _usual_workdir()}
        self._out += frames.MARKER + json.dumps(facts).encode() + b"\n"
        selector = selectors.PollSelector()
        selector.register(0, selectors.EVENT_READ)
        selector.register(self._wake, selectors.EVENT_READ)
        writing = False
        try:
            while not self._over:
                if writing != bool(self._out):
                    writing = not writing
                    (selector.register(1, selectors.EVENT_WRITE) if writing else selector.unregister(1))
                if self._lease.fileno() >= 0 and self._lease.fileno() not in selector.get_map():
                    selector.register(self._lease.fileno(), selectors.EVENT_READ)
                ready = {key.fd for key, _ in selector.select(self._pause_s())}
                if self._lease.fileno() in ready:
                    self._lease.answer()
                if self._wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                if 0 in ready:
                    self._read()
                if 1 in ready:
                    self._write()
                self._tick()
        finally:
            self._children.end_all()

    def _end(self, *_: object) -> None:
        self._over = True

    def _read(self) -> None:
        try:
            piece = os.read(0, 1 << 18)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self._over = True
            return
        self._heard_s = time.monotonic()
        for item, data in self._unpacker.feed(piece):
            self._take(item, data)

    def _write(self) -> None:
        try:
            del self._out[: os.write(1, self._out)]
        except BlockingIOError:
            pass
        except OSError:  # the controller has closed its end
            self._over = True

    def _say(self, item: dict[str, Any], data: bytes = b"") -> None:
        self._out += frames.pack(item, data)

    def _can_send(self) -> bool:
        return bool(self._ended or self._round) and len(self._out) < _WAITING_BYTES

    def _pause_s(self) -> float:
        """Seconds until the next action if nothing arrives; SIGCHLD ends the wait."""
        if self._can_send():
            return 0.0
        next_s = self._said_s + frames.BEAT_S
        if self._round is None:
            next_s = min(next_s, self._next_s)
        return max(0.0, next_s - time.monotonic())

    def _tick(self) -> None:
        """Send heartbeats, exit codes and new parts of files that are due."""
        now_s = time.monotonic()
        if now_s - self._heard_s > frames.ORPHAN_S:
            self._over = True
        if now_s - self._said_s >= frames.BEAT_S:
            self._said_s = now_s
            self._say({"op": "beat"})
        for item in self._children.ended():
            self._ended.append((self._mirror.catch_up(item.pop("files", [])), item))
        if self._round is None and (self._next or now_s >= self._next_s):
            self._due, self._next = self._next, []
            self._round = self._mirror.round()
        while self._can_send():
            self._send()

    def _send(self) -> None:
        """Send one frame; the output of ended commands goes first."""
        if self._ended:
            words, item = self._ended[0]
            news = next(words, None)
            if news is None:
                self._say(item)
                del self._ended[0]
        else:
            assert self._round is not None
            news = next(self._round, None)
            if news is None:
                self._end_round()
        if news is not None:
            self._say(*news)

    def _end_round(self) -> None:
        """End a pass over the files, and answer the requests that waited for it."""
        self._round = None
        self._next_s = time.monotonic() + max(_ROUND_S, _WALK_SHARE * self._mirror.walk_s)
        for item in self._due:
            self._say(item)

    def _take(self, item: dict[str, Any], data: bytes) -> None:
        """Carry out the request of a frame; a failure is reported to the controller."""
        op = item["op"]
        try:
            if op == "start":
                self._children.start(item)
            elif op == "ask":
                self._children.question(item)
            elif op in ("signal", "kill"):
                if child := self._children.get(item["of"]):
                    child.kill() if op == "kill" else child.signal(item["number"])
            elif op == "sync":
                self._next.append({"op": "done", "id": item["id"]})
            elif op == "put":
                self._put(item, data)
            elif op == "make":
                self._make_private(item["workdir"], item["path"], item.get("run", ""))
                self._mirror.add_folder(item["key"], item["path"])
                self._done(item)
            elif op == "follow":
                self._mirror.add_file(item["key"], item["path"])
                self._make_private(item["workdir"], str(Path(item["path"]).parent))
            elif op == "remove":
                self._remove(item["path"])
                self._done(item)
            elif op in ("clean", "lease", "listens"):
                self._done(item, **self._answer(item))
        except OSError as error:
            why = f"{error.filename or item.get('path', '')}: {error.strerror}"
            self._done(item, why=why)

    def _answer(self, item: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request that is answered with data, and return the data."""
        if item["op"] == "clean":
            return {"removed": clean(Path(item["workdir"]), item["run"])}
        if item["op"] == "lease":
            return {"held": self._lease.take(item["holder"])}
        return {"listens": _listens(item["port"])}

    def _done(self, item: dict[str, Any], **more: object) -> None:
        if "id" in item:
            self._say({"op": "done", "id": item["id"], **more})

    def _remove(self, path: str) -> None:
        self._mirror.remove(path)
        shutil.rmtree(path, ignore_errors=True)
        if (fd := self._owned.pop(path, -1)) >= 0:
            os.close(fd)
        for folder in self._made:
            with contextlib.suppress(OSError):  # other runs may be in it
                folder.rmdir()

    def _make_private(self, workdir: str, path: str, run: str = "") -> None:
        """Create a folder that is private to this user, in a working directory that belongs to this user or root."""
        base = Path(workdir)
        try:
            base.mkdir(mode=0o700, parents=True)
            self._made.append(base)
        except FileExistsError:
            if base.lstat().st_uid not in (0, os.geteuid()):
                raise PermissionError(1, "it is another user's", workdir) from None
        try:
            Path(path).mkdir(mode=0o700)
        except FileExistsError:
            if not agent_socket.is_private(Path(path)):
                raise PermissionError(1, "it is not this user's alone", path) from None
        if path not in self._owned:
            self._owned[path] = _own(Path(path), run)

    def _put(self, item: dict[str, Any], data: bytes) -> None:
        """Write a file that the controller sends; it has a temporary name until it is complete."""
        path = Path(item["path"])
        temporary = path.with_name(f".{path.name}.put")
        if item["at"] == 0:
            self._mirror.exclude(item["path"])
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            os.close(os.open(temporary, flags, item["mode"]))
        with temporary.open("r+b") as file:
            file.seek(item["at"])
            file.write(data)
        if item["whole"]:
            temporary.replace(path)
            self._done(item)


def _own(folder: Path, run: str) -> int:
    """Mark a folder as belonging to a run, and lock it while the returned descriptor is open; -1 if this fails.

    The mark contains the name of the run directory, by which a later sweep recognises the folder.
    """
    try:
        fd = os.open(folder / _MARK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:  # such as a full disk
        return -1
    with contextlib.suppress(OSError):  # a file system without locks, where no folder is ever cleaned
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, run.encode(errors="surrogateescape"))
    return fd


def clean(workdir: Path, run: str) -> list[dict[str, Any]]:
    """Remove folders that sweeps left behind: folders of this user that are marked and no longer in use.

    Args:
        workdir: the parent of the folders.
        run: remove only folders of this run directory or of one below it; empty: all.

    Returns:
        ``path``, ``bytes`` and ``run`` of each removed folder.
    """
    removed = []
    for mark in sorted(workdir.glob(f"*/{_MARK}")):
        folder = mark.parent
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            fd = os.open(mark, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            of = os.read(fd, 1 << 16).decode(errors="surrogateescape")
            if run and of != run and not of.startswith(f"{run}/"):
                continue
            sizes = [path.lstat().st_size for path in folder.rglob("*")]
            shutil.rmtree(folder)
            removed.append({"path": str(folder), "bytes": sum(sizes), "run": of})
        except OSError:  # in use, or it cannot be removed
            continue
        finally:
            os.close(fd)
    if removed:
        with contextlib.suppress(OSError):  # other runs may be in it
            workdir.rmdir()
    return removed


def _usual_workdir() -> str:
    """Return a local folder that is private to this user or does not exist; names taken by others are skipped."""
    names = agent_socket.local_names(f"ringtap-{_user()}")
    for path in names:
        try:
            if agent_socket.is_private(path):
                return str(path)
        except OSError:  # it does not exist yet
            return str(path)
    return str(names[0])


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return str(os.geteuid())


def _listens(port: int) -> bool:
    """Return True if a process listens on a TCP port; a trial connection would reach the server as a client."""
    rows: list[list[str]] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows += [line.split() for line in Path(table).read_text().splitlines()]
    return any(len(row) > 3 and row[3] == "0A" and row[1].endswith(f":{port:04X}") for row in rows)


def main() -> int:
    """Serve on standard input and output; the argument, if any, is the folder in which commands start.

    A folder with an entry named ringtap is not entered: ``python -m ringtap.cli`` would take that for the package.
    """
    for folder in sys.argv[1:]:
        if not Path(folder, "ringtap").exists():
            with contextlib.suppress(OSError):  # a home directory that does not exist
                os.chdir(folder)
    HostWorker().serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
