"""Writes a report: one HTML page that needs nothing else, figures, points.csv and report.json."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from ringtap.analysis import points
from ringtap.analysis.report import data as report_data
from ringtap.analysis.report import figures
from ringtap.analysis.report.figure_parts import Setting
from ringtap.analysis.report.measured import Measured
from ringtap.analysis.report.pages import Written, publish, render
from ringtap.analysis.report.tails import tails
from ringtap.analysis.style import plain
from ringtap.errors import UsageError

_TABLE = "points.csv"


def write_report(measured: Measured, folder: Path | None = None) -> Written:
    """Write the report of a sweep or of a table into a folder; an older report there is replaced file by file.

    Args:
        measured: what `ringtap.analysis.report.measured.of_sweep` or `of_table` made of one.
        folder: made if missing; without it ``report/`` in the sweep, ``<table>-report`` here for a table.

    Raises:
        UsageError: the folder cannot be written to.
    """
    folder = folder or measured.folder
    found = [tails(one) for one in measured.series]
    data = report_data.collect(measured, found)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as name:
            new = Path(name)
            (new / "figures").mkdir()
            setting = Setting(measured.capacity_gbps, measured.scale)
            drawn = figures.draw(measured.series, found, setting, new / "figures")
            table = points.table([point for one in measured.series for point in one.points])
            table.to_csv(new / _TABLE, index=False)
            text = json.dumps(data, indent=1, allow_nan=False) + "\n"
            (new / "report.json").write_text(text, encoding="utf-8")
            page = render("report.html.j2", data, drawn, new, _TABLE)
            (new / "report.html").write_text(page, encoding="utf-8", errors="replace")
            return Written(_summary(data), publish(new, folder, _TABLE, figures.NAMES), folder / "report.json")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from error


def _summary(data: dict[str, Any]) -> str:
    run = data["run"]
    lines = [f"{run['name']}: {run['status']}" + (f", {run['why']}" if run["why"] else "")]
    lines += data["headline"]
    failed = [item for item in data["checks"] if item["ok"] is False]
    lines += [f"  not as expected: {item['subject']}: {item['expected']}; {item['found']}" for item in failed]
    return "\n".join(map(plain, lines))
