"""Figures of a sweep in the manner of the thesis: 3-2 to 3-7, A-1 and B-2."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ringtap.analysis import thesis
from ringtap.analysis.canvas import legend, new_figure, save, styled
from ringtap.analysis.fit import FitResult
from ringtap.analysis.points import Point
from ringtap.analysis.series import Series
from ringtap.analysis.style import FAINT, INK, Look, looks, title_of

LIGHT_SHARE, HEAVY_SHARE = 0.30, 0.80  # the loads that figures 3-5 and B-1 compare
NEAR_SHARE = 0.08  # of capacity: how far from those a measured load may lie


@dataclass(frozen=True)
class Setting:
    """What all figures of a sweep share.

    Attributes:
        capacity_gbps: full-size capacity.
        scale: full-size rate over the rate of the testbed.
    """

    capacity_gbps: float
    scale: float

    @property
    def load_label(self) -> str:
        """Label of the load axis."""
        return "cross traffic in Gbit/s" + (", full size" if self.scale != 1 else "")


def _seconds(value: float, _position: object = None) -> str:
    return f"{value:g}"


def _log_times(axes: Axes, low: float, high: float) -> None:
    """A logarithmic time axis with plain numbers, enough of them even for a short range."""
    axes.set_yscale("log")
    axes.set_ylim(low / 1.25, high * 1.3)
    _plain_ticks(axes.yaxis, low, high)
    axes.set_ylabel("iteration time in s")


def _plain_ticks(axis: Axis, low: float, high: float) -> None:
    subs = (1.0, 2.0, 5.0) if high / low > 4 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(_seconds))
    axis.set_minor_formatter(NullFormatter())


def _scaled_axis(axes: Axes, setting: Setting) -> None:
    """The same loads at the testbed's own rates, along the top."""
    if setting.scale == 1:
        return
    factor = 1000 / setting.scale  # Gbit/s to the testbed's Mbit/s

    def scaled(load: Any) -> Any:
        return load * factor

    def full(load: Any) -> Any:
        return load / factor

    top = axes.secondary_xaxis("top", functions=(scaled, full))
    top.set_xlabel(f"in Mbit/s on the testbed (1:{setting.scale:g})", fontsize=8, color=FAINT)
    top.tick_params(labelsize=8, colors=FAINT)


def _points(axes: Axes, series: Series, look: Look, place: Callable[[Any], Any] = lambda load: load) -> None:
    """Means as markers, with a bar from each up to the 99th percentile."""
    loads, times = place(np.array(series.loads_gbps)), np.array(series.times_s)
    tails = np.array([point.p99_s if point.p99_s is not None else point.mean_s for point in series.used])
    above = np.maximum(tails - times, 0)
    axes.errorbar(
        loads, times, yerr=[np.zeros_like(above), above], fmt=look.marker, color=look.colour, markeredgecolor="white",
        markeredgewidth=0.6, ecolor=look.colour, elinewidth=0.9, capsize=2.2, capthick=0.9, zorder=3,
    )  # fmt: skip


def _curve(axes: Axes, fit: FitResult, look: Look, place: Callable[[Any], Any] = lambda load: load) -> None:
    heaviest = float(fit.bandwidth_gbps[-1])
    grid = np.linspace(0, min(heaviest * 1.02 + 0.05, 0.995 * fit.C_gbps), 300)
    axes.plot(place(grid), fit.predict(grid), color=look.colour, linestyle=look.line, linewidth=1.3, zorder=2)


def _handle(look: Look, label: str, line: bool = True) -> Line2D:
    return Line2D(
        [], [], color=look.colour, marker=look.marker, linestyle=look.line if line else "none", label=label,
        markeredgecolor="white", markeredgewidth=0.6, linewidth=1.3,
    )  # fmt: skip


def _label(series: Series) -> str:
    return f"{series.title}, {title_of(series.traffic)}"


def _time_range(series: Sequence[Series]) -> tuple[float, float]:
    means = [seconds for one in series for seconds in one.times_s]
    tails = [point.p99_s for one in series for point in one.used if point.p99_s is not None]
    return min(means), max([*means, *tails])


