"""Implements ``ringtap workload new``: makes a workload from a profile, from torch's traces, a model or a layout."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtap.core.command_options import add_json
from ringtap.core.errors import UsageError
from ringtap.core.thesis_neural_networks import PROFILES, profile_named
from ringtap.core.units import counted, format_size, parse_duration_s, whole_number

if TYPE_CHECKING:
    from ringtap.workload.workload import Workload


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb ``workload new``."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=Path, metavar="RUN", help="a run recorded with ringtap run --profile")
    source.add_argument(
        "--kineto", type=Path, nargs="+", metavar="FILE",
        help="traces that torch.profiler exported, one per rank, or their directory",
    )  # fmt: skip
    source.add_argument("--model", metavar="NAME", help=f"one of {', '.join(PROFILES)}")
    source.add_argument("--layout", type=Path, metavar="TOML", help="a transformer, and how ranks share it")
    parser.add_argument("--workers", metavar="N", help="with --model: number of data-parallel workers")
    parser.add_argument("--compute", metavar="TIME", help="with --model: forward and backward pass (the model's)")
    parser.add_argument(
        "--execution-trace", type=Path, nargs="+", default=[], metavar="FILE",
        help="with --kineto: PyTorch's execution traces, in the same order, for traces without shapes",
    )  # fmt: skip
    parser.add_argument(
        "--alike", action="store_true", help="with --kineto: ranks without a trace do what the first rank with one does"
    )
    parser.add_argument("--steps", metavar="K", help="with --kineto: steps of the profiler that are one iteration (1)")
    parser.add_argument(
        "--gpus-per-node", metavar="G", help="ranks at each host, between which messages take only the latency (1)"
    )
    parser.add_argument("--batch", metavar="N", help="with --run, --kineto: samples of a worker (the first input's)")
    parser.add_argument("-o", dest="output", required=True, metavar="W", type=Path, help="directory to create")
    add_json(parser)
    parser.set_defaults(handler=_new)


def _new(options: argparse.Namespace) -> int:
    if options.execution_trace and options.kineto is None:
        raise UsageError("--execution-trace goes with --kineto: it adds shapes to the traces there")
    if options.alike and options.kineto is None:
        raise UsageError("--alike goes with --kineto: it says that ranks without a trace do what the others do")
    if options.steps is not None and options.kineto is None:
        raise UsageError("--steps goes with --kineto: other sources have iterations of their own")
    from ringtap.workload.command_options import ranks_per_host
    from ringtap.workload.workload import summary, write_workload

    make = _of_layout if options.layout is not None else _of_profiles if options.model is None else _of_model
    made, words, hint = make(options)
    if options.gpus_per_node is not None:
        made.about["gpus_per_node"] = ranks_per_host(options, made)
    write_workload(made, options.output)
    if options.json:
        print(json.dumps(summary(made) | {"about": made.about}))
        return 0
    print(f"{words}, in {options.output}")
    print("".join(f"Assumed: {text}\n" for text in made.about["assumptions"]) + hint, end="")
    print(f"Next: ringtap workload simulate {options.output} --capacity RATE")
    return 0


Made = tuple["Workload", str, str]  # a workload, what it is in words, and a hint behind what is assumed


def _of_model(options: argparse.Namespace) -> Made:
    from ringtap.workload.model_workloads import buckets, model_workload

    if options.batch is not None:
        raise UsageError("--batch goes with --run or --kineto: the time of a model's computation is --compute")
    if options.workers is None:
        raise UsageError("--workers is missing: it is the number of data-parallel workers")
    profile, workers = profile_named(options.model), whole_number(options.workers, "--workers")
    if workers < 1:
        raise UsageError(f"{workers} workers: at least one is needed")
    made = model_workload(
        profile, workers, None if options.compute is None else parse_duration_s(options.compute, "--compute")
    )
    sizes = [size for size, _ in buckets(profile)]
    words = (
        f"{profile.title} on {counted(workers, 'worker')}: {counted(len(sizes), 'bucket')} of "
        f"{format_size(min(sizes))} to {format_size(max(sizes))}, {made.about['compute_s']:g} s of computation"
    )
    return made, words, ""


def _communication(made: Workload) -> str:
    from ringtap.workload.workload import summary

    item = summary(made)
    return (
        f"{counted(item['collectives'], 'collective')} of {format_size(item['collective_bytes'])} and "
        f"{counted(item['messages'], 'message')} of {format_size(item['message_bytes'])}"
    )


def _of_profiles(options: argparse.Namespace) -> Made:
    from ringtap.workload.kineto import read_kineto_traces
    from ringtap.workload.workload_from_profile import profile_workload, read_profiles

    for name in ("workers", "compute"):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name} goes with --model: ringtap workload scale changes the workload of a run")
    batch = None if options.batch is None else whole_number(options.batch, "--batch", 1)
    if options.kineto is None:
        profiles, ranks, name = read_profiles(options.run), None, options.run.resolve().name
    else:
        steps = 1 if options.steps is None else whole_number(options.steps, "--steps", 1)
        profiles = read_kineto_traces(options.kineto, options.execution_trace, alike=options.alike, steps=steps)
        ranks, name = profiles[0].ranks, options.kineto[0].resolve().name
    made = profile_workload(profiles, name, ranks)
    about = made.about
    if batch is not None:
        about["batch"] = batch
    parameters, known = about["parameters"], ""
    if parameters:
        elements = counted(sum(one["elements"] for one in parameters), "parameter")
        known = f"{elements} in {counted(len(parameters), 'tensor')}, "
    words = (
        f"{counted(made.ranks, 'rank')}: {known}{_communication(made)}, {about['compute_s']:.4g} s of computation in "
        f"{about['iteration_s']:.4g} s per iteration"
    )
    is_spread = profiles[0].device == "cuda" and made.ranks > 1 and options.gpus_per_node is None
    hint = (
        "Each GPU has a host of its own, so that all bytes use the network: if hosts have several GPUs, name their "
        "number with --gpus-per-node\n"
    )
    return made, words, hint if is_spread else ""


def _of_layout(options: argparse.Namespace) -> Made:
    from ringtap.workload.transformer import layout_workload, read_layout

    for name in ("workers", "compute", "batch", "gpus-per-node"):
        if getattr(options, name.replace("-", "_")) is not None:
            raise UsageError(f"--{name} does not go with --layout: the file says it")
    layout = read_layout(options.layout)
    made = layout_workload(layout, options.layout.stem)
    words = (
        f"{counted(layout.parameters, 'parameter')} on {counted(layout.ranks, 'rank')} (tensor "
        f"{layout.tensor_parallel} x data {layout.data_parallel} x pipeline {layout.pipeline_parallel}): "
        f"{_communication(made)}, up to {made.about['compute_s']:.4g} s of computation per rank"
    )
    return made, words, ""
