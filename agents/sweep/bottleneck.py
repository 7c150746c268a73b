"""Finds the bottleneck of a testbed with several switches, by the counters of all links."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from ringtap.agents.hosts import Hosts
from ringtap.agents.sweep.cross_traffic import STREAMS, CrossTraffic
from ringtap.agents.sweep.host_roles import SweepRoles
from ringtap.agents.sweep.job_launch_commands import job_run
from ringtap.agents.sweep.measure_load_series import SeriesMeasurement
from ringtap.agents.sweep.sweep_estimate import bottleneck_s
from ringtap.agents.testbed.shortest_path_routes import hops
from ringtap.agents.testbed.start_testbed import RunningTestbed
from ringtap.agents.testbed.topology import Link, TestbedSpec, carried_bps
from ringtap.core.sweep_plans.sweep_plan import LoadPlan
from ringtap.core.sweep_plans.training_jobs import Model

_WARM_UP_S = 2.0
_ALIKE = 0.02  # difference in use that may be chance


def link_use(
    plan: LoadPlan, model: Model, kind: str, testbed: RunningTestbed, hosts: Hosts, network: SweepRoles, path: Path
) -> dict[Link, float]:
    """Measure the use of all links while a job runs under the heaviest cross traffic, if the plan has any.

    Args:
        plan: the sweep.
        model: the training job.
        kind: the kind of cross traffic.
        testbed: the testbed.
        hosts: its hosts.
        network: roles and addresses of the hosts.
        path: the job run directory to create.

    Returns:
        The share of its rate that each link carried.

    Raises:
        MeasurementError: the job, the traffic or the testbed failed.
    """
    window_s, load_bps = bottleneck_s(plan, model), plan.heaviest_load * plan.capacity_bps
    with job_run(hosts, path, plan.seed, series="bottleneck", **network.clock()) as run:
        cross = CrossTraffic(plan, kind, hosts, network, path)
        SeriesMeasurement(plan, model, hosts, network, run, cross).start()
        if load_bps:
            duration_s = _WARM_UP_S + window_s + 10
            cross.start_sender(load_bps, "heaviest", duration_s, plan.iperf_streams or STREAMS[-1])
        time.sleep(_WARM_UP_S)
        before = testbed.link_counts()
        time.sleep(window_s)
        after = testbed.link_counts()
        cross.check()
        cross.stop_sender()
    return {
        link: carried_bps(link, first, last) / link.rate_bps
        for link, first, last in zip(testbed.state.spec.links, before, after, strict=True)
    }


def busiest(use: Mapping[Link, float], spec: TestbedSpec, cross_from: str) -> Link:
    """Return the link with the highest use; of several alike, the one nearest to the sender of cross traffic.

    A full link passes on no more than its rate, so that links behind it may be as full, but have no queue.
    """
    most, distance = max(use.values()), hops(spec, cross_from)
    return min((link for link in use if use[link] >= most - _ALIKE), key=lambda link: distance[link.source])
