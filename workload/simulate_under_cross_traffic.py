"""Simulates a workload under cross traffic: a constant share of a link's rate, or the flows of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_table import Integers, Numbers, read_plan
from ringtap.core.host_port import parse_address
from ringtap.core.run_directory_schema import SIMULATED
from ringtap.core.units import format_rate
from ringtap.workload.lowering import Algorithms
from ringtap.workload.simulate_iterations import SimulatedIterations, simulate
from ringtap.workload.simulation import CrossFlows
from ringtap.workload.topologies import Topology
from ringtap.workload.workload import Workload

ITERATIONS, LEAST_ITERATIONS, MAX_ITERATIONS = 5, 2, 100_000
MAX_NODES = 4_000_000  # of all iterations: about 2 GB


@dataclass(frozen=True)
class CrossPlan:
    """Flows of a plan, placed at hosts.

    Attributes:
        path: path of its file.
        kind: kind of the plan.
        duration_s: its length.
        flows: its flows.
        hosts: number of hosts that the workload and the plan need.
    """

    path: Path
    kind: str
    duration_s: float
    flows: CrossFlows
    hosts: int

    def through(self, topology: Topology) -> list[Integers]:
        """Return the numbers of the flows that pass through each link of a topology."""
        pairs = self.flows.source * topology.hosts + self.flows.destination
        order = np.argsort(pairs, kind="stable")
        found: list[list[Integers]] = [[np.empty(0, np.int64)] for _ in topology.links]
        for flows in np.split(order, np.flatnonzero(np.diff(pairs[order])) + 1):
            source, destination = divmod(int(pairs[flows[0]]), topology.hosts)
            for link in topology.path(source, destination) if source != destination else ():
                found[link].append(flows)
        return [np.concatenate(each) for each in found]


def read_cross(path: Path, hosts: int) -> CrossPlan:
    """Read a flow plan, and place its addresses at hosts.

    Destinations are at hosts 0, 1, … in the order of the plan's header, which they share with the workload. Sources
    are at hosts of their own, above all others, unless they are destinations, too. Flows without a source address
    come from one more host.

    Args:
        path: a flow plan.
        hosts: number of hosts of the workload.

    Raises:
        UsageError: it cannot be read, is not a plan, has no flow, or has one without an end.
    """
    plan = read_plan(path)
    if not len(plan.start_ns):
        raise UsageError(f"{path} has no flow: write a plan that lasts longer")
    if not plan.is_flow.all():
        raise UsageError(
            f"{path} is the replay of a workload, which is not simulated as cross traffic: name another plan"
        )
    endless = np.flatnonzero(plan.size_bytes == 0)
    if len(endless):
        raise UsageError(
            f"{path} line {endless[0] + 2}: the flow lasts until the plan's end, and such flows are not simulated: use "
            "a plan of flows with sizes, or --loads"
        )
    if (plan.waits > 1).any():
        raise UsageError(
            f"{path} line {np.argmax(plan.waits > 1) + 2}: after names several flows, and such flows are not "
            "simulated: name another plan"
        )
    after, delay_ns = np.full(len(plan.waits), -1), np.zeros(len(plan.waits), np.int64)
    after[plan.waits > 0], delay_ns[plan.waits > 0] = plan.after, plan.delay_ns
    at: dict[str, int] = {}
    destinations = [at.setdefault(parse_address(name)[0], len(at)) for name in plan.destinations]
    above = max(hosts - len(at), 0)
    sources = [at.setdefault(name, above + len(at)) for name in plan.header.get("sources", [])]
    needed = above + len(at)
    if (plan.source < 0).any():
        sources, needed = [*sources, needed], needed + 1  # index -1 is the last one
    flows = CrossFlows(
        np.array(sources)[plan.source], np.array(destinations)[plan.destination], plan.size_bytes.astype(float),
        plan.start_ns / 1e9, after, delay_ns / 1e9,
    )  # fmt: skip
    return CrossPlan(path, plan.kind, plan.duration_ns / 1e9, flows, needed)


def check_load(plan: CrossPlan, topology: Topology, through: Sequence[Integers]) -> None:
    """Check that no link gets more of a plan than it carries: flows would pile up without end.

    Args:
        plan: the plan.
        topology: hosts and links.
        through: numbers of the flows through each link.

    Raises:
        UsageError: one does.
    """
    for link, flows in enumerate(through):
        offered_bps = float(plan.flows.size_bytes[flows].sum()) * 8 / plan.duration_s
        if offered_bps >= topology.rate_bps[link]:
            raise UsageError(
                f"{plan.path} offers {format_rate(offered_bps)} to link {topology.links[link]}, which carries "
                f"{format_rate(topology.rate_bps[link])}: write a plan of a lower load, or give a higher --capacity"
            )


def cross_bps(plan: CrossPlan, flows: Integers, simulated: SimulatedIterations, window_s: tuple[float, float]) -> float:
    """Return the mean rate of some flows of a plan in a window, each sent evenly from its begin to its end."""
    begin_s, end_s = simulated.cross_begin_s[flows], simulated.cross_end_s[flows]
    inside_s = np.clip(np.minimum(end_s, window_s[1]) - np.maximum(begin_s, window_s[0]), 0.0, None)
    share: Numbers = np.divide(inside_s, end_s - begin_s, out=np.zeros(len(flows)), where=end_s > begin_s)
    return float((share * plan.flows.size_bytes[flows]).sum()) * 8 / (window_s[1] - window_s[0])


@dataclass(frozen=True)
class SimulatedPoint:
    """Iterations of a workload under one load of the bottleneck.

    Attributes:
        kind: kind of the flow plan; empty for a constant share of the rate.
        requested_bps: rate of the cross traffic that was asked for.
        cross_bps: rate of it in the iterations.
        training_bps: rate of the workload.
        simulated: the iterations.
    """

    kind: str
    requested_bps: float
    cross_bps: float
    training_bps: float
    simulated: SimulatedIterations

    @property
    def traffic(self) -> str:
        """Traffic kind of its series."""
        return f"{SIMULATED}-{self.kind}" if self.kind else SIMULATED

    def to_json(self, rate_bps: float) -> dict[str, Any]:
        """Return the point as plain values, with its load as a share of a rate."""
        times_s = np.diff(self.simulated.end_s.max(axis=1))
        std_s = float(times_s.std(ddof=1)) if len(times_s) > 1 else None
        return {
            "traffic": self.traffic, "load": self.cross_bps / rate_bps, "cross_bps": self.cross_bps,
            "training_bps": self.training_bps, "total_bps": self.cross_bps + self.training_bps,
            "iterations": len(times_s), "iteration_s": self.simulated.iteration_s, "std_s": std_s,
        }  # fmt: skip


@dataclass(frozen=True)
class LoadSimulator:
    """Simulator of a workload on a network with cross traffic.

    Attributes:
        workload: the workload.
        topology: hosts and links.
        algorithms: algorithms of collectives.
        latency_s: time that each message takes beside its transmission.
        ranks_per_host: ranks at each host.
        bottleneck: number of the link whose load counts.
    """

    workload: Workload
    topology: Topology
    algorithms: Algorithms
    latency_s: float
    ranks_per_host: int
    bottleneck: int

    @property
    def rate_bps(self) -> float:
        """Rate of the bottleneck."""
        return self.topology.rate_bps[self.bottleneck]

    def under_share(self, load: float, iterations: int | None = None) -> SimulatedPoint:
        """Simulate iterations while cross traffic takes a share of the bottleneck's rate all the time.

        Raises:
            UsageError: the iterations cannot be simulated.
        """
        share = np.ones(len(self.topology.links))
        share[self.bottleneck] = 1 - load
        found = self._simulated(iterations or ITERATIONS, rate_share=share)
        return self._point(found, load * self.rate_bps, load * self.rate_bps)

    def under_plan(self, plan: CrossPlan, alone_s: float, iterations: int | None = None) -> SimulatedPoint:
        """Simulate iterations beside the flows of a plan.

        Args:
            plan: the plan.
            alone_s: time of an iteration without cross traffic.
            iterations: number of iterations at most; None: as many as end within the plan's duration.

        Raises:
            UsageError: the plan does not go with the network or is too short, or the iterations cannot be simulated.
        """
        through = plan.through(self.topology)
        check_load(plan, self.topology, through)
        flows = through[self.bottleneck]
        if not len(flows):
            name = self.topology.links[self.bottleneck]
            raise UsageError(f"{plan.path} sends nothing through {name}: name another --bottleneck")
        count = min(int(plan.duration_s / alone_s), iterations or MAX_ITERATIONS)
        found = self._simulated(max(count, 1), cross=plan.flows).until(plan.duration_s)
        if len(found.end_s) < 2:
            raise UsageError(f"{plan.path} ends before two iterations have ended: write a plan that lasts longer")
        window_s = float(found.end_s[0].max()), float(found.end_s[-1].max())
        requested_bps = float(plan.flows.size_bytes[flows].sum()) * 8 / plan.duration_s
        return self._point(found, requested_bps, cross_bps(plan, flows, found, window_s), plan.kind)

    def _simulated(self, iterations: int, **cross: Any) -> SimulatedIterations:
        nodes = sum(map(len, self.workload.traces))
        if iterations * nodes > MAX_NODES:
            most = MAX_NODES // nodes
            advice = f"give --iterations {most:,} or fewer"
            if most < LEAST_ITERATIONS:
                advice = "simulate a workload with fewer ranks, layers or micro-batches"
            raise UsageError(f"{iterations:,} iterations of {nodes:,} nodes are more than {MAX_NODES:,}: {advice}")
        return simulate(
            self.workload, self.topology, self.algorithms, iterations=iterations, latency_s=self.latency_s,
            ranks_per_host=self.ranks_per_host, **cross,
        )  # fmt: skip

    def _point(
        self, found: SimulatedIterations, requested_bps: float, real_bps: float, kind: str = ""
    ) -> SimulatedPoint:
        if found.iteration_s <= 0:
            raise UsageError("an iteration takes no time: the workload has neither computation nor messages")
        training_bps = float(found.link_bytes[self.bottleneck]) * 8 / found.iteration_s
        return SimulatedPoint(kind, requested_bps, real_bps, training_bps, found)
