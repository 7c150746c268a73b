"""Makes the tables of a batch of a job's nodes, and the sums and means that describe the whole job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ringtap.analysis.job import byte_accounting, counters_per_iteration, flows
from ringtap.analysis.job.byte_accounting import ByteAccount
from ringtap.analysis.job.captured_payload_per_iteration import Packets
from ringtap.analysis.runs.node_batches import BatchTable, Frames
from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.analysis.runs.samples_to_iterations import Borders, Integers, Numbers
from ringtap.analysis.runs.traffic_classes import TRAINING
from ringtap.core.run_directory_schema import SOCKETS_REC

# counters that are added up over the nodes
SUMS = ("nic_drops", "queue_drops", "segments_retransmitted", "pause_frames", "ecn_marks", "cnp_sent", "cnp_handled")
ALL_SUMS = (*SUMS, "infiniband_tx_bytes")
PHASES = ("compute_s", "forward_s", "backward_s", "communication_s", "exposed_s", "overlap_s", "optimizer_s")
MEANS = (*PHASES, "unattributed_s", "sent_bytes", "retransmissions", "cpu_cores")
# parts of an iteration, over the iterations of a rank of which all are known; they add up to ``whole_iteration_s``
PARTS = ("compute_s", "exposed_s", "optimizer_s", "unattributed_s")
WHOLE = tuple(f"whole_{name}" for name in ("iteration_s", *PARTS))
_RANK_MEANS = [*MEANS, "syncs", "synced_bytes", *WHOLE]


@dataclass(frozen=True)
class Shared:
    """Facts of the whole job that the tables of every batch need.

    Attributes:
        borders: borders of the iterations on the reference clock.
        iteration_s: length of each iteration.
        measured: rows of the iterations that means are taken over.
        is_too_short: True if samples are too far apart to count per iteration.
        traffic: bytes of the sockets of all nodes, without ``totals``.
        totals: hash of these: tables that were made from other bytes are made anew.
        unclear_ranks: ranks of several processes, whose bytes cannot be assigned to one.
        world_size: number of ranks.
    """

    borders: Borders
    iteration_s: Numbers
    measured: Integers
    is_too_short: bool
    traffic: flows.SocketTraffic
    totals: str
    unclear_ranks: list[int]
    world_size: int

    @property
    def numbers(self) -> Integers:
        """Numbers of the iterations; -1 for a run without iterations, none if it has no bin."""
        count = len(self.iteration_s)
        return np.arange(count) if count else np.array([-1])[: self.borders.bins]

    def pick(self, amounts: Numbers, sampled: bool = True) -> Numbers:
        """Pick the bins of the iterations; NaN for ``sampled`` amounts of a job that is too short."""
        found = amounts[..., self.borders.bin_of]
        return np.full(found.shape, np.nan) if sampled and self.is_too_short else found

    def rows(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return the rows that means are taken over; all of a run without iterations."""
        return table[table["iteration"].isin(self.measured)] if len(self.measured) else table


def read_tables(
    nodes: Mapping[str, NodeLogs], ranks: BatchTable, packets: dict[str, Packets], shared: Shared
) -> Frames:
    """Read the counters of some nodes and join them with the iterations and the sockets.

    Args:
        nodes: the nodes' logs.
        ranks: their part of `ringtap.analysis.job.iterations_of_ranks.Work.ranks`.
        packets: their captures, without nodes that have none.
        shared: facts of the whole job.

    Returns:
        ``rank_iterations``, ``node_iterations`` and ``byte_accounts``, as the tables of `ringtap.analysis.job.run.Job`;
        ``sums``, counters of all of these nodes, one row per bin; and means per iteration: ``accounts`` by account,
        ``nodes`` by node (also sums), ``rank_sums`` by rank (sums, and ``_count``, the numbers of values).
    """
    tables, cores, counts, covered = {}, {}, {}, {}
    for name, node in nodes.items():
        own = shared.borders.shifted(node.clock.from_reference(shared.borders.edges_ns))
        tables[name] = counters_per_iteration.node_table(node, own)
        cores[name] = counters_per_iteration.rank_cores(node, own)
        counts[name], covered[name] = byte_accounting.count(node, own), node.covers(SOCKETS_REC, own)
    accounts = byte_accounting.measure(counts, packets, shared.traffic, covered)
    rank_iterations = _rank_iterations(ranks.read().copy(), covered, cores, shared)
    node_iterations = _node_iterations(tables, shared)
    byte_accounts = _byte_accounts(accounts, shared)
    return {
        "rank_iterations": rank_iterations,
        "node_iterations": node_iterations,
        "byte_accounts": byte_accounts,
        "sums": _sums(tables, accounts, shared.borders.bins),
        "accounts": _account_means(shared.rows(byte_accounts)),
        "nodes": _of_nodes(node_iterations, shared),
        "rank_sums": _rank_sums(shared.rows(rank_iterations), shared.iteration_s),
    }


