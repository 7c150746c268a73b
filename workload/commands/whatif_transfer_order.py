"""Implements ``ringtap whatif``: calculates iteration times for other orders of tensors, or other overlap."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringtap.core.command_options import add_json, print_result
from ringtap.core.errors import UsageError, did_you_mean
from ringtap.core.terminal_escaping import text_table
from ringtap.core.thesis_neural_networks import BUCKET_BYTES, GRADIENT_BYTES
from ringtap.core.units import counted, format_rate, format_size, parse_duration_s, parse_size_bytes, whole_number
from ringtap.workload.command_options import capacity_bps, ranks_per_host, read_loads
from ringtap.workload.timed_tensors import COLUMNS, UnknownLayersError, read_tensors, workload_tensors
from ringtap.workload.transfer_order_times import (
    COLLECTIVES,
    MAX_WORKERS,
    METHODS,
    SLICE_PARAMETERS,
    LayerTensor,
    LogGP,
    ScheduledIteration,
    bound_s,
    bucket_times,
    network_of,
    schedules,
)

_TITLES = {"fifo": "FIFO", "tic": "TIC", "tac": "TAC", "p3": "P3", "bytescheduler": "ByteScheduler"}
_OF_ORDERS = ("overhead", "slice", "partition", "credit", "collective")  # options that say nothing of overlap
_SAME = 5e-4  # relative difference of times that are as good as equal


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb ``whatif``."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("workload", nargs="?", type=Path, metavar="W", help="a workload")
    parser.add_argument("--tensors", type=Path, metavar="FILE.csv", help=f"or a table with {', '.join(COLUMNS)}")
    parser.add_argument("--capacity", metavar="RATE", help="capacity of a worker's link")
    parser.add_argument("--collective", metavar="NAME", help=f"{' or '.join(COLLECTIVES)} (ring with W or --workers)")
    parser.add_argument("--workers", metavar="N", help="number of workers of a ring (the workload's)")
    parser.add_argument("--latency", default="0s", metavar="TIME", help="time of a message beside its bytes (0s)")
    parser.add_argument(
        "--overhead", default="0s", metavar="TIME", help="time for which a message occupies its sender (0s)"
    )
    parser.add_argument(
        "--loads", default="0", metavar="FROM:TO:STEP", help="cross traffic: rates, shares or per cent (0)"
    )
    parser.add_argument(
        "--slice", default=str(SLICE_PARAMETERS), metavar="P", help=f"parameters of P3's slices ({SLICE_PARAMETERS:,})"
    )
    parser.add_argument("--partition", metavar="SIZE", help="ByteScheduler's partitions (the best of 1 to 64 slices)")
    parser.add_argument(
        "--credit", metavar="SIZE", help="ByteScheduler's credit (the best of one message, 2 and 4 partitions)"
    )
    add_json(parser)
    parser.set_defaults(handler=_whatif, defaults={name: parser.get_default(name) for name in _OF_ORDERS})


def _whatif(options: argparse.Namespace) -> int:
    return print_result(options, *result(options))


def result(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return what ``--json`` prints, and the lines that are printed without it.

    Raises:
        UsageError: the options are wrong, or an input cannot be read.
    """
    rate_bps = capacity_bps(options.capacity)
    loads = read_loads(options.loads, rate_bps)
    partition, credit = (_size_bytes(getattr(options, name), f"--{name}") for name in ("partition", "credit"))
    sizes = GRADIENT_BYTES * whole_number(options.slice, "--slice", 1), partition, credit
    try:
        tensors, workers = _given(options)
    except UnknownLayersError as error:
        return _overlap(options, rate_bps, loads, error)
    network = network_of(
        workers,
        rate_bps,
        parse_duration_s(options.latency, "--latency"),
        parse_duration_s(options.overhead, "--overhead"),
    )
    networks = [network._replace(rate_bps=rate_bps * (1 - load)) for load in loads]
    found = [schedules(tensors, each, *sizes) for each in networks]
    points = [_point(*each, tensors) for each in zip(loads, networks, found, strict=True)]
    buckets_s = bucket_times(tensors, networks[0]) if workers else {}
    item = points[0] | _orders(tensors, found[0]) | {
        "capacity_bps": rate_bps, "collective": COLLECTIVES[bool(workers)], "workers": workers,
        "buckets": [{"bucket_bytes": size, "iteration_s": time_s} for size, time_s in buckets_s.items()],
        "points": points,
    }  # fmt: skip
    lines = [_headline(point) for point in points[:: max(len(points) - 1, 1)]]  # the first and the last one
    lines.append(f"Time of an iteration under each order, {_network(rate_bps, len(loads))}:")
    lines += text_table(_methods(points[0], found[0]) if len(points) == 1 else _loads(points))
    return item, lines + ([_advice(buckets_s)] if buckets_s else [])


