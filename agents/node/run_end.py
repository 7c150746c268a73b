"""The end of a run, as run.json records it."""

from __future__ import annotations

import contextlib
import signal
from typing import Any

from ringtap.json_validation import ShapeError
from ringtap.rundir import RunDirectory, Status, read_node


def job_end(code: int, ended_by: int | None) -> tuple[Status, str]:
    """Status and reason from a job's end.

    ``failed`` is the job's own failure, ``partial`` a job that was cut short from outside.

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
                how = f" ({entry['remedy']})" if entry.get("remedy") else ""
                missing[name, f"{entry.get('reason')}{how}"] = None
    return [{"what": name, "why": why} for name, why in missing]
