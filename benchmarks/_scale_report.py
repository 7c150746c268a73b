"""Figures with bars, and tables, from samples of large runs and of Dask workers."""

from __future__ import annotations

import math
from typing import Any

from _figures import Bar, Samples, median, select
from _report import Table, bars_table, number

BARS = (
    Bar("nodes_s", "a run directory of many nodes: `analyze` and `report`, s", "< 60", lambda x: x < 60),
    Bar("nodes_peak_mb", "peak memory of either, MB", "< 2,000", lambda x: x < 2000),
    Bar("two_over_one", "all captures by two running workers, over one", "≥ 1.7", lambda x: x >= 1.7),
    Bar("cost_all_over_one", "cost per GB of all captures over that of one", "0.8 to 1.25", lambda x: 0.8 <= x <= 1.25),
)


def last_line(samples: Samples) -> dict[str, float | None]:
    """Return the figures of the last line; None: not measured."""
    made = samples.get("make", [])
    short = min((one["iterations"] for one in made), default=0)
    nodes = select(samples, "nodes", iterations=short)
    analyze, report = (_seconds(nodes, verb, "job") for verb in ("analyze", "report"))
    one, two = (_read_s(samples, workers, all_files=True) for workers in (1, 2))
    cost_all, cost_one = (_cost(samples, all_files=found) for found in (True, False))
    commands = [median(select(samples, "command", workers=workers), "seconds") for workers in (0, 1, 2)]
    size_gb = median(samples.get("command", []), "gigabytes")
    figures = {
        "nodes_s": None if analyze is None or report is None else analyze + report,
        "nodes_peak_mb": max((item["peak_rss_mb"] for item in nodes), default=None),
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
    } | _growth(samples)
    return {key: _rounded(value) for key, value in figures.items()}


def _seconds(taken: list[dict[str, Any]], verb: str, of: str) -> float | None:
    return median([one for one in taken if (one["verb"], one["of"]) == (verb, of)], "seconds")


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def _sets(samples: Samples, workers: int, all_files: bool) -> list[dict[str, Any]]:
    """Return the sets of captures read by ``workers`` workers: those with the most files, or with the fewest."""
    taken = [one for sample in select(samples, "read", workers=workers) for one in sample["sets"]]
    wanted = (max if all_files else min)((one["files"] for one in taken), default=0)
    return [one for one in taken if one["files"] == wanted]


def _read_s(samples: Samples, workers: int, all_files: bool) -> float | None:
    return median(_sets(samples, workers, all_files), "seconds")


def _cost(samples: Samples, all_files: bool) -> float | None:
    return median([{"cost": one["seconds"] / one["gigabytes"]} for one in _sets(samples, 1, all_files)], "cost")


def _growth(samples: Samples) -> dict[str, float | None]:
    """Return the cost of a further million node iterations, from the run that is four times as long."""
    both = [select(samples, "nodes", verb="analyze", iterations=one["iterations"]) for one in samples.get("make", [])]
    if len(both) < 2 or not all(both):
        return {"s_per_million_node_iterations": None, "mb_per_million_node_iterations": None}
    (short, long), figures = both, {}
    more = (long[0]["iterations"] - short[0]["iterations"]) * long[0]["nodes"] / 1e6
    for key, name in (("s", "cpu_s"), ("mb", "peak_rss_mb")):
        figures[f"{key}_per_million_node_iterations"] = ((median(long, name) or 0) - (median(short, name) or 0)) / more
    return figures


def _rounded(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}")


def tables(samples: Samples) -> list[Table]:
    """Return every table with samples."""
    made = (bars_table(BARS, last_line(samples)), _nodes(samples), _commands(samples), _reads(samples))
    return [table for table in made if table.rows]


def _nodes(samples: Samples) -> Table:
    rows = []
    cases = dict.fromkeys((one["verb"], one["of"], one["iterations"]) for one in samples.get("nodes", []))
    for verb, of, iterations in cases:
        taken = select(samples, "nodes", verb=verb, of=of, iterations=iterations)
        figures = [number(median(taken, key)) for key in ("seconds", "cpu_s", "peak_rss_mb")]
        rows.append([f"`ringtap {verb}` of the {of}", f"{taken[0]['nodes']:,}", str(iterations), *figures])
    head = ["command", "nodes", "iterations", "s", "CPU s", "peak MB"]
    return Table("A run directory of many nodes, made from one of two", head, rows)


def _commands(samples: Samples) -> Table:
    rows = []
    for workers, words in ((0, "alone"), (1, "`--scheduler local:1`"), (2, "`--scheduler local:2`")):
        taken = select(samples, "command", workers=workers)
        if taken:
            figures = [number(median(taken, key)) for key in ("gigabytes", "seconds", "cpu_s", "peak_rss_mb")]
            rows.append([words, *figures, str(len(taken))])
    head = ["`ringtap flows`", "GB", "s", "CPU s", "peak MB of a process", "samples"]
    return Table("Ten captures, whole commands", head, rows)


def _reads(samples: Samples) -> Table:
    rows = []
    taken = [(one["workers"], item) for one in samples.get("read", []) for item in one["sets"]]
    for workers, files in sorted({(workers, item["files"]) for workers, item in taken}):
        some = [item for count, item in taken if (count, item["files"]) == (workers, files)]
        seconds, size_gb = median(some, "seconds") or 0, some[0]["gigabytes"]
        cost = number(seconds / size_gb)
        rows.append([str(workers), str(files), number(size_gb), number(seconds), cost, str(len(some))])
    head = ["workers", "captures", "GB", "s", "s/GB", "samples"]
    return Table("Captures read by running workers", head, rows)
