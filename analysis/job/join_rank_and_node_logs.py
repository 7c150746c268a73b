"""Joins the logs of a job's ranks and nodes into iterations, bins of counters and sums, each on first access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ringtap.analysis.job import byte_accounting, counters_per_iteration, flows, iterations_of_ranks
from ringtap.analysis.job.captured_payload_per_iteration import Packets, read_packets
from ringtap.analysis.job.iterations_of_ranks import computation_by
from ringtap.analysis.job.node_aggregation import Shared, join_rank_sums, join_sums, read_tables
from ringtap.analysis.job.throughput_and_epochs import Given, Printed, read_output
from ringtap.analysis.notebook_formatting import Columns, described
from ringtap.analysis.runs.node_batches import Batches, BatchTable, digest
from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.analysis.runs.read_binary_records import map_records
from ringtap.analysis.runs.run import JobRun, averages_of
from ringtap.analysis.runs.samples_to_iterations import Borders, Integers, Numbers
from ringtap.core.check_api_arguments import instance_of
from ringtap.core.counter_growth import MAX_UNCERTAIN_SHARE

_STEP_BYTES = 80  # of a step's record
# descriptions of the columns of `ringtap.analysis.runs.node_batches.TABLES`
BATCH_COLUMNS: dict[str, Columns] = {
    "rank_iterations": {
        "iteration": "number of the iteration, as in `iterations`",
        "rank, node, pid": "rank, its node and its process",
        "process": "number of the process's step log",
        "place": "number of the step in its process",
        "begin_ns, end_ns": "ends of the previous and of this step of the rank; before the first step the start "
        "of its forward pass, if DDP logged it",
        "iteration_s": "time between them, by CLOCK_MONOTONIC",
        "step_start_ns": "start of ``optimizer.step()``",
        "ready_ns": "the last gradient was ready",
        "optimizer_s": "time in ``optimizer.step()`` of all optimizers, without the passes within",
        "compute_s": "forward and backward pass; with Horovod, the backward pass alone",
        "forward_s, backward_s": "the pass alone",
        "communication_s": "from the first to the last collective",
        "exposed_s": "communication after the last gradient was ready",
        "overlap_s": "communication during the backward pass",
        "syncs": "synchronised passes",
        "synced_bytes": "gradients handed over in them",
        "skipped": "AMP skipped the step",
        "backwards": "backward passes",
        "optimizers": "optimizers of the process",
        "sent_bytes": "payload of training traffic that its sockets sent",
        "retransmissions": "segments that its sockets sent again",
        "cpu_cores": "processors that its processes kept busy",
    },
    "byte_accounts": {
        "iteration": "number of the iteration; -1 for a run without iterations",
        "node": "name of the node",
        "path": "``network`` or ``loopback``",
        "direction": "``tx`` or ``rx``",
        "interfaces": "interfaces that are counted",
        "nic_bytes, nic_packets": "as the interfaces counted them (L2)",
        "nic_payload_bytes": "less 66 B of headers per packet, 86 B for IPv6, and less ``retransmitted_bytes``",
        "socket_bytes": "payload of all sockets, each byte once",
        "packet_payload_bytes, packet_bytes": "payload that was captured, each byte once, and frames",
        "retransmitted_bytes": "captured more than once; without a capture, what the sockets sent again",
    },
    "node_iterations": {
        "iteration": "number of the iteration; -1 for a run without iterations",
        "node": "name of the node",
    }
    | counters_per_iteration.COLUMNS,
}


class JobLogs:
    """The logs of one job's run, joined.

    Args:
        run: the run directory.
        workers: executor that reads the nodes; None: this process reads them.
        given: facts about the training that the logs may not hold.
        derived: folder of the tables on disk; those of a long run are made there. None: that of the run directory.

    Attributes:
        nodes: the nodes' logs by name.
    """

    def __init__(self, run: JobRun, workers: Executor | None, given: Given | None, derived: Path | None) -> None:
        self.run, self.given, self.derived = run, given or Given(), derived or run.path / "derived"
        self._workers = None if workers is None else instance_of(workers, Executor, "workers")
        self.nodes: Mapping[str, NodeLogs] = run.nodes

    @cached_property
    def averages(self) -> str:
        """A sentence on the loads that the iterations of a sweep's series are from (`averages_of`); else empty."""
        return averages_of(self.run)

    @cached_property
    def batches(self) -> Batches:
        """The nodes in batches, in which their logs are read."""
        most = max((path.stat().st_size for path in self.run.step_files if path.exists()), default=0) // _STEP_BYTES
        return Batches(self.nodes, dict.fromkeys(self.nodes, most + 1), self.derived, self._workers)

    @cached_property
    def work(self) -> iterations_of_ranks.Work:
        """Iterations by the records of the ranks."""
        return iterations_of_ranks.build(self.run, self.nodes, self.batches, self.given.phase)

    @cached_property
    def window_ns(self) -> tuple[int, int]:
        """Start and end of the analyzed time: of the iterations, or of the recording if there are no iterations."""
        table = self.work.iterations
        if len(table):
            return int(table["start_ns"].min()), int(table["end_ns"].max())
        return self._recorded_ns()

    def _recorded_ns(self) -> tuple[int, int]:
        """Return the time span covered by the samples of all recorded nodes, on the reference clock.

        Without any sample (a job recorded with packets alone), that of their agents; (0, 0) if none is known.
        """
        nodes = self.nodes.values()
        known = [(node.clock, node.recorded_ns) for node in nodes if node.recorded_ns[1]]
        known = known or [(node.clock, node.agent_ns) for node in nodes if node.agent_ns[1]]
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
        return flows.measure(self.nodes, self.borders, self.measured, self.batches)

    @cached_property
    def packets_of(self) -> dict[str, Packets]:
        """Captures of the nodes that have some, by node."""
        names = [name for name, node in self.nodes.items() if node.captures]
        read = self.batches.each_node(names, read_packets, [self.borders_at[name] for name in names])
        return dict(zip(names, read, strict=True))

    @cached_property
    def captured(self) -> byte_accounting.Captured:
        """Bytes by the captures of all nodes."""
        return byte_accounting.measure_captured(self.nodes, self.packets_of, self.traffic)

    @cached_property
    def parts(self) -> list[dict[str, BatchTable]]:
        """Tables of each batch of nodes (`ringtap.analysis.job.node_aggregation.read_tables`)."""
        shared = Shared(
            self.borders,
            self.work.iterations["iteration_s"].to_numpy(np.float64),
            self.measured,
            self.is_too_short,
            replace(self.traffic, totals={}),
            digest(self.traffic.totals),
            self.work.unclear_ranks,
            self.work.world_size,
        )
        names = self.batches.names
        packets = [{name: self.packets_of[name] for name in some if name in self.packets_of} for some in names]
        return list(self.batches.each("tables", read_tables, self.work.ranks, packets, shared=(shared,)))

    @cached_property
    def sums(self) -> dict[str, Numbers]:
        """Counters of all nodes by bin; one that no node recorded is missing."""
        return join_sums(part["sums"].read() for part in self.parts)

    @cached_property
    def of_nodes(self) -> pd.DataFrame:
        """Means, sums and extremes of each node's counters (``nodes`` of `parts`), by node."""
        return pd.concat([part["nodes"].read() for part in self.parts]).set_index("node")

    @cached_property
    def rank_sums(self) -> pd.DataFrame:
        """Sums of each rank, and the numbers of their values (``rank_sums`` of `parts`), by rank."""
        return join_rank_sums(part["rank_sums"].read() for part in self.parts)

    @cached_property
    def recorded_steps(self) -> int:
        """Number of steps in the logs of all ranks."""
        return sum(len(map_records(path)[1]) for path in self.run.step_files if path.exists())

    def in_batches(self, name: str) -> Iterator[pd.DataFrame]:
        """Yield a table of `ringtap.analysis.runs.node_batches.TABLES` by batches, each by its own order of rows."""
        for part in self.parts:
            yield described(part[name].read(), BATCH_COLUMNS[name])

    def whole(self, name: str) -> pd.DataFrame:
        """Return a table of all batches."""
        tables = list(self.in_batches(name))
        some = [table for table in tables if len(table)] or tables[:1]
        return some[0] if len(some) == 1 else pd.concat(some, ignore_index=True)

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
        return (self.uncertain_share or 0.0) > MAX_UNCERTAIN_SHARE

    @cached_property
    def flow_order(self) -> Integers:
        """Rows of the flows as measured, by the number of the flow: largest payload first."""
        return np.argsort(-self.traffic.flows["payload_bytes"].to_numpy(np.float64), kind="stable").astype(np.int64)

    @cached_property
    def measured(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Rows of `work.iterations` that means are taken over: all but warm-up, or all if there is only warm-up."""
        return after_warm_up(self.work.iterations)

    @cached_property
    def printed(self) -> Printed:
        """Epochs and batch size that the job printed."""
        return read_output(self.run.path, self.given.output)

    @property
    def computation(self) -> str:
        """Name of ``compute_s``: ``compute`` or ``backward pass``."""
        return computation_by(self.work.source)


def after_warm_up(table: pd.DataFrame) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the rows of a table of iterations that means are taken over; all if there is only warm-up."""
    chosen = np.flatnonzero(~table["warm_up"].to_numpy(bool)) if len(table) else np.empty(0, np.int64)
    return chosen if len(chosen) else np.arange(len(table))
