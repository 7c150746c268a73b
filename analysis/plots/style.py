"""Defines the style of figures: one colour per model and one marker and line per traffic kind, in every figure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringtap.core.run_directory_schema import SIMULATED

# Okabe and Ito's colours, which can be distinguished with any colour vision
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#AA4499"
_COLOURS = {"bert-large": BLUE, "vgg16": VERMILION, "densenet161": GREEN, "resnet50": PURPLE}
_OTHER_COLOURS = ("#E69F00", "#56B4E9", "#000000", "#999933")
TITLES = {
    "iperf": "iperf",
    "consistent": "consistent web-search",
    "burst": "burst web-search",
    "none": "no cross traffic",
    SIMULATED: "simulated constant",
}
_MARKS: dict[str, tuple[str, Any]] = {
    "iperf": ("o", (0, (1, 1.2))),
    "consistent": ("s", "-"),
    "burst": ("^", (0, (5, 2))),
}
_OTHER_MARKS: tuple[tuple[str, Any], ...] = (("D", "-."), ("v", (0, (3, 1, 1, 1, 1, 1))), ("P", (0, (8, 2))))
_TRANSPORT_MARKS: tuple[tuple[str, Any], ...] = (
    ("o", "-"), ("s", (0, (3, 1, 1, 1))), ("^", (0, (1, 1.2))), ("D", (0, (5, 2))),
)  # fmt: skip
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
_MODEL_LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), "-.", (0, (3, 1, 1, 1, 1, 1)), (0, (8, 2)))
_FILLS = ("left", "bottom", "right", "top")

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
    "legend.fontsize": 9.0,
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


Key = tuple[str, str, str]  # model, traffic kind, and transport or collective


@dataclass(frozen=True)
class Look:
    """Colour, marker and line of a series; ``transport`` is its number, by which its markers are filled."""

    colour: str
    marker: str
    line: Any
    transport: int = 0

    @property
    def marks(self) -> dict[str, Any]:
        """Keyword arguments of its markers for Matplotlib."""
        other = self.transport > 0
        return {
            "marker": self.marker,
            "color": self.colour,
            "markerfacecolor": "white" if self.transport == 1 else self.colour,
            "markeredgecolor": self.colour if other else "white",
            "markeredgewidth": 1.2 if other else 0.6,
            # from the third transport on, half of each marker is white
            "fillstyle": _FILLS[(self.transport - 2) % len(_FILLS)] if self.transport > 1 else "full",
            "markerfacecoloralt": "white",
        }


def looks(series: Sequence[Key]) -> dict[Key, Look]:
    """Assign a look to every series: fixed for the thesis's models and kinds, by order of appearance for others."""
    models = [name for name in dict.fromkeys(model for model, _, _ in series) if name not in _COLOURS]
    kinds = [name for name in dict.fromkeys(kind for _, kind, _ in series) if name not in _MARKS]
    transports = list(dict.fromkeys(transport for _, _, transport in series))
    colours = _COLOURS | {name: _OTHER_COLOURS[i % len(_OTHER_COLOURS)] for i, name in enumerate(models)}
    marks = _MARKS | {name: _OTHER_MARKS[i % len(_OTHER_MARKS)] for i, name in enumerate(kinds)}
    return {
        (model, kind, transport): Look(colours[model], *marks[kind], transports.index(transport))
        for model, kind, transport in series
    }


def model_looks(series: Sequence[Key], has_kinds: bool) -> dict[Key, Look]:
    """Assign a look to every series of figures with several models in a panel, which differ in more than colour.

    Args:
        series: the series.
        has_kinds: there are several traffic kinds in a panel, whose lines differ.
    """
    models, found = list(dict.fromkeys(model for model, _, _ in series)), looks(series)
    if len(models) == 1:
        return found
    numbers = {key: models.index(key[0]) for key in series}
    return {
        key: replace(
            found[key],
            marker=MARKS[number % len(MARKS)],
            line=found[key].line if has_kinds else _MODEL_LINES[number % len(_MODEL_LINES)],
        )
        for key, number in numbers.items()
    }


def transport_looks(series: Sequence[Key]) -> dict[Key, Look]:
    """Assign a look to every series for figures of a single traffic kind: transports differ in marker and line."""
    models, names = looks(series), list(dict.fromkeys(transport for _, _, transport in series))
    return {key: look_of_transport(models[key].colour, names.index(key[2])) for key in series}


def look_of_transport(colour: str, number: int) -> Look:
    """Return the look of the transport of a number in figures of a single traffic kind."""
    marker, line = _TRANSPORT_MARKS[number % len(_TRANSPORT_MARKS)]
    return Look(colour, marker, line, number)


def title_of(kind: str) -> str:
    """Name of a traffic kind in figures and tables."""
    return TITLES.get(kind, kind.replace(f"{SIMULATED}-", f"{SIMULATED} "))


def joined(*parts: str) -> str:
    """Return the parts of a name that are not empty, with commas between them."""
    return ", ".join(part for part in parts if part)


def plain(text: str) -> str:
    """Return text of unknown origin as one line, with the characters that XML forbids replaced."""
    return " ".join(_FORBIDDEN.sub("\ufffd", str(text)).split())
