"""Tells the status of a run's collection: what was recorded, what was not, and why."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import pandas as pd

from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.core.run_completeness import failed_job

ORDER = ("steps", "nic", "sockets", "qdisc", "host", "infiniband", "ethtool", "gpu", "nccl-ras", "packets", "clock")
COLUMNS = ["node", "collector", "state", "reason", "remedy", "missed_samples"]
NOT_ASKED = "not asked for"
SILENT_S = 60.0  # an agent writes node.json every 5 s


def states(nodes: Mapping[str, NodeLogs]) -> pd.DataFrame:
    """Return the state of each collector on each node.

    A collector that node.json does not mention is ``ok`` if it left a file, else ``absent``.
    """
    rows = []
    for name, node in nodes.items():
        entries = node.collectors
        for collector in dict.fromkeys((*ORDER, *entries)):
            item = entries.get(collector)
            if item is None:  # a name of ORDER; names in node.json need not be folder names
                logged = any(node.path.glob(f"{collector}/*"))
                why = NOT_ASKED if node.info else "the agent was ended before it had written node.json"
                item = {"state": "ok" if logged else "absent", "reason": "" if logged else why}
            texts = (str(item.get(key) or "") for key in ("state", "reason", "remedy"))
            rows.append((name, collector, *texts, item.get("missed_samples")))
    table = pd.DataFrame(rows, columns=COLUMNS)
    return table.astype({"missed_samples": "Int64"})


def status(info: Mapping[str, Any], nodes: Mapping[str, NodeLogs], missing: str) -> tuple[str, str]:
    """Return the final status of the run over all nodes, and the reason as a sentence.

    Args:
        info: run.json.
        nodes: the nodes.
        missing: the ranks without steps, as `ringtap.core.run_completeness.missing_ranks` names them.
    """
    recorded, why = str(info.get("status", "partial")), str(info.get("why") or "")
    unsaid = ""
    if recorded == "running" and all(_silent_s(node) > SILENT_S for node in nodes.values()) and nodes:
        recorded, unsaid = "complete", "nothing was left to write how the job ended"
    if recorded == "running":
        # a node that wrote everything had disk space for it
        full = "" if nodes and all(node.done for node in nodes.values()) else ", or its disk was full"
        why = "the run was still being written, or its agent was ended before it could say how it ended"
        return recorded, why + full
    partial = [name for name, node in nodes.items() if node.info.get("status") == "partial"]
    unfinished = [name for name, node in nodes.items() if not node.done]
    ended, ended_why = failed_job({name: node.info for name, node in nodes.items()})
    # a sweep ends the jobs of its series itself, and says how they did
    if recorded == "complete" and ended != "complete" and "series" not in info:
        recorded, why = ended, ended_why
    lacks = [f"{name}: its agent was ended before it had written everything" for name in unfinished] + [missing]
    if recorded == "complete":
        lacks = [unsaid, *(f"{name}: {nodes[name].info.get('why') or 'no reason given'}" for name in partial), *lacks]
        recorded = "partial" if any(lacks) else recorded
    return recorded, "; ".join(filter(None, [why, *(one for one in dict.fromkeys(lacks) if one not in why)]))


def _silent_s(node: NodeLogs) -> float:
    """Return the time since anything was written on a node."""
    times = [0.0]
    for path in (node.path, *node.path.glob("*"), *node.path.glob("*/*")):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return time.time() - max(times)