def _account_means(table: pd.DataFrame) -> pd.DataFrame:
    """Return the means of each account, and for its comparisons also those over the iterations that have both sides."""
    columns = {}
    for side in ("nic_payload_bytes", "packet_payload_bytes"):
        has_both = table[side].notna() & table["socket_bytes"].notna()
        columns[f"{side}_of_both"] = table[side].where(has_both)
        columns[f"socket_bytes_with_{side}"] = table["socket_bytes"].where(has_both)
    keys = ["node", "path", "direction", "interfaces"]
    return _means(table.assign(**columns), keys, (*byte_accounting.COLUMNS, *columns))


def _rank_iterations(
    table: pd.DataFrame, covered: Mapping[str, Any], cores: Mapping[str, dict[int, Numbers]], shared: Shared
) -> pd.DataFrame:
    """Add the bytes of the sockets and the processors of each rank."""
    for name in ("sent_bytes", "retransmissions", "cpu_cores"):
        table[name] = pd.Series(np.nan, index=table.index, dtype="Float64")
    groups = shared.traffic.groups
    training = groups[groups["traffic_class"] == TRAINING]
    training = training[training["source_rank"].isin(table["rank"])]
    flows_of = training.groupby("source_rank").groups  # labels of the groups are their rows
    known = training.index.to_numpy(np.int64)
    amounts = {name: shared.traffic.rows(name, known) for name in ("payload_bytes", "retransmissions")}
    rows_of: Mapping[Any, Any] = table.groupby(["rank", "node"]).groups
    for (rank, node), rows in rows_of.items():
        bins = shared.borders.bin_of[table.loc[rows, "iteration"].to_numpy(np.int64)]
        if node in shared.traffic.covered and rank not in shared.unclear_ranks and shared.world_size > 1:
            mine = np.searchsorted(known, flows_of.get(rank, []))
            for name, source in (("sent_bytes", "payload_bytes"), ("retransmissions", "retransmissions")):
                sums = np.where(covered[str(node)], amounts[source][mine].sum(axis=0), np.nan)
                table.loc[rows, name] = np.nan if shared.is_too_short else sums[bins]
        busy = cores[str(node)].get(int(rank))
        if busy is not None:
            table.loc[rows, "cpu_cores"] = busy[bins]
    return table


def _node_iterations(tables: Mapping[str, pd.DataFrame], shared: Shared) -> pd.DataFrame:
    parts = [
        counters.iloc[shared.borders.bin_of].assign(iteration=shared.numbers, node=name)
        for name, counters in tables.items()
    ]
    names = ["iteration", "node", *counters_per_iteration.COLUMNS]
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=names)
    if shared.is_too_short:
        table[[*ALL_SUMS, "infiniband_rx_bytes", "infiniband_wait"]] = np.nan
    return table[names].astype(dict.fromkeys(counters_per_iteration.COLUMNS, "Float64"))


def _byte_accounts(found: Sequence[ByteAccount], shared: Shared) -> pd.DataFrame:
    numbers = shared.numbers
    keys = {
        "iteration": np.tile(numbers, len(found)),
        **{name: [getattr(account, name) for account in found] for name in ("node", "path", "direction")},
        "interfaces": [",".join(account.interfaces) for account in found],
    }
    columns: dict[str, Any] = {
        name: np.repeat(np.array(values, object), len(numbers)) if isinstance(values, list) else values
        for name, values in keys.items()
    }
    missing = np.full(len(numbers), np.nan)
    for name in byte_accounting.COLUMNS:
        sampled = not name.startswith("packet_")
        parts = [
            missing if (part := account.amounts[name]) is None else shared.pick(part, sampled) for account in found
        ]
        columns[name] = np.concatenate([np.empty(0), *parts])
    return pd.DataFrame(columns).astype(dict.fromkeys(byte_accounting.COLUMNS, "Float64"))


