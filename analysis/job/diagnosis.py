"""Finds out why a job is slow: the causes that can be removed, and the seconds of an iteration that each costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ringtap.analysis.job import iteration_budget
from ringtap.analysis.job.iteration_budget import (
    CAUSES,
    LOSS,
    OTHER_TRAFFIC,
    SLOW_LINK,
    CauseOrPart,
    NetworkEvidence,
    RankTimes,
)
from ringtap.analysis.job.run import Job
from ringtap.analysis.job.stragglers import sending_capacity_bps
from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.analysis.runs.samples_to_iterations import Integers, Numbers, plain
from ringtap.analysis.runs.sockets import LOST
from ringtap.analysis.runs.traffic_classes import TRAINING
from ringtap.core.interface_capacity import interface_with
from ringtap.core.units import counted

# fewer iterations do not tell a cause from chance
MIN_ITERATIONS = 20
# of more iterations times ranks than this, evenly spread iterations stand for all
_MAX_CELLS = 2_000_000
_BLOCK_CELLS = 500_000
_TIMES = ("iteration_s", "exposed_s", "compute_s", "optimizer_s", "overlap_s")
# a cause that is in so many iterations is there throughout
_THROUGHOUT_SHARE = 0.95
# an interface is slow if it carries less than this share of what the median of all does
_SLOW_SHARE = 0.9
# full buffers that limit the largest connection for less than this share of its time are not a cause
_LIMITED_SHARE = 0.1
# other traffic leaves at least this share of an interface's capacity
_LEAST_LEFT = 0.05
# by how much DDP's times, by a clock that may be slewed, may exceed the iteration, and the iterations of the ranks may
# differ from those of the job
_MAX_EXCESS = 0.01
_INTERFACE = ["node", "nic", "direction"]


def diagnose(job: Job) -> dict[str, Any]:
    """Return where the time of an iteration goes, and which causes could be removed.

    Returns:
        ``why``, the reason why nothing is known, empty otherwise; ``iteration_s``, the mean of the ``iterations`` of
        which all times are known, of how many after warm-up (``of``); ``parts``, which add up to it: ``name``,
        ``seconds``, ``low_s`` and ``high_s`` (95 % interval), and ``share``; ``causes``, those of the parts that can be
        removed, the costliest first, with what `_cause` returns; ``line``, the interface that needs longest for the
        training's payload: ``node``, ``nic``, ``bytes``, ``capacity_bps`` and ``seconds``; and ``unknown``, what cannot
        be told: ``cause`` and ``why``.
    """
    found: dict[str, Any] = {"why": "", "iteration_s": None, "iterations": 0, "of": 0, "parts": [], "causes": []}
    found |= {"line": None, "unknown": []}
    if why := _why_not(job):
        return found | {"why": why}
    rows, times = _rank_times(job, job.measured)
    if why := _why_no_parts(job, rows, times):
        return found | {"why": why}
    network = _Network.read(job, rows)
    try:
        budget = iteration_budget.split(times, network.evidence)
    except ValueError as error:
        return found | {"why": str(error)}
    start_s = (job.work.iterations["start_ns"].to_numpy(np.int64)[rows] - job.window_ns[0]) / 1e9
    parts: list[dict[str, Any]] = []
    for share in budget.shares:
        part: dict[str, Any] = {
            "name": share.name,
            "seconds": share.seconds,
            "low_s": share.low_s,
            "high_s": share.high_s,
        }
        part["share"] = share.seconds / budget.iteration_s
        parts.append(part | (_cause(job, share, times, start_s, network) if share.name in CAUSES else {}))
    causes = sorted((part for part in parts if part["name"] in CAUSES), key=lambda part: -part["seconds"])
    unknown = [*network.unknown, *({"cause": name, "why": why} for name, why in budget.uncosted)]
    found |= {"iteration_s": budget.iteration_s, "iterations": len(rows), "of": len(job.measured)}
    found |= {"parts": parts, "causes": causes}
    return found | {"line": network.line, "unknown": unknown}


def _why_not(job: Job) -> str:
    """Return why the records of a job do not say what makes it slow; empty if they may."""
    count = len(job.measured)
    if count < MIN_ITERATIONS:
        few = f"{counted(count, 'iteration')} after warm-up are too few to tell a cause from chance"
        return f"{few} ({MIN_ITERATIONS} are needed)"
    if job.work.source != "ddp":
        return job.work.why
    return f"{job.work.missing_ranks} left no steps" if job.work.missing_ranks else ""


def _why_no_parts(job: Job, rows: Integers, times: RankTimes) -> str:
    """Return why the times of the ranks do not give the parts of an iteration; empty if they do."""
    if len(rows) < MIN_ITERATIONS:
        known = f"DDP timed all ranks in {len(rows)} of {counted(len(job.measured), 'iteration')}"
        return f"{known}, and {MIN_ITERATIONS} are needed"
    if (times.work_s["elsewhere"].mean(axis=0) < -_MAX_EXCESS * times.mean_s).any():
        return "the recorded phases of a rank take longer than its iterations"
    if abs(float(times.iteration_s.mean()) - times.mean_s) > _MAX_EXCESS * times.mean_s:
        return "the iterations of the ranks do not add up to those of the job"
    return ""


def _rank_times(job: Job, measured: Integers) -> tuple[Integers, RankTimes]:
    """Return the rows of the iterations in which the phases of all ranks are known, and the times of the ranks."""
    ranks = np.sort(job.work.processes["rank"].unique().astype(np.int64))
    chosen = measured[:: max(-(-len(measured) * len(ranks) // _MAX_CELLS), 1)]
    columns = {name: np.full((len(chosen), len(ranks)), np.nan) for name in _TIMES}
    length = max(_BLOCK_CELLS // len(ranks), 1)
    for begin in range(0, len(chosen), length):
        block = chosen[begin : begin + length]
        for frame in job.work.ranks:
            table = frame.read(["iteration", "rank", *_TIMES], (int(block[0]), int(block[-1]) + 1))
            table = table[table["iteration"].isin(block)]
            row = begin + np.searchsorted(block, table["iteration"].to_numpy(np.int64))
            column = np.searchsorted(ranks, table["rank"].to_numpy(np.int64))
            for name, values in columns.items():
                values[row, column] = table[name].to_numpy(np.float64, na_value=np.nan)
    known = ~np.isnan(np.stack([columns[name] for name in _TIMES])).any(axis=(0, 2))
    rows = chosen[known]
    mean_s = float(job.work.iterations["iteration_s"].to_numpy(np.float64)[rows].mean()) if len(rows) else 0.0
    return rows, RankTimes(ranks, **{name: columns[name][known] for name in _TIMES}, mean_s=mean_s)


def _cause(job: Job, share: CauseOrPart, times: RankTimes, start_s: Numbers, network: _Network) -> dict[str, Any]:
    """Describe a cause.

    Returns:
        ``iterations``, in which it is, of how many (``of``), ``from_s`` and ``to_s``, the time from the first to the
        last of them since the job's first iteration began, and ``is_throughout``; ``is_computed``, True if its cost
        follows from capacities, and ``is_at_most``, True if it may cost less; ``rank``, ``node``, and ``within``, the
        kind of work that takes longer, with its means ``here_s`` and ``usual_s``; of traffic ``source``,
        ``destination`` and ``rate_bps``; of an interface ``node``, ``nic``, ``rate_bps`` and ``usual_bps``; and the
        number of the job's ``nodes``. What does not apply is None.
    """
    affected = share.affected
    where = np.flatnonzero(affected)
    found: dict[str, Any] = {
        "iterations": len(where),
        "of": len(affected),
        "from_s": float(start_s[where[0]]),
        "to_s": float(start_s[where[-1]] + times.iteration_s[where[-1]].max()),
        "is_throughout": len(where) >= _THROUGHOUT_SHARE * len(affected),
        "is_computed": share.is_computed,
        "is_at_most": share.is_at_most,
        "within": share.within or None,
    }
    names = ("rank", "node", "here_s", "usual_s", "other_cores", "source", "destination", "nic", "rate_bps")
    found |= dict.fromkeys((*names, "usual_bps", LOST))
    if share.within:
        spent_s = times.work_s[share.within]
        if share.rank is None:
            here_s, usual_s = spent_s[affected], spent_s[~affected]
        else:
            number = int(np.searchsorted(times.ranks, share.rank))
            here_s, usual_s = spent_s[affected, number], np.delete(spent_s[affected], number, axis=1)
        found |= {"here_s": float(here_s.mean()), "usual_s": float(usual_s.mean()) if usual_s.size else None}
    if share.rank is not None:
        processes = job.work.processes
        node = str(processes.loc[processes["rank"] == share.rank, "node"].iloc[-1])
        found |= {"rank": share.rank, "node": node, "other_cores": _other_cores(job, node)}
    found["nodes"] = len(job.nodes)
    return found | network.facts(share, times)


def _other_cores(job: Job, node: str) -> float | None:
    """Return how many more processors other programs keep busy on a node than on the others; None: not known."""
    cores = job.of_nodes["cpu_other_cores"].astype("float64").dropna()
    if node not in cores or len(cores) < 2:
        return None
    return float(cores[node] - cores.drop(node).median())


@dataclass(frozen=True)
class _Network:
    """Records of the network.

    Attributes:
        evidence: the part of it that says what a cause costs.
        flows: the flows between nodes, one row each, with ``bytes`` and ``lost`` segments in these iterations.
        interfaces: per ``node``, ``nic`` and ``direction``: ``bytes`` of the training per iteration, ``other_bps``, and
            ``capacity_bps`` of payload; empty if one is not known.
        unknown: causes that cannot be told, with the reason.
    """

    evidence: NetworkEvidence
    flows: pd.DataFrame
    interfaces: pd.DataFrame
    unknown: list[dict[str, str]]

    @classmethod
    def read(cls, job: Job, rows: Integers) -> _Network:
        """Read what was recorded in these iterations."""
        why = ""
        if not job.traffic.nodes:
            why = "sockets were not recorded (--collect sockets)"
        elif job.is_too_short:
            why = "sockets were sampled too rarely for iterations as short as these (--every)"
        elif missing := _uncovered(job, rows):
            why = f"the sockets of a node were not recorded in {missing} of {counted(len(rows), 'iteration')}"
        if why:
            unknown = [{"cause": name, "why": why} for name in (OTHER_TRAFFIC, LOSS, SLOW_LINK)]
            return cls(NetworkEvidence(), pd.DataFrame(), pd.DataFrame(), unknown)
        flows, bins = job.traffic.groups, job.borders.bin_of[rows]
        crosses = ~flows["local"].to_numpy(bool)
        is_training = crosses & (flows["traffic_class"] == TRAINING).to_numpy(bool)
        training, other, lost = (np.zeros(len(rows)) for _ in range(3))
        totals = {name: np.zeros(len(flows)) for name in ("payload_bytes", LOST)}
        for number, (groups, _) in enumerate(job.traffic.parts):
            for name, total in totals.items():
                amount = job.traffic.part(number, name)[:, bins]
                np.add.at(total, groups, amount.sum(axis=1))
                own = amount[is_training[groups]].sum(axis=0)
                if name == LOST:
                    lost += own
                else:
                    training, other = training + own, other + amount[(crosses & ~is_training)[groups]].sum(axis=0)
        flows = flows.assign(bytes=totals["payload_bytes"], lost=totals[LOST], is_training=is_training)[crosses]
        seconds = float(job.work.iterations["iteration_s"].to_numpy(np.float64)[rows].sum())
        interfaces = _interfaces(job, flows, len(rows), seconds)
        unknown = [{"cause": SLOW_LINK, "why": interfaces}] if isinstance(interfaces, str) else []
        table = pd.DataFrame() if isinstance(interfaces, str) else interfaces
        is_told = not np.isnan(lost).any()
        if not is_told:
            unknown.append({"cause": LOSS, "why": "a socket log does not tell lost segments from delayed ones"})
        evidence = NetworkEvidence(training, other, lost if is_told else None, *_line_times(table), _limited_share(job))
        return cls(evidence, flows, table, unknown)

    @property
    def line(self) -> dict[str, Any] | None:
        """The interface that needs longest for the training's payload of an iteration; None: not known."""
        if not len(self.interfaces):
            return None
        row = self.interfaces.iloc[int(self.interfaces["seconds"].to_numpy(np.float64).argmax())]
        return {name: plain(row[name]) for name in (*_INTERFACE, "bytes", "capacity_bps", "seconds")}

    def facts(self, share: CauseOrPart, times: RankTimes) -> dict[str, Any]:
        """Return where a cause of the network is."""
        if share.name == SLOW_LINK:
            row = self.interfaces.iloc[int(self.interfaces["capacity_bps"].to_numpy(np.float64).argmin())]
            usual_bps = float(self.interfaces["capacity_bps"].median())
            rates = {"rate_bps": float(row["capacity_bps"]), "usual_bps": usual_bps}
            return rates | {"node": row["node"], "nic": row["nic"]}
        if share.name == OTHER_TRAFFIC and self.evidence.other_bytes is not None:
            seconds = float(times.iteration_s[share.affected].mean(axis=1).sum())
            rate_bps = 8 * float(self.evidence.other_bytes[share.affected].sum()) / seconds
            return _ends(self.flows[~self.flows["is_training"]], "bytes") | {"rate_bps": rate_bps}
        if share.name == LOSS and self.evidence.lost_segments is not None:
            each = float(self.evidence.lost_segments[share.affected].mean())
            return _ends(self.flows[self.flows["is_training"]], "lost") | {LOST: each}
        return {}


