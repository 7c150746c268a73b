"""Writes the page of a comparison: the answer, the table, iteration times and traffic matrices, in one file."""

from __future__ import annotations

import json
import os
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from ringtap.analysis.compare.comparison_text import NOTE, cells, heads
from ringtap.analysis.compare.run_comparison import RunComparison
from ringtap.analysis.compare.run_measures import RunMeasures
from ringtap.analysis.pcap.export_scan_tables import check_new
from ringtap.analysis.plots import figures_on_axes as on_axes
from ringtap.analysis.plots.figure import PANEL, Drawn, draw, label, line_handle, new_figure, sheet
from ringtap.analysis.plots.style import COLOURS
from ringtap.analysis.report.page import render
from ringtap.core.check_api_arguments import path_of
from ringtap.core.errors import file_errors
from ringtap.core.terminal_escaping import one_line

_TABLE = "measures.csv"
# a line of each run, which can be told apart without colour
_LINES = ("-", (0, (5, 2)), (0, (1, 1.2)), "-.", (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (2, 3)))
_PANELS = 3  # matrices in a row
_MAX_RANKS = 256  # of a matrix that is drawn


def write_page(found: RunComparison, path: str | os.PathLike[str], force: bool = False) -> Path:
    """Write the page of a comparison; return its path.

    Raises:
        UsageError: the file exists and ``force`` is not given, or it cannot be written.
    """
    page = path_of(path, "the page")
    check_new(page, force)
    data = found.to_json() | {
        "heads": [one_line(text) for text in heads(found)],
        "rows": [[one_line(text) for text in cells(row)] for row in found.rows],
        "note": NOTE,
        "reasons": [one_line(text) for text in found.reasons],
    }
    with file_errors(page, "cannot be written"), tempfile.TemporaryDirectory(prefix=".new-", dir=page.parent) as name:
        folder = Path(name)
        (folder / "figures").mkdir()
        drawn = draw([partial(_times, found), partial(_matrices, found)], folder / "figures")
        found.table.to_csv(folder / _TABLE, index=False)
        (folder / "report.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        text = render("compare.html.j2", data, drawn, folder, _TABLE, is_alone=True)
        (folder / page.name).write_text(text, encoding="utf-8", errors="replace")
        (folder / page.name).replace(page)
    return page


def _times(found: RunComparison) -> Drawn | None:
    """Draw the distributions of the iteration times on one axis; None without iterations."""
    runs = [run for run in found.runs if len(run.times_s)]
    if not runs:
        return None
    looks = [{"color": COLOURS[at % len(COLOURS)], "linestyle": _LINES[at % len(_LINES)]} for at in range(len(runs))]
    on = sheet(1, 1, PANEL, [line_handle(run.label, **look) for run, look in zip(runs, looks, strict=True)])
    (axes,) = on.panels
    for run, look in zip(runs, looks, strict=True):
        on_axes.cdf(run.times_s, axes, **look)
    parts = [pd.DataFrame({"run": run.label, "iteration_s": np.sort(run.times_s)}) for run in runs]
    under = f" {runs[0].under}" if runs[0].under else ""
    caption = f"Distribution of the iteration times{under}: share of the iterations that take at most so long."
    return on.drawn("compare-times", caption, pd.concat(parts, ignore_index=True))


def _matrices(found: RunComparison) -> Drawn | None:
    """Draw the traffic matrices side by side in one scale for each unit; None if none is known."""
    runs = [run for run in found.runs if 0 < len(run.matrix) <= _MAX_RANKS]
    if not runs:
        return None
    columns = min(_PANELS, len(runs))
    rows = -(-len(runs) // columns)
    figure = new_figure(3.5 * columns, 3.0 * rows)
    panels = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
    for axes, run in zip(panels, runs, strict=False):
        on_axes.matrix(run.matrix, axes, vmax=_largest(runs, run.matrix_text))
        axes.set_title(label(run.label))
    for axes in panels[len(runs) :]:
        axes.set_axis_off()
    texts = list(dict.fromkeys(run.matrix_text for run in runs))
    caption = f"Traffic matrices: {' or '.join(texts)}, in MB, in one colour scale."
    return Drawn("compare-matrices", caption, figure, pd.concat(map(_numbers, runs), ignore_index=True))


def _largest(runs: list[RunMeasures], text: str) -> float:
    return max(float(run.matrix.to_numpy().max()) for run in runs if run.matrix_text == text) / 1e6


def _numbers(run: RunMeasures) -> pd.DataFrame:
    table = run.matrix.rename_axis(index="source", columns="destination").reset_index()
    table = table.melt("source", value_name="payload_bytes")
    return table[table["payload_bytes"] > 0].assign(run=run.label)