def _sums(tables: Mapping[str, pd.DataFrame], accounts: Sequence[ByteAccount], bins: int) -> pd.DataFrame:
    """Add up counters over the nodes that recorded them; a column is missing if none did."""
    columns: dict[str, Numbers] = {}
    for name in ALL_SUMS:
        known = [table[name].to_numpy() for table in tables.values() if not table[name].isna().all()]
        columns |= {name: np.sum(known, axis=0)} if known else {}
    sent = [one for one in accounts if one.path == byte_accounting.NETWORK and one.direction == "tx"]
    counts = [count for one in sent if (count := one.amounts["nic_bytes"]) is not None]
    columns |= {"nic_tx_bytes": np.sum(counts, axis=0)} if counts else {}
    if tables:
        columns["queue_backlog_bytes"] = np.fmax.reduce([table["queue_backlog_bytes"] for table in tables.values()])
        cores = np.array([table["cpu_other_cores"] for table in tables.values()])
        columns["cpu_other_cores"] = np.where(np.isnan(cores).all(axis=0), np.nan, np.nansum(cores, axis=0))
    return pd.DataFrame(columns, index=range(bins))


def join_sums(parts: Iterable[pd.DataFrame]) -> dict[str, Numbers]:
    """Join the ``sums`` of the batches; a counter that no node recorded is missing."""
    found: dict[str, Numbers] = {}
    for table in parts:
        for column in table:
            name, values = str(column), table[column].to_numpy(np.float64)
            if name not in found:
                found[name] = values
            elif name == "queue_backlog_bytes":
                found[name] = np.fmax(found[name], values)
            elif name == "cpu_other_cores":
                missing = np.isnan(found[name]) & np.isnan(values)
                found[name] = np.where(missing, np.nan, np.nansum([found[name], values], axis=0))
            else:
                found[name] = found[name] + values
    return found


def join_rank_sums(parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Join the ``rank_sums`` of the batches; the index is the rank."""
    how = {name: "sum" for one in _RANK_MEANS for name in (one, f"{one}_count")} | {"node": "last", "iterations": "sum"}
    return pd.concat(parts).groupby("rank").agg(how)


def _means(table: pd.DataFrame, keys: list[str], names: Iterable[str]) -> pd.DataFrame:
    rows = [
        dict(zip(keys, values, strict=True)) | {name: part[name].mean() for name in names}
        for values, part in table.groupby(keys, sort=False)
    ]
    return pd.DataFrame(rows, columns=[*keys, *names]).astype(dict.fromkeys(names, "Float64"))


def _of_nodes(table: pd.DataFrame, shared: Shared) -> pd.DataFrame:
    """Return means over the iterations after warm-up, and over the whole run sums, ``_sum``, and some extremes."""
    means = _means(shared.rows(table), ["node"], counters_per_iteration.COLUMNS).set_index("node")
    by = table.groupby("node")
    sums = by[list(SUMS)].sum(min_count=1).add_suffix("_sum")
    extremes = pd.DataFrame({"largest_backlog_bytes": by["queue_backlog_bytes"].max()})
    extremes["least_memory_bytes"] = shared.rows(table).groupby("node")["memory_available_bytes"].min()
    return sums.join(extremes).join(means).reset_index()


def _rank_sums(table: pd.DataFrame, iteration_s: Numbers) -> pd.DataFrame:
    spent = table["compute_s"] + table["exposed_s"] + table["optimizer_s"]
    seconds = pd.Series(iteration_s[table["iteration"].to_numpy(np.int64)], index=table.index, dtype="Float64")
    # by Horovod's timeline, the optimizer's step includes the exposed communication, and compute is not known: NA
    table = table.assign(unattributed_s=seconds - spent)
    whole = {f"whole_{name}": table[name].mask(table["unattributed_s"].isna()) for name in PARTS}
    whole["whole_iteration_s"] = seconds.mask(table["unattributed_s"].isna())
    by = table.assign(**whole).groupby("rank")
    counts = by[_RANK_MEANS].count().add_suffix("_count")
    return by[_RANK_MEANS].sum().join(counts).assign(node=by["node"].last(), iterations=by.size()).reset_index()
