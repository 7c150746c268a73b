"""Apportions a node's counters to iterations: queues, pauses, congestion notifications, processors, GPUs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from ringtap.analysis.runs.node_records import NodeLogs, WideLog
from ringtap.analysis.runs.read_binary_records import Records
from ringtap.analysis.runs.samples_to_iterations import (
    Borders,
    Integers,
    Numbers,
    add_up,
    counter_steps,
    largest_in,
    shares,
)
from ringtap.core.append_only_logs import RecordFile
from ringtap.core.counter_growth import MAX_UNCERTAIN_SHARE
from ringtap.core.link_counter_sources import counts_marks, counts_pauses
from ringtap.core.run_directory_schema import HOST_REC, NIC_REC, PROCESSES_REC, QDISC_REC, RUN_DELAY

_ROOT = 0xFFFFFFFF  # TC_H_ROOT
COLUMNS = {
    "nic_drops": "packets that interfaces dropped, both directions",
    "queue_backlog_bytes": "largest backlog of a queueing discipline seen",
    "queue_drops": "packets that queueing disciplines dropped",
    "segments_retransmitted": "TCP segments that all programs of the node retransmitted",
    "pause_frames": "pause frames sent and received, of all priorities",
    "ecn_marks": "packets that the NIC marked or saw marked, by ethtool",
    "cnp_sent": "congestion notifications sent (RoCE): the peer is asked to slow down",
    "cnp_handled": "congestion notifications handled (RoCE): this node slowed down",
    "infiniband_tx_bytes": "InfiniBand or RDMA bytes sent by all ports",
    "infiniband_rx_bytes": "InfiniBand or RDMA bytes received by all ports",
    "infiniband_wait": "ticks in which a port had data to send but could not; length of a tick depends on the device",
    "cpu_busy_cores": "processors busy, mean",
    "cpu_job_cores": "processors busy for the job's processes",
    "cpu_other_cores": "processors busy for other programs",
    "cpu_steal_cores": "processors' time taken by the hypervisor",
    "memory_available_bytes": "least memory available",
    "gpu_utilization_pct": "utilisation, mean over the GPUs that the ranks compute on; over all, if no rank says which",
}


def node_table(node: NodeLogs, borders: Borders) -> pd.DataFrame:
    """Return the counters of a node: one row per bin, `COLUMNS`; NaN where not recorded."""
    table: dict[str, Numbers] = {}
    for read in (_nic, _qdisc, _host, _ethtool, _infiniband, _gpu):
        table |= read(node, borders)
    busy, job = table.get("cpu_busy_cores"), table.get("cpu_job_cores")
    if busy is not None and job is not None:
        table["cpu_other_cores"] = np.maximum(busy - job, 0.0)
    missing = np.full(borders.bins, np.nan)
    return pd.DataFrame({name: table.get(name, missing) for name in COLUMNS})


def _grown(log: WideLog, borders: Borders, is_wanted: Callable[[str], bool]) -> Numbers | None:
    """Return the summed growth of the wanted counters; None if the log has none of them."""
    columns = [name for name in log.columns if is_wanted(name)]
    if not columns:
        return None
    return np.asarray(sum((log.growth(name, borders) for name in columns), np.zeros(borders.bins)))


def _recorded(**amounts: Numbers | None) -> dict[str, Numbers]:
    return {name: amount for name, amount in amounts.items() if amount is not None}


def _nic(node: NodeLogs, borders: Borders) -> dict[str, Numbers]:
    log = node.wide(NIC_REC)
    return {} if log is None else _recorded(nic_drops=_grown(log, borders, lambda name: name.endswith("_drops")))


def _qdisc(node: NodeLogs, borders: Borders) -> dict[str, Numbers]:
    found = node.records(QDISC_REC)
    if found is None or not len(found[1]):
        return {}
    file, records = found
    # statistics of a root include those of the disciplines below it
    records = records[np.asarray(records["parent"]) == _ROOT] if (records["parent"] == _ROOT).any() else records
    key = np.asarray(records["interface"]).astype(np.int64) << 32 | np.asarray(records["handle"]).astype(np.int64)
    t_ns = np.asarray(records["t_ns"], np.int64)
    largest = np.full(borders.bins, np.nan)
    for number in np.unique(key):
        mine = key == number
        largest = np.fmax(largest, largest_in(t_ns[mine], np.asarray(records["backlog_bytes"])[mine], borders))
    drops = long_growth(file, records, key, "drops", np.zeros(len(key), np.int64), 1, borders)[0]
    covered = node.covers(QDISC_REC, borders)
    return {"queue_backlog_bytes": np.where(covered, largest, np.nan), "queue_drops": np.where(covered, drops, np.nan)}


def long_growth(
    file: RecordFile, records: Records, key: Integers, column: str, group: Integers, groups: int, borders: Borders
) -> Numbers:
    """Return the growth of a counter in a log with one record per object and sample, shape (groups, bins).

    Bins in which a counter was reset are NaN.

    Args:
        file: the log's header.
        records: its records.
        key: number of the object (process, queue) of each record.
        column: the counter.
        group: group of each record; -1: none.
        groups: number of groups.
        borders: the bins by the log's clock.
    """
    order = np.argsort(key, kind="stable")
    key, group = key[order], group[order]
    t_ns, values = np.asarray(records["t_ns"], np.int64)[order], np.asarray(records[column])[order]
    follows = (key[1:] == key[:-1]) & (t_ns[1:] > t_ns[:-1]) & (group[1:] >= 0)
    steps = counter_steps(values[:-1][follows], values[1:][follows], file.column(column).wraps_at_bits)
    span, bin_of, share = shares(t_ns[:-1][follows], t_ns[1:][follows], borders.edges_ns)
    return add_up(group[1:][follows][span], bin_of, steps[span] * share, groups, borders.bins)


def _host(node: NodeLogs, borders: Borders) -> dict[str, Numbers]:
    log = node.wide(HOST_REC)
    length_s = np.diff(borders.edges_ns) / 1e9
    table: dict[str, Numbers] = {}
    if log is not None:
        for name, suffix in (("cpu_busy_cores", ".busy_s"), ("cpu_steal_cores", ".steal_s")):
            busy = _grown(log, borders, lambda column, suffix=suffix: column.endswith(suffix))  # type: ignore[misc]
            table |= _recorded(**{name: None if busy is None else busy / length_s})
        retransmitted = _grown(log, borders, lambda column: column == "tcp.segments_retransmitted")
        table |= _recorded(segments_retransmitted=retransmitted)
        if "memory.available_bytes" in log.columns:
            table["memory_available_bytes"] = -largest_in(
                log.t_ns, -log.values("memory.available_bytes").astype(np.float64), borders
            )
    found = node.records(PROCESSES_REC)
    if found is not None and len(found[1]):
        pid = np.asarray(found[1]["pid"]).astype(np.int64)
        grown = long_growth(*found, pid, "cpu_s", np.zeros(len(pid), np.int64), 1, borders)[0]
        table["cpu_job_cores"] = np.where(node.covers(PROCESSES_REC, borders), grown / length_s, np.nan)
    return table


def rank_cores(node: NodeLogs, borders: Borders) -> dict[int, Numbers]:
    """Return the mean number of processors that each rank's processes kept busy in each bin, by rank."""
    found = node.records(PROCESSES_REC)
    ranks = {pid: rank for pid, rank in node.rank_of_pid.items() if rank is not None}
    if found is None or not len(found[1]) or not ranks:
        return {}
    names = sorted(set(ranks.values()))
    pid = np.asarray(found[1]["pid"]).astype(np.int64)
    group = pd.Series(pid).map({number: names.index(rank) for number, rank in ranks.items()}).fillna(-1)
    grown = long_growth(*found, pid, "cpu_s", group.to_numpy(np.int64).astype(np.int64), len(names), borders)
    cores = np.where(node.covers(PROCESSES_REC, borders), grown / (np.diff(borders.edges_ns) / 1e9), np.nan)
    return dict(zip(names, cores, strict=True))