def iteration_times(series: Sequence[Series], setting: Setting) -> Figure:
    """Mean iteration time against measured cross traffic, bars up to the p99 (figures 3-2 (a), 3-3 (a), 3-4 (a))."""
    look = looks([(one.model, one.traffic) for one in series])
    figure = new_figure(7.0, 4.9)
    axes = figure.subplots()
    for one in series:
        _points(axes, one, look[one.model, one.traffic])
        if one.fit is not None:
            _curve(axes, one.fit, look[one.model, one.traffic])
    _log_times(axes, *_time_range(series))
    axes.set_xlim(-0.02 * setting.capacity_gbps, setting.capacity_gbps)
    axes.set_xlabel(setting.load_label)
    _scaled_axis(axes, setting)
    legend(figure, [_handle(look[one.model, one.traffic], _label(one)) for one in series])
    return figure


def rescaled_times(series: Sequence[Series], setting: Setting) -> Figure:
    """The same against C/(C-BW), where n = 1 is a straight line (equation 3.2; figures 3-2 (b) to 3-4 (b), B-2)."""
    look = looks([(one.model, one.traffic) for one in series])
    capacity = setting.capacity_gbps

    def place(load: Any) -> Any:
        return capacity / (capacity - load)

    figure = new_figure(7.0, 4.9)
    axes = figure.subplots()
    for one in series:
        _points(axes, one, look[one.model, one.traffic], place)
        if one.fit is not None:
            _curve(axes, one.fit, look[one.model, one.traffic], place)
    _log_times(axes, *_time_range(series))
    heaviest = max(max(one.loads_gbps) for one in series)
    end = place(min(heaviest * 1.02 + 0.05, 0.995 * capacity))
    axes.set_xlim(1 - 0.02 * (end - 1), end + 0.03 * (end - 1))
    axes.set_xticks([1, *(tick for tick in axes.get_xticks() if 1 + 0.05 * (end - 1) < tick <= end)])
    axes.set_xlabel(f"C / (C − BW), C = {capacity:g} Gbit/s")
    top = axes.secondary_xaxis("top")
    shares = [share for share in (0, 0.4, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95) if place(share * capacity) <= end]
    spaced = _spaced([(place(share * capacity), f"{share * capacity:.4g}") for share in shares], 0.06 * (end - 1))
    top.set_xticks([position for position, _ in spaced], [text for _, text in spaced])
    top.set_xlabel(setting.load_label, fontsize=8, color=FAINT)
    top.tick_params(labelsize=8, colors=FAINT)
    legend(figure, [_handle(look[one.model, one.traffic], _label(one)) for one in series])
    return figure


def _spaced(marks: list[tuple[float, str]], least: float) -> list[tuple[float, str]]:
    """Marks at least that far apart, the first kept."""
    kept = marks[:1]
    for mark in marks[1:]:
        if mark[0] - kept[-1][0] >= least:
            kept.append(mark)
    return kept


def congestion_points(series: Sequence[Series], setting: Setting) -> Figure | None:
    """The construction of each congestion point (figure A-1); None where no series has one."""
    found = [one for one in series if one.congestion.point is not None]
    if not found:
        return None
    look = looks([(one.model, one.traffic) for one in series])
    columns = min(len(found), 3 if len(found) > 4 else 2)
    rows = math.ceil(len(found) / columns)
    figure = new_figure(3.6 * columns + (1.4 if columns == 1 else 0), 3.0 * rows + 0.3)
    panels = np.atleast_1d(np.array(figure.subplots(rows, columns, squeeze=False))).ravel()
    for axes, one in zip(panels, found, strict=False):
        _construction(axes, one, look[one.model, one.traffic], setting)
    for axes in panels[len(found) :]:
        axes.remove()
    for number, axes in enumerate(panels[: len(found)]):
        if number % columns == 0:
            axes.set_ylabel("iteration time in s")
        if number + columns >= len(found):
            axes.set_xlabel(setting.load_label)
    handles = [
        Line2D([], [], color=INK, linestyle=(0, (4, 2)), linewidth=1, label="flat line and tangent"),
        Line2D([], [], color=INK, marker="x", linestyle="none", markersize=6, label="where they meet"),
        Line2D(
            [], [], color=INK, marker="o", linestyle="none", markersize=11, fillstyle="none", label="congestion point"
        ),
    ]
    legend(figure, handles, 3)
    return figure