def _uncovered(job: Job, rows: Integers) -> int:
    """Return in how many of these iterations the sockets of a node were not recorded."""
    return int(np.isnan(job.traffic.totals["retransmissions"][job.borders.bin_of[rows]]).sum())


def _ends(flows: pd.DataFrame, most: str) -> dict[str, Any]:
    """Return the two nodes whose flows have the most bytes or lost segments; an address where no node is known."""
    ends = [flows[f"{side}_node"].fillna(flows[side]) for side in ("source", "destination")]
    [(source, destination)] = flows.groupby(ends)[most].sum().nlargest(1).index.tolist()
    return {"source": str(source), "destination": str(destination)}


def _interfaces(job: Job, flows: pd.DataFrame, iterations: int, seconds: float) -> pd.DataFrame | str:
    """Return what each interface of the training carries, and could carry; the reason if it is not known."""
    rows = []
    for side, direction in (("source", "tx"), ("destination", "rx")):
        for (node, address, is_training), part in flows.groupby([f"{side}_node", side, "is_training"]):
            logs, amount = job.nodes.get(str(node)), float(part["bytes"].sum())
            capacity_bps = sending_capacity_bps(logs, [str(address)])
            nic = _interface_of(logs, str(address))
            rows.append((str(node), nic, direction, bool(is_training), amount, capacity_bps, address))
    table = pd.DataFrame(rows, columns=[*_INTERFACE, "is_training", "sum", "capacity_bps", "address"])
    unknown = table[table["is_training"] & (table["sum"] > 0) & table["capacity_bps"].isna()]
    if len(unknown):
        row = unknown.iloc[0]
        return f"it is not known how fast the interface of {row['node']} with the address {row['address']} is"
    by = table.groupby([*_INTERFACE, "is_training"])["sum"].sum().unstack().reindex(columns=[True, False])
    found = pd.DataFrame({"bytes": by[True].fillna(0) / iterations, "other_bps": 8 * by[False].fillna(0) / seconds})
    found = found[found["bytes"] > 0].join(table.groupby(_INTERFACE)["capacity_bps"].min())
    found["seconds"] = 8 * found["bytes"] / found["capacity_bps"]
    return found.reset_index()


