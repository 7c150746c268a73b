"""Reports the packets that a sweep recorded: figures 3-8, 3-10, 3-11 and B-5 of the thesis, and sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ringtap.analysis import published_results
from ringtap.analysis.plots.figure import Drawn, line_handle, sheet
from ringtap.analysis.plots.style import INK, joined, plain, title_of
from ringtap.analysis.structure.flow_roles_and_rates import CROSSING
from ringtap.analysis.structure.plots import ROLE_COLOURS
from ringtap.analysis.sweeps.captured_flow_rates import BIN_NS, MAX_DIFFERENCE, CapturedPoint
from ringtap.analysis.traffic.delivered import (
    COUNT,
    WIDTH,
    InjectionRates,
    Passed,
    instantaneous,
    shown_span_ns,
    window_ns,
)
from ringtap.analysis.traffic.flow_logs import read_sent
from ringtap.analysis.traffic.plan_bursts import burst_windows
from ringtap.analysis.traffic.plots import (
    RATES_COLOURS,
    draw_rates,
    draw_trace,
    mean_text,
    rates_handle,
    trace_handles,
)
from ringtap.core.flow_plan_table import FlowTable, read_plan
from ringtap.core.run_directory_schema import VARIANTS
from ringtap.core.units import format_duration, format_size

_PANEL = (2.95, 2.2)
_LEGEND: dict[str, Any] = {"frameon": True, "framealpha": 0.85, "edgecolor": "none"}
_SHOWN_ITERATIONS = 3
_INSTANT_NS = 1_000_000.0  # over which an instantaneous rate is averaged: a burst of the thesis
_NEAR_LOAD = 0.05  # largest distance of a published load from the point's, as a share of the capacity


def _model(captured: CapturedPoint) -> str:
    return plain(joined(captured.title, *(getattr(captured.point, name) for name in VARIANTS)))


def _name(captured: CapturedPoint) -> str:
    return f"{_model(captured)}, {title_of(captured.point.traffic)}, {captured.load * 100:.0f} %"


def histogram(points: Sequence[CapturedPoint]) -> Drawn | None:
    """Draw the instantaneous injection rates of cross traffic, one panel per model and load (figure 3-8)."""
    groups: dict[tuple[str, float], list[InjectionRates]] = {}
    for captured in points:
        flow = captured.flow(CROSSING)
        if flow is not None:
            passed = Passed.of_bins(flow.payload, BIN_NS, scale=captured.scale)
            rates = instantaneous(title_of(captured.point.traffic), passed, int(passed.at_ns[-1]), _INSTANT_NS)
            groups.setdefault((_model(captured), captured.load), []).append(rates)
    if not groups:
        return None
    kinds = dict.fromkeys(rates.label for samples in groups.values() for rates in samples)
    colours = dict(zip(kinds, RATES_COLOURS, strict=False))
    on = sheet(len(groups), 2, _PANEL, [rates_handle(*one) for one in colours.items()])
    tables = []
    for axes, ((model, load), samples) in zip(on.panels, groups.items(), strict=True):
        own = [colours[rates.label] for rates in samples]
        numbers, _unit = draw_rates(axes, samples, own)
        means = [rates_handle(mean_text(rates), colour) for rates, colour in zip(samples, own, strict=True)]
        axes.legend(handles=means, loc="upper right", **_LEGEND)
        axes.set_ylim(0, 1.05 + 0.13 * len(means))  # room for the legend
        axes.set_yticks((0, 0.25, 0.5, 0.75, 1))
        axes.set_title(f"{model}, {load * 100:.0f} %", loc="left")
        tables.append(numbers.assign(model=model, load=load))
    caption = (
        f"Histogram of {COUNT:,} instantaneous injection rates of the cross traffic at its sender, at full size, each "
        f"over {format_duration(_INSTANT_NS / 1e9)}, by requested load. Heights are relative to the highest peak of "
        "the panel; dotted lines mark the means over all instants; idle instants are left out."
    )
    return on.drawn("packets-histogram", caption, pd.concat(tables, ignore_index=True))


def flows(points: Sequence[CapturedPoint]) -> Drawn | None:
    """Draw the injection rates of the three flows over some iterations, one panel per point (figures 3-10, 3-11)."""
    shown = [captured for captured in points if captured.flows]
    if not shown:
        return None
    look: dict[str, Any] = {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 0.9}
    labels = [line_handle(role, color=colour) for role, colour in ROLE_COLOURS.items()]
    on = sheet(len(shown), 2, _PANEL, [*labels, line_handle("an iteration ends", **look)], 4)
    tables = []
    for axes, captured in zip(on.panels, shown, strict=True):
        edges = captured.edges_ns
        first = max(0, (len(edges) - 1 - _SHOWN_ITERATIONS) // 2)
        ends_ns = edges[first : first + _SHOWN_ITERATIONS + 1]
        begin, end = (int(at - captured.start_ns) // BIN_NS for at in (ends_ns[0], ends_ns[-1]))
        at_ms = (np.arange(begin, end) - begin) * (BIN_NS / 1e6)
        table = pd.DataFrame({"series": captured.point.series, "load": captured.load, "time_ms": at_ms})
        for flow in captured.flows:
            gbps = captured.smoothed_bps(flow)[begin:end] * captured.scale / 1e9
            axes.plot(
                at_ms, gbps, color=ROLE_COLOURS[flow.role], linewidth=0.8, zorder=2 if flow.role == CROSSING else 3
            )
            table[f"{flow.role}: rate_gbps"] = gbps
        for at_ns in ends_ns:
            axes.axvline((at_ns - ends_ns[0]) / 1e6, zorder=4, **look)
        axes.set_xlim(at_ms[0], at_ms[-1])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("time in ms")
        axes.set_ylabel("payload in Gbit/s")
        axes.set_title(_name(captured), loc="left")
        tables.append(table)
    widths = " or ".join(str(width) for width in sorted({captured.samples for captured in shown}))
    caption = (
        "Injection rate of a training flow that shares nothing with the cross traffic, of the training flow beside it, "
        f"and of the cross traffic, at full size and by requested load, as a moving average of {widths} samples of "
        f"{format_duration(BIN_NS / 1e9)}. Dashed lines mark the ends of iterations by the step logs of all ranks."
    )
    return on.drawn("packets-flows", caption, pd.concat(tables, ignore_index=True))


def traces(points: Sequence[CapturedPoint]) -> Drawn | None:
    """Draw the captured cross traffic against its flow plan, one panel per point with a plan (figure B-5)."""
    planned = [one for one in points if one.flow_plan is not None and one.flow(CROSSING) is not None]
    if not planned:
        return None
    plans = [read_plan(captured.flow_plan) for captured in planned if captured.flow_plan is not None]
    has_bursts = any(burst_windows(plan) is not None for plan in plans)
    labels = trace_handles("capture", "mean", has_bursts=has_bursts)
    on = sheet(len(planned), 2, _PANEL, labels, len(labels))
    tables = [_trace(*one) for one in zip(on.panels, planned, plans, strict=True)]
    caption = (
        f"Payload of the cross traffic at its sender, captured and at full size, as a moving average of {WIDTH} "
        "samples of together a burst's length or 1 ms, against that of the flows that the plan starts in each burst "
        "and quiet part or in 10 ms, and the mean over all captured time (grey), by requested load."
    )
    return on.drawn("packets-trace", caption, pd.concat(tables, ignore_index=True))


def _trace(axes: Axes, captured: CapturedPoint, plan: FlowTable) -> pd.DataFrame:
    flow, path = captured.flow(CROSSING), captured.flow_plan
    assert flow is not None and path is not None
    plan = replace(plan, size_bytes=np.rint(plan.size_bytes * captured.scale).astype(np.int64))
    windows, sent = burst_windows(plan), read_sent([path.with_suffix(".rec")])
    passed = Passed.of_bins(flow.payload, BIN_NS, captured.start_ns - sent.origin_ns, captured.scale)
    window = window_ns(plan, windows, passed)
    begin, end = shown_span_ns(plan, windows, window)
    # the same length in the middle of the captured time, from the begin of a period on
    period = int(plan.header.get("burst_period_ns") or 10_000_000)
    first = int(passed.at_ns[0] + passed.at_ns[-1] - (end - begin)) // 2 // period * period
    mean_bps = float(passed.total_bytes[-1]) * 8e9 / (len(flow.payload) * BIN_NS)
    numbers, _ = draw_trace(axes, plan, windows, passed, (first, first + end - begin), window, mean_bps)
    axes.xaxis.set_major_locator(MaxNLocator(6, prune="upper"))
    axes.set_title(_name(captured), loc="left")
    return numbers.assign(series=captured.point.series, load=captured.load)


Maker = Callable[[Sequence[CapturedPoint]], Drawn | None]
# file name -> function that draws the figure, in the order of the report
FIGURES: dict[str, Maker] = {"packets-histogram": histogram, "packets-flows": flows, "packets-trace": traces}


def collect(points: Sequence[CapturedPoint]) -> list[dict[str, Any]]:
    """Return the numbers of captured points as plain values, beside the published ones, each with its sentence."""
    return [
        captured.to_json() | {"label": _name(captured), "thesis": published(captured), "agreement": agreement(captured)}
        for captured in points
    ]


def published(captured: CapturedPoint) -> dict[str, Any] | None:
    """Return the rates of Table 3.11 for a point's model, kind and load; None if it has none."""
    if captured.point.traffic != "consistent":
        return None
    for (model, load), (alone, shared) in published_results.FLOW_RATES_GBPS.items():
        if model == captured.point.model and abs(load - captured.load) <= _NEAR_LOAD:
            rates = {"alone_gbps": alone, "shared_gbps": shared, "oversupply": alone / shared - 1}
            return rates | {"table": published_results.FLOW_RATES_TABLE}
    return None


def agreement(captured: CapturedPoint) -> str:
    """Return a sentence on the training bytes of a worker and iteration, counted in several ways."""
    found = captured.bytes
    if found is None:
        return f"no packets: {captured.why}."
    names = {name: name for name in ("packets", "interfaces", "sockets")} | {"equation": "equation 3.1"}
    known = {title: getattr(found, name) for name, title in names.items()}
    parts = [
        f"{title} {format_size(value)}" if value is not None else f"{title} not known" for title, value in known.items()
    ]
    why = "".join(f"; {names[name]}: {reason}" for name, reason in found.reasons.items())
    if found.header_share is not None:
        why = (
            f"; packets hold {found.header_share * 100:.1f} % more than equation 3.1, headers of the job's library{why}"
        )
    difference = found.largest_difference
    if difference is None:
        verdict = ""
    else:
        agree = "agree" if difference <= MAX_DIFFERENCE else "do not agree"
        verdict = f"; they {agree} within {MAX_DIFFERENCE * 100:.0f} % (largest difference {difference * 100:.2f} %)"
    return f"training bytes that a worker sends per iteration: {', '.join(parts)}{verdict}{why}."
