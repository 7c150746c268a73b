"""Figures with targets, and tables, from samples of large runs and of Dask workers."""

from __future__ import annotations

import math
from typing import Any

from _figures import Samples, Target, median, select
from _report import Table, number, targets_table

TARGETS = (
    Target("nodes_s", "`analyze` and `report` of a run directory of many nodes, s", "< 60", lambda x: x < 60),
    Target("nodes_peak_mb", "peak memory of either, MB", "< 2,000", lambda x: x < 2000),
    Target("two_over_one", "speedup of two started workers over one, all captures", "≥ 1.7", lambda x: x >= 1.7),
    Target("cost_all_over_one", "s/GB, all captures / one capture", "≤ 1.1", lambda x: x <= 1.1),
)


def last_line(samples: Samples) -> dict[str, float | None]:
    """Return the figures of the last line; None: not measured."""
    made, nodes = samples.get("make", []), samples.get("nodes", [])
    analyze, report = (_seconds(nodes, verb, "job") for verb in ("analyze", "report"))
    one, two = (_read_s(samples, workers, all_files=True) for workers in (1, 2))
    cost_all, cost_one = (_cost(samples, all_files=all_files) for all_files in (True, False))
    commands = [median(select(samples, "command", workers=workers), "seconds") for workers in (0, 1, 2)]
    size_gb = median(samples.get("command", []), "gigabytes")
    figures = {
        "nodes_s": None if analyze is None or report is None else analyze + report,
        "nodes_peak_mb": max((sample["peak_rss_mb"] for sample in nodes), default=None),
        "two_over_one": _ratio(one, two),
        "cost_all_over_one": _ratio(cost_all, cost_one),
        "nodes": median(made, "nodes"),
        "analyze_s": analyze,
        "report_s": report,
        "sweep_report_s": _seconds(nodes, "report", "sweep"),
        "gigabytes": size_gb,
        "s_per_gb_one_worker": cost_all,
        "workers_start_s": median(select(samples, "read", workers=2), "start_s"),
        "command_alone_s": commands[0],
        "command_one_worker_s": commands[1],
        "command_two_workers_s": commands[2],
        "commands_two_over_one": _ratio(commands[1], commands[2]),
    }
    return {key: _rounded(value) for key, value in figures.items()}


def _seconds(nodes: list[dict[str, Any]], verb: str, of: str) -> float | None:
    return median([sample for sample in nodes if (sample["verb"], sample["of"]) == (verb, of)], "seconds")


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


def _sets(samples: Samples, workers: int, all_files: bool) -> list[dict[str, Any]]:
    """Return the sets of captures read by ``workers`` workers: those with the most files, or with the fewest."""
    sets = [item for sample in select(samples, "read", workers=workers) for item in sample["sets"]]
    files = (max if all_files else min)((item["files"] for item in sets), default=0)
    return [item for item in sets if item["files"] == files]


def _read_s(samples: Samples, workers: int, all_files: bool) -> float | None:
    return median(_sets(samples, workers, all_files), "seconds")


def _cost(samples: Samples, all_files: bool) -> float | None:
    return median([{"cost": item["seconds"] / item["gigabytes"]} for item in _sets(samples, 1, all_files)], "cost")


def _rounded(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}")


def tables(samples: Samples) -> list[Table]:
    """Return every table with samples."""
    made = (
        targets_table(TARGETS, last_line(samples)),
        _nodes(samples),
        _commands(samples),
        _reads(samples),
    )
    return [table for table in made if table.rows]


def _nodes(samples: Samples) -> Table:
    rows = []
    cases = dict.fromkeys((sample["verb"], sample["of"], sample["iterations"]) for sample in samples.get("nodes", []))
    for verb, of, iterations in cases:
        taken = select(samples, "nodes", verb=verb, of=of, iterations=iterations)
        figures = [number(median(taken, key)) for key in ("seconds", "cpu_s", "peak_rss_mb")]
        rows.append([f"`ringtap {verb}` of the {of}", f"{taken[0]['nodes']:,}", str(iterations), *figures])
    head = ["command", "nodes", "iterations", "s", "CPU s", "peak MB"]
    return Table("A run directory of many nodes, made from a run of two", head, rows)


def _commands(samples: Samples) -> Table:
    rows = []
    for workers, options in ((0, "without workers"), (1, "`--scheduler local:1`"), (2, "`--scheduler local:2`")):
        taken = select(samples, "command", workers=workers)
        if taken:
            figures = [number(median(taken, key)) for key in ("gigabytes", "seconds", "cpu_s", "peak_rss_mb")]
            rows.append([options, *figures, str(len(taken))])
    head = ["`ringtap flows`", "GB", "s", "CPU s", "peak MB per process", "samples"]
    return Table("Ten captures, whole commands", head, rows)


def _reads(samples: Samples) -> Table:
    rows = []
    taken = [(sample["workers"], item) for sample in samples.get("read", []) for item in sample["sets"]]
    for workers, files in sorted({(workers, item["files"]) for workers, item in taken}):
        some = [item for count, item in taken if (count, item["files"]) == (workers, files)]
        seconds, size_gb = median(some, "seconds") or 0, some[0]["gigabytes"]
        cost = number(seconds / size_gb)
        rows.append([str(workers), str(files), number(size_gb), number(seconds), cost, str(len(some))])
    head = ["workers", "captures", "GB", "s", "s/GB", "samples"]
    return Table("Captures read by workers started beforehand", head, rows)
