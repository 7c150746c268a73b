"""Injection rates over time: the moving average of figure B-5 and the samples of histogram 3-8."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringtap.analysis.traffic.delivered import Passed
from ringtap.analysis.traffic.plan import Integers, Numbers, Plan, Windows

WIDTH = 18  # samples of the moving average in figure B-5
COUNT = 60_000  # samples of figure 3-8
_WINDOW_NS = 1_000_000
_PERIODS = 6
_SPAN_NS, _SPAN_WINDOWS = 60_000_000, 25
_BINS = 80


@dataclass(frozen=True)
class Rates:
    """Instantaneous injection rates of one transmission.

    Attributes:
        label: name of the transmission.
        source: ``capture``, ``nic`` or ``log``.
        window_ns: time that each rate is averaged over.
        values_bps: the rates.
    """

    label: str
    source: str
    window_ns: float
    values_bps: Numbers


def window_ns(plan: Plan, windows: Windows | None, passed: Passed) -> float:
    """Return the width of the moving average: a burst's length, or 1 ms; more if it holds fewer than 18 readings."""
    burst = float(windows.edges_ns[1] - windows.edges_ns[0]) if windows is not None else 0.0
    return min(max(burst or _WINDOW_NS, WIDTH * passed.sample_ns), float(plan.duration_ns))


def shown_span_ns(plan: Plan, windows: Windows | None, window: float) -> tuple[int, int]:
    """Return the part of the plan that the figures show: some periods, or 60 ms or more, around its middle."""
    if windows is not None:
        period = int(plan.header["burst_period_ns"])
        whole = plan.duration_ns // period
        shown = min(max(_PERIODS, round(_SPAN_WINDOWS * window / period / 2)), max(whole, 1))
        begin = (whole - shown) // 2 * period
        return max(begin, 0), min(max(begin, 0) + shown * period, plan.duration_ns)
    length = min(plan.duration_ns, max(_SPAN_NS, round(_SPAN_WINDOWS * window)))
    begin = (plan.duration_ns - length) // 2
    return begin, begin + length


def moving_average(passed: Passed, span_ns: tuple[int, int], window: float) -> tuple[Numbers, Numbers]:
    """Return the middles of the windows (ns after the launch) and the mean payload rates in them, in bit/s."""
    step = window / WIDTH
    edges = np.arange(span_ns[0] - window / 2, span_ns[1] + window / 2 + step / 2, step)
    totals = passed.until(edges)
    return (edges[WIDTH:] + edges[:-WIDTH]) / 2, (totals[WIDTH:] - totals[:-WIDTH]) * 8e9 / window


def instantaneous(label: str, passed: Passed, duration_ns: int, window: float) -> Rates:
    """Return the rates at 60,000 instants spread evenly over a transmission, so that their mean is its load."""
    begins = np.linspace(0, max(duration_ns - window, 0), COUNT)
    rates = (passed.until(begins + window) - passed.until(begins)) * 8e9 / window
    return Rates(label, passed.source, window, np.maximum(rates, 0))


def histogram_edges(samples: list[Rates]) -> Numbers:
    """Return the edges of 80 common bins, from 0 to the greatest 99th percentile of the samples' rates above 0."""
    busy = [one.values_bps[one.values_bps > 0] for one in samples]
    top = max((float(np.quantile(values, 0.99)) for values in busy if len(values)), default=1.0)
    return np.linspace(0, top, _BINS + 1)


def counts(samples: Rates, edges_bps: Numbers) -> Integers:
    """Count the samples in each bin; rates of 0, or above the last edge, are in none."""
    return np.histogram(samples.values_bps[samples.values_bps > 0], edges_bps)[0].astype(np.int64)
