"""Writes the files that describe a node in the run directory (node.json, agent's log, DONE), and the end of a run."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringtap.agents.node.unrecorded_processes import UnrecordedProcesses, command_obstacle, describe, inner_runs
from ringtap.core.append_only_logs import append_whole, mend_last_line
from ringtap.core.errors import error_message, exit_words, system_message
from ringtap.core.json_validation import ShapeError
from ringtap.core.run_completeness import failed_job, missing_ranks, ranks_of_groups
from ringtap.core.run_directory import RunDirectory, Status, read_node, write_json
from ringtap.core.run_directory_schema import AGENT_LOG, HOOK_LOADED, NODE_JSON
from ringtap.core.terminal_escaping import readable
from ringtap.core.units import counted
from ringtap.core.untrusted_files import make_folder, open_file, read_whole

_RESERVE_BYTES = 1 << 16
_SYSTEM_ERROR = re.compile(r"\w+: \[Errno (\d+)\] ")
_MAX_COMMAND_CHARACTERS = 200
_NO_STEP = "no process of the job stepped an optimizer of torch"
_NOT_LOADED = "no Python process of the job loaded ringtap's recorder"
_MARK_STEPS = "call ringtap.step() at the end of each iteration of another loop"


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
            fd = open_file(self._reserve, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(fd, 0, _RESERVE_BYTES)
            finally:
                os.close(fd)

    def save(self) -> bool:
        """Write node.json; returns True on success."""
        try:
            write_json(self.folder / NODE_JSON, self.item)
        except (OSError, ValueError) as error:
            self.say(f"node.json could not be written: {error_message(error)}")
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
        make_folder(path.parent)
        fd = open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            mend_last_line(fd, lambda _: True)
            append_whole(
                fd, f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {readable(text)}\n".encode(errors="replace")
            )
        finally:
            os.close(fd)


def hook_entry(
    node_folder: Path, unrecorded: UnrecordedProcesses, commands: Iterable[Sequence[str]]
) -> tuple[dict[str, Any], str]:
    """The state of the recorders in the job's processes, as an entry of node.json's collectors, and why some stopped.

    Args:
        node_folder: the node's folder.
        unrecorded: the processes of the job that did not load the hook.
        commands: the job's own command lines.
    """
    records = [path for path in node_folder.glob("steps/rank*.rec") if path.suffixes == [".rec"]]
    ranks = {pid: rank.replace("rank", "rank ") for rank, pid, *_ in (path.stem.split("-") for path in records)}
    counts = f"{counted(len(records), 'process', 'processes')} recorded steps"
    entry: dict[str, Any] = {"state": "ok", "reason": counts, "remedy": "", "processes": len(records)}
    reasons, remedies = [], []
    if stopped := _stopped(node_folder, ranks):
        reasons.append(stopped)
    missed = unrecorded.report(int(pid) for pid in ranks if pid.isdigit())
    inner = inner_runs(node_folder)
    missed = [one for one in missed if not (one.obstacle and one.obstacle.other_run in inner)]
    if inner:
        shown = ", ".join(inner[:3]) + (", …" if inner[3:] else "")
        reasons.append(f"another ringtap run within the job recorded its processes, in {shown}")
        remedies.append(f"analyze {shown}, or leave out one ringtap run")
    if records:
        missed = [one for one in missed if one.has_torch and one.obstacle]
    if missed:
        why, remedy = describe(missed)
        reasons.append(why)
        remedies.append(remedy)
    if reasons:
        if records and not stopped:
            reasons.insert(0, counts)
        state = "degraded" if records or stopped else "unavailable"
        is_told = bool(inner or missed)
        entry |= {"state": state, "reason": "; ".join(reasons), "remedy": "; ".join(remedies), "obstacle": is_told}
        return entry, stopped
    if records:
        return entry, ""
    entry |= {"state": "unavailable", "reason": _NO_STEP, "remedy": _MARK_STEPS}
    if not (node_folder / HOOK_LOADED).exists():
        entry["reason"], entry["remedy"] = _NOT_LOADED, ""
        found = [(words, each) for words in commands if (each := command_obstacle(words))]
        for words, obstacle in found[:1]:
            shown = " ".join(words)[:_MAX_COMMAND_CHARACTERS]
            entry["reason"], entry["remedy"] = f"the job ({shown}) {obstacle.why}", obstacle.remedy
        entry["obstacle"] = bool(found)
    return entry, ""


def _stopped(node_folder: Path, ranks: dict[str, str]) -> str:
    """Say which processes stopped recording, and why; empty if none did."""
    stopped: dict[str, list[str]] = {}
    for path in sorted(node_folder.glob("steps/hook-*.log")):
        pid = path.stem.removeprefix("hook-")
        with contextlib.suppress(OSError):
            stopped.setdefault(_stop_reason(path), []).append(ranks.get(pid, f"process {pid}"))
    if not stopped:
        return ""
    sentences = [f"{', '.join(names[:3])}{', …' if names[3:] else ''}: {why}" for why, names in stopped.items()]
    shown = "; ".join(sentences[:3]) + ("; …" if len(sentences) > 3 else "")
    count = sum(len(names) for names in stopped.values())
    return f"{counted(count, 'process', 'processes')} stopped recording: {shown}"


def _stop_reason(log: Path) -> str:
    """The reason why a recorder in a process of the job stopped, from its log, which is empty if the disk was full.

    Raises:
        OSError: it cannot be read.
    """
    lines = read_whole(log).decode(errors="replace").strip().splitlines()
    if lines:
        found = _SYSTEM_ERROR.match(lines[-1])
        return system_message(int(found[1])) if found else lines[-1]
    disk = os.statvfs(log)
    is_full = disk.f_bavail * disk.f_frsize < _RESERVE_BYTES
    return system_message(errno.ENOSPC) if is_full else "it could not write why"


def job_end(code: int, ended_by: int | None, cause: str = "") -> tuple[Status, str]:
    """Status and reason of a run from its job's end; ``partial`` means that a signal ended the job, or came before.

    Args:
        code: its exit code; below 0, the negative number of the signal that ended it.
        ended_by: the last ending signal that was received, if any.
        cause: why it ended, as far as it is known.
    """
    shown = f": {cause}" if cause else ""
    if code == 0:
        return "complete", ""
    if code < 0:
        return "partial", f"the job was ended by {exit_words(code)}{shown}"
    if ended_by is not None:
        return "partial", f"the job ended with exit code {code} after {signal.Signals(ended_by).name}"
    return "failed", f"the job ended with {exit_words(code)}{shown}"


def conclude(run: RunDirectory, code: int, ended_by: int | None, recording_why: str, cause: str = "") -> list[str]:
    """Write the end of the run: the job's end, that of its other ranks, and the missing parts of the recording.

    Returns:
        Why parts of the recording are missing.
    """
    status, why = job_end(code, ended_by, cause)
    nodes = node_items(run)
    if status == "complete":
        status, why = failed_job(nodes)
    reasons = {recording_why} | {str(item.get("why")) for item in nodes.values() if item.get("status") == "partial"}
    reasons |= {missing_ranks(ranks_of_groups(run.path)), *_named_but_missing(run, nodes)}
    missing = sorted(filter(None, reasons))
    if missing and status == "complete":
        status = "partial"
    run.info["not_collected"] = not_collected(nodes)
    with contextlib.suppress(OSError):
        run.finish(status, "; ".join(filter(None, [why, *missing])))
    return missing


def _named_but_missing(run: RunDirectory, nodes: Mapping[str, dict[str, Any]]) -> list[str]:
    """Say which collectors the user asked for by name and did not get; of a group, each machine records what it has."""
    named = (run.info.get("settings") or {}).get("named") or []
    return [
        f"{name}: {entry.get('reason')}"
        for item in nodes.values()
        for name, entry in (item.get("collectors") or {}).items()
        if entry.get("class", name) in named and entry.get("state") == "unavailable"
    ]


def node_items(run: RunDirectory) -> dict[str, dict[str, Any]]:
    """The contents of every readable node.json, by node."""
    found = {}
    for path in sorted((run.path / "nodes").glob("*/node.json")):
        with contextlib.suppress(OSError, ShapeError):  # cut off while it was written
            found[path.parent.name] = read_node(path)
    return found


def missing_steps(run: RunDirectory) -> list[str]:
    """Say why processes of the job recorded no steps, with remedies; empty if no obstacle was seen."""
    entries = [item.get("collectors", {}).get("steps", {}) for item in node_items(run).values()]
    lines = set()
    for entry in entries:
        if entry.get("obstacle"):
            what = "some steps may be missing" if entry.get("processes") else "no steps were recorded"
            lines.add(f"{what}: {entry['reason']}; {entry['remedy']}")
    return sorted(lines)


def not_collected(nodes: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """List the collectors that were unavailable or failed, with reason and remedy, once per reason."""
    missing: dict[tuple[str, str], None] = {}
    for item in nodes.values():
        for name, entry in (item.get("collectors") or {}).items():
            if entry.get("state") in ("unavailable", "failed"):
                remedy = f" ({entry['remedy']})" if entry.get("remedy") else ""
                missing[name, f"{entry.get('reason')}{remedy}"] = None
    return [{"what": name, "why": why} for name, why in missing]
