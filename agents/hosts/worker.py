"""Runs the host worker, which serves the controller on a host: ``python -m ringtap.agents.hosts.worker [FOLDER]``.

It starts and signals commands, sends the files of a run's folders to the controller, and writes the files that the
controller sends. It exchanges frames on its standard input and output. It ends when its input ends, or when it has
received nothing for 30 s; it then ends all commands that it has started, within a few seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import ringtap
from ringtap.agents.hosts import message_frames
from ringtap.agents.hosts.copy_growing_files import FolderSync, write_chunk
from ringtap.agents.hosts.link_lease import Lease
from ringtap.agents.hosts.message_frames import ANSWER_BYTES, Frame
from ringtap.agents.node import agent_control_socket
from ringtap.agents.node.job_processes import descendants
from ringtap.collectors.process_facts import user_name
from ringtap.core.append_only_logs import mend_last_line
from ringtap.core.errors import error_message
from ringtap.core.parent_death import die_with_parent

_ROUND_S = 0.5
# passes over the folders take at most a twentieth of a core
_WALK_SHARE = 20
_WAITING_BYTES = 1 << 20
_MARK = ".ringtap"  # in each folder of a run, locked by flock while its host worker lives


class HostWorker:
    """Host worker of one controller."""

    def __init__(self) -> None:
        self._processes, self._sync, self._lease = HostProcesses(), FolderSync(), Lease()
        self._unpacker = message_frames.Unpacker()
        self._out = bytearray()
        self._ended: list[tuple[Iterator[Frame], dict[str, Any]]] = []  # unsent output and exit frame of ended commands
        self._round: Iterator[Frame] | None = None
        self._due: list[dict[str, Any]] = []  # replies to send when this pass is over
        self._next: list[dict[str, Any]] = []  # replies to send when the next pass is over
        self._next_s = 0.0
        self._received_s = self._beat_s = time.monotonic()
        self._over = False
        self._made: list[Path] = []
        self._owned: dict[str, int] = {}  # descriptors of the locks that keep folders from being cleaned
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
        facts = {"protocol": message_frames.PROTOCOL, "ringtap": ringtap.__version__, "workdir": _usual_workdir()}
        self._out += message_frames.MARKER + json.dumps(facts).encode() + b"\n"
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
            self._processes.end_all()

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
        self._received_s = time.monotonic()
        for item, data in self._unpacker.feed(piece):
            self._handle(item, data)

    def _write(self) -> None:
        try:
            del self._out[: os.write(1, self._out)]
        except BlockingIOError:
            pass
        except OSError:  # the controller has closed its end
            self._over = True

    def _queue(self, item: dict[str, Any], data: bytes = b"") -> None:
        self._out += message_frames.pack(item, data)

    def _can_send(self) -> bool:
        return bool(self._ended or self._round) and len(self._out) < _WAITING_BYTES

    def _pause_s(self) -> float:
        """Seconds until the next action if nothing arrives; SIGCHLD ends the wait."""
        if self._can_send():
            return 0.0
        next_s = self._beat_s + message_frames.BEAT_S
        if self._round is None:
            next_s = min(next_s, self._next_s)
        return max(0.0, next_s - time.monotonic())

    def _tick(self) -> None:
        """Send heartbeats, exit codes and new parts of files that are due."""
        now_s = time.monotonic()
        if now_s - self._received_s > message_frames.ORPHAN_S:
            self._over = True
        if now_s - self._beat_s >= message_frames.BEAT_S:
            self._beat_s = now_s
            self._queue({"op": "beat"})
        for item in self._processes.ended():
            self._ended.append((self._sync.catch_up(item.pop("files", [])), item))
        if self._round is None and (self._next or now_s >= self._next_s):
            self._due, self._next = self._next, []
            self._round = self._sync.round()
        while self._can_send():
            self._send()

    def _send(self) -> None:
        """Send one frame; the output of ended commands goes first."""
        if self._ended:
            output, item = self._ended[0]
            frame = next(output, None)
            if frame is None:
                self._queue(item)
                del self._ended[0]
        else:
            assert self._round is not None
            frame = next(self._round, None)
            if frame is None:
                self._end_round()
        if frame is not None:
            self._queue(*frame)

    def _end_round(self) -> None:
        """End a pass over the files, and answer the requests that waited for it."""
        self._round = None
        self._next_s = time.monotonic() + max(_ROUND_S, _WALK_SHARE * self._sync.walk_s)
        for item in self._due:
            self._queue(item)

    def _handle(self, item: dict[str, Any], data: bytes) -> None:
        """Carry out a request; a failure is reported to the controller."""
        op = item["op"]
        try:
            if op == "start":
                self._processes.start(item)
            elif op == "ask":
                self._processes.ask(item)
            elif op in ("signal", "kill"):
                if child := self._processes.get(item["of"]):
                    child.kill() if op == "kill" else child.signal(item["number"])
            elif op == "sync":
                self._next.append({"op": "done", "id": item["id"]})
            elif op == "put":
                self._put(item, data)
            elif op == "make":
                self._make_private(item["workdir"], item["path"], item.get("run", ""))
                self._sync.add_folder(item["key"], item["path"])
                self._done(item)
            elif op == "follow":
                self._sync.add_file(item["key"], item["path"])
                self._make_private(item["workdir"], str(Path(item["path"]).parent))
            elif op == "remove":
                self._remove(item["path"])
                self._done(item)
            elif op in ("clean", "lease", "listens", "connects"):
                self._done(item, **self._answer(item))
        except OSError as error:
            self._done(item, why=f"{error.filename or item.get('path', '')}: {error.strerror}")

    def _answer(self, item: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request whose reply contains data, and return the data."""
        if item["op"] == "clean":
            return {"removed": clean(Path(item["workdir"]), item["run"])}
        if item["op"] == "lease":
            return {"held": self._lease.take(item["holder"])}
        return {item["op"]: _has_socket(item["op"], item["port"])}

    def _done(self, item: dict[str, Any], **more: object) -> None:
        if "id" in item:
            self._queue({"op": "done", "id": item["id"], **more})

    def _remove(self, path: str) -> None:
        self._sync.remove(path)
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
            if not agent_control_socket.is_private(Path(path)):
                raise PermissionError(1, "it is not this user's alone", path) from None
        if path not in self._owned:
            self._owned[path] = _own(Path(path), run)

    def _put(self, item: dict[str, Any], data: bytes) -> None:
        """Write a file that the controller sends; it has a temporary name until it is complete."""
        if item["at"] == 0:
            self._sync.exclude(item["path"])
        write_chunk(Path(item["path"]), item | {"new": True}, data)
        if item["whole"]:
            self._done(item)


