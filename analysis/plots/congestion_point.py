"""Draws the construction of each congestion point, like the thesis's figure A-1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ringtap.analysis.plots.figure import Drawn, Sheet, label, line_handle, sheet
from ringtap.analysis.plots.style import FAINT, INK, Look, looks
from ringtap.analysis.plots.sweep_figure_parts import Setting, load_axis, name_of, tooltip
from ringtap.analysis.sweeps.series_analysis import Series

_DASHES = (0, (4, 2))
_BAND = 0.13


def congestion_points(series: Sequence[Series], setting: Setting) -> Drawn | None:
    """Draw the construction of each congestion point (figure A-1); return None if no series has one."""
    found = [one for one in series if one.congestion.point is not None]
    if not found:
        return None
    look = looks([one.key for one in series])
    labels = [
        line_handle("flat line and tangent", color=INK, linestyle=_DASHES, linewidth=1),
        line_handle("where they meet", color=INK, marker="x", linestyle="none", markersize=6),
        line_handle(
            "congestion point", color=INK, marker="o", linestyle="none", markersize=11, markerfacecolor="none"
        ),
    ]  # fmt: skip
    if any(one.curve.point is not None for one in found):
        labels.append(line_handle("95 % interval on the fitted curve", color=INK, linewidth=7, alpha=_BAND))
    many = len(found) > 4
    on = sheet(len(found), 3 if many else 2, (2.75, 2.2) if many else (3.4, 2.7), labels)
    for axes, one in zip(on.panels, found, strict=True):
        _construction(on, axes, one, look[one.key], setting)
    caption = (
        "How each congestion point was found: a line through the flat region, the tangent to the first points of the "
        "curved region, their meeting, and the measured point whose load is nearest to it. Shaded is the 95 % interval "
        "of the point on the fitted curve, which need not be a measured load."
    )
    return on.drawn("congestion-points", caption, _table(found))


def _construction(on: Sheet, axes: Axes, series: Series, look: Look, setting: Setting) -> None:
    point = series.congestion.point
    if point is None:
        return
    loads, times = np.array(point.loads_gbps), np.array(point.times_s)
    # the heaviest points would compress the construction at the bottom of the panel
    top = max(float(times[point.tangent.points[-1]]), 2.2 * point.iteration_s) * 1.12
    single = [one for one in series.used if (one.mean_s or 0.0) < top]
    shown = times < top
    axes.plot(loads[shown], times[shown], zorder=3, linestyle="none", **look.marks)
    on.mark(
        axes, [one.cross_gbps for one in single], [one.mean_s for one in single],
        [tooltip(series, one) for one in single], marker=look.marker, color=look.colour, markersize=4, alpha=0.45,
        zorder=2,
    )  # fmt: skip
    for line in (point.flat, point.tangent):
        ends = np.array([0.0, setting.capacity_gbps])
        axes.plot(ends, [line.at(float(end)) for end in ends], color=INK, linestyle=_DASHES, linewidth=1, zorder=1)
    axes.plot([point.meeting_gbps], [point.meeting_s], "x", color=INK, markersize=6, zorder=4)
    if series.curve.point is not None:
        axes.axvspan(
            series.curve.point.low_gbps, series.curve.point.high_gbps, color=INK, alpha=_BAND, linewidth=0, zorder=0
        )
    at = (point.bandwidth_gbps, point.iteration_s)
    axes.plot([at[0], at[0], -1], [0, at[1], at[1]], color=FAINT, linewidth=0.8, zorder=1)
    text = f"{at[0]:.1f} Gbit/s, {at[1]:.3f} s\n{point.data_mb:.0f} MB"
    on.mark(
        axes, [at[0]], [at[1]], [f"{name_of(series)}\ncongestion point\n{text}"], marker="o", color=INK, markersize=11,
        markerfacecolor="none", markeredgewidth=1.1, zorder=4,
    )  # fmt: skip
    load_axis(axes, setting)
    axes.set_ylim(0, top)
    axes.set_ylabel("iteration time in s")
    axes.set_title(label(name_of(series)), loc="left")
    axes.text(0.03, 0.95, text, transform=axes.transAxes, va="top", fontsize=8.5, color=INK)


def _table(series: Sequence[Series]) -> pd.DataFrame:
    rows = []
    for one in series:
        point = one.congestion.point
        if point is None:
            continue
        for number, (load, seconds) in enumerate(zip(point.loads_gbps, point.times_s, strict=True)):
            rows.append(
                {
                    **one.labels,
                    "bandwidth_gbps": load,
                    "mean_s": seconds,
                    "on_flat_line": number in point.flat.points,
                    "on_tangent": number in point.tangent.points,
                    "congestion_point": number == point.chosen,
                    "flat_line_s": point.flat.at(load),
                    "tangent_s": point.tangent.at(load),
                    "meeting_gbps": point.meeting_gbps,
                    "meeting_s": point.meeting_s,
                }
            )
    return pd.DataFrame(rows)
