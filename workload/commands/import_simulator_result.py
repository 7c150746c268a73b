"""Implements ``ringtap workload import``: reads the result of another simulator from its log."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from ringtap.core.command_options import add_json
from ringtap.core.terminal_escaping import text_table
from ringtap.workload.command_options import add_network, algorithms, network
from ringtap.workload.simulator_logs import SimulatorLog, read_log


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb ``workload import``."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument(
        "log",
        type=Path,
        metavar="LOG",
        help="log of ASTRA-sim 1.0 or 2.x or of LogGOPSim, or a CSV table of ASTRA-sim 1.0",
    )
    parser.add_argument(
        "--workload", type=Path, metavar="W", help="also simulate an iteration of this workload, for comparison"
    )
    add_network(parser)
    add_json(parser)
    parser.set_defaults(handler=_import)


def _import(options: argparse.Namespace) -> int:
    found = read_log(options.log)
    here_s = None if options.workload is None else _iteration_s(options, found)
    if options.json:
        print(json.dumps(found.to_json() | ({} if here_s is None else {"one_iteration_s": here_s})))
        return 0
    print(found.sentence(here_s))
    rows = [[layer, what.removesuffix("_cycles").replace("_", " "), f"{cycles:,}"]
            for layer, values in found.layers.items() for what, cycles in values.items() if cycles]  # fmt: skip
    if rows:
        print("\n".join(text_table([["layer", "spent on", "cycles"], *rows], left=2)))
    if len(found.runs) > 1:
        rows = [[run, f"{values['cycles']:,}" if "cycles" in values else ""] for run, values in found.runs.items()]
        print("\n".join(text_table([["run", "cycles"], *rows])))
    print("\n".join(f"Warning: {text}" for text in found.warnings), end="\n" if found.warnings else "")
    return 0


def _iteration_s(options: argparse.Namespace, found: SimulatorLog) -> float:
    from ringtap.workload.simulator_programs import longest_chain_ns
    from ringtap.workload.workload import read_workload

    workload, chosen = read_workload(options.workload), algorithms(options)
    found.check_ranks(workload.ranks, chosen.others, str(options.log))
    used = network(options, workload, chosen)
    here_s = used.simulate(workload).iteration_s
    rate_bps = max(used.topology.rate_bps) if used.ranks_per_host == 1 else math.inf
    found.check_chain(longest_chain_ns(workload, rate_bps, used.latency_s))
    return here_s
