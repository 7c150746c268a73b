"""Prepares and saves every figure: an empty sheet in the project's style, its legend, its marks, and its files."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ringtap.analysis.plots.style import RC, plain

_DPI = 160
_POINTS = 72  # per inch, the unit of an SVG
# margins of a panel in inches, with room for the tick labels and the axis label
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.62, 0.12, 0.3, 0.5
PANEL = (2.95, 2.2)  # inches: text of 9 points has 11 pixels on a telephone
_LEGEND_LINE, _MAX_LABEL_LENGTH = 0.21, 42


Box = tuple[float, float, float, float]


@dataclass
class Drawn:
    """A figure with its caption, its numbers and the texts of its marks.

    Attributes:
        name: file name without its ending.
        caption: its caption, with units.
        figure: the figure.
        numbers: the numbers drawn.
        marks: id of a group of marks in the SVG -> the text of each mark, in the order of drawing.
        boxes: left, top, width and height of each panel, in points of the SVG; a page arranges panels as it is wide.
            Empty: the figure is one drawing.
        keys: the same of each entry of the legend.
    """

    name: str
    caption: str
    figure: Figure
    numbers: pd.DataFrame
    marks: dict[str, list[str]] = field(default_factory=dict)
    boxes: list[Box] = field(default_factory=list)
    keys: list[Box] = field(default_factory=list)

    def write(self, folder: Path) -> list[Path]:
        """Write PNG, SVG and CSV; return their paths."""
        table = folder / f"{self.name}.csv"
        self.numbers.to_csv(table, index=False)
        with styled():
            return [*save(self.figure, folder, self.name), table]


@contextmanager
def styled() -> Iterator[None]:
    """Draw and save in the project's style."""
    with mpl.rc_context(cast(Any, RC)), warnings.catch_warnings():
        # characters that the font lacks are boxes in the PNG and text in the SVG
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font", category=UserWarning)
        yield


def draw(makers: Iterable[Callable[[], Drawn | None]], folder: Path) -> list[Drawn]:
    """Draw figures and write their files into a folder; return those for which there are data."""
    with styled():
        drawn = [figure for maker in makers if (figure := maker()) is not None]
        for figure in drawn:
            figure.write(folder)
    return drawn


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure with constrained layout; width and height in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@dataclass
class Sheet:
    """A figure of equal panels with fixed margins, which needs no layout engine.

    Attributes:
        figure: the figure.
        panels: its panels, row by row.
        boxes: as in `Drawn`.
        keys: as in `Drawn`.
        marks: as in `Drawn`.
    """

    figure: Figure
    panels: list[Axes]
    boxes: list[Box]
    keys: list[Box]
    marks: dict[str, list[str]] = field(default_factory=dict)

    def drawn(self, name: str, caption: str, numbers: pd.DataFrame) -> Drawn:
        """Return the finished figure."""
        places = [axes.get_position().bounds for axes in self.panels]
        for axes in self.figure.axes:  # a second axis has the place of its panel
            axes.set_gid(f"panel-{places.index(axes.get_position().bounds)}")
        return Drawn(name, caption, self.figure, numbers, self.marks, self.boxes, self.keys)

    def mark(self, axes: Axes, x: Any, y: Any, texts: Sequence[str], **look: Any) -> None:
        """Draw markers, each with a text that the page shows as a tooltip."""
        (line,) = axes.plot(x, y, linestyle="none", **look)
        name = f"marks-{len(self.marks)}"
        line.set_gid(name)
        self.marks[name] = list(texts)


