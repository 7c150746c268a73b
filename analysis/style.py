"""How figures look: one colour a model, one marker and line a traffic kind, the same in every figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Okabe and Ito's colours, told apart with any colour vision
_COLOURS = {"bert-large": "#0072B2", "vgg16": "#D55E00", "densenet161": "#009E73", "resnet50": "#AA4499"}
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

INK, FAINT = "#222222", "#8a8a8a"
RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.edgecolor": "#555555",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.5,
    "lines.markersize": 5.5,
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "svg.hashsalt": "ringtap",
    "svg.fonttype": "path",
}


@dataclass(frozen=True)
class Look:
    """Colour, marker and line of a series."""

    colour: str
    marker: str
    line: Any


def looks(series: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Look]:
    """A look for every (model, traffic kind), fixed for those of the thesis and in order of appearance for others."""
    models = [name for name in dict.fromkeys(model for model, _ in series) if name not in _COLOURS]
    kinds = [name for name in dict.fromkeys(kind for _, kind in series) if name not in _MARKS]
    colours = _COLOURS | {name: _OTHER_COLOURS[i % len(_OTHER_COLOURS)] for i, name in enumerate(models)}
    marks = _MARKS | {name: _OTHER_MARKS[i % len(_OTHER_MARKS)] for i, name in enumerate(kinds)}
    return {(model, kind): Look(colours[model], *marks[kind]) for model, kind in series}


def title_of(kind: str) -> str:
    """How figures and tables call a traffic kind."""
    return TITLES.get(kind, kind)
