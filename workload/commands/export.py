"""Implements ``ringtap workload export``: writes a workload as the input of another simulator or benchmark."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtap.core.command_options import add_force, add_json
from ringtap.core.errors import UsageError
from ringtap.core.units import whole_number
from ringtap.workload.command_options import add_network, algorithms, network, ranks_per_host, topology, write_output

if TYPE_CHECKING:
    from ringtap.workload.lowering import Algorithms
    from ringtap.workload.workload import Workload

_FORMATS = ("chakra", "goal", "astra1", "param", "hpcc", "plan")


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb ``workload export``."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("workload", type=Path, metavar="W", help="a directory of execution traces")
    parser.add_argument("--to", required=True, choices=_FORMATS, help="format of the file")
    add_network(parser)
    parser.add_argument(
        "--node", action="append", default=[], metavar="ADDRESS:PORT", help="for plan: a rank; one for each, in order"
    )
    parser.add_argument("--iterations", default="1", metavar="N", help="for plan: iterations (1)")
    parser.add_argument(
        "-o", dest="output", required=True, metavar="FILE", type=Path, help="file to write; for chakra a new directory"
    )
    add_force(parser)
    add_json(parser)
    parser.set_defaults(handler=_export)


def _export(options: argparse.Namespace) -> int:
    from ringtap.workload.astra_sim_1 import workload_file
    from ringtap.workload.export import goal, param
    from ringtap.workload.lowering import lower
    from ringtap.workload.workload import check_workload, read_workload

    if options.output.exists() and (not options.force or options.to == "chakra"):
        what = "directory" if options.to == "chakra" else "file or add --force"
        raise UsageError(f"{options.output} exists: name another {what}")
    workload, chosen = read_workload(options.workload), algorithms(options)
    lines: Iterable[str] = ()
    lost: list[str] = []
    if options.to == "chakra":
        _export_directory(options, workload, chosen)
    elif options.to == "goal":
        write_output(options.output, goal(workload, chosen))
    elif options.to in ("hpcc", "plan"):
        lowered = lower(workload, chosen)
        check_workload(lowered)
        if options.to == "plan":
            _export_plan(options, lowered)
        else:
            lines, lost = _flows(options, lowered)
            write_output(options.output, lines)
    elif options.to == "astra1":
        lines, lost = workload_file(workload)
        write_output(options.output, lines)
    else:
        trace, lost = param(workload)
        write_output(options.output, [json.dumps(trace, indent=1)])
    if options.json:
        files = (
            [str(path) for path in sorted(options.output.iterdir())]
            if options.to == "chakra"
            else [str(options.output)]
        )
        print(json.dumps({"format": options.to, "ranks": workload.ranks, "files": files, "warnings": lost}))
    else:
        print("\n".join([f"Wrote {options.output}", *(f"Warning: {text}" for text in lost)]))
    return 0


def _export_directory(options: argparse.Namespace, workload: Workload, chosen: Algorithms) -> None:
    from ringtap.workload.astra_sim import write_astra_sim

    if ranks_per_host(options, workload) > 1:
        raise UsageError("ASTRA-sim needs one rank per host: add --gpus-per-node 1")
    hosts, latency_s = topology(options, workload.ranks)
    write_astra_sim(workload, hosts, chosen.all_reduce, latency_s, options.output)


def _export_plan(options: argparse.Namespace, lowered: Workload) -> None:
    from ringtap.workload.workload_to_flow_plan import operations

    if not options.node:
        raise UsageError("--node is missing: a plan needs ADDRESS:PORT of each rank, in order")
    iterations = whole_number(options.iterations, "--iterations")
    name = options.workload.resolve().name
    options.write_replay(operations(lowered), options.node, iterations, name, options.output, options.force)


def _flows(options: argparse.Namespace, lowered: Workload) -> tuple[list[str], list[str]]:
    from ringtap.workload.export import hpcc
    from ringtap.workload.lowering import Algorithms

    used = network(options, lowered, Algorithms())
    return hpcc(lowered, used.simulate(lowered), used.ranks_per_host)
