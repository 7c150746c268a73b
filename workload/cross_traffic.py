"""Cross traffic of flow plans between the hosts of a topology."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ringtap.core.errors import UsageError
from ringtap.core.flow_table import Integers, Numbers, read_plan
from ringtap.core.units import format_rate
from ringtap.workload.simulated_iterations import SimulatedIterations
from ringtap.workload.simulation import CrossFlows
from ringtap.workload.topologies import Topology


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
    at: dict[str, int] = {}
    destinations = [at.setdefault(name.rpartition(":")[0].strip("[]"), len(at)) for name in plan.destinations]
    above = max(hosts - len(at), 0)
    sources = [at.setdefault(name, above + len(at)) for name in plan.header.get("sources", [])]
    needed = above + len(at)
    if (plan.source < 0).any():
        sources, needed = [*sources, needed], needed + 1  # index -1 is the last one
    flows = CrossFlows(
        np.array(sources)[plan.source], np.array(destinations)[plan.destination], plan.size_bytes.astype(float),
        plan.start_ns / 1e9, plan.after, plan.delay_ns / 1e9,
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
                f"{format_rate(topology.rate_bps[link])}: write a plan of a lower load, or give a higher --rate"
            )


def cross_bps(plan: CrossPlan, flows: Integers, simulated: SimulatedIterations, window_s: tuple[float, float]) -> float:
    """Return the mean rate of some flows of a plan in a window, each sent evenly from its begin to its end."""
    begin_s, end_s = simulated.cross_begin_s[flows], simulated.cross_end_s[flows]
    inside_s = np.clip(np.minimum(end_s, window_s[1]) - np.maximum(begin_s, window_s[0]), 0.0, None)
    share: Numbers = np.divide(inside_s, end_s - begin_s, out=np.zeros(len(flows)), where=end_s > begin_s)
    return float((share * plan.flows.size_bytes[flows]).sum()) * 8 / (window_s[1] - window_s[0])
