"""Checks the sending host's calibration, the idle links, and the generator's rate without a job, before a sweep.

The thesis asks that the generator alone reach 22 of 25 Gbit/s at the bottleneck.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ringtap.agents.hosts import Hosts, understood
from ringtap.agents.sweep.cross_traffic import STREAMS, CrossTraffic
from ringtap.agents.sweep.detect_disturbances import (
    MAX_OTHER_SHARE,
    RECORDED_S,
    Watch,
    counted_bps,
    of_interfaces,
    other_words,
)
from ringtap.agents.sweep.host_connections import check_lost
from ringtap.agents.sweep.host_roles import SweepRoles
from ringtap.agents.sweep.job_launch_commands import job_run, recorded
from ringtap.core.errors import MeasurementError, UsageError, last_line
from ringtap.core.isolated_python import python_command
from ringtap.core.run_directory import RunDirectory
from ringtap.core.run_directory_schema import NIC_REC, REQUIRED_SHARE
from ringtap.core.sweep_plans.cluster_hosts import Cluster
from ringtap.core.sweep_plans.sweep_plan import LoadPlan, SharingPlan, SweepPlan
from ringtap.core.units import format_rate
from ringtap.trafficgen import helper_process
from ringtap.trafficgen.calibrate_host_limits import Calibration, calibrated
from ringtap.trafficgen.plans.size_distributions import WEB_SEARCH

_WARM_UP_S = 1.0
_WINDOW_S = 3.0
_FLOWS_PER_S = 1500
_RECORDERS_S = 30.0
_POLL_S = 0.05
_CALIBRATION_S = 60.0


def check_host(plan: SweepPlan, force: bool, say: Callable[[str], None], hosts: Hosts | None) -> dict[str, Any] | None:
    """Compare the plan's flows with the calibration of the sending host; a host without one is calibrated.

    Args:
        plan: the sweep.
        force: only warn if a load exceeds the calibration.
        say: receives a line for the user.
        hosts: hosts of the plan's cluster; None for a testbed on this machine.

    Returns:
        The calibration, or None if the plan has no flows of ringtap's own generator.

    Raises:
        UsageError: the heaviest load exceeds the calibration, and ``force`` is not set.
        MeasurementError: the host cannot be calibrated.
    """
    if isinstance(plan, SharingPlan) or not set(plan.traffic) & {"consistent", "burst"} or not plan.heaviest_load:
        return None
    if hosts is None:
        calibration = calibrated(say, helper_process.calibrate)
    else:
        calibration = _calibration_of(hosts, plan.topology.cross_from, say)
    most_bps = plan.heaviest_load * plan.capacity_bps
    beyond = calibration.exceeded_by(most_bps, most_bps / 8 / (WEB_SEARCH.mean_bytes / plan.scale), False)
    if beyond and not force:
        raise UsageError(f"{beyond}: lower the plan's loads, or measure anyway with --force")
    if beyond:
        say(f"warning: {beyond}; flows will be late")
    return asdict(calibration)


def _calibration_of(hosts: Hosts, host: str, say: Callable[[str], None]) -> Calibration:
    say(f"Reading the calibration of {host}'s traffic generator; takes 10 s the first time")
    done = hosts.ask(
        host, python_command(hosts.python(host), "ringtap.trafficgen.calibrate_host_limits"), _CALIBRATION_S
    )
    if done.returncode:
        message = last_line(done.stderr)
        raise MeasurementError(f"host {host} could not be calibrated: {message}")
    with understood(host):
        found = Calibration(**json.loads(done.stdout))
        found.exceeded_by(0.0, 0.0, False)  # fails unless its values are numbers
        found.spin_for(own_processor=False)
    return found


def most_bps(plan: LoadPlan) -> float:
    """Return the rate of the generator check in bit/s: a testbed's capacity, or the highest load on real links."""
    if isinstance(plan.topology, Cluster):
        return plan.heaviest_load * plan.capacity_bps
    return float(plan.capacity_bps)


def look_at_idle_links(plan: SweepPlan, hosts: Hosts, network: SweepRoles, path: Path) -> dict[str, Any]:
    """Measure the traffic on the links of a cluster while the sweep does not use them.

    Args:
        plan: the sweep.
        hosts: the hosts.
        network: roles and addresses of the hosts.
        path: the job run directory to create.

    Returns:
        ``{rates, words}``: ``rx_bps`` and ``tx_bps`` by host, and a sentence for each high rate.

    Raises:
        MeasurementError: a host is lost, or its recorder records nothing.
    """
    with job_run(hosts, path, plan.seed, series="precheck-idle", **network.clock()) as run:
        start_recorders(hosts, run, network.attachments, network)
        start_ns, end_ns = _record_window(hosts)
    rates: dict[str, dict[str, int]] = {}
    sentences = []
    for node, port in network.attachments.items():
        try:
            for direction in ("rx", "tx"):
                counters = of_interfaces(node, port.nics, direction)
                bps = sum(counted_bps(run.path, one, network.mtu(one), start_ns, end_ns) for one in counters)
                rates.setdefault(node, {})[f"{direction}_bps"] = round(bps)
                if bps > MAX_OTHER_SHARE * plan.capacity_bps:
                    sentences.append(other_words(node, direction, bps, plan.capacity_bps))
        except UsageError as error:
            raise MeasurementError(f"host {node} could not count its idle links: {error}") from error
    run.finish("complete", "; ".join(sentences))
    return {"rates": rates, "words": sentences}