def _interface_of(node: NodeLogs | None, address: str) -> str:
    """Return the interface of a node that has an address; the address if it is not known."""
    facts = [] if node is None else [node.info.get(when) or {} for when in ("before", "after")]
    return next((nic for fact in facts if (nic := interface_with(fact, address)) is not None), address)


def _limited_share(job: Job) -> float:
    """Return the share of its busy time in which full buffers limit the training's connection with the most payload."""
    known = job.flows[(job.flows["traffic_class"] == TRAINING) & ~job.flows["local"].astype(bool)]
    known = known[known["busy_s"].notna()].nlargest(1, "payload_bytes")
    busy_s = float(known["busy_s"].sum())
    share = float(known[["rwnd_limited_s", "sndbuf_limited_s"]].sum(axis=1).sum()) / busy_s if busy_s > 0 else 0.0
    return min(share, 1.0) if share >= _LIMITED_SHARE else 0.0


def _line_times(interfaces: pd.DataFrame) -> tuple[float | None, float | None, float | None]:
    """Return ``line_s``, ``usual_line_s`` and ``shared_line_s`` of `NetworkEvidence`."""
    if not len(interfaces):
        return None, None, None
    capacity_bps, bits = interfaces["capacity_bps"], 8 * interfaces["bytes"]
    usual_bps = capacity_bps.median()
    is_slow = capacity_bps < _SLOW_SHARE * usual_bps
    left_bps = (capacity_bps - interfaces["other_bps"]).clip(lower=_LEAST_LEFT * capacity_bps)
    usual_s = (bits / capacity_bps.mask(is_slow, usual_bps)).max() if is_slow.any() else None
    return float((bits / capacity_bps).max()), usual_s, float((bits / left_bps).max())
