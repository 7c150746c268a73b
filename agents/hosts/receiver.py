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


class Receiver:
    """Writes the frames of all hosts.

    Args:
        spread: passes a file of a run on: run, name in it, content, and the host it is for; None: every other host.
    """

    def __init__(self, spread: Callable[[str, str, bytes, str, str | None], None]) -> None:
        self._spread = spread
        self._roots: dict[str, Path] = {}
        self._references: dict[str, str] = {}
        self._began_bytes: dict[str, int] = {}
        self._lock = threading.Lock()
        self.failures: dict[str, str] = {}  # by host

    def expect(self, key: str, root: Path, reference: str = "") -> None:
        """Where files of a key go: below a run directory with this reference node, or to the end of a file."""
        with self._lock:
            self._roots[key] = root
            self._references[key] = reference
            self._began_bytes[key] = root.stat().st_size if root.is_file() else 0

    def take(self, host: str, item: dict[str, Any], data: bytes) -> None:
        """Write a chunk; what fails is kept in `failures`, and the host keeps its files."""
        if host in self.failures:
            return
        key, name = str(item["key"]), str(item["name"])
        try:
            with self._lock:
                path = _inside(self._roots[key], name)
            if name:
                _write(path, item, data)
            else:
                _write(path, {"at": self._began_bytes[key] + item["at"]}, data)
            if name and item.get("whole"):
                self._pass_on(host, key, name, path)
        except (OSError, KeyError, ValueError) as error:
            self.failures[host] = f"what it sends cannot be written here: {error}"

    def _pass_on(self, host: str, key: str, name: str, path: Path) -> None:
        """What other hosts' clocks have to see, where no shared file system shows it to them."""
        parts = PurePosixPath(name).parts
        reference = self._references.get(key, "")
        if len(parts) != 4 or parts[0] != "nodes" or parts[2] != "clock":
            return
        if parts[1] == reference and parts[3] in _SAID:
            self._spread(key, name, path.read_bytes(), host, None)
        elif parts[1] != reference and parts[3] == _ASKED:
            self._spread(key, name, b"", host, reference)


def _inside(root: Path, name: str) -> Path:
    """A file below a root.

    Raises:
        ValueError: it would lie elsewhere.
    """
    if not name:
        return root
    parts = PurePosixPath(name).parts
    if parts[0] != "nodes" or ".." in parts:
        raise ValueError(f"{name!r} is no file of a run")
    return root.joinpath(*parts)


def _write(path: Path, item: dict[str, Any], data: bytes) -> None:
    """Write a chunk of a file, of a new one under a temporary name until it is whole."""
    temporary = path.with_name(f".{path.name}.mirror")
    target = path
    if item.get("new"):
        target = temporary
        if item["at"] == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        written = 0
        while written < len(data):
            written += os.pwrite(fd, data[written:], item["at"] + written)
        if item.get("whole"):
            os.fchmod(fd, int(item["mode"]) & 0o777)
    finally:
        os.close(fd)
    if item.get("whole"):
        target.replace(path)
