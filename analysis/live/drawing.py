"""Numbers, bars and tables as text of a given width; independent of textual."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

_BLOCKS = " ▁▂▃▄▅▆▇█"
_GAP = 1
# an outlier (the first iterations, say) must not flatten all others
_CAP_MEDIANS = 3.0
WARNING, BAD, DIM, HEADER = "yellow", "red", "dim", "bold"


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: its head, with the unit.
        right: True to align right, as numbers are.
        rank: 0 is always shown; if the width does not suffice, the highest rank is left out first.
        least: number of cells that a text may be cut to; 0: it is not cut.
    """

    title: str
    right: bool = False
    rank: int = 0
    least: int = 0


@dataclass(frozen=True)
class TextRow:
    """A row of a table: the texts shown, and the keys that it is sorted by.

    Attributes:
        node: the node it belongs to; empty for none in particular.
        cells: the texts.
        keys: sort key of each cell; None comes last.
        style: rich style of the whole row.
    """

    node: str
    cells: tuple[str, ...]
    keys: tuple[Any, ...]
    style: str = ""


def order(rows: Sequence[TextRow], column: int, descending: bool) -> list[TextRow]:
    """Sort rows by one of their keys; those without a value come last either way."""
    known = [row for row in rows if row.keys[column] is not None]
    known.sort(key=lambda row: row.keys[column], reverse=descending)
    return known + [row for row in rows if row.keys[column] is None]


def matching(rows: Sequence[TextRow], words: str) -> list[TextRow]:
    """Return the rows that have every one of the words in some cell, ignoring case."""
    wanted = words.lower().split()
    return [row for row in rows if all(word in " ".join(row.cells).lower() for word in wanted)]


def table(
    columns: Sequence[Column],
    rows: Sequence[TextRow],
    width: int,
    sorted_by: int | None = None,
    descending: bool = True,
) -> list[Text]:
    """Lay out a table; its first line is the head. Columns that do not fit are left out, texts are cut."""
    titles = [
        column.title + ("" if number != sorted_by else "▼" if descending else "▲")
        for number, column in enumerate(columns)
    ]
    widths = [
        max([cell_len(title), *(cell_len(row.cells[number]) for row in rows)]) for number, title in enumerate(titles)
    ]
    shown = _fit(columns, widths, width, sorted_by)
    lines = [_line(columns, shown, widths, titles, HEADER, width)]
    lines += [_line(columns, shown, widths, row.cells, row.style, width) for row in rows]
    return lines


def _fit(columns: Sequence[Column], widths: list[int], width: int, keep: int | None) -> list[int]:
    """Choose the columns that fit, and reduce the widths of those that may be cut."""
    shown = list(range(len(columns)))

    def surplus() -> int:
        return sum(widths[number] for number in shown) + _GAP * (len(shown) - 1) - width

    def slack() -> int:
        return sum(max(0, widths[number] - columns[number].least) for number in shown if columns[number].least)

    while surplus() > slack():
        candidates = [number for number in shown if columns[number].rank and number != keep]
        if not candidates:
            break
        shown.remove(max(candidates, key=lambda number: (columns[number].rank, number)))
    while surplus() > 0:
        cuttable = [number for number in shown if columns[number].least and widths[number] > columns[number].least]
        if not cuttable:
            break
        widths[max(cuttable, key=lambda number: widths[number])] -= 1
    return shown


def _line(
    columns: Sequence[Column], shown: list[int], widths: list[int], cells: Sequence[str], style: str, width: int
) -> Text:
    parts = []
    for number in shown:
        cell = cut(cells[number], widths[number])
        space = " " * (widths[number] - cell_len(cell))
        parts.append(space + cell if columns[number].right else cell + space)
    return Text(set_cell_size((" " * _GAP).join(parts), width), style=style, no_wrap=True, end="")


def cut(text: str, width: int) -> str:
    """Cut a text to a width; an ellipsis marks the cut."""
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + "…"


def bars(
    values: Sequence[float], width: int, height: int, styles: Sequence[str] = (), ticks: Sequence[bool] = ()
) -> tuple[list[Text], float]:
    """Draw bars from 0 upwards, the last values at the right.

    Args:
        values: values to draw; only the last ``width`` of them are drawn.
        width: number of columns.
        height: number of lines.
        styles: rich style of each value.
        ticks: True for each value with a mark.

    Returns:
        The lines from the top, and the value of the top. Values beyond it end in an arrow.
    """
    drawn = list(values)[-width:]
    first = len(values) - len(drawn)
    ordered = sorted(drawn)
    top = ordered[-1] if ordered else 0.0
    if ordered and ordered[len(ordered) // 2] > 0:
        top = min(top, _CAP_MEDIANS * ordered[len(ordered) // 2])
    cells: list[list[tuple[str, str]]] = [[(" " * (width - len(drawn)), "")] for _ in range(height)]
    for number, value in enumerate(drawn, start=first):
        style = styles[number] if number < len(styles) else ""
        eighths = round(min(value, top) / top * height * 8) if top > 0 else 0
        eighths = max(eighths, 1) if value > 0 else eighths
        for row in range(height):
            cell = _BLOCKS[max(0, min(8, eighths - (height - 1 - row) * 8))], style
            if row == 0 and number < len(ticks) and ticks[number]:
                cell = "▾", "bold magenta"
            elif row == 0 and value > top:
                cell = "▲", BAD
            cells[row].append(cell if cell[0] != " " else (" ", ""))
    return [_joined(row) for row in cells], top


def _joined(cells: Sequence[tuple[str, str]]) -> Text:
    """Join neighbours of one style, because a style costs more than a character on its way to the terminal."""
    line = Text(no_wrap=True, end="")
    for style, group in itertools.groupby(cells, key=lambda cell: cell[1]):
        line.append("".join(text for text, _ in group), style)
    return line


def core_bars(shares: Sequence[float], width: int) -> str:
    """Draw each core's busy share as one block; if they do not fit, neighbours share a block and the busiest counts."""
    if not shares:
        return ""
    each = -(-len(shares) // width)
    groups = [max(shares[start : start + each]) for start in range(0, len(shares), each)]
    return "".join(_BLOCKS[max(1, min(8, round(share * 8)))] for share in groups)


def gbps(bps: float | None) -> str:
    """Format a rate in Gbit/s, in about four figures."""
    if bps is None:
        return "-"
    value = bps / 1e9
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def count(value: float | None) -> str:
    """Format a number of things, or of things per second, in few characters."""
    if value is None:
        return "-"
    if 0 < value < 9.95:
        return f"{value:.1f}".removesuffix(".0")
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 10 * size:
            return f"{value / size:.{1 if value < 100 * size else 0}f}{unit}"
    return f"{value:.0f}"


def milliseconds(seconds: float | None) -> str:
    """Format a short time in milliseconds, without the unit, which the column's head names."""
    if seconds is None:
        return "-"
    value = seconds * 1e3
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"


def percent(share: float | None) -> str:
    """Format a share in percent."""
    return "-" if share is None else f"{share * 100:.0f}%"


def clock(seconds: float) -> str:
    """Format a time as hours, minutes and seconds."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def number(value: float | None) -> str:
    """Format a whole number; a dash for None."""
    return "-" if value is None else str(int(value))
