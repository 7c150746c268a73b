"""Draws distributions, spread and growth at light and heavy load (thesis, figures 3-5, B-1; sections 3.3, 3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ringtap.analysis import published_results
from ringtap.analysis.plots.figure import PANEL, Drawn, Sheet, label, line_handle, sheet
from ringtap.analysis.plots.figures_on_axes import plain_ticks
from ringtap.analysis.plots.style import FAINT, INK, Look, joined, look_of_transport, looks, title_of, transport_looks
from ringtap.analysis.plots.sweep_figure_parts import Setting, handle, name_of
from ringtap.analysis.plots.sweep_variants import has_many_variants
from ringtap.analysis.report.load_statistics import LIGHT_SHARE, Loaded, Tails
from ringtap.analysis.sweeps.compare_at_equal_loads import AtLoad, at_load, common_share
from ringtap.analysis.sweeps.series_analysis import Series, grouped
from ringtap.core.units import counted

_STEPS = 200  # a distribution of more iterations is drawn with this many steps, and as many in its longest 2 %
_BAR = "with its 95 % interval as a bar; a bar up to the longest iteration has no upper end."
_MOVED = "The iterations of the nearest measured point are moved along the curve to exactly this load."


def distributions(series: Sequence[Series], setting: Setting) -> Drawn | None:
    """Draw distributions of the iteration time at a light and a heavy load, traffic kinds side by side (figure 3-5)."""
    caption = (
        "Distribution of the single iteration times at a light and at a heavy load, traffic kinds side by side. Marked "
        f"are the median and the 99th percentile, {_BAR} {_MOVED}"
    )
    rows, look = grouped(series, "model", "variant"), looks([one.key for one in series])
    shown = {title_of(one.traffic): Look(INK, look[one.key].marker, look[one.key].line) for one in series}
    titles = [joined(row[0].title, row[0].variant) for row in rows]
    return _grid("distributions", caption, rows, titles, look, shown, setting)


def transports(series: Sequence[Series], setting: Setting) -> Drawn | None:
    """Draw the same with transports, and collectives, side by side (figure B-1, part of 3-5 and 3-6)."""
    caption = (
        "Distribution of the single iteration times at a light and at a heavy load, transports and collectives "
        f"side by side. Marked are the median and the 99th percentile, {_BAR} {_MOVED}"
    )
    rows = grouped(series, "model", "traffic")
    rows = [row for row in rows if len({one.variant for one in row}) > 1 and not has_many_variants(row)]
    look = transport_looks([one.key for row in rows for one in row])
    names = dict.fromkeys(one.variant for row in rows for one in row)
    shown = {name or "not noted": look_of_transport(INK, number) for number, name in enumerate(names)}
    titles = [joined(row[0].title, title_of(row[0].traffic)) for row in rows]
    return _grid("transports", caption, rows, titles, look, shown, setting)


def _grid(
    name: str,
    caption: str,
    rows: list[list[Series]],
    titles: list[str],
    look: dict[tuple[str, str, str], Look],
    shown: dict[str, Look],
    setting: Setting,
) -> Drawn | None:
    """Draw a row of panels per group of series, with a column per load; return None without points near a load."""
    both = LIGHT_SHARE, common_share([one for row in rows for one in row])
    found = {
        (number, share): [(one, loaded) for one in row if (loaded := _with_times(one, share)) is not None]
        for number, row in enumerate(rows)
        for share in both
    }
    shares = [share for share in both if any(found[n, share] for n in range(len(rows)))]
    if not shares:
        return None
    labels = [handle(each, text) for text, each in shown.items()]
    panels = [(number, share) for number in range(len(rows)) for share in shares if found[number, share]]
    on = sheet(len(panels), 2, PANEL, labels)
    parts = []
    for axes, (number, share) in zip(on.panels, panels, strict=True):
        for one, loaded in found[number, share]:
            parts.append(_distribution(on, axes, one, loaded, look[one.key]))
        _axes(axes, [loaded for _, loaded in found[number, share]], share)
        load = share * setting.capacity_gbps
        axes.set_title(label(f"{titles[number]}: {100 * share:.0f} % ({load:.3g} Gbit/s)"), loc="left")
    return on.drawn(name, caption, pd.concat(parts, ignore_index=True))


def _with_times(series: Series, share: float) -> AtLoad | None:
    found = at_load(series, share)
    return found if isinstance(found, AtLoad) and len(found.point.iteration_s) else None


def _distribution(on: Sheet, axes: Axes, series: Series, loaded: AtLoad, look: Look) -> pd.DataFrame:
    point, times = loaded.point, np.sort(loaded.times_s)
    middle = float(np.median(times))
    shares = np.arange(1, len(times) + 1) / len(times)
    if len(times) > _STEPS:
        last = len(times) - 1
        steps = (np.linspace(0, last, _STEPS), np.linspace(0.98 * last, last, _STEPS))
        kept = np.unique(np.concatenate(steps).round().astype(int))
        times, shares = times[kept], shares[kept]
    axes.plot(
        np.concatenate((times[:1], times)), np.concatenate(([0.0], shares)), drawstyle="steps-post", color=look.colour,
        linestyle=look.line, linewidth=1.3, zorder=2,
    )  # fmt: skip
    tail = float(times[-1]) if point.p99_s is None else point.p99_s * loaded.factor
    if (low := loaded.moved(point.p99_low_s, -1)) is not None:
        high = loaded.moved(point.p99_high_s, 1) or times[-1]
        axes.plot([low, high], [0.99, 0.99], color=look.colour, linewidth=3.2, alpha=0.4, zorder=3,
                  solid_capstyle="butt")  # fmt: skip
    load_gbps = loaded.share * series.capacity_gbps
    text = f"{name_of(series)}\n{load_gbps:.2f} Gbit/s cross traffic, measured at {point.cross_gbps or 0.0:.2f}"
    texts = [f"{text}\nmedian {middle:.4g} s", f"{text}\np99 {tail:.4g} s"]
    on.mark(axes, [middle, tail], [0.5, 0.99], texts, markersize=4.5, zorder=4, **look.marks)
    rows = pd.DataFrame({"iteration_s": times, "share_at_or_below": shares})
    about: dict[str, Any] = {**series.labels, "bandwidth_gbps": load_gbps, "measured_gbps": point.cross_gbps}
    for index, (column, value) in enumerate(about.items()):
        rows.insert(index, column, value)
    return rows


def _axes(axes: Axes, loaded: Sequence[AtLoad], share: float) -> None:
    shortest = min(float(one.times_s.min()) for one in loaded)
    longest = max(float(one.times_s.max()) for one in loaded)
    axes.set_ylim(0, 1.03)
    axes.set_ylabel("share of iterations")
    if share > 0.5 and longest > 3 * shortest:  # only heavy loads span decades, as in figure 3-5 (b)
        axes.set_xscale("log")
        plain_ticks(axes.xaxis, shortest, longest)
    axes.set_xlabel("iteration time in s" + (" (logarithmic)" if axes.get_xscale() == "log" else ""))


def spread_and_growth(series: Sequence[Series], found: Sequence[Tails], setting: Setting) -> Drawn | None:
    """Draw the spread of iteration times at light and heavy load, and their growth from no load to heavy load."""
    kept = [(one, tail, tail.heavy) for one, tail in zip(series, found, strict=True) if tail.heavy is not None]
    if not kept:
        return None
    heavy = f"{100 * kept[0][2].share:.0f} %"
    labels = [
        line_handle(
            f"at {100 * LIGHT_SHARE:.0f} % of C", color=INK, marker="o", linestyle="none", markerfacecolor="white"
        ),
        line_handle(f"at {heavy} of C", color=INK, marker="o", linestyle="none"),
        line_handle("95 % interval", color=INK, linewidth=1.6),
        line_handle("thesis", color=FAINT, marker="x", linestyle="none"),
    ]
    on = sheet(2, 2, (1.9, 0.3 + 0.26 * len(kept)), labels, left=1.67)
    look = looks([one.key for one in series])
    for number, (one, tail, loaded) in enumerate(kept):
        _spread_row(on, on.panels[0], number, one, tail, look[one.key])
        _growth_row(on, on.panels[1], number, one, tail, loaded, look[one.key])
    _spread_axis(on.panels[0], [tail for _, tail, _ in kept])
    for axes in on.panels:
        axes.set_ylim(len(kept) - 0.4, -0.6)
        axes.set_yticks(range(len(kept)), [label(_short(one)) for one, _, _ in kept])
    on.panels[0].set_title("spread of iteration times", loc="left")
    on.panels[0].set_xlabel("deviation, % of mean")
    on.panels[1].set_title(f"growth at {heavy} load", loc="left")
    on.panels[1].set_xlabel("× time without load")
    loads = f"{100 * LIGHT_SHARE:.0f} % and {heavy} of the capacity of {setting.capacity_gbps:g} Gbit/s"
    caption = (
        f"Left: standard deviation of the iteration times over their mean at {loads}, between the points measured "
        "next to each. Right: how many times as long an iteration takes at the heavy load as without cross traffic, "
        "with the 95 % interval of the ratio of the means."
    )
    return on.drawn("spread-and-growth", caption, _table([(one, tail) for one, tail, _ in kept]))


def _short(series: Series) -> str:
    text = joined(series.title, series.traffic, series.variant)
    return text if len(text) <= 21 else text[:20] + "…"


def _spread_axis(axes: Axes, found: Sequence[Tails]) -> None:
    spreads = [
        100 * loaded.spread
        for tail in found
        for loaded in (tail.light, tail.heavy)
        if loaded is not None and loaded.spread
    ]
    if spreads:
        axes.set_xscale("log")
        low, high = min(spreads) / 1.6, max(spreads) * 1.6
        axes.set_xlim(low, high)
        steps = (1, 2, 5) if max(spreads) < 50 * min(spreads) else (1,)
        ticks = [step * 10.0**power for power in range(-3, 4) for step in steps]
        axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())


def _spread_row(on: Sheet, axes: Axes, number: int, series: Series, found: Tails, look: Look) -> None:
    loads = [loaded for loaded in (found.light, found.heavy) if loaded is not None and loaded.spread]
    if not loads:
        return
    at = [100 * (loaded.spread or 0.0) for loaded in loads]
    axes.plot(at, [number] * len(at), color=look.colour, linewidth=1.0, zorder=2)
    for loaded, value in zip(loads, at, strict=True):
        text = f"{name_of(series)}\n{loaded.bandwidth_gbps:.2f} Gbit/s cross traffic\nspread {value:.2g} %"
        if loaded.iterations is not None:
            text += f"\n{counted(loaded.iterations, 'iteration')}"
        face = "white" if loaded is found.light else look.colour
        on.mark(axes, [value], [number], [text], marker="o", color=look.colour, markerfacecolor=face, zorder=3)


def _growth_row(on: Sheet, axes: Axes, number: int, series: Series, found: Tails, heavy: Loaded, look: Look) -> None:
    published = (
        published_results.GROWTH_AT_HEAVY.get(series.model) if series.traffic in ("consistent", "burst") else None
    )
    if published is not None:
        axes.plot([published], [number], marker="x", color=FAINT, zorder=1)
    if found.growth is None:
        return
    text = f"{name_of(series)}\n{heavy.bandwidth_gbps:.2f} Gbit/s cross traffic\n{found.growth:.3g} times as long"
    if found.growth_interval is not None:
        low, high = found.growth_interval
        axes.plot([low, high], [number, number], color=look.colour, linewidth=1.6, zorder=2)
        text += f" ({low:.3g} to {high:.3g})"
    on.mark(axes, [found.growth], [number], [text], marker="o", color=look.colour, markersize=4.5, zorder=3)


def _table(kept: Sequence[tuple[Series, Tails]]) -> pd.DataFrame:
    rows = []
    for one, tail in kept:
        low, high = tail.growth_interval or (None, None)
        row: dict[str, Any] = {**one.labels}
        for name, loaded in (("light", tail.light), ("heavy", tail.heavy)):
            for key in ("bandwidth_gbps", "mean_s", "p99_s", "spread"):
                row[f"{name}_{key}"] = getattr(loaded, key, None)
        rows.append(row | {"growth": tail.growth, "growth_low": low, "growth_high": high})
    return pd.DataFrame(rows)
