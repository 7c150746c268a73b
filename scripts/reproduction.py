"""Print the tables of docs/notes/reproduction-tables.md, or every point, from the data of reports.

python scripts/reproduction.py runs/reproduce/report/report.json runs/reproduce-a/report/report.json > tables.md
python scripts/reproduction.py --points runs/reproduce/report/report.json runs/reproduce-a/report/report.json
"""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 3


def main() -> int:
    """Print the tables, or every point."""
    paths = sys.argv[1:]
    has_points = paths[:1] == ["--points"]
    if not paths[has_points:]:
        print(f"usage: {Path(sys.argv[0]).name} [--points] REPORT.json...", file=sys.stderr)
        return 2
    reports = []
    for path in paths[has_points:]:
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            schema = data["schema"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{path} is not the report.json of a report: {error}", file=sys.stderr)
            return 2
        if schema != SCHEMA:
            print(f"{path} has schema {schema}, not {SCHEMA}: make the report anew", file=sys.stderr)
            return 2
        reports.append(data)
    if has_points:
        csv.writer(sys.stdout, lineterminator="\n").writerows(points(all_series(reports)))
    else:
        print("\n".join(tables(reports)))
    return 0


def all_series(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the series, each with the configuration of its report."""
    series = []
    for data in reports:
        configuration = data["run"]["plan"]["topology"].get("configuration", "")
        series += [one | {"configuration": configuration} for one in data["series"]]
    return series


def tables(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of all tables, in which series are named with the configuration of their report."""
    series = all_series(reports)
    yield from no_load(series)
    yield from congestion(series)
    yield from fits(series)
    yield from published_fits(series)
    yield from most_congested(series)
    yield from spread_and_growth(series)
    yield from kind_order([item for data in reports for item in data["kind_order"]])
    yield from compared([pair for data in reports for pair in data["comparisons"]])
    yield from packets([item for data in reports for item in data["packets"]])


def no_load(series: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of times without cross traffic."""
    yield from head("Times without cross traffic (Table 3.1)", "series", "here, s", "thesis, s")
    alike: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
    for one in series:
        model = ", ".join(part for part in (one["title"], one["transport"], one["configuration"]) if part)
        alike.setdefault((model, one["thesis"]["no_load_s"]), []).append(one)
    for (model, there), ones in alike.items():
        kinds = ", ".join(one["traffic"] for one in ones)
        yield row(f"{model}: {kinds}", ", ".join(num(one["no_load_s"], ".3f") for one in ones), num(there, ".2f"))


def congestion(series: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of congestion points."""
    yield from head(
        "Congestion points (iperf: Table 3.2, consistent: 3.4, burst: 3.6)", "series", "BW*, Gbit/s", "t*, s",
        "volume, MB", "× demand",
        "on the fitted curve, Gbit/s (95 %)", "thesis: BW*, t*", "thesis: volume, MB", "thesis: × demand",
    )  # fmt: skip
    for one in series:
        point, there = one["congestion_point"], one["thesis"]["congestion"]
        here = ["none", "", "", ""] if point is None else [
            num(point["bandwidth_gbps"], ".1f"), num(point["iteration_s"], ".3f"), num(point["data_mb"], ".0f"),
            num(one["congestion_over_demand"], ".2f"),
        ]  # fmt: skip
        place = one["curve_point"]
        here.append("none" if place is None else
                    f"{place['bandwidth_gbps']:.1f} ({place['low_gbps']:.1f} to {place['high_gbps']:.1f})")  # fmt: skip
        if there is None:
            yield row(name(one), *here, "–", "–", "–")
            continue
        at = [num(there["bandwidth_gbps"], ".1f"), num(there["iteration_s"], ".2f")]
        yield row(name(one), *here, ", ".join(text for text in at if text != "–") or "–", num(there["data_mb"], ".1f"),
                  num(there["over_demand"], ".2f"))  # fmt: skip
    reasons = [f"{name(one)}: {one['congestion_reason']}" for one in series if one["congestion_point"] is None]
    if reasons:
        yield from ("", "No congestion point: " + "; ".join(reasons) + ".")


def fits(series: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of fits of equation 3.7: R² for every exponent, and the parameters of the chosen one."""
    exponents = ("n = 1/2", "n = 1", "n = 2", "n free")
    yield from head(
        "Fits of t = A·exp(B/(C−BW)ⁿ), in log space", "series", "R² log, n = 1/2", "n = 1", "n = 2", "free n",
        "chosen n", "A", "B",
    )  # fmt: skip
    for one in series:
        fit = one["fit"]
        if fit is None:
            yield row(name(one), *["–"] * len(exponents), one["fit_reason"], "–", "–")
            continue
        candidates = {candidate["model"]: candidate for candidate in fit["candidates"]}
        chosen, ends = candidates[fit["model"]], fit.get("intervals") or {}
        n = with_interval(chosen["n"], ends.get("n"), ".2f") if fit["model"] == "n free" else fit["model"].split()[-1]
        yield row(
            name(one), *(num((candidates.get(model) or {}).get("r2_log"), ".4f") for model in exponents), n,
            *(num(chosen[key], ".4g") for key in ("A", "B")),
        )  # fmt: skip


def published_fits(series: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of how far the fits of the thesis are off the measured times."""
    known = [(one, fit) for one in series for fit in one["thesis"]["fits"]]
    if not known:
        return
    yield from head(
        "The thesis's fits beside the points (equation 3.3, Tables 3.9 and 3.10)", "series", "fit: A, B, n",
        "training over",
        "off without load", "off, median",
    )  # fmt: skip
    for one, fit in known:
        off = []
        for point in one["points"]:
            if point["cross_gbps"] is not None and point["mean_s"]:
                fitted_s = fit["A"] * math.exp(fit["B"] / (25 - point["cross_gbps"]) ** fit["n"])
                off.append((point["cross_gbps"], fitted_s / point["mean_s"] - 1))
        middle = statistics.median(abs(share_off) for _, share_off in off)
        yield row(
            name(one), f"{fit['source']}: {fit['A']:g}, {fit['B']:g}, {fit['n']:g}", fit["transport"],
            share(min(off)[1], "+.0f"), share(middle, ".0f"),
        )  # fmt: skip


def most_congested(series: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of most congested points and spare bandwidth."""
    yield from head(
        "Most congested point and spare bandwidth (Tables 3.3, 3.5, 3.7, 3.8)", "series", "BW, Gbit/s", "t, s",
        "experimental C−BW", "not used", "thesis: not used", "mean over saturated points, Gbit/s",
        "thesis",
    )  # fmt: skip
    for one in series:
        worst, there = one["most_congested"], one["thesis"]["most_congested"]
        if worst is None:
            continue
        mean = num(one["mean_difference_gbps"], ".2f")
        if one["mean_difference_gbps"] is not None:
            mean += f" ({one['saturated_points']})"
        yield row(
            name(one), num(worst["bandwidth_gbps"], ".1f"), num(worst["iteration_s"], ".3f"),
            num(worst["experimental_gbps"], ".2f"),
            share(worst["difference_share"], ".0f"), share(None if there is None else there["difference_share"], ".0f"),
            mean,
            num(one["thesis"]["mean_difference_gbps"], ".2f"),
        )  # fmt: skip


def spread_and_growth(series: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of spread at a light and a heavy load, p99 over mean, and growth."""
    yield from head(
        "Spread and growth (sections 3.3 and 3.4)", "series", "spread at 30 %, %",
        "spread at 80 %, %", "p99 over mean, all points", "growth at 80 %", "95 % interval",
    )  # fmt: skip
    for one in series:
        tails = one["tails"]
        light, heavy = ((tails[load] or {}).get("spread") for load in ("light", "heavy"))
        yield row(
            name(one), percent(light, ".1f"), percent(heavy, ".1f"), num(tails["p99_over_mean"], ".2f"),
            num(tails["growth"], ".1f"), interval(tails["growth_interval"], ".2f"),
        )  # fmt: skip


def kind_order(items: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of kinds of traffic in order of how much they slow a model at the same load."""
    yield from head("Order of the kinds of traffic at the same load (section 3.4.2), s", "model", "load", "order")
    for item in items:
        here = ""
        for number, kind in enumerate(item["kinds"]):
            if kind["mean_s"] is None:
                here += f"; {kind['traffic']} not measured on both sides" if here else f"{kind['traffic']} not measured"
                continue
            here += "" if not number else " < " if item["firm"][number - 1] else " ≲ "
            here += f"{kind['traffic']} {kind['mean_s']:.3f} ({interval(kind['interval_s'], '.3f')})"
        yield row(item["title"], share(item["share"], ".0f"), here)


def compared(pairs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table that compares kinds of web-search traffic: a row for each model and load."""
    pairs = [pair for pair in pairs if "iperf" not in pair["names"]]
    if not pairs:
        return
    names = list(dict.fromkeys(tuple(pair["names"]) for pair in pairs))
    yield from head(
        "Kinds of web-search traffic compared",
        "model",
        "load",
        *(f"{second} against {first}" for first, second in names),
    )
    found: dict[tuple[str, float], dict[tuple[str, ...], str]] = {}
    for pair in pairs:
        p = min((test["p_holm"] for test in pair["tests"] if test["p_holm"] is not None), default=None)
        values = (estimate(pair["median_ratio"]), num(pair["p99_ratio"]["value"], ".2f"), num(p, ".2g"))
        found.setdefault((pair["title"], pair["share"]), {})[tuple(pair["names"])] = "; ".join(values)
    for (title, load), cells in found.items():
        yield row(title, share(load, ".0f"), *(cells.get(each, "–") for each in names))


def packets(items: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of sending rates of both training flows, and of how far traffic backs off."""
    if not items:
        return
    yield from head(
        "Packets at a light and a heavy load (Table 3.11, figures 3-10, 3-11)", "series", "DL only, Gbit/s",
        "DL shared, Gbit/s", "training backs off by, %",
        "cross traffic backs off by, %",
    )  # fmt: skip
    for item in items:
        backs_off = [item[f"{who}_backoff"] for who in ("training", "cross")]
        yield row(
            item["label"], num(item["alone_gbps"], ".2f"), num(item["shared_gbps"], ".2f"),
            *(percent(None if ratio is None else ratio["value"], ".0f") for ratio in backs_off),
        )  # fmt: skip


def points(series: Sequence[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table of every point of each series, with the columns that ``ringtap fit`` reads."""
    yield "series", "bandwidth_gbps", "iteration_s", "p99_s", "std_s", "count"
    for one in series:
        for point in one["points"]:
            mean_s, spread = point["mean_s"], point["variation"]
            std_s = None if spread is None or mean_s is None else spread * mean_s
            cells = (point["cross_gbps"], ".2f"), *((value, ".4f") for value in (mean_s, point["p99_s"], std_s))
            texts = ("" if value is None else format(value, form) for value, form in cells)
            yield name(one), *texts, point["iterations"]


def head(title: str, *columns: str) -> Iterator[str]:
    """Yield a heading and the header of its table."""
    yield from ("", f"## {title}", "", row(*columns), "|" + "---|" * len(columns))


def row(*cells: str) -> str:
    """Return one line of a table, with vertical bars in cells escaped."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def name(one: dict[str, Any]) -> str:
    """Return the name of a series on the page."""
    return ", ".join(part for part in (one["title"], one["traffic"], one["transport"], one["configuration"]) if part)


def num(value: float | None, form: str) -> str:
    """Return a number as text, or a dash for None."""
    return "–" if value is None else format(value, form)


def share(value: float | None, form: str) -> str:
    """Return a share in per cent as text, or a dash for None."""
    return "–" if value is None else f"{percent(value, form)} %"


def percent(value: float | None, form: str) -> str:
    """Return a share as a number of per cent without its sign, or a dash for None."""
    return "–" if value is None else f"{100 * value:{form}}"


def interval(ends: Sequence[float | None] | None, form: str) -> str:
    """Return an interval as text: both ends, the known one, or a dash."""
    low, high = ends or (None, None)
    if low is None or high is None:
        return "–" if low is high else f"at least {low:{form}}" if high is None else f"at most {high:{form}}"
    return f"{low:{form}} to {high:{form}}"


def with_interval(value: float, ends: Sequence[float | None] | None, form: str) -> str:
    """Return a value with its interval, where there is one, as text."""
    return f"{value:{form}}" + (f" ({interval(ends, form)})" if ends else "")


def estimate(item: dict[str, Any]) -> str:
    """Return a value with its interval as text."""
    return f"{item['value']:.2f} ({interval((item['low'], item['high']), '.2f')})"


if __name__ == "__main__":
    sys.exit(main())
