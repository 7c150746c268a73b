"""The ranks of a run beside each other: who was slowest, and what differed on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from ringtap.analysis.job.run import Job

PHASES = ("compute_s", "forward_s", "backward_s", "communication_s", "exposed_s", "overlap_s", "optimizer_s")
MEANS = (*PHASES, "unattributed_s", "sent_bytes", "retransmissions", "cpu_cores")
OF_NODE = {"node_other_cores": "cpu_other_cores", "node_queue_drops": "queue_drops", "gpu_utilization_pct": ""}
COLUMNS = ["rank", "node", "iterations", *MEANS, "slowest", "slowest_share", "slowest_by_s", *OF_NODE, "clock_error_s"]


def summarize(job: Job) -> pd.DataFrame:
    """One row a rank.

    Columns: ``rank``, ``node``, ``iterations`` (that are no warm-up), means of the phases in seconds,
    ``unattributed_s`` (the rest of its iterations: data loading, Python, waiting outside of the phases), ``sent_bytes``
    and ``retransmissions`` an iteration, ``cpu_cores``; ``slowest`` (iterations in which it was), ``slowest_share``,
    ``slowest_by_s`` (median lateness in those); of its node ``node_other_cores`` (processors busy for others),
    ``node_queue_drops`` an iteration and ``gpu_utilization_pct``; ``clock_error_s`` of its node.
    """
    measured = job.measured
    table = job.rank_iterations
    table = table[table["iteration"].isin(measured)]
    if not len(table):
        return pd.DataFrame(columns=COLUMNS)
    table = table.assign(unattributed_s=_unattributed_s(job, table))
    by = table.groupby("rank")
    result = by[list(MEANS)].mean()
    result.insert(0, "node", by["node"].last())
    result.insert(1, "iterations", by.size())
    slowest = job.work.iterations.loc[measured, ["slowest_rank", "slowest_by_s"]].dropna()
    counts = slowest["slowest_rank"].value_counts()
    result["slowest"] = counts.reindex(result.index, fill_value=0).astype("int64")
    result["slowest_share"] = result["slowest"] / max(len(measured), 1)
    result["slowest_by_s"] = slowest.groupby("slowest_rank")["slowest_by_s"].median().reindex(result.index)
    nodes = job.node_iterations
    nodes = nodes[nodes["iteration"].isin(measured)].groupby("node").mean(numeric_only=True)
    for name, source in OF_NODE.items():
        result[name] = result["node"].map(nodes[source or name])
    errors = {name: node.clock.error_ns for name, node in job.nodes.items()}
    result["clock_error_s"] = result["node"].map(errors).astype("Float64") / 1e9
    return result.reset_index()[COLUMNS]


def _unattributed_s(job: Job, table: pd.DataFrame) -> pd.Series[float]:
    """The rest of each iteration after compute, exposed communication and optimizer; NA if one is not known.

    With Horovod the optimizer's step holds the exposed communication, and compute is not known.
    """
    spent = table["compute_s"] + table["exposed_s"] + table["optimizer_s"]
    return (table["iteration"].map(job.work.iterations["iteration_s"]).astype("Float64") - spent).clip(lower=0.0)


def expected_share_limit(ranks: int, iterations: int) -> float:
    """A share of iterations that a rank is slowest in by chance in at most about 1 of 700 runs (3 deviations)."""
    mean = 1 / ranks
    return float(mean + 3 * np.sqrt(mean * (1 - mean) / max(iterations, 1)))
