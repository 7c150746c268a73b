"""``ringtap demand``: the bytes that a training iteration sends, and the bandwidth that it needs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ringtap.analysis.model.demand import demand
from ringtap.options import add_json
from ringtap.units import counted, format_duration, format_rate, format_size, parse_duration_s, whole_number


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb ``demand``."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("--params", required=True, metavar="COUNT", help="parameters of the model, 32 bit each")
    parser.add_argument("--workers", required=True, metavar="N", help="number of workers")
    parser.add_argument("--iteration", metavar="TIME", help="mean iteration time, e.g. 370ms: gives the bandwidth")
    parser.add_argument(
        "--collective",
        default="ring",
        metavar="NAME",
        help="ring (default), reduce-scatter-all-gather, parameter-server, tree or hierarchical",
    )
    parser.add_argument("--group", default="1", metavar="G", help="workers that share a node, for hierarchical")
    add_json(parser)
    parser.set_defaults(handler=_demand)


def _demand(options: argparse.Namespace) -> int:
    result = demand(
        whole_number(options.params, "--params"),
        whole_number(options.workers, "--workers"),
        options.collective,
        whole_number(options.group, "--group"),
    )
    iteration_s = None if options.iteration is None else parse_duration_s(options.iteration)
    required_bps = None if iteration_s is None else result.required_bps(iteration_s)
    if options.json:
        item: dict[str, Any] = {"collective": result.collective, "parameters": result.parameters}
        item |= {"workers": result.workers, "demand_bytes": result.worker_bytes, "demand_mb": result.worker_bytes / 1e6}
        item |= {"busiest_link_bytes": result.busiest_link_bytes, "busiest_link_mb": result.busiest_link_bytes / 1e6}
        item |= {"iteration_s": iteration_s, "required_bps": required_bps}
        item |= {"required_gbps": None if required_bps is None else required_bps / 1e9, "source": result.source}
        print(json.dumps(item, indent=1, allow_nan=False))
        return 0
    print(
        f"{result.collective}, {counted(result.workers, 'worker')}, {counted(result.parameters, 'parameter')} of 32 bit"
    )
    print(f"Demand per worker and iteration  {format_size(result.worker_bytes)}")
    print(f"Busiest link, one direction      {format_size(result.busiest_link_bytes)}")
    if iteration_s is not None and required_bps is not None:
        time = format_duration(iteration_s)
        print(f"Bandwidth required               {format_rate(required_bps)} at {time} per iteration")
    print(f"Source: {result.source}")
    return 0
