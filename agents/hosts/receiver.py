"""On the controller: what hosts send of their files, written where it belongs, and passed on to where it is needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

# what a node's clock says goes to the others, and that a node asks goes to the reference (agents/clock)
_SAID = ("server.json", "clock.json")
_ASKED = "pings.rec"
_MOST_PASSED_BYTES = 1 << 22
_DEEPEST = 32  # folders below a run


class Receiver:
    """Writes the frames of all hosts, which are not trusted: each writes below its own node's folder alone.

    Args:
        spread: passes a file of a run on: run, name in it, content, and the host it is for; None: every other host.
    """

    def __init__(self, spread: Callable[[str, str, bytes, str, str | None], None]) -> None:
        self._spread = spread
        self._roots: dict[str, Path] = {}
        self._references: dict[str, str] = {}
        self._owners: dict[str, str] = {}
        self._began_bytes: dict[str, int] = {}
        self._lock = threading.Lock()
        self.failures: dict[str, str] = {}  # by host

    def expect(self, key: str, root: Path, reference: str = "", *, owner: str = "") -> None:
        """Set where files of a key go.

        Args:
            key: of the frames.
            root: a run directory, or a file that the frames are added to.
            reference: the run's reference node.
            owner: the one host that may write the file; empty for a run directory, where each has its folder.
        """
        with self._lock:
            self._owners[key] = owner
            self._roots[key] = root
            self._references[key] = reference
            self._began_bytes[key] = root.stat().st_size if root.is_file() else 0

    def take(self, host: str, item: dict[str, Any], data: bytes) -> None:
        """Write a chunk; what fails is kept in `failures`, and the host keeps its files."""
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
                _write(path, item, data)
            else:
                _write(path, {"at": self._began_bytes[key] + item["at"]}, data)
            if name and item.get("whole"):
                self._pass_on(host, key, name, path)
        except (OSError, ValueError) as error:
            self.failures[host] = f"what it sends cannot be written here: {error}"

    def _pass_on(self, host: str, key: str, name: str, path: Path) -> None:
        """What other hosts' clocks have to see, where no shared file system shows it to them."""
        parts = PurePosixPath(name).parts
        reference = self._references.get(key, "")
        if len(parts) != 4 or parts[0] != "nodes" or parts[2] != "clock":
            return
        if parts[1] == reference and parts[3] in _SAID:
            if path.stat().st_size > _MOST_PASSED_BYTES:
                raise ValueError(f"{name!r} is too long to be passed on to other hosts")
            self._spread(key, name, path.read_bytes(), host, None)
        elif parts[1] != reference and parts[3] == _ASKED:
            self._spread(key, name, b"", host, reference)


def _check(item: dict[str, Any]) -> None:
    """See that a frame has the fields of a file's chunk.

    Raises:
        ValueError: it has not.
    """
    whole_numbers = [item.get("at"), *([item.get("mode")] if item.get("whole") else [])]
    words = (item.get("key"), item.get("name"))
    if not all(isinstance(word, str) for word in words) or not all(
        type(number) is int and 0 <= number < 2**63 for number in whole_numbers
    ):
        raise ValueError("it is no part of a file")


def _inside(root: Path, name: str, host: str) -> Path:
    """A file in a host's folder of a run, or the root itself where no name is given.

    Raises:
        ValueError: it would lie elsewhere.
    """
    if not name:
        return root
    parts = PurePosixPath(name).parts
    if not _is_path(name) or parts[:2] != ("nodes", host) or not 3 <= len(parts) <= _DEEPEST or ".." in parts:
        raise ValueError(f"{name[:100]!r} is not a file of {host}'s part of a run")
    return root.joinpath(*parts)


def _is_path(name: str) -> bool:
    """Tell if a file system can hold such a name."""
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:  # half a character
        return False


def _write(path: Path, item: dict[str, Any], data: bytes) -> None:
    """Write a chunk of a file, of a new one under a temporary name until it is whole.

    Raises:
        ValueError: the chunk lies beyond the file's end.
        OSError: it cannot be written.
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
        if item["at"] > os.fstat(fd).st_size:  # else a few bytes could take all of a quota
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
