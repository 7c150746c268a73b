"""Tables of a job's run directory: iterations, flows, ranks, nodes and the states of the collectors."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ringtap.analysis.job import byte_accounting, flows, iterations, node_counters
from ringtap.analysis.runs.apportioning import Borders, Numbers
from ringtap.analysis.runs.node_logs import NodeLogs, each_node
from ringtap.analysis.runs.run import JobRun, SweepRun, open_run
from ringtap.errors import UsageError
from ringtap.json_validation import whole

_SUMS = ("nic_drops", "queue_drops", "segments_retransmitted", "pause_frames", "ecn_marks", "cnp_sent", "cnp_handled")
_ALL_SUMS = (*_SUMS, "infiniband_tx_bytes")
# largest uncertain share of a mean over the iterations; above it, means are not reported
_MAX_UNCERTAIN = 0.25


class Job:
    """One job's run, joined from its logs; tables are read and computed on first access.

    Times ending in ``_ns`` are CLOCK_REALTIME of the run's reference node. Values that were not measured are missing
    (``pandas.NA``), never 0.

    Attributes:
        path: the run directory.
        run: the run directory as `ringtap.analysis.runs.run.JobRun`.
        nodes: the nodes' logs by name.
    """

    def __init__(self, run: JobRun, workers: Executor | None = None) -> None:
        self.run = run
        self._workers = workers
        self.path = run.path
        folders = sorted(path for path in run.path.glob("nodes/*") if path.is_dir())
        self.nodes: Mapping[str, NodeLogs] = {whole(path.name): NodeLogs(path.absolute()) for path in folders}

    @cached_property
    def work(self) -> iterations.Work:
        """Iterations by the records of the ranks."""
        return iterations.build(self.run, self.nodes)

    @cached_property
    def window_ns(self) -> tuple[int, int]:
        """Start and end of the analysed time: of the iterations, or of the recording if there are no iterations."""
        table = self.work.iterations
        if len(table):
            return int(table["start_ns"].min()), int(table["end_ns"].max())
        return self._recorded_ns()

    def _recorded_ns(self) -> tuple[int, int]:
        """Return the time span covered by the samples of all recorded nodes, on the reference clock."""
        known = [(node.clock, node.recorded_ns) for node in self.nodes.values() if node.recorded_ns[1]]
        spans = [clock.to_reference(np.array(span, np.int64)).tolist() for clock, span in known]
        begin, end = max((span[0] for span in spans), default=0), min((span[1] for span in spans), default=0)
        return (begin, end) if end > begin else (0, 0)

    @cached_property
    def borders(self) -> Borders:
        """Borders of the iterations on the reference clock; without iterations the whole recording is one bin."""
        table = self.work.iterations
        if not len(table):
            begin, end = self.window_ns
            return Borders(
                np.array([begin, end] if end > begin else [], np.int64), np.zeros(int(end > begin), np.int64)
            )
        return Borders.of(table["start_ns"].to_numpy(np.int64), table["end_ns"].to_numpy(np.int64))

    @cached_property
    def borders_at(self) -> dict[str, Borders]:
        """The same borders by each node's own clock."""
        return {
            name: self.borders.shifted(node.clock.from_reference(self.borders.edges_ns))
            for name, node in self.nodes.items()
        }

    @cached_property
    def traffic(self) -> flows.SocketTraffic:
        """Bytes that the sockets sent and received."""
        return flows.measure(self.nodes, self.borders_at, self.borders.bins, self._workers)

    @cached_property
    def _seen(self) -> Mapping[str, node_counters.Seen]:
        """Counters and captures of the nodes, by node."""
        return dict(each_node(self._workers, self.nodes, node_counters.look, self.borders_at.values()))

    @cached_property
    def counted(self) -> byte_accounting.ByteAccounts:
        """Byte accounting by sockets, interface counters and captures."""
        counted = {name: seen.counted for name, seen in self._seen.items()}
        captured = {name: seen.packets for name, seen in self._seen.items() if seen.packets is not None}
        return byte_accounting.measure(self.nodes, counted, captured, self.traffic, self.borders.bins)

    @cached_property
    def _node_tables(self) -> dict[str, pd.DataFrame]:
        return {name: seen.table for name, seen in self._seen.items()}

    @cached_property
    def uncertain_share(self) -> float | None:
        """Uncertain share of a mean over the iterations, from the sampling periods at both ends; None if not known.

        A new connection is sampled less often than a busy one.
        """
        seconds = float(self.work.iterations["iteration_s"].to_numpy(np.float64)[self.measured].sum())
        if not (self.traffic.every_s and self.traffic.all_every_s and seconds > 0):
            return None
        return (self.traffic.every_s + self.traffic.all_every_s) / 2 / seconds

    @property
    def is_too_short(self) -> bool:
        """True if samples are too far apart to count per iteration; the counts are then missing."""
        return (self.uncertain_share or 0.0) > _MAX_UNCERTAIN

    def _pick(self, amounts: Numbers, sampled: bool = True) -> Numbers:
        """Pick the bins of the iterations; NaN for ``sampled`` amounts of a job that `is_too_short`."""
        found = amounts[..., self.borders.bin_of]
        return np.full(found.shape, np.nan) if sampled and self.is_too_short else found

    @cached_property
    def iterations(self) -> pd.DataFrame:
        """Iterations, one row each, in order of time.

        Columns: ``generation`` (number of earlier starts of the job), ``step``, ``start_ns``, ``end_ns``,
        ``iteration_s``; ``warm_up``, ``skipped`` (AMP skipped the step), ``backwards`` (backward passes),
        ``optimizers`` (of a process); ``compute_s`` (forward and backward pass of the rank that took longest),
        ``communication_s``, ``exposed_s`` (communication after the last gradient was ready) and ``overlap_s`` as means
        over the ranks, ``exposed_least_s`` (of the rank that waited least: the cost of the network alone);
        ``last_rank`` (its step ended last), ``slowest_rank`` (its last gradient was ready last; without such times
        ``last_rank``), ``slowest_by_s`` (lateness against the others' median), ``slowest_by_ready`` (true if such times
        are known), ``clock_error_s`` (bound of the error of comparing these ranks' times); ``training_bytes``,
        ``cross_bytes``, ``other_bytes`` (payload by the sockets that sent it, without retransmissions),
        ``packet_<class>_bytes`` (payload by captures; the fourth class ``unclassified`` is used where no sockets were
        recorded), ``nic_tx_bytes`` (L2, networks of all nodes), ``retransmitted_bytes``, ``retransmissions``
        (segments), ``ce_marked`` (packets that arrived marked by a congested queue); then sums over all nodes of the
        counters ``nic_drops`` to ``infiniband_tx_bytes`` of `node_counters.COLUMNS`, without queue backlogs, and
        ``queue_backlog_bytes``, the largest of any node. Of all these counts, a job that `is_too_short` has only those
        by captures.
        """
        table = self.work.iterations.copy()
        traffic = self.traffic
        for kind in flows.CLASSES:
            mine = (traffic.groups["class"] == kind).to_numpy(bool)
            table[f"{kind}_bytes"] = self._column(traffic.total("payload_bytes", mine))
        for kind in (*flows.CLASSES, flows.UNCLASSIFIED):
            table[f"packet_{kind}_bytes"] = self._column(self.counted.by_class.get(kind), sampled=False)
        for name in ("retransmitted_bytes", "retransmissions", "ce_marked"):
            table[name] = self._column(traffic.total(name))
        sent = [wire for wire in self.counted.wires if wire.path == byte_accounting.NETWORK and wire.direction == "tx"]
        counts = [wire.amounts["nic_bytes"] for wire in sent]
        known = [count for count in counts if count is not None]
        table["nic_tx_bytes"] = self._column(np.sum(known, axis=0) if known else None)
        for name in _ALL_SUMS:
            table[name] = self._column(_sum_of(self._node_tables, name))
        found = [node["queue_backlog_bytes"].to_numpy() for node in self._node_tables.values()]
        table["queue_backlog_bytes"] = self._column(np.fmax.reduce(found) if found else None)
        return table

    def _column(self, amounts: Numbers | None, sampled: bool = True) -> pd.Series[Any]:
        """Return amounts per bin as a column of the iterations; NA without amounts."""
        count = len(self.work.iterations)
        values = np.full(count, np.nan) if amounts is None or not count else self._pick(amounts, sampled)
        return pd.Series(values).astype("Float64")

    @cached_property
    def rank_iterations(self) -> pd.DataFrame:
        """Times and traffic of each rank in each iteration.

        Columns: ``iteration`` (row in `iterations`), ``rank``, ``node``, ``pid``, ``process``, ``place`` (index of the
        step in its process), ``begin_ns`` and ``end_ns`` (ends of the previous and of this step of the rank; before the
        first step the start of its forward pass, if DDP logged it), ``step_start_ns``, ``ready_ns`` (its last gradient
        was ready), ``optimizer_s`` (in ``optimizer.step()``), ``compute_s``, ``forward_s``, ``backward_s``,
        ``communication_s``, ``exposed_s``, ``overlap_s``, ``syncs`` (synchronised passes), ``synced_bytes`` (gradients
        handed over in them), ``skipped``, ``backwards``, ``optimizers`` (of the process), ``sent_bytes`` (payload of
        training traffic that its sockets sent), ``retransmissions``, ``cpu_cores`` (processors that its processes kept
        busy).
        """
        table = self.work.rank_iterations.copy()
        for name in ("sent_bytes", "retransmissions", "cpu_cores"):
            table[name] = pd.Series(np.nan, index=table.index, dtype="Float64")
        groups, amounts = self.traffic.groups, self.traffic.amounts
        training = groups[groups["class"] == flows.TRAINING]
        flows_of = training.groupby("from_rank").groups  # labels of the groups are their rows
        rows_of: Mapping[Any, Any] = table.groupby(["rank", "node"]).groups
        found = self.work.processes
        shared = set(found.loc[~found["alone"], "rank"])  # their bytes cannot be assigned to a process
        for (rank, node), rows in rows_of.items():
            bins = self.borders.bin_of[table.loc[rows, "iteration"].to_numpy(np.int64)]
            if node in self.traffic.covered and rank not in shared and self.work.world_size > 1:
                mine = np.asarray(flows_of.get(rank, ()), np.int64)
                covered = self.traffic.covered[str(node)]
                for name, source in (("sent_bytes", "payload_bytes"), ("retransmissions", "retransmissions")):
                    sums = np.where(covered, amounts[source][mine].sum(axis=0), np.nan)
                    table.loc[rows, name] = np.nan if self.is_too_short else sums[bins]
            busy = self._seen[str(node)].cores.get(int(rank))
            if busy is not None:
                table.loc[rows, "cpu_cores"] = busy[bins]
        return table

    @cached_property
    def flows(self) -> pd.DataFrame:
        """Flows: one direction of a TCP connection, one row each, largest payload first.

        Columns: ``class`` (training, cross, other) and ``why``; ``from_node``, ``from``, ``from_port``, ``from_rank``,
        ``to_node``, ``to``, ``to_port``, ``to_rank``; ``local`` (within a node); ``measured_at`` (``sender``, or
        ``receiver`` where the sender was not recorded); ``payload_bytes`` over the recording and
        ``bytes_per_iteration`` over the iterations after warm-up, both without retransmitted bytes;
        ``retransmitted_bytes``, ``retransmissions`` (segments), ``ce_marked`` (packets); ``rtt_us`` (median of the
        kernel's smoothed round-trip times), ``min_rtt_us``; ``busy_s`` (had data to send), ``rwnd_limited_s`` and
        ``sndbuf_limited_s`` (of that, limited by the receiver's window or by the send buffer);
        ``first_ns``, ``last_ns`` by the measuring node's clock.
        """
        table = self.traffic.flows
        measured = self.measured
        if len(measured) and len(table) == len(self.traffic.groups):
            payload = self._pick(self.traffic.amounts["payload_bytes"])[:, measured]
            table = table.assign(bytes_per_iteration=payload.mean(axis=1))
        else:
            table = table.assign(bytes_per_iteration=np.nan)
        table = table.drop(columns=["end", "group"]).sort_values("payload_bytes", ascending=False, ignore_index=True)
        numbers = [name for name in table if str(name).endswith(("_bytes", "_s", "_us", "_iteration"))]
        return table.astype(dict.fromkeys([*numbers, "retransmissions", "ce_marked"], "Float64"))

    @cached_property
    def measured(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Rows of `iterations` that means are taken over: all but warm-up, or all if there is only warm-up."""
        table = self.work.iterations
        chosen = np.flatnonzero(~table["warm_up"].to_numpy(bool)) if len(table) else np.empty(0, np.int64)
        return chosen if len(chosen) else np.arange(len(table))

    @cached_property
    def wires(self) -> pd.DataFrame:
        """Byte accounting of each node, one row per iteration, node, path and direction.

        Columns: ``iteration`` (-1: a run without iterations), ``node``, ``path`` (``network``, or ``loopback``),
        ``direction`` (``tx``, ``rx``), ``interfaces``; ``nic_bytes`` (L2, as counted), ``nic_packets``,
        ``nic_payload_bytes`` (less 66 B of headers per packet, 86 B for IPv6), ``socket_bytes`` (payload of all
        sockets; for ``tx`` with retransmitted bytes), ``packet_payload_bytes`` and ``packet_bytes`` (captured).
        """
        count, found = len(self.work.iterations), self.counted.wires
        numbers = np.arange(count) if count else np.array([-1])[: self.borders.bins]
        keys = {
            "iteration": np.tile(numbers, len(found)),
            **{name: [getattr(wire, name) for wire in found] for name in ("node", "path", "direction")},
            "interfaces": [",".join(wire.interfaces) for wire in found],
        }
        columns: dict[str, Any] = {
            name: np.repeat(np.array(values, object), len(numbers)) if isinstance(values, list) else values
            for name, values in keys.items()
        }
        missing = np.full(len(numbers), np.nan)
        for name in byte_accounting.COLUMNS:
            sampled = not name.startswith("packet_")
            parts = [missing if (part := wire.amounts[name]) is None else self._pick(part, sampled) for wire in found]
            columns[name] = np.concatenate([np.empty(0), *parts])
        table = pd.DataFrame(columns)
        return table.astype(dict.fromkeys(byte_accounting.COLUMNS, "Float64"))

    @cached_property
    def node_iterations(self) -> pd.DataFrame:
        """Counters of each node in each iteration: ``iteration``, ``node`` and `node_counters.COLUMNS`."""
        count = len(self.work.iterations)
        parts = [
            counters.iloc[self.borders.bin_of].assign(iteration=np.arange(count) if count else -1, node=name)
            for name, counters in self._node_tables.items()
        ]
        names = ["iteration", "node", *node_counters.COLUMNS]
        table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=names)
        if self.is_too_short:
            table[[*_ALL_SUMS, "infiniband_rx_bytes", "infiniband_wait"]] = np.nan
        return table[names].astype(dict.fromkeys(node_counters.COLUMNS, "Float64"))

    @cached_property
    def ranks(self) -> pd.DataFrame:
        """Ranks, one row each, means over the iterations after warm-up (`ringtap.analysis.job.stragglers`)."""
        from ringtap.analysis.job.stragglers import summarize

        return summarize(self)

    @cached_property
    def collectors(self) -> pd.DataFrame:
        """State of each collector on each node: ``node``, ``collector``, ``state``, ``reason``, ``remedy``,
        ``missed_samples``.
        """
        from ringtap.analysis.job.collection_status import states

        return states(self.nodes)


def _sum_of(tables: Mapping[str, pd.DataFrame], name: str) -> Numbers | None:
    """Add up a column over the nodes that recorded it; return None if none did."""
    known = [table[name].to_numpy() for table in tables.values() if not table[name].isna().all()]
    return np.sum(known, axis=0) if known else None


def open_job(path: str | Path, workers: Executor | None = None) -> Job:
    """Open the run directory of a job or of one series of a sweep; ``workers`` read its nodes.

    Raises:
        UsageError: not a run directory, or that of a whole sweep.
    """
    run = open_run(path)
    if isinstance(run, SweepRun):
        series = sorted({str(window["directory"]) for window in run.windows})
        which = f": name one of its series, for example {run.path / series[0]}" if series else " without any series"
        raise UsageError(f"{run.path} is a sweep{which}")
    return Job(run, workers)
