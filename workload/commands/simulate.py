"""Implements ``ringtap workload simulate``: simulates a workload's iterations on a network, with cross traffic."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtap.core.command_options import add_json, print_result
from ringtap.core.errors import UsageError
from ringtap.core.terminal_escaping import shell_word, text_table
from ringtap.core.units import counted, format_rate, parse_duration_s, whole_number
from ringtap.workload.command_options import add_network, algorithms, hosts_of, network, ranks_per_host, read_loads

if TYPE_CHECKING:
    from ringtap.workload.simulate_under_cross_traffic import CrossPlan, LoadSimulator
    from ringtap.workload.simulator_logs import SimulatorLog

_SIMULATORS = ("astra-sim", "loggopsim")


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb ``workload simulate``."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("workload", type=Path, metavar="W", help="a directory of execution traces")
    add_network(parser)
    parser.add_argument(
        "--iterations", metavar="N", help="iterations; the first one is left out (5; with --cross as many as last)"
    )
    parser.add_argument(
        "--loads", metavar="FROM:TO:STEP", help="cross traffic: rates, shares or per cent of a link (0)"
    )
    parser.add_argument(
        "--cross",
        action="append",
        default=[],
        metavar="PLAN",
        type=Path,
        help="cross traffic of a plan of ringtap traffic plan; may be repeated",
    )
    parser.add_argument(
        "--with", dest="others", action="append", default=[], metavar="NAME=PATH",
        help=f"also run another simulator that you have, without cross traffic: {', '.join(_SIMULATORS)}",
    )  # fmt: skip
    parser.add_argument("--time-limit", default="600s", metavar="TIME", help="time that it may run (600s)")
    parser.add_argument("--bottleneck", metavar="LINK", help="link with the cross traffic (default: to rank 0)")
    parser.add_argument(
        "-o", dest="output", metavar="RUN", type=Path, help="run directory to create, for report and fit"
    )
    add_json(parser)
    parser.set_defaults(handler=_simulate)


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
    return print_result(options, *result(options))


def result(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return what ``--json`` prints, and the lines that are printed without it.

    Raises:
        UsageError: the options are wrong, or an input cannot be read.
    """
    from ringtap.workload.simulate_iterations import busiest_links, critical_path
    from ringtap.workload.simulate_under_cross_traffic import LEAST_ITERATIONS, MAX_ITERATIONS
    from ringtap.workload.simulated_run import parameters_of, write_run
    from ringtap.workload.workload import assumed_of_others

    if options.output is not None and options.output.exists():
        raise UsageError(f"{options.output} exists: name another directory")
    if options.cross and options.loads is not None:
        raise UsageError("--loads and --cross are two kinds of cross traffic: give one of them")
    given, bounds = options.iterations, (LEAST_ITERATIONS, MAX_ITERATIONS)
    iterations = None if given is None else whole_number(given, "--iterations", *bounds)
    others, limit_s = read_simulators(options.others), parse_duration_s(options.time_limit, "--time-limit")
    simulator, plans = _simulator(options)
    if others and simulator.ranks_per_host > 1:
        raise UsageError("--with needs one rank per host: add --gpus-per-node 1")
    loads = read_loads(options.loads or "0", simulator.rate_bps)
    workload, network, rate_bps = simulator.workload, simulator.topology, simulator.rate_bps
    if options.output is not None:
        parameters_of(workload)
    points = [simulator.under_share(load, iterations) for load in loads]
    first = points[0].simulated
    if plans:
        alone, points = points[0], []
        for kind in dict.fromkeys(plan.kind for plan in plans):  # each series begins without cross traffic
            points.append(replace(alone, kind=kind))
            of_kind = [plan for plan in plans if plan.kind == kind]
            points += [simulator.under_plan(plan, first.iteration_s, iterations) for plan in of_kind]
    path = critical_path(workload, first)
    about = {"topology": network.name, "hosts": network.hosts, "bottleneck": network.links[simulator.bottleneck]}
    about |= {"collective": simulator.algorithms.all_reduce}
    once_s, results = _run_others(others, limit_s, simulator) if others else (0.0, [])
    if options.output is not None:
        write_run(options.output, options.workload.resolve().name, workload, points, rate_bps, about)
    shown = [point.to_json(rate_bps) for point in points]
    item: dict[str, Any] = {"ranks": workload.ranks, "capacity_bps": rate_bps} | about
    item |= {"points": shown, "critical_path": path._asdict(), "assumptions": assumed_of_others(workload)}
    item["link_bytes"] = dict(zip(network.links, first.link_bytes.tolist(), strict=True))
    if others:
        item |= {"one_iteration_s": once_s, "simulators": [each.to_json() for each in results]}
    lines = [f"Assumed: {text}" for text in item["assumptions"]]
    slowest = shown[-1]
    lines.append(
        f"{shown[0]['iteration_s']:.4g} s per iteration"
        + (f", {slowest['iteration_s']:.4g} s at {slowest['load']:.0%} load" if len(points) > 1 else "")
        + f": {counted(workload.ranks, 'rank')} on a {network.name}, {about['collective']}"
    )
    if len(points) > 1:
        lines.append(_table(shown, f"{about['bottleneck']} ({format_rate(rate_bps)})"))
    for each in results:
        lines += [f"One iteration alone: {each.sentence(once_s)}", *(f"Warning: {text}" for text in each.warnings)]
    lines += [path.sentence(), busiest_links(network, first.link_bytes)]
    if options.output is not None:
        lines.append(f"Next: ringtap report {shell_word(options.output)}")
    return item, lines


