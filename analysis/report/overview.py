"""The first screen of a sweep's report: a headline of one sentence, and one row per series with its caveats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringtap.analysis.model.breakpoint import LEVEL, compared
from ringtap.analysis.plots.style import title_of
from ringtap.analysis.report.findings import name_in_text
from ringtap.analysis.report.load_statistics import HEAVY_SHARE, slowdown
from ringtap.analysis.sweeps.series_analysis import Series
from ringtap.core.schema import VARIANTS
from ringtap.core.sweep_plan_models import model_label
from ringtap.core.units import counted

MIDDLE_SHARE = 0.50
SHARES = (MIDDLE_SHARE, HEAVY_SHARE)  # of capacity: the loads whose slowdown is given

Row = dict[str, Any]


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
    """The break of two segments, which has an interval; without a break, the point of the thesis's construction.

    If the sweep chose its loads for the congestion point on the fitted curve, it is that one.
    """
    break_point, point, capacity = series.segments.point, series.congestion.point, series.capacity_gbps
    row: Row = {"bandwidth_gbps": None, "share": None, "interval_share": None, "method": None, "why": ""}
    if series.is_auto and (found := series.curve.point) is not None:
        ends = [found.low_gbps / capacity, found.high_gbps / capacity]
        row |= {"method": "curve", "bandwidth_gbps": found.bandwidth_gbps, "share": found.bandwidth_gbps / capacity}
        return row | {"interval_share": ends}, []
    if break_point is not None:
        load, warnings = break_point.bandwidth_gbps, list(break_point.warnings)
        if series.fit is not None and (text := compared(break_point, series.fit)):
            warnings.append(text)
        row |= {"method": "break", "interval_share": [load.low / capacity, load.high / capacity]}
        if point is None:
            warnings.append(f"the thesis's construction finds no point: {series.congestion.reason}")
        elif not load.low <= point.bandwidth_gbps <= load.high:
            measured = f"{point.bandwidth_gbps:.1f} Gbit/s ({point.bandwidth_gbps / capacity:.0%} of the capacity)"
            warnings.append(f"the thesis's construction takes the measured point at {measured} instead")
        row |= {"bandwidth_gbps": load.value, "share": load.value / capacity}
        return row, [("congestion", text) for text in warnings]
    if point is not None:
        at = point.bandwidth_gbps
        row |= {"method": "construction", "bandwidth_gbps": at, "share": at / capacity}
        return row | {"why": f"no interval: {series.segments.reason}"}, []
    return row | {"why": series.congestion.reason or series.segments.reason}, []


def sentence(rows: Sequence[Row], is_running: bool = False) -> str:
    """Return the headline: how much iterations slow down at about 80 % load, and the load where congestion begins.

    Without any cross traffic, it is the time of an iteration. While a sweep is running, it says first that both are
    still to come.
    """
    measured = [row for row in rows if row["points"]]
    if is_running and all(row["slowdowns"][-1]["slowdown"] is row["congestion"]["share"] is None for row in measured):
        points = counted(sum(row["points"] for row in measured), "point")
        return f"{points} so far: the slowdown at {HEAVY_SHARE * 100:.0f} % load and the congestion point need more."
    if not measured:
        return "No point was measured."
    if not any(row["has_cross_traffic"] for row in measured):
        return _alone(measured)
    if len(measured) == 1:
        return f"{_one_slowdown(measured[0])}; {_one_congestion(measured[0]['congestion'])}."
    return f"{_slowdowns(measured)}; {_congestions(measured)}."


def _alone(rows: Sequence[Row]) -> str:
    least, most = (pick(rows, key=lambda row: row["no_load_s"]) for pick in (min, max))
    if least is most:
        return f"An iteration of {least['name']} takes {least['no_load_s']:.3f} s without cross traffic."
    ends = [f"{row['no_load_s']:.3f} s ({row['name']})" for row in (least, most)]
    return f"Without cross traffic an iteration takes {' to '.join(ends)}."


def _one_slowdown(row: Row) -> str:
    heavy, iterations = row["slowdowns"][-1], f"iterations of {row['title']}"
    over = model_label("", *(row[name] for name in VARIANTS))
    kind = f"cross traffic ({title_of(row['traffic'])})"
    if heavy["slowdown"] is None:
        about = f"{heavy['share'] * 100:.0f} % load"
        return f"The slowdown of {row['title']}{over} under {kind} at {about} is not known, because {heavy['why']}"
    at, by = f"at {_percent(heavy['load_share'])} load", _percent(abs(heavy["slowdown"]))
    interval = heavy["interval"]
    if interval is not None and interval[0] <= 0 <= interval[1]:
        measured = f"{_percent(heavy['slowdown'])}, {_between(interval)}"
        return f"C{kind[1:]} does not measurably slow {iterations}{over} {at} ({measured})"
    return f"C{kind[1:]} {'slows' if heavy['slowdown'] >= 0 else 'shortens'} {iterations}{over} by {by} {at}"


def _one_congestion(found: Row) -> str:
    if found["share"] is None:
        return f"no congestion point was found, because {found['why']}"
    interval = found["interval_share"]
    return f"congestion begins at {_percent(found['share'])}" + (
        " (without an interval)" if interval is None else f" ({_between(interval)})"
    )


def _slowdowns(rows: Sequence[Row]) -> str:
    known = [row for row in rows if row["slowdowns"][-1]["slowdown"] is not None]
    about = f"{HEAVY_SHARE * 100:.0f} % load"
    if not known:
        return f"The slowdown at {about} is not known, because {rows[0]['slowdowns'][-1]['why']}"
    least, most = (pick(known, key=_heavy) for pick in (min, max))
    ends = [f"{_percent(_heavy(row))} ({row['name']})" for row in (least, most)]
    by = f"by {' to '.join(ends)}" if len(known) > 1 else f"of {most['name']} by {_percent(_heavy(most))}"
    verb = "slows" if _heavy(least) >= 0 else "changes"
    some = "" if len(known) == len(rows) else f"; for {len(rows) - len(known)} of {len(rows)} series this is not known"
    return f"Cross traffic at about {about} {verb} iterations {by}{some}"


def _congestions(rows: Sequence[Row]) -> str:
    shares = sorted(row["congestion"]["share"] for row in rows if row["congestion"]["share"] is not None)
    if not shares:
        return f"no congestion point was found in any of {counted(len(rows), 'series', 'series')}"
    low, high = _whole(shares[0]), _whole(shares[-1])
    where = f"{low} %" if low == high else f"{low} to {high} %"
    which = "" if len(shares) == len(rows) else f" in {len(shares)} of {len(rows)} series"
    return f"congestion begins at {where} of the capacity{which}"


def _heavy(row: Row) -> float:
    return float(row["slowdowns"][-1]["slowdown"])


def _percent(share: float) -> str:
    return f"{_whole(share)} %"


def _between(interval: Sequence[float]) -> str:
    return f"{LEVEL * 100:.0f} % interval {_whole(interval[0])} to {_whole(interval[1])} %"


def _whole(share: float) -> str:
    """Per cent without decimals; below 1 %, with one decimal."""
    percent = share * 100
    return f"{round(percent, 0 if abs(percent) >= 1 else 1) + 0.0:g}".replace("-", "−")
