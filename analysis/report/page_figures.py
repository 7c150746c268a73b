"""Figures as a page holds them: Matplotlib's SVG inline, its marks with their words, its colours the page's."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ringtap.analysis.canvas import Drawn
from ringtap.analysis.style import FAINT, INK

# colours that change with the page: on a dark one the sheet is dark and ink is light
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
_BEFORE_SVG = re.compile(r"^.*?<svg[^>]*>", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>\s*|<defs>\s*<style.*?</style>\s*</defs>\s*", re.DOTALL)
_VIEW_BOX = re.compile(r'viewBox="([-0-9. ]+)"')
_ID = re.compile(r'\bid="([^"]*)"')
_REFERENCE = re.compile(r'(url\(|xlink:href=")#')
_ATTRIBUTE_COLOUR = re.compile(r"(fill|stroke): (#[0-9a-f]{6})")
_LEAST_ID = re.compile(r' id="(?!f\d+-(?:marks-|m[0-9a-f]{8,}|p[0-9a-f]{8,}|C\d))[^"]*"')


@dataclass(frozen=True)
class PageFigure:
    """A figure for the template.

    Attributes:
        name: file name without its ending.
        caption: what it shows.
        svg: the drawing, to be put in unescaped.
        csv: its numbers as a data URI.
        parts: the same in pieces that use the drawing, one below the other, for a narrow page; unescaped, too.
    """

    name: str
    caption: str
    svg: str
    csv: str
    parts: str


def page_figures(drawn: Sequence[Drawn], folder: Path) -> list[PageFigure]:
    """Figures whose files were written into a folder, as the page holds them."""
    return [_page_figure(number, one, folder) for number, one in enumerate(drawn)]


def data_uri(content: bytes, kind: str) -> str:
    """Content as an address of its own."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _page_figure(number: int, drawn: Drawn, folder: Path) -> PageFigure:
    text = (folder / f"{drawn.name}.svg").read_text(encoding="utf-8")
    view_box = _VIEW_BOX.search(text)
    if view_box is None:
        raise ValueError(f"{drawn.name}.svg has no viewBox")
    body = _METADATA.sub("", _BEFORE_SVG.sub("", text, count=1)).replace("</svg>", "").strip()
    body = _with_words(body, drawn.marks)
    # ids are those of one file; a page has several
    body = _ID.sub(rf'id="f{number}-\1"', body)
    body = _LEAST_ID.sub("", _REFERENCE.sub(rf"\1#f{number}-", body))
    body = _ATTRIBUTE_COLOUR.sub(_variable, body)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" class="figure" role="img" '
        f'viewBox="{view_box[1]}" aria-label="{html.escape(drawn.caption)}">\n<g id="f{number}-all">{body}</g>\n</svg>'
    )
    parts = "\n".join(
        f'<svg class="figure part" aria-hidden="true" viewBox="{" ".join(f"{value:g}" for value in box)}">'
        f'<use href="#f{number}-all"/></svg>'
        for box in drawn.boxes
    )
    csv = data_uri((folder / f"{drawn.name}.csv").read_bytes(), "text/csv")
    return PageFigure(drawn.name, drawn.caption, svg, csv, parts)


def _variable(found: re.Match[str]) -> str:
    name = _COLOURS.get(found[2])
    return found[0] if name is None else f"{found[1]}: var(--{name}, {found[2]})"


def _with_words(body: str, marks: dict[str, list[str]]) -> str:
    """Each mark with its words as a title, which browsers show where it is pointed at, without any script."""
    for name, words in marks.items():
        start = body.index(f'<g id="{name}">')
        # the mark's shape, unless an earlier one is the same, then a group with one use of it for each pair of numbers
        uses = body.index("<g clip-path", start)
        end = body.index("</g>", uses)
        parts = body[uses:end].split("/>")
        if len(parts) != len(words) + 1:
            raise ValueError(f"{name} has {len(parts) - 1} marks for {len(words)} words")
        said = [f"><title>{html.escape(text)}</title></use>" for text in words]
        filled = "".join(part + text for part, text in zip(parts, [*said, ""], strict=True))
        body = body[:uses] + filled + body[end:]
    return body
