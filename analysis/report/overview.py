"""Collects the first screen of a sweep's report: one row of numbers per series, with its caveats."""

from __future__ import annotations

from collections.abc import Sequence

from ringtap.analysis.report.findings import Row, name_in_text
from ringtap.analysis.report.load_statistics import HEAVY_SHARE, slowdown
from ringtap.analysis.sweeps.series_analysis import Series
from ringtap.core.schema import VARIANTS

MIDDLE_SHARE = 0.50
SHARES = (MIDDLE_SHARE, HEAVY_SHARE)  # of capacity: the loads whose slowdown is given


def overview(series: Sequence[Series]) -> list[Row]:
    """Return the row of each series as plain values: no-load time, congestion point, slowdowns, fit and caveats.

    A slowdown is the mean iteration time over that without cross traffic, minus 1. An unknown number is None, and its
    ``why`` has the reason. A caveat names the number that it limits (``about``) and has a sentence (``text``).
    """
    return [_row(one) for one in series]


def _row(series: Series) -> Row:
    row: Row = {"series": series.name, "name": name_in_text(series), "title": series.title, "traffic": series.traffic}
    row |= {
        **{name: getattr(series, name) for name in VARIANTS},
        "has_cross_traffic": series.has_cross_traffic,
        "points": len(series.used),
        "no_load_s": series.no_load_s,
    }
    row["slowdowns"] = [_slowdown(series, share) for share in SHARES]
    row["congestion"], caveats = _congestion(series)
    fit = series.fit
    row["fit"] = {"why": series.fit_reason}
    if fit is not None:
        numbers = {"A": fit.A, "B": fit.B, "n": fit.n, "model": fit.name, "r2": fit.r2, "range": fit.range}
        row["fit"] = numbers | {"points": len(fit.iteration_s), "why": ""}
        caveats += [("fit", text) for text in fit.warnings]
    row["caveats"] = [{"about": about, "text": text} for about, text in caveats]
    return row


def _slowdown(series: Series, share: float) -> Row:
    found = slowdown(series, share)
    low_high = None if found.interval is None else [end - 1 for end in found.interval]
    load = found.bandwidth_gbps
    return {
        "share": share,
        "load_share": None if load is None else load / series.capacity_gbps,
        "slowdown": None if found.ratio is None else found.ratio - 1,
        "interval": low_high,
        "why": found.reason,
    }


def _congestion(series: Series) -> tuple[Row, list[tuple[str, str]]]:
    """The point on the fitted curve; caveats tell where the thesis's construction disagrees."""
    found, thesis = series.curve, series.congestion
    point = found.point
    row: Row = {"bandwidth_gbps": None, "share": None, "interval_share": None}
    row |= {"text": found.clause, "why": found.reason}
    if point is None:
        return row, []
    row |= {"bandwidth_gbps": point.bandwidth_gbps, "share": point.bandwidth_gbps / series.capacity_gbps}
    row["interval_share"] = list(point.interval_share)
    if thesis.point is None:
        return row, [("congestion", f"the thesis's construction finds no point: {thesis.reason}")]
    at = thesis.point.bandwidth_gbps
    if point.low_gbps <= at <= point.high_gbps:
        return row, []
    measured = f"{at:.1f} Gbit/s ({at / series.capacity_gbps:.0%} of the capacity)"
    return row, [("congestion", f"the thesis's construction takes the measured point at {measured} instead")]
