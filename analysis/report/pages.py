"""Report pages and the files beside them, of a sweep and of one job alike."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from ringtap.analysis.canvas import Drawn
from ringtap.analysis.report.page_figures import data_uri, page_figures
from ringtap.analysis.style import title_of
from ringtap.units import format_rate, format_size

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Written:
    """What a report left behind.

    Attributes:
        summary: the outcome in a few lines.
        paths: the files: page, data, table, then those of the figures.
        json_path: report.json.
    """

    summary: str
    paths: list[Path]
    json_path: Path


def render(template: str, data: Mapping[str, Any], drawn: Sequence[Drawn], folder: Path, table: str) -> str:
    """The page, with everything in it.

    Args:
        template: name of its template.
        data: what it says.
        drawn: its figures, whose files are in ``figures/``.
        folder: where report.json and the table are.
        table: name of the table that it offers.
    """
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
        "table": data_uri((folder / table).read_bytes(), "text/csv"),
        "data": data_uri((folder / "report.json").read_bytes(), "application/json"),
    }
    return environment.get_template(template).render(data=data, images=images, downloads=downloads)


def publish(new: Path, folder: Path, table: str, figures: Sequence[str]) -> list[Path]:
    """Rename the new files into place; figures that this report no longer has go.

    Args:
        new: a folder beside them with the page, report.json, the table and ``figures/``.
        folder: where they go.
        table: name of the table.
        figures: names of every figure that a report of this kind may have, in its order.

    Returns:
        The files, as in `Written`.
    """
    (folder / "figures").mkdir(exist_ok=True)
    names = ["report.html", "report.json", table]
    names += [f"figures/{path.name}" for name in figures for path in sorted((new / "figures").glob(f"{name}.*"))]
    for name in names:
        (new / name).replace(folder / name)
    for name in figures:
        for path in (folder / "figures").glob(f"{name}.*"):
            if f"figures/{path.name}" not in names:
                path.unlink()
    shutil.rmtree(new / "figures")
    return [folder / name for name in names]


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value * 100:.{digits}f} %"


def _rate(bps: float | None) -> str:
    return "–" if bps is None else format_rate(bps)


def _size(count: float | None) -> str:
    return "–" if count is None else format_size(count)
