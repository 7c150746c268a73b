"""From samples of the overhead to the figures with bars and the tables."""

from __future__ import annotations

import math
from typing import Any

from _figures import Bar, Samples, median, select
from _overhead_pairs import RATES, import_cost_ms, overhead_pct
from _report import Table, bars_table

_HERTZ = {"100ms": "default (10 Hz)", "10ms": "100 Hz", "1ms": "1 kHz"}
_NONE = "-"

BARS = (
    Bar(
        "iteration_overhead_pct",
        "longer iterations under `ringtap run`, %, the worse of both rates",
        "≤ 1",
        lambda x: x <= 1,
    ),
    Bar("agent_cpu_pct_default", "agent at the default rate, % of a core, 100 connections", "≤ 1", lambda x: x <= 1),
    Bar("agent_cpu_pct_100hz", "agent at 100 Hz, % of a core, 100 connections", "≤ 3", lambda x: x <= 3),
    Bar("agent_cpu_pct_1khz", "agent at 1 kHz, % of a core, 100 connections", "≤ 35", lambda x: x <= 35),
    Bar("agent_rss_mb", "resident memory of the agent, MB", "≤ 60", lambda x: x <= 60),
    Bar("hook_import_ms", "`import torch` with the hook, more ms of CPU time", "< 20", lambda x: x < 20),
)


def last_line(samples: Samples) -> dict[str, Any]:
    """The figures of the last line; None: not measured."""
    found = [overhead_pct(samples.get("job", []), every) for every in RATES]
    worst = max((one for one in found if one is not None), default=None)
    agent = samples.get("agent", [])
    cpu = {every: median(_little(samples, every), "agent_cpu_pct") for every in _HERTZ}
    return {
        "iteration_overhead_pct": _rounded(worst[0] if worst else None),
        "iteration_overhead_ci_pct": [_rounded(end) for end in worst[1:]] if worst else None,
        "agent_cpu_pct_default": _rounded(cpu["100ms"]),
        "agent_cpu_pct_100hz": _rounded(cpu["10ms"]),
        "agent_cpu_pct_1khz": _rounded(cpu["1ms"]),
        "agent_rss_mb": _rounded(max((one["rss_mb"] for one in agent), default=None)),
        "disk_mb_per_hour": _rounded(median(_little(samples, "100ms"), "disk_mb_per_hour")),
        "hook_import_ms": _rounded(import_cost_ms(samples.get("import", []), "cpu_ms")),
    }


def _little(samples: Samples, every: str) -> list[dict[str, Any]]:
    return select(samples, "agent", every=every, traffic="little")


def _rounded(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}")


def tables(samples: Samples) -> list[Table]:
    """Every table that there are samples for."""
    return [
        table
        for table in (bars_table(BARS, last_line(samples)), _jobs(samples), _agent(samples), _imports(samples))
        if table.rows
    ]


def _jobs(samples: Samples) -> Table:
    taken = samples.get("job", [])
    rows = []
    for every in RATES:
        found = overhead_pct(taken, every)
        if found:
            runs = [one for one in taken if one["every"] == every]
            bare = [one for one in taken if one["every"] == "without"]
            times = [_number(median(some, "iteration_ms")) for some in (bare, runs)]
            interval = f"{found[1]:+.2f} to {found[2]:+.2f}"
            rows.append([_HERTZ[every], *times, f"{found[0]:+.2f}", interval, str(len(runs)), _stolen(runs + bare)])
    head = ["rate", "without, ms", "with, ms", "more, %", "95 % interval", "pairs", "stolen %"]
    return Table("An iteration of a DDP job of two ranks, with and without `ringtap run`", head, rows)


def _agent(samples: Samples) -> Table:
    rows = []
    for traffic in ("little", "much"):
        for every, words in _HERTZ.items():
            taken = select(samples, "agent", every=every, traffic=traffic)
            if taken:
                keys = ("agent_cpu_pct", "rss_mb", "disk_mb_per_hour", "samples_per_s", "missed_samples", "connections")
                rows.append([words, traffic, *(_number(median(taken, key)) for key in keys), _stolen(taken)])
    head = ["rate", "traffic", "CPU, % of a core", "memory, MB", "disk, MB/h", "samples/s", "missed", "connections"]
    return Table(
        "The agent beside 100 connections; little traffic: 1 kB a second each way, much: 50 kB",
        [*head, "stolen %"],
        rows,
    )


def _imports(samples: Samples) -> Table:
    taken = samples.get("import", [])
    rows = []
    keys = {"cpu_ms": "CPU time", "wall_ms": "wall time", "own_modules_ms": "the hook's own modules"}
    for key, words in keys.items():
        added = import_cost_ms(taken, key)
        if added is not None:
            kinds = [[one for one in taken if one["hook"] == kind] for kind in ("without", "with")]
            pairs = str(min(map(len, kinds)))
            rows.append([words, *(_number(median(some, key)) for some in kinds), f"{added:+.1f}", pairs])
    return Table("`import torch` in a rank process", ["", "without, ms", "with, ms", "more, ms", "pairs"], rows)


def _stolen(taken: list[dict[str, Any]]) -> str:
    return f"{median(taken, 'stolen_pct') or 0:.1f}"


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
