"""Writes a report: one HTML page that needs nothing else, figures, points.csv and report.json."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from ringtap.analysis import points
from ringtap.analysis.canvas import Drawn
from ringtap.analysis.report import data as report_data
from ringtap.analysis.report import figures
from ringtap.analysis.report.figure_parts import Setting
from ringtap.analysis.report.measured import Measured
from ringtap.analysis.report.page_figures import data_uri, page_figures
from ringtap.analysis.report.tails import tails
from ringtap.analysis.style import plain, title_of
from ringtap.errors import UsageError
from ringtap.units import format_rate, format_size

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Written:
    """What `write_report` left behind.

    Attributes:
        summary: the outcome in a few lines.
        paths: the files: page, data, points, then those of the figures.
        json_path: report.json.
    """

    summary: str
    paths: list[Path]
    json_path: Path


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
            table.to_csv(new / "points.csv", index=False)
            text = json.dumps(data, indent=1, allow_nan=False) + "\n"
            (new / "report.json").write_text(text, encoding="utf-8")
            (new / "report.html").write_text(_page(data, drawn, new), encoding="utf-8")
            return _published(new, folder, data)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from error


def _published(new: Path, folder: Path, data: dict[str, Any]) -> Written:
    """Rename the new files into place; figures that this report no longer has go."""
    (folder / "figures").mkdir(exist_ok=True)
    names = ["report.html", "report.json", "points.csv"]
    names += [f"figures/{path.name}" for name in figures.NAMES for path in sorted((new / "figures").glob(f"{name}.*"))]
    for name in names:
        (new / name).replace(folder / name)
    for name in figures.NAMES:
        for path in (folder / "figures").glob(f"{name}.*"):
            if f"figures/{path.name}" not in names:
                path.unlink()
    shutil.rmtree(new / "figures")
    run = data["run"]
    lines = [f"{run['name']}: {run['status']}" + (f", {run['why']}" if run["why"] else "")]
    lines += data["headline"]
    failed = [item for item in data["checks"] if item["ok"] is False]
    lines += [f"  not as expected: {item['subject']}: {item['expected']}; {item['found']}" for item in failed]
    return Written("\n".join(map(plain, lines)), [folder / name for name in names], folder / "report.json")


def _page(data: dict[str, Any], drawn: Sequence[Drawn], folder: Path) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"num": _number, "pct": _percent, "rate": _rate, "size": _size, "kind": title_of}
    images = {one.name: one for one in page_figures(drawn, folder / "figures")}
    downloads = {
        "points": data_uri((folder / "points.csv").read_bytes(), "text/csv"),
        "data": data_uri((folder / "report.json").read_bytes(), "application/json"),
    }
    return environment.get_template("report.html.j2").render(data=data, images=images, downloads=downloads)


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value * 100:.{digits}f} %"


def _rate(bps: float | None) -> str:
    return "–" if bps is None else format_rate(bps)


def _size(count: float | None) -> str:
    return "–" if count is None else format_size(count)
