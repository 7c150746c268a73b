"""Draws a flow plan and its traffic, with their numbers: figures B-4, B-5 and 3-8 of the thesis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from ringtap.analysis.plots.figure import Drawn, legend, new_figure, styled
from ringtap.analysis.plots.style import FAINT
from ringtap.analysis.traffic.delivered import (
    COUNT,
    WIDTH,
    InjectionRates,
    Passed,
    counts,
    histogram_edges,
    moving_average,
)
from ringtap.analysis.traffic.plan_bursts import Flags, Windows
from ringtap.core.flow_plan_table import FlowTable, Integers
from ringtap.core.units import format_duration, format_rate, format_size

_FLOW, _BURST, _PLAN = "#0072B2", "#E69F00", "#D55E00"
RATES_COLOURS, _FILL = (_FLOW, _PLAN, _BURST), 0.28
SOURCES = {"capture": "captured", "nic": "counted by the interface", "log": "by the sender's log"}


def plan_figure(plan: FlowTable, windows: Windows | None, span_ns: tuple[int, int]) -> Drawn:
    """Draw size against start for a part of the plan's flows, with shaded bursts (figure B-4)."""
    first, last = np.searchsorted(plan.start_ns, span_ns)
    starts, sizes = plan.start_ns[first:last], plan.size_bytes[first:last]
    with styled():
        figure = new_figure(7.0, 3.9)
        axes = figure.subplots()
        _shade(axes, windows, span_ns)
        line: dict[str, Any] = {"color": _BURST, "linewidth": 0.7, "markerfacecolor": _FLOW, "markeredgecolor": "white"}
        axes.plot(starts / 1e6, sizes, marker="o", markersize=4, markeredgewidth=0.4, zorder=3, **line)
        if (sizes > 0).all() and len(sizes):
            axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_size(value)))
        axes.set_ylabel("flow size")
        _time_axis(axes, span_ns)
        flows = Line2D([], [], marker="o", markersize=5, label="flows, in their order", **line)
        legend(figure, [flows, *_shade_handle(windows is not None)], 3)
    caption = (
        f"{_name(plan)}: size of each flow in bytes against its start in ms after the launch"
        f"{_burst_words(plan, windows)}. {_part(plan, span_ns)}"
    )
    numbers = {"start_ns": starts, "size_bytes": sizes, "in_burst": _in_burst(windows, starts)}
    return Drawn("plan", caption, figure, pd.DataFrame(numbers))


def trace_figure(
    plan: FlowTable, windows: Windows | None, passed: Passed, span_ns: tuple[int, int], window_ns: float
) -> Drawn:
    """Draw the measured payload rate, a moving average of 18 samples, against the plan (figure B-5)."""
    mean_bps = float(passed.until(np.array([plan.duration_ns]))[0]) * 8e9 / plan.duration_ns
    with styled():
        figure = new_figure(7.0, 3.9)
        numbers, unit = draw_trace(figure.subplots(), plan, windows, passed, span_ns, window_ns, mean_bps)
        mean = f"mean of the whole, {format_rate(mean_bps)}"
        legend(figure, trace_handles(passed.source, mean, has_bursts=windows is not None), 4)
    edges = _plan_edges(windows, span_ns, window_ns)
    parts = "each burst and quiet part" if windows is not None else format_duration((edges[1] - edges[0]) / 1e9)
    caption = (
        f"{_name(plan)}: payload {SOURCES[passed.source]}, in {unit}, as a moving average of {WIDTH} samples of "
        f"together {format_duration(window_ns / 1e9)}, against that of the flows that the plan starts in {parts}, and "
        f"the mean over the whole plan (grey). {_part(plan, span_ns)}"
    )
    return Drawn("trace", caption, figure, numbers)


def draw_trace(
    axes: Axes,
    plan: FlowTable,
    windows: Windows | None,
    passed: Passed,
    span_ns: tuple[int, int],
    window_ns: float,
    mean_bps: float,
) -> tuple[pd.DataFrame, str]:
    """Draw measured payload against the plan into a panel; return the numbers and the unit."""
    middles, rates = moving_average(passed, span_ns, window_ns)
    edges = _plan_edges(windows, span_ns, window_ns)
    planned = plan.planned_bytes(edges) * 8e9 / np.diff(edges)
    unit, size = _unit(max(float(rates.max(initial=0)), float(planned.max(initial=0))))
    _shade(axes, windows, span_ns)
    axes.axhline(mean_bps / size, color=FAINT, linewidth=1.2, zorder=2)
    axes.plot(middles / 1e6, rates / size, color=_FLOW, linewidth=1.1, zorder=3)
    axes.stairs(planned / size, edges / 1e6, color=_PLAN, linewidth=1.3, linestyle=(0, (4, 2)), zorder=4, baseline=None)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"payload in {unit}")
    _time_axis(axes, span_ns)
    at = np.clip(np.searchsorted(edges, middles, "right") - 1, 0, len(planned) - 1)
    return pd.DataFrame({"time_ns": middles, "rate_bps": rates, "planned_bps": planned[at]}), unit


def trace_handles(source: str, mean: str, *, has_bursts: bool) -> list[Artist]:
    """Return the legend of `draw_trace`, with a text for its mean."""
    lines: list[Artist] = [
        Line2D([], [], color=_FLOW, label=SOURCES[source]),
        Line2D([], [], color=_PLAN, linestyle=(0, (4, 2)), label="planned"),
        Line2D([], [], color=FAINT, label=mean),
    ]
    return [*lines, *_shade_handle(has_bursts)]


