"""Summarizes a running job in a few lines: status, iteration times, history, collectors. Independent of textual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.text import Text

from ringtap.analysis.live.iterations import LiveIteration
from ringtap.analysis.live.snapshot import CollectorState, Snapshot
from ringtap.analysis.live.tables import BAD, DIM, FAILED, HEADER, WARNING, count, gbps
from ringtap.core.units import counted, format_duration, format_rate, format_size

_SILENT_S = 5.0
_SLOW = 1.5
# outliers, such as the first iterations, must not flatten the other bars
_CAP_MEDIANS = 3.0
LABEL_WIDTH = 16
_GOOD_STATES = ("ok", "running")


def iteration_plot(run: Snapshot, width: int) -> tuple[Text, list[float]]:
    """Return the times of the last iterations: the line above the bars, with marks, and the bars."""
    shown = run.iterations.history[-max(1, width - LABEL_WIDTH) :]
    marks = [mark.t_ns for mark in run.marks]

    def symbol(item: LiveIteration) -> tuple[str, str]:
        if any(0 <= item.end_ns - t_ns < item.seconds * 1e9 for t_ns in marks):
            return "▾", "bold magenta"
        if item.skipped:
            return "×", "magenta"
        return ("•", WARNING) if _is_slow(item.seconds, run.iterations.median_s) else (" ", "")

    return _plot([item.seconds for item in shown], [symbol(item) for item in shown], format_duration, width)


def throughput_plot(run: Snapshot, width: int) -> tuple[Text, list[float]]:
    """Return the larger of sent and received of all interfaces: the line above the bars, and the bars."""
    values = [max(item.tx_bps, item.rx_bps) for item in run.throughput[-max(1, width - LABEL_WIDTH) :]]
    return _plot(values, [(" ", "")] * len(values), format_rate, width)


def _plot(
    values: list[float], symbols: list[tuple[str, str]], show: Callable[[float], str], width: int
) -> tuple[Text, list[float]]:
    """Cut bars at three times their median, and pad them with zeros: a sparkline starts at its smallest value."""
    top, median = max(values, default=0.0), sorted(values)[len(values) // 2] if values else 0.0
    top = min(top, _CAP_MEDIANS * median) if median > 0 else top
    both = zip(values, symbols, strict=True)
    cut = [("▲", BAD) if value > top and symbol[0] != "▾" else symbol for value, symbol in both]
    space = width - len(values)
    label = f"0–{show(top)}" if values else ""
    return Text.assemble((label.ljust(space), DIM), *cut), [0.0] * space + [
        max(0.0, min(value, top)) for value in values
    ]


def _is_slow(value: float | None, median: float | None) -> bool:
    return bool(value and median and value > _SLOW * median)


def _duration(value: float | None) -> str:
    return "-" if value is None else format_duration(value)


def headline(run: Snapshot, paused: bool) -> Text:
    """Return the first line: status, problems, elapsed time and iteration."""
    parts = [("PAUSED", f"bold {WARNING}")] if paused else []
    parts += [(run.status, {"running": "bold green", "complete": HEADER}.get(run.status, f"bold {BAD}"))]
    silent = [node.age_s for node in run.nodes if node.age_s is not None and node.age_s > _SILENT_S]
    if silent and not run.ended:
        parts.append((f"no sample for {max(silent):.0f} s", BAD))
    seconds = int(run.elapsed_s)
    parts.append((f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}", ""))
    iterations = run.iterations
    if iterations.history:
        last = iterations.history[-1]
        slow = "magenta" if last.skipped else WARNING if _is_slow(last.seconds, iterations.median_s) else "bold green"
        parts += [(f"iteration {last.number}", HEADER), (format_duration(last.seconds), slow)]
        statistics = f"median {_duration(iterations.median_s)}  p99 {_duration(iterations.p99_s)} of {iterations.over}"
        parts.append((statistics, ""))
    elif iterations.ranks:
        parts.append(("no iteration yet", HEADER))
    else:
        parts.append(("no steps recorded" if run.ended else "no steps so far", HEADER))
    return Text("  ").join(Text(text, style) for text, style in parts)


def job_line(run: Snapshot, node: str, is_named: bool = True) -> Text:
    """Return the second line: nodes, ranks, the recording (without iterations the throughput) and the run's name.

    Args:
        run: the run, or the part of it for one node.
        node: that node; empty for all.
        is_named: True to end with the run's name.
    """
    iterations = run.iterations
    parts = [(node or counted(len(run.nodes), "node"), "")]
    if iterations.ranks:
        parts.append((f"{iterations.ranks} of {counted(max(iterations.world_size, iterations.ranks), 'rank')}", ""))
    parts += [("restarted", WARNING)] if iterations.restarts else []
    parts += [(disk, "")] if (disk := _disk(run, node)) else []
    if not iterations.history and run.throughput:
        last = run.throughput[-1]
        parts.append((f"all interfaces: sent {gbps(last.tx_bps)} received {gbps(last.rx_bps)} Gbit/s", ""))
    parts += [(Path(run.path).resolve().name, DIM)] if is_named else []
    return Text("  ").join(Text(text, style) for text, style in parts)


def verdict_lines(run: Snapshot) -> list[Text]:
    """Return why the job is slow now: the causes and what to do, or that there is none; none before it is known."""
    lines, count = run.diagnosis.lines, len(run.diagnosis.causes)
    if count:
        return [Text(" ".join(lines[:count]), WARNING), Text(" ".join(lines[count:]))]
    return [Text(" ".join(lines), "" if run.diagnosis.is_known else DIM)] if lines else []


def _disk(run: Snapshot, node: str) -> str:
    """Return size and growth of the recording of a node, or of all, in words; empty before the growth is known."""
    nodes = [one for one in run.nodes if node in ("", one.name) and one.disk_bytes_per_hour is not None]
    size, growth = sum(one.disk_bytes or 0 for one in nodes), sum(one.disk_bytes_per_hour or 0 for one in nodes)
    return f"disk {format_size(size)}, {format_size(growth)}/h" if nodes else ""


def collector_states(collectors: Sequence[CollectorState]) -> list[Text]:
    """Return each collector's state in a word or two, and the reason of the first failure."""
    by_name: dict[str, list[CollectorState]] = {}
    for item in collectors:
        by_name.setdefault(item.name, []).append(item)
    lines = [Text("  ").join([Text("State", HEADER), *(_state(*pair) for pair in by_name.items())])] if by_name else []
    trouble = next((item for item in collectors if item.health == "bad" and item.reason), None)
    return lines + ([Text(f"{trouble.name} on {trouble.node}: {trouble.reason}", BAD)] if trouble else [])


