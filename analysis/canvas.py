"""What every figure is drawn on: an empty sheet in the project's style, its legend, and its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ringtap.analysis.style import RC


@contextmanager
def styled() -> Iterator[None]:
    """Draw and save in the project's style."""
    with mpl.rc_context(cast(Any, RC)):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; width and height in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def legend(figure: Figure, handles: Sequence[Artist], columns: int = 2) -> None:
    """One legend below everything."""
    figure.legend(handles=list(handles), loc="outside lower center", ncols=min(columns, len(handles)), handlelength=3.2)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and SVG; returns both paths."""
    paths = []
    for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None, "Creator": None})):
        path = folder / f"{name}{suffix}"
        figure.savefig(path, metadata=metadata)
        paths.append(path)
    return paths
