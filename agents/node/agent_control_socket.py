"""Connects supervisors to their agent: by a lock and a Unix socket in a private local folder, with lines of JSON."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringtap.core.json_validation import parse_json

_MAX_LINE_BYTES = 1 << 20  # no command is longer


class Connection:
    """One end of the connection between a supervisor and its agent; it never blocks.

    Args:
        stream: a connected socket.
    """

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.stream.setblocking(False)
        self._data = b""
        self.is_open = True

    def fileno(self) -> int:
        """The socket's file descriptor, for polling."""
        return self.stream.fileno()

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived; ``is_open`` is False once the other end is gone."""
        while self.is_open:
            try:
                chunk = self.stream.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            self._data += chunk
            if not chunk or len(self._data) > _MAX_LINE_BYTES:
                self.is_open = False
        *lines, self._data = self._data.split(b"\n")
        messages = []
        for line in lines:
            try:
                message = parse_json(line)
            except ValueError:
                continue
            if isinstance(message, dict):
                messages.append(message)
        return messages

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; one that does not fit into the socket's buffer closes the connection."""
        try:
            self.stream.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            pass  # `receive` notices it, after it has read what the other end sent before
        except OSError:
            self.is_open = False

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self.stream.close()


LOCAL = Path("/tmp")  # exists on every node, on a local disk
_BACKLOG = 1024
_STALE_S = 3600.0
_FOLDERS = 8
_MAX_RUNTIME_CHARACTERS = 70  # a Unix socket's address has 108 bytes, and 31 are for the names below


def private_folder() -> Path:
    """A folder of mode 0700 that only this user can enter: below $XDG_RUNTIME_DIR, else /tmp/ringtap-<uid>.

    Raises:
        OSError: there is none and none can be made.
    """
    paths = local_names(f"ringtap-{os.geteuid()}")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/") and len(runtime) < _MAX_RUNTIME_CHARACTERS and os.access(runtime, os.W_OK | os.X_OK):
        paths.insert(0, Path(runtime) / "ringtap")
    return first_private(paths)


def local_names(name: str) -> list[Path]:
    """Candidate paths of a private folder on the local disk; another user may have taken the first ones."""
    return [LOCAL / (name + (f"-{number}" if number else "")) for number in range(_FOLDERS)]


def first_private(paths: Sequence[Path]) -> Path:
    """Return the first of these folders that is, or can be made, private to this user; others are skipped.

    Raises:
        OSError: none is.
    """
    last_error = OSError(errno.EACCES, os.strerror(errno.EACCES))
    for path in paths:
        try:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            if is_private(path):
                return path
        except OSError as error:
            last_error = error
    raise last_error


def is_private(path: Path) -> bool:
    """True if the path is a folder, not a link to one, that only this user can enter.

    Raises:
        OSError: it does not exist, or this user may not reach it.
    """
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def remove_stale(folder: Path, age_s: float = 5.0) -> list[Path]:
    """Remove the lock and socket files of agents that were killed with their supervisors.

    Args:
        folder: the private folder.
        age_s: keep the files of agents that began later; an agent that begins locks its file a moment after making it.

    Returns:
        The removed lock files.
    """
    paths: list[Path] = []
    removed = []
    with contextlib.suppress(OSError):
        paths += sorted(folder.glob("*.lock"))
    for path in paths:
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < age_s:
                continue
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_ino == path.stat().st_ino:
                    path.with_suffix(".sock").unlink(missing_ok=True)
                    path.unlink()
                    removed.append(path)
            finally:
                os.close(fd)
    return removed


def lock_file(path: Path, mode: int) -> int:
    """Lock a lock file, which is made if missing, and return its descriptor; it is released when this is closed.

    The file is opened again if its holder has just removed it.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file cannot be written or locked.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), path.stat()):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


class AgentSocket:
    """The lock and socket by which processes of a run find their agent on one node.

    Args:
        run: the run directory; its real path counts.
        node: the node's name in the run.

    Raises:
        OSError: there is no private folder.
    """

    def __init__(self, run: Path, node: str) -> None:
        name = hashlib.sha256(f"{os.path.realpath(run)}\0{node}".encode(errors="surrogateescape")).hexdigest()[:16]
        folder = private_folder()
        self._lock_path, self._socket_path = folder / f"{name}.lock", folder / f"{name}.sock"

    def take(self) -> int | None:
        """Take the lock that an agent holds while it runs; returns its file descriptor, or None if there is an agent.

        Raises:
            OSError: the lock cannot be made.
        """
        try:
            return lock_file(self._lock_path, 0o600)
        except BlockingIOError:
            return None

    def listen(self) -> socket.socket:
        """Make the agent's listening socket; only for the holder of the lock.

        Raises:
            OSError: it cannot be made.
        """
        with contextlib.suppress(FileNotFoundError):
            self._socket_path.unlink()  # left by an agent that was killed
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self._socket_path))
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        return listener

    def close_door(self) -> None:
        """Remove the socket file, so that no process can connect any more."""
        with contextlib.suppress(OSError):
            self._socket_path.unlink()

    def clear(self) -> None:
        """Remove both files; only for the holder of the lock."""
        self.close_door()
        with contextlib.suppress(OSError):
            self._lock_path.unlink()

    def tidy(self) -> None:
        """Remove the files of other runs' agents that were killed with their supervisors and began an hour ago."""
        remove_stale(self._lock_path.parent, _STALE_S)

    def connect(self) -> tuple[socket.socket, int] | None:
        """Connect to the agent; returns the socket and the agent's pid, or None if no agent listens (yet).

        Raises:
            OSError: another failure, such as too many open files.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.connect(str(self._socket_path))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            connection.close()
            return None
        except OSError:
            connection.close()
            raise
        return connection, struct.unpack("3i", credentials)[0]
