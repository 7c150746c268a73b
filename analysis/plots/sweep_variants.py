"""Draws iteration times of many collectives, transports and topologies, in a row each."""

from __future__ import annotations

from collections.abc import Sequence

from ringtap.analysis.plots.figure import Drawn, label, line_handle, sheet
from ringtap.analysis.plots.style import COLOURS, INK, joined, title_of
from ringtap.analysis.plots.sweep_figure_parts import Setting, points_table, tooltip
from ringtap.analysis.sweeps.points import Point
from ringtap.analysis.sweeps.series_analysis import Series, grouped

MAX_SIDE_BY_SIDE = 4  # variants of a model that figures with a line each show
_ROW = 0.27  # inches


def has_many_variants(group: Sequence[Series]) -> bool:
    """Return True if a model under one kind of traffic has too many variants for a line each."""
    return len({one.variant for one in group}) > MAX_SIDE_BY_SIDE


def variant_times(series: Sequence[Series], setting: Setting) -> Drawn | None:
    """Draw the mean iteration times of many variants at the lightest and the heaviest load; None if there are few."""
    groups = [group for group in grouped(series, "model", "traffic") if has_many_variants(group)]
    if not groups:
        return None
    drawn = [one for group in groups for one in group]
    topologies = list(dict.fromkeys(one.topology for one in drawn))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(topologies)}
    labels = [
        line_handle(name or "iteration time", color=colour, marker="o", linestyle="none")
        for name, colour in colours.items()
    ]
    heavy = max(point.cross_gbps or 0.0 for one in drawn for point in one.used)
    if heavy:
        labels += [
            line_handle("lightest load", color=INK, marker="o", linestyle="none"),
            line_handle(f"heaviest load, {heavy:.3g} Gbit/s", color=INK, marker="o", mfc="white", linestyle="none"),
        ]
    rows = max(len({row_of(one) for one in group}) for group in groups)
    left = 0.3 + 0.075 * max(len(row_of(one)) for one in drawn)
    on = sheet(len(groups), 1, (max(1.6, 3.5 - left), _ROW * rows + 0.2), labels, left=left)
    for axes, group in zip(on.panels, groups, strict=True):
        order = sorted({row_of(one) for one in group}, key=lambda row: _least_s(group, row), reverse=True)
        for one in group:
            place = order.index(row_of(one)) + 0.3 * (0.5 - (topologies.index(one.topology) + 0.5) / len(topologies))
            colour = colours[one.topology]
            for point, face in _ends(one):
                mean_s = point.mean_s or 0.0
                axes.hlines(place, mean_s, point.p99_s or mean_s, color=colour, linewidth=0.9)
                on.mark(
                    axes, [mean_s], [place], [tooltip(one, point)], zorder=3, marker="o",
                    color=colour, markerfacecolor=face or colour, markeredgecolor=colour,
                )  # fmt: skip
        axes.set_yticks(range(len(order)), [label(row) for row in order])
        axes.set_ylim(-0.6, len(order) - 0.4)
        axes.set_xlim(left=0)
        axes.set_xlabel("iteration time in s")
        axes.set_title(
            label(f"{group[0].title}, {title_of(group[0].traffic)}" if heavy else group[0].title), loc="left"
        )
    loads = "at its lightest and its heaviest" if heavy else "without"
    caption = (
        f"Mean iteration time of each variant {loads} cross traffic, the fastest one first. "
        f"Lines reach to the 99th percentile. The capacity is {setting.capacity_gbps:g} Gbit/s."
    )
    return on.drawn("variant-times", caption, points_table(drawn))


def row_of(series: Series) -> str:
    """Return the name of a variant without its topology."""
    return joined(series.transport, series.collective) or "as the job does"


def _least_s(group: Sequence[Series], row: str) -> float:
    return min(point.mean_s or 0.0 for one in group if row_of(one) == row for point, _ in _ends(one)[:1])


def _ends(series: Series) -> list[tuple[Point, str]]:
    """Return the points with the least and the most cross traffic, and the colour of the second one's face."""
    first, last = series.used[0], series.used[-1]
    return [(first, "")] if last is first else [(first, ""), (last, "white")]
