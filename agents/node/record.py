"""What is said of a node in its folder: node.json, the agent's log, DONE."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from ringtap.records import append_whole, mend_last_line
from ringtap.rundir import write_json
from ringtap.units import counted

_RESERVE_BYTES = 1 << 16
_NO_STEP = "no process of the job stepped an optimizer of torch"
_MARK_STEPS = "call ringtap.step() at the end of each iteration of another loop"
_LET_LOAD = (
    "start Python without -I, -E and -S, and leave PYTHONPATH and the variables that begin with RINGTAP_ in its "
    "environment"
)


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
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            mend_last_line(fd, lambda _: True)
            append_whole(fd, f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}\n".encode(errors="replace"))
        finally:
            os.close(fd)


def hook_entry(node_folder: Path, obstacle: str) -> dict[str, Any]:
    """The state of the recorders in the job's processes, as an entry of node.json's collectors.

    Args:
        node_folder: the node's folder.
        obstacle: what was seen to keep an interpreter of the job from loading the hook; empty: nothing.
    """
    logs = sorted([*node_folder.glob("steps/hook-*.log"), *node_folder.glob("log/hook-*.log")])
    records = [path for path in node_folder.glob("steps/rank*.rec") if path.suffixes == [".rec"]]
    reason = f"{counted(len(records), 'process', 'processes')} recorded steps"
    entry: dict[str, Any] = {"state": "ok", "reason": reason, "remedy": ""}
    entry["processes"] = len(records)
    words = []
    for path in logs:
        with contextlib.suppress(OSError):
            lines = path.read_text(errors="replace").strip().splitlines()
            words.append(f"{path.stem}: {lines[-1] if lines else 'it could not write why (is the disk full?)'}")
    if words:
        shown = "; ".join(words[:3]) + ("; …" if len(words) > 3 else "")
        reason = f"{counted(len(words), 'process', 'processes')} stopped recording: {shown}"
        return entry | {"state": "degraded", "reason": reason}
    if records:
        return entry
    if (node_folder / ".hook-loaded").exists():
        return entry | {"state": "unavailable", "reason": _NO_STEP, "remedy": _MARK_STEPS}
    reason = obstacle or "no Python process of the job loaded ringtap's recorder"
    return entry | {"state": "unavailable", "reason": reason, "remedy": _LET_LOAD, "obstacle": bool(obstacle)}
