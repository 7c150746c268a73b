"""Tables of results, as text for a terminal and as Markdown for the documentation."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from _context import Bench
from _figures import TARGETS, Samples, Target, last_line, load_error_pct, median, ratio, select, unjudged_loads
from _throughput import RINGTAP

_NONE = "-"


@dataclass(frozen=True)
class Table:
    """A table with a title."""

    title: str
    head: list[str]
    rows: list[list[str]]


def tables(bench: Bench) -> list[Table]:
    """Return every table with samples; note the figures that the run cannot judge."""
    samples, streams = bench.samples, bench.settings.streams[0]
    figures, unjudged = last_line(samples, streams), unjudged_loads(samples)
    bench.notes += unjudged
    unsure = {"load_error_pct_max"} if unjudged and figures["load_error_pct_max"] is None else set()
    made = [targets_table(TARGETS, figures, unsure)]
    made += [_throughput(bench, route.name, count) for route in bench.routes for count in (1, *bench.settings.streams)]
    made += [
        _load(samples, bench.settings.load_s),
        _lateness(samples),
        _rates(samples),
        _others(samples),
        _wire(samples),
    ]
    return [table for table in made if table.rows]


def write(
    bench: Bench, machine: dict[str, Any], options: argparse.Namespace, figures: dict[str, Any], made: list[Table]
) -> None:
    """Write the samples to the file of -o, the tables to the file of --markdown; print the tables and the figures."""
    if options.output:
        raw: dict[str, Any] = {"machine": machine, "settings": vars(bench.settings), "samples": bench.samples}
        raw |= {"figures": figures, "notes": bench.notes, "failures": bench.failures}
        options.output.write_text(json.dumps(raw, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(_as_markdown(machine, bench, made))
    print(_as_text(machine, bench, made))
    print()
    print(json.dumps(figures), flush=True)


def _as_text(machine: dict[str, Any], bench: Bench, made: list[Table]) -> str:
    parts = [_machine(machine)]
    for table in made:
        lines = [[cell.strip("*").replace("`", "") for cell in line] for line in (table.head, *table.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
        parts.append("\n".join([table.title, *("  " + "  ".join(line).rstrip() for line in padded)]))
    return "\n\n".join(parts + _sentences(bench))


def _as_markdown(machine: dict[str, Any], bench: Bench, made: list[Table]) -> str:
    parts = [_machine(machine)]
    for table in made:
        lines = [table.head, ["---"] * len(table.head), *table.rows]
        parts.append("\n".join([f"{table.title}:", "", *(f"| {' | '.join(line)} |" for line in lines)]))
    return "\n\n".join(parts + _sentences(bench)) + "\n"


def _machine(machine: dict[str, Any]) -> str:
    return (
        f"Measured {machine['date']}: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
        f"Linux {machine['kernel']}, {machine['python']}, {machine['iperf3'] or 'no iperf3'}, TCP "
        f"{machine['congestion_control']}. The machine's own host took {machine['stolen_pct']:.1f} % of the cores' "
        f"time, and other programs took {machine['others_pct']:.1f} %."
    )


def _sentences(bench: Bench) -> list[str]:
    return ["\n".join(f"- {text}" for text in texts) for texts in (bench.notes, bench.failures) if texts]


def targets_table(targets: Sequence[Target], values: dict[str, Any], unsure: Collection[str] = ()) -> Table:
    """Return the table of figures with their targets; this run cannot judge the figures in ``unsure``."""
    rows = []
    for target in targets:
        value = values[target.key]
        met = _NONE if value is None else "yes" if target.is_met(value) else "**no**"
        met = "cannot judge" if target.key in unsure else met
        rows.append([target.figure, target.limit, number(value), met])
    return Table("Targets", ["figure", "target", "measured", "met"], rows)


def _throughput(bench: Bench, route: str, streams: int) -> Table:
    rows = []
    for tool in (RINGTAP, *(peer.name for peer in bench.peers)):
        taken = select(bench.samples, "throughput", route=route, streams=streams, tool=tool)
        if taken:
            gbits = sorted(sample["goodput_bps"] / 1e9 for sample in taken)
            middle = (median(taken, "goodput_bps") or 0) / 1e9
            relative = _NONE if tool == RINGTAP else number(ratio(bench.samples, route, streams, tool))
            spread = f"{gbits[0]:.3g} to {gbits[-1]:.3g}"
            cpu = number(median(taken, "cpu_s_per_gb"))
            rows.append([tool, f"{middle:.3g}", spread, cpu, relative, str(len(taken)), _stolen(taken)])
    title = f"Goodput over {route}, {streams} stream{'s' if streams > 1 else ''}, {bench.settings.bulk_s:g} s each"
    head = ["tool", "Gbit/s", "min to max", "CPU s/GB", "ringtap / tool", "samples", "stolen %"]
    return Table(title, head, rows)


def _load(samples: Samples, length_s: float) -> Table:
    rows = []
    cases = {(sample["tool"], sample["kind"], sample["share"]) for sample in samples.get("load", [])}
    for tool, kind, share in sorted(cases, key=lambda case: (case[0] != RINGTAP, case)):
        taken = select(samples, "load", tool=tool, kind=kind, share=share)
        planned, achieved = ((median(taken, key) or 0) / 1e9 for key in ("planned_bps", "achieved_bps"))
        judged = load_error_pct(samples, tool, kind, share)
        error = number(judged) if judged is not None else f"{number(median(taken, 'error_pct'))} (cannot judge)"
        rows.append(
            [tool, kind, f"{share:.0%}", f"{planned:.4g}", f"{achieved:.4g}", error, str(len(taken)), _stolen(taken)]
        )
        rows[-1].append(number(median(taken, "others_pct")))
    title = f"Achieved and planned load over {length_s:g} s, at shares of the calibrated ceiling"
    head = ["tool", "kind", "share", "planned Gbit/s", "achieved Gbit/s", "error %", "samples", "stolen %", "others %"]
    return Table(title, head, rows)


def _lateness(samples: Samples) -> Table:
    rows = []
    for core in ("idle", "loaded"):
        taken = select(samples, "lateness", core=core)
        if taken:
            late = [number(median(taken, key)) for key in ("p50_us", "p90_us", "p99_us", "max_us", "missed_slots")]
            rows.append([core, *late, str(len(taken)), _stolen(taken)])
    title = "Lateness of 1000 small flows per second beside bulk flows, µs"
    return Table(title, ["launcher's core", "p50", "p90", "p99", "max", "missed slots", "samples", "stolen %"], rows)


def _rates(samples: Samples) -> Table:
    rows = []
    cases = {(sample["route"], sample["connections"]) for sample in samples.get("flow rate", [])}
    for route, connections in sorted(cases):
        taken = select(samples, "flow rate", route=route, connections=connections)
        cells = [number(median(taken, key)) for key in ("offered_per_s", "flows_per_s", "finished", "planned")]
        rows.append([route, connections, *cells, str(len(taken)), _stolen(taken)])
    head = ["route", "connections", "offered/s", "finished/s", "finished", "planned", "samples", "stolen %"]
    return Table("1 kB flows, one worker", head, rows)


def _others(samples: Samples) -> Table:
    rows = []
    for sample in samples.get("concurrent flows", []):
        rows.append([f"flows open at the same time, of {sample['wanted']:,}", f"{sample['open_at_once']:,}"])
        rows.append(["of them finished", f"{sample['finished']:,}"])
    for sample in samples.get("million flows", []):
        for verb in ("write", "read"):
            action = f"{verb} a plan of {sample['flows']:,} flows ({sample['file_mb']:.0f} MB)"
            rows.append([action, f"{sample[f'{verb}_s']:.2f} s, {sample[f'{verb}_rss_mb']:.0f} MB of memory"])
    for sample in samples.get("calibrate", []):
        rows.append(["calibrated ceiling, loopback", f"{sample['ceiling_bps'] / 1e9:.3g} Gbit/s"])
    return Table("Other figures", ["figure", "measured"], rows)


def _wire(samples: Samples) -> Table:
    rows = []
    for share in sorted({sample["share"] for sample in samples.get("wire", [])}):
        taken = select(samples, "wire", share=share)
        load = f"{(median(taken, 'load_bps') or 0) / 1e9:.3g}"
        for part in ("burst", "quiet"):
            cells = [_percent(median(taken, f"{part}_{key}")) for key in _WIRE]
            lost = number(median(taken, "lost_packets"))
            rows.append([f"{share:.0%}", load, part, *cells, lost, str(len(taken)), _stolen(taken)])
    head = ["share", "Gbit/s", "part", *_WIRE.values(), "not captured", "samples", "stolen %"]
    return Table("Bytes on the wire (captured on veth) against plan, per 1 ms burst and quiet part", head, rows)


_WIRE = {
    "share_within_5_percent": "share within 5 %, %",
    "error_median": "error, median %",
    "error_p95": "error, p95 %",
    "error_worst": "error, max %",
}


def _percent(share: float | None) -> str:
    return _NONE if share is None else number(share * 100)


def _stolen(taken: list[dict[str, Any]]) -> str:
    return f"{median(taken, 'stolen_pct') or 0:.1f}"


def number(value: float | None) -> str:
    """Return the text of a number: three significant digits, or whole numbers from 1000 on; a dash for None."""
    if value is None:
        return _NONE
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
