"""Writes the structure of training traffic as text, with the certainty of the results."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ringtap.analysis.runs.traffic_classes import CROSS, OTHER
from ringtap.analysis.structure import closed_form_patterns as patterns
from ringtap.analysis.structure import topology as shapes
from ringtap.analysis.structure.structure import Structure, edges_of
from ringtap.core.terminal_escaping import text_table
from ringtap.core.units import counted, format_duration, format_rate, format_size

_MAX_ROWS = 12
_COLLECTIVES = {
    patterns.RING: "ring all-reduce (equation 3.1)",
    patterns.TWO_WAY_RING: "ring all-reduce (equation 3.1)",
    patterns.PAIR: "ring all-reduce (equation 3.1)",
    patterns.HALVING: "reduce-scatter and all-gather",
    patterns.ALL_TO_ALL: "reduce-scatter and all-gather",
    patterns.STAR: "a parameter server",
    patterns.SHARDED: "parameter servers",
    patterns.TREE: "a tree",
    patterns.DOUBLE_TREE: "two trees",
    patterns.HIERARCHICAL: "a hierarchy of rings",
}


def describe(found: Structure) -> list[str]:
    """Return the lines of the text."""
    sections = (
        ("", _headline(found)),
        ("Pattern", _pattern(found)),
        ("Time", _time(found)),
        ("Volume", _volume(found)),
        ("Bursts", _bursts(found)),
        ("Flows", _flows(found)),
        ("Other traffic", _others(found)),
        ("Against the step log", _steps(found)),
        ("Not observable", _not_observable(found)),
        ("Warnings", _warnings(found)),
    )
    lines: list[str] = []
    for title, text in sections:
        if text:
            lines += ["", title] if title and lines else []
            lines += [f"  {line}" if title else line for line in text]
    return lines


def _headline(found: Structure) -> list[str]:
    period = found.period
    each = format_duration(period.mean_s)
    count = f"{period.iterations} whole iterations of {each}"
    sure = {"sure": "this is sure", "likely": "this is likely", "doubtful": "this is doubtful"}[period.verdict]
    reasons = f", for {'; '.join(period.reasons)}" if period.reasons else ""
    lines = [f"A training job: {_shape(found)}, {count}; {sure}{reasons}."]
    volume = found.volume
    who = "All ranks together send" if found.shape.name == shapes.ONE_HOST else "A worker sends"
    sends = f"{who} {format_size(volume.worker_bytes)} per iteration"
    if volume.parameters is not None:
        most, least = volume.parameters, volume.parameters_least
        how = f"with {_COLLECTIVES[found.shape.name]} {least:,} to {most:,} parameters of 32 bit"
        lines.append(f"{sends}: {how}, if each host has one worker.")
    elif volume.parameters_least is not None and volume.parameters_most is not None:
        lines.append(f"{sends}: {volume.parameters_least:,} to {volume.parameters_most:,} parameters ({volume.why}).")
    else:
        lines.append(f"{sends}; {volume.why}.")
    same = []
    if volume.sharded_least is not None:
        same.append(f"sharded training (FSDP) of {volume.sharded_least:,} to {volume.sharded_most:,} parameters")
    if volume.several_least is not None:
        same.append(f"several workers per host and at least {volume.several_least:,} parameters")
    return [*lines, f"Packets look the same with {', or with '.join(same)}."] if same else lines


def _shape(found: Structure) -> str:
    shape, hosts = found.shape, found.shape.hosts
    count, others = len(hosts), len(hosts) - 1
    workers = counted(shape.workers or 0, "worker")
    groups = " | ".join(" ".join(hosts[at : at + shape.group]) for at in range(0, count, shape.group or count))
    texts = {
        patterns.RING: f"a ring of {count} hosts, {' > '.join([*hosts, hosts[0]])}",
        patterns.TWO_WAY_RING: f"a ring of {count} hosts in both directions, {' - '.join([*hosts, hosts[0]])}",
        patterns.PAIR: f"two hosts that exchange, {' and '.join(hosts)} (a ring of 2)",
        patterns.STAR: f"a parameter server or in-network aggregation at {hosts[0]} with {workers}",
        patterns.SHARDED: f"{len(shape.servers)} parameter servers, {' and '.join(shape.servers)}, with {workers}",
        patterns.TREE: f"a {_tree(found)} of {count} hosts{f' with the root {shape.root}' if shape.root else ''}",
        patterns.DOUBLE_TREE: f"a double binary tree of {count} hosts",
        patterns.HIERARCHICAL: f"a hierarchy of groups of {shape.group} among {count} hosts, {groups}",
        patterns.PIPELINE: f"a pipeline of {count} stages, {' > '.join(hosts)}",
        patterns.ALL_TO_ALL: f"all-to-all exchange of {count} hosts",
        patterns.HALVING: f"recursive halving and doubling among {count} hosts",
        shapes.RING_MEMBER: f"one member of a ring, {' > '.join(hosts)}",
        shapes.ONE_HOST: f"ranks on one host, {hosts[0]}",
        shapes.ONE_PEER: f"{hosts[0]} exchanges with {hosts[-1]}",
        shapes.SEVERAL_PEERS: f"{hosts[0]} exchanges with {others} others",
        shapes.ONE_DIRECTION: f"one direction of the exchanges of {hosts[0]}",
    }
    return texts.get(shape.name, f"{count} hosts in no known pattern")


def _tree(found: Structure) -> str:
    root = found.shape.root
    peers = Counter(source for source, _ in edges_of(found.training))
    return "binary tree" if root and all(peers[host] <= 2 + (host != root) for host in peers) else "tree"


def _pattern(found: Structure) -> list[str]:
    shape = found.shape
    if not shape.evidence:
        return []
    error = "" if shape.error is None else f" The bytes between hosts differ from this by at most {shape.error:.1%}."
    return [f"{shape.evidence[0].upper()}{shape.evidence[1:]}.{error}"]


def _time(found: Structure) -> list[str]:
    period, mine = found.period, found.iterations
    interval = f"95 % interval of the mean {format_duration(period.low_s)} to {format_duration(period.high_s)}"
    lines = [
        (
            f"Iteration: mean {format_duration(period.mean_s)}, median {format_duration(period.median_s)}, "
            f"p99 {format_duration(period.p99_s)}; {interval}."
        ),
        (
            f"Communication {format_duration(float(mine['communication_s'].median()))} and silence "
            f"{format_duration(float(mine['silence_s'].median()))} in each (medians)."
        ),
        (
            f"Evidence: {period.found_share:.0%} of the boundaries have a silence of usually "
            f"{format_duration(period.silence_s)} or more; the longest within an iteration "
            f"is usually {format_duration(period.other_silence_s)}."
        ),
    ]
    if period.autocorrelation is not None and period.autocorrelation_s is not None:
        at = format_duration(period.autocorrelation_s)
        lines.append(f"The rate's autocorrelation peaks at {at} too, with {period.autocorrelation:.2f}.")
    else:
        lines.append("The rate's autocorrelation has no peak there: iterations are too uneven for it.")
    return lines


def _volume(found: Structure) -> list[str]:
    edges = sorted(edges_of(found.training).items(), key=lambda item: (-item[1], item[0]))
    rows = [[f"{source} > {destination}", format_size(size)] for (source, destination), size in edges[:_MAX_ROWS]]
    lines = text_table([["Gradients per iteration", "payload"], *rows])
    again = sum(member.stream.retransmitted_bytes for member in found.training.members)
    lines.append(f"Retransmitted in all: {format_size(again)}. {found.volume.why[0].upper()}{found.volume.why[1:]}.")
    return lines


def _bursts(found: Structure) -> list[str]:
    scales = sorted(found.peaks["scale_s"].unique())
    rows = []
    for host, part in found.bursts.groupby("host"):
        peaks = found.peaks[found.peaks["host"] == host].set_index("scale_s")["peak_to_mean"]
        row = [str(host), f"{len(part) / len(found.iterations):.1f}"]
        row += [format_duration(float(part["length_s"].median())), format_duration(float(part["length_s"].max()))]
        rows.append(row + [f"{peaks[scale]:.2f}" if scale in peaks else "-" for scale in scales])
    heads = ["Sender", "bursts per iteration", "median", "longest"]
    named = [*heads, *(f"peak/mean {format_duration(scale)}" for scale in scales)]
    return text_table([named, *rows[:_MAX_ROWS]])


def _flows(found: Structure) -> list[str]:
    rows = [
        [
            f"{row['role']}: {row['source']} > {row['destination']}",
            format_rate(row["communication_bps"]),
            format_rate(row["iteration_bps"]),
        ]
        for row in found.flow_rates.to_dict("records")
    ]
    lines = text_table([["Payload rate", "in communication", "in iterations"], *rows])
    return [*lines, f"{found.roles_missing[0].upper()}{found.roles_missing[1:]}."] if found.roles_missing else lines


def _others(found: Structure) -> list[str]:
    pairs: dict[tuple[str, str, str], list[Any]] = {}
    for stream, (kind, why) in zip(found.streams.streams, found.sorted.kinds, strict=True):
        if kind in (CROSS, OTHER):
            pairs.setdefault((kind, stream.source, stream.destination), []).append((stream, why))
    rows: list[list[str]] = []
    total = found.streams.total
    ranked = sorted(pairs.items(), key=lambda item: -sum(one.total for one, _ in item[1]))
    for (kind, source, destination), items in ranked:
        size, flows = sum(one.total for one, _ in items), sum(one.flows for one, _ in items)
        if kind != CROSS or len(rows) >= _MAX_ROWS:
            continue
        why = items[0][1] if flows == 1 else counted(flows, "connection")
        rows.append([f"{source} > {destination}", format_size(size), f"{size / total:.1%}", why])
    lines = text_table([["Cross traffic", "payload", "of all", "what it looks like"], *rows]) if rows else []
    rest = sum(one.total for (kind, *_), items in pairs.items() if kind == OTHER for one, _ in items)
    lines += [f"Another exchange, not part of the job above: {rival}." for rival in found.sorted.rivals]
    return [*lines, f"All else: {format_size(rest)} of {format_size(total)}."]


def _steps(found: Structure) -> list[str]:
    steps = found.steps
    if steps is None:
        return []
    lines = [
        (
            f"Period: {format_duration(steps.packets_s)} by packets, {format_duration(steps.log_s)} by the log over "
            f"the same {steps.iterations} iterations: {steps.period_error:+.2%}; {steps.missed} missed, "
            f"{steps.extra} too many."
        ),
        f"Single iterations are off by {format_duration(steps.iteration_error_s)} (median).",
    ]
    if steps.boundary_median_s is not None and steps.boundary_p95_s is not None:
        median, p95 = f"{steps.boundary_median_s * 1e3:+.2f} ms", format_duration(steps.boundary_p95_s)
        lines.append(f"Boundaries minus starts of communication in DDP's log: median {median}, 95 % within {p95}.")
    if steps.clock_error_s:
        lines.append(f"The nodes' clocks agree to within {format_duration(steps.clock_error_s)}.")
    return lines


def _not_observable(found: Structure) -> list[str]:
    lines = []
    if found.shape.unseen:
        lines.append(f"{found.shape.unseen[0].upper()}{found.shape.unseen[1:]}.")
    if found.training.one_way:
        lines.append("Only one direction of each connection was captured.")
    return lines


def _warnings(found: Structure) -> list[str]:
    count = len(found.notes)
    remarks = f"{count} remark{'s' * (count > 1)} on the captures: 'notes' in --json, or ringtap flows"
    return [*found.warnings, *([remarks] if count else [])]
