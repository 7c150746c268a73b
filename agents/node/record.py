"""What is said of a node in its folder: node.json, the agent's log, DONE."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from ringtap.rundir import write_json

_RESERVE_BYTES = 1 << 16


class NodeRecord:
    """node.json of a node that is being recorded; whatever cannot be written is left out, and the job goes on.

    Args:
        folder: the node's folder in the run directory.
        item: the first contents.
    """

    def __init__(self, folder: Path, item: dict[str, Any]) -> None:
        self.folder, self.item = folder, item
        self._reserve = folder / ".reserve"
        with contextlib.suppress(OSError):  # room for the last words on a disk that has filled up
            fd = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, _RESERVE_BYTES)
            finally:
                os.close(fd)

    def save(self) -> bool:
        """Write node.json; returns whether it could be."""
        try:
            write_json(self.folder / "node.json", self.item)
        except (OSError, ValueError) as error:
            self.say(f"node.json could not be written: {error}")
            return False
        return True

    def say(self, text: str) -> None:
        """Append a line with the time to the agent's log."""
        say(self.folder, text)

    def finish(self, status: str, why: str) -> bool:
        """Write how it ended, and DONE; returns whether both are on disk."""
        self.item |= {"status": status, "why": why}
        with contextlib.suppress(OSError):
            self._reserve.unlink()
        if not self.save():
            return False
        try:
            (self.folder / "DONE").touch()
        except OSError:
            return False
        return True


def say(node_folder: Path, text: str) -> None:
    """Append a line with the time to the agent's log of a node; a full disk is no reason to stop."""
    with contextlib.suppress(OSError):
        path = node_folder / "log" / "agent.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}\n")


def hook_entry(node_folder: Path) -> dict[str, Any]:
    """What became of the recorders within the job's processes, as an entry of node.json's collectors."""
    logs = sorted([*node_folder.glob("steps/hook-*.log"), *node_folder.glob("log/hook-*.log")])
    count = sum(path.suffixes == [".rec"] for path in node_folder.glob("steps/rank*.rec"))
    entry: dict[str, Any] = {"state": "ok", "reason": f"{count} processes recorded their steps", "remedy": ""}
    entry["processes"] = count
    if not count:
        entry["reason"] = "no process of the job stepped an optimizer of torch"
    words = []
    for path in logs:
        with contextlib.suppress(OSError):
            lines = path.read_text(errors="replace").strip().splitlines()
            words.append(f"{path.stem}: {lines[-1] if lines else 'no words'}")
    if words:
        shown = "; ".join(words[:3]) + ("; …" if len(words) > 3 else "")
        entry |= {"state": "degraded", "reason": f"{len(words)} processes stopped recording: {shown}"}
    return entry
