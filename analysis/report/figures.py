"""Every figure of a report, each drawn once and written as PNG, SVG and CSV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ringtap.analysis.canvas import Drawn, styled
from ringtap.analysis.report.figure_congestion import congestion_points
from ringtap.analysis.report.figure_load import iteration_times, rescaled_times, traffic_kinds
from ringtap.analysis.report.figure_parts import Setting
from ringtap.analysis.report.figure_tails import distributions, spread_and_growth, transports
from ringtap.analysis.report.tails import Tails
from ringtap.analysis.series import Series

# those of a report, in its order: the ones that a later report no longer has are removed
NAMES = (
    "iteration-times",
    "rescaled",
    "traffic-kinds",
    "distributions",
    "transports",
    "spread-and-growth",
    "congestion-points",
)


def draw(series: Sequence[Series], found: Sequence[Tails], setting: Setting, folder: Path) -> list[Drawn]:
    """Draw every figure that the series allow, and write its files into a folder.

    Args:
        series: the series, all of one capacity.
        found: what `ringtap.analysis.report.tails.tails` says of each.
        setting: capacity and scale.
        folder: where PNG, SVG and CSV of each go.

    Returns:
        The figures drawn, in the order of `NAMES`.
    """
    kept = [(one, tail) for one, tail in zip(series, found, strict=True) if one.used]
    usable, of_usable = [one for one, _ in kept], [tail for _, tail in kept]
    if not usable:
        return []
    makers: list[Callable[[], Drawn | None]] = [
        lambda: iteration_times(usable, setting),
        lambda: rescaled_times(usable, setting),
        lambda: traffic_kinds(usable, setting),
        lambda: distributions(usable, setting),
        lambda: transports(usable, setting),
        lambda: spread_and_growth(usable, of_usable, setting),
        lambda: congestion_points(usable, setting),
    ]
    with styled():
        drawn = [figure for maker in makers if (figure := maker()) is not None]
        for figure in drawn:
            figure.write(folder)
    return drawn
