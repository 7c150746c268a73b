"""Writes the report of a sweep or a table: its numbers as plain values, the figures, and the page made from them."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import ringtap
from ringtap.analysis import published_results
from ringtap.analysis.plots.congestion_point import congestion_points
from ringtap.analysis.plots.distributions import distributions, spread_and_growth, transports
from ringtap.analysis.plots.figure import Drawn
from ringtap.analysis.plots.style import plain
from ringtap.analysis.plots.sweep_figure_parts import Setting
from ringtap.analysis.plots.sweep_variants import variant_times
from ringtap.analysis.plots.time_against_load import (
    iteration_times,
    rescaled_times,
    throughput,
    total_load,
    traffic_kinds,
    transport_times,
)
from ringtap.analysis.report import sweep_packets_section
from ringtap.analysis.report.findings import answer, findings, overview, paragraph, series_lines
from ringtap.analysis.report.inputs import ReportInputs
from ringtap.analysis.report.load_statistics import (
    Tails,
    compare_kinds,
    order_kinds,
    tails,
)
from ringtap.analysis.report.page import Written, write_folder
from ringtap.analysis.report.thesis_expectations import check, flow_rates
from ringtap.analysis.sweeps import points
from ringtap.analysis.sweeps.compare_at_equal_loads import common_share, mean_interval
from ringtap.analysis.sweeps.series_analysis import Series
from ringtap.core.thesis_neural_networks import GRADIENT_BYTES, ring_bytes
from ringtap.core.units import counted, format_rate

REPORT_SCHEMA = 3
_TABLE = "points.csv"
# a point of a real cluster takes minutes; a page that is older is of a sweep that was killed
RELOAD_EVERY_S, RELOAD_FOR_S = 10, 1800
Maker = Callable[[Sequence[Series], Sequence[Tails], Setting], Drawn | None]
# file name -> function that draws the figure, in the order of the report
FIGURES: dict[str, Maker] = {
    "iteration-times": lambda series, _, setting: iteration_times(series, setting),
    "rescaled": lambda series, _, setting: rescaled_times(series, setting),
    "traffic-kinds": lambda series, _, setting: traffic_kinds(series, setting),
    "variant-times": lambda series, _, setting: variant_times(series, setting),
    "transport-times": lambda series, _, setting: transport_times(series, setting),
    "throughput": lambda series, _, setting: throughput(series, setting),
    "distributions": lambda series, _, setting: distributions(series, setting),
    "transports": lambda series, _, setting: transports(series, setting),
    "spread-and-growth": spread_and_growth,
    "total-load": lambda series, _, setting: total_load(series, setting),
    "congestion-points": lambda series, _, setting: congestion_points(series, setting),
}


def collect(measured: ReportInputs, found: Sequence[Tails]) -> dict[str, Any]:
    """Collect all numbers of the report as plain values; a missing one is None.

    Args:
        measured: the series and the facts of their measurement.
        found: result of `ringtap.analysis.report.load_statistics.tails` for each.
    """
    info, plan, series = measured.info, measured.plan, measured.series
    packets = sweep_packets_section.collect(measured.captured)
    checks, pairs = [*check(info, series), *flow_rates(packets)], compare_kinds(series)
    rows = overview(series)
    statements = findings(series, rows, found, pairs, checks)
    data: dict[str, Any] = {"schema": REPORT_SCHEMA, "ringtap": ringtap.__version__}
    # how often the page of a sweep that runs loads itself anew, and until when (in ms since 1970)
    reload = {"every_s": RELOAD_EVERY_S, "until_ms": round((time.time() + RELOAD_FOR_S) * 1e3)}
    data["run"] = {
        "name": measured.name,
        "source": measured.source,
        "table": None if "rows" not in info else {key: info[key] for key in ("rows", "by_iteration")},
        "status": info.get("status", "running"),
        "reload": reload if info.get("status") == "running" and info.get("report") else None,
        "why": info.get("why", ""),
        "created_utc": _utc(info.get("created_ns")),
        "measured_with": info.get("ringtap", ""),
        "argv": info.get("argv", []),
        "seed": info.get("seed"),
        "plan": plan,
        "beside": measured.beside,
        "simulated": [one.name for one in series if one.is_simulated],
    }
    testbed_bps = measured.capacity_gbps * 1e9 / measured.scale
    data["scale"] = {"factor": measured.scale, "testbed_bps": testbed_bps, "full_size_gbps": measured.capacity_gbps}
    data["environment"] = measured.environment
    data["links"] = [_link(link) for link in (info.get("lab") or {}).get("links") or []]
    data["precheck"] = list(info.get("precheck") or [])
    data["series"] = [_series(one, tail) for one, tail in zip(series, found, strict=True)]
    data["packets"] = packets
    data["comparisons"] = [pair.to_json() for pair in pairs]
    data["kind_order"] = [asdict(item) for item in order_kinds(series)]
    data["checks"] = [asdict(item) for item in checks]
    data["not_collected"] = [*measured.not_collected, *_missing(series)]
    data["torn"] = measured.torn
    data["rejected"] = measured.rejected
    data["findings"] = [asdict(item) for item in statements]
    data["paragraph"] = paragraph(statements)
    data["headline"] = series_lines(series, _capacity(data["scale"]), checks)
    data["overview"] = rows
    data["orders"] = [order.to_json() for order in measured.orders]
    answers = [line for order in measured.orders for line in order.sentences]
    if not answers or any(one.has_cross_traffic for one in series):
        answers.append(answer(rows, data["run"]["reload"] is not None))
    data["answer"] = " ".join(answers)
    return data


def _series(series: Series, tails: Tails) -> dict[str, Any]:
    item = {**series.to_json(), "tails": tails.to_json(), "thesis": published(series)}
    for shown, point in zip(item["points"], series.points, strict=True):
        shown["mean_interval_s"] = mean_interval(point)
    return item


def _capacity(scale: dict[str, float]) -> str:
    text = f"{scale['full_size_gbps']:g} Gbit/s"
    if scale["factor"] == 1:
        return text
    return f"{text} (links of {format_rate(scale['testbed_bps'])}, 1:{scale['factor']:g})"


def _utc(created_ns: Any) -> str:
    if not isinstance(created_ns, int):
        return ""
    return datetime.datetime.fromtimestamp(created_ns // 10**9, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _link(link: dict[str, Any]) -> dict[str, Any]:
    asked, measured = link.get("asked_bps"), link.get("measured_bps")
    share = measured / asked if measured is not None and asked else None
    item = {"host": link.get("host"), "direction": link.get("direction")}
    return item | {"asked_bps": asked, "measured_bps": measured, "share": share}


def _missing(series: Sequence[Series]) -> list[dict[str, str]]:
    """Count the reasons of points, in the form of run.json's ``not_collected``."""
    found: dict[tuple[str, str], int] = {}
    for one in series:
        for point in one.points:
            for reason in point.reasons:
                found[one.name, reason] = found.get((one.name, reason), 0) + 1
    return [{"what": f"{counted(count, 'point')} of {name}", "why": reason} for (name, reason), count in found.items()]