def _construction(axes: Axes, series: Series, look: Look, setting: Setting) -> None:
    point = series.congestion.point
    if point is None:
        return
    loads, times = np.array(point.loads_gbps), np.array(point.times_s)
    # the heaviest points would press the construction to the bottom of the panel
    top = max(float(times[point.tangent.points[-1]]), 2.2 * point.iteration_s) * 1.12
    axes.plot(series.loads_gbps, series.times_s, look.marker, color=look.colour, markersize=4, alpha=0.45, zorder=2)
    axes.plot(loads, times, look.marker, color=look.colour, markeredgecolor="white", markeredgewidth=0.6, zorder=3)
    for line in (point.flat, point.tangent):
        ends = np.array([0.0, setting.capacity_gbps])
        axes.plot(ends, [line.at(float(end)) for end in ends], color=INK, linestyle=(0, (4, 2)), linewidth=1, zorder=1)
    axes.plot([point.meeting_gbps], [point.meeting_s], "x", color=INK, markersize=6, zorder=4)
    at = (point.bandwidth_gbps, point.iteration_s)
    axes.plot([at[0], at[0], -1], [0, at[1], at[1]], color=FAINT, linewidth=0.8, zorder=1)
    axes.plot(*at, "o", color=INK, markersize=11, fillstyle="none", markeredgewidth=1.1, zorder=4)
    axes.set_xlim(-0.03 * setting.capacity_gbps, setting.capacity_gbps)
    axes.set_ylim(0, top)
    axes.set_title(_label(series), loc="left")
    text = f"{at[0]:.1f} Gbit/s, {at[1]:.3f} s\n{point.data_mb:.0f} MB"
    axes.text(0.03, 0.95, text, transform=axes.transAxes, va="top", fontsize=8.5, color=INK)


def nearest_point(series: Series, share: float, capacity_gbps: float) -> Point | None:
    """The point whose measured load is nearest to a share of capacity; None where none is within 8 % of capacity."""
    near = [point for point in series.used if point.cross_gbps is not None and point.iterations > 1]
    if not near:
        return None
    best = min(near, key=lambda point: abs((point.cross_gbps or 0.0) - share * capacity_gbps))
    off = abs((best.cross_gbps or 0.0) - share * capacity_gbps)
    return best if off <= NEAR_SHARE * capacity_gbps else None


def distributions(series: Sequence[Series], setting: Setting) -> Figure | None:
    """Distributions of the iteration time at a light and a heavy load (figures 3-5, B-1); None without such points."""
    look = looks([(one.model, one.traffic) for one in series])
    shares = [
        share
        for share in (LIGHT_SHARE, HEAVY_SHARE)
        if any(nearest_point(one, share, setting.capacity_gbps) for one in series)
    ]
    if not shares:
        return None
    figure = new_figure(3.7 * len(shares) + 0.2, 3.9 + 0.1 * len(series))
    panels = np.atleast_1d(np.array(figure.subplots(1, len(shares), sharey=True)))
    for axes, share in zip(panels, shares, strict=True):
        _distribution_panel(axes, series, look, share, setting)
    panels[0].set_ylabel("share of iterations")
    legend(figure, [_plain(look[one.model, one.traffic], _label(one)) for one in series])
    return figure


def _distribution_panel(
    axes: Axes, series: Sequence[Series], look: dict[tuple[str, str], Look], share: float, setting: Setting
) -> None:
    extremes = []
    for one in series:
        point = nearest_point(one, share, setting.capacity_gbps)
        if point is None:
            continue
        times, shown = np.sort(point.iteration_s), look[one.model, one.traffic]
        heights = np.arange(len(times) + 1) / len(times)
        axes.step(np.concatenate((times[:1], times)), heights, where="post", color=shown.colour, linestyle=shown.line)
        extremes += [float(times[0]), float(times[-1])]
    axes.set_ylim(0, 1.02)
    if share > 0.5:  # only under heavy loads do the times span decades, as in figure 3-5 (b)
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis, min(extremes), max(extremes))
    else:
        axes.set_xlim(0, 1.05 * max(extremes))
    axes.set_xlabel("iteration time in s" + (" (logarithmic)" if share > 0.5 else ""))
    axes.set_title(f"about {share:.0%} cross traffic ({share * setting.capacity_gbps:g} Gbit/s)", loc="left")


