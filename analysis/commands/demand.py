"""Implements ``ringtap demand``: calculates the bytes that an iteration sends, and the bandwidth that it needs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ringtap.analysis.model.bytes_per_iteration import Demand, demand
from ringtap.core.command_options import add_json
from ringtap.core.errors import UsageError
from ringtap.core.terminal_escaping import text_table
from ringtap.core.thesis_neural_networks import PROFILES, ModelProfile, profile_named
from ringtap.core.units import (
    count_of,
    counted,
    format_duration,
    format_rate,
    format_size,
    parse_duration_s,
    whole_number,
)


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb ``demand``."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--params", metavar="COUNT", help="parameters of the model, such as 138M, 32 bit each")
    model.add_argument("--model", metavar="NAME", help=f"a model of the thesis: {', '.join(PROFILES)}")
    parser.add_argument("--workers", metavar="N", help="number of workers; with --tensors not needed")
    parser.add_argument(
        "--tensors", action="store_true", help="with --model: its parameter tensors, as the model registers them"
    )
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
    profile = None if options.model is None else profile_named(options.model)
    if options.tensors and profile is None:
        raise UsageError("--tensors needs --model: a number of parameters has no tensors")
    if options.workers is None and (options.iteration is not None or not options.tensors):
        raise UsageError("--workers is missing: the demand depends on the number of workers")
    result = None
    if options.workers is not None:
        result = demand(
            profile.parameters if profile else count_of(options.params, "--params"),
            whole_number(options.workers, "--workers"),
            options.collective,
            whole_number(options.group, "--group"),
        )
    iteration_s = None if options.iteration is None else parse_duration_s(options.iteration, "--iteration")
    tensors = profile if options.tensors else None
    if options.json:
        item: dict[str, Any] = {} if result is None else _demand_json(result, iteration_s)
        if tensors:
            item |= {"model": tensors.name, "parameters": tensors.parameters}
            item |= {"tensors": [tensor._asdict() for tensor in tensors.tensors]}
        print(json.dumps(item, indent=1, allow_nan=False))
        return 0
    if tensors:
        _print_tensors(tensors)
    if result is not None:
        _print_demand(result, iteration_s)
    return 0


def _demand_json(result: Demand, iteration_s: float | None) -> dict[str, Any]:
    required_bps = None if iteration_s is None else result.required_bps(iteration_s)
    item: dict[str, Any] = {"collective": result.collective, "parameters": result.parameters}
    item |= {"workers": result.workers, "demand_bytes": result.worker_bytes, "demand_mb": result.worker_bytes / 1e6}
    item |= {"busiest_link_bytes": result.busiest_link_bytes, "busiest_link_mb": result.busiest_link_bytes / 1e6}
    item |= {"iteration_s": iteration_s, "required_bps": required_bps}
    return item | {"required_gbps": None if required_bps is None else required_bps / 1e9, "source": result.source}


def _print_demand(result: Demand, iteration_s: float | None) -> None:
    bandwidth = ""
    if iteration_s is not None:
        rate = format_rate(result.required_bps(iteration_s))
        bandwidth = f"Bandwidth required               {rate} at {format_duration(iteration_s)} per iteration\n"
    print(
        f"{result.collective}, {counted(result.workers, 'worker')}, {counted(result.parameters, 'parameter')} of 32 bit"
    )
    print(f"Demand per worker and iteration  {format_size(result.worker_bytes)}")
    print(f"Busiest link, one direction      {format_size(result.busiest_link_bytes)}")
    print(f"{bandwidth}Source: {result.source}")


def _print_tensors(profile: ModelProfile) -> None:
    print(f"{profile.title}: {counted(profile.parameters, 'parameter')} in {counted(len(profile.tensors), 'tensor')}")
    rows = [["tensor", "shape", "parameters", "forward", "backward"]]
    for tensor in profile.tensors:
        shares = [f"{share:.2%}" for share in (tensor.forward_share, tensor.backward_share)]
        rows.append([tensor.name, " x ".join(map(str, tensor.shape)), f"{tensor.parameters:,}", *shares])
    print("\n".join(text_table(rows)))
