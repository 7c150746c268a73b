"""Draws an iteration: what each rank computes and communicates over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ringtap.core.errors import UsageError, file_errors
from ringtap.core.installation import install_command
from ringtap.workload.execution_trace import NodeType
from ringtap.workload.simulate_iterations import Span

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_RANKS = 16
SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, which can be distinguished with any colour vision
_COLOURS = {"forward": "#0072B2", "backward": "#56B4E9", "other computation": "#999999", "communication": "#D55E00"}
_LANE, _WIDTH_IN, _LANE_IN = 0.38, 9.0, 0.42


def new_figure(path: Path, width_in: float, height_in: float) -> Figure:
    """Return an empty figure for a file.

    Raises:
        UsageError: matplotlib is missing, or the file's ending is unknown.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(f"a picture needs matplotlib: {install_command('report')}") from error
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path} is no picture: give a name that ends with {', '.join(SUFFIXES)}")
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure.

    Raises:
        UsageError: the file cannot be written.
    """
    with file_errors(path, "cannot be written"):
        figure.savefig(path, dpi=160)


def write_timeline(spans: Sequence[Sequence[Span]], path: Path, title: str) -> None:
    """Draw the last iteration of a simulation, two lanes per rank.

    Args:
        spans: the nodes of each rank; the first `MAX_RANKS` are drawn.
        path: the file to write; its ending chooses the format.
        title: title of the picture.

    Raises:
        UsageError: matplotlib is missing, or the file cannot be written.
    """
    ranks = spans[:MAX_RANKS]
    first_s = min((span.begin_s for trace in ranks for span in trace), default=0.0)
    figure = new_figure(path, _WIDTH_IN, 1.3 + 2 * _LANE_IN * len(ranks))
    axes = figure.subplots()
    for rank, trace in enumerate(ranks):
        bars: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for span in trace:
            bars[_kind(span)].append((1e3 * (span.begin_s - first_s), 1e3 * (span.end_s - span.begin_s)))
        for kind, colour in _COLOURS.items():
            lane = rank + (0.5 if kind == "communication" else 0.08)
            label, edge = kind if rank == 0 else None, "white" if kind == "communication" else "none"
            axes.broken_barh(bars[kind], (lane, _LANE), facecolors=colour, edgecolors=edge, linewidths=0.5, label=label)
    axes.set_ylim(len(ranks), 0)
    axes.set_yticks([rank + 0.48 for rank in range(len(ranks))], [f"rank {rank}" for rank in range(len(ranks))])
    axes.set_xlim(left=0)
    axes.set_xlabel("time since the begin of the iteration, ms")
    hidden = f"; {len(ranks)} of {len(spans)} ranks" if len(spans) > len(ranks) else ""
    axes.set_title(title + hidden, fontsize=10, parse_math=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(_COLOURS), frameon=False)
    save_figure(figure, path)


def _kind(span: Span) -> str:
    if span.node.type != NodeType.COMP:
        return "communication"
    first = span.node.name.split(" ")[0].rstrip("0123456789")
    return first if first in _COLOURS else "other computation"