def _overlap(
    options: argparse.Namespace, rate_bps: float, loads: Sequence[float], unknown: UnknownLayersError
) -> tuple[dict[str, Any], list[str]]:
    """Return what overlap is worth in a workload that does not say which layers have which tensors."""
    from ringtap.workload.overlap_gain import overlap_times
    from ringtap.workload.scaling import Scaling, scale
    from ringtap.workload.workload import assumed_of_others, read_workload

    if given := next((name for name in _OF_ORDERS if getattr(options, name) != options.defaults[name]), None):
        raise UsageError(f"--{given} is of orders of tensors, and {unknown}")
    workload = read_workload(options.workload)
    if options.workers is not None:
        workload = scale(workload, Scaling(whole_number(options.workers, "--workers")))
    options.gpus_per_node = None
    per_host, latency_s = ranks_per_host(options, workload), parse_duration_s(options.latency, "--latency")
    times = [overlap_times(workload, rate_bps * (1 - load), latency_s, per_host) for load in loads]
    assumptions = assumed_of_others(workload) if options.workers is None else workload.about["assumptions"]
    points = [{"load": load, **each._asdict(), "bound_s": each.bound_s}
              for load, each in zip(loads, times, strict=True)]  # fmt: skip
    item = {
        **points[0], "capacity_bps": rate_bps, "collective": "ring", "workers": workload.ranks,
        "gpus_per_node": per_host, "points": points, "assumptions": assumptions,
    }  # fmt: skip
    first = times[0]
    lines = [
        f"{first.recorded_s:.4g} s per iteration of {counted(workload.ranks, 'rank')}, of which perfect overlap would "
        f"save {1 - first.bound_s / first.recorded_s:.1%}"
        + (f"; without any overlap {first.serial_s:.4g} s" if first.serial_s is not None else ""),
        f"Time of an iteration, {_network(rate_bps, len(loads))}:",
    ]
    rows = [
        [
            "load",
            "as recorded, s",
            "no overlap, s",
            "computation, s",
            "communication, s",
            "perfect overlap, s",
            "possible gain",
        ]
    ]
    for load, each in zip(loads, times, strict=True):
        gain = f"{round(1 - each.bound_s / each.recorded_s, 3) + 0:.1%}"
        rows.append(
            [f"{load:.0%}", *("–" if time_s is None else f"{time_s:.4f}" for time_s in (*each, each.bound_s)), gain]
        )
    lines += [*text_table(rows), *(f"Assumed: {text}" for text in assumptions)]
    return item, [*lines, f"Orders of tensors are not compared: {unknown}"]


def _size_bytes(text: str | None, option: str) -> int | None:
    """Return the size of an option, if it is given.

    Raises:
        UsageError: it is not a size of a byte or more.
    """
    found = None if text is None else parse_size_bytes(text, option)
    if found is not None and found < 1:
        raise UsageError(f"{option} {found} is below 1")
    return found


def _given(options: argparse.Namespace) -> tuple[list[LayerTensor], int | None]:
    """Return the tensors, and the number of workers of a ring; None: parameter servers."""
    if (options.workload is None) == (options.tensors is None):
        raise UsageError("name a workload or --tensors FILE.csv, one of the two")
    workers = None if options.workers is None else whole_number(options.workers, "--workers")
    if options.tensors is not None:
        tensors = read_tensors(options.tensors)
    else:
        from ringtap.workload.workload import read_workload

        workload = read_workload(options.workload)
        tensors = workload_tensors(workload, str(options.workload))
        workers = workload.ranks if workers is None else workers
    collective = options.collective or COLLECTIVES[workers is not None]
    if collective not in COLLECTIVES:
        hint = did_you_mean(collective, COLLECTIVES)
        raise UsageError(f"--collective {collective!r} is unknown: {hint}choose {' or '.join(COLLECTIVES)}")
    if collective == "parameter-server":
        return tensors, None
    if workers is None or not 2 <= workers <= MAX_WORKERS:
        raise UsageError(f"a ring needs --workers N, from 2 to {MAX_WORKERS:,}")
    return tensors, workers


