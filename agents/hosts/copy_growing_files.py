"""Copies a run's files from a host to the controller while they grow: sender on the host, receiver on this machine.

The sender turns everything written in its folders since the last pass into frames. Files of a run either grow or, like
``*.json``, are replaced as a whole. The receiver writes a new file under a temporary name until everything that the
sender found in it has arrived, so readers never see half a file. Files that the host deletes are kept on this machine.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from ringtap.agents.hosts.message_frames import CHUNK_BYTES, Frame
from ringtap.core.errors import failure_message


class _Tracked:
    """Synchronised file, and how much of it has been sent."""

    def __init__(self, key: str, name: str, path: str) -> None:
        self._key, self._name, self._path = key, name, path
        self._identity: tuple[int, ...] = ()
        self._sent = 0
        self._whole_at: int | None = None  # size at which a new file is complete; None once it is complete

    def update(self, found: os.stat_result) -> bool:
        """Note the file's state; return True if there is anything to send, for a replaced file from its beginning."""
        identity: tuple[int, ...] = (found.st_ino,)
        if self._path.endswith(".json"):  # the file system reuses inodes of earlier versions
            identity = (found.st_ino, found.st_size, found.st_mtime_ns)
        if identity != self._identity or found.st_size < self._sent:
            self._identity, self._sent, self._whole_at = identity, 0, found.st_size
        return self._whole_at is not None or found.st_size > self._sent

    def frames(self) -> Iterator[Frame]:
        """Yield the new part of the file, up to its present size, as one frame per chunk."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # deleted meanwhile
            return
        try:
            found = os.fstat(fd)
            if not self.update(found):
                return
            if self._whole_at is not None:
                self._whole_at = found.st_size
            identity = self._identity
            while identity == self._identity and (self._sent < found.st_size or self._whole_at is not None):
                data = os.pread(fd, min(CHUNK_BYTES, found.st_size - self._sent), self._sent)
                if not data and self._sent < found.st_size:  # truncated meanwhile
                    return
                yield self._chunk(data, stat.S_IMODE(found.st_mode))
        finally:
            os.close(fd)

    def _chunk(self, data: bytes, mode: int) -> Frame:
        at, self._sent = self._sent, self._sent + len(data)
        item = {"op": "file", "key": self._key, "name": self._name, "at": at}
        if self._whole_at is not None:
            item |= {"new": True, "mode": mode}
            if self._sent >= self._whole_at:
                item["whole"], self._whole_at = True, None
        return item, data


class FolderSync:
    """Folders and files of a host that the controller wants to receive."""

    def __init__(self) -> None:
        self._folders: dict[str, str] = {}
        self._files: dict[str, str] = {}
        self._tracked: dict[str, _Tracked] = {}
        self._excluded: set[str] = set()
        self.walk_s = 0.0  # duration of the last pass over all files

    def add_folder(self, key: str, path: str) -> None:
        """Follow everything below ``path/nodes``."""
        self._folders[key] = path

    def add_file(self, key: str, path: str) -> None:
        """Follow one file."""
        self._files[key] = path

    def remove(self, path: str) -> None:
        """Stop following a folder and the files below it."""
        self._folders = {key: folder for key, folder in self._folders.items() if folder != path}
        inside = path + "/"
        self._files = {key: file for key, file in self._files.items() if not file.startswith(inside)}
        self._tracked = {name: entry for name, entry in self._tracked.items() if not name.startswith(inside)}
        self._excluded = {name for name in self._excluded if not name.startswith(inside)}

    def exclude(self, path: str) -> None:
        """Exclude a file that came from the controller, so that it is not sent back."""
        self._excluded.add(path)

    def round(self) -> Iterator[Frame]:
        """Yield, as frames, everything that was written before this call and has not been sent."""
        began_s = time.monotonic()
        paths = list(self._files.values())
        paths += [path for run in self._folders.values() for path in _files_below(f"{run}/nodes")]
        changed = [tracked for path in paths if (tracked := self._changed(path))]
        self.walk_s = time.monotonic() - began_s
        for tracked in changed:
            yield from tracked.frames()

    def catch_up(self, paths: list[str]) -> Iterator[Frame]:
        """Yield the new parts of these files as frames; files that are not followed are skipped."""
        for path in paths:
            if tracked := self._changed(path):
                yield from tracked.frames()

    def _changed(self, path: str) -> _Tracked | None:
        """Return a followed file with new content, or None."""
        if path in self._excluded:
            return None
        with contextlib.suppress(OSError):
            found = Path(path).lstat()
            tracked = self._tracked.get(path) or self._track(path)
            if tracked and stat.S_ISREG(found.st_mode) and tracked.update(found):
                return tracked
        return None

    def _track(self, path: str) -> _Tracked | None:
        """Begin to follow a file if the controller wants it; return None otherwise."""
        names = {key: "" for key, file in self._files.items() if file == path}
        names |= {key: path[len(run) + 1 :] for key, run in self._folders.items() if path.startswith(f"{run}/nodes/")}
        for key, name in names.items():
            self._tracked[path] = _Tracked(key, name, path)
        return self._tracked.get(path)


def _files_below(folder: str) -> Iterator[str]:
    """Yield every regular file below a folder; names that begin with a dot are temporary files and skipped."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(entry.path)
            elif entry.is_file(follow_symlinks=False):
                yield entry.path