def sheet(
    count: int,
    columns: int,
    size: tuple[float, float],
    labels: Sequence[Artist] = (),
    label_columns: int = 2,
    above: float = 0.0,
    left: float = _LEFT,
) -> Sheet:
    """Create a sheet of panels with one legend below them.

    Args:
        count: number of panels.
        columns: panels per row.
        size: width and height of a panel's axes, in inches.
        labels: handles of the legend.
        label_columns: legend entries per line.
        above: further inches above each panel, for a second axis.
        left: inches left of each panel.
    """
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    gap = bool(labels) and count < rows * columns  # room for the legend in the last row
    longest = max((len(str(artist.get_label())) for artist in labels), default=0)
    if label_columns * _key_width(longest) > columns * (size[0] + left + _RIGHT):
        label_columns = 1
    lines = 0 if gap else math.ceil(len(labels) / label_columns)
    wide, high = size[0] + left + _RIGHT, size[1] + _TOP + above + _BOTTOM
    foot = lines * _LEGEND_LINE + (0.1 if lines else 0.0)
    width, height = columns * wide, rows * high + foot
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    panels, boxes = [], []
    for number in range(count):
        row, column = divmod(number, columns)
        boxes.append((_POINTS * column * wide, _POINTS * row * high, _POINTS * wide, _POINTS * high))
        bottom = foot + (rows - 1 - row) * high + _BOTTOM
        box = ((column * wide + left) / width, bottom / height, size[0] / width, size[1] / height)
        axes = figure.add_axes(box)
        # without fixed positions, Matplotlib would measure every tick label for each file
        axes.xaxis.set_label_coords(0.5, -0.33 / size[1])
        axes.yaxis.set_label_coords(-0.44 / size[0], 0.5)
        panels.append(axes)
    if gap:
        start = (count % columns + columns) / 2 * wide, (rows - 0.5) * high - len(labels) * _LEGEND_LINE / 2
        keys = _keys(figure, labels, (start[0] - _key_width(longest) / 2, start[1]), len(labels), _key_width(longest))
    else:
        across = math.ceil(len(labels) / max(lines, 1)) * _key_width(longest)
        keys = _keys(figure, labels, ((width - across) / 2, rows * high), lines, _key_width(longest))
    return Sheet(figure, panels, boxes, keys)


def _key_width(longest: int) -> float:
    """Return the inches that an entry of a legend takes with a text of so many characters."""
    return 0.7 + 0.075 * longest


def _keys(figure: Figure, labels: Sequence[Artist], start: tuple[float, float], lines: int, wide: float) -> list[Box]:
    """Draw the entries of a legend, each of them a group of its own, in columns from a corner; return their boxes."""
    width, height = figure.get_size_inches()
    boxes = []
    for number, artist in enumerate(labels):
        column, line = divmod(number, lines)
        left, top = start[0] + column * wide, start[1] + line * _LEGEND_LINE
        entry = figure.legend(
            handles=[artist], loc="center left", handlelength=3.2, borderpad=0, borderaxespad=0,
            bbox_to_anchor=(left / width, 1 - (top + _LEGEND_LINE / 2) / height),
        )  # fmt: skip
        entry.set_gid(f"key-{number}")
        boxes.append((_POINTS * left, _POINTS * top, _POINTS * wide, _POINTS * _LEGEND_LINE))
    return boxes


def label(text: str) -> str:
    """Return a name as one line for a figure, shortened and without characters that XML forbids."""
    text = plain(text)
    return text if len(text) <= _MAX_LABEL_LENGTH else text[: _MAX_LABEL_LENGTH - 1] + "…"


def line_handle(text: str, **look: Any) -> Line2D:
    """Return an entry of a legend."""
    return Line2D([], [], label=label(text), **look)


def legend(figure: Figure, handles: Sequence[Artist], columns: int = 2) -> None:
    """Add one legend below everything, in a figure with constrained layout."""
    figure.legend(handles=list(handles), loc="outside lower center", ncols=min(columns, len(handles)), handlelength=3.2)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and SVG; return both paths."""
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    engine = figure.get_layout_engine()
    if engine is not None:
        # once for both files; savefig would calculate the margins twice for each
        engine.execute(figure)
        figure.set_layout_engine("none")
    figure.set_facecolor("white")
    before = figure.dpi
    figure.dpi = _DPI
    cast(Any, FigureCanvasAgg(figure)).print_png(
        str(paths[0]), metadata={"Software": None}, pil_kwargs={"compress_level": 3}
    )
    figure.dpi = before
    cast(Any, FigureCanvasSVG(figure)).print_svg(str(paths[1]), metadata={"Date": None, "Creator": None})
    return paths


def finite(values: Sequence[float | None]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return numbers to draw, with NaN for None."""
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)
