"""Implements ``ringtap traffic verify``: compares a flow plan with the flows sent and the bytes on the link."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ringtap.core.command_options import add_force, add_json
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.terminal_escaping import shown_log
from ringtap.core.units import counted, format_duration, format_rate, format_size, parse_rate_bps


def register(verbs: Any, name: str, summary: str) -> None:
    """Add the arguments of the sub-verb."""
    parser = verbs.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", allow_abbrev=False)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="the flow plan")
    parser.add_argument(
        "--sent",
        type=Path,
        action="append",
        required=True,
        metavar="SENT.rec",
        help="the sender's log; may be repeated",
    )
    wire = parser.add_mutually_exclusive_group()
    wire.add_argument("--capture", type=Path, metavar="FILE", help="capture of the link: pcap or pcapng")
    wire.add_argument("--nic", type=Path, metavar="NIC.rec", help="log of an interface's counters")
    parser.add_argument("--interface", metavar="NAME", help="the interface, for --nic")
    parser.add_argument("--baseline", type=Path, metavar="SENT.rec", help="the same flows sent without congestion")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="a second capture or log, for the histogram")
    parser.add_argument("--capacity", metavar="RATE", help="capacity of the link, for slowdowns, e.g. 10gbit")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="write figures and tables there")
    add_force(parser)
    add_json(parser)
    parser.set_defaults(handler=_verify)


@shown_log()
def _verify(options: argparse.Namespace) -> int:
    if (options.nic is None) != (options.interface is None):
        raise UsageError("--nic and --interface go together: name the counters' log and the interface in it")
    capacity_bps = None if options.capacity is None else parse_rate_bps(options.capacity, "--capacity")
    if capacity_bps is not None and capacity_bps <= 0:
        raise UsageError("--capacity must be above 0")
    from ringtap.analysis.traffic.verify import verify, write

    nic = None if options.nic is None else (options.nic, options.interface)
    files = (options.plan, options.sent, options.capture, nic, options.baseline, options.compare)
    found = verify(*files, capacity_bps)
    paths = write(found, options.output, options.force) if options.output is not None else []
    if options.json:
        print(json.dumps(found.data, allow_nan=False))
    else:
        print("\n".join([*_lines(found.data), *(f"Wrote {path}" for path in paths)]))
    if found.deviations:
        raise MeasurementError(f"what was sent deviates from {options.plan}: {'; '.join(found.deviations)}")
    return 0


def _lines(data: dict[str, Any]) -> list[str]:
    """Return the numbers as lines of text."""
    flows, total, whole = data["flows"], data["bytes"], data["load"]["whole"]
    outcomes = ", ".join(f"{flows[name]} {name}" for name in ("finished", "unfinished", "failed", "missing"))
    off = "" if whole["error"] is None else f" ({whole['error']:+.2%})"
    achieved = f"{format_rate(whole['achieved_bps'])} achieved{off}"
    lines = [
        f"{counted(flows['planned'], 'flow')} of {format_size(total['planned'])} planned: {outcomes}",
        f"{format_rate(whole['offered_bps'])} offered, {achieved}; {format_size(total['received'])} received",
    ]
    for name, errors in data["load"]["bins_100ms"].items():
        if errors["error_max"] is not None:
            lines.append(
                f"{name} in 100 ms: off by {errors['error_rms']:.2%} (rms) and {errors['error_max']:.2%} (max)"
            )
    late = data["lateness"]
    if late["launched"]:
        shown = (format_duration(max(late[key], 0.0) / 1e6) for key in ("p50_us", "p99_us", "max_us"))
        text = "lateness: median {}, p99 {}, max {}".format(*shown)
        lines.append(f"{text}; {late['missed_slots']} of {late['launched']} over 1 ms")
    lines += [_completion(row) for row in data["completion"] if row["flows"]]
    for part, errors in data.get("bursts", {}).items():
        if errors["windows"]:
            lines.append(
                f"{errors['windows']} {'bursts' if part == 'burst' else 'quiet parts'} on the wire: off by "
                f"{errors['error_median']:.2%} (median), {errors['error_p95']:.2%} (p95), {errors['error_worst']:.2%} "
                f"(max); {errors['share_within_5_percent']:.1%} within 5 %"
            )
    return [*lines, *(f"note: {note}" for note in data["notes"])]


def _completion(row: dict[str, Any]) -> str:
    least, most = row["from_bytes"], row["to_bytes"]
    sizes = "all" if not least and most is None else f"< {format_size(most)}" if most else f">= {format_size(least)}"
    if least and most:
        sizes = f"{format_size(least)} to {format_size(most)}"
    text = "completion, {}: mean {}, median {}, p99 {}".format(
        sizes, *(format_duration(row[f"fct_{name}_s"]) for name in ("mean", "p50", "p99"))
    )
    if row["slowdown_mean"] is not None:
        text += f"; slowdown mean {row['slowdown_mean']:.3g}, p99 {row['slowdown_p99']:.3g}"
    if row["congestion_impact_mean"] is not None:
        text += f"; congestion impact mean {row['congestion_impact_mean']:.3g}, p99 {row['congestion_impact_p99']:.3g}"
    return f"{text} ({counted(row['flows'], 'flow')})"
