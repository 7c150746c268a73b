"""Draws what a sweep's figures have in common: axes, points with their tails, curves, and the numbers behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ringtap.analysis.plots.figure import Sheet, finite, line_handle
from ringtap.analysis.plots.figures_on_axes import Transform, plain_ticks
from ringtap.analysis.plots.style import Look, joined, title_of
from ringtap.analysis.sweeps.points import Point
from ringtap.analysis.sweeps.series_analysis import Series
from ringtap.core.units import counted


@dataclass(frozen=True)
class Setting:
    """Settings that all figures of a sweep share.

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


def identity(load: Any) -> Any:
    """Return loads unchanged."""
    return load


def name_of(series: Series) -> str:
    """Model, traffic kind and variants as figures name them."""
    return joined(series.title, title_of(series.traffic), series.variant)


def log_times(axes: Axes, low: float, high: float) -> None:
    """Make the time axis logarithmic, with enough ticks even for a short range."""
    axes.set_yscale("log")
    axes.set_ylim(low / 1.25, high * 1.3)
    plain_ticks(axes.yaxis, low, high)
    axes.set_ylabel("iteration time in s")


def load_axis(axes: Axes, setting: Setting) -> None:
    """Set the load axis from 0 to capacity."""
    axes.set_xlim(-0.02 * setting.capacity_gbps, setting.capacity_gbps)
    axes.set_xlabel(setting.load_label)


def points(on: Sheet, axes: Axes, series: Series, look: Look, transform: Transform = identity) -> None:
    """Draw means as markers, each with a bar up to the 99th percentile."""
    loads, times = transform(np.array(series.loads_gbps)), np.array(series.times_s)
    tails = finite([point.p99_s for point in series.used])
    gaps = np.full(len(times), np.nan)
    bars = (np.column_stack(part).ravel() for part in ((loads, loads, gaps), (times, np.fmax(tails, times), gaps)))
    if np.isfinite(tails).any():
        axes.plot(*bars, color=look.colour, linewidth=0.9, zorder=2)  # one path, however many points
        axes.plot(loads, tails, linestyle="none", marker="_", markersize=4.5, color=look.colour, zorder=2)
    on.mark(axes, loads, times, [tooltip(series, point) for point in series.used], zorder=3, **look.marks)


def handle(look: Look, text: str) -> Line2D:
    """Return an entry of a legend for a series."""
    return line_handle(text, linestyle=look.line, linewidth=1.3, **look.marks)


def time_range(series: Sequence[Series]) -> tuple[float, float]:
    """Shortest mean and longest 99th percentile."""
    means = [seconds for one in series for seconds in one.times_s]
    tails = [point.p99_s for one in series for point in one.used if point.p99_s is not None]
    return min(means), max([*means, *tails])


def tooltip(series: Series, point: Point) -> str:
    """Tooltip of a point, one fact per line."""
    lines = [
        name_of(series),
        f"{point.cross_gbps or 0.0:.2f} Gbit/s cross traffic",
        f"mean {point.mean_s or 0.0:.4g} s",
    ]
    if point.p99_s is not None:
        bounds = "" if point.p99_low_s is None else f" ({_bounds(point.p99_low_s, point.p99_high_s)})"
        lines.append(f"p99 {point.p99_s:.4g} s{bounds}")
    if point.samples_per_s is not None:
        lines.append(f"{point.samples_per_s:.4g} samples/s")
    lines.append("iterations not known" if point.iterations is None else counted(point.iterations, "iteration"))
    return "\n".join(lines)


def _bounds(low: float, high: float | None) -> str:
    return f"{low:.4g} to {high:.4g}" if high is not None else f"at least {low:.4g}"


def points_table(series: Sequence[Series]) -> pd.DataFrame:
    """Return a table of the points of several series with their fitted times; missing numbers are empty."""
    rows = []
    for one in series:
        fitted = one.fit.predict(one.loads_gbps) if one.fit is not None else [None] * len(one.used)
        for point, fit_s in zip(one.used, fitted, strict=True):
            rows.append(
                {
                    **one.labels,
                    "bandwidth_gbps": point.cross_gbps,
                    "c_over_c_minus_bw": one.capacity_gbps / (one.capacity_gbps - (point.cross_gbps or 0.0)),
                    "mean_s": point.mean_s,
                    "p99_s": point.p99_s,
                    "p99_low_s": point.p99_low_s,
                    "p99_high_s": point.p99_high_s,
                    "std_s": point.std_s,
                    "iterations": point.iterations,
                    "samples_per_s": point.samples_per_s,
                    "fit_s": fit_s,
                }
            )
    return pd.DataFrame(rows)