def rates_figure(samples: list[InjectionRates]) -> Drawn:
    """Draw histograms of instantaneous injection rates, relative to the highest peak, with their means (figure 3-8)."""
    with styled():
        figure = new_figure(7.0, 3.9)
        numbers, unit = draw_rates(figure.subplots(), samples)
        texts = [f"{rates.label}, {SOURCES[rates.source]}, {mean_text(rates)}" for rates in samples]
        legend(figure, [rates_handle(*one) for one in zip(texts, RATES_COLOURS, strict=False)], 1)
    outside = sum(int((rates.values_bps > numbers["to_bps"].iloc[-1]).sum()) for rates in samples)
    window = " and ".join(dict.fromkeys(format_duration(rates.window_ns / 1e9) for rates in samples))
    labels = " and of ".join(rates.label for rates in samples)
    caption = (
        f"Histogram of {COUNT:,} instantaneous injection rates of {labels}: payload in {unit} over {window}, at "
        "instants spread evenly over the transmission. Heights are relative to the highest peak. Dotted lines mark the "
        f"means over all instants. Idle instants are left out, and {outside} are beyond the axis."
    )
    return Drawn("rates", caption, figure, numbers)


def draw_rates(
    axes: Axes, samples: list[InjectionRates], colours: Sequence[str] = RATES_COLOURS
) -> tuple[pd.DataFrame, str]:
    """Draw histograms of rates into a panel; return the numbers and the unit."""
    edges = histogram_edges(samples)
    tables = [counts(rates, edges) for rates in samples]
    highest = max(1, *(int(table.max()) for table in tables))
    unit, size = _unit(float(edges[-1]))
    numbers = pd.DataFrame({"from_bps": edges[:-1], "to_bps": edges[1:]})
    for rates, table, colour in zip(samples, tables, colours, strict=False):
        axes.stairs(table / highest, edges / size, color=colour, fill=True, alpha=_FILL, zorder=2)
        axes.stairs(table / highest, edges / size, color=colour, linewidth=1.2, zorder=3)
        mean = float(rates.values_bps.mean()) / size
        axes.axvline(mean, color=colour, linestyle=(0, (1, 1.4)), linewidth=1.6, zorder=4)
        numbers[f"{rates.label}: samples"] = table
        numbers[f"{rates.label}: height"] = table / highest
    axes.set_xlim(0, edges[-1] / size)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel(f"payload rate in {unit}")
    axes.set_ylabel("samples, relative to the highest peak")
    return numbers, unit


def rates_handle(text: str, colour: str) -> Artist:
    """Return an entry of the legend of `draw_rates`."""
    return Patch(facecolor=to_rgba(colour, _FILL), edgecolor=colour, label=text)


def mean_text(rates: InjectionRates) -> str:
    """Return the mean of rates, and the share of idle instants, as a text."""
    return f"mean {format_rate(float(rates.values_bps.mean()))}, {(rates.values_bps <= 0).mean():.1%} idle"


def _shade(axes: Axes, windows: Windows | None, span_ns: tuple[int, int]) -> None:
    if windows is None:
        return
    for begin, end in zip(windows.edges_ns[:-1][windows.burst], windows.edges_ns[1:][windows.burst], strict=True):
        if begin < span_ns[1] and end > span_ns[0]:
            axes.axvspan(begin / 1e6, end / 1e6, color=_BURST, alpha=0.22, linewidth=0, zorder=1)


def _shade_handle(has_bursts: bool) -> list[Patch]:
    return [Patch(facecolor=_BURST, alpha=0.22, label="burst")] if has_bursts else []


def _time_axis(axes: Axes, span_ns: tuple[int, int]) -> None:
    axes.set_xlim(span_ns[0] / 1e6, span_ns[1] / 1e6)
    axes.set_xlabel("time since the launch in ms")


def _plan_edges(windows: Windows | None, span_ns: tuple[int, int], window_ns: float) -> Integers:
    if windows is not None:
        first, last = np.searchsorted(windows.edges_ns, span_ns)
        return windows.edges_ns[max(0, first - 1) : last + 1]
    step = max(10_000_000, round(window_ns))
    return np.arange(span_ns[0] // step * step, span_ns[1] + step, step, dtype=np.int64)


def _in_burst(windows: Windows | None, times_ns: Integers) -> Flags:
    if windows is None:
        return np.zeros(len(times_ns), bool)
    return windows.burst[np.clip(np.searchsorted(windows.edges_ns, times_ns, "right") - 1, 0, len(windows.burst) - 1)]


def _unit(most_bps: float) -> tuple[str, float]:
    return ("Gbit/s", 1e9) if most_bps >= 1e9 else ("Mbit/s", 1e6)


def _name(plan: FlowTable) -> str:
    return f"Flow plan {plan.path.name} ({plan.kind}, {format_rate(plan.load_bps)} of payload on average)"


def _burst_words(plan: FlowTable, windows: Windows | None) -> str:
    if windows is None:
        return ""
    length, period = (format_duration(plan.header[f"burst_{name}_ns"] / 1e9) for name in ("length", "period"))
    return f"; bursts of {length} every {period} are shaded"


def _part(plan: FlowTable, span_ns: tuple[int, int]) -> str:
    if span_ns == (0, plan.duration_ns):
        return "The whole plan is shown."
    shown, whole = (format_duration(value / 1e9) for value in (span_ns[1] - span_ns[0], plan.duration_ns))
    return f"Shown are {shown} in the middle of {whole}."
