"""Causes of the spread of iteration times under burst traffic, each alone: burst beside consistent traffic.

python benchmarks/bursts.py                        the plans' own variation, and a simulation at full size; a minute
python benchmarks/bursts.py FOLDER [--quick]       also measured; about 35 minutes, and again the same command goes on
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401 -- first: lets the others import ringtap
import numpy as np

import ringtap
from ringtap.analysis.runs.run import JobRun, read_run
from ringtap.analysis.sweeps.points import measure
from ringtap.core.models import profile_named
from ringtap.trafficgen.plans.web_search import PlanSpec, WebSearchPlan
from ringtap.workload.collectives import Shape, message_graph
from ringtap.workload.models import FORWARD_SHARE, buckets
from ringtap.workload.simulation import Simulation
from ringtap.workload.topologies import star

LOADS = (0.6, 0.8)
SCALE = 100
PAYLOAD_SHARE = 1448 / 1538  # of a full frame on the wire
CAPACITY_BPS = 25e9


@dataclass(frozen=True)
class Cause:
    """A condition that differs from the thesis's cluster at 1:100, or from the plan's defaults, in one respect.

    Attributes:
        title: name in the table.
        burst: keys of the plan's [burst].
        testbed: keys of the plan's [testbed].
        scale: scale of the testbed.
        has_consistent: True if consistent traffic is measured, too.
    """

    title: str
    burst: dict[str, Any] = field(default_factory=dict)
    testbed: dict[str, Any] = field(default_factory=dict)
    scale: int = SCALE
    has_consistent: bool = True


EACH = {"quiet_budget": "each"}
# queue and bucket in proportion to the rate: the same times
LARGER = {scale: {"queue": 40_000_000 // scale, "burst": 6_553_600 // scale} for scale in (30, 10)}
CAUSES = {
    "each": Cause("every quiet part exact", EACH),
    "together": Cause("quiet parts as drawn (default)", has_consistent=False),
    "scale-30": Cause("scale 1:30, exact", EACH, LARGER[30], 30),
    "scale-10": Cause("scale 1:10, exact", EACH, LARGER[10], 10),
    "queue-1ms": Cause("queue of 1.3 ms, exact", EACH, {"queue": "40kB"}),
    "queue-1ms-together": Cause("queue of 1.3 ms, as drawn", {}, {"queue": "40kB"}, has_consistent=False),
    "queue-96ms": Cause("queue of 96 ms, exact", EACH, {"queue": "3MB"}),
    "mtu-576": Cause("MTU 576, exact", EACH, {"mtu": 576}),
    "burst-10ms": Cause("10 ms in 100 ms, exact", EACH | {"length": "10ms", "period": "100ms"}, has_consistent=False),
    "burst-100ms": Cause("100 ms in 1 s, exact", EACH | {"length": "100ms", "period": "1s"}, has_consistent=False),
}


def run(folder: Path, name: str, model: str, quick: bool) -> list[list[str]]:
    """Measure a model under one condition, and return the rows of the table."""
    cause = CAUSES[name]
    path = folder / f"{name}-{model}"
    window = {"settle": "2s", "min_time": "8s", "min_iterations": 20, "max_time": "25s"}
    if quick:
        window = {"settle": "0.5s", "min_time": "1s", "min_iterations": 3, "max_time": "2s"}
    ringtap.run_sweep(
        output=path, resume=True, progress=partial(_tell, path.name),
        models=[model], traffic=["consistent", "burst"] if cause.has_consistent else ["burst"],
        loads=[0, *LOADS], scale=cause.scale, burst=cause.burst, testbed=cause.testbed, window=window,
    )  # fmt: skip
    sweep = read_run(path)
    assert not isinstance(sweep, JobRun)
    rows = []
    for point in measure(sweep):
        if point.requested_bps and point.cross_gbps is not None:
            spread = "-" if point.variation is None else f"{point.variation:.1%}"
            row = [model, cause.title, point.traffic, f"{point.cross_gbps:.1f}", f"{point.mean_s:.3f}", spread]
            rows.append([*row, f"{point.p99_s:.3f}", str(point.iterations)])
    return rows


def _tell(name: str, state: Any) -> None:
    if state.message:
        print(f"{name}: {state.message}", file=sys.stderr, flush=True)


def offered_spread(kind: Any, quiet_budget: Any, load: float, length_s: float) -> float:
    """Standard deviation over mean of the bytes that a plan starts within windows of a length."""
    bps, seconds = load * CAPACITY_BPS / SCALE, 120
    spec = PlanSpec(kind, bps, seconds * 10**9, ("host:1",), 1, SCALE, quiet_budget=quiet_budget)
    flows = list(WebSearchPlan(spec).flows())
    starts_s = np.array([flow.start_ns for flow in flows]) / 1e9
    windows = np.arange(0, seconds + 1e-9, length_s)
    sizes = np.histogram(starts_s, windows, weights=[float(flow.size_bytes) for flow in flows])[0]
    return float(sizes.std() / sizes.mean())


def simulated(model: str, kind: Any, quiet_budget: Any, load: float, seconds: int) -> np.ndarray:
    """Iteration times of three workers at full size, as fluids: no packets, no windows, no losses.

    S2 sends the flows of a plan to S0 (configuration B), each at its time; all flows share links max-min fairly.
    """
    profile = profile_named(model)
    every = list(buckets(profile))
    shares = sum(share for _, share in every)
    simulation = Simulation(star(4, CAPACITY_BPS * PAYLOAD_SHARE))
    ring = simulation.place(message_graph("ring", Shape(3, 3 << 20)), [0, 1, 2])
    to_s0 = simulation.place(message_graph("send", Shape(2, 1 << 20)), [3, 0])
    spec = PlanSpec(kind, load * CAPACITY_BPS, seconds * 10**9, ("host:1",), 1, quiet_budget=quiet_budget)
    for flow in WebSearchPlan(spec).flows():
        start = simulation.compute(flow.start_ns / 1e9)
        message = simulation.collective(to_s0, flow.size_bytes)
        simulation.part(message, 0, [start])
        simulation.part(message, 1, [start])
    ends, done = [], [[], [], []]
    for _ in range(int(seconds / profile.compute_s)):
        computed = [[simulation.compute(profile.compute_s * FORWARD_SHARE, done[rank])] for rank in range(3)]
        reduced: list[list[int]] = [[], [], []]
        for size_bytes, share in every:
            backward_s = profile.compute_s * (1 - FORWARD_SHARE) * share / shares
            computed = [[simulation.compute(backward_s, computed[rank])] for rank in range(3)]
            bucket = simulation.collective(ring, size_bytes)
            reduced = [[simulation.part(bucket, rank, [*computed[rank], *reduced[rank]])] for rank in range(3)]
        done = [[simulation.compute(0.0, [*computed[rank], *reduced[rank]])] for rank in range(3)]
        ends.append([each[0] for each in done])
    ended_s = simulation.run().end_s[ends].max(axis=1)
    return np.diff(ended_s[ended_s < seconds])[5:]


def table(head: list[str], rows: list[list[str]]) -> None:
    """Print a table in Markdown."""
    for row in [head, ["---"] * len(head), *rows]:
        print(f"| {' | '.join(row)} |")


def main() -> int:
    """Print the spread of what the plans offer, then that of the measured iteration times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="FOLDER", help="run directories; what is there is resumed"
    )
    parser.add_argument("--quick", action="store_true", help="one condition with short windows")
    options = parser.parse_args()
    lengths = (0.01, 0.1, 0.3, 1.0)
    kinds = (("consistent", "each"), ("burst", "each"), ("burst", "together"))
    offered = []
    for kind, budget in kinds:
        title = f"burst, {budget}" if kind == "burst" else kind
        offered.append([title, *(f"{offered_spread(kind, budget, 0.8, length):.1%}" for length in lengths)])
    table(["plan at 80 % load", *(f"{length:g} s" for length in lengths)], offered)
    print()
    rows: list[list[str]] = []
    for model, seconds in (("resnet50", 60), ("vgg16", 150)):
        for load in LOADS:
            for kind, budget in kinds:
                times = simulated(model, kind, budget, load, seconds // 10 if options.quick else seconds)
                title = f"burst, {budget}" if kind == "burst" else kind
                row = [profile_named(model).title, title, f"{load:.0%}", f"{times.mean():.3f}"]
                rows.append(
                    [*row, f"{times.std() / times.mean():.1%}", f"{np.percentile(times, 99):.3f}", str(len(times))]
                )
    table(["simulated", "plan", "load", "mean, s", "std/mean", "p99, s", "iterations"], rows)
    if options.folder is None:
        return 0
    print()
    names = ["together"] if options.quick else list(CAUSES)
    models = ["resnet50"] if options.quick else ["resnet50", "vgg16"]
    rows = []
    for model in models:
        for name in names:
            rows += run(options.folder, name, model, options.quick)
    head = ["model", "condition", "traffic", "load, Gbit/s", "mean, s", "std/mean", "p99, s", "iterations"]
    table(head, [[profile_named(row[0]).title, *row[1:]] for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
