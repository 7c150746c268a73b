"""Opens a job's run directory as tables: iterations, flows, ranks, nodes and the states of the collectors."""

from __future__ import annotations

import os
from concurrent.futures import Executor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from ringtap.analysis.job import flows
from ringtap.analysis.job.join_rank_and_node_logs import BATCH_COLUMNS, JobLogs
from ringtap.analysis.job.node_aggregation import ALL_SUMS
from ringtap.analysis.job.throughput_and_epochs import NAMES, Given
from ringtap.analysis.notebook_formatting import AVERAGES, described_table, documented, html_of_text
from ringtap.analysis.runs.run import JobRun, SweepRun, read_run
from ringtap.analysis.runs.samples_to_iterations import Numbers
from ringtap.analysis.runs.traffic_classes import CLASSES
from ringtap.core.check_api_arguments import number, path_of, whole_number
from ringtap.core.errors import UsageError, did_you_mean
from ringtap.core.units import counted

if TYPE_CHECKING:
    from ringtap.analysis.pcap.scan_captures import Progress
    from ringtap.analysis.pcap.single_packets import CapturedPackets


class Job:
    """One job's run, joined from its logs; tables are read and computed on first access.

    Times ending in ``_ns`` are CLOCK_REALTIME of the run's reference node. Values that were not measured are missing
    (``pandas.NA``), never 0.

    Attributes:
        path: the run directory.
        nodes: names of its nodes.
        logs: the logs that the tables are computed from.
    """

    def __init__(
        self, run: JobRun, workers: Executor | None = None, given: Given | None = None, derived: Path | None = None
    ) -> None:
        self.path = run.path
        self.logs = JobLogs(run, workers, given, derived)
        self.nodes = list(self.logs.nodes)

    def __repr__(self) -> str:
        processes = counted(len(self.logs.run.step_files), "rank process", "rank processes")
        status = self.logs.run.info.get("status", "status unknown")
        return f"<Job {self.path}: {status}, {counted(len(self.nodes), 'node')}, {processes}>"

    def _repr_html_(self) -> str:
        return html_of_text(self.report())

    @property
    @described_table(
        {
            "phase": "number of the phase, from 1",
            "shown": "True for the phase that the other tables describe",
            "what": "its optimizers, and their steps in an iteration",
            "mode": "what ends an iteration: each ``step``, the last step of a ``round`` of several optimizers, each "
            "step of the ``most frequent optimizer`` (where these make no regular rounds), or a ``mark`` of the "
            "program",
            "ranks, world_size": "ranks that stepped, and ranks by their logs; 0: not known",
            "starts": "starts of the job in which it occurred",
            "stretches": "stretches of consecutive steps that it consists of",
            "steps": "recorded steps of all ranks",
            "left_out": "those of them that belong to no whole iteration",
            "iterations": "iterations that have a beginning and an end",
            "iteration_median_s, iteration_mean_s, iteration_min_s, iteration_max_s": "their times without the first "
            "of a stretch, which lacks what came before its forward pass",
            "iterations_s": "the sum of all",
            "begin_ns, end_ns": "begin of its first step and end of its last one",
            "node, pid": "its first process",
            "is_concurrent": "another job's phase ran at the same time",
        }
    )
    def phases(self) -> pd.DataFrame:
        """Training phases, one row each, in order of time.

        A phase is a world of ranks, the optimizers that step together, and a stretch of time. All other tables describe
        the phase that took the most time, or the one that `ringtap.open_job` was asked for.
        """
        table = self.logs.work.phases.reset_index()
        table.insert(1, "shown", table["phase"] == self.logs.work.phase)
        names = ["phase", "shown", "what", "mode", "ranks", "world_size", "starts", "stretches", "steps", "left_out"]
        names += ["iterations", *(f"iteration_{name}_s" for name in ("median", "mean", "min", "max")), "iterations_s"]
        return table[[*names, "begin_ns", "end_ns", "node", "pid", "is_concurrent"]]

    @property
    @described_table(
        {
            "iteration": "number of the iteration, from 0",
            "generation": "number of earlier starts of the job",
            "stretch": "number of the stretch of steps that it belongs to; a new optimizer begins a new one",
            "step": "number of the step that ends it, from 0 in each stretch",
            "start_ns, end_ns": "ends of the previous and of this step at the slowest rank",
            "iteration_s": "time between them, by CLOCK_MONOTONIC",
            "warm_up": "True for the first iterations, which means leave out",
            "skipped": "AMP skipped the step",
            "backwards": "backward passes",
            "optimizers": "optimizers of a process",
            "compute_s": "forward and backward pass (with Horovod, backward pass) of the rank that took longest",
            "communication_s": "communication, mean over the ranks",
            "exposed_s": "communication after the last gradient was ready, mean over the ranks",
            "overlap_s": "communication during the backward pass, mean over the ranks",
            "unattributed_s": "rest of the iteration, mean over the ranks: data loading, Python, waiting elsewhere",
            "exposed_least_s": "exposed communication of the rank that waited least: the cost of the network alone",
            "last_rank": "the rank whose step ended last",
            "slowest_rank": "the rank whose last gradient was ready last; without such times ``last_rank``",
            "slowest_by_s": "its lateness against the median of the others",
            "clock_error_s": "bound of the error of comparing these ranks' times",
            "slowest_by_ready": "True if the times of the last gradients are known",
            "training_bytes, cross_bytes, other_bytes": "payload of this class by the sockets that sent it, without "
            "retransmissions",
            "packet_training_bytes, packet_cross_bytes, packet_other_bytes": "the same by captures: each byte once",
            "packet_unclassified_bytes": "captured payload of nodes without a socket log",
            "retransmitted_bytes, retransmissions": "what the sockets of all nodes sent again",
            "ce_marked": "packets that arrived marked by a congested queue",
            "nic_tx_bytes": "bytes that the interfaces of all nodes sent to the network (L2)",
            "nic_drops, queue_drops, segments_retransmitted, pause_frames": "sums over the nodes of the counters in "
            "`node_iterations`",
            "ecn_marks, cnp_sent, cnp_handled, infiniband_tx_bytes": "likewise",
            "queue_backlog_bytes": "largest backlog of a queue of any node",
        }
    )
    def iterations(self) -> pd.DataFrame:
        """Iterations, one row each, in order of time.

        A job that is too short for its samples has only the counts by captures.
        """
        table = self.logs.work.iterations.copy()
        if averaged := self.logs.averages:
            table.attrs[AVERAGES] = averaged
        for kind in CLASSES:
            table[f"{kind}_bytes"] = self._column(self.logs.traffic.total(f"{kind}_bytes"))
        for kind in (*CLASSES, flows.UNCLASSIFIED):
            table[f"packet_{kind}_bytes"] = self._column(self.logs.captured.by_class.get(kind), sampled=False)
        for name in ("retransmitted_bytes", "retransmissions", "ce_marked"):
            table[name] = self._column(self.logs.traffic.total(name))
        for name in ("nic_tx_bytes", *ALL_SUMS, "queue_backlog_bytes"):
            table[name] = self._column(self.logs.sums.get(name))
        return table

    def _column(self, amounts: Numbers | None, sampled: bool = True) -> pd.Series[Any]:
        """Return amounts per bin as a column of the iterations; NA without amounts."""
        values = np.full(len(self.logs.work.iterations), np.nan)
        if amounts is not None and len(values) and not (sampled and self.logs.is_too_short):
            values = amounts[self.logs.borders.bin_of]
        return pd.Series(values).astype("Float64")

    @property
    @described_table(BATCH_COLUMNS["rank_iterations"])
    def rank_iterations(self) -> pd.DataFrame:
        """Times and traffic of each rank in each iteration."""
        table = self.logs.whole("rank_iterations")
        return table.sort_values(["iteration", "rank"], kind="stable", ignore_index=True)

    @property
    @described_table(
        {
            "flow": "number of the flow, from 0",
            "traffic_class": "training, cross or other",
            "why": "the reason for this class",
            "source_node, source, source_port, source_rank": "the sender",
            "destination_node, destination, destination_port, destination_rank": "the receiver",
            "local": "True within a node",
            "measured_at": "``sender``, or ``receiver`` where the sender was not recorded",
            "payload_bytes": "payload over the recording, without retransmitted bytes",
            "retransmitted_bytes, retransmissions": "what the sender sent again",
            "ce_marked": "packets that arrived marked by a congested queue",
            "rtt_us": "median of the kernel's smoothed round-trip times",
            "min_rtt_us": "shortest round-trip time",
            "busy_s": "time in which the sender had data to send, up to the last byte that arrived",
            "rwnd_limited_s, sndbuf_limited_s": "part of it limited by the receiver's window or the send buffer",
            "first_ns, last_ns": "first and last sample, by the measuring node's clock",
            "family": "2 for IPv4, 10 for IPv6",
            "bytes_per_iteration": "payload per iteration after warm-up",
        }
    )
    def flows(self) -> pd.DataFrame:
        """Flows: one direction of a TCP connection, one row each, largest payload first."""
        table = self.logs.traffic.flows
        is_known = self.logs.traffic.by_flow and not self.logs.is_too_short
        table = table.assign(bytes_per_iteration=self.logs.traffic.means if is_known else np.full(len(table), np.nan))
        table = table.drop(columns=["end", "group"]).iloc[self.logs.flow_order].reset_index(drop=True)
        table.insert(0, "flow", np.arange(len(table)))
        numbers = [name for name in table if str(name).endswith(("_bytes", "_s", "_us", "_iteration"))]
        return table.astype(dict.fromkeys([*numbers, "retransmissions", "ce_marked"], "Float64"))

    @property
    @described_table(
        {
            "iteration": "number of the iteration, as in `iterations`",
            "flow": "number of the flow, as in `flows`",
            "payload_bytes": "payload without retransmitted bytes",
            "payload_low_bytes, payload_high_bytes": "bounds of the payload",
            "retransmitted_bytes, retransmissions": "what the sender sent again",
            "ce_marked": "packets that arrived marked by a congested queue",
            "rtt_us": "mean of the kernel's smoothed round-trip times in the samples of the iteration",
            "congestion_window_bytes": "mean of the congestion window in these samples",
            "samples": "number of these samples",
        }
    )
    def socket_iterations(self) -> pd.DataFrame:
        """Flows in each iteration during which they were open, by iteration and flow.

        A socket is sampled at times that are not those of the iterations, so the bytes of the sample at either end of
        an iteration are shared between two iterations. ``payload_bytes`` assumes a constant rate from sample to sample;
        whatever the rate was, the true number lies between ``payload_low_bytes`` and ``payload_high_bytes``.

        Raises:
            UsageError: no sockets were recorded, or flows times iterations exceed 4 million rows.
        """
        from ringtap.analysis.job import sockets_per_iteration

        if not self.logs.traffic.nodes:
            raise UsageError(f"{self.path} has no socket log: record a job with --collect sockets")
        rank = np.empty(len(self.logs.flow_order), np.int64)
        rank[self.logs.flow_order] = np.arange(len(rank))
        found = sockets_per_iteration.measure(self.logs.nodes, self.logs.borders_at, self.logs.traffic.flows, rank)
        if self.logs.is_too_short:
            found[["payload_bytes", "retransmitted_bytes", "retransmissions", "ce_marked"]] = np.nan
        return found.astype({name: "Float64" for name in found if name not in ("iteration", "flow", "samples")})

    @property
    @described_table(BATCH_COLUMNS["byte_accounts"])
    def byte_accounts(self) -> pd.DataFrame:
        """Byte accounting of each node, one row per iteration, node, path and direction."""
        return self.logs.whole("byte_accounts")

    @property
    @described_table(BATCH_COLUMNS["node_iterations"])
    def node_iterations(self) -> pd.DataFrame:
        """Counters of each node in each iteration."""
        return self.logs.whole("node_iterations")

    @property
    @described_table(
        {
            "rank, node": "rank and its node",
            "iterations": "iterations after warm-up",
            "compute_s, forward_s, backward_s, communication_s": "as in `rank_iterations`",
            "exposed_s, overlap_s, optimizer_s": "as in `rank_iterations`",
            "unattributed_s": "rest of its iterations: data loading, Python, waiting outside of these phases",
            "sent_bytes, retransmissions, cpu_cores": "as in `rank_iterations`",
            "slowest, slowest_share": "number and share of the iterations in which it was the slowest rank",
            "slowest_by_s": "median lateness in those",
            "node_other_cores": "processors of its node busy for other programs",
            "node_queue_drops": "packets dropped in queues of its node, per iteration",
            "gpu_utilization_pct": "utilisation of its node's GPUs that the ranks compute on",
            "clock_error_s": "bound of the error of its node's clock",
        }
    )
    def ranks(self) -> pd.DataFrame:
        """Ranks, one row each, means over the iterations after warm-up."""
        from ringtap.analysis.job.stragglers import summarize

        return summarize(self)

    @cached_property
    def diagnosed(self) -> dict[str, Any]:
        """Parts of the mean iteration, and causes that make it longer (`ringtap.analysis.job.diagnosis`)."""
        from ringtap.analysis.job.diagnose_job import diagnose

        return diagnose(self)

    @property
    @described_table(
        {
            "cause": "``slow rank``, ``busy processors``, ``stalls``, ``other traffic``, ``loss``, ``slow link``, "
            "``socket buffers``, ``slower network`` or ``network stalls``",
            "seconds": "what it costs of an iteration, mean",
            "low_s, high_s": "95 % interval of this mean",
            "share": "its share of the mean iteration",
            "is_computed": "True if the cost follows from the capacity of the interfaces, and not from iterations "
            "without the cause",
            "iterations": "number of iterations in which it is",
            "from_s, to_s": "time from the first to the last of them, since the first iteration began",
            "from_low_s, from_high_s": "95 % interval of when it began; missing if it is there from the first "
            "iteration on, or in too few to tell",
            "to_low_s, to_high_s": "likewise, of when it ended",
            "rank, node": "the rank that causes it, and the node of a rank, an interface or a full buffer",
            "within": "kind of work that takes longer: compute, optimizer or elsewhere",
            "here_s, usual_s": "its mean time there, and on the other ranks; of stalls, its median in them, and in the "
            "other iterations",
            "other_cores": "processors of the node that other programs keep busy",
            "run_delay_s, usual_run_delay_s": "how long a slow rank, and the others, wait for a processor in each of "
            "these iterations",
            "source, destination": "nodes between which most of the other traffic, or of the loss, is, or which "
            "full buffers limit",
            "rate_bps, usual_bps": "rate of the other traffic, or payload that the interface and the others can carry",
            "nic, faster_nic": "the interface, and one that is faster but not used",
            "of_training": "payload of the other traffic as a share of the training's",
            "lost_segments": "segments that are lost in each of the iterations",
        }
    )
    def diagnosis(self) -> pd.DataFrame:
        """Causes that make iterations longer and that can be removed, one row each, the costliest first.

        No row means that none was found. ``summary()["diagnosis"]`` also has the parts of the mean iteration, and what
        cannot be told.
        """
        names = ["cause", "seconds", "low_s", "high_s", "share", "is_computed", "iterations", "from_s", "to_s"]
        names += ["from_low_s", "from_high_s", "to_low_s", "to_high_s", "rank", "node", "within", "here_s", "usual_s"]
        names += ["other_cores", "run_delay_s", "usual_run_delay_s", "source", "destination", "rate_bps"]
        names += ["usual_bps", "nic", "faster_nic", "of_training", "lost_segments"]
        rows = [{"cause": row["name"]} | row for row in self.diagnosed["causes"]]
        return pd.DataFrame(rows, columns=names).astype({"rank": "Int64"})

    @property
    @described_table(
        {
            "epoch": "number of the epoch",
            "cumulative_s": "time from the start of the training to the end of the epoch",
            "epoch_s": "time that it took",
            "samples_per_s": "samples or images per second",
            "loss, accuracy": "of the training",
            "validation_loss, validation_accuracy": "of the validation",
        }
    )
    def epochs(self) -> pd.DataFrame:
        """Epochs that the job printed, one row each; empty if no output of the job was found."""
        table = pd.DataFrame(list(self.logs.printed.epochs), columns=["epoch", *NAMES])
        return table.astype({"epoch": "Int64"} | dict.fromkeys(NAMES, "Float64"))

    @property
    @described_table(
        {
            "node, collector": "node and collector",
            "state": "ok, degraded, unavailable, failed or absent",
            "reason": "the reason for it",
            "remedy": "what to do about it",
            "missed_samples": "samples that came too late",
        }
    )
    def collectors(self) -> pd.DataFrame:
        """State of each collector on each node."""
        from ringtap.analysis.job.collection_status import states

        return states(self.logs.nodes)

    def packets(
        self, iteration: int | None = None, filter: str | None = None, *, progress: Progress | None = None
    ) -> CapturedPackets:
        """Read the packets that the run recorded in an iteration, in the order of time on the reference clock.

        Args:
            iteration: number of the iteration, as in `iterations`; None for all packets.
            filter: keep only the packets that this filter in tcpdump's language accepts, as for `read_captures`.
            progress: as for `read_captures`.

        Returns:
            The packets, with ``to_frame()``, ``to_dpkt()``, ``to_scapy()`` and ``to_pcapng()``.

        Raises:
            UsageError: there is no such iteration, no packet of it, or no packets in the run; or the filter is wrong.
        """
        from ringtap.analysis.job.packets_in_time_span import read_slice

        return read_slice(self, iteration, filter, progress=progress).packets

    def table(self, name: str, by: Literal["sample", "iteration"] = "sample") -> pd.DataFrame:
        """Return the log of any collector as a table, also of one that is not ringtap's own.

        Args:
            name: name of the collector, such as ``host``, or of one of its logs, such as ``gpu/gpu0``.
            by: ``sample`` for a row per sample as recorded: ``node``, ``t_ns`` and the log's columns; ``iteration`` for
                a row per iteration and node: growth of each counter and mean of each gauge, NA where it is not known.

        Raises:
            UsageError: no node has such a log, or it has several records per sample and cannot be joined by itself.
        """
        from ringtap.analysis.job import collector_tables

        if by == "sample":
            return collector_tables.samples(self.logs.nodes, name)
        if by != "iteration":
            raise UsageError(
                f"a table by {by!r} is not known: {did_you_mean(by, ('sample', 'iteration'))}by sample or by iteration"
            )
        found = collector_tables.by_iteration(self.logs.nodes, name, self.logs.borders_at)
        return found if len(self.logs.work.iterations) else found.assign(iteration=-1)

    @documented(
        {
            "times_median": "iteration time over the median",
            "flow": "flow with the most retransmissions in the iteration, as in `flows`; NA without any",
            "flow_retransmissions": "segments that it sent again",
        }
    )
    def slow(self, factor: float = 1.5) -> pd.DataFrame:
        """Slow iterations, with what the network did in each, the slowest first.

        Args:
            factor: least time of a slow iteration, in medians of the iterations after warm-up.

        Returns:
            The rows of `iterations` of at least that time, without warm-up. No row means that no iteration is as slow.

        Raises:
            UsageError: the factor is not a positive number, or the run has no iterations.
        """
        from ringtap.analysis.job.stragglers import slower_than

        return slower_than(self, factor)

    def summary(self) -> dict[str, Any]:
        """Return all numbers of the run as plain values, as ``ringtap analyze --json`` prints them; None: not known."""
        from ringtap.analysis.job.summary import summarize

        return summarize(self)

    def report(self) -> str:
        """Return the analysis as text, as ``ringtap analyze`` prints it."""
        from ringtap.analysis.job.summary_text import describe

        return "\n".join(describe(self.summary()))

    def to_parquet(self, folder: str | os.PathLike[str] | None = None) -> Path:
        """Write the tables and the summary, as ``ringtap analyze`` does; return their folder.

        Args:
            folder: the folder, which is made if it is missing; None for ``derived`` in the run directory.

        Raises:
            UsageError: the folder cannot be written, or pyarrow is missing.
        """
        from ringtap.analysis.runs import derived_table_cache

        target = self.path / "derived" if folder is None else path_of(folder, "the folder")
        derived_table_cache.write(
            self, self.summary(), target, derived_table_cache.sources_of(self.path, self.logs.given)
        )
        return target


