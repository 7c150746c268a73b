"""Cost of ``ringtap run`` for a training job and its node, in one run on one machine (docs/reference/collectors.md).

python benchmarks/overhead.py [--quick] [-o FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from typing import Any

import _checkout  # noqa: F401 -- first: lets the others import ringtap
import _overhead_agent
import _overhead_pairs
from _bench import Bench, parser_of, run_benchmark
from _overhead_pairs import JUDGED_BY, RATES, interval, overhead
from _report import Sample, Samples, Table, Target, median, medians_table, number, rounded, select, targets_table

MEASURES = ("agent", "jobs")
_QUICK_LIMIT_S = 115.0
_JOB_LIMIT_S = 240.0
_STARTED_S = 5.0  # time of a job before its first block and after its last
_TARGET_PCT = 1.0
_AGENT_RATES = {"100ms": "agent_cpu_pct_default", "10ms": "agent_cpu_pct_100hz", "1ms": "agent_cpu_pct_1khz"}

TARGETS = (
    Target(
        "iteration_overhead_pct",
        "slowdown of iterations under `ringtap run`, %, the job that it slows most",
        "≤ 1",
        lambda x: x <= _TARGET_PCT,
    ),
    Target("agent_cpu_pct_default", "agent at the default rate, % of a core, 100 connections", "≤ 1", lambda x: x <= 1),
    Target("agent_cpu_pct_100hz", "agent at 100 Hz, % of a core, 100 connections", "≤ 3", lambda x: x <= 3),
    Target("agent_cpu_pct_1khz", "agent at 1 kHz, % of a core, 100 connections", "≤ 35", lambda x: x <= 35),
    Target("agent_rss_mb", "resident memory of the agent, MB", "≤ 60", lambda x: x <= 60),
)


def main() -> int:
    """Measure, print the tables and, last, one JSON object; return 1 if a measure failed."""
    options = _options()
    return run_benchmark(options, measure, last_line, tables, options.limit_s, own_network=True)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, "end within two minutes")
    parser.add_argument("--limit-s", type=float, help="seconds for everything (default: none; --quick: 115)")
    parser.add_argument("--only", action="append", choices=MEASURES, help="this measure alone; may be repeated")
    options = parser.parse_args()
    if options.quick:
        options.limit_s = options.limit_s or _QUICK_LIMIT_S
    if options.limit_s is not None and options.limit_s <= 0:
        parser.error("--limit-s must be above 0")
    return options


def measure(bench: Bench) -> None:
    """Measure the agent first, then the jobs, which share the remaining time."""
    quick, chosen = bench.options.quick, bench.options.only or MEASURES
    if "agent" in chosen:
        for traffic in ("little",) if quick else _overhead_agent.TRAFFIC:
            for every in _AGENT_RATES:
                _overhead_agent.measure(bench, every, traffic, 2.0 if quick else 20.0)
    if "jobs" in chosen:
        cases = [(kind, every) for every in RATES[: 1 if quick else None] for kind in JUDGED_BY]
        for done, (kind, every) in enumerate(cases):
            limit_s = min(_JOB_LIMIT_S, max(_STARTED_S, bench.left_s() / (len(cases) - done) - _STARTED_S))
            _overhead_pairs.measure_job(bench, kind, every, limit_s)


def last_line(samples: Samples) -> dict[str, Any]:
    """Return the figures of the last line; None: not measured."""
    worst = _worst(samples)
    agent = samples.get("agent", [])
    little = {every: select(samples, "agent", every=every, traffic="little") for every in _AGENT_RATES}
    ends = rounded({"low": worst[1], "high": worst[2]}) if worst else None
    figures = {name: median(little[every], "agent_cpu_pct") for every, name in _AGENT_RATES.items()}
    figures["agent_rss_mb"] = max((sample["rss_mb"] for sample in agent), default=None)
    figures["disk_mb_per_hour"] = median(little["100ms"], "disk_mb_per_hour")
    first = rounded({"iteration_overhead_pct": worst[0] if worst else None})
    return first | {"iteration_overhead_ci_pct": list(ends.values()) if ends else None} | rounded(figures)


def _worst(samples: Samples) -> tuple[float, float, float] | None:
    """Return overhead and interval of the job with the largest overhead."""
    return max(map(overhead, samples.get("job", [])), default=None)


def tables(bench: Bench) -> list[Table]:
    """Return every table."""
    samples = bench.samples
    worst, unsure = _worst(samples), set()
    if worst and worst[1] <= _TARGET_PCT < worst[2]:
        unsure.add("iteration_overhead_pct")
    agent = medians_table(
        "The agent beside 50 connections with both ends here, with little traffic (1 kB/s each way) or much (50 kB/s)",
        samples.get("agent", []),
        {"every": "a sample every", "traffic": "traffic"},
        {"agent_cpu_pct": "CPU, % of a core", "rss_mb": "memory, MB", "disk_mb_per_hour": "disk, MB/h",
         "samples_per_s": "samples/s", "missed_samples": "missed", "connections": "connections"},
    )  # fmt: skip
    return [targets_table(TARGETS, last_line(samples), unsure), _jobs(samples.get("job", [])), agent]


def _jobs(samples: list[Sample]) -> Table:
    rows = []
    for sample in samples:
        pairs, share = sample["pairs"], sample["agent_cpu_share"]
        bare_s = statistics.median(pair["without"]["mean_s"] for pair in pairs)
        rows.append([sample["kind"], sample["every"], number(1000 * bare_s), _with_interval(*overhead(sample))])
        rows[-1].append(number(None if share is None else 100 * share))
        rows[-1] += [_with_interval(*interval(pairs, name)) for name in ("mean_s", "cpu_s")]
        rows[-1] += [str(len(pairs)), f"{sample['stolen_pct']:.1f}"]
    head = ["job", "a sample every", "without, ms", "overhead, %", "agent's CPU, % of a core"]
    head += ["time added, %", "CPU time added, %", "pairs", "stolen %"]
    return Table("Iterations of a DDP job of two ranks, with and without recording", head, rows)


def _with_interval(middle: float, low: float, high: float) -> str:
    return f"{middle:+.2f} [{low:+.2f}, {high:+.2f}]" if math.isfinite(low) else f"{middle:+.2f}"


if __name__ == "__main__":
    sys.exit(main())
