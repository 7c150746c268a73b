"""Reads what NCCL's RAS service said of the ranks of a job: those that did not answer, failed or were behind."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.core.run_directory_schema import NCCL_RAS, NCCL_RAS_JSONL, RAS_ANSWERS, RAS_BEHIND, RAS_RANK

# a rank that has left a communicator is missing, too: that says nothing
_QUIET = (RAS_ANSWERS, "missing")


def read_ras(node: NodeLogs) -> list[dict[str, Any]]:
    """Return the last state of each rank of a communicator that was not well, in the order of time.

    Returns:
        Objects with ``t_ns`` (reference clock), ``communicator``, ``size`` (its ranks), ``rank`` (in it), ``host``,
        ``pid``, and ``state`` (``unresponsive``, ``dead``, ``failed`` or ``behind``); if it was behind, also
        ``operations`` and ``most_operations``, the collectives that it and the rank with most had launched; and
        ``until_ns``, the time of the first answer that said otherwise, None if none did.
    """
    lines = node.lines(NCCL_RAS_JSONL, RAS_RANK)
    t_ns = node.clock.to_reference(node.clock.unstepped(np.array([line["t_ns"] for line in lines], np.int64)))
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for line, at_ns in zip(lines, t_ns.tolist(), strict=True):
        key = line["communicator"], line["rank"]
        if line["state"] not in _QUIET:
            found.pop(key, None)
            found[key] = line | {"t_ns": int(at_ns), "until_ns": None}
        elif key in found and found[key]["until_ns"] is None:
            found[key]["until_ns"] = int(at_ns)
    return list(found.values())


def answers(node: NodeLogs) -> int:
    """Return the number of answers of the service that a node recorded."""
    number = node.collectors.get(NCCL_RAS, {}).get("answers")
    return number if isinstance(number, int) else 0


def state_text(item: dict[str, Any], begin_ns: int) -> str:
    """Return a sentence about an object of `read_ras`; times count from ``begin_ns``."""
    who = f"rank {item['rank']} of {item['size']} (process {item['pid']} on {item['host']})"
    from_s = (item["t_ns"] - begin_ns) / 1e9
    until = "on" if item["until_ns"] is None else f"to {(item['until_ns'] - begin_ns) / 1e9:.0f} s"
    what = f"was {item['state']}" if item["state"] != "failed" else "had failed"
    if item["state"] == RAS_BEHIND:
        what = f"had launched {item['operations']:,} collectives, another one {item['most_operations']:,},"
    return f"RAS: {who} {what} from {from_s:.0f} s {until}."