def published(series: Series) -> dict[str, Any]:
    """Return the thesis's figures for a model and traffic kind, with their tables; None where it has none."""
    key = (series.model, series.traffic)
    no_load_s, where = published_results.no_load(series.model, series.transport)
    item: dict[str, Any] = {"no_load_s": no_load_s, "no_load_table": where}
    point = published_results.CONGESTION_POINTS.get(key)
    item["congestion"] = None
    if point is not None:
        demand_mb = ring_bytes(GRADIENT_BYTES * series.demand.parameters, point.workers) / 1e6
        item["congestion"] = asdict(point) | {"over_demand": point.data_mb / demand_mb}
        item["congestion"]["table"] = published_results.CONGESTION_TABLES[series.traffic]
    spare = published_results.MAX_CONGESTED_GBPS.get(key)
    item["most_congested"] = None
    if spare is not None:
        ideal, experimental = spare
        item["most_congested"] = {"ideal_gbps": ideal, "experimental_gbps": experimental}
        item["most_congested"] |= {"difference_share": (experimental - ideal) / experimental}
        item["most_congested"]["table"] = published_results.MAX_CONGESTED_TABLES[series.traffic]
    item["mean_difference_gbps"] = published_results.MEAN_DIFFERENCE_GBPS.get(key)
    item["mean_difference_table"] = published_results.DIFFERENCE_TABLE
    item["fits"] = [asdict(fit) for fit in published_results.fits_for(series.model, series.traffic, series.transport)]
    item["growth"] = (
        published_results.GROWTH_AT_HEAVY.get(series.model) if series.traffic in published_results.SPREAD_HIGH else None
    )
    item["spread_low"] = published_results.SPREAD_LOW if series.traffic in published_results.SPREAD_HIGH else None
    item["spread_high"] = published_results.SPREAD_HIGH.get(series.traffic)
    return item


def write_sweep_report(measured: ReportInputs, folder: Path | None = None) -> Written:
    """Write the report of a sweep or of a table into a folder; an older report there is replaced file by file.

    Args:
        measured: result of `ringtap.analysis.report.inputs.of_sweep` or `of_table`.
        folder: target folder, created if missing; None: ``report/`` in the sweep, ``<table>-report`` here for a table.

    Raises:
        UsageError: the folder cannot be written to.
    """
    folder = folder or measured.folder
    heavy_share = common_share(measured.series)
    found = [tails(one, heavy_share) for one in measured.series]
    data = collect(measured, found)
    used = [(one, tail) for one, tail in zip(measured.series, found, strict=True) if one.used]
    shown = [one for one, _ in used], [tail for _, tail in used], Setting(measured.capacity_gbps, measured.scale)
    figures = {name: partial(maker, *shown) for name, maker in FIGURES.items()}
    figures |= {name: partial(maker, measured.captured) for name, maker in sweep_packets_section.FIGURES.items()}
    table = points.table([point for one in measured.series for point in one.points])
    paths = write_folder(folder, "report.html.j2", data, figures, table, _TABLE)
    return Written(_summary(data), paths, folder / "report.json")


def _summary(data: dict[str, Any]) -> str:
    run = data["run"]
    lines = [data["answer"], f"{run['name']}: {run['status']}" + (f", {run['why']}" if run["why"] else "")]
    lines += [line for line in data["headline"] if line != data["answer"]]
    lines += [f"{item['label']}: {item['agreement']}" for item in data["packets"]]
    failed = [item for item in data["checks"] if item["ok"] is False]
    lines += [f"  not as expected: {item['subject']}: {item['expected']}; {item['found']}" for item in failed]
    return "\n".join(map(plain, lines))
