"""Draws the circles of jobs on their links, without and with time shifts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ringtap.core.units import format_rate
from ringtap.workload.interleaving import Circles, InterleavedLink, Schedule
from ringtap.workload.timeline_plot import new_figure, save_figure

_POINTS = 1440  # of a circle at least, so that it is round
# Okabe and Ito's colours, which can be distinguished with any colour vision
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442")
_CIRCLE_IN = 3.6


def write_circles(circles: Circles, found: Schedule, names: list[str], path: Path) -> None:
    """Draw the demand on each link that jobs use, a job's rate above the other's, around the circle of all jobs.

    Args:
        circles: the jobs.
        found: their shifts.
        names: names of the jobs.
        path: the file to write; its ending chooses the format.

    Raises:
        UsageError: matplotlib is missing, or the file cannot be written.
    """
    drawn = [(link, scores) for link, scores in zip(found.links, found.interleavings, strict=True) if link.jobs]
    figure = new_figure(path, 2 * _CIRCLE_IN, 0.6 + _CIRCLE_IN * len(drawn))
    rows = figure.subplots(len(drawn), 2, squeeze=False, subplot_kw={"projection": "polar"})
    labels: dict[str, Any] = {}
    for axes, (link, scores) in zip(rows, drawn, strict=True):
        for one, shifts, score, text in (
            (axes[0], [0] * len(names), scores.score_unshifted, "without shifts"),
            (axes[1], found.shifts, scores.score, "with shifts"),
        ):
            labels |= _draw(one, circles, link, shifts, names)
            one.set_title(f"{link.name}, {text}: score {score:.3g}", fontsize=10, parse_math=False)
        top = max(one.get_rmax() for one in axes)
        for one in axes:
            one.set_rmax(top)
    figure.legend(
        labels.values(), labels.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8,
        title="radius: rate, Gbit/s", title_fontsize=8,
    )  # fmt: skip
    save_figure(figure, path)


def _draw(axes: Any, circles: Circles, link: InterleavedLink, shifts: Any, names: list[str]) -> dict[str, Any]:
    """Draw the jobs of a link, and return what stands for each of them in the legend."""
    slots = circles.slots
    each = -(-_POINTS // slots)
    angle = np.repeat(np.linspace(0, 2 * np.pi, slots * each + 1), 2)[1:-1]
    drawn, below = {}, np.zeros(len(angle))
    for job in link.jobs:
        rate = np.roll(circles.rates_bps[job], shifts[job]) / 1e9
        above = below + np.repeat(np.tile(rate, slots // len(rate)), 2 * each)
        drawn[names[job]] = axes.fill_between(angle, below, above, color=_COLOURS[job], alpha=0.8, linewidth=0)
        below = above
    label = f"capacity {format_rate(link.capacity_bps)}"
    drawn[label] = axes.plot(angle, np.full(len(angle), link.capacity_bps / 1e9), "k--", linewidth=1)[0]
    axes.set_theta_zero_location("N")
    axes.set_theta_direction(-1)
    quarters = np.arange(4) / 4
    perimeter_ms = 1e3 * circles.quantum_s * slots
    axes.set_xticks(2 * np.pi * quarters, [f"{perimeter_ms * quarter:.4g} ms" for quarter in quarters], fontsize=8)
    axes.set_rlabel_position(45)
    axes.tick_params(axis="y", labelsize=7)
    axes.grid(alpha=0.3)
    return drawn
