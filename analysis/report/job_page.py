"""Writes the report of one job: the text of `ringtap analyze` as tables, with figures, in one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from ringtap.analysis.job.run import Job
from ringtap.analysis.job.summary_text import Table, answer, missing, parts_table, sections
from ringtap.analysis.plots.job import FIGURES
from ringtap.analysis.plots.style import plain
from ringtap.analysis.report.page import Written, write_folder
from ringtap.analysis.runs.samples_to_iterations import plain as plain_value
from ringtap.core.json_validation import whole
from ringtap.core.terminal_escaping import one_line

_TABLE = "iterations.csv"
_MAX_FLOWS = 25
_RANK_COLUMNS = (
    *("rank", "node", "iterations", "compute_s", "overlap_s", "exposed_s", "optimizer_s", "unattributed_s"),
    *("sent_bytes", "retransmissions", "cpu_cores", "slowest_share"),
)
_FLOW_COLUMNS = (
    *("traffic_class", "source_node", "source_rank", "destination_node", "destination_rank"),
    *("payload_bytes", "bytes_per_iteration", "retransmissions", "rtt_us", "busy_s"),
)


def write_job_report(job: Job, summary: dict[str, Any], folder: Path | None = None) -> Written:
    """Write the report of a job into a folder; an older report there is replaced file by file.

    Args:
        job: the run.
        summary: result of `ringtap.analysis.job.summary.summarize`.
        folder: target folder, created if missing; None: ``report/`` in the run directory.

    Raises:
        UsageError: the folder cannot be written to.
    """
    folder = folder or job.path / "report"
    parts = None if summary["diagnosis"]["parts"] else parts_table(summary)
    data = summary | {
        "headline": [one_line(line) for line in answer(summary)],
        "sections": [
            _section(title, [parts, *items] if title == "Time" and parts else items)
            for title, items in sections(summary)
        ],
        "ranks": _rows(job.ranks, _RANK_COLUMNS),
        "flows": {"count": len(job.flows), "rows": _rows(job.flows.head(_MAX_FLOWS), _FLOW_COLUMNS)},
        "missing": missing(summary),
        "job_name": whole(job.path.name),
    }
    has_some = len(job.iterations) > 0
    figures = {name: partial(maker, job) if has_some else lambda: None for name, maker in FIGURES.items()}
    paths = write_folder(folder, "job.html.j2", data, figures, job.iterations, _TABLE)
    text = "\n".join(map(plain, [*data["headline"], *_lines(data, ""), *_lines(data, "Time")]))
    return Written(text, paths, folder / "report.json")


def _section(title: str, items: Sequence[str | Table]) -> dict[str, Any]:
    """Return a section of the text as plain values; a table is an item with ``heads`` and ``rows``."""
    plain_items: list[Any] = []
    for item in items:
        if isinstance(item, Table):
            rows = [[one_line(cell) for cell in row] for row in item.rows]
            plain_items.append({"heads": item.heads, "rows": rows})
        else:
            plain_items.append(one_line(item))
    return {"title": title, "items": plain_items}


def _lines(data: dict[str, Any], title: str) -> list[str]:
    return [item for one in data["sections"] if one["title"] == title for item in one["items"] if isinstance(item, str)]


def _rows(table: pd.DataFrame, columns: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {name: plain_value(value) for name, value in zip(columns, row, strict=True)}
        for row in table[list(columns)].itertuples(index=False, name=None)
    ]