def open_job(
    path: str | os.PathLike[str],
    workers: Executor | None = None,
    *,
    batch: int | None = None,
    output: str | os.PathLike[str] | None = None,
    target_accuracy: float | None = None,
    derived: str | os.PathLike[str] | None = None,
    phase: int | None = None,
) -> Job:
    """Open the run directory of a job or of one series of a sweep; ``workers`` read its nodes.

    Args:
        path: the run directory.
        workers: executor that reads the nodes; None: this process reads them.
        batch: samples of a rank in an iteration, for samples/s; None: as the plan has it or the job printed it.
        output: file with the job's output, for epochs; None: the output in the run directory, if there is any.
        target_accuracy: validation accuracy whose time the summary gives; None: that of the best epoch.
        derived: folder in which the tables of a long run are made; None: ``derived`` in the run directory.
        phase: number of the training phase that the tables describe, as in `Job.phases`; None: the one that took the
            most time.

    Raises:
        UsageError: not a run directory, or that of a whole sweep, or a fact is wrong.
    """
    if batch is not None and (batch := whole_number(batch, "the batch")) < 1:
        raise UsageError(f"a batch of {batch} has no samples")
    if target_accuracy is not None and not 0 < number(target_accuracy, "the target accuracy") <= 1:
        raise UsageError(f"a target accuracy of {target_accuracy:g} is not a share above 0 and up to 1")
    if phase is not None and (phase := whole_number(phase, "the phase")) < 1:
        raise UsageError(f"phase {phase} does not exist: phases are numbered from 1")
    given = Given(batch, None if output is None else path_of(output, "the job's output"), target_accuracy, phase)
    run = read_run(path)
    if isinstance(run, SweepRun):
        series = sorted({str(window["directory"]) for window in run.windows})
        which = f", or name one of its series, for example {run.path / series[0]}" if series else ""
        raise UsageError(f"{run.path} is a sweep: ringtap report (open_sweep) reads it{which}")
    return Job(run, workers, given, None if derived is None else path_of(derived, "the folder"))
