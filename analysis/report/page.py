"""Writes report pages and the files beside them, for sweeps and for single jobs."""

from __future__ import annotations

import base64
import functools
import html
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jinja2
import pandas as pd

from ringtap.analysis.plots.figure import Drawn, draw
from ringtap.analysis.plots.style import FAINT, INK, title_of
from ringtap.core.errors import UsageError
from ringtap.core.units import format_rate, format_size
from ringtap.core.untrusted_files import make_folder

# colour in a figure -> CSS variable of the page, which has other values in dark mode
_COLOURS = {
    "#ffffff": "sheet",
    INK: "ink",
    FAINT: "faint",
    "#dddddd": "grid",
    "#555555": "edge",
    "#444444": "tick",
    "#0072b2": "blue",
    "#d55e00": "vermilion",
    "#009e73": "green",
    "#aa4499": "purple",
    "#000000": "black",
}
_POINTS_PER_REM = 6.9  # of the largest size at which a figure is shown, for labels not to be huge
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
# ids that something refers to: marks, shapes of markers, clip paths and shapes of collections
_USED_ID = re.compile(r"marks-|[mp][0-9a-f]{8,}|C\d")

ElementTree.register_namespace("", _SVG[1:-1])
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")


@dataclass(frozen=True)
class PageFigure:
    """A figure for the template.

    Attributes:
        name: file name without its ending.
        caption: its caption.
        svg: the drawing, inserted unescaped.
        csv: its numbers as a data URI.
        parts: SVG of its panels, one below the other, for a narrow page; they refer to the drawing; also unescaped.
    """

    name: str
    caption: str
    svg: str
    csv: str
    parts: str


def data_uri(content: bytes, kind: str) -> str:
    """Return content as a data URI."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _page_figure(number: int, drawn: Drawn, folder: Path) -> PageFigure:
    """Read the files of a figure, in the form that the page embeds."""
    root = ElementTree.parse(folder / f"{drawn.name}.svg").getroot()
    view_box = root.attrib["viewBox"]
    for unneeded in (root.find(f"{_SVG}metadata"), root.find(f"{_SVG}defs[{_SVG}style]")):
        if unneeded is not None:
            root.remove(unneeded)
    _add_titles(root, drawn.marks)
    for element in root.iter():
        _adapt(element, f"f{number}-")
    width_rem = float(view_box.split()[2]) / _POINTS_PER_REM
    shown = {"class": "figure", "role": "img", "style": f"max-width:{width_rem:.4g}rem", "viewBox": view_box}
    svg = ElementTree.Element(f"{_SVG}svg", shown | {"aria-label": drawn.caption})
    ElementTree.SubElement(svg, f"{_SVG}g", {"id": f"f{number}-all"}).extend(root)
    parts = "\n".join(
        f'<svg class="figure part" role="img" aria-label="{part} of {len(drawn.boxes)}: {html.escape(drawn.caption)}" '
        f'viewBox="{" ".join(f"{value:g}" for value in box)}"><use href="#f{number}-all"/></svg>'
        for part, box in enumerate(drawn.boxes, 1)
    )
    csv = data_uri((folder / f"{drawn.name}.csv").read_bytes(), "text/csv")
    return PageFigure(drawn.name, drawn.caption, ElementTree.tostring(svg, encoding="unicode"), csv, parts)


def _adapt(element: ElementTree.Element, prefix: str) -> None:
    """Give an element ids that are unique within the page, which has several figures, and the page's colours."""
    attributes = element.attrib
    if not _USED_ID.match(attributes.get("id", "")):
        attributes.pop("id", None)
    for name, value in attributes.items():
        if name == "id":
            attributes[name] = prefix + value
        elif name == _LINK:
            attributes[name] = value.replace("#", f"#{prefix}", 1)
        elif name == "style":
            declarations = (one.replace("url(#", f"url(#{prefix}") for one in value.split("; "))
            attributes[name] = "; ".join(map(_with_variable, declarations))
        else:
            attributes[name] = value.replace("url(#", f"url(#{prefix}")


def _with_variable(declaration: str) -> str:
    name, _, value = declaration.partition(": ")
    if name not in ("fill", "stroke") or value not in _COLOURS:
        return declaration
    return f"{name}: var(--{_COLOURS[value]}, {value})"


