"""Time and memory of simulations against the number of ranks, and of cross traffic (docs/method/simulation.md).

python benchmarks/workload_simulation.py [--quick] [-o FILE]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401 -- first: lets the others import ringtap
import numpy as np
from _machine import CpuTimes, describe
from _result import write_result

from ringtap.core.thesis_neural_networks import BUCKET_BYTES
from ringtap.workload.execution_trace import Node, NodeType
from ringtap.workload.lowering import Algorithms
from ringtap.workload.simulate_iterations import simulate
from ringtap.workload.simulation import CrossFlows, Simulation
from ringtap.workload.simulation_kernel import compiled
from ringtap.workload.topologies import star
from ringtap.workload.workload import Workload

BUCKETS, RATE_BPS = 100, 25e9
RANKS = {
    "ring": (10, 100, 1000),
    "double-tree": (10, 100, 1000, 10_000),
    "hierarchical": (10, 100, 1000, 10_000),
    "halving-doubling": (16, 128, 1024, 8192),
    "in-network": (10, 100, 1000, 10_000),
}
CROSS_FLOWS = (100_000, 1_000_000, 2_000_000)
GROUPS = {10: 5, 100: 10, 1000: 10, 10_000: 100}  # ranks per node, for hierarchical
FLOW_BYTES, LOAD = 1_700_000, 0.8  # cross traffic: mean size of web-search flows, and share of the rate


def iteration(ranks: int, buckets: int) -> Workload:
    """Return an iteration in which each all-reduce begins after a part of the backward pass and the one before.

    Rank 0 computes 1 us longer, because ranks that are alike would be simulated as one.
    """
    trace: list[Node] = []
    for number in range(buckets):
        compute, reduce = 2 * number + 1, 2 * number + 2
        after = [compute - 2] if number else []
        trace.append(Node(compute, f"backward{number}", NodeType.COMP, after, duration_us=1000))
        attributes = {"comm_type": 0, "comm_size": BUCKET_BYTES}
        waits = [compute, *([reduce - 2] if number else [])]
        trace.append(Node(reduce, f"bucket{number}", NodeType.COMM_COLL, waits, attributes=dict(attributes)))
    slower = [replace(node, duration_us=node.duration_us + 1) if node.id == 1 else node for node in trace]
    return Workload([slower, *[trace] * (ranks - 1)])


def reduced(name: str, ranks: int, buckets: int) -> dict[str, Any]:
    """Simulate an iteration on a star, and return its cost."""
    chosen = Algorithms(name, group=GROUPS.get(ranks, 1))
    workload, topology = iteration(ranks, buckets), star(ranks + chosen.others, RATE_BPS)
    begin_s = time.perf_counter()
    simulated = simulate(workload, topology, chosen)
    seconds = time.perf_counter() - begin_s
    messages = buckets * len(next(iter(chosen._graphs.values())))
    return {"what": name, "ranks": ranks, "messages": messages, "s": seconds, "iteration_s": simulated.iteration_s}


def crossed(flows: int) -> dict[str, Any]:
    """Simulate random flows of one pair of hosts at 80 % load, and return their cost."""
    draw = np.random.default_rng(1)
    gap_s = FLOW_BYTES * 8 / (LOAD * RATE_BPS)
    begins, sizes = np.cumsum(draw.exponential(gap_s, flows)), np.ceil(draw.exponential(FLOW_BYTES, flows))
    zeros = np.zeros(flows, np.int64)
    cross = CrossFlows(zeros, zeros + 1, sizes, begins, zeros - 1, np.zeros(flows))
    begin_s = time.perf_counter()
    ends_s = Simulation(star(2, RATE_BPS), cross=cross).run().cross_end_s
    return {"what": "cross traffic", "ranks": 0, "messages": flows, "s": time.perf_counter() - begin_s,
            "iteration_s": float(ends_s.max())}  # fmt: skip


def measured(name: str, number: int, buckets: int) -> dict[str, Any]:
    """Run a case in a process of its own, and return its cost with the peak of its memory."""
    command = [sys.executable, __file__, "--case", name, str(number), str(buckets)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        return {"what": name, "ranks": number, "error": done.stderr.strip().splitlines()[-1:] or "killed"}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def case(name: str, number: int, buckets: int) -> dict[str, Any]:
    """Return the cost of a case in this process."""
    compiled()
    found = crossed(number) if name == "cross" else reduced(name, number, buckets)
    return found | {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def main() -> int:
    """Print a table and, last, one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="ten buckets, 1,000 ranks and 100,000 flows at most")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the JSON object to a file")
    options = parser.parse_args()
    if options.case:
        name, number, buckets = options.case
        print(json.dumps(case(name, int(number), int(buckets))))
        return 0
    buckets, most = (10, 1024) if options.quick else (BUCKETS, 10_000)
    cases = [(name, ranks) for name, every in RANKS.items() for ranks in every if ranks <= most]
    cases += [("cross", flows) for flows in CROSS_FLOWS if flows <= 100_000 or not options.quick]
    before, found = CpuTimes.now(), []
    print("| what | ranks | messages | time, s | per message, ns | peak memory, GB |\n|---|---|---|---|---|---|")
    for name, number in cases:
        one = measured(name, number, buckets)
        found.append(one)
        if "error" in one:
            print(f"| {name} | {number:,} | – | {one['error']} | – | – |", flush=True)
            continue
        ranks = f"{one['ranks']:,}" if one["ranks"] else "–"
        print(
            f"| {one['what']} | {ranks} | {one['messages']:,} | {one['s']:.2f} | "
            f"{1e9 * one['s'] / one['messages']:.0f} | {one['peak_bytes'] / 1e9:.2f} |",
            flush=True,
        )
    about = describe() | {"buckets": buckets, "others_pct": before.others_pct_since()}
    write_result({"about": about, "cases": found}, options.output)
    return 1 if any("error" in one for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
