"""Measures bytes, round-trip times and windows of each flow in each iteration, from the samples of its socket."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ringtap.analysis.job.flows import MAX_CELLS
from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.analysis.runs.samples_to_iterations import Borders, Integers, Numbers, add_up, shares
from ringtap.analysis.runs.sockets import SocketLog, socket_log
from ringtap.core.errors import UsageError
from ringtap.core.run_directory_schema import SOCKETS_REC
from ringtap.core.tcp_info import UNKNOWN_RTT_US

# column -> counter of a sender's socket
_OF_SENDER = {"retransmitted_bytes": "bytes_retrans", "retransmissions": "total_retrans", "ce_marked": "delivered_ce"}
_PAYLOAD = ("payload_bytes", "payload_low_bytes", "payload_high_bytes")
_GAUGES = ("rtt_us", "congestion_window_bytes")
_COLUMNS = ("iteration", "flow", *_PAYLOAD, *_OF_SENDER, *_GAUGES, "samples")


def measure(
    nodes: Mapping[str, NodeLogs], borders: Mapping[str, Borders], flows: pd.DataFrame, number_of: Integers
) -> pd.DataFrame:
    """Return the table described at `ringtap.analysis.job.run.Job.socket_iterations`.

    Args:
        nodes: the nodes' logs.
        borders: the iterations' borders by each node's clock.
        flows: as `ringtap.analysis.job.flows.SocketTraffic.flows`.
        number_of: number of each of these flows in the table.

    Raises:
        UsageError: the table would have too many rows.
    """
    iterations = max((len(node.bin_of) for node in borders.values()), default=0)
    if len(flows) * iterations > MAX_CELLS:
        raise UsageError(
            f"{len(flows):,} flows in {iterations:,} iterations are more than {MAX_CELLS:,} rows: job.flows has the "
            "totals of each flow, job.iterations those of each iteration"
        )
    parts = [pd.DataFrame({name: pd.Series(dtype="float64") for name in _COLUMNS})]
    first = 0  # `end` numbers the sockets of all nodes, in the order of the nodes
    for name, node in nodes.items():
        log = socket_log(node)
        if log is None or not len(log.sockets):
            continue
        rows = np.flatnonzero(flows["end"].between(first, first + len(log.sockets) - 1))
        part = _of_node(node, log, borders[name], flows.iloc[rows], first)
        parts.append(part.assign(flow=number_of[rows][part["flow"].to_numpy(np.int64)]))
        first += len(log.sockets)
    table = pd.concat([part for part in parts if len(part)] or parts, ignore_index=True)
    table = table.astype({"iteration": "int64", "flow": "int64", "samples": "int64"})
    return table.sort_values(["iteration", "flow"], ignore_index=True)


def _of_node(node: NodeLogs, log: SocketLog, borders: Borders, flows: pd.DataFrame, first: int) -> pd.DataFrame:
    """Return the rows of a node's flows; ``flow`` is the row in ``flows``."""
    sent = (flows["measured_at"] == "sender").to_numpy(bool)
    ends = flows["end"].to_numpy(np.int64) - first
    # for each socket, its row as a sender and as a receiver; -1: none
    rows_of = np.full((2, len(log.sockets)), -1)
    rows_of[np.where(sent, 0, 1), ends] = np.arange(len(flows))
    sums = {name: np.zeros((len(flows), borders.bins)) for name in (*_PAYLOAD, *_OF_SENDER)}
    _add_growth(log, borders, rows_of, sums)
    samples, means = _gauges(log, borders, rows_of)
    sums |= {name: np.where(sent[:, None], values, np.nan) for name, values in means.items()}
    for name in _OF_SENDER:
        sums[name][~sent] = np.nan
    covered = node.covers(SOCKETS_REC, borders)
    for name in (*_PAYLOAD, *_OF_SENDER):
        sums[name][:, ~covered] = np.nan
    begin, end = (borders.edges_ns[borders.bin_of + side] for side in (0, 1))
    opened, closed = (flows[name].to_numpy(np.int64)[:, None] for name in ("first_ns", "last_ns"))
    picked = {name: values[:, borders.bin_of] for name, values in (sums | {"samples": samples}).items()}
    flow, iteration = np.nonzero((opened < end) & (closed > begin) | (picked["payload_high_bytes"] > 0))
    table = {"iteration": iteration, "flow": flow} | {name: values[flow, iteration] for name, values in picked.items()}
    return pd.DataFrame(table)[list(_COLUMNS)]


def _add_growth(log: SocketLog, borders: Borders, rows_of: Integers, sums: dict[str, Numbers]) -> None:
    flows, bins = sums["payload_bytes"].shape
    for grown in log.growth():
        span, bin_of, share = shares(grown.begin_ns, grown.end_ns, borders.edges_ns)
        for rows, payload in zip(rows_of, ("bytes_acked", "bytes_received"), strict=True):
            row = rows[grown.end[span]]
            mine = row >= 0
            amount = grown.amounts[payload][span][mine]
            parts = {
                "payload_bytes": amount * share[mine],
                "payload_low_bytes": np.where(share[mine] == 1, amount, 0.0),
                "payload_high_bytes": amount,
            }
            parts |= {name: (grown.amounts[counter][span] * share)[mine] for name, counter in _OF_SENDER.items()}
            for name, values in parts.items():
                sums[name] += add_up(row[mine], bin_of[mine], values, flows, bins)


def _gauges(log: SocketLog, borders: Borders, rows_of: Integers) -> tuple[Integers, dict[str, Numbers]]:
    """Return the number of samples, and the means of the gauges over them, by flow and bin; NaN without a value."""
    flows, bins = int(rows_of.max(initial=-1)) + 1, borders.bins
    counts = {name: np.zeros((flows, bins)) for name in ("samples", *_GAUGES)}
    sums = {name: np.zeros((flows, bins)) for name in _GAUGES}
    for end, records in log.samples():
        bin_of = np.searchsorted(borders.edges_ns, np.asarray(records["t_ns"], np.int64), side="right") - 1
        names = records.dtype.names or ()
        unknown = np.full(len(records), np.nan)
        rtt_us = np.asarray(records["rtt_us"], np.float64) if "rtt_us" in names else unknown
        values = {"rtt_us": np.where((rtt_us > 0) & (rtt_us < UNKNOWN_RTT_US), rtt_us, np.nan)}
        has_window = {"snd_cwnd", "snd_mss_bytes"} <= set(names)
        values["congestion_window_bytes"] = (
            records["snd_cwnd"].astype(np.float64) * records["snd_mss_bytes"] if has_window else unknown
        )
        for rows in rows_of:
            mine = (rows[end] >= 0) & (bin_of >= 0) & (bin_of < bins)
            row, at = rows[end[mine]], bin_of[mine]
            counts["samples"] += add_up(row, at, np.ones(len(row)), flows, bins)
            for name in _GAUGES:
                known = ~np.isnan(values[name][mine])
                counts[name] += add_up(row[known], at[known], np.ones(int(known.sum())), flows, bins)
                sums[name] += add_up(row[known], at[known], values[name][mine][known], flows, bins)
    with np.errstate(invalid="ignore"):
        means = {name: sums[name] / np.where(counts[name] > 0, counts[name], np.nan) for name in _GAUGES}
    return counts["samples"].astype(np.int64), means
