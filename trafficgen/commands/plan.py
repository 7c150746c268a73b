"""The ``ringtap traffic plan`` command: the options of every kind of plan, and the printed summary."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtap.errors import UsageError
from ringtap.options import add_force, add_json, add_verbose
from ringtap.terminal import shell_word
from ringtap.trafficgen.commands.common import print_settings
from ringtap.trafficgen.protocol import LOCAL
from ringtap.units import (
    counted,
    format_duration,
    format_rate,
    format_size,
    parse_duration_s,
    parse_rate_bps,
    parse_size_bytes,
)

if TYPE_CHECKING:
    from ringtap.trafficgen.plans.plan_file import Plan

_RATE = ("load", "load_counts", "mtu")
_TRANSPORT = ("congestion_control", "dscp", "send_buffer", "pacing")
_EVERYWHERE = ("seed", *_TRANSPORT)
# Required and optional options of each kind
KIND_OPTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "consistent": (("load", "duration"), (*_RATE, "to", "from", "sizes", "scale")),
    "burst": (
        ("load", "duration"),
        (*_RATE, "to", "from", "sizes", "scale", "burst_height", "burst_length", "burst_period"),
    ),
    "long-lived": (("duration",), (*_RATE, "to", "from", "flows")),
    "on-off": (("load", "duration"), (*_RATE, "to", "from", "on", "off")),
    "incast": (("duration",), (*_RATE, "to", "from", "flows", "period", "size")),
    "all-to-all": (("duration", "node"), (*_RATE, "period", "size")),
    "ring": (("duration", "node", "bytes", "iterations"), ("compute",)),
    "replay": (("replay",), ("to", "from", "gap", "duration", "scale")),
    "list": (("list", "node"), ("duration",)),
}


def register(verbs: Any, name: str, summary: str) -> None:
    """Add the ``plan`` sub-verb."""
    parser = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    add = parser.add_argument
    add("--kind", required=True, choices=tuple(KIND_OPTIONS), help="kind of traffic")
    add("--load", metavar="RATE", help="bits per second, mean over the plan, for example 10gbit")
    add("--load-counts", choices=("payload", "wire"), help="what --load counts (default payload)")
    add("--mtu", type=int, metavar="BYTES", help="largest IP packet, for --load-counts wire (default 1500)")
    add("--duration", metavar="TIME", help="length of the plan, for example 60s")
    add("--to", action="append", metavar="HOST:PORT", help="a receiver; may be repeated")
    add("--from", action="append", metavar="ADDRESS", help="address to send from; may be repeated (default: unbound)")
    add("--node", action="append", metavar="ADDRESS:PORT", help="all-to-all, ring, list: sends from it and receives")
    add("--seed", type=int, help="seed of everything random (default 1)")
    add("--sizes", metavar="NAME", help="a workload, a formula or file:PATH (default web-search)")
    add("--scale", type=float, metavar="S", help="divide flow sizes by this (default 1)")
    add("--burst-height", type=float, metavar="H", help="burst: rate in a burst over the load (default 3)")
    add("--burst-length", metavar="TIME", help="burst: length of a burst (default 1ms)")
    add("--burst-period", metavar="TIME", help="burst: from burst to burst (default 10ms)")
    add("--flows", type=int, metavar="N", help="long-lived, incast: how many at once (default 1 and 8)")
    add("--on", metavar="TIME", help="on-off: mean of the on times (default 10ms)")
    add("--off", metavar="TIME", help="on-off: mean of the off times (default 10ms)")
    add("--period", metavar="TIME", help="incast, all-to-all: from round to round (default 10ms)")
    add("--size", metavar="SIZE", help="incast, all-to-all: of each flow, instead of --load")
    add("--bytes", metavar="SIZE", help="ring: what each iteration reduces")
    add("--compute", metavar="TIME", help="ring: from an iteration's last chunk to the next one's first (default 0s)")
    add("--iterations", type=int, metavar="N", help="ring: how many")
    add("--replay", type=Path, metavar="FILE", help="replay: a sender's log (.rec) or a capture")
    add("--gap", metavar="TIME", help="replay of a capture: a pause that ends a flow (default 100ms)")
    add("--list", type=Path, metavar="FILE", help="list: an HPCC flow list")
    add("--congestion-control", metavar="NAME", help="for the sender: for example cubic")
    add("--dscp", type=int, metavar="N", help="for the sender: 0 to 63")
    add("--send-buffer", metavar="SIZE", help="for the sender: socket buffer")
    add("--pacing", metavar="RATE", help="for the sender: payload rate that each flow is held to")
    add("-o", "--output", type=Path, metavar="PLAN", help="file to write")
    add("--export-cdf", type=Path, metavar="FILE", help="also write the flow sizes as a CDF file")
    add("--export-hpcc", type=Path, metavar="FILE", help="also write the flows as an HPCC flow list")
    add_force(parser)
    add("--summary", action="store_true", help="print what the plan holds; needs no -o and no --to")
    add_json(parser)
    add_verbose(parser)
    parser.set_defaults(handler=_plan)


def _plan(options: argparse.Namespace) -> int:
    from ringtap.trafficgen.plans.plan_file import write_plan
    from ringtap.trafficgen.plans.registry import make_plan

    outputs = (options.output, options.export_cdf, options.export_hpcc)
    given = _given(options)
    if not options.summary and not any(outputs):
        raise UsageError("nothing to do: name a file with -o, or ask for --summary")
    if "to" in KIND_OPTIONS[options.kind][1] and "to" not in given and options.kind != "replay":
        if options.output is not None:
            raise UsageError("a plan needs a destination: give --to HOST:PORT")
        given["to"] = [LOCAL]
    plan = make_plan(options.kind, given, options.read_segments)
    if options.verbose:
        print_settings(plan.header)
    stream = sys.stderr if options.json else sys.stdout
    if options.output is not None:
        write_plan(plan, options.output, options.force)
    _export(plan, given, options, stream)
    if options.summary:
        _print_summary(plan.header, options.json)
    if options.output is not None:
        print(f"Wrote {options.output}", file=stream)
        print(f"Next: ringtap traffic send {shell_word(options.output)}", file=stream)
    return 0


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the given options that define the plan, parsed into numbers.

    Raises:
        UsageError: an option is missing, cannot be parsed, or does not belong to the kind.
    """
    needed, besides = KIND_OPTIONS[options.kind]
    names = {name for some in KIND_OPTIONS.values() for name in (*some[0], *some[1])} | {*_EVERYWHERE}
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    for name in sorted(given):
        if name not in (*needed, *besides, *_EVERYWHERE):
            raise UsageError(f"--kind {options.kind} does not take {_option(name)}")
    for name in needed:
        if name not in given:
            raise UsageError(f"--kind {options.kind} needs {_option(name)}")
    readers: dict[str, Any] = dict.fromkeys(("load", "pacing"), parse_rate_bps)
    readers |= dict.fromkeys(("size", "bytes", "send_buffer"), parse_size_bytes)
    times = ("duration", "burst_length", "burst_period", "on", "off", "period", "compute", "gap")
    readers |= dict.fromkeys(times, lambda text: round(parse_duration_s(text) * 1e9))
    return {name: readers[name](value) if name in readers else value for name, value in given.items()}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _export(plan: Plan, given: dict[str, Any], options: argparse.Namespace, stream: Any) -> None:
    if options.export_cdf is not None:
        from ringtap.trafficgen.plans.registry import size_points
        from ringtap.trafficgen.plans.sizes import write_cdf

        write_cdf(size_points(plan, given), options.export_cdf, options.force)
        print(f"Wrote {options.export_cdf}", file=stream)
    if options.export_hpcc is not None:
        from ringtap.trafficgen.plans.hpcc import write_list

        numbers = write_list(plan, options.export_hpcc, options.force)
        words = ", ".join(f"{number} {name}" for name, number in list(numbers.items())[:16])
        print(f"Wrote {options.export_hpcc}; nodes: {words}{', ...' if len(numbers) > 16 else ''}", file=stream)


