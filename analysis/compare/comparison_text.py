"""Writes a comparison of runs as text: the answer, one table, then reasons for what is not known."""

from __future__ import annotations

from collections.abc import Iterator

from ringtap.analysis.compare.run_comparison import NOTABLE, Row, RunComparison
from ringtap.analysis.sweeps.compare_with_message_graphs import ExpectedOrder
from ringtap.core.terminal_escaping import text_table
from ringtap.core.units import counted

NOTE = (
    "Values are means over the iterations after warm-up unless their names say otherwise. Chance means the variation "
    "within these runs: repeated runs of one job may differ by more."
)
ORDER_HEADS = ["series", "critical path", "measured, s", "simulated, s", "rank", "simulated", "bytes"]
_MAX_ROWS = 40
_MAX_LABEL = 28


def describe(found: RunComparison, columns: int | None = None) -> list[str]:
    """Return the comparison as lines; a table that is wider than this many columns is printed in parts."""
    table = [heads(found), *map(cells, found.rows[:_MAX_ROWS])]
    lines = list(found.answer)
    for part in [table] if columns is None else _parts(table, columns):
        lines += ["", *text_table(part)]
    if len(found.rows) > _MAX_ROWS:
        lines.append(f"{counted(len(found.rows) - _MAX_ROWS, 'more row')}: --json and the page have all")
    for order in found.orders:
        lines += [
            "",
            f"{order.title}, measured beside its message graphs:",
            *text_table([ORDER_HEADS, *order_cells(order)], left=2),
        ]
    return [*lines, "", NOTE, *(["", "Not known, and limits:", *found.reasons] if found.reasons else [])]


def _parts(table: list[list[str]], columns: int) -> Iterator[list[list[str]]]:
    """Yield the table in parts that fit into a number of columns; each begins with the first column of the table."""
    first, *widths = (2 + max(map(len, column)) for column in zip(*table, strict=True))
    begin, wide = 1, first
    for at, width in enumerate(widths, start=1):
        if wide + width > columns + 2 and at > begin:
            yield [[row[0], *row[begin:at]] for row in table]
            begin, wide = at, first
        wide += width
    yield [[row[0], *row[begin:]] for row in table]


def order_cells(order: ExpectedOrder) -> list[list[str]]:
    """Return the rows of a table of series beside their message graphs."""

    def known(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    return [
        [one.variant or one.series, one.path or one.why]
        + [known(seconds, ".3f") for seconds in (one.measured_s, one.simulated_s)]
        + [known(rank, "g") for rank in (one.measured_rank, one.simulated_rank)]
        + [known(one.link_difference, "+.2%")]
        for one in order.series
    ]


def heads(found: RunComparison) -> list[str]:
    """Return the heads of the table's columns."""
    return ["measure", *map(_short, found.labels), "ratio", "beyond chance"]


def cells(row: Row) -> list[str]:
    """Return the cells of a row."""
    ratio = "–" if row.ratio is None else f"{row.ratio:.3g}"
    return [row.title, *row.texts, ratio, chance(row)]


def chance(row: Row) -> str:
    """Return the verdict on a row's differences."""
    if row.is_beyond_chance is None:
        return "not tested"
    verdict = "no" if not row.is_beyond_chance else "yes" if row.is_notable else f"yes, under {NOTABLE:.0%}"
    if row.p is None:
        return f"{verdict} (by intervals)"
    return f"{verdict} (p < 0.001)" if row.p < 0.001 else f"{verdict} (p = {row.p:.2g})"


def _short(label: str) -> str:
    return label if len(label) <= _MAX_LABEL else f"…{label[1 - _MAX_LABEL :]}"
