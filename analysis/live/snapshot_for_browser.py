"""Turns a snapshot into parts of the browser's page: values that JSON can hold, texts as the terminal shows them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from ringtap.analysis.live import summary, tables
from ringtap.analysis.live.snapshot import Snapshot
from ringtap.analysis.live.tables import Page
from ringtap.core.terminal_escaping import masked, shell_word

MAX_ROWS = 200
_MAX_WARNINGS = 20
_BARS = 100


@dataclass(frozen=True)
class TableChoice:
    """The reader's choice of a node, of rows and of their order.

    Attributes:
        words: words that a row must have.
        page: title of the table that is sorted; empty: each has its own order.
        column: number of the column that it is sorted by.
        descending: True for the largest first.
        node: the only node that is shown; all if empty or not in the run.
    """

    words: str = ""
    page: str = ""
    column: int = 0
    descending: bool = False
    node: str = ""


def parts_of(run: Snapshot, choice: TableChoice) -> dict[str, Any]:
    """Return the parts of the page by name: ``head``, ``nodes``, ``warnings``, ``iterations``, ``throughput``, tables.

    Warnings are those of all nodes.
    """
    names = [node.name for node in run.nodes]
    node = choice.node if choice.node in names else ""
    warnings = [f"The run has no node {choice.node}: all nodes are shown."] if node != choice.node else []
    warnings = [masked(text) for text in (*warnings, *summary.warnings(run))]
    run = tables.of_node(run, node)
    more = [f"And {len(warnings) - _MAX_WARNINGS} more."] if len(warnings) > _MAX_WARNINGS else []
    following = f" Next: ringtap analyze {shell_word(run.path)}" if run.nodes else ""
    lines = (
        summary.headline(run, False),
        summary.job_line(run, node, is_named=False),
        *summary.verdict_lines(run),
        *summary.collector_states(run.collectors),
    )
    return {
        "head": {
            "name": masked(Path(run.path).resolve().name),
            "lines": [_spans(line) for line in lines],
            "ending": masked(summary.ending(run) + following) if run.ended else "",
        },
        "nodes": {"names": names, "shown": node},
        "warnings": warnings[:_MAX_WARNINGS] + more,
        "iterations": _bars(run, summary.iteration_plot, len(run.iterations.history)),
        "throughput": _bars(run, summary.throughput_plot, len(run.throughput)),
    } | {f"table {page.title}": _table(page, run, choice) for page in tables.TABLES}


def _spans(line: Text) -> list[tuple[str, str]]:
    """Return pieces of a line, each with its style, whose words are classes of the page."""
    edges = sorted({0, len(line.plain), *(edge for span in line.spans for edge in (span.start, span.end))})
    pieces = []
    for start, end in itertools.pairwise(edges):
        styles = [str(span.style) for span in line.spans if span.start <= start and end <= span.end]
        pieces.append((masked(line.plain[start:end]), " ".join([str(line.style), *styles]).strip()))
    return pieces


def _bars(run: Snapshot, plot: Callable[[Snapshot, int], tuple[Text, list[float]]], known: int) -> dict[str, Any]:
    """Return a plot's range, the height of each bar as a share in per cent, and the symbol above each."""
    shown, width = min(known, _BARS), _BARS + summary.LABEL_WIDTH
    line, bars = plot(run, width)
    top = max(bars, default=0.0) or 1.0
    return {
        "range": line.plain[: width - shown].strip(),
        "heights": [round(100 * value / top) for value in bars[width - shown :]],
        "symbols": line.plain[width - shown :],
    }


def _table(page: Page, run: Snapshot, choice: TableChoice) -> dict[str, Any]:
    sort, descending = page.sort, page.descending
    if choice.page == page.title and 0 <= choice.column < len(page.columns):
        sort, descending = choice.column, choice.descending
    items = page.select(run, choice.words, sort, descending)
    shown = items[-MAX_ROWS:] if page.from_end else items[:MAX_ROWS]
    return {
        "from_end": page.from_end,
        "heads": [(column.title, column.show is not None) for column in page.columns],
        "sort": None if sort is None else (sort, descending),
        "rows": [[page.style(item, run), *(masked(column.text(item)) for column in page.columns)] for item in shown],
        "more": len(items) - len(shown),
        "reason": "" if items else masked(page.reason(run, choice.words)),
    }