def _own(folder: Path, run: str) -> int:
    """Mark a folder as belonging to a run, and lock it while the returned descriptor is open; -1 if this fails.

    The mark contains the name of the run directory, by which a later sweep recognises the folder.
    """
    try:
        fd = os.open(folder / _MARK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:  # such as a full disk
        return -1
    with contextlib.suppress(OSError):  # without locks on the file system, no folder is ever cleaned
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, run.encode(errors="surrogateescape"))
    return fd


def clean(workdir: Path, run: str) -> list[dict[str, Any]]:
    """Remove folders that sweeps left behind: folders of this user that are marked and no longer in use.

    Args:
        workdir: the parent of the folders.
        run: remove only folders of this run directory or of one below it; empty: all.

    Returns:
        ``path``, ``bytes`` and ``run`` of each removed folder; where all are to go, also ``path`` of the lock file of
        each agent that was killed.
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
            owner = os.read(fd, 1 << 16).decode(errors="surrogateescape")
            if run and owner != run and not owner.startswith(f"{run}/"):
                continue
            sizes = [path.lstat().st_size for path in folder.rglob("*")]
            shutil.rmtree(folder)
            removed.append({"path": str(folder), "bytes": sum(sizes), "run": owner})
        except OSError:  # in use, or not removable
            continue
        finally:
            os.close(fd)
    if removed:
        with contextlib.suppress(OSError):  # other runs may be in it
            workdir.rmdir()
    if not run:
        with contextlib.suppress(OSError):  # there is no such folder
            locks = agent_control_socket.remove_stale(agent_control_socket.private_folder())
            removed += [{"path": str(path), "bytes": 0, "run": ""} for path in locks]
    return removed


def _usual_workdir() -> str:
    """Return the first folder that is private to this user or does not exist yet: a local one, or else in the home.

    Another user may have taken all local names.
    """
    names = agent_control_socket.local_names(f"ringtap-{user_name()}")
    for path in names:
        try:
            if agent_control_socket.is_private(path):
                return str(path)
        except OSError:  # it does not exist yet
            return str(path)
    with contextlib.suppress(RuntimeError):  # a user without a home
        return str(Path.home() / f".ringtap-{os.uname().nodename}")
    return str(names[0])


# columns of /proc/net/tcp: local address, remote address, state
_SOCKETS = {"listens": (1, "0A"), "connects": (2, "01")}


def _has_socket(op: str, port: int) -> bool:
    """Return True if a process listens on a TCP port of this host, or is connected to one of any host.

    No connection is made for this: the receiver of cross traffic would count it as a client.
    """
    column, state = _SOCKETS[op]
    rows: list[list[str]] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows += [line.split() for line in Path(table).read_text().splitlines()]
    return any(len(row) > 3 and row[3] == state and row[column].endswith(f":{port:04X}") for row in rows)


def main() -> int:
    """Serve on standard input and output; the argument, if any, is the folder in which commands start.

    A folder with an entry named ringtap is not entered, as ``python -m ringtap.cli`` would import that entry.
    """
    for folder in sys.argv[1:]:
        if not Path(folder, "ringtap").exists():
            with contextlib.suppress(OSError):  # a home directory that does not exist
                os.chdir(folder)
    HostWorker().serve()
    return 0


_GRACE_S = 3.0  # from SIGTERM to SIGKILL


class Child:
    """Command that was started, with its output in files.

    Args:
        command: the command and its arguments.
        environment: variables in addition to those of this process.
        output: file its standard output is appended to.
        log: file its standard error is appended to.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str], output: IO[bytes], log: IO[bytes]) -> None:
        self.output, self.log = output, log
        self.code: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                env=dict(os.environ) | dict(environment),
                start_new_session=True,
                # if this process is killed, its children receive SIGTERM
                preexec_fn=die_with_parent(signal.SIGTERM),  # noqa: PLW1509
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self.code = 127 if isinstance(error, FileNotFoundError | NotADirectoryError) else 126
            reason = error_message(error)
            with contextlib.suppress(OSError):
                log.write(f"ringtap: {command[0]} cannot be run: {reason}\n".encode(errors="replace"))
                log.flush()

    def poll(self) -> int | None:
        """Exit code of the command; None while it runs."""
        if self.code is None and self._process is not None:
            self.code = self._process.poll()
        return self.code

    def signal(self, number: int) -> None:
        """Send a signal to the command itself."""
        if self._process is not None:
            self._process.send_signal(number)

    def signal_group(self, number: int) -> bool:
        """Send a signal to the command's process group, which may outlive it; return True if the group exists."""
        if self._process is None:
            return False
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        """Kill the command's process group and, if the command still runs, all its descendants."""
        below = descendants([self._process.pid]) if self._process and self.poll() is None else []
        self.signal_group(signal.SIGKILL)
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Close its files."""
        self.output.close()
        self.log.close()


class HostProcesses:
    """Commands of one controller, by the numbers of its requests."""

    def __init__(self) -> None:
        self._running: dict[int, Child] = {}
        self._orphaned: list[tuple[float, Child]] = []  # ended commands whose process groups live, with deadlines
        self._asked: set[int] = set()

    def start(self, item: dict[str, Any]) -> None:
        """Start a command whose output goes to files."""
        try:
            files = [_append(item["report"] or item["log"]), _append(item["log"])]
        except OSError:  # the command runs without its output; its records are not affected
            files = [_append(os.devnull), _append(os.devnull)]
        self._running[item["id"]] = Child(item["argv"], item["environment"], *files)

    def ask(self, item: dict[str, Any]) -> None:
        """Start a command whose answer contains its output."""
        files = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115
        self._running[item["id"]] = Child(item["argv"], {}, *files)
        self._asked.add(item["id"])

    def get(self, number: int) -> Child | None:
        """Return a command that has not ended, or None."""
        return self._running.get(number)

    def ended(self) -> list[dict[str, Any]]:
        """Return an exit frame for each command that has ended; ``files`` are its output files."""
        found = []
        for number, child in list(self._running.items()):
            if (code := child.poll()) is None:
                continue
            del self._running[number]
            if child.signal_group(signal.SIGTERM):
                self._orphaned.append((time.monotonic() + _GRACE_S, child))
            item: dict[str, Any] = {"op": "exit", "id": number, "code": code}
            if number in self._asked:
                self._asked.remove(number)
                item = {"op": "answer", "id": number, "code": code}
                item |= {"out": _text(child.output), "err": _text(child.log)}
            else:
                item["files"] = [child.output.name, child.log.name]
            child.close()
            found.append(item)
        while self._orphaned and time.monotonic() > self._orphaned[0][0]:
            self._orphaned.pop(0)[1].kill()
        return found

    def end_all(self) -> None:
        """Send SIGTERM to all process groups, and SIGKILL 3 s later."""
        left = [*self._running.values(), *(child for _, child in self._orphaned)]
        for child in left:
            child.signal_group(signal.SIGTERM)
        deadline_s = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline_s and any(child.poll() is None or child.signal_group(0) for child in left):
            time.sleep(0.02)
        for child in left:
            child.kill()


def _append(path: str) -> IO[bytes]:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    file = Path(path).open("a+b")  # noqa: SIM115
    mend_last_line(file.fileno(), lambda _: True)  # an earlier process may have left it incomplete
    return file


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(ANSWER_BYTES).decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
