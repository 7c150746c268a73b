"""Implements ``ringtap packets``: writes packets of an iteration, a sweep's point or a time span to a pcapng file."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtap.analysis.pcap.kernels.scan_state import MAX_NS
from ringtap.core.command_options import add_force, add_json
from ringtap.core.errors import UsageError
from ringtap.core.run_directory_schema import RUN_JSON
from ringtap.core.terminal_escaping import shell_word, shown_log, text_table
from ringtap.core.units import counted, format_duration, format_size, parse_duration_s

if TYPE_CHECKING:
    from ringtap.analysis.pcap.scan_captures import Progress
    from ringtap.analysis.pcap.single_packets import CapturedPackets, CapturePoint, Slice


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="RUN|FILE",
        help="a run directory with packets in it, or captures: pcap or pcapng, plain or packed; '-': a pipe",
    )
    parser.add_argument("--iteration", type=int, metavar="N", help="of a job's run: the packets of iteration N")
    parser.add_argument("--point", metavar="SERIES:STEP", help="of a sweep: the packets recorded at this point")
    parser.add_argument(
        "--from", dest="begin", metavar="TIME", help="of captures: packets from here on; UTC, or +2.5s after the first"
    )
    parser.add_argument("--to", dest="end", metavar="TIME", help="of captures: packets before this time")
    parser.add_argument("--filter", metavar="WORDS", help="in tcpdump's language, e.g. 'host 10.0.0.1 and port 5001'")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.pcapng", help="the file to write")
    add_json(parser)
    add_force(parser)
    parser.set_defaults(handler=_packets)


@shown_log()
def _packets(options: argparse.Namespace) -> int:
    from ringtap.analysis.pcap.progress import Bar
    from ringtap.analysis.pcap.single_packets import check_pcapng

    check_pcapng(options.output, options.force)
    runs = [path for path in options.paths if (Path(path) / RUN_JSON).is_file()]
    if runs and len(options.paths) > 1:
        raise UsageError(f"{runs[0]} is a run directory: name it alone, or captures without it")
    with Bar() as bar:
        found = _of_run(options, bar) if runs else _of_captures(options, bar)
    found.packets.to_pcapng(options.output, force=options.force)
    if options.json:
        print(json.dumps(_data(found, options), allow_nan=False))
        print(f"Wrote {options.output}", file=sys.stderr)
        return 0
    print("\n".join(_describe(found)))
    print(f"\nWrote {options.output}")
    print(f"Next: wireshark {shell_word(options.output)}, or ringtap flows {shell_word(options.output)}")
    return 0


def _of_run(options: argparse.Namespace, progress: Progress) -> Slice:
    from ringtap.analysis.job.packets_in_time_span import read_slice
    from ringtap.analysis.sweeps.sweep import Sweep, open_run, read_point

    if options.begin or options.end:
        raise UsageError("--from and --to are for captures: of a run, name an iteration (--iteration N) or a point")
    run = open_run(options.paths[0])
    if not isinstance(run, Sweep):
        if options.point is not None:
            raise UsageError(f"{run.path} is a job, and --point is for sweeps: name an iteration (--iteration N)")
        return read_slice(run, options.iteration, options.filter, progress=progress)
    if options.point is None or options.iteration is not None:
        captured = [
            f"{point['series']}:{point.get('step')}" for point in run.run.windows if "packets_start_ns" in point
        ]
        example = f", for example {captured[-1]}" if captured else ""
        raise UsageError(f"{run.path} is a sweep: name one point (--point SERIES:STEP){example}")
    series, _, step = options.point.rpartition(":")
    if not (series and step.isdecimal()):
        raise UsageError(f"--point {options.point!r} is not SERIES:STEP, for example {run.names[0]}:0")
    return read_point(run, series, int(step), options.filter, progress)


def _of_captures(options: argparse.Namespace, progress: Progress) -> Slice:
    from ringtap.analysis.pcap.byte_sources import expand
    from ringtap.analysis.pcap.capture_text import damage
    from ringtap.analysis.pcap.flow_filter import matches
    from ringtap.analysis.pcap.scan_captures import check_filter
    from ringtap.analysis.pcap.single_packets import CapturePoint, Slice, read_packets

    if options.iteration is not None or options.point is not None:
        asked = "--point" if options.iteration is None else "--iteration"
        raise UsageError(f"{asked} is for a run directory, which {options.paths[0]} is not: name a time with --from")
    if options.filter is not None:
        check_filter(options.filter)
    paths, left_out = expand(options.paths)
    points = _within([CapturePoint(path) for path in paths], options.begin, options.end)
    accepts = None if options.filter is None else partial(matches, options.filter)
    found = read_packets(points, accepts, progress)
    if not len(found):
        raise UsageError(_nothing(options, found))
    names = [Path(point.name).name for point in points]
    found.about = "; ".join([*names, *([options.filter] if options.filter else [])])
    scans = zip(points, found.scans, strict=True)
    damaged = [f"{point.name}: {line}" for point, scan in scans for line in damage(scan.counts)]
    return Slice(found, "", "times as captured", None, (*left_out, *damaged))


def _within(points: list[CapturePoint], begin: str | None, end: str | None) -> list[CapturePoint]:
    """Return the captures with the span of time that was asked for."""
    is_relative = any(text is not None and text.startswith("+") for text in (begin, end))
    first_ns = _first_ns(points) if is_relative else 0
    begin_ns = 0 if begin is None else _time_ns(begin, first_ns)
    end_ns = MAX_NS if end is None else _time_ns(end, first_ns)
    if begin_ns >= end_ns:
        raise UsageError(f"--from {begin or 1970} is not before --to {end}: give the earlier time first")
    return [point._replace(begin_ns=begin_ns, end_ns=end_ns) for point in points]


def _first_ns(points: list[CapturePoint]) -> int:
    """Return the time of the earliest packet."""
    from ringtap.analysis.pcap.single_packets import read_packets

    if any(point.path is None for point in points):
        raise UsageError("'-' can be read once, so the time of its first packet is not known: give --from in UTC")
    scans = read_packets([point._replace(end_ns=0) for point in points]).scans
    return min((scan.first_ns for scan in scans if scan.first_ns >= 0), default=0)


def _time_ns(text: str, first_ns: int) -> int:
    if text.startswith("+"):
        return first_ns + round(parse_duration_s(text[1:], "time after +") * 1e9)
    if text.isdecimal():
        return int(text)
    from ringtap.analysis.notebook_formatting import as_time_ns

    return as_time_ns(text)


def _nothing(options: argparse.Namespace, found: CapturedPackets) -> str:
    """Return a sentence about captures without such packets."""
    from ringtap.analysis.pcap.capture_text import utc_text

    timed = [scan for scan in found.scans if scan.last_ns >= 0]
    if not timed:
        return f"{options.paths[0]}: no packet has a time, which a slice needs"
    first_ns, last_ns = min(scan.first_ns for scan in timed), max(scan.last_ns for scan in timed)
    what = f" matches {options.filter!r}" if options.filter else " is in this time"
    when = " in this time" if options.filter and (options.begin or options.end) else ""
    return f"no packet{when}{what}: the captures hold packets from {utc_text(first_ns)} to {utc_text(last_ns)}"


def _data(found: Slice, options: argparse.Namespace) -> dict[str, Any]:
    rows = found.packets.rows
    return {
        "output": str(options.output),
        "slice": found.name or None,
        "filter": options.filter,
        "packets": len(rows),
        "captured_bytes": int(rows["kept"].sum(dtype="i8")),
        "wire_bytes": int(rows["length"].sum(dtype="i8")),
        "first_ns": int(rows["time_ns"][0]),
        "last_ns": int(rows["time_ns"][-1]),
        "clock": found.clock,
        "clock_error_ns": found.clock_error_ns,
        "interfaces": _interfaces(found.packets),
        "warnings": list(found.warnings),
    }


def _interfaces(packets: CapturedPackets) -> list[dict[str, Any]]:
    """Return each interface with the sums of its packets; what is not known is None."""
    made = []
    for number, interface in enumerate(packets.interfaces):
        rows = packets.rows[packets.rows["interface"] == number]
        item = {name: value or None for name, value in interface._asdict().items()}
        sums = {"captured_bytes": "kept", "wire_bytes": "length"}
        item |= {"linktype": interface.linktype, "packets": len(rows)}
        made.append(item | {name: int(rows[field].sum(dtype="i8")) for name, field in sums.items()})
    return made


def _describe(found: Slice) -> list[str]:
    """Return the summary for a terminal, as lines."""
    from ringtap.analysis.pcap.capture_text import utc_text

    rows, interfaces = found.packets.rows, _interfaces(found.packets)
    kept, length = (format_size(int(rows[name].sum(dtype="i8"))) for name in ("kept", "length"))
    first_ns, last_ns = int(rows["time_ns"][0]), int(rows["time_ns"][-1])
    what = f" of {found.name}" if found.name else ""
    lines = [
        f"{counted(len(rows), 'packet')}{what}: {kept} captured of {length} on the wire.",
        f"From {utc_text(first_ns)}, {format_duration((last_ns - first_ns) / 1e9)}; {found.clock}.",
        "",
    ]
    table = [("node" if interfaces[0]["node"] else "capture", "interface", "packets", "captured", "on the wire")]
    for item in interfaces:
        sizes = (format_size(item[name]) for name in ("captured_bytes", "wire_bytes"))
        table.append((item["node"] or item["file"], item["name"] or "-", f"{item['packets']:,}", *sizes))
    lines += text_table(table, 2)
    return lines + (["", "Warnings", *(f"  {line}" for line in found.warnings)] if found.warnings else [])
