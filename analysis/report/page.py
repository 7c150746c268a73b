"""Writes report pages and the files beside them, for sweeps and for single jobs."""

from __future__ import annotations

import base64
import copy
import functools
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
_REM_PER_POINT = 11 / 9 / 16  # text of 9 points, the smallest in a figure, has 11 pixels
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
# ids that something refers to: marks, shapes of markers, clip paths and shapes of collections
_DECIMALS = re.compile(r"\d+\.\d{3,}")  # of a point in a figure, whose hundredth nobody sees
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_USED_ID = re.compile(r"marks-|[mp][0-9a-f]{8,}|C\d")

ElementTree.register_namespace("", _SVG[1:-1])
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")


@dataclass(frozen=True)
class PageFigure:
    """A figure for the template.

    Attributes:
        name: file name without its ending.
        caption: its caption.
        svgs: its panels, or the whole drawing, inserted unescaped.
        keys: entries of its legend, likewise.
        width_rem: least width of a panel, at which its text can be read.
        box: width and height of the whole drawing.
        csv: its numbers as a data URI.
    """

    name: str
    caption: str
    svgs: list[str]
    keys: list[str]
    width_rem: float
    box: str
    csv: str


def data_uri(content: bytes, kind: str) -> str:
    """Return content as a data URI."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _page_figure(number: int, drawn: Drawn, folder: Path) -> PageFigure:
    """Read the files of a figure, in the form that the page embeds."""
    root = ElementTree.parse(folder / f"{drawn.name}.svg").getroot()
    view_box = root.attrib["viewBox"]
    _add_titles(root, drawn.marks)
    for group in root.iter(f"{_SVG}g"):
        _share_style(group)
    shapes = {
        shape.attrib["id"]: copy.deepcopy(shape)
        for defs in root.iter(f"{_SVG}defs")
        for shape in defs
        if "id" in shape.attrib
    }
    groups: dict[str, list[ElementTree.Element]] = {}
    for group in root.iter(f"{_SVG}g"):
        groups.setdefault(group.attrib.get("id", ""), []).append(group)
    made: dict[str, list[ElementTree.Element]] = {"panel": [], "key": []}
    for kind, boxes in (("panel", drawn.boxes), ("key", drawn.keys)):
        for at, box in enumerate(boxes):
            place = " ".join(f"{value:g}" for value in box)
            found = groups.get(f"{kind}-{at}", [])
            made[kind].append(_drawing(found, shapes, place, f"f{number}{kind[0]}{at}-"))
    if not drawn.boxes:
        made["panel"].append(_drawing(list(root.iterfind(f"{_SVG}g")), shapes, view_box, f"f{number}-"))
    svgs = made["panel"]
    for at, svg in enumerate(svgs, 1):
        name = drawn.caption if len(svgs) == 1 else f"{at} of {len(svgs)}: {drawn.caption}"
        svg.attrib |= {"class": "figure", "role": "img", "aria-label": name}
    for key, box in zip(made["key"], drawn.keys, strict=True):
        style = f"width:calc({box[2] * _REM_PER_POINT:.4g}*var(--key))"
        key.attrib |= {"class": "key", "role": "img", "aria-label": "".join(key.itertext()).strip(), "style": style}
    _name_styles(svgs + made["key"], f"f{number}s")
    width_rem = (drawn.boxes[0][2] if drawn.boxes else float(view_box.split()[2])) * _REM_PER_POINT
    csv = data_uri((folder / f"{drawn.name}.csv").read_bytes(), "text/csv")
    panels, keys = ([ElementTree.tostring(one, encoding="unicode") for one in each] for each in made.values())
    return PageFigure(drawn.name, drawn.caption, panels, keys, width_rem, view_box, csv)


def _drawing(
    groups: Sequence[ElementTree.Element], shapes: Mapping[str, ElementTree.Element], view_box: str, prefix: str
) -> ElementTree.Element:
    """Return groups of a figure as a drawing that needs nothing else in the page: copies of the shapes are in it."""
    svg = ElementTree.Element(f"{_SVG}svg", {"viewBox": view_box})
    own = {element.attrib.get("id") for group in groups for element in group.iter()}
    used = {name for group in groups for element in group.iter() for name in _references(element)}
    defs = ElementTree.SubElement(svg, f"{_SVG}defs")
    defs.extend(copy.deepcopy(shapes[name]) for name in sorted(used - own) if name in shapes)
    svg.extend(groups)
    for element in svg.iter():
        _adapt(element, prefix)
    return svg


def _name_styles(drawings: Sequence[ElementTree.Element], prefix: str) -> None:
    """Replace styles by classes, as each of them is that of hundreds of elements; the first drawing defines them."""
    names: dict[str, str] = {}
    for element in (one for drawing in drawings for child in drawing for one in child.iter()):
        if style := element.attrib.pop("style", ""):
            element.attrib["class"] = names.setdefault(style, f"{prefix}{len(names)}")
    rules = ElementTree.Element(f"{_SVG}style")
    rules.text = "".join(f".{name}{{{style}}}" for style, name in names.items())
    drawings[0].insert(0, rules)


def _share_style(group: ElementTree.Element) -> None:
    """Give a group the style that all its marks have; each of them keeps none of its own."""
    styles = {mark.attrib.get("style") for mark in group if mark.tag == f"{_SVG}use"}
    if len(styles) == 1 and (style := styles.pop()) is not None and "style" not in group.attrib:
        group.attrib["style"] = style
        for mark in group.iterfind(f"{_SVG}use"):
            del mark.attrib["style"]


def _references(element: ElementTree.Element) -> list[str]:
    """Return the ids that an element refers to."""
    found = [match for value in element.attrib.values() for match in _REFERENCE.findall(value)]
    return [*found, element.attrib[_LINK][1:]] if _LINK in element.attrib else found


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
            attributes[name] = "; ".join(map(_with_variable, value.split("; ")))
        elif name in ("d", "x", "y", "transform"):
            attributes[name] = _DECIMALS.sub(lambda found: f"{float(found[0]):.2f}", value)
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


_MAX_EMBEDDED_BYTES = 500_000  # of a file; more would keep a browser from showing the page for seconds
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


def render(
    template: str,
    data: Mapping[str, Any],
    drawn: Sequence[Drawn],
    folder: Path,
    table: str,
    is_alone: bool = False,
) -> str:
    """Render the page with everything embedded.

    Args:
        template: name of its template.
        data: its content.
        drawn: its figures, whose files are in ``figures/``.
        folder: folder of report.json and of the table.
        table: name of the table to download.
        is_alone: no file lies beside the page; otherwise large ones do, and are not in it.
    """
    images = {one.name: _page_figure(number, one, folder / "figures") for number, one in enumerate(drawn)}
    downloads = {
        key: data_uri((folder / name).read_bytes(), kind)
        if (folder / name).stat().st_size <= _MAX_EMBEDDED_BYTES or is_alone
        else name
        for key, name, kind in (("table", table, "text/csv"), ("data", "report.json", "application/json"))
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