def _point(
    load: float, network: LogGP, found: dict[str, ScheduledIteration], tensors: Sequence[LayerTensor]
) -> dict[str, Any]:
    times_s = {f"{method}_s": each.iteration_s for method, each in found.items()}
    # the sums of many messages are rounded more often than the bound
    least_s = min(bound_s(tensors, network), *times_s.values())
    chosen = found["bytescheduler"]
    return {"load": load, **times_s, "bound_s": least_s, "partition_bytes": chosen.piece_bytes,
            "credit_bytes": chosen.credit_bytes}  # fmt: skip


def _orders(tensors: Sequence[LayerTensor], found: dict[str, ScheduledIteration]) -> dict[str, Any]:
    """Return the names of tensors by method: by priority, and in the order in which their transfers end."""
    ended = {method: sorted(each.order, key=each.completion_s.__getitem__) for method, each in found.items()}
    return {
        "orders": {method: [tensors[number].name for number in each.order] for method, each in found.items()},
        "completions": {method: [tensors[number].name for number in numbers] for method, numbers in ended.items()},
    }


def _best(times_s: dict[Any, float]) -> Any:
    """Return the key of the least time, the first one of those that are as good."""
    least_s = min(times_s.values())
    return next(key for key, time_s in times_s.items() if time_s <= least_s * (1 + _SAME))


def _network(rate_bps: float, loads: int) -> str:
    """Return the network of a table in words."""
    return f"on links of {format_rate(rate_bps)}" + (", by the share that cross traffic takes" if loads > 1 else "")


def _headline(point: dict[str, Any]) -> str:
    best, fifo_s = _best({method: point[f"{method}_s"] for method in METHODS}), point["fifo_s"]
    at = f" at {point['load']:.0%} load" if point["load"] else ""
    if best == "fifo":
        return f"FIFO{at} is as good as any other order: {fifo_s:.4g} s per iteration"
    best_s, most = point[f"{best}_s"], 1 - point["bound_s"] / fifo_s
    return (
        f"{_TITLES[best]}{at} gains {1 - best_s / fifo_s:.1%} over FIFO, {best_s:.4g} s instead of {fifo_s:.4g} s per "
        f"iteration; no order gains more than {most:.1%}"
    )


def _methods(point: dict[str, Any], found: dict[str, ScheduledIteration]) -> list[list[str]]:
    rows = [["order", "time, s", "gain over FIFO", "messages up to", "in flight"]]
    for method, each in found.items():
        size = "a tensor" if each.piece_bytes is None else format_size(each.piece_bytes)
        in_flight = format_size(each.credit_bytes) if each.credit_bytes else "one"
        rows.append([_TITLES[method], f"{each.iteration_s:.4f}", _gain(point, method), size, in_flight])
    return [*rows, ["perfect overlap", f"{point['bound_s']:.4f}", _gain(point, "bound"), "", ""]]


def _gain(point: dict[str, Any], method: str) -> str:
    return f"{round(1 - point[f'{method}_s'] / point['fifo_s'], 3) + 0:.1%}"


def _loads(points: list[dict[str, Any]]) -> list[list[str]]:
    rows = [["load", *(f"{title}, s" for title in _TITLES.values()), "perfect overlap, s", "possible gain"]]
    for point in points:
        times = [f"{point[f'{method}_s']:.4f}" for method in (*METHODS, "bound")]
        rows.append([f"{point['load']:.0%}", *times, _gain(point, "bound")])
    return rows


def _advice(times_s: dict[int, float]) -> str:
    best, default_s = _best(times_s), times_s[BUCKET_BYTES]
    default = f"{BUCKET_BYTES >> 20} MiB, its default"
    if best == BUCKET_BYTES:
        some = f"{min(times_s) >> 20} to {max(times_s) >> 20} MiB"
        return f"DDP's buckets in FIFO order: {default}, is as good as any of {some} ({default_s:.4g} s)"
    return (
        f"DDP's buckets in FIFO order: {best >> 20} MiB ({times_s[best]:.4g} s) gains "
        f"{1 - times_s[best] / default_s:.1%} over {default} ({default_s:.4g} s)"
    )
