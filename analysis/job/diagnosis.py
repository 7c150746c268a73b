"""Finds out why a job is slow, from its ranks' times and its network's records: the causes, and the cost of each.

The evidence is of a recorded job (`ringtap.analysis.job.diagnose_job`) or of the last minutes of a running one
(`ringtap.analysis.live.diagnose_recent`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ringtap.analysis.job import change_point_interval, iteration_budget
from ringtap.analysis.job.iteration_budget import (
    BUFFERS,
    BUSY_PROCESSORS,
    CAUSES,
    LOSS,
    OTHER_TRAFFIC,
    SLOW_LINK,
    SLOW_RANK,
    STALL,
    STALLS,
    UNUSED_INTERFACE,
    Budget,
    CauseOrPart,
    Mask,
    NetworkEvidence,
    RankTimes,
)
from ringtap.core.interface_capacity import carrier_of, interface_with, sending_capacity_bps, unused_networks
from ringtap.core.units import counted

if TYPE_CHECKING:  # the live view has no pandas
    from ringtap.analysis.runs.samples_to_iterations import Numbers

# fewer iterations do not tell a cause from chance
MIN_ITERATIONS = 20
# a cause that is in so many iterations is there throughout
_THROUGHOUT_SHARE = 0.95
# an interface is slow if it carries less than this share of what the median of all does, or of what unused ones do
_SLOW_SHARE = 0.9
# other traffic leaves at least this share of an interface's capacity
_LEAST_LEFT = 0.05
# by how much DDP's times, by a clock that may be slewed, may exceed the iteration, and the iterations of the ranks may
# differ from those of the job
_MAX_EXCESS = 0.01
# full buffers that limit no connection for this share of the busiest one's time are not a cause
LIMITED_SHARE = 0.1
# a slow rank lacks a processor if it waits for one for this share of what its work takes longer
_RUN_DELAY_SHARE = 0.5
_NO_RUN_DELAY = "how long ranks wait for a processor is not recorded, or not for long enough (--collect host)"
# so many ranks stand for all where their run delays are read
_MAX_RANKS = 16


class FlowSum(NamedTuple):
    """Traffic of all connections from one address to another, of the training or of others.

    Attributes:
        source_node, destination_node: the nodes that have the addresses; None: not recorded.
        source, destination: the addresses.
        is_training: True for the training's traffic.
        payload_bytes: without retransmissions.
        lost_segments: segments that were sent again because the first one had not arrived.
    """

    source_node: str | None
    source: str
    destination_node: str | None
    destination: str
    is_training: bool
    payload_bytes: float
    lost_segments: float


class FullBuffers(NamedTuple):
    """The training's connection that full buffers limit for the longest time.

    Attributes:
        share: this time as a share of that in which the connection that is busiest has data to send; of each iteration,
            or of all.
        source, destination: nodes, or addresses where no node is known.
        is_receiver: True if the destination's buffer limits it, or that the destination reads late; False: the
            source's buffer.
    """

    share: Numbers | float
    source: str
    destination: str
    is_receiver: bool


@dataclass(frozen=True)
class TrainingInterface:
    """One direction of an interface that carries the training.

    Attributes:
        direction: ``tx`` or ``rx``.
        bytes: payload of the training in an iteration.
        other_bps: payload of other traffic.
        capacity_bps: payload that it carries at most.
    """

    node: str
    nic: str
    direction: str
    bytes: float
    other_bps: float
    capacity_bps: float

    @property
    def seconds(self) -> float:
        """The shortest time in which it carries the training's payload of an iteration."""
        return 8 * self.bytes / self.capacity_bps


class UnusedNetwork(NamedTuple):
    """A network of all nodes of the training, which does not use it, and in which its payload needs less time.

    Attributes:
        line_s: the shortest time in which its interfaces carry the training's payload of an iteration.
        nic: its interface on the node whose interface needs longest now.
        capacity_bps: payload that this interface carries at most.
    """

    line_s: float
    nic: str
    capacity_bps: float


