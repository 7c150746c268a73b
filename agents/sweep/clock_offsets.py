"""Measures offsets of the hosts' clocks, before jobs are kept at times on several hosts (docs/reference/clocks.md)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ringtap.agents.hosts import Hosts
from ringtap.agents.sweep.host_connections import check_lost
from ringtap.agents.sweep.host_roles import SweepRoles
from ringtap.agents.sweep.job_launch_commands import job_run
from ringtap.agents.sweep.traffic_precheck import start_recorders
from ringtap.core.errors import MeasurementError
from ringtap.core.run_directory import RunDirectory, open_log, read_json
from ringtap.core.run_directory_schema import CLOCK, CLOCK_JSON, PINGS_REC

_PINGS_S = 15.0  # over ssh, the files by which hosts find the reference take some seconds
_ENOUGH_PINGS = 40  # two bursts
_POLL_S = 0.1


class ClockOffset(NamedTuple):
    """Offset of a host's clock from the reference host's, now.

    Attributes:
        offset_ns: the host's CLOCK_REALTIME minus the reference's.
        error_ns: bound of its error.
    """

    offset_ns: int
    error_ns: int


def clock_offsets(hosts: Hosts, network: SweepRoles, nodes: Sequence[str], path: Path) -> dict[str, ClockOffset]:
    """Measure the offsets of hosts' clocks, within some seconds, before the jobs load the links.

    The best burst of pings of each host counts. What a clock drifts from then on is not corrected; under chrony or ntpd
    it is far less than a millisecond per minute.

    Args:
        hosts: the hosts.
        network: their roles; the first worker is the reference.
        nodes: names of the hosts.
        path: the job run directory to create.

    Raises:
        MeasurementError: a host is lost, or its clock cannot be compared.
    """
    if network.one_clock:
        return dict.fromkeys(nodes, ClockOffset(0, 0))
    reference = network.roles.workers[0]
    others = [node for node in nodes if node != reference]
    with job_run(hosts, path, 0, series="clocks", **network.clock()) as run:
        start_recorders(hosts, run, (reference, *others), network)
        deadline_s = time.monotonic() + _PINGS_S
        while min(_pings(run, node) for node in others) < _ENOUGH_PINGS and time.monotonic() < deadline_s:
            check_lost(hosts)
            time.sleep(_POLL_S)
    return dict.fromkeys(nodes, ClockOffset(0, 0)) | {node: _offset(run, node) for node in others}


def _pings(run: RunDirectory, node: str) -> int:
    """Count the pings of a host that were answered so far."""
    path = run.path / "nodes" / node / PINGS_REC
    return open_log(path).count if path.is_file() and path.stat().st_size else 0


def _offset(run: RunDirectory, node: str) -> ClockOffset:
    item = read_json(run.path / "nodes" / node / CLOCK_JSON, CLOCK)
    parts = item.get("measurements") or ([item["fit"]] if item.get("fit") else [])
    known = [pair for part in parts if None not in (pair := (part.get("error_ns"), part["offset_ns"]))]
    if not known:
        why = item.get("reason") or "no ping was answered"
        raise MeasurementError(
            f"the clock of host {node} cannot be compared with that of {item.get('reference')} ({why}), and jobs are "
            'kept at times on both: let UDP pass between them, or plan offsets = ["free"]'
        )
    error_ns, offset_ns = min(known)
    return ClockOffset(round(offset_ns), round(error_ns))
