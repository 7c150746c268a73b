"""Before a sweep: can the generator, alone, load the bottleneck? (The thesis asks for 22 of 25 Gbit/s.)"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from ringtap.agents.cross import CrossTraffic
from ringtap.agents.hosts import RINGTAP, LabHosts
from ringtap.agents.lab.topology import LabSpec, Roles
from ringtap.plan import SweepPlan
from ringtap.records import open_records
from ringtap.rundir import RunDirectory
from ringtap.units import format_rate
from ringtap.wire import frame_bytes

REQUIRED_SHARE = 0.88
_WARM_UP_S = 1.0
_WINDOW_S = 3.0


def check_generator(plan: SweepPlan, kind: str, spec: LabSpec, roles: Roles, path: Path) -> dict[str, Any]:
    """Send one kind of cross traffic at the bottleneck's full rate, without a job, and count what comes through.

    Returns:
        ``{kind, requested_bps, reached_bps, share_of_capacity, required_share, ok}``; rates as the link's limit
        counts them.
    """
    run = RunDirectory.create(path, "job", sys.argv, plan.seed, series=f"precheck-{kind}")
    hosts = LabHosts(spec)
    cross = CrossTraffic(plan, kind, hosts, roles.cross_from, roles.cross_to, path)
    counter = roles.bottleneck()["total"]
    try:
        log = run.node(counter["node"]) / "log" / "job.out"
        hosts.start(
            counter["node"], "recorder", [*RINGTAP, "capture", "--join", str(path), "--node", counter["node"]], log
        )
        cross.start_receiver()
        cross.start_sender(plan.capacity_bps, "full", _WARM_UP_S + _WINDOW_S + 10)
        time.sleep(_WARM_UP_S)
        start_ns = time.time_ns()
        time.sleep(_WINDOW_S)
        end_ns = time.time_ns()
        cross.check()
    finally:
        cross.stop_sender()
        hosts.stop_all()
    reached_bps = _rate_bps(run, counter, spec.mtu, start_ns, end_ns)
    run.finish("complete", f"reached {format_rate(reached_bps)}")
    share = reached_bps / plan.capacity_bps
    result = {"kind": kind, "requested_bps": plan.capacity_bps, "reached_bps": round(reached_bps)}
    return result | {
        "share_of_capacity": round(share, 4),
        "required_share": REQUIRED_SHARE,
        "ok": share >= REQUIRED_SHARE,
    }


def _rate_bps(run: RunDirectory, counter: dict[str, str], mtu: int, start_ns: int, end_ns: int) -> float:
    """Mean rate of an interface counter between two times, as frames on the wire."""
    records = open_records(run.node(counter["node"]) / "nic" / "nic.rec")
    names = [field.name for field in records.fields]
    columns = [names.index(f"{counter['nic']}.{counter['direction']}_{unit}") for unit in ("bytes", "packets")]
    rows = [row for row in records.tail() if start_ns <= row[0] <= end_ns]
    size_bytes, packets = (rows[-1][column] - rows[0][column] for column in columns)
    return frame_bytes(size_bytes, packets, mtu) * 8e9 / float(rows[-1][0] - rows[0][0])
