"""Draws jobs that share links: iteration times of each point, phases that slide or are kept, and time by phase."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ringtap.analysis.plots.figure import Drawn, finite, label, line_handle, sheet
from ringtap.analysis.plots.style import COLOURS, FAINT, INK, MARKS
from ringtap.analysis.sweeps.sharing import FLUID, MEASURED, MLTCP_EQUATION, SharingPoint
from ringtap.core.run_directory_schema import ALONE

_SIZE = (5.2, 2.3)
_PANEL = (2.9, 1.7)
_JUMP = 0.12  # of a phase, from one iteration to the next, across which no line is drawn
_MAX_LABELS = 14  # of points on the horizontal axis


def _together(points: Sequence[SharingPoint]) -> list[SharingPoint]:
    return [point for point in points if point.offset != ALONE]


def _names(points: Sequence[SharingPoint]) -> list[str]:
    return list(dict.fromkeys(job.name for point in points for job in point.jobs))


def _times(points: Sequence[SharingPoint]) -> Drawn:
    """Draw the mean iteration time of each job at each point, with its interval and its prediction."""
    names = _names(points)
    colours = dict(zip(names, COLOURS, strict=False))
    marks = dict(zip(names, MARKS, strict=False))
    handles = [line_handle(name, marker=marks[name], linestyle="none", color=colours[name]) for name in names]
    handles.append(line_handle("predicted", marker="_", linestyle="none", color=INK))
    on = sheet(1, 1, _SIZE, handles, label_columns=4)
    (axes,) = on.panels
    rows = []
    for name in names:
        found = [(place, job) for place, point in enumerate(points) for job in point.jobs if job.name == name]
        x = np.array([place for place, _ in found]) + 0.14 * (names.index(name) - (len(names) - 1) / 2)
        mean, low, high, predicted = (
            finite([getattr(job, key) for _, job in found])
            for key in ("mean_s", "mean_low_s", "mean_high_s", "predicted_s")
        )
        axes.vlines(x, low, high, color=colours[name], linewidth=1)
        texts = [f"{points[place].label}, {name}: {job.mean_s:.4g} s" for place, job in found]
        on.mark(axes, x, mean, texts, marker=marks[name], color=colours[name])
        axes.plot(x, predicted, linestyle="none", marker="_", markersize=11, color=INK)
        rows += [
            {"point": points[place].label, "job": name, "mean_s": job.mean_s, "predicted_s": job.predicted_s}
            for place, job in found
        ]
    axes.set_ylim(bottom=0)
    axes.set_ylabel("iteration time, s")
    if len(points) <= _MAX_LABELS:
        axes.set_xticks(range(len(points)), [label(point.label) for point in points])
    caption = "Mean iteration time of each job with its 95 % interval, alone and together at each offset"
    return on.drawn("sharing-times", f"{caption}; black: predicted from the jobs alone.", pd.DataFrame(rows))


def _phases(points: Sequence[SharingPoint]) -> Drawn | None:
    """Draw the phase of each job against its iterations, one panel per point."""
    points = _together(points)
    if not points:
        return None
    names = _names(points)
    colours = dict(zip(names, COLOURS, strict=False))
    marks = dict(zip(names, MARKS, strict=False))
    handles = [line_handle(name, marker=marks[name], linestyle="none", color=colours[name]) for name in names[1:]]
    on = sheet(len(points), 2, _PANEL, handles)
    for axes, point in zip(on.panels, points, strict=True):
        for name, table in point.phases.groupby("job"):
            if name != names[0]:
                look: dict[str, Any] = {"marker": marks[str(name)], "color": colours[str(name)], "markersize": 3}
                axes.plot(table["iteration"], table["phase"], linestyle="none", **look)
        axes.set_ylim(0, 1)
        axes.set_title(label(point.label))
        axes.set_ylabel(f"phase to {label(names[0])}")
        axes.set_xlabel("iteration")
    caption = f"Begin of each iteration within an iteration of {label(names[0])}, as a share of it"
    numbers = pd.concat([point.phases.assign(point=point.label) for point in points], ignore_index=True)
    return on.drawn("sharing-phases", f"{caption}: phases that slide, or are kept.", numbers)


def _by_phase(points: Sequence[SharingPoint]) -> Drawn | None:
    """Draw the iteration time, without the pause, against the phase."""
    points = _together(points)
    if not points:
        return None
    colours = dict(zip(dict.fromkeys(point.label for point in points), COLOURS * 4, strict=False))
    marks = dict(zip(colours, MARKS * 4, strict=False))
    handles = [line_handle(name, marker=marks[name], linestyle="none", color=colours[name]) for name in colours]
    on = sheet(1, 1, _SIZE, handles, label_columns=4)
    (axes,) = on.panels
    parts = []
    for point in points:
        table = point.phases.dropna(subset=["phase"])
        table = table.assign(point=point.label, active_s=table["iteration_s"] - table["pause_s"])
        axes.plot(
            table["phase"], table["active_s"], linestyle="none", marker=marks[point.label], markersize=3,
            color=colours[point.label],
        )  # fmt: skip
        parts.append(table)
    for job in points[0].jobs:
        if job.slowdown is not None:
            axes.axhline(job.mean_s / job.slowdown, color=FAINT, linewidth=0.8)
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("phase")
    axes.set_ylabel("time without pause, s")
    caption = "Time of each iteration without its pause, by the phase at which it began; lines: alone"
    return on.drawn("sharing-by-phase", f"{caption}.", pd.concat(parts, ignore_index=True))


def _slides(points: Sequence[SharingPoint]) -> Drawn | None:
    """Draw the phases from the begin of a point's rule on, measured and predicted, one panel per point and job."""
    points = [point for point in _together(points) if point.slides]
    if not points:
        return None
    names = _names(points)
    styles: dict[str, dict[str, Any]] = {
        MEASURED: {"color": COLOURS[0], "marker": ".", "markersize": 4, "linestyle": "none", "zorder": 3},
        FLUID: {"color": COLOURS[1], "marker": "_", "markersize": 4, "linewidth": 1},
        MLTCP_EQUATION: {"color": COLOURS[2], "marker": "x", "markersize": 3, "linewidth": 1, "linestyle": "--"},
    }
    panels = [(point, job) for point in points for job in dict.fromkeys(slide.job for slide in point.slides)]
    on = sheet(len(panels), 2, _PANEL, [line_handle(source, **style) for source, style in styles.items()])
    parts = []
    for axes, (point, job) in zip(on.panels, panels, strict=True):
        for slide in (slide for slide in point.slides if slide.job == job):
            x, phases = np.arange(len(slide.phases)), np.array(slide.phases)
            table = {"point": point.label, "job": job, "by": slide.source, "iteration": x, "phase": phases}
            parts.append(pd.DataFrame(table))
            # at a wrap from 1 to 0 and at other jumps, the line is broken
            jumps = np.flatnonzero(np.abs(np.diff(phases)) > _JUMP) + 1
            axes.plot(
                np.insert(x.astype(float), jumps, np.nan), np.insert(phases, jumps, np.nan), **styles[slide.source]
            )
        axes.set_ylim(0, 1)
        axes.set_title(label(point.label))
        axes.set_ylabel(f"phase of {label(job)} to {label(names[0])}")
        axes.set_xlabel("iteration since the rule began")
    caption = "Phase from the time at which a rule gives jobs their shares; free: from when all jobs ran"
    return on.drawn("sharing-slides", f"{caption}.", pd.concat(parts, ignore_index=True))


# file name -> function that draws the figure, in the order of the report
FIGURES: dict[str, Callable[[Sequence[SharingPoint]], Drawn | None]] = {
    "sharing-times": _times,
    "sharing-phases": _phases,
    "sharing-by-phase": _by_phase,
    "sharing-slides": _slides,
}
