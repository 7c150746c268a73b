"""Figures with targets, and tables, from samples of the overhead."""

from __future__ import annotations

import math
import statistics
from typing import Any

from _context import Bench
from _figures import Samples, Target, median, select
from _overhead_pairs import JUDGED_BY, import_cost_ms, interval, overhead
from _report import Table, targets_table

_HERTZ = {"100ms": "default (10 Hz)", "10ms": "100 Hz", "1ms": "1 kHz"}
_NONE = "-"
OVERHEAD_TARGET_PCT = 1.0

TARGETS = (
    Target(
        "iteration_overhead_pct",
        "slowdown of iterations under `ringtap run`, %, the job that it slows most",
        "≤ 1",
        lambda x: x <= OVERHEAD_TARGET_PCT,
    ),
    Target("agent_cpu_pct_default", "agent at the default rate, % of a core, 100 connections", "≤ 1", lambda x: x <= 1),
    Target("agent_cpu_pct_100hz", "agent at 100 Hz, % of a core, 100 connections", "≤ 3", lambda x: x <= 3),
    Target("agent_cpu_pct_1khz", "agent at 1 kHz, % of a core, 100 connections", "≤ 35", lambda x: x <= 35),
    Target("agent_rss_mb", "resident memory of the agent, MB", "≤ 60", lambda x: x <= 60),
    Target("hook_import_ms", "CPU time that the hook adds to `import torch`, ms", "< 20", lambda x: x < 20),
)


def last_line(samples: Samples) -> dict[str, Any]:
    """Return the figures of the last line; None: not measured."""
    worst = _worst(samples)
    agent = samples.get("agent", [])
    cpu = {every: median(_little(samples, every), "agent_cpu_pct") for every in _HERTZ}
    return {
        "iteration_overhead_pct": _rounded(worst[0] if worst else None),
        "iteration_overhead_ci_pct": [_rounded(end) for end in worst[1:]] if worst else None,
        "agent_cpu_pct_default": _rounded(cpu["100ms"]),
        "agent_cpu_pct_100hz": _rounded(cpu["10ms"]),
        "agent_cpu_pct_1khz": _rounded(cpu["1ms"]),
        "agent_rss_mb": _rounded(max((sample["rss_mb"] for sample in agent), default=None)),
        "disk_mb_per_hour": _rounded(median(_little(samples, "100ms"), "disk_mb_per_hour")),
        "hook_import_ms": _rounded(import_cost_ms(samples.get("import", []), "cpu_ms")),
    }


def _worst(samples: Samples) -> tuple[float, float, float] | None:
    """Return overhead and interval of the job with the largest overhead."""
    return max(map(overhead, samples.get("job", [])), default=None)


def _little(samples: Samples, every: str) -> list[dict[str, Any]]:
    return select(samples, "agent", every=every, traffic="little")


def _rounded(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}")


def tables(bench: Bench) -> list[Table]:
    """Return every table with samples; note the figures that the run cannot judge."""
    samples = bench.samples
    worst, unsure = _worst(samples), set()
    if worst and worst[1] <= OVERHEAD_TARGET_PCT < worst[2]:
        unsure.add("iteration_overhead_pct")
    for sample in samples.get("job", []):
        _, low, high = overhead(sample)
        if high - low > 2 * sample["half_width_pct"]:
            bench.notes.append(
                f"This run cannot tell the overhead of the job that {sample['kind']} at {sample['every']} within "
                f"± {sample['half_width_pct']:g} %: its interval is {low:+.2f} to {high:+.2f} %. Use a quieter machine "
                "or give it more time (--limit-s)."
            )
    made = (targets_table(TARGETS, last_line(samples), unsure), _jobs(samples), _agent(samples), _imports(samples))
    return [table for table in made if table.rows]


def _jobs(samples: Samples) -> Table:
    rows = []
    for sample in samples.get("job", []):
        pairs, key = sample["pairs"], JUDGED_BY[sample["kind"]]
        bare_s, judged_s = (statistics.median(pair["without"][name] for pair in pairs) for name in ("mean_s", key))
        middle, low, high = overhead(sample)
        added_us = 1e4 * judged_s * interval(pairs, key)[0]
        share = sample["agent_cpu_share"]
        rows.append([sample["kind"], _HERTZ[sample["every"]], _number(1000 * bare_s)])
        rows[-1].append(f"{middle:+.2f} [{low:+.2f}, {high:+.2f}]")
        rows[-1] += [_number(added_us), _NONE if share is None else _number(100 * share)]
        rows[-1] += [_with_interval(pairs, name) for name in ("mean_s", "cpu_s", "instructions")]
        rows[-1] += [str(len(pairs)), _stolen([sample])]
    head = ["job", "rate", "without, ms", "overhead, %", "µs added per iteration", "agent's CPU, % of a core"]
    head += ["time added, %", "CPU time added, %", "instructions added, %", "pairs", "stolen %"]
    return Table("Iterations of a DDP job of two ranks, with and without recording", head, rows)


def _with_interval(pairs: list[dict[str, dict[str, Any]]], key: str) -> str:
    if any(block[key] is None for pair in pairs for block in pair.values()):
        return _NONE
    middle, low, high = interval(pairs, key)
    return f"{middle:+.2f} [{low:+.2f}, {high:+.2f}]"


def _agent(samples: Samples) -> Table:
    rows = []
    for traffic in ("little", "much"):
        for every, rate in _HERTZ.items():
            taken = select(samples, "agent", every=every, traffic=traffic)
            if taken:
                keys = ("agent_cpu_pct", "rss_mb", "disk_mb_per_hour", "samples_per_s", "missed_samples", "connections")
                rows.append([rate, traffic, *(_number(median(taken, key)) for key in keys), _stolen(taken)])
    head = ["rate", "traffic", "CPU, % of a core", "memory, MB", "disk, MB/h", "samples/s", "missed", "connections"]
    return Table(
        "The agent beside 100 connections, each with little traffic (1 kB/s each way) or much (50 kB/s)",
        [*head, "stolen %"],
        rows,
    )


def _imports(samples: Samples) -> Table:
    taken = samples.get("import", [])
    rows = []
    keys = {"cpu_ms": "CPU time", "own_modules_ms": "the hook's own modules"}
    for key, name in keys.items():
        added = import_cost_ms(taken, key)
        if added is not None:
            kinds = [[sample for sample in taken if sample["hook"] == kind] for kind in ("without", "with")]
            pairs = str(min(map(len, kinds)))
            rows.append([name, *(_number(median(some, key)) for some in kinds), f"{added:+.1f}", pairs])
    return Table("`import torch` in a rank process", ["", "without, ms", "with, ms", "added, ms", "pairs"], rows)


def _stolen(taken: list[dict[str, Any]]) -> str:
    return f"{median(taken, 'stolen_pct') or 0:.1f}"


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