# clock files (agents/clock): the reference node's go to all other hosts, a node's pings file to the reference node
_SERVER_FILES = ("server.json", "clock.json")
_PINGS_FILE = "pings.rec"
_MAX_FORWARDED_BYTES = 1 << 22
_MAX_DEPTH = 32  # folders below a run


class FrameWriter:
    """Writer of the frames of all hosts; hosts are not trusted, and each writes only below its own node's folder.

    Args:
        forward: sends a file to other hosts; arguments are the run's key, the file's name in the run, its content, the
            host that wrote it, and the host that receives it (None: every other host).
    """

    def __init__(self, forward: Callable[[str, str, bytes, str, str | None], None]) -> None:
        self._forward = forward
        self._roots: dict[str, Path] = {}
        self._references: dict[str, str] = {}
        self._owners: dict[str, str] = {}
        self._began_bytes: dict[str, int] = {}
        self._lock = threading.Lock()
        self.failures: dict[str, str] = {}  # by host

    def expect(self, key: str, root: Path, reference: str = "", *, owner: str = "") -> None:
        """Set the destination of the frames with a key.

        Args:
            key: key of the frames.
            root: a run directory, or a file to which the frames are appended.
            reference: the run's reference node.
            owner: the only host that may write the file; empty for a run directory, in which each host has a folder.
        """
        with self._lock:
            self._owners[key] = owner
            self._roots[key] = root
            self._references[key] = reference
            self._began_bytes[key] = root.stat().st_size if root.is_file() else 0

    def take(self, host: str, item: dict[str, Any], data: bytes) -> None:
        """Write a chunk; a failure is kept in `failures`, and later frames of that host are ignored."""
        if host in self.failures:
            return
        try:
            _check(item)
            key, name = item["key"], item["name"]
            with self._lock:
                root, owner = self._roots.get(key), self._owners.get(key)
            if root is None or owner != ("" if name else host):
                raise ValueError(f"{key[:100]!r} is none of its own")
            path = _inside(root, name, host)
            if name:
                write_chunk(path, item, data)
            else:
                write_chunk(path, {"at": self._began_bytes[key] + item["at"]}, data)
            if name and item.get("whole"):
                self._forward_clock(host, key, name, path)
        except (OSError, ValueError) as error:
            self.failures[host] = f"what it sends cannot be written here: {failure_message(error)}"

    def _forward_clock(self, host: str, key: str, name: str, path: Path) -> None:
        """Forward clock files to the hosts that need them, as there is no shared file system."""
        parts = PurePosixPath(name).parts
        reference = self._references.get(key, "")
        if len(parts) != 4 or parts[0] != "nodes" or parts[2] != "clock":
            return
        if parts[1] == reference and parts[3] in _SERVER_FILES:
            if path.stat().st_size > _MAX_FORWARDED_BYTES:
                raise ValueError(f"{name!r} is too long to be passed on to other hosts")
            self._forward(key, name, path.read_bytes(), host, None)
        elif parts[1] != reference and parts[3] == _PINGS_FILE:
            self._forward(key, name, b"", host, reference)


def _check(item: dict[str, Any]) -> None:
    """Check that a frame has the fields of a file's chunk.

    Raises:
        ValueError: a field is missing or wrong.
    """
    whole_numbers = [item.get("at"), *([item.get("mode")] if item.get("whole") else [])]
    texts = (item.get("key"), item.get("name"))
    if not all(isinstance(text, str) for text in texts) or not all(
        type(number) is int and 0 <= number < 2**63 for number in whole_numbers
    ):
        raise ValueError("it is not a part of a file")


def _inside(root: Path, name: str, host: str) -> Path:
    """Return the path of a file in a host's folder of a run, or the root itself if no name is given.

    Raises:
        ValueError: the path would lie outside the host's folder.
    """
    if not name:
        return root
    parts = PurePosixPath(name).parts
    if not _is_path(name) or parts[:2] != ("nodes", host) or not 3 <= len(parts) <= _MAX_DEPTH or ".." in parts:
        raise ValueError(f"{name[:100]!r} is not a file of {host}'s part of a run")
    return root.joinpath(*parts)


def _is_path(name: str) -> bool:
    """Return True if a file system can hold such a name."""
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:  # a lone surrogate
        return False


def write_chunk(path: Path, item: dict[str, Any], data: bytes) -> None:
    """Write a chunk of a file; a new file has a temporary name until it is complete.

    Raises:
        ValueError: the chunk lies beyond the file's end.
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.mirror")
    target = path
    if item.get("new"):
        target = temporary
        if item["at"] == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if item["at"] > os.fstat(fd).st_size:  # otherwise a sparse file could fill a quota
            raise ValueError(f"a part of {path.name[:100]!r} is missing")
        written = 0
        while written < len(data):
            written += os.pwrite(fd, data[written:], item["at"] + written)
        if item.get("whole"):
            os.fchmod(fd, int(item["mode"]) & 0o777)
    finally:
        os.close(fd)
    if item.get("whole"):
        target.replace(path)
