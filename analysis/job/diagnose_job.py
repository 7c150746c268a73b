"""Reads from a recorded job what its diagnosis needs: the times of its ranks, and the records of its network."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from ringtap.analysis.job import counters_per_iteration
from ringtap.analysis.job.diagnosis import (
    LIMITED_SHARE,
    MIN_ITERATIONS,
    Evidence,
    FlowSum,
    FullBuffers,
    NetworkRecords,
    diagnosis_of,
    nothing_known,
    timed_in,
)
from ringtap.analysis.job.iteration_budget import Mask, RankTimes
from ringtap.analysis.job.run import Job
from ringtap.analysis.job.verdict import named
from ringtap.analysis.runs.samples_to_iterations import Integers
from ringtap.analysis.runs.sockets import LOST
from ringtap.analysis.runs.traffic_classes import TRAINING
from ringtap.core.run_directory_schema import PASS_LOGS, SOCKETS_REC
from ringtap.core.units import counted

# of more iterations times ranks than this, evenly spread iterations stand for all
_MAX_CELLS = 2_000_000
_BLOCK_CELLS = 500_000
_TIMES = ("iteration_s", "exposed_s", "compute_s", "optimizer_s", "overlap_s")
# if the ranks are timed in fewer of the iterations, the length of all of them is looked at first
_MOST = 0.5


def diagnose(job: Job) -> dict[str, Any]:
    """Return why a job is slow, as `ringtap.analysis.job.diagnosis.diagnosis_of` does; times are since its start."""
    if why := _why_not(job):
        return nothing_known(why)
    timed, why_whole = None, job.logs.work.why
    if job.logs.work.source in PASS_LOGS:
        rows, times, share = _rank_times(job, job.logs.measured)
        why_whole = timed_in(len(rows), len(job.logs.measured))
        timed = _of(job, rows, times) if len(rows) >= MIN_ITERATIONS else None
        if timed and share >= _MOST:
            return timed
    every = job.logs.measured[:: max(-(-len(job.logs.measured) // _MAX_CELLS), 1)]
    seconds = job.logs.work.iterations["iteration_s"].to_numpy(np.float64)[every]
    whole = _of(job, every, RankTimes.whole(seconds), why_whole)
    # a few iterations with the times of all ranks may miss what is in the others
    return timed if timed and not named(whole) else whole


def _of(job: Job, rows: Integers, times: RankTimes, why_whole: str = "") -> dict[str, Any]:
    """Return the diagnosis of some iterations."""
    start_s = (job.logs.work.iterations["start_ns"].to_numpy(np.int64)[rows] - job.logs.window_ns[0]) / 1e9
    processes = job.logs.work.processes
    node_of = dict(zip(processes["rank"].tolist(), processes["node"].tolist(), strict=True))
    other_cores, run_delay_s = partial(_other_cores, job), partial(_run_delay_s, job, rows)
    network = _network(job, rows)
    evidence = Evidence(times, len(job.logs.measured), start_s, network, node_of, other_cores, run_delay_s, why_whole)
    return diagnosis_of(evidence)


def _why_not(job: Job) -> str:
    """Return why the records of a job do not say what makes it slow; empty if they may."""
    count = len(job.logs.measured)
    if count < MIN_ITERATIONS:
        few = f"{counted(count, 'iteration')} after warm-up are too few to tell a cause from chance"
        return f"{few} ({MIN_ITERATIONS} are needed)"
    if job.logs.averages:
        return "the iterations are of different loads"
    return job.logs.work.missing_ranks


def _rank_times(job: Job, measured: Integers) -> tuple[Integers, RankTimes, float]:
    """Return the rows of the iterations in which all ranks are timed, their times, and the share of them in all."""
    ranks = np.sort(job.logs.work.processes["rank"].unique().astype(np.int64))
    chosen = measured[:: max(-(-len(measured) * len(ranks) // _MAX_CELLS), 1)]
    columns = {name: np.full((len(chosen), len(ranks)), np.nan) for name in _TIMES}
    length = max(_BLOCK_CELLS // len(ranks), 1)
    for begin in range(0, len(chosen), length):
        block = chosen[begin : begin + length]
        for frame in job.logs.work.ranks:
            table = frame.read(["iteration", "rank", *_TIMES], (int(block[0]), int(block[-1]) + 1))
            table = table[table["iteration"].isin(block)]
            row = begin + np.searchsorted(block, table["iteration"].to_numpy(np.int64))
            column = np.searchsorted(ranks, table["rank"].to_numpy(np.int64))
            for name, values in columns.items():
                values[row, column] = table[name].to_numpy(np.float64, na_value=np.nan)
    known = ~np.isnan(np.stack([columns[name] for name in _TIMES])).any(axis=(0, 2))
    rows = chosen[known]
    mean_s = float(job.logs.work.iterations["iteration_s"].to_numpy(np.float64)[rows].mean()) if len(rows) else 0.0
    times = {name: columns[name][known] for name in _TIMES}
    return rows, RankTimes(ranks, **times, mean_s=mean_s, source=job.logs.work.source), float(known.mean())


def _other_cores(job: Job, node: str) -> float | None:
    """Return how many more processors other programs keep busy on a node than on the others; None: not known."""
    cores = job.logs.of_nodes["cpu_other_cores"].astype("float64").dropna()
    if node not in cores or len(cores) < 2:
        return None
    return float(cores[node] - cores.drop(node).dropna().median())


def _run_delay_s(job: Job, rows: Integers, rank: int, affected: Mask) -> float | None:
    """Return how long a rank waits for a processor in some of the iterations, mean; None: not known."""
    processes = job.logs.work.processes
    mine = processes[processes["rank"] == rank]
    if len(mine) != 1:  # it was started again
        return None
    logs, bins = job.logs.nodes[mine["node"].iloc[0]], job.logs.borders.bin_of[rows[affected]]
    borders = job.logs.borders.shifted(logs.clock.from_reference(job.logs.borders.edges_ns))
    return counters_per_iteration.mean_run_delay_s(logs, int(mine["pid"].iloc[0]), borders, bins)


def _network(job: Job, rows: Integers) -> NetworkRecords:
    """Return what was recorded of the network in these iterations."""
    if not len(rows):
        return NetworkRecords.missing("no iteration has the times of all ranks")
    if not job.logs.traffic.nodes:
        is_recorded = any(node.names(SOCKETS_REC) for node in job.logs.nodes.values())
        why = "no TCP connection was seen" if is_recorded else "sockets were not recorded (--collect sockets)"
        return NetworkRecords.missing(why)
    if job.logs.is_too_short:
        return NetworkRecords.missing("sockets were sampled too rarely for iterations as short as these (--every)")
    if missing := _uncovered(job, rows):
        some = f"{missing} of {counted(len(rows), 'iteration')}"
        return NetworkRecords.missing(f"the sockets of a node were not recorded in {some}")
    flows, bins = job.logs.traffic.groups, job.logs.borders.bin_of[rows]
    crosses = ~flows["local"].to_numpy(bool)
    is_training = crosses & (flows["traffic_class"] == TRAINING).to_numpy(bool)
    training, other, lost = (np.zeros(len(rows)) for _ in range(3))
    totals = {name: np.zeros(len(flows)) for name in ("payload_bytes", LOST)}
    for number, (groups, _) in enumerate(job.logs.traffic.parts):
        for name, total in totals.items():
            amount = job.logs.traffic.part(number, name)[:, bins]
            np.add.at(total, groups, amount.sum(axis=1))
            own = amount[is_training[groups]].sum(axis=0)
            if name == LOST:
                lost += own
            else:
                training, other = training + own, other + amount[(crosses & ~is_training)[groups]].sum(axis=0)
    by = ["source_node", "source", "destination_node", "destination", "is_training"]
    table = flows.assign(**totals, is_training=is_training)[crosses]
    sums = table.groupby(by, dropna=False)[list(totals)].sum().reset_index()
    nodes = {name: sums[name].astype(object).where(sums[name].notna(), None) for name in by if name.endswith("node")}
    known = [FlowSum(*row) for row in sums.assign(**nodes).itertuples(index=False, name=None)]
    seconds = float(job.logs.work.iterations["iteration_s"].to_numpy(np.float64)[rows].sum())

    def facts_of(node: str) -> list[dict[str, Any]]:
        logs = job.logs.nodes.get(node)
        return [] if logs is None else logs.facts

    return NetworkRecords.of(training, other, lost, known, seconds, facts_of, _full_buffers(job))


def _uncovered(job: Job, rows: Integers) -> int:
    """Return in how many of these iterations the sockets of a node were not recorded."""
    return int(np.isnan(job.logs.traffic.totals["retransmissions"][job.logs.borders.bin_of[rows]]).sum())


def _full_buffers(job: Job) -> FullBuffers | None:
    """Return the training's connection that full buffers limit for the longest time, if that is long.

    The exchange waits for the connection that needs longest, which may be any: those of a ring carry the same payload.
    """
    known = job.flows[(job.flows["traffic_class"] == TRAINING) & ~job.flows["local"].astype(bool)]
    known = known[known["busy_s"].notna()]
    if known.empty:
        return None
    limited_s = known[["rwnd_limited_s", "sndbuf_limited_s"]].to_numpy(np.float64)
    number, busy_s = int(limited_s.sum(axis=1).argmax()), float(known["busy_s"].max())
    by_receiver_s, by_sender_s = limited_s[number].tolist()
    if not busy_s or by_receiver_s + by_sender_s < LIMITED_SHARE * busy_s:
        return None
    share = min((by_receiver_s + by_sender_s) / busy_s, 1.0)
    flow = known.iloc[number]
    source, destination = (
        str(flow[end] if pd.isna(flow[f"{end}_node"]) else flow[f"{end}_node"]) for end in ("source", "destination")
    )
    return FullBuffers(share, source, destination, by_receiver_s >= by_sender_s)
