"""Style of figures: one colour per model and one marker and line per traffic kind, in every figure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Okabe and Ito's colours, which can be distinguished with any colour vision
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#AA4499"
_COLOURS = {"bert-large": BLUE, "vgg16": VERMILION, "densenet161": GREEN, "resnet50": PURPLE}
_OTHER_COLOURS = ("#E69F00", "#56B4E9", "#000000", "#999933")
TITLES = {
    "iperf": "iperf",
    "consistent": "consistent web-search",
    "burst": "burst web-search",
    "none": "no cross traffic",
}
_MARKS: dict[str, tuple[str, Any]] = {
    "iperf": ("o", (0, (1, 1.2))),
    "consistent": ("s", "-"),
    "burst": ("^", (0, (5, 2))),
}
_OTHER_MARKS: tuple[tuple[str, Any], ...] = (("D", "-."), ("v", (0, (3, 1, 1, 1, 1, 1))), ("P", (0, (8, 2))))

INK, FAINT, LIGHT = "#222222", "#8a8a8a", "#DDDDDD"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, *_OTHER_COLOURS)
RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.edgecolor": "#555555",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titley": 1.0,  # without a fixed position, Matplotlib measures every label of the axis
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "xtick.bottom": False,  # the grid lines show the ticks
    "ytick.left": False,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.5,
    "lines.markersize": 5.5,
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "text.color": INK,
    "text.parse_math": False,  # names of models may contain any character
    "svg.hashsalt": "ringtap",
    "svg.fonttype": "none",  # text stays text, which is searchable and a fifth of the size
}
# characters that XML forbids
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


Key = tuple[str, str, str]  # model, traffic kind, transport


@dataclass(frozen=True)
class Look:
    """Colour, marker and line of a series; the markers of every transport but the first are hollow."""

    colour: str
    marker: str
    line: Any
    hollow: bool = False

    @property
    def marks(self) -> dict[str, Any]:
        """Keyword arguments of its markers for Matplotlib."""
        face, edge = ("white", self.colour) if self.hollow else (self.colour, "white")
        width = 1.2 if self.hollow else 0.6
        return {
            "marker": self.marker,
            "color": self.colour,
            "markerfacecolor": face,
            "markeredgecolor": edge,
            "markeredgewidth": width,
        }


def looks(series: Sequence[Key]) -> dict[Key, Look]:
    """Assign a look to every series: fixed for the thesis's models and kinds, by order of appearance for others."""
    models = [name for name in dict.fromkeys(model for model, _, _ in series) if name not in _COLOURS]
    kinds = [name for name in dict.fromkeys(kind for _, kind, _ in series) if name not in _MARKS]
    transports = list(dict.fromkeys(transport for _, _, transport in series))
    colours = _COLOURS | {name: _OTHER_COLOURS[i % len(_OTHER_COLOURS)] for i, name in enumerate(models)}
    marks = _MARKS | {name: _OTHER_MARKS[i % len(_OTHER_MARKS)] for i, name in enumerate(kinds)}
    return {
        (model, kind, transport): Look(colours[model], *marks[kind], hollow=transports.index(transport) > 0)
        for model, kind, transport in series
    }


def title_of(kind: str) -> str:
    """Name of a traffic kind in figures and tables."""
    return TITLES.get(kind, kind)


def plain(text: str) -> str:
    """Return text of unknown origin as one line, with the characters that XML forbids replaced."""
    return " ".join(_FORBIDDEN.sub("\ufffd", str(text)).split())
