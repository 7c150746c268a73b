"""Compares achieved with planned load, at shares of the ceiling that ``ringtap traffic calibrate`` finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _bench import Bench
from _machine import CpuTimes
from _processes import BenchmarkError
from _report import Samples, median, select
from _ringtap import HOST, Receiver, free_port, send, traffic

TARGET_PCT = 1.0
KINDS = ("consistent", "burst")
SHARES = (0.8, 0.4, 0.1)  # heaviest first: a quick run may have no time for the others
_OVERHEAD_S = 2.0  # time beyond a plan's length: start and end of sender and receiver
_MAX_TAKEN_PCT = 2.0  # of the cores' time; at 80 % of the ceiling, the cores have little to spare


def calibrate(bench: Bench) -> float | None:
    """Measure the ceiling of this host in payload bits per second, over loopback; None (and a note) if it failed.

    ringtap keeps the calibration in the cache folder, here the run's. Every later sender uses it, as a user's does.
    """
    with bench.sample("calibrate") as figures:
        ended = traffic(bench.processes, "calibrate", "--json", timeout_s=60)
        figures.update(json.loads(ended.stdout.splitlines()[-1]))
        figures.pop("host", None)  # the machine's name is private
        if figures["ceiling_bps"] <= 0:
            raise BenchmarkError("calibrate found no ceiling")
        figures["ceiling_gbps"] = figures["ceiling_bps"] / 1e9
    return median(bench.samples.get("calibrate", []), "ceiling_bps")


def measure(bench: Bench, ceiling_bps: float, length_s: float, repeat: int) -> None:
    """Take one sample of each kind at each share as time allows."""
    for share in SHARES:
        for kind in KINDS:
            if bench.left_s() < length_s + _OVERHEAD_S:
                bench.notes.append(f"The time of --quick did not allow {kind} traffic at {share:.0%} of the ceiling.")
                continue
            with bench.sample("load", kind=kind, share=f"{share:.0%}", repeat=repeat) as figures:
                port = free_port()
                plan = bench.path("load.plan")
                load = ["--kind", kind, "--load", f"{round(share * ceiling_bps)}bit", "--duration", f"{length_s}s"]
                traffic(bench.processes, "plan", *load, "--to", f"{HOST}:{port}", "-o", plan)
                figures.update(_sent(bench, plan, port, length_s))


def _sent(bench: Bench, plan: Path, port: int, length_s: float) -> dict[str, Any]:
    with plan.open() as file:
        header = json.loads(file.readline())
    planned_bps = header["bytes"] * 8 / (header["duration_ns"] / 1e9)
    before = CpuTimes.now()
    with Receiver(bench.processes, port):
        summary = send(bench.processes, plan, timeout_s=length_s).summary
    achieved_bps = float(summary["achieved_bps"])
    figures: dict[str, Any] = {"planned_gbps": planned_bps / 1e9, "achieved_gbps": achieved_bps / 1e9}
    figures["error_pct"] = abs(achieved_bps / planned_bps - 1) * 100
    figures |= {"others_pct": before.others_pct_since(), "stolen_pct": before.stolen_pct_since()}
    # The achieved rate covers the time until the last flow's end, so a backlog at the plan's end lowers it
    figures["tail_s"] = summary["acked_bytes"] * 8 / achieved_bps - summary["duration_s"]
    # a sample that misses the target beside busy programs says nothing about the sender
    taken_pct = figures["others_pct"] + figures["stolen_pct"]
    figures["is_doubtful"] = figures["error_pct"] > TARGET_PCT and taken_pct > _MAX_TAKEN_PCT
    return figures | {name: summary[name] for name in ("flows", "unfinished", "failed", "missed_slots")}


def _errors(samples: Samples) -> dict[tuple[str, str], float | None]:
    """Return the median error of each load over the samples without doubt; None if there are none."""
    cases = dict.fromkeys((sample["kind"], sample["share"]) for sample in samples.get("load", []))
    return {
        (kind, share): median(select(samples, "load", kind=kind, share=share, is_doubtful=False), "error_pct")
        for kind, share in cases
    }


def worst_error_pct(samples: Samples) -> float | None:
    """Return the largest error of all loads; None if it may be that of a load which this run cannot judge."""
    errors = _errors(samples).values()
    worst = max((error for error in errors if error is not None), default=None)
    return None if None in errors and (worst or 0.0) <= TARGET_PCT else worst


def unjudged(samples: Samples) -> list[str]:
    """Return a sentence for each load whose error this run cannot judge."""
    return [
        f"This run cannot judge {kind} traffic at {share} of the ceiling: it missed its planned load while other "
        f"programs or the machine's own host took more than {_MAX_TAKEN_PCT:g} % of the cores' time. Measure again on "
        "a quiet machine."
        for (kind, share), error in _errors(samples).items()
        if error is None
    ]
