"""Makes tables of any collector's log: a row per sample, or joined to the iterations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ringtap.analysis.notebook_formatting import SINCE_EPOCH
from ringtap.analysis.runs.node_records import NodeLogs, WideLog
from ringtap.analysis.runs.samples_to_iterations import Borders
from ringtap.core.check_api_arguments import instance_of
from ringtap.core.errors import UsageError, did_you_mean

_STEPS = "steps"  # the logs of the ranks have tables of their own


def log_names(nodes: Mapping[str, NodeLogs]) -> list[str]:
    """Return the names of the logs of samples: ``host`` for host/host.rec, ``gpu/gpu0`` for gpu/gpu0.rec."""
    found = {path.removesuffix(".rec") for node in nodes.values() for path in node.names("*/*.rec")}
    folders = [tuple(name.split("/")) for name in found if not name.startswith((f"{_STEPS}/", "sent/", "received/"))]
    return sorted(folder if folder == file else f"{folder}/{file}" for folder, file in folders)


@dataclass(frozen=True)
class SampleLog:
    """A node's log of samples."""

    node: NodeLogs
    log: WideLog

    def __len__(self) -> int:
        return len(self.log.t_ns)

    def table(self, rows: slice = slice(None)) -> pd.DataFrame:
        """Return its samples, or those of some rows, with times on the reference clock."""
        t_ns = self.node.clock.to_reference(np.asarray(self.log.t_ns[rows], np.int64))
        values = {item.name: _values(self.log, item.name, rows) for item in self.log.file.fields if item.kind != "time"}
        return pd.DataFrame({"node": self.node.name, "t_ns": t_ns} | values)


def samples(nodes: Mapping[str, NodeLogs], name: str) -> pd.DataFrame:
    """Return the table of `ringtap.analysis.job.run.Job.table`, one row per sample.

    Raises:
        UsageError: no node has such a log, or it cannot be read.
    """
    logs = logs_of(nodes, name)
    table = pd.concat([log.table() for log in logs], ignore_index=True)
    table.attrs |= sample_attrs(logs)
    return table


def sample_attrs(logs: Sequence[SampleLog]) -> dict[str, dict[str, str]]:
    """Return units and meaning of the columns of logs, as the ``attrs`` of their table."""
    columns, units = {"node": "name of the node", "t_ns": "time of the sample"}, {"t_ns": SINCE_EPOCH}
    for item in (item for log in logs for item in log.log.file.fields if item.kind != "time"):
        columns[item.name] = f"{item.kind} in {item.unit}" if item.unit else item.kind
        units |= {item.name: item.unit} if item.unit else {}
    return {"units": units, "columns": columns}


def by_iteration(nodes: Mapping[str, NodeLogs], name: str, borders: Mapping[str, Borders]) -> pd.DataFrame:
    """Return the table of `ringtap.analysis.job.run.Job.table`, one row per iteration and node.

    Raises:
        UsageError: no node has such a log, it cannot be read, or it has several records per sample.
    """
    parts: list[pd.DataFrame] = []
    columns = {"iteration": "number of the iteration", "node": "name of the node"}
    units: dict[str, str] = {}
    for node, log in ((one.node, one.log) for one in logs_of(nodes, name)):
        if (np.diff(log.t_ns) <= 0).any():
            raise UsageError(
                f"{name} has several records per sample: join the rows of job.table({name!r}) by their time"
            )
        mine = borders[node.name]
        values: dict[str, object] = {}
        for item in log.file.fields:
            if item.kind == "time" or item.type.startswith("V"):
                continue
            is_counter = item.kind in ("counter", "saturating")
            amounts = log.growth(item.name, mine) if is_counter else log.mean(item.name, mine)
            values[item.name] = pd.array(amounts[mine.bin_of], "Float64")
            what = "growth in the iteration" if is_counter else "mean over the iteration"
            columns[item.name] = f"{what}, in {item.unit}" if item.unit else what
            units |= {item.name: item.unit} if item.unit else {}
        parts.append(pd.DataFrame({"iteration": np.arange(len(mine.bin_of)), "node": node.name} | values))
    table = pd.concat(parts, ignore_index=True).sort_values(["iteration", "node"], ignore_index=True)
    table.attrs |= {"units": units, "columns": {str(column): columns[str(column)] for column in table}}
    return table


def logs_of(nodes: Mapping[str, NodeLogs], name: str) -> list[SampleLog]:
    """Return the logs of this name, one of each node that has it.

    Raises:
        UsageError: no node has one that can be read.
    """
    instance_of(name, str, "the name of a log")
    relative = f"{name}.rec" if "/" in name else f"{name}/{name}.rec"
    found = []
    for node in nodes.values():
        log = node.wide(relative)
        if log is not None and "t_ns" in {item.name for item in log.file.fields}:
            found.append(SampleLog(node, log))
    if found:
        return found
    known = log_names(nodes)
    if name in known:
        problems = [problem for node in nodes.values() for problem in node.problems if relative in problem]
        raise UsageError(f"{relative} cannot be read on any node: {'; '.join(problems) or 'it has no records'}")
    entries = [node.collectors[name] for node in nodes.values() if name in node.collectors]
    if entries and entries[0].get("reason"):
        raise UsageError(f"the {name} collector recorded nothing: {entries[0]['reason']}")
    raise UsageError(
        f"no node has a log {name!r}: {did_you_mean(name, known)}the logs are {', '.join(known) or '(none)'}"
    )


def _values(log: WideLog, column: str, rows: slice) -> object:
    values = log.values(column)[rows]
    return [bytes(value) for value in values] if values.dtype.kind == "V" else np.array(values)