def _state(name: str, items: Sequence[CollectorState]) -> Text:
    """Return a collector's state on all nodes in a few words; the worst node counts."""
    worst = next((item for health in ("bad", "warning") for item in items if item.health == health), items[0])
    missed, lost = sum(item.missed or 0 for item in items), sum(item.lost or 0 for item in items)
    losses = [f"{count(number)} {what}" for number, what in ((missed, "missed"), (lost, "lost")) if number]
    word = worst.state if worst.state not in _GOOD_STATES else "ok" if worst.health == "good" else "silent"
    style = DIM if worst.state == "unavailable" else WARNING if lost or worst.health == "warning" else "green"
    text = f"{name} {word}{' (' + ', '.join(losses) + ')' if losses else ''}"
    return Text(text, BAD if worst.health == "bad" else style)


def warnings(run: Snapshot) -> list[str]:
    """Return what needs attention, in sentences that stay the same while it lasts."""
    found = [f"The run is {run.status}. {run.why}".strip()] if run.ended and run.status != "complete" else []
    for node in run.nodes:
        if not run.ended and (node.age_s or 0) > _SILENT_S:
            found.append(f"{node.name} has sent no sample for more than {_SILENT_S:g} s.")
        if node.status in FAILED:
            found.append(f"{node.name} is {node.status}. {node.why}".strip())
    for item in run.collectors:
        if item.health == "bad":
            found.append(f"{item.name} on {item.node} is {item.state}. {item.reason}".strip())
        if item.lost:
            found.append(f"{item.name} on {item.node} has lost records.")
    return found


def ending(run: Snapshot) -> str:
    """Return the status of a run that ended, as a sentence."""
    return f"The run is {run.status}{': ' + run.why if run.why else ''}."