@dataclass(frozen=True)
class NetworkRecords:
    """Records of the network in the iterations of a diagnosis.

    Attributes:
        evidence: the part of it that says what a cause costs.
        flows: the flows between nodes.
        interfaces: those that carry the training; empty if their capacity is not known.
        unknown: causes that cannot be told, and why.
        full_buffers: None: they limit no connection.
        unused: a faster network that the training does not use; None: none is known.
    """

    evidence: NetworkEvidence
    flows: Sequence[FlowSum] = ()
    interfaces: Sequence[TrainingInterface] = ()
    unknown: Sequence[tuple[str, str]] = ()
    full_buffers: FullBuffers | None = None
    unused: UnusedNetwork | None = None

    @classmethod
    def missing(cls, why: str) -> NetworkRecords:
        """Return no records, and the reason."""
        return cls(NetworkEvidence(), unknown=[(name, why) for name in (OTHER_TRAFFIC, LOSS, SLOW_LINK)])

    @classmethod
    def of(
        cls,
        training_bytes: Numbers,
        other_bytes: Numbers,
        lost_segments: Numbers,
        flows: Sequence[FlowSum],
        seconds: float,
        facts_of: Callable[[str], Sequence[Mapping[str, Any]]],
        full_buffers: FullBuffers | None = None,
    ) -> NetworkRecords:
        """Combine what was recorded.

        Args:
            training_bytes, other_bytes, lost_segments: by iteration; lost segments are NaN where they are not known.
            flows: the flows between nodes.
            seconds: length of these iterations together.
            facts_of: returns what node.json says about a node.
            full_buffers: None: they limit no connection, or it is not known.
        """
        found = _interfaces(flows, len(training_bytes), seconds, facts_of)
        unknown = [(SLOW_LINK, found)] if isinstance(found, str) else []
        interfaces = [] if isinstance(found, str) else found
        is_told = not np.isnan(lost_segments).any()
        if not is_told:
            unknown.append((LOSS, "a socket log does not tell lost segments from delayed ones"))
        lost = lost_segments if is_told else None
        limited_share = full_buffers.share if full_buffers else 0.0
        unused, line_times = _unused_network(interfaces, facts_of), _line_times(interfaces)
        unused_s = unused.line_s if unused else None
        evidence = NetworkEvidence(training_bytes, other_bytes, lost, *line_times, unused_s, limited_share)
        return cls(evidence, flows, interfaces, unknown, full_buffers, unused)

    @property
    def line(self) -> dict[str, Any] | None:
        """The interface that needs longest for the training's payload of an iteration; None: not known."""
        if not self.interfaces:
            return None
        longest = max(self.interfaces, key=attrgetter("seconds"))
        names = ("node", "nic", "direction", "bytes", "capacity_bps", "seconds")
        return {name: getattr(longest, name) for name in names}

    def facts(self, name: str, affected: Mask, times: RankTimes) -> dict[str, Any]:
        """Return where a cause of the network is that is in some iterations."""
        if name == SLOW_LINK:
            slowest = min(self.interfaces, key=attrgetter("capacity_bps"))
            rates = {"rate_bps": slowest.capacity_bps, "usual_bps": _usual_bps(self.interfaces)}
            return rates | {"node": slowest.node, "nic": slowest.nic}
        if name == UNUSED_INTERFACE and self.unused and self.line:
            rates = {"rate_bps": self.line["capacity_bps"], "usual_bps": self.unused.capacity_bps}
            return rates | {"node": self.line["node"], "nic": self.line["nic"], "faster_nic": self.unused.nic}
        if name == BUFFERS and self.full_buffers:
            _, source, destination, is_receiver = self.full_buffers
            return {"source": source, "destination": destination, "node": destination if is_receiver else source}
        if name == OTHER_TRAFFIC and self.evidence.other_bytes is not None:
            seconds = float(times.iteration_s[affected].mean(axis=1).sum())
            amount, own = (
                0.0 if payload is None else float(payload[affected].sum())
                for payload in (self.evidence.other_bytes, self.evidence.training_bytes)
            )
            of_training = amount / own if own > 0 else None
            others = (flow for flow in self.flows if not flow.is_training)
            found = _ends(others, attrgetter("payload_bytes"))
            return found | {"rate_bps": 8 * amount / seconds, "of_training": of_training}
        if name == LOSS and self.evidence.lost_segments is not None:
            each = float(self.evidence.lost_segments[affected].mean())
            training = (flow for flow in self.flows if flow.is_training)
            return _ends(training, attrgetter("lost_segments")) | {"lost_segments": each}
        return {}


def _ends(flows: Iterable[FlowSum], most: Callable[[FlowSum], float]) -> dict[str, Any]:
    """Return the two nodes whose flows have the most bytes or lost segments; an address where no node is known."""
    sums: dict[tuple[str, str], float] = {}
    for flow in flows:
        ends = flow.source_node or flow.source, flow.destination_node or flow.destination
        sums[ends] = sums.get(ends, 0.0) + most(flow)
    source, destination = max(sums, key=lambda ends: sums[ends])
    return {"source": source, "destination": destination}


