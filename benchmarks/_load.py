"""Achieved and planned load, at shares of the ceiling that ``ringtap traffic calibrate`` finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _context import Bench
from _figures import LOAD_ERROR_TARGET_PCT, median
from _machine import CpuTimes
from _processes import BenchmarkError
from _ringtap import TRAFFIC, Receiver, free_port, send, traffic, write_plan

KINDS = ("consistent", "burst")
SHARES = (0.8, 0.4, 0.1)  # heaviest first: a quick run may have no time for the others
_OVERHEAD_S = 2.0  # time beyond a plan's length: start and end of sender and receiver
_MAX_TAKEN_PCT = 2.0  # of the cores' time; at 80 % of the ceiling, the cores have little to spare
_MAX_SHARE = 0.9  # of the ceiling right after a sample; above it, the machine causes the backlog at the plan's end


def calibrate(bench: Bench) -> float | None:
    """Measure the ceiling of this host in payload bits per second, over loopback; None (and a note) if it failed.

    ringtap keeps the calibration in the cache folder, here the run's. Every later sender uses it, as a user's does.
    """
    with bench.sample("calibrate") as figures:
        ended = traffic(bench.processes, "calibrate", "--json", namespace=bench.routes[0].sender, timeout_s=60)
        figures.update(json.loads(ended.stdout.splitlines()[-1]))
        figures.pop("host", None)  # the machine's name is private
        if figures["ceiling_bps"] <= 0:
            raise BenchmarkError("calibrate found no ceiling")
    return median(bench.samples.get("calibrate", []), "ceiling_bps")


def measure(bench: Bench, ceiling_bps: float, repeat: int) -> None:
    """Take one sample of each kind at each share as time allows; in a full run, also of each peer with pacing."""
    route, length_s, port = bench.routes[0], bench.settings.load_s, free_port()
    cases = [(kind, share) for share in SHARES for kind in KINDS]
    plans = _write_plans(bench, cases, ceiling_bps, f"{route.address}:{port}")
    for (kind, share), plan in zip(cases, plans, strict=True):
        if bench.left_s() < length_s + _OVERHEAD_S:
            bench.notes.append(f"The time of --quick did not allow {kind} traffic at {share:.0%} of the ceiling.")
            continue
        with bench.sample("load", tool="ringtap", kind=kind, share=share, repeat=repeat) as figures:
            figures.update(_ringtap(bench, plan, port))
            figures["doubt"] = _doubt(bench, figures, ceiling_bps)
    if bench.settings.quick:
        return
    for peer in (peer for peer in bench.peers if peer.paced):
        for share in SHARES:
            with bench.sample("load", tool=peer.name, kind="constant", share=share, repeat=repeat) as figures:
                planned_bps = share * ceiling_bps
                done = peer.run(bench.processes, route, free_port(), 1, length_s, planned_bps)
                figures.update(_against(planned_bps, done.received_bytes * 8 / done.sending_s))


def _write_plans(bench: Bench, cases: list[tuple[str, float]], ceiling_bps: float, address: str) -> list[Path]:
    """Write all plans in parallel, while nothing is measured."""
    plans, writing = [], []
    for kind, share in cases:
        plans.append(bench.path(f"load-{kind}-{share}.plan"))
        arguments = ["--kind", kind, "--load", f"{round(share * ceiling_bps)}bit", "--to", address]
        arguments += ["--duration", f"{bench.settings.load_s}s", "-o", str(plans[-1])]
        writing.append(bench.processes.start([*TRAFFIC, "plan", *arguments]))
    for writer in writing:
        writer.result(120)
    return plans


def _ringtap(bench: Bench, plan: Path, port: int) -> dict[str, Any]:
    with plan.open() as file:
        header = json.loads(file.readline())
    planned_bps = header["bytes"] * 8 / (header["duration_ns"] / 1e9)
    before = CpuTimes.now()
    with Receiver(bench.processes, bench.routes[0], port):
        summary = send(bench.processes, bench.routes[0], plan, timeout_s=bench.settings.load_s).summary
    figures: dict[str, Any] = _against(planned_bps, float(summary["achieved_bps"]))
    figures |= {"others_pct": before.others_pct_since(), "stolen_pct": before.stolen_pct_since()}
    # The achieved rate covers the time until the last flow's end, so a backlog at the plan's end lowers it
    figures["tail_s"] = summary["acked_bytes"] * 8 / summary["achieved_bps"] - summary["duration_s"]
    return figures | {name: summary[name] for name in ("flows", "unfinished", "failed", "missed_slots")}


def _doubt(bench: Bench, figures: dict[str, Any], ceiling_bps: float) -> str | None:
    """Return the reason why a sample that misses the bar says nothing about the sender; None if it does."""
    if figures["error_pct"] <= LOAD_ERROR_TARGET_PCT:
        return None
    others_pct, stolen_pct = figures["others_pct"], figures["stolen_pct"]
    if others_pct + stolen_pct > _MAX_TAKEN_PCT:
        return (
            f"other programs took {others_pct:.1f} % of the cores' time meanwhile, and the machine's own host "
            f"{stolen_pct:.1f} %"
        )
    if bench.left_s() < bench.settings.bulk_s + _OVERHEAD_S:
        return "no time was left to measure the ceiling again"
    now_bps = ceiling_now(bench)
    figures["ceiling_bps"] = now_bps
    if figures["planned_bps"] > _MAX_SHARE * now_bps:
        return f"the ceiling right after it was {now_bps / 1e9:.3g} Gbit/s and no longer {ceiling_bps / 1e9:.3g}"
    return None


def ceiling_now(bench: Bench) -> float:
    """Measure the current goodput of one stream over loopback in payload bits per second, as ``calibrate`` does."""
    route, port, length_s = bench.routes[0], free_port(), bench.settings.bulk_s
    plan = write_plan(bench.path("ceiling.plan"), f"{route.address}:{port}", length_s, [(0, 0)])
    with Receiver(bench.processes, route, port):
        return float(send(bench.processes, route, plan, timeout_s=length_s).summary["achieved_bps"])


def _against(planned_bps: float, achieved_bps: float) -> dict[str, float]:
    error_pct = abs(achieved_bps / planned_bps - 1) * 100
    return {"planned_bps": planned_bps, "achieved_bps": achieved_bps, "error_pct": error_pct}