def mean_run_delay_s(node: NodeLogs, pid: int, borders: Borders, bins: Integers) -> float | None:
    """Return how long a process's main thread waited for a processor in some bins, mean.

    None: it was not recorded in most of them, or too rarely for so short a time.
    """
    found = node.records(PROCESSES_REC)
    if found is None or RUN_DELAY not in found[0].index:
        return None
    file, records = found
    mine = records[np.asarray(records["pid"]) == pid]
    if len(mine) < 2:
        return None
    t_ns, same = np.asarray(mine["t_ns"], np.int64), np.zeros(len(mine), np.int64)
    asked = len(bins)
    bins = bins[(borders.edges_ns[bins] >= t_ns[0]) & (borders.edges_ns[bins + 1] <= t_ns[-1])]
    grown_s = long_growth(file, mine, same, RUN_DELAY, same, 1, borders)[0][bins]
    length_ns = np.diff(borders.edges_ns)[bins].sum()
    is_known = 2 * len(bins) >= asked > 0 and np.median(np.diff(t_ns)) / 2 <= MAX_UNCERTAIN_SHARE * length_ns
    return float(grown_s.mean()) if is_known and not np.isnan(grown_s).any() else None


def _ethtool(node: NodeLogs, borders: Borders) -> dict[str, Numbers]:
    pauses, marks = [], []
    for name in node.names("ethtool/*.rec"):
        log = node.wide(name)
        if log is None:
            continue
        pauses.append(_grown(log, borders, counts_pauses))
        marks.append(_grown(log, borders, counts_marks))
    return _recorded(pause_frames=_sum(pauses), ecn_marks=_sum(marks))


def _sum(parts: list[Numbers | None]) -> Numbers | None:
    known = [part for part in parts if part is not None]
    return np.asarray(sum(known)) if known else None


def _infiniband(node: NodeLogs, borders: Borders) -> dict[str, Numbers]:
    sources = {
        "infiniband_tx_bytes": "port_xmit_data",
        "infiniband_rx_bytes": "port_rcv_data",
        "infiniband_wait": "port_xmit_wait",
        "cnp_sent": "hw.np_cnp_sent",
        "cnp_handled": "hw.rp_cnp_handled",
    }
    parts: dict[str, list[Numbers | None]] = {name: [] for name in sources}
    for name in node.names("infiniband/*.rec"):
        log = node.wide(name)
        for what, column in sources.items() if log is not None else ():
            grown = _grown(log, borders, lambda name, column=column: name == column)  # type: ignore[misc,arg-type]
            parts[what].append(None if log is None or grown is None else grown * log.file.column(column).octets)
    return _recorded(**{name: _sum(found) for name, found in parts.items()})


def _gpu(node: NodeLogs, borders: Borders) -> dict[str, Numbers]:
    ranks = [file[0].about.get("gpu") for name in node.names("steps/rank*.rec") if (file := node.records(name))]
    used = tuple(uuid for uuid in ranks if isinstance(uuid, str) and uuid)
    logs = [log for name in node.names("gpu/*.rec") if (log := node.wide(name)) is not None]
    if used:  # NVML has a prefix before it: GPU-, MIG-
        logs = [log for log in logs if str(log.file.about.get("uuid")).endswith(used)]
    found = [log.mean("utilization_pct", borders) for log in logs if "utilization_pct" in log.columns]
    return {"gpu_utilization_pct": np.mean(found, axis=0)} if found else {}