def _interfaces(
    flows: Sequence[FlowSum], iterations: int, seconds: float, facts_of: Callable[[str], Sequence[Mapping[str, Any]]]
) -> list[TrainingInterface] | str:
    """Return what each interface of the training carries, and could carry; the reason if it is not known."""
    sides = [(flow.source_node, flow.source, "tx", flow) for flow in flows]
    sides += [(flow.destination_node, flow.destination, "rx", flow) for flow in flows]
    rows: dict[tuple[str, str, str], tuple[float, float, float]] = {}
    for node, address, direction, flow in sides:
        if node is None:
            continue
        facts = facts_of(node)
        capacity_bps = sending_capacity_bps(facts, [address])
        if capacity_bps is None and flow.is_training and flow.payload_bytes > 0:
            return f"it is not known how fast the interface of {node} with the address {address} is"
        nics = (carrier_of(fact, name) for fact in facts if (name := interface_with(fact, address)) is not None)
        nic = next(nics, address)
        training, other, least_bps = rows.get((node, nic, direction), (0.0, 0.0, np.inf))
        if flow.is_training:
            training += flow.payload_bytes
        else:
            other += flow.payload_bytes
        least_bps = least_bps if capacity_bps is None else min(least_bps, capacity_bps)
        rows[node, nic, direction] = training, other, least_bps
    return [
        TrainingInterface(*key, training / iterations, 8 * other / seconds, capacity_bps)
        for key, (training, other, capacity_bps) in sorted(rows.items())
        if training > 0
    ]


def _unused_network(
    interfaces: Sequence[TrainingInterface], facts_of: Callable[[str], Sequence[Mapping[str, Any]]]
) -> UnusedNetwork | None:
    """Return the fastest network that all nodes of the training have, but do not use, if it is faster."""
    if not interfaces:
        return None
    used: dict[str, set[str]] = {}
    bits: dict[tuple[str, str], float] = {}
    for one in interfaces:
        used.setdefault(one.node, set()).add(one.nic)
        bits[one.node, one.direction] = bits.get((one.node, one.direction), 0.0) + 8 * one.bytes
    known = {node: unused_networks(facts_of(node), nics) for node, nics in used.items()}
    longest = max(interfaces, key=attrgetter("seconds"))
    found = []
    for network in sorted(set[str].intersection(*map(set, known.values()))):
        line_s = max(size / known[node][network][0] for (node, _), size in bits.items())
        capacity_bps, nic = known[longest.node][network]
        found.append(UnusedNetwork(line_s, nic, capacity_bps))
    best = min(found, default=None)
    return best if best and best.line_s < _SLOW_SHARE * longest.seconds else None


def _usual_bps(interfaces: Sequence[TrainingInterface]) -> float:
    return float(np.median([one.capacity_bps for one in interfaces]))


def _line_times(interfaces: Sequence[TrainingInterface]) -> tuple[float | None, float | None, float | None]:
    """Return ``line_s``, ``usual_line_s`` and ``shared_line_s`` of `NetworkEvidence`."""
    if not interfaces:
        return None, None, None
    capacity_bps, bits, other_bps = (
        np.array([getattr(one, name) for one in interfaces]) for name in ("capacity_bps", "bytes", "other_bps")
    )
    bits = 8 * bits
    usual_bps = _usual_bps(interfaces)
    is_slow = capacity_bps < _SLOW_SHARE * usual_bps
    left_bps = np.maximum(capacity_bps - other_bps, _LEAST_LEFT * capacity_bps)
    usual_s = float((bits / np.where(is_slow, usual_bps, capacity_bps)).max()) if is_slow.any() else None
    return float((bits / capacity_bps).max()), usual_s, float((bits / left_bps).max())


def nothing_known(why: str) -> dict[str, Any]:
    """Return a diagnosis that says nothing but the reason."""
    found: dict[str, Any] = {"why": why, "iteration_s": None, "iterations": 0, "of": 0, "parts": [], "causes": []}
    return found | {"line": None, "unknown": [], "run_delay_s": None, "source": None, "ranks": None, "nodes": None}


def timed_in(known: int, of: int) -> str:
    """Return the sentence that the ranks are timed in some of the iterations."""
    return f"all ranks are timed in {known} of {counted(of, 'iteration')}"


def why_no_parts(times: RankTimes) -> str:
    """Return why the times of the ranks do not give the parts of an iteration; empty if they do."""
    if (times.elsewhere_s.mean(axis=0) < -_MAX_EXCESS * times.mean_s).any():
        return "the recorded phases of a rank take longer than its iterations"
    if abs(float(times.iteration_s.mean()) - times.mean_s) > _MAX_EXCESS * times.mean_s:
        return "the iterations of the ranks do not add up to those of the job"
    return ""


