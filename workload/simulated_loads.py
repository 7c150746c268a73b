"""Simulation of a workload under cross traffic: a constant share of a link's rate, or the flows of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ringtap.core.errors import UsageError
from ringtap.core.schema import SIMULATED
from ringtap.workload.cross_traffic import CrossPlan, check_load, cross_bps
from ringtap.workload.lowering import Algorithms
from ringtap.workload.simulated_iterations import SimulatedIterations, simulate
from ringtap.workload.topologies import Topology
from ringtap.workload.workload import Workload

ITERATIONS, LEAST_ITERATIONS, MAX_ITERATIONS = 5, 2, 100_000
MAX_NODES = 4_000_000  # of all iterations: about 2 GB


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