def _plain(look: Look, label: str) -> Line2D:
    return Line2D([], [], color=look.colour, linestyle=look.line, label=label)


def traffic_kinds(series: Sequence[Series], setting: Setting, published: bool = True) -> Figure | None:
    """The traffic kinds of each model side by side, with fits and their R² (figures 3-6, 3-7, B-3).

    Args:
        series: the series of the sweep.
        setting: capacity and scale.
        published: draw the thesis's own fit of a series, where it has one, as a thin grey line.

    Returns:
        The figure; None where no model has several kinds.
    """
    look = looks([(one.model, one.traffic) for one in series])
    published = published and setting.capacity_gbps == thesis.CAPACITY_GBPS
    models = list(dict.fromkeys(one.model for one in series))
    groups = [[one for one in series if one.model == name] for name in models]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return None
    columns = min(len(groups), 2)
    rows = math.ceil(len(groups) / columns)
    figure = new_figure(3.9 * columns + (1.6 if columns == 1 else 0), 3.7 * rows + 0.4)
    panels = np.array(figure.subplots(rows, columns, squeeze=False)).ravel()
    for axes, group in zip(panels, groups, strict=False):
        _kinds_panel(axes, group, look, setting, published)
    for axes in panels[len(groups) :]:
        axes.remove()
    kinds = {
        one.traffic: Look(INK, look[one.model, one.traffic].marker, look[one.model, one.traffic].line) for one in series
    }
    handles = [_handle(shown, title_of(kind)) for kind, shown in kinds.items()]
    if published and any((one.model, one.traffic) in thesis.FITS for group in groups for one in group):
        handles.append(Line2D([], [], color=FAINT, linewidth=0.9, label="the thesis's fit (grey)"))
    legend(figure, handles, 4)
    return figure


def _kinds_panel(
    axes: Axes, group: list[Series], look: dict[tuple[str, str], Look], setting: Setting, published: bool
) -> None:
    low, high = _time_range(group)
    handles = []
    for one in group:
        shown = look[one.model, one.traffic]
        _points(axes, one, shown)
        text = title_of(one.traffic)
        if one.fit is not None:
            _curve(axes, one.fit, shown)
            text = (f"n = {one.fit.n:.2g}, free" if one.fit.free else one.fit.name) + (
                "" if one.fit.r2 is None else f", R² {one.fit.r2:.3f}"
            )
        handles.append(_handle(shown, text))
        # the first is over TCP where there is one, as is the testbed's training traffic
        for fit in thesis.FITS.get((one.model, one.traffic), ())[:1] if published else ():
            grid = np.linspace(0, 0.96 * thesis.CAPACITY_GBPS, 200)
            curve = fit.A * np.exp(fit.B / (thesis.CAPACITY_GBPS - grid) ** fit.n)
            axes.plot(grid, curve, color=FAINT, linestyle=shown.line, linewidth=0.9, zorder=1)
    _log_times(axes, low, high)
    axes.set_xlim(-0.02 * setting.capacity_gbps, setting.capacity_gbps)
    axes.set_xlabel(setting.load_label)
    axes.set_title(group[0].title, loc="left")
    axes.legend(handles=handles, loc="upper left", fontsize=8, handlelength=3)


def draw(series: Sequence[Series], setting: Setting, folder: Path) -> dict[str, list[Path]]:
    """Draw every figure that the series allow into a folder; figure name -> its files."""
    drawn = {}
    with styled():
        usable = [one for one in series if one.used]
        makers: dict[str, Callable[..., Figure | None]] = {
            "iteration-times": iteration_times,
            "rescaled": rescaled_times,
            "congestion-points": congestion_points,
            "distributions": distributions,
            "traffic-kinds": traffic_kinds,
        }
        for name, maker in makers.items():
            figure = maker(usable, setting) if usable else None
            if figure is not None:
                drawn[name] = save(figure, folder, name)
    return drawn