def _add_titles(root: ElementTree.Element, marks: Mapping[str, Sequence[str]]) -> None:
    """Give each mark its text as an SVG title, which browsers show as a tooltip without a script."""
    for name, texts in marks.items():
        # a marker of two colours is drawn twice: the first time is below
        drawn = root.find(f".//{_SVG}g[@id='{name}']/{_SVG}g[@clip-path]")
        uses = [] if drawn is None else drawn.findall(f"{_SVG}use")
        if len(uses) != len(texts):
            raise ValueError(f"{name} has {len(uses)} marks for {len(texts)} texts")
        for use, text in zip(uses, texts, strict=True):
            ElementTree.SubElement(use, f"{_SVG}title").text = text


_MAX_EMBEDDED_BYTES = 4_000_000
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, repr=False)
class Written:
    """Summary and files of a written report.

    Attributes:
        summary: the results in a few lines.
        paths: the files: page, data, table, then those of the figures.
        json_path: report.json.
    """

    summary: str
    paths: list[Path]
    json_path: Path

    def __repr__(self) -> str:
        return f"<Report {self.json_path.parent}: {self.summary.splitlines()[0]}>"


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= _FILTERS
    return environment


def render(template: str, data: Mapping[str, Any], drawn: Sequence[Drawn], folder: Path, table: str) -> str:
    """Render the page with everything embedded.

    Args:
        template: name of its template.
        data: its content.
        drawn: its figures, whose files are in ``figures/``.
        folder: folder of report.json and of the table.
        table: name of the table to download; a large one stays beside the page.
    """
    images = {one.name: _page_figure(number, one, folder / "figures") for number, one in enumerate(drawn)}
    is_small = (folder / table).stat().st_size <= _MAX_EMBEDDED_BYTES
    downloads = {
        "table": data_uri((folder / table).read_bytes(), "text/csv") if is_small else table,
        "data": data_uri((folder / "report.json").read_bytes(), "application/json"),
    }
    return _environment().get_template(template).render(data=data, images=images, downloads=downloads)


def write_folder(
    folder: Path,
    template: str,
    data: Mapping[str, Any],
    figures: Mapping[str, Callable[[], Drawn | None]],
    numbers: pd.DataFrame,
    table: str,
) -> list[Path]:
    """Write a page with its numbers and figures into a folder; an older report there is replaced file by file.

    Args:
        folder: target folder, created if missing.
        template: name of the page's template.
        data: numbers of the page, also those of report.json.
        figures: functions that draw the figures, by file name and in order; one returns None without data for it.
        numbers: the table.
        table: its file name.

    Returns:
        The files, as in `Written`.

    Raises:
        UsageError: the folder cannot be written to.
    """
    try:
        make_folder(folder)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as name:
            new = Path(name)
            (new / "figures").mkdir()
            drawn = draw(figures.values(), new / "figures")
            numbers.to_csv(new / table, index=False)
            (new / "report.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            page = render(template, data, drawn, new, table)
            (new / "report.html").write_text(page, encoding="utf-8", errors="replace")
            return _publish(new, folder, table, list(figures))
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from error


def _publish(new: Path, folder: Path, table: str, figures: Sequence[str]) -> list[Path]:
    """Move the new files into place; remove figures that this report no longer has."""
    make_folder(folder / "figures")
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


def _or_dash(show: Callable[..., str]) -> Callable[..., str]:
    """Return a filter that shows a number, or a dash for one that is not known."""
    return lambda value, *options: "–" if value is None else show(value, *options)


def _change(value: float) -> str:
    percent = round(value * 100)
    return f"{percent:+d} %".replace("-", "−") if percent else "0 %"


_FILTERS: dict[str, Callable[..., str]] = {
    "num": _or_dash(lambda value, digits=2: f"{value:,.{digits}f}"),
    "pct": _or_dash(lambda value, digits=0: f"{value * 100:.{digits}f} %"),
    "change": _or_dash(_change),
    "ms": _or_dash(lambda seconds: f"{seconds * 1e3:,.2f}"),
    "rate": _or_dash(format_rate),
    "size": _or_dash(format_size),
    "kind": title_of,
}
