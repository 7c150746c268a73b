"""Files that describe a node in the run directory (node.json, agent's log, DONE), and the end of a run."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

from ringtap.errors import system_message
from ringtap.json_validation import ShapeError
from ringtap.records import append_whole, mend_last_line
from ringtap.rundir import RunDirectory, Status, read_node, write_json
from ringtap.schema import AGENT_LOG, NODE_JSON
from ringtap.units import counted

_RESERVE_BYTES = 1 << 16
_SYSTEM_ERROR = re.compile(r"\w+: \[Errno (\d+)\] ")
_NO_STEP = "no process of the job stepped an optimizer of torch"
_MARK_STEPS = "call ringtap.step() at the end of each iteration of another loop"
_LET_LOAD = (
    "start Python without -I, -E and -S, and leave PYTHONPATH and the variables that begin with RINGTAP_ in its "
    "environment"
)


class NodeJson:
    """node.json of a node that is being recorded; a write that fails is logged, and the job continues.

    Args:
        folder: the node's folder in the run directory.
        item: the first contents.
    """

    def __init__(self, folder: Path, item: dict[str, Any]) -> None:
        self.folder, self.item = folder, item
        self._reserve = folder / ".reserve"
        with contextlib.suppress(OSError):  # reserve space for the final state, in case the disk fills up
            fd = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, _RESERVE_BYTES)
            finally:
                os.close(fd)

    def save(self) -> bool:
        """Write node.json; returns True on success."""
        try:
            write_json(self.folder / NODE_JSON, self.item)
        except (OSError, ValueError) as error:
            self.say(f"node.json could not be written: {error}")
            return False
        return True

    def say(self, text: str) -> None:
        """Append a line with the time to the agent's log."""
        say(self.folder, text)

    def finish(self, status: str, why: str) -> bool:
        """Write the final status, and DONE; returns True if both are on disk."""
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
    """Append a line with the time to the agent's log of a node; write errors are ignored."""
    with contextlib.suppress(OSError):
        path = node_folder / AGENT_LOG
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
        obstacle: the observed reason why an interpreter of the job did not load the hook; empty for none.
    """
    logs = sorted(node_folder.glob("steps/hook-*.log"))
    records = [path for path in node_folder.glob("steps/rank*.rec") if path.suffixes == [".rec"]]
    reason = f"{counted(len(records), 'process', 'processes')} recorded steps"
    entry: dict[str, Any] = {"state": "ok", "reason": reason, "remedy": ""}
    entry["processes"] = len(records)
    parts = [path.stem.split("-") for path in records]
    ranks = {pid: rank.replace("rank", "rank ") for rank, pid, *_ in parts}
    stopped: dict[str, list[str]] = {}
    for path in logs:
        pid = path.stem.removeprefix("hook-")
        with contextlib.suppress(OSError):
            stopped.setdefault(_stop_reason(path), []).append(ranks.get(pid, f"process {pid}"))
    if stopped:
        sentences = [f"{', '.join(names[:3])}{', …' if names[3:] else ''}: {why}" for why, names in stopped.items()]
        shown = "; ".join(sentences[:3]) + ("; …" if len(sentences) > 3 else "")
        count = sum(len(names) for names in stopped.values())
        reason = f"{counted(count, 'process', 'processes')} stopped recording: {shown}"
        return entry | {"state": "degraded", "reason": reason}
    if records:
        return entry
    if (node_folder / ".hook-loaded").exists():
        return entry | {"state": "unavailable", "reason": _NO_STEP, "remedy": _MARK_STEPS}
    reason = obstacle or "no Python process of the job loaded ringtap's recorder"
    return entry | {"state": "unavailable", "reason": reason, "remedy": _LET_LOAD, "obstacle": bool(obstacle)}


def _stop_reason(log: Path) -> str:
    """The reason why a recorder in a process of the job stopped, from its log, which is empty if the disk was full.

    Raises:
        OSError: it cannot be read.
    """
    lines = log.read_text(errors="replace").strip().splitlines()
    if lines:
        found = _SYSTEM_ERROR.match(lines[-1])
        return system_message(int(found[1])) if found else lines[-1]
    disk = os.statvfs(log)
    is_full = disk.f_bavail * disk.f_frsize < _RESERVE_BYTES
    return system_message(errno.ENOSPC) if is_full else "it could not write why"


def job_end(code: int, ended_by: int | None) -> tuple[Status, str]:
    """Status and reason of a run from its job's end; ``partial`` means that a signal ended the job, or came before.

    Args:
        code: its exit code; below 0, the negative number of the signal that ended it.
        ended_by: the last ending signal that was received, if any.
    """
    if code == 0:
        return "complete", ""
    if code < 0:
        return "partial", f"the job was ended by {signal.Signals(-code).name}"
    if ended_by is not None:
        return "partial", f"the job ended with exit code {code} after {signal.Signals(ended_by).name}"
    return "failed", f"the job ended with exit code {code}"


def conclude(run: RunDirectory, code: int, ended_by: int | None, recording_why: str) -> None:
    """Write the end of the run: the job's end, and the missing parts of the recording on the nodes that have ended."""
    status, why = job_end(code, ended_by)
    nodes = node_items(run)
    reasons = {recording_why} | {str(item.get("why")) for item in nodes.values() if item.get("status") == "partial"}
    missing = "; ".join(sorted(filter(None, reasons)))
    if missing and status == "complete":
        status = "partial"
    run.info["not_collected"] = not_collected(nodes)
    with contextlib.suppress(OSError):
        run.finish(status, "; ".join(filter(None, [why, missing])))


def node_items(run: RunDirectory) -> dict[str, dict[str, Any]]:
    """The contents of every readable node.json, by node."""
    found = {}
    for path in sorted((run.path / "nodes").glob("*/node.json")):
        with contextlib.suppress(OSError, ShapeError):  # cut off while it was written
            found[path.parent.name] = read_node(path)
    return found


def no_steps(run: RunDirectory) -> list[str]:
    """List the obstacles to the hook that were seen in the job's interpreters, with their remedies."""
    entries = [item.get("collectors", {}).get("steps", {}) for item in node_items(run).values()]
    return sorted({f"{entry['reason']}; {entry['remedy']}" for entry in entries if entry.get("obstacle")})


def not_collected(nodes: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """List the collectors that were unavailable or failed, with reason and remedy, once per reason."""
    missing: dict[tuple[str, str], None] = {}
    for item in nodes.values():
        for name, entry in (item.get("collectors") or {}).items():
            if entry.get("state") in ("unavailable", "failed"):
                remedy = f" ({entry['remedy']})" if entry.get("remedy") else ""
                missing[name, f"{entry.get('reason')}{remedy}"] = None
    return [{"what": name, "why": why} for name, why in missing]
