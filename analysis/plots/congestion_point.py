"""Draws where each congestion point lies on the curve through the measured points, like the thesis's figure A-1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ringtap.analysis.plots.figure import PANEL, Drawn, Sheet, label, line_handle, sheet
from ringtap.analysis.plots.style import FAINT, INK, Look, looks
from ringtap.analysis.plots.sweep_figure_parts import Setting, load_axis, name_of, tooltip
from ringtap.analysis.sweeps.series_analysis import Series

_BAND = 0.13
_LOADS = 40  # at which the curve is drawn


def congestion_points(series: Sequence[Series], setting: Setting) -> Drawn | None:
    """Draw each congestion point on the fitted curve (figure A-1); return None if no series has one."""
    found = [one for one in series if one.curve.point is not None]
    if not found:
        return None
    look = looks([one.key for one in series])
    labels = [
        line_handle("fitted curve", color=INK, linewidth=1),
        line_handle(
            "congestion point", color=INK, marker="o", linestyle="none", markersize=11, markerfacecolor="none"
        ),
        line_handle("its 95 % interval", color=INK, linewidth=7, alpha=_BAND),
    ]  # fmt: skip
    many = len(found) > 4
    on = sheet(len(found), 3 if many else 2, PANEL, labels)
    for axes, one in zip(on.panels, found, strict=True):
        _point(on, axes, one, look[one.key], setting)
    caption = (
        "The congestion point of each series on the curve that is fitted to its points, with its 95 % interval: the "
        "load where the flat line and the tangent of the thesis's construction meet, applied to this curve."
    )
    return on.drawn("congestion-points", caption, _table(found))


def _point(on: Sheet, axes: Axes, series: Series, look: Look, setting: Setting) -> None:
    point, curves = series.curve.point, series.curve.curves
    if point is None or curves is None:
        return
    # the heaviest points would compress the rest at the bottom of the panel
    top = 2.8 * point.iteration_s
    shown = [one for one in series.used if (one.mean_s or 0.0) < top]
    on.mark(
        axes, [one.cross_gbps for one in shown], [one.mean_s for one in shown],
        [tooltip(series, one) for one in shown], zorder=3, **look.marks,
    )  # fmt: skip
    loads = np.linspace(0.0, max(series.loads_gbps), _LOADS)
    axes.plot(loads, [curves.time_s(load / setting.capacity_gbps) for load in loads], color=INK, linewidth=1, zorder=2)
    axes.axvspan(point.low_gbps, point.high_gbps, color=INK, alpha=_BAND, linewidth=0, zorder=0)
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
    axes.text(0.03, 0.95, text, transform=axes.transAxes, va="top", color=INK)


def _table(series: Sequence[Series]) -> pd.DataFrame:
    rows = []
    for one in series:
        point, curves = one.curve.point, one.curve.curves
        if point is None or curves is None:
            continue
        about = {"congestion_gbps": point.bandwidth_gbps, "low_gbps": point.low_gbps, "high_gbps": point.high_gbps}
        rows += [
            {
                **one.labels,
                "bandwidth_gbps": load,
                "mean_s": seconds,
                "curve_s": curves.time_s(load / one.capacity_gbps),
            }
            | about
            for load, seconds in zip(one.loads_gbps, one.times_s, strict=True)
        ]
    return pd.DataFrame(rows)