@dataclass(frozen=True)
class Evidence:
    """Times of the ranks and records of the network, of which a diagnosis is made.

    Attributes:
        times: times of the ranks.
        of: number of the iterations, those of which not all times are known included.
        start_s: start of each iteration of ``times``.
        network: records of the network in them.
        node_of: the node of each rank.
        other_cores: returns how many more processors other programs keep busy on a node than on the others; None: not
            known.
        run_delay_s: returns how long a rank's main thread is ready to run but waits for a processor in some of the
            iterations, mean; None: not known.
        why_whole: why only the length of iterations is known; empty if the times of the ranks are.
    """

    times: RankTimes
    of: int
    start_s: Numbers
    network: NetworkRecords
    node_of: Mapping[int, str]
    other_cores: Callable[[str], float | None]
    run_delay_s: Callable[[int, Mask], float | None]
    why_whole: str = ""

    def usual_run_delay_s(self, affected: Mask, but: int | None = None) -> float | None:
        """Return the median of the run delays of the ranks, or of the others than one; None: not known."""
        ranks = [rank for rank in sorted(self.node_of) if rank != but]
        chosen = ranks[:: max(-(-len(ranks) // _MAX_RANKS), 1)]
        known = [delay_s for rank in chosen if (delay_s := self.run_delay_s(rank, affected)) is not None]
        return float(np.median(known)) if known else None


def diagnosis_of(evidence: Evidence) -> dict[str, Any]:
    """Return where the time of an iteration goes, and which causes could be removed (`described`)."""
    if why := why_no_parts(evidence.times):
        return nothing_known(why)
    try:
        budget = iteration_budget.split(evidence.times, evidence.network.evidence)
    except ValueError as error:
        return nothing_known(str(error))
    return described(budget, evidence)


def described(budget: Budget, evidence: Evidence) -> dict[str, Any]:
    """Describe the parts of an iteration.

    Returns:
        ``why``, the reason why nothing is known, empty otherwise; ``iteration_s``, the mean of the ``iterations`` of
        which all times are known, of how many (``of``); ``parts``, which add up to it: ``name``, ``seconds``,
        ``low_s`` and ``high_s`` (95 % interval), and ``share``; ``causes``, those of the parts that can be removed, the
        costliest first, with what `cause_of` returns; ``line``, the interface that needs longest for the training's
        payload: ``node``, ``nic``, ``bytes``, ``capacity_bps`` and ``seconds``; ``unknown``, what cannot be told:
        ``cause`` and ``why``, and for a cause that is there, but has a cost that is not known, where it is;
        ``run_delay_s``, how long a rank waits for a processor in an iteration, median of the ranks; and ``source``,
        whose times of the ranks these are: ``ddp``, ``horovod``, or ``iteration``, if only the length of iterations is
        known; ``ranks`` and ``nodes``, their numbers.
    """
    parts = []
    for share in budget.shares:
        part: dict[str, Any] = {
            "name": share.name,
            "seconds": share.seconds,
            "low_s": share.low_s,
            "high_s": share.high_s,
            "share": share.seconds / budget.iteration_s,
        }
        parts.append(part | (cause_of(share, evidence) if share.name in CAUSES else {}))
    causes = sorted((part for part in parts if part["name"] in CAUSES), key=lambda part: -part["seconds"])
    network = evidence.network
    everywhere = np.ones(len(evidence.start_s), bool)
    unknown: list[dict[str, Any]] = [{"cause": name, "why": why} for name, why in network.unknown]
    if evidence.why_whole and len(evidence.node_of) > 1:
        unknown.insert(0, {"cause": SLOW_RANK, "why": evidence.why_whole})
    unknown += [
        {"cause": name, "why": why} | network.facts(name, everywhere, evidence.times) for name, why in budget.uncosted
    ]
    if any(cause["name"] == SLOW_RANK and cause["run_delay_s"] is None for cause in causes):
        unknown.append({"cause": BUSY_PROCESSORS, "why": _NO_RUN_DELAY})
    found = {"why": "", "iteration_s": budget.iteration_s, "iterations": len(evidence.start_s), "of": evidence.of}
    found |= {"parts": parts, "causes": causes, "line": network.line, "unknown": unknown}
    found |= {"ranks": len(evidence.node_of), "nodes": len(set(evidence.node_of.values()))}
    return found | {"run_delay_s": evidence.usual_run_delay_s(everywhere), "source": evidence.times.source}


def cause_of(share: CauseOrPart, evidence: Evidence, begin: int = 0) -> dict[str, Any]:
    """Describe a cause, of the iterations from number ``begin`` on.

    Returns:
        ``name``, one of `CAUSES`; ``iterations``, in which it is, of how many (``of``), ``from_s`` and ``to_s``, the
        time from the first to the last of them by ``start_s``, and ``is_throughout``; ``from_low_s``, ``from_high_s``,
        ``to_low_s`` and ``to_high_s``, between which it began and ended, with 95 % confidence, None if it is there from
        the first iteration on, or in the last one, or too rarely to tell; ``is_computed``, True if its cost
        follows from capacities, ``is_at_most``, True if it may cost less, and ``is_whole``, True if it is what whole
        iterations take longer; ``rank``, ``node``, and ``within``, the kind of work that takes longer, with ``here_s``
        and ``usual_s``: of a slow rank its mean and that of the others, of stalls the medians in them and in the other
        iterations; ``each_s``, what a stall costs an iteration (median); of a slow rank ``run_delay_s`` and
        ``usual_run_delay_s``, how long it and the others wait for a processor in each of these iterations; of traffic
        ``source``, ``destination``, ``rate_bps`` and ``of_training``, its payload as a share of the training's; of an
        interface ``node``, ``nic``, ``rate_bps`` and ``usual_bps``, with ``faster_nic`` that is not used; and the
        number of the job's ``nodes``. What does not apply is None.
    """
    times, start_s, affected = evidence.times, evidence.start_s, share.affected
    where = np.flatnonzero(affected)
    found: dict[str, Any] = {
        "name": share.name,
        "iterations": len(where),
        "of": len(affected) - begin,
        "from_s": float(start_s[where[0]]),
        "to_s": float(start_s[where[-1]] + times.iteration_s[where[-1]].max()),
        "is_throughout": len(where) >= _THROUGHOUT_SHARE * (len(affected) - begin),
        "is_computed": share.is_computed,
        "is_at_most": share.is_at_most,
        "within": share.within or None,
        "is_whole": bool(evidence.why_whole),
    }
    for end, of in (("from", change_point_interval.begin_of), ("to", change_point_interval.end_of)):
        between = of(affected, share.values)
        low_s = None if between is None else float(start_s[between.first])
        high_s = None if between is None else float(start_s[between.last] + times.iteration_s[between.last].max())
        found |= {f"{end}_low_s": low_s, f"{end}_high_s": high_s}
    found |= dict.fromkeys(("rank", "node", "here_s", "usual_s", "each_s"))
    found |= dict.fromkeys(("other_cores", "run_delay_s", "usual_run_delay_s"))
    found |= dict.fromkeys(("source", "destination", "lost_segments", "of_training"))
    found |= dict.fromkeys(("nic", "faster_nic", "rate_bps", "usual_bps"))
    if share.within:
        spent_s = times.work_s[share.within]
        number = 0 if share.rank is None else int(np.searchsorted(times.ranks, share.rank))
        mine_s = spent_s if share.rank is None else spent_s[:, number]
        if share.name == STALL:
            here_s, usual_s = np.median(mine_s[affected]), np.median(mine_s[~affected])
        else:
            here_s, usual_s = mine_s[affected].mean(), np.delete(spent_s[affected], number, axis=1).mean()
        found |= {"here_s": float(here_s), "usual_s": float(usual_s)}
    if share.name in STALLS:
        found["each_s"] = float(np.median(share.each_s[affected]))
    if share.rank is not None:
        node = evidence.node_of[share.rank]
        found |= {"rank": share.rank, "node": node, "other_cores": evidence.other_cores(node)}
    if share.name == SLOW_RANK and share.rank is not None:
        found |= _run_delays(share.rank, affected, evidence)
    found["nodes"] = len(set(evidence.node_of.values()))
    return found | evidence.network.facts(share.name, affected, times)


def _run_delays(rank: int, affected: Mask, evidence: Evidence) -> dict[str, Any]:
    """Return how long a slow rank and the others wait for a processor, and a name if this is why it is slow."""
    times = evidence.times
    here_s, usual_s = evidence.run_delay_s(rank, affected), evidence.usual_run_delay_s(affected, rank)
    found: dict[str, Any] = {"run_delay_s": here_s, "usual_run_delay_s": usual_s}
    work_s, number = (times.iteration_s - times.exposed_s)[affected], np.searchsorted(times.ranks, rank)
    late_s = float((work_s[:, number] - np.delete(work_s, number, axis=1).mean(axis=1)).mean())
    if here_s is not None and usual_s is not None and here_s - usual_s >= _RUN_DELAY_SHARE * late_s:
        found["name"] = BUSY_PROCESSORS
    return found
