"""Implements ``ringtap traffic plan``: adds the options of every kind of plan, and prints a summary of the plan."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtap.core.command_options import add_force, add_json
from ringtap.core.errors import UsageError
from ringtap.core.host_port import LOCAL
from ringtap.core.terminal_escaping import shell_word
from ringtap.core.units import counted, format_duration, format_rate, format_size
from ringtap.trafficgen.plans.kind import SHARED, TO, TRANSPORT, TrafficKind
from ringtap.trafficgen.plans.registry import make_plan, size_points, traffic_kinds

if TYPE_CHECKING:
    from ringtap.core.flow_plan_file import FlowSource


def register(verbs: Any, name: str, summary: str) -> None:
    """Add the ``plan`` sub-verb."""
    parser = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    add = parser.add_argument
    kinds = traffic_kinds()
    add("--kind", required=True, choices=tuple(kinds), help="kind of traffic")
    own = (option for kind in kinds.values() for option in (*kind.needs, *kind.takes))
    for option in dict.fromkeys((*SHARED, *own, *TRANSPORT)):
        value: dict[str, Any] = {"choices": option.choices} if option.choices else {"metavar": option.metavar}
        value |= {"action": "append"} if option.is_repeated else {}
        add(f"--{option.name}", type=option.convert, help=option.help, **value)
    add("-o", "--output", type=Path, metavar="PLAN", help="file to write")
    add("--export-cdf", type=Path, metavar="FILE", help="also write the flow sizes as a CDF file")
    add("--export-hpcc", type=Path, metavar="FILE", help="also write the flows as an HPCC flow list")
    add_force(parser)
    add("--summary", action="store_true", help="print what the plan contains; -o and --to may be left out")
    add_json(parser)
    parser.set_defaults(handler=_plan)


def _plan(options: argparse.Namespace) -> int:
    from ringtap.core.flow_plan_file import write_plan

    outputs = (options.output, options.export_cdf, options.export_hpcc)
    kind = traffic_kinds()[options.kind]
    given = _given_options(options, kind)
    if not options.summary and not any(outputs):
        raise UsageError("nothing to do: name a file with -o, or ask for --summary")
    if TO in kind.takes and "to" not in given and not kind.finds_receivers:
        if options.output is not None:
            raise UsageError("a plan needs a destination: give --to HOST:PORT")
        given["to"] = [LOCAL]
    plan = make_plan(options.kind, given, options.read_segments, options.read_operations)
    stream = sys.stderr if options.json else sys.stdout
    if unread := plan.header.get("unread_lines"):
        print(
            f"{plan.header['list']} has {counted(unread, 'line')} after as many flows as its first line says: they are "
            "not read, as in HPCC's simulation",
            file=stream,
        )
    if options.output is not None:
        write_plan(plan, options.output, options.force)
    _export(plan, given, options, stream)
    if options.summary:
        _print_summary(plan.header, options.json)
    if options.output is not None:
        print(f"Wrote {options.output}", file=stream)
        print(f"Next: ringtap traffic send {shell_word(options.output)}", file=stream)
    return 0


def _given_options(options: argparse.Namespace, kind: TrafficKind) -> dict[str, Any]:
    """Return the options given for this plan, by key."""
    keys = dict.fromkeys(key for each in traffic_kinds().values() for key in each.options)
    given = {key: getattr(options, key) for key in keys if getattr(options, key) is not None}
    kind.check(given)
    return given


def _export(plan: FlowSource, given: dict[str, Any], options: argparse.Namespace, stream: Any) -> None:
    if options.export_cdf is not None:
        from ringtap.trafficgen.plans.size_distributions import write_cdf

        write_cdf(size_points(plan, given), options.export_cdf, options.force)
        print(f"Wrote {options.export_cdf}", file=stream)
    if options.export_hpcc is not None:
        from ringtap.trafficgen.plans.hpcc_flow_lists import write_list

        numbers = write_list(plan, options.export_hpcc, options.force)
        nodes = ", ".join(f"{number} {name}" for name, number in list(numbers.items())[:16])
        print(f"Wrote {options.export_hpcc}; nodes: {nodes}{', ...' if len(numbers) > 16 else ''}", file=stream)


def _print_summary(header: dict[str, Any], as_json: bool) -> None:
    flows, total, duration_s = header["flows"], header["bytes"], header["duration_ns"] / 1e9
    sized = total > 0
    # Long-lived flows have no size: they send at their pacing rate, or as fast as the network allows, as a replay does
    offered_bps = total * 8 / duration_s if sized else flows * header["transport"].get("pacing_bps", 0) or None
    if header["kind"] == "workload":
        offered_bps = None
    summary = {"flows": flows, "bytes": total, "duration_s": duration_s}
    summary |= {"mean_size_bytes": total / flows if sized else None, "offered_bps": offered_bps}
    # offered_bps counts payload; a load given as bits on the wire is printed too
    if header.get("load_counts") == "wire" and offered_bps is not None:
        wire_bps = offered_bps * header["wire_bits_per_payload_bit"]
        summary |= {"load_counts": "wire", "wire_bps": wire_bps}
    if as_json:
        print(json.dumps(summary))
        return
    rate = "as much as the network gives" if offered_bps is None else f"{format_rate(offered_bps)} of payload"
    rate += f", {format_rate(summary['wire_bps'])} on the wire" if "wire_bps" in summary else ""
    what = f"of {format_size(total / flows)} on average, {format_size(total)}" if sized else "without end"
    limit = "at most " if header["kind"] == "workload" else ""
    print(f"{counted(flows, 'flow')} {what} in {limit}{format_duration(duration_s)}: {rate}")