def _simulator(options: argparse.Namespace) -> tuple[LoadSimulator, list[CrossPlan]]:
    """Return the simulator and the plans of the command line, on a network with room for both."""
    from ringtap.workload.simulate_iterations import check_room
    from ringtap.workload.simulate_under_cross_traffic import LoadSimulator, read_cross
    from ringtap.workload.workload import read_workload

    workload, chosen = read_workload(options.workload), algorithms(options)
    plans = [read_cross(path, hosts_of(workload, chosen, ranks_per_host(options, workload))) for path in options.cross]
    hosts = max((plan.hosts for plan in plans), default=0)
    _, topology, latency_s, per_host = network(options, workload, chosen, hosts)
    check_room(topology, workload.ranks + chosen.others, per_host)
    if topology.hosts < hosts:
        raise UsageError(f"the topology has {counted(topology.hosts, 'host')}, but ranks and plans need {hosts:,}")
    bottleneck = options.bottleneck or topology.links[topology.path(1, 0)[-1] if topology.hosts > 1 else 0]
    if bottleneck not in topology.links:
        some = ", ".join(topology.links[:3])
        raise UsageError(f"--bottleneck {bottleneck!r} is no link of the {topology.name}: it has {some}, ...")
    place = topology.links.index(bottleneck)
    return LoadSimulator(workload, topology, chosen, latency_s, per_host, place), plans


def _run_others(others: dict[str, Path], limit_s: float, simulator: LoadSimulator) -> tuple[float, list[SimulatorLog]]:
    """Return the time of one iteration here, and the results of other simulators."""
    from ringtap.workload.simulate_iterations import simulate
    from ringtap.workload.simulator_programs import run_simulator

    job = simulator.workload, simulator.topology, simulator.algorithms
    results = [run_simulator(name, program, *job, simulator.latency_s, limit_s) for name, program in others.items()]
    return simulate(*job, latency_s=simulator.latency_s).iteration_s, results


def _table(points: list[dict[str, Any]], link: str) -> str:
    rows = [["cross traffic", "share", "Gbit/s", "iterations", "mean, s", "standard deviation, s"]]
    for point in points:
        numbers = [f"{point['load']:.0%}", f"{point['cross_bps'] / 1e9:.2f}", str(point["iterations"])]
        std_s = "–" if point["std_s"] is None else f"{point['std_s']:.4f}"
        rows.append([point["traffic"], *numbers, f"{point['iteration_s']:.4f}", std_s])
    title = f"Time of an iteration, by the share of {link} that cross traffic takes:"
    return "\n".join([title, *text_table(rows, left=1)])
