"""Quality of `ringtap traffic` beside iperf3, in one run on one machine (docs/method/benchmarks.md).

python benchmarks/traffic.py [--quick] [--only MEASURE] [-o FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import _checkout  # noqa: F401 -- first: lets the others import ringtap
import _load
import _small_flows
import _throughput
from _bench import Bench, parser_of, run_benchmark
from _report import Samples, Table, Target, median, medians_table, rounded, select, targets_table
from _throughput import IPERF3, ZERO_COPY, ratio

MEASURES = ("throughput", "load", "lateness", "flows")
_QUICK_LIMIT_S = 56.0  # the rest of the minute is for the end of the last measure and of the processes
_OFFERED = {"kept": 40_000, "new": 20_000}  # flows per second, more than can be done
_QUICK_OFFERED = {"kept": 40_000, "new": 12_000}

TARGETS = (
    Target("one_stream_vs_iperf3_z", "goodput, 1 stream, ringtap / `iperf3 -Z`", "≥ 0.9", lambda x: x >= 0.9),
    Target("n_streams_vs_iperf3", "goodput, 4 streams, ringtap / `iperf3 -P 4`", "≥ 1.0", lambda x: x >= 1),
    Target("load_error_pct_max", "deviation of achieved from planned load, worst case, %", "≤ 1", lambda x: x <= 1),
    Target("lateness_p50_us", "lateness on an idle core, median, µs", "< 10", lambda x: x < 10),
    Target("lateness_p99_us", "lateness on an idle core, 99th percentile, µs", "< 100", lambda x: x < 100),
    Target("kept_flows_per_s", "1 kB flows per second, kept connections", "≥ 20,000", lambda x: x >= 20_000),
    Target("new_flows_per_s", "1 kB flows per second, one connection per flow", "≥ 5,000", lambda x: x >= 5_000),
)


def main() -> int:
    """Measure, print the tables and, last, one JSON object; return 1 if a measure failed."""
    options = _options()
    limit_s = _QUICK_LIMIT_S if options.quick else None
    return run_benchmark(options, measure, last_line, tables, limit_s, own_network=True)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, "end within 60 s")
    parser.add_argument("--repeats", type=int, default=5, help="of every measure (default 5; --quick: 1)")
    parser.add_argument("--only", action="append", choices=MEASURES, help="this measure alone; may be repeated")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be 1 or more")
    return options


def measure(bench: Bench) -> None:
    """Measure everything as often as requested; --quick: once, and loads as time allows."""
    quick, chosen = bench.options.quick, bench.options.only or MEASURES
    repeats = 1 if quick else bench.options.repeats
    if "throughput" in chosen:
        _throughput.measure(bench, 1.0 if quick else 3.0, repeats)
    ceiling_bps = _load.calibrate(bench) if "load" in chosen else None
    for repeat in range(repeats):
        if "lateness" in chosen:
            _small_flows.measure_lateness(bench, 1.5 if quick else 10.0, repeat)
        if "flows" in chosen:
            for connections, offered in (_QUICK_OFFERED if quick else _OFFERED).items():
                _small_flows.measure_rate(bench, connections, offered, 1.0 if quick else 2.0, repeat)
        if ceiling_bps:
            _load.measure(bench, ceiling_bps, 2.0 if quick else 10.0, repeat)


def last_line(samples: Samples) -> dict[str, float | None]:
    """Return the figures with targets; None: not measured, or this run cannot judge it."""
    idle = select(samples, "lateness", core="idle")
    rates = {name: median(select(samples, "flow rate", connections=name), "flows_per_s") for name in _OFFERED}
    values = (
        ratio(samples, 1, ZERO_COPY),
        ratio(samples, _throughput.STREAMS, IPERF3),
        _load.worst_error_pct(samples),
        median(idle, "p50_us"),
        median(idle, "p99_us"),
        *rates.values(),
    )
    return rounded({target.key: value for target, value in zip(TARGETS, values, strict=True)})


_TABLES: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "throughput": (
        "Goodput over loopback",
        {"streams": "streams", "tool": "tool"},
        {"goodput_gbps": "Gbit/s", "cpu_s_per_gb": "CPU s/GB"},
    ),
    "load": (
        "Achieved and planned load, at shares of the calibrated ceiling",
        {"kind": "kind", "share": "share"},
        {"planned_gbps": "planned Gbit/s", "achieved_gbps": "achieved Gbit/s", "error_pct": "error %",
         "others_pct": "others %"},
    ),
    "lateness": (
        "Lateness of 1000 small flows per second beside bulk flows, µs",
        {"core": "launcher's core"},
        {"p50_us": "p50", "p90_us": "p90", "p99_us": "p99", "p100_us": "max", "missed_slots": "missed slots"},
    ),
    "flow rate": (
        "1 kB flows, one worker",
        {"connections": "connections"},
        {"offered_per_s": "offered/s", "flows_per_s": "finished/s", "finished": "finished", "planned": "planned"},
    ),
    "calibrate": ("Calibrated ceiling of loopback", {}, {"ceiling_gbps": "Gbit/s"}),
}  # fmt: skip


def tables(bench: Bench) -> list[Table]:
    """Return a table per measure; note the figures that the run cannot judge."""
    figures: dict[str, Any] = last_line(bench.samples)
    sentences = _load.unjudged(bench.samples)
    bench.notes += sentences
    unsure = {"load_error_pct_max"} if sentences and figures["load_error_pct_max"] is None else set()
    made = [targets_table(TARGETS, figures, unsure)]
    for name, (title, cases, of) in _TABLES.items():
        made.append(medians_table(title, bench.samples.get(name, []), cases, of))
    return made


if __name__ == "__main__":
    sys.exit(main())
