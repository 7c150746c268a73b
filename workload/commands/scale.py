"""Implements ``ringtap workload scale``: makes a workload of more workers, other batches, models or processors."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ringtap.core.command_options import add_json
from ringtap.core.errors import UsageError
from ringtap.core.units import counted, whole_number
from ringtap.workload.command_options import ranks_per_host
from ringtap.workload.scaling import Scaling, scale, with_times
from ringtap.workload.workload import read_workload, summary, write_workload

MAX_WORKERS = 100_000


def register(subparsers: Any, name: str, summary_: str) -> None:
    """Add the arguments of the verb ``workload scale``."""
    parser = subparsers.add_parser(name, help=summary_, description=f"{summary_[0].upper()}{summary_[1:]}.")
    parser.add_argument("workload", type=Path, metavar="W", help="a directory of execution traces")
    parser.add_argument("--workers", metavar="N", help="number of ranks: the data-parallel groups grow")
    parser.add_argument(
        "--data-parallel", default="", metavar="GROUP,...",
        help="with --workers: the data-parallel groups, by name or description, where the traces do not tell; or all",
    )  # fmt: skip
    for option, text in (("batch", "samples of a worker"), ("parameters", "parameters"), ("compute", "computing time")):
        parser.add_argument(
            f"--{option}", default="1x", metavar="FACTOR", help=f"factor of the {text}, such as 2x (1x)"
        )
    parser.add_argument("--gpus-per-node", metavar="G", help="workers at each host (1)")
    parser.add_argument(
        "--flop-per-s", metavar="F", help="operations per s of a processor, for computations without a duration"
    )
    parser.add_argument(
        "--bytes-per-s", metavar="B", help="with --flop-per-s: bytes per s of its memory (no limit of computations)"
    )
    parser.add_argument(
        "--law", action="append", default=[], type=Path, metavar="W2",
        help="a workload of the same job with another batch size, for --batch; may be repeated",
    )  # fmt: skip
    parser.add_argument("-o", dest="output", required=True, metavar="W", type=Path, help="directory to create")
    add_json(parser)
    parser.set_defaults(handler=_scale)


def _factor(text: str, option: str) -> float:
    try:
        factor = float(text.removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 1e-6 <= factor <= 1e6:
        raise UsageError(f"{option} {text!r} is not a factor from 0.000001 to 1,000,000, such as 2x or 0.1x")
    return factor


def _rate(text: str | None, option: str) -> float | None:
    if text is None:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 1e6 <= rate <= 1e18:
        raise UsageError(f"{option} {text!r} is not a rate per s from 1e6 to 1e18, such as 312e12")
    return rate


def _scale(options: argparse.Namespace) -> int:
    workers = None if options.workers is None else whole_number(options.workers, "--workers", 1, MAX_WORKERS)
    batch, parameters, compute = (
        _factor(getattr(options, name), f"--{name}") for name in ("batch", "parameters", "compute")
    )
    flop_per_s, bytes_per_s = (
        _rate(getattr(options, f"{name}_per_s"), f"--{name}-per-s") for name in ("flop", "bytes")
    )
    if bytes_per_s is not None and flop_per_s is None:
        raise UsageError("--bytes-per-s goes with --flop-per-s: computations need the rate of their processor")
    workload = read_workload(options.workload, needs_times=flop_per_s is None)
    if flop_per_s is not None:
        workload = with_times(workload, flop_per_s, bytes_per_s)
    per_host = None if options.gpus_per_node is None else ranks_per_host(options, workload)
    data_parallel = tuple(filter(None, options.data_parallel.split(",")))
    if data_parallel and workers is None:
        raise UsageError("--data-parallel goes with --workers: it says which groups grow")
    scaling = Scaling(workers, per_host, batch, parameters, compute, data_parallel)
    if scaling == Scaling() and flop_per_s is None:
        raise UsageError("nothing is scaled: give --workers, --gpus-per-node, --batch, --parameters or --compute")
    if options.law and scaling.batch == 1:
        raise UsageError("--law is for another batch size: give --batch")
    scaled = scale(workload, scaling, [read_workload(path) for path in options.law])
    write_workload(scaled, options.output)
    if options.json:
        print(json.dumps(summary(scaled) | {"about": scaled.about}))
        return 0
    print(f"{counted(scaled.ranks, 'rank')}, in {options.output}")
    print("\n".join(f"Assumed: {text}" for text in scaled.about["assumptions"]))
    return 0
