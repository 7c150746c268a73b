"""Draws iteration time against load, like the thesis's figures 3-2 to 3-4, 3-6, 3-7, B-2 and B-3."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ringtap.analysis import published_results
from ringtap.analysis.plots.figure import PANEL, Drawn, Sheet, finite, label, line_handle, sheet
from ringtap.analysis.plots.figures_on_axes import Transform, curve
from ringtap.analysis.plots.style import (
    COLOURS,
    FAINT,
    INK,
    Key,
    Look,
    joined,
    look_of_transport,
    looks,
    model_looks,
    title_of,
    transport_looks,
)
from ringtap.analysis.plots.sweep_figure_parts import (
    Setting,
    handle,
    identity,
    load_axis,
    log_times,
    name_of,
    points,
    points_table,
    time_range,
    tooltip,
)
from ringtap.analysis.plots.sweep_variants import has_many_variants, row_of
from ringtap.analysis.sweeps.series_analysis import Series, grouped

_MAX_IN_ONE_PANEL = 4
_SHARES_ABOVE = (0, 0.4, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)


def iteration_times(series: Sequence[Series], setting: Setting) -> Drawn | None:
    """Draw mean iteration times against measured cross traffic, with bars up to the p99 (figures 3-2 to 3-4 (a)).

    Without a point under cross traffic, many variants have one place on such an axis, and `variant_times` draws them.
    """
    if _has_variants_alone(series):
        return None
    on, groups, look = _panels(series, 0.0)
    for axes, group in zip(on.panels, groups, strict=True):
        _draw(on, axes, group, look)
        log_times(axes, *time_range(series))
        load_axis(axes, setting)
    caption = (
        "Mean iteration time against the cross traffic measured at the bottleneck while the iterations ran. Bars "
        "reach up to the 99th percentile; lines are the chosen fits of t = A·exp(B/(C−BW)ⁿ)."
    )
    if any(one.fit is None for one in series):
        caption += " Points without a fit are joined by thin lines."
    return on.drawn("iteration-times", caption, points_table(series))


def _has_variants_alone(series: Sequence[Series]) -> bool:
    """Return True if each model has many variants, and no point is under cross traffic."""
    return all(map(has_many_variants, grouped(series, "model", "traffic"))) and all(
        len(one.alone) == len(one.used) for one in series
    )


def throughput(series: Sequence[Series], setting: Setting) -> Drawn | None:
    """Draw the samples/s of each model against measured cross traffic; return None if no batch size is known."""
    known = [one for one in series if any(point.samples_per_s is not None for point in one.used)]
    if not known or _has_variants_alone(known):
        return None
    if any(map(has_many_variants, grouped(known, "model", "traffic"))):
        on, groups, look = _panels_by_topology(known, 0.0)
    else:
        look, groups = looks([one.key for one in series]), grouped(known, "model")
        on = sheet(len(groups), 2, PANEL, _kind_handles(known, look))
        for axes, group in zip(on.panels, groups, strict=True):
            axes.set_title(label(group[0].title), loc="left")
    for axes, group in zip(on.panels, groups, strict=True):
        for one in group:
            loads, rates = one.loads_gbps, finite([point.samples_per_s for point in one.used])
            axes.plot(loads, rates, color=look[one.key].colour, linestyle=look[one.key].line, linewidth=1.3, zorder=2)
            texts = [tooltip(one, point) for point in one.used]
            on.mark(axes, loads, rates, texts, zorder=3, **look[one.key].marks)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("samples/s")
        load_axis(axes, setting)
    caption = (
        "Throughput against the cross traffic measured at the bottleneck: the samples of all ranks in an iteration, "
        "over the mean iteration time. Lines join the points."
    )
    return on.drawn("throughput", caption, points_table(known))


def rescaled_times(series: Sequence[Series], setting: Setting) -> Drawn | None:
    """Draw the same against C/(C-BW), where n = 1 is a straight line (equation 3.2; figures 3-2 to 3-4 (b), B-2).

    Without a point under cross traffic, there is no such axis to draw.
    """
    capacity = setting.capacity_gbps
    if all(len(one.alone) == len(one.used) for one in series):
        return None

    def transform(load: Any) -> Any:
        return capacity / (capacity - load)

    on, groups, look = _panels(series, 0.5)
    heaviest = max(max(one.loads_gbps) for one in series)
    end = max(transform(min(heaviest * 1.02 + 0.05, 0.995 * capacity)), 1.01)
    for axes, group in zip(on.panels, groups, strict=True):
        _draw(on, axes, group, look, transform)
        log_times(axes, *time_range(series))
        axes.set_xlim(1 - 0.02 * (end - 1), end + 0.03 * (end - 1))
        axes.set_xticks([1, *(tick for tick in axes.get_xticks() if 1 + 0.05 * (end - 1) < tick <= end)])
        axes.set_xlabel(f"C / (C − BW), C = {capacity:g} Gbit/s")
        top = axes.twiny()
        top.set_xlim(axes.get_xlim())
        top.grid(False)
        marks = [(transform(share * capacity), f"{share * capacity:.4g}") for share in _SHARES_ABOVE]
        spaced = _spaced([mark for mark in marks if mark[0] <= end], 0.13 * (end - 1))
        top.set_xticks([position for position, _ in spaced], [text for _, text in spaced])
        top.set_xlabel(setting.load_label, color=FAINT)
        top.tick_params(colors=FAINT)
        axes.set_title(axes.get_title(loc="left"), loc="left", pad=36)
    caption = (
        "The same against C/(C−BW), 1 without cross traffic: with n = 1 the fit is a straight line, with n = 1/2 it "
        "bends down and with n = 2 up."
    )
    return on.drawn("rescaled", caption, points_table(series))


def traffic_kinds(series: Sequence[Series], setting: Setting) -> Drawn | None:
    """Draw the traffic kinds of each model side by side, with fits and their R² (figures 3-7 and B-3)."""
    groups = [group for group in grouped(series, "model", "variant") if len(group) > 1]
    look = looks([one.key for one in series])
    labels = _kind_handles([one for group in groups for one in group], look)
    titles = [joined(group[0].title, group[0].variant) for group in groups]
    names = [[title_of(one.traffic) for one in group] for group in groups]
    caption = (
        "The kinds of cross traffic side by side for each model, with the chosen fits and their R². Grey is the "
        "thesis's fit, if it gives one; the one over TCP if it gives two and the transport is not known."
    )
    return _side_by_side("traffic-kinds", caption, groups, titles, names, look, labels, setting)


def transport_times(series: Sequence[Series], setting: Setting) -> Drawn | None:
    """Draw the transports and collectives of each model side by side, with fits and their R² (figures 3-6 and B-3)."""
    groups = [group for group in grouped(series, "model", "traffic") if len(group) > 1 and not has_many_variants(group)]
    drawn = [one for group in groups for one in group]
    look = transport_looks([one.key for one in drawn])
    shown = {one.over.strip(): look[one.key] for one in drawn}
    labels = [
        handle(look_of_transport(INK, each.transport), name or "transport not noted") for name, each in shown.items()
    ]
    titles = [joined(group[0].title, title_of(group[0].traffic)) for group in groups]
    names = [[one.variant or "not noted" for one in group] for group in groups]
    caption = (
        "The transports and collectives side by side for each model and kind of cross traffic, with the chosen fits "
        " and their R². Grey is the thesis's fit over the same transport, if it gives one, and otherwise its fit."
    )
    return _side_by_side("transport-times", caption, groups, titles, names, look, labels, setting)


def _side_by_side(
    name: str,
    caption: str,
    groups: list[list[Series]],
    titles: list[str],
    names: list[list[str]],
    look: dict[Key, Look],
    labels: list[Line2D],
    setting: Setting,
) -> Drawn | None:
    """Draw a panel per group of series; return None without groups.

    The thesis's fit of a series is grey. It is drawn if there is one and the capacity is that of the thesis.
    """
    if not groups:
        return None
    published = setting.capacity_gbps == published_results.CAPACITY_GBPS
    drawn = [one for group in groups for one in group]
    if published and any(published_results.fits_for(one.model, one.traffic, one.transport) for one in drawn):
        labels.append(line_handle("the thesis's fit (grey)", color=FAINT, linewidth=0.9))
    on = sheet(len(groups), 2, PANEL, labels)
    for axes, group, title, of_group in zip(on.panels, groups, titles, names, strict=True):
        _compared_panel(on, axes, group, of_group, look, published)
        axes.set_title(label(title), loc="left")
        load_axis(axes, setting)
    return on.drawn(name, caption, points_table(drawn))


def total_load(series: Sequence[Series], setting: Setting) -> Drawn | None:
    """Draw all that left the bottleneck against all that was offered to it; None if no series has both.

    Offered are the requested cross traffic and the rate of training without cross traffic.
    """
    alone = [_mean_gbps(one) for one in series]
    rows = [
        (one, point, point.requested_gbps + training, point.total_gbps)
        for one, training in zip(series, alone, strict=True)
        for point in one.used
        if point.requested_gbps is not None and training is not None and point.total_gbps is not None
    ]
    if not rows or _has_variants_alone(series):
        return None
    capacity = setting.capacity_gbps
    known = [one for one in series if any(one is other for other, *_ in rows)]
    on, groups, look = _panels(known, 0.0)
    most = max(offered for _, _, offered, _ in rows)
    for axes, group in zip(on.panels, groups, strict=True):
        axes.plot([0, capacity, max(most, capacity)], [0, capacity, capacity], color=FAINT, linewidth=0.9, zorder=1)
        for one in group:
            mine = [(point, offered, total) for other, point, offered, total in rows if other is one]
            x, y = [offered for _, offered, _ in mine], [total for _, _, total in mine]
            shown = look[one.key]
            axes.plot(x, y, color=shown.colour, linestyle=shown.line, linewidth=0.6, zorder=2)
            texts = [
                f"{name_of(one)}\n{offered:.2f} Gbit/s offered\n{total:.2f} Gbit/s in total, "
                f"{total / capacity:.0%} of the capacity"
                for _, offered, total in mine
            ]
            on.mark(axes, x, y, texts, zorder=3, **shown.marks)
        axes.set_xlim(0, 1.03 * max(most, capacity))
        axes.set_ylim(0, 1.06 * capacity)
        axes.set_xlabel("offered in Gbit/s" + (", full size" if setting.scale != 1 else ""))
        axes.set_ylabel("total in Gbit/s")
    caption = (
        "All that left the bottleneck, as frames with headers, against all that was offered: the requested cross "
        "traffic, without headers, and the rate of training without cross traffic. Grey is the total of a link that "
        "carries what is offered up to its capacity."
    )
    numbers = [
        one.labels
        | {"requested_gbps": point.requested_gbps, "offered_gbps": offered, "total_gbps": total}
        | {"utilisation": point.utilisation}
        for one, point, offered, total in rows
    ]
    return on.drawn("total-load", caption, pd.DataFrame(numbers))


def _mean_gbps(series: Series) -> float | None:
    """Return the rate of training without cross traffic at the bottleneck."""
    rates = [point.training_gbps for point in series.alone if point.training_gbps is not None]
    return fmean(rates) if rates else None


def _panels(series: Sequence[Series], above: float) -> tuple[Sheet, list[list[Series]], dict[Key, Look]]:
    """Create one panel for few series, else one per traffic kind, as in the thesis, with the models in the legend.

    If a model has many variants, there is a panel per model, traffic kind and topology, with the transports and
    collectives in the legend.
    """
    look = model_looks([one.key for one in series], len(series) <= _MAX_IN_ONE_PANEL)
    if len(series) <= _MAX_IN_ONE_PANEL:
        labels = [handle(look[one.key], name_of(one)) for one in series]
        return sheet(1, 1, PANEL, labels, 2, above), [list(series)], look
    if any(map(has_many_variants, grouped(series, "model", "traffic"))):
        return _panels_by_topology(series, above)
    kinds = grouped(series, "traffic")
    by_title = {(one.title, one.variant): look[one.key] for one in series}
    labels = [handle(shown, joined(*names)) for names, shown in by_title.items()]
    on = sheet(len(kinds), 2, PANEL, labels, 2, above)
    for axes, group in zip(on.panels, kinds, strict=True):
        axes.set_title(label(f"{title_of(group[0].traffic)} cross traffic"), loc="left")
    return on, kinds, look


def _panels_by_topology(series: Sequence[Series], above: float) -> tuple[Sheet, list[list[Series]], dict[Key, Look]]:
    names = list(dict.fromkeys(map(row_of, series)))
    shown = {name: look_of_transport(COLOURS[number % len(COLOURS)], number) for number, name in enumerate(names)}
    has_kinds = len({one.traffic for one in series}) > 1
    titles = [joined(one.title, title_of(one.traffic) if has_kinds else "", one.topology) for one in series]
    panels = list(dict.fromkeys(titles))
    on = sheet(len(panels), 2, PANEL, [handle(one, name) for name, one in shown.items()], 3, above)
    for axes, title in zip(on.panels, panels, strict=True):
        axes.set_title(label(title), loc="left")
    groups = [[one for one, own in zip(series, titles, strict=True) if own == title] for title in panels]
    return on, groups, {one.key: shown[row_of(one)] for one in series}


def _draw(
    on: Sheet, axes: Axes, series: Sequence[Series], look: dict[Key, Look], transform: Transform = identity
) -> None:
    for one in series:
        shown = look[one.key]
        points(on, axes, one, shown, transform)
        if one.fit is not None:
            curve(one.fit, axes, transform, color=shown.colour, linestyle=shown.line, zorder=2)
        else:
            loads = transform(np.array(one.loads_gbps))
            axes.plot(loads, one.times_s, color=shown.colour, linestyle=shown.line, linewidth=0.6, zorder=1)


def _spaced(marks: list[tuple[float, str]], least: float) -> list[tuple[float, str]]:
    """Return marks that are at least ``least`` apart, from the first one on."""
    kept = marks[:1]
    for mark in marks[1:]:
        if mark[0] - kept[-1][0] >= least:
            kept.append(mark)
    return kept


def _kind_handles(series: Sequence[Series], look: dict[Key, Look]) -> list[Line2D]:
    kinds = {(title_of(one.traffic), one.variant): look[one.key] for one in series}
    return [
        handle(Look(INK, shown.marker, shown.line, shown.transport), joined(*names)) for names, shown in kinds.items()
    ]


def _compared_panel(
    on: Sheet, axes: Axes, group: list[Series], names: list[str], look: dict[Key, Look], published: bool
) -> None:
    handles = []
    for one, name in zip(group, names, strict=True):
        shown, text = look[one.key], name
        points(on, axes, one, shown)
        if one.fit is not None:
            curve(one.fit, axes, color=shown.colour, linestyle=shown.line, zorder=2)
            text = f"n = {one.fit.n:.2g}, free" if one.fit.free else one.fit.name
            text += "" if one.fit.r2 is None else f", R² {one.fit.r2:.3f}"
        handles.append(handle(shown, text))
        # if the transport is not known, the first fit is the one over TCP, as on the testbed
        for fit in published_results.fits_for(one.model, one.traffic, one.transport)[:1] if published else ():
            grid = np.linspace(0, 0.96 * published_results.CAPACITY_GBPS, 120)
            times = fit.A * np.exp(fit.B / (published_results.CAPACITY_GBPS - grid) ** fit.n)
            axes.plot(grid, times, color=FAINT, linestyle=shown.line, linewidth=0.9, zorder=1)
    log_times(axes, *time_range(group))
    axes.legend(handles=handles, loc="upper left", handlelength=3)