def start_recorders(hosts: Hosts, run: RunDirectory, nodes: Iterable[str], network: SweepRoles) -> None:
    """Start recorders of interfaces, on attached nodes also of connections, and wait until all of them record.

    Raises:
        MeasurementError: a recorder records nothing.
    """
    recorders = []
    for node in dict.fromkeys(nodes):
        log = run.node(node) / "log" / "job.out"
        # a testbed's switch has no connections
        command = recorded(hosts, run, network, node, ["sockets"] if node in network.attachments else [], [])
        recorders.append((run.node(node) / NIC_REC, hosts.start(node, "recorder", command, log)))
    deadline_s = time.monotonic() + _RECORDERS_S
    for path, process in recorders:
        while not path.exists():
            check_lost(hosts)
            if process.exit_code() is not None or time.monotonic() > deadline_s:
                raise MeasurementError(f"the {process.name} records nothing: {process.last_words()} ({process.log})")
            time.sleep(_POLL_S)


def _record_window(hosts: Hosts) -> tuple[int, int]:
    """Wait until a window has been recorded; return its start and end (CLOCK_REALTIME, ns)."""
    time.sleep(_WARM_UP_S)
    start_ns = time.time_ns()
    time.sleep(_WINDOW_S)
    end_ns = time.time_ns()
    time.sleep(RECORDED_S)
    check_lost(hosts)
    return start_ns, end_ns


def with_enough_flows(plan: LoadPlan) -> LoadPlan:
    """Return the plan with flows so small that the check's window holds thousands: their sum is the load within 4 %.

    A slow link carries a few dozen flows of full size in that time, and their sum may be half of the load.
    """
    return replace(plan, scale=max(plan.scale, WEB_SEARCH.mean_bytes / (most_bps(plan) / 8 / _FLOWS_PER_S)))


def check_generator(plan: LoadPlan, kind: str, hosts: Hosts, network: SweepRoles, path: Path) -> dict[str, Any]:
    """Send one kind of cross traffic at the highest rate, without a job, and measure the rate that arrives.

    The check uses the bytes that the receiver acknowledged, or, if they are not recorded, all traffic at the
    bottleneck.

    Returns:
        ``{kind, requested_bps, reached_bps, share_of_capacity, required_share, ok, judged_by, total_bps, others}``;
        measured rates count frames on the wire.
    """
    requested_bps = most_bps(plan)
    cross = CrossTraffic(with_enough_flows(plan), kind, hosts, network, path)
    watched = [node for node, port in network.attachments.items() if not port.why]
    with job_run(hosts, path, plan.seed, series=f"precheck-{kind}", **network.clock()) as run:
        start_recorders(hosts, run, (network.timekeeper, network.roles.cross_from, *watched), network)
        cross.start_receiver()
        cross.start_sender(requested_bps, "full", _WARM_UP_S + _WINDOW_S + 10, plan.iperf_streams or STREAMS[-1])
        start_ns, end_ns = _record_window(hosts)
        cross.check()
        cross.stop_sender()
    counters = network.bottleneck["total"]
    try:
        total_bps = sum(counted_bps(path, one, network.mtu(one), start_ns, end_ns) for one in counters)
    except UsageError as error:
        raise MeasurementError(f"the generator's traffic could not be counted: {error}") from error
    watch = Watch(run.path, network, plan.capacity_bps, cross.port)
    try:
        rates = watch.rates(network.roles.cross_from, start_ns, end_ns)
        reached_bps, judged_by = rates.acknowledged_bps, "acknowledged bytes"
    except UsageError as error:  # no socket diagnostics on that host
        reached_bps, judged_by = total_bps, f"all traffic through the bottleneck: {error}"
    others = watch.others([(watch, network.attachments)], start_ns, end_ns)
    run.finish("complete", f"reached {format_rate(reached_bps)}")
    required = REQUIRED_SHARE * requested_bps / plan.capacity_bps
    share = reached_bps / plan.capacity_bps
    return {
        "kind": kind,
        "requested_bps": round(requested_bps),
        "reached_bps": round(reached_bps),
        "total_bps": round(total_bps),
        "share_of_capacity": round(share, 4),
        "required_share": round(required, 4),
        "ok": share >= required,
        "judged_by": judged_by,
        "others": others,
    }
