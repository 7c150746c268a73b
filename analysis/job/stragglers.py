"""Finds stragglers: means of each rank, the slowest rank, slow iterations, and the measures that differ there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ringtap.analysis.job.node_aggregation import MEANS
from ringtap.analysis.job.run import Job
from ringtap.analysis.runs.samples_to_iterations import plain
from ringtap.core.check_api_arguments import number
from ringtap.core.errors import UsageError
from ringtap.core.interface_capacity import sending_capacity_bps
from ringtap.core.units import counted

OF_NODE = {"node_other_cores": "cpu_other_cores", "node_queue_drops": "queue_drops", "gpu_utilization_pct": ""}
COLUMNS = ["rank", "node", "iterations", *MEANS, "slowest", "slowest_share", "slowest_by_s", *OF_NODE, "clock_error_s"]


def summarize(job: Job) -> pd.DataFrame:
    """Summarize the ranks, one row per rank; columns as in `ringtap.analysis.job.run.Job.ranks`."""
    measured = job.logs.measured
    sums = job.logs.rank_sums
    if not len(sums):
        return pd.DataFrame(columns=COLUMNS)
    result = pd.DataFrame({name: mean_of_sums(sums, name) for name in MEANS})
    result.insert(0, "node", sums["node"])
    result.insert(1, "iterations", sums["iterations"])
    slowest = job.logs.work.iterations.loc[measured, ["slowest_rank", "slowest_by_s"]].dropna()
    counts = slowest["slowest_rank"].value_counts()
    result["slowest"] = counts.reindex(result.index, fill_value=0).astype("int64")
    result["slowest_share"] = result["slowest"] / max(len(measured), 1)
    result["slowest_by_s"] = slowest.groupby("slowest_rank")["slowest_by_s"].median().reindex(result.index)
    nodes = job.logs.of_nodes
    for name, source in OF_NODE.items():
        result[name] = result["node"].map(nodes[source or name])
    errors = {name: node.clock.error_ns for name, node in job.logs.nodes.items()}
    result["clock_error_s"] = result["node"].map(errors).astype("Float64") / 1e9
    return result.reset_index()[COLUMNS]


def mean_of_sums(sums: pd.DataFrame, name: str) -> pd.Series[float]:
    """Return means from a table of sums with the numbers of their values, ``_count``; NA without a value."""
    return sums[name] / sums[f"{name}_count"].mask(sums[f"{name}_count"] == 0)


def expected_share_limit(ranks: int, iterations: int) -> float:
    """Return the share of slowest iterations that a rank exceeds by chance in about 1 of 700 runs (3 sigma)."""
    mean = 1 / ranks
    return float(mean + 3 * np.sqrt(mean * (1 - mean) / max(iterations, 1)))


# smallest difference that is reported: as a share of the larger side, and for times as a share of an iteration
_MIN_SHARE = 0.05
_MIN_SECONDS_SHARE = 0.01
# a rank whose lateness costs less than this share of an iteration does not stand out
_MIN_LATE_SHARE = 0.02
# column of the ranks -> (description, unit, smallest reported difference)
_RANK_MEASURES = {
    "compute_s": ("compute (forward and backward pass)", "s", None),
    "optimizer_s": ("optimizer step", "s", None),
    "unattributed_s": ("time not attributed (loading data, Python, waiting outside of DDP)", "s", None),
    "retransmissions": ("retransmitted segments per iteration", "", 0.5),
    "cpu_cores": ("processors busy for the rank", "", 0.1),
    "node_other_cores": ("processors of its node busy for other programs than the job", "", 0.1),
    "node_queue_drops": ("packets dropped per iteration in its node's queues", "", 0.5),
    "gpu_utilization_pct": ("GPU utilisation of its node in %", "", 5.0),
}
# the same by column of the iterations
_ITERATION_MEASURES = {
    "compute_s": ("compute", "s", None),
    "exposed_s": ("exposed communication", "s", None),
    "unattributed_s": ("time not attributed (loading data, Python, waiting outside of DDP)", "s", None),
    "cross_bytes": ("cross traffic", "bytes", 10_000.0),
    "other_bytes": ("other traffic", "bytes", 10_000.0),
    "retransmissions": ("retransmitted segments", "", 0.5),
    "ce_marked": ("packets marked by congested queues", "", 0.5),
    "queue_drops": ("packets dropped in queues", "", 0.5),
    "queue_backlog_bytes": ("largest backlog in a queue", "bytes", 10_000.0),
    "pause_frames": ("pause frames", "", 0.5),
    "cnp_handled": ("congestion notifications handled", "", 0.5),
    "cpu_other_cores": ("processors busy for other programs than the job", "", 0.1),
}
# a lower value of these on the slowest rank explains nothing
_BAD_WHEN_HIGH = {*_RANK_MEASURES, *_ITERATION_MEASURES} - {"cpu_cores", "gpu_utilization_pct"}
SLOW_SHARE = 0.05
SLOWER = 1.05  # smallest reported ratio of slow iterations to the mean of the faster half
MIN_ITERATIONS = 40


def slowest(job: Job) -> dict[str, Any] | None:
    """Return the rank that is slowest most often, and the measures that differ on it; None without several ranks.

    Also None if even a rank that is slowest in every iteration is within chance (for 2 ranks up to 9 iterations).

    ``stands_out`` is true if the rank is slowest more often than chance gives (three standard deviations), and its
    median lateness exceeds the median clock error, if known, and 2 % of the median iteration.
    """
    ranks, table = job.ranks, job.logs.work.iterations.iloc[job.logs.measured]
    if len(ranks) < 2 or (limit := expected_share_limit(len(ranks), len(table))) >= 1:
        return None
    top = ranks.iloc[int(ranks["slowest"].to_numpy(np.int64).argmax())]
    mine = table[(table["slowest_rank"] == top["rank"]).fillna(False)]
    by_s, error_s = (plain(mine[name].dropna().median()) for name in ("slowest_by_s", "clock_error_s"))
    certain = error_s is None or by_s is None or by_s > error_s
    iteration_s = float(table["iteration_s"].median())
    often = bool(top["slowest_share"] > limit)
    by_share = by_s / iteration_s if by_s is not None and iteration_s > 0 else None
    costs = by_share is not None and by_share > _MIN_LATE_SHARE
    others = ranks[ranks["rank"] != top["rank"]]
    sides = {name: (top[name], others[name].astype("Float64").mean()) for name in _RANK_MEASURES}
    return {
        "rank": int(top["rank"]),
        "node": str(top["node"]),
        "iterations": int(top["slowest"]),
        "of": len(table),
        "share": float(top["slowest_share"]),
        "share_by_chance": 1 / len(ranks),
        "by_s": by_s,
        "by": "last gradient ready" if bool(mine["slowest_by_ready"].all()) else "step ended",
        "clock_error_s": error_s,
        "by_share": by_share,
        "certain": bool(certain),
        "by_chance": not often,
        "stands_out": bool(certain and often and costs),
        "differences": _differences(_RANK_MEASURES | _of_horovod(job), sides, iteration_s),
    }


def _of_horovod(job: Job) -> dict[str, tuple[str, str, None]]:
    """Return what is described otherwise if only backward passes are timed."""
    return {"compute_s": (job.logs.computation, "s", None)} if job.logs.work.source == "horovod" else {}


def _differences(
    measures: Mapping[str, tuple[str, str, float | None]],
    sides: Mapping[str, tuple[Any, Any]],
    iteration_s: float,
) -> list[dict[str, Any]]:
    """Return the measures that differ enough between two sides: those of times first, the largest before the others."""
    found = []
    for name, (description, unit, least) in measures.items():
        mine, rest = map(plain, sides.get(name, (None, None)))
        if mine is None or rest is None or (mine < rest and name in _BAD_WHEN_HIGH):
            continue
        enough = _MIN_SECONDS_SHARE * iteration_s if least is None else least
        if abs(mine - rest) >= max(enough, _MIN_SHARE * max(abs(mine), abs(rest))):
            found.append({"measure": name, "what": description, "unit": unit, "here": mine, "others": rest})
    return sorted(found, key=lambda one: -abs(one["here"] - one["others"]) if one["unit"] == "s" else 0.0)


# links with less than this share of the payload of the largest one are not compared: round trips decide their rates
_MIN_PAYLOAD_SHARE = 0.1
# a link that is slower than this share of the other links' median rate stands out
_SLOW_LINK_SHARE = 0.9


def links(job: Job) -> dict[str, Any]:
    """Return the training traffic between each two nodes, and the link with the lowest rate.

    The rate of a link is its payload over the time in which its busiest connection had data to send, at most what its
    interface sends: a queue that was idle lets some bytes pass at once, and connections may take turns. ``slowest`` is
    the index in ``rows`` of the link with the lowest rate, None with ``why`` if there are not two rates to compare.
    """
    table = job.flows
    table = table[(table["traffic_class"] == "training") & ~table["local"].astype(bool)]
    rows = []
    ends = [table[f"{side}_node"].fillna(table[side]) for side in ("source", "destination")]
    for (start, end), part in table.groupby(ends, sort=False):
        payload, busy_s = plain(part["payload_bytes"].sum(min_count=1)), plain(part["busy_s"].max())
        row = {"source": str(start), "destination": str(end), "payload_bytes": payload, "busy_s": busy_s}
        row["rate_bps"] = 8 * payload / busy_s if payload is not None and busy_s else None
        node = job.logs.nodes.get(str(start))
        row["capacity_bps"] = sending_capacity_bps(node.facts if node else [], part["source"].unique())
        if row["rate_bps"] and row["capacity_bps"]:
            row["rate_bps"] = min(row["rate_bps"], row["capacity_bps"])
        row["retransmissions"] = plain(part["retransmissions"].sum(min_count=1))
        rows.append(row | {"rtt_us": plain(part["rtt_us"].dropna().median())})
    largest = max((row["payload_bytes"] or 0 for row in rows), default=0)
    known = [
        number
        for number, row in enumerate(rows)
        if row["rate_bps"] is not None and row["payload_bytes"] >= _MIN_PAYLOAD_SHARE * largest
    ]
    found: dict[str, Any] = {"rows": rows, "slowest": None, "others_bps": None, "stands_out": False, "why": ""}
    if len(known) < 2:
        why = "no training traffic between two nodes was recorded"
        if rows and not known:
            why = "no socket log says how long training connections had data to send"
        elif rows:
            why = (
                f"the rate of {len(known)} of {counted(len(rows), 'link')} between nodes is known, and two are compared"
            )
        return found | {"why": why}
    lowest = min(known, key=lambda number: rows[number]["rate_bps"])
    others = float(np.median([rows[number]["rate_bps"] for number in known if number != lowest]))
    stands_out = rows[lowest]["rate_bps"] < _SLOW_LINK_SHARE * others
    return found | {"slowest": lowest, "others_bps": others, "stands_out": bool(stands_out)}


def slow_places(job: Job) -> npt.NDArray[np.int64]:
    """Return the rows of the slowest twentieth of the iterations after warm-up; none if too few or hardly slower."""
    seconds = job.iterations["iteration_s"].to_numpy(np.float64)[job.logs.measured]
    if len(seconds) < MIN_ITERATIONS:
        return np.zeros(0, np.int64)
    slow = _are_slow(seconds)
    if seconds[slow].mean() < SLOWER * seconds[seconds <= np.median(seconds)].mean():
        return np.zeros(0, np.int64)
    return np.asarray(job.logs.measured, np.int64)[slow]


def _are_slow(seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    return seconds >= np.quantile(seconds, 1 - SLOW_SHARE)


def slower_than(job: Job, factor: float) -> pd.DataFrame:
    """Return the iterations of at least ``factor`` medians; columns as in `ringtap.analysis.job.run.Job.slow`.

    Raises:
        UsageError: the factor is not a positive number, or the run has no iterations.
    """
    factor = number(factor, "the factor")
    if not (np.isfinite(factor) and factor > 0):
        raise UsageError(f"a factor of {factor:g} is not a positive number: 1.5 is 50 % longer than the median")
    table = job.iterations.iloc[job.logs.measured]
    if not len(table):
        raise UsageError(f"{job.path} has no iterations, so none is slow")
    ratio = table["iteration_s"] / table["iteration_s"].median()
    slow = table.assign(times_median=ratio)[ratio >= factor].sort_values("iteration_s", ascending=False, kind="stable")
    bins = job.logs.borders.bin_of[slow["iteration"].to_numpy(np.int64)]
    most, worst = np.zeros(len(bins)), np.full(len(bins), -1)
    number_of = np.argsort(job.logs.flow_order)
    for place, (groups, _) in enumerate(
        job.logs.traffic.parts if job.logs.traffic.by_flow and not job.logs.is_too_short else ()
    ):
        resent = np.nan_to_num(job.logs.traffic.part(place, "retransmissions")[:, bins])
        if len(groups):
            above = resent.max(axis=0) > most
            most[above], worst[above] = resent.max(axis=0)[above], number_of[groups[resent.argmax(axis=0)]][above]
    slow["flow"] = pd.array(worst, "Int64")
    slow["flow_retransmissions"] = pd.array(most, "Float64")
    slow.loc[worst < 0, ["flow", "flow_retransmissions"]] = pd.NA
    return slow.reset_index(drop=True)


def slow_iterations(job: Job) -> dict[str, Any] | None:
    """Compare the slowest twentieth of the iterations with the faster half; None with too few iterations."""
    table = job.iterations.iloc[job.logs.measured]
    if len(table) < MIN_ITERATIONS:
        return None
    seconds = table["iteration_s"].to_numpy(np.float64)
    slow, usual = _are_slow(seconds), seconds <= np.median(seconds)
    other_cores = job.logs.sums.get("cpu_other_cores")
    if other_cores is not None:
        table = table.assign(cpu_other_cores=other_cores[job.logs.borders.bin_of[job.logs.measured]])
    sides = {
        name: (table.loc[slow, name].mean(), table.loc[usual, name].mean())
        for name in _ITERATION_MEASURES
        if name in table
    }
    return {
        "iterations": int(slow.sum()),
        "mean_s": float(seconds[slow].mean()),
        "usual_s": float(seconds[usual].mean()),
        "differences": _differences(_ITERATION_MEASURES | _of_horovod(job), sides, float(np.median(seconds))),
    }