def _print_summary(header: dict[str, Any], as_json: bool) -> None:
    flows, total, duration_s = header["flows"], header["bytes"], header["duration_ns"] / 1e9
    sized = total > 0
    # Long-lived flows have no size: they offer their pacing rate, or as much as the network gives
    offered_bps = total * 8 / duration_s if sized else flows * header["transport"].get("pacing_bps", 0) or None
    summary = {"flows": flows, "bytes": total, "duration_s": duration_s}
    summary |= {"mean_size_bytes": total / flows if sized else None, "offered_bps": offered_bps}
    # offered_bps is payload; a load that counts the wire is printed too
    if header.get("load_counts") == "wire" and offered_bps is not None:
        wire_bps = offered_bps * header["wire_bits_per_payload_bit"]
        summary |= {"load_counts": "wire", "wire_bps": wire_bps}
    if as_json:
        print(json.dumps(summary))
        return
    rate = "as much as the network gives" if offered_bps is None else f"{format_rate(offered_bps)} of payload"
    rate += f", {format_rate(summary['wire_bps'])} on the wire" if "wire_bps" in summary else ""
    what = f"of {format_size(total / flows)} on average, {format_size(total)}" if sized else "without end"
    print(f"{counted(flows, 'flow')} {what} in {format_duration(duration_s)}: {rate}")
