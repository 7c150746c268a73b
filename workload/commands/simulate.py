"""``ringtap workload simulate``: iteration times of a workload on a network, against cross traffic."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtap.errors import UsageError
from ringtap.options import add_force, add_json
from ringtap.terminal import text_table
from ringtap.units import counted, parse_duration_s, whole_number
from ringtap.workload.options import (
    add_algorithms,
    add_ranks_per_host,
    add_topology,
    algorithms,
    ranks_per_host,
    topology,
    write_output,
)

if TYPE_CHECKING:
    from ringtap.workload.lowering import Algorithms
    from ringtap.workload.simulator_logs import SimulatorLog
    from ringtap.workload.topologies import Topology
    from ringtap.workload.workload import Workload

_MAX_LOAD = 0.99
_SIMULATORS = ("astra-sim", "loggopsim")


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb ``workload simulate``."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("workload", type=Path, metavar="W", help="a directory of execution traces")
    add_algorithms(parser)
    add_topology(parser)
    add_ranks_per_host(parser)
    parser.add_argument("--iterations", default="5", metavar="N", help="iterations; the first one is left out (5)")
    parser.add_argument(
        "--loads", default="0", metavar="FROM:TO:STEP", help="cross traffic as shares of a link's rate (0)"
    )
    parser.add_argument(
        "--with", dest="others", action="append", default=[], metavar="NAME=PATH",
        help=f"also run another simulator that you have, without cross traffic: {', '.join(_SIMULATORS)}",
    )  # fmt: skip
    parser.add_argument("--time-limit", default="600s", metavar="TIME", help="time that it may run (600s)")
    parser.add_argument("--bottleneck", metavar="LINK", help="link with the cross traffic (default: to rank 0)")
    parser.add_argument(
        "-o", dest="output", metavar="POINTS.csv", type=Path, help="write the points, for report and fit"
    )
    add_force(parser)
    add_json(parser)
    parser.set_defaults(handler=_simulate)


def read_loads(text: str) -> list[float]:
    """Return the loads of FROM:TO:STEP, or of one number.

    Raises:
        UsageError: it is neither, or a load is not from 0 to 0.99.
    """
    try:
        numbers = [float(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        loads = numbers
    elif len(numbers) == 3 and numbers[2] > 0 and (numbers[1] - numbers[0]) / numbers[2] < 1000:
        count = int((numbers[1] - numbers[0]) / numbers[2] + 1e-9) + 1
        loads = [round(numbers[0] + step * numbers[2], 6) for step in range(count)]
    else:
        raise UsageError(f"--loads {text!r} is neither a number nor FROM:TO:STEP, for example 0:0.9:0.1")
    if not loads or not all(0 <= load <= _MAX_LOAD for load in loads):
        raise UsageError(f"--loads {text} has loads outside 0 to {_MAX_LOAD}")
    return loads


def read_simulators(given: list[str]) -> dict[str, Path]:
    """Return the programs of NAME=PATH by their names.

    Raises:
        UsageError: a name is unknown, or a path is missing.
    """
    found = {}
    for text in given:
        name, _, path = text.partition("=")
        if name not in _SIMULATORS or not path:
            raise UsageError(f"--with {text!r} is not NAME=PATH with a name of {', '.join(_SIMULATORS)}")
        found[name] = Path(path)
    return found


def _simulate(options: argparse.Namespace) -> int:
    import numpy as np

    from ringtap.workload.simulated_iterations import busiest_links, check_room, critical_path, simulate
    from ringtap.workload.workload import read_workload

    if options.output is not None and options.output.exists() and not options.force:
        raise UsageError(f"{options.output} exists: name another file or add --force")
    loads, iterations = read_loads(options.loads), whole_number(options.iterations, "--iterations")
    if not 2 <= iterations <= 100_000:
        raise UsageError(f"--iterations {iterations} is outside 2 to 100,000")
    others, limit_s = read_simulators(options.others), parse_duration_s(options.time_limit)
    workload, chosen = read_workload(options.workload), algorithms(options)
    endpoints, per_host = workload.ranks + chosen.others, ranks_per_host(options, workload)
    network, latency_s = topology(options, -(-endpoints // per_host))
    check_room(network, endpoints, per_host)
    if others and per_host > 1:
        raise UsageError("--with needs one rank per host: add --gpus-per-node 1")
    bottleneck = options.bottleneck or network.links[network.path(1, 0)[-1] if network.hosts > 1 else 0]
    if bottleneck not in network.links:
        some = ", ".join(network.links[:3])
        raise UsageError(f"--bottleneck {bottleneck!r} is no link of the {network.name}: it has {some}, ...")
    place = network.links.index(bottleneck)
    rate_bps = float(network.rate_bps[place])
    points, simulated = [], []
    for load in loads:
        share = np.ones(len(network.links))
        share[place] = 1 - load
        simulated.append(
            simulate(
                workload, network, chosen, iterations=iterations, latency_s=latency_s, rate_share=share,
                ranks_per_host=per_host,
            )
        )  # fmt: skip
        points.append({"load": load, "cross_bps": load * rate_bps, "iteration_s": simulated[-1].iteration_s})
    path = critical_path(workload, simulated[0])
    item = {"ranks": workload.ranks, "topology": network.name, "hosts": network.hosts, "bottleneck": bottleneck}
    item |= {"rate_bps": rate_bps, "collective": chosen.all_reduce, "points": points}
    item["critical_path"] = path._asdict()
    item["link_bytes"] = dict(zip(network.links, simulated[0].link_bytes.tolist(), strict=True))
    once_s, results = _run_others(others, limit_s, workload, network, chosen, latency_s) if others else (0.0, [])
    if others:
        item |= {"one_iteration_s": once_s, "simulators": [each.to_json() for each in results]}
    if options.output is not None:
        _write_points(options.output, options.workload.resolve().name, points)
    if options.json:
        print(json.dumps(item))
        return 0
    slowest = points[-1]
    print(
        f"{points[0]['iteration_s']:.4g} s per iteration"
        + (f", {slowest['iteration_s']:.4g} s at {slowest['load']:.0%} load" if len(points) > 1 else "")
        + f": {counted(workload.ranks, 'rank')} on a {network.name}, {chosen.all_reduce}, cross traffic on {bottleneck}"
    )
    if len(points) > 1:
        rows = [["load", "cross traffic, Gbit/s", "iteration, s"]]
        rows += [[f"{p['load']:.0%}", f"{p['cross_bps'] / 1e9:.2f}", f"{p['iteration_s']:.4f}"] for p in points]
        print("\n".join(text_table(rows, left=0)))
    print("".join(f"One iteration alone: {each.sentence(once_s)}\n" for each in results), end="")
    print(f"{path.sentence()}\n{busiest_links(network, simulated[0].link_bytes)}")
    if options.output is not None:
        print(f"Next: ringtap report {options.output} --workers {workload.ranks} --capacity {options.rate}")
    return 0


def _run_others(
    others: dict[str, Path],
    limit_s: float,
    workload: Workload,
    network: Topology,
    chosen: Algorithms,
    latency_s: float,
) -> tuple[float, list[SimulatorLog]]:
    """Return the time of one iteration here, and the results of other simulators."""
    from ringtap.workload.simulated_iterations import simulate
    from ringtap.workload.simulator_programs import run_simulator

    results = [run_simulator(name, program, workload, network, chosen, latency_s, limit_s)
               for name, program in others.items()]  # fmt: skip
    return simulate(workload, network, chosen, latency_s=latency_s).iteration_s, results


def _write_points(path: Path, name: str, points: list[dict[str, float]]) -> None:
    lines = ["model,traffic,bandwidth_gbps,iteration_s"]
    lines += [f"{name},simulated,{point['cross_bps'] / 1e9:.6g},{point['iteration_s']:.9g}" for point in points]
    write_output(path, "\n".join(lines) + "\n")
