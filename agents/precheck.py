"""Before a sweep: are its flows within what this host can send, and can the generator, alone, load the bottleneck?

The thesis asks for 22 of 25 Gbit/s of the latter.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringtap.agents.cross import CrossTraffic
from ringtap.agents.hosts import RINGTAP, LabHosts
from ringtap.agents.lab.topology import LabSpec, Roles
from ringtap.errors import UsageError
from ringtap.plan import SweepPlan
from ringtap.records import open_records
from ringtap.rundir import RunDirectory
from ringtap.trafficgen.calibrate import calibrate
from ringtap.trafficgen.calibration import load, save, usual_path
from ringtap.trafficgen.sizes import WEB_SEARCH
from ringtap.units import format_rate
from ringtap.wire import frame_bytes

REQUIRED_SHARE = 0.88
_WARM_UP_S = 1.0
_WINDOW_S = 3.0


def check_host(plan: SweepPlan, force: bool, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Hold the plan's flows against this host's calibration, which is made if there is none.

    Returns:
        The calibration, or None when the plan has no flows of ours.

    Raises:
        UsageError: some load is beyond it, and ``force`` is not set.
    """
    if not set(plan.traffic) & {"consistent", "burst"}:
        return None
    calibration = load()
    if calibration is None:
        say("Calibrating this host's traffic generator, once; takes 10 s")
        calibration = calibrate()
        with suppress(UsageError):  # a home that cannot be written costs another 10 s the next time, no more
            save(calibration, usual_path())
    most_bps = max(plan.loads) * plan.capacity_bps
    beyond = calibration.exceeded_by(most_bps, most_bps / 8 / (WEB_SEARCH.mean_bytes / plan.scale), False)
    if beyond and not force:
        raise UsageError(f"{beyond}: lower the plan's loads, or measure all the same with --force")
    if beyond:
        say(f"warning: {beyond}; flows will be late")
    return asdict(calibration)


def check_generator(plan: SweepPlan, kind: str, spec: LabSpec, roles: Roles, path: Path) -> dict[str, Any]:
    """Send one kind of cross traffic at the bottleneck's full rate, without a job, and count what comes through.

    Returns:
        ``{kind, requested_bps, reached_bps, share_of_capacity, required_share, ok}``; rates as the link's limit
        counts them.
    """
    run = RunDirectory.create(path, "job", sys.argv, plan.seed, series=f"precheck-{kind}", one_clock=True)
    hosts = LabHosts(spec)
    cross = CrossTraffic(plan, kind, hosts, roles.cross_from, roles.cross_to, path)
    counter = roles.bottleneck()["total"]
    try:
        log = run.node(counter["node"]) / "log" / "job.out"
        record = ["--collect", "nic", "--every", "10ms", "--join", str(path), "--node", counter["node"]]
        hosts.start(counter["node"], "recorder", [*RINGTAP, "capture", *record], log)
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
