"""Draws figures on your own axes: iteration times, distributions, fits, traffic matrices, rates, timelines.

Each function takes what it draws, then Matplotlib axes, then properties of its lines, and returns what it drew.
Without axes it makes a figure 3.3 inches wide, a column of a paper, in ringtap's style; `style` gives that style to a
figure of your own. The colours can be told apart with any colour vision. The reports use the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import matplotlib as mpl
import numpy as np
import pandas as pd
from cycler import cycler
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ringtap.analysis.job.iterations_of_ranks import check_iteration
from ringtap.analysis.job.run import Job
from ringtap.analysis.plots.style import BLUE, COLOURS, FAINT, GREEN, INK, LIGHT, PURPLE, RC, VERMILION, plain
from ringtap.analysis.statistics.to_arrays import Array, Values, sample
from ringtap.core.check_api_arguments import instance_of
from ringtap.core.errors import UsageError

if TYPE_CHECKING:
    from ringtap.analysis.model.fit_result import BandKind, FitResult
    from ringtap.analysis.pcap.captured_traffic import Traffic

Transform = Callable[[Any], Any]

PAPER_WIDTH_IN, PAPER_HEIGHT_IN = 3.3, 2.3
_LEGEND_LINE_IN = 0.15
_PAPER = {
    "font.size": 8.0,
    "axes.titlesize": 8.0,
    "legend.fontsize": 7.0,
    "xtick.labelsize": 7.0,
    "ytick.labelsize": 7.0,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.0,
    "legend.handlelength": 1.4,
    "axes.prop_cycle": cycler(color=COLOURS),
    "text.parse_math": True,
    "pdf.fonttype": 42,  # text stays text in a PDF, which some publishers require
    "savefig.bbox": "tight",
}
# more iterations are drawn as the medians and the longest of this many groups
_MAX_GROUPS = 600
MAX_RANKS = 40
# column -> text, colour
PARTS = {"iteration_s": ("iteration", INK), "compute_s": ("compute", BLUE)}
PARTS |= {"exposed_s": ("exposed communication", VERMILION), "unattributed_s": ("not attributed", GREEN)}
_RATE_UNITS = (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1.0))


def parts_of(job: Job) -> dict[str, tuple[str, str]]:
    """Return the lines of a figure of iterations: column, text and colour."""
    return PARTS | {"compute_s": (job.logs.computation, BLUE)}


@contextmanager
def style() -> Iterator[None]:
    """Draw the figures made inside ``with`` in ringtap's style, readable at a width of 3.3 inches."""
    try:
        with mpl.rc_context(cast(Any, {**RC, **_PAPER})):
            try:
                yield
            finally:
                interactive = mpl.is_interactive()
    finally:
        mpl.interactive(interactive)  # the first figure of a notebook turns it on, for those that follow


@contextmanager
def _on(ax: Axes | None, height_in: float = PAPER_HEIGHT_IN) -> Iterator[Axes]:
    """Draw on the axes; without any on those of a new figure, in ringtap's style."""
    if ax is None:
        import matplotlib.pyplot as plt

        with style():
            _, axes = plt.subplots(figsize=(PAPER_WIDTH_IN, height_in), layout="constrained")
            yield axes
    elif isinstance(ax, Axes):
        yield ax
    else:
        raise UsageError(f"ax must be Matplotlib axes, as plt.subplots() returns them, not {type(ax).__name__}")


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit of an axis that reaches up to a time, and the number of these units in a second."""
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e3)


def iteration_times(job: Job, ax: Axes | None = None, **line: Any) -> list[Artist]:
    """Draw the time of each iteration and its parts; of many iterations, the medians and the longest of groups.

    Args:
        job: the run.
        ax: the axes; None for a new figure.
        **line: properties of the line of the iterations, such as ``color`` or ``label``.

    Raises:
        UsageError: the run has no iterations.
    """
    instance_of(job, Job, "the job", "the result of open_job")
    table = job.iterations
    if not len(table):
        raise UsageError(f"{job.path} has no iterations to draw")
    with _on(ax) as axes:
        grouped = grouped_iterations(table, list(PARTS))
        unit, factor = time_unit(float(grouped["longest_s"].max()))
        drawn: list[Artist] = []
        for name, (text, colour) in parts_of(job).items():
            if grouped[name].notna().any():
                own: dict[str, Any] = {"color": colour, "label": text, "linewidth": 1.1}
                drawn += axes.plot(
                    grouped["iteration"], grouped[name] * factor, **own | (line if name == "iteration_s" else {})
                )
        if len(grouped) < len(table):
            between = grouped["iteration_s"] * factor, grouped["longest_s"] * factor
            drawn.append(axes.fill_between(grouped["iteration"], *between, color=INK, alpha=0.15, linewidth=0))
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"time in {unit}")
        axes.set_xlabel("iteration")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        if ax is None:
            axes.legend()
        return drawn


def group_size(count: int) -> int:
    """Return the number of iterations in a group that a figure draws as one."""
    return max(1, -(-count // _MAX_GROUPS))


def grouped_iterations(table: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Medians of columns, and the longest iteration, over groups of iterations."""
    size = group_size(len(table))
    numbers = table[list(columns)].astype("Float64").astype(float)
    group = np.arange(len(table)) // size
    result = numbers.groupby(group).median()
    result.insert(0, "iteration", np.arange(len(result)) * size)
    result["longest_s"] = numbers["iteration_s"].groupby(group).max()
    return result


def cdf(times_s: Job | Values, ax: Axes | None = None, **line: Any) -> list[Artist]:
    """Draw the distribution of iteration times: the share of iterations that take at most so long.

    Args:
        times_s: times in seconds, or a run, whose iterations after warm-up are drawn.
        ax: the axes; None for a new figure. Several calls on the same axes compare distributions.
        **line: properties of the line, such as ``color`` or ``label``.

    Raises:
        UsageError: there are no times, or not all are numbers.
    """
    with _on(ax) as axes:
        if isinstance(times_s, Job):
            times_s = times_s.iterations["iteration_s"].iloc[times_s.logs.measured]
        seconds = np.sort(sample(times_s))
        share = np.arange(1, len(seconds) + 1) / len(seconds)
        drawn = axes.step(seconds, share * 100, where="post", **line)
        axes.set_xlabel("iteration time in s")
        axes.set_ylabel("share of iterations in %")
        axes.set_ylim(0, 103)
        if "label" in line:
            axes.legend()
        return list(drawn)


def plain_ticks(axis: Axis, low: float, high: float) -> None:
    """Set the ticks of a logarithmic axis as plain numbers."""
    subs = (1.0, 2.0, 5.0) if high / low > 4 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def curve(fit: FitResult, axes: Axes, transform: Transform | None = None, **line: Any) -> list[Line2D]:
    """Draw the curve of a fit, from no load to just past its heaviest point."""
    load = _grid(fit)
    return list(axes.plot(transform(load) if transform else load, fit.predict(load), **{"linewidth": 1.3, **line}))


def _grid(fit: FitResult) -> Array:
    heaviest = float(fit.bandwidth_gbps[-1])
    grid: Array = np.linspace(0, min(heaviest * 1.02 + 0.05, 0.995 * fit.capacity_gbps), 120)
    return grid


def fit(fit: FitResult, ax: Axes | None = None, kind: BandKind = "curve", **line: Any) -> list[Artist]:
    """Draw the points of a fit, its curve and the 95 % band of the curve or of a newly measured point.

    Args:
        fit: the fit.
        ax: the axes; None for a new figure.
        kind: ``curve`` or ``point``, as in `FitResult.band`.
        **line: properties of the curve; the points and the band get its colour. Several calls on the same axes compare
            fits.
    """
    with _on(ax) as axes:
        drawn = _points_and_curve(fit, axes, kind, None, line)
        axes.set_xlabel("cross traffic in Gbit/s")
        axes.set_xlim(-0.02 * fit.capacity_gbps, fit.capacity_gbps)
        return drawn


def rescaled(fit: FitResult, ax: Axes | None = None, kind: BandKind = "curve", **line: Any) -> list[Artist]:
    """Draw a fit against C/(C−BW), where the curve with n = 1 is a straight line on logarithmic times (equation 3.2).

    Args:
        fit: the fit.
        ax: the axes; None for a new figure.
        kind: ``curve`` or ``point``, as in `FitResult.band`.
        **line: properties of the curve; the points and the band get its colour.
    """
    with _on(ax) as axes:
        drawn = _points_and_curve(fit, axes, kind, lambda load: fit.capacity_gbps / (fit.capacity_gbps - load), line)
        axes.set_yscale("log")
        plain_ticks(axes.yaxis, *axes.get_ylim())
        axes.set_xlabel(f"C / (C − BW), C = {fit.capacity_gbps:g} Gbit/s")
        return drawn


def _points_and_curve(
    fit: FitResult, axes: Axes, kind: BandKind, transform: Transform | None, line: dict[str, Any]
) -> list[Artist]:
    from ringtap.analysis.model.fit_result import FitResult

    instance_of(fit, FitResult, "the fit", "the result of CongestionModel.fit")
    load = _grid(fit)
    band = fit.band(load, kind)
    x = transform or (lambda load: load)
    drawn: list[Artist] = [*(lines := curve(fit, axes, transform, **line))]
    colour = lines[0].get_color()  # the next one of the axes, if none is given
    if band["low_s"].notna().all():
        ends = band["low_s"].to_numpy(float), band["high_s"].to_numpy(float)
        drawn.append(axes.fill_between(x(load), *ends, color=colour, alpha=0.18, linewidth=0))
    drawn += axes.plot(x(fit.bandwidth_gbps), fit.iteration_s, linestyle="none", marker="o", color=colour, zorder=3)
    axes.set_ylabel("iteration time in s")
    if "label" in line:
        axes.legend()
    return drawn


def matrix(amounts: Traffic | Job | pd.DataFrame, ax: Axes | None = None, **image: Any) -> list[Artist]:
    """Draw a traffic matrix: from each row to each column.

    Args:
        amounts: captures (payload between hosts), a run (payload of training between ranks), or a square table.
        ax: the axes; None for a new figure.
        **image: properties of the image, such as ``cmap``.

    Raises:
        UsageError: there is no traffic to draw.
    """
    table, side = _square(amounts)
    if not table.size:
        raise UsageError("there is no traffic for a matrix")
    with _on(ax) as axes:
        drawn = axes.imshow(table.to_numpy(dtype=np.float64) / 1e6, **{"cmap": "Blues", "vmin": 0, **image})
        cast(Any, axes.figure).colorbar(drawn, ax=axes, label="MB")
        step = max(1, len(table) // 16)
        ticks = list(range(0, len(table), step))
        names = [plain(str(name)) for name in table.index[::step]]
        long = max(map(len, names)) > 3
        axes.set_xticks(ticks, names, rotation=90 if long else 0)
        axes.set_yticks(ticks, names)
        axes.grid(False)
        axes.set_xlabel(f"to {side}")
        axes.set_ylabel(f"from {side}")
        return [drawn]


def _square(amounts: Traffic | Job | pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Return a square table, and what its rows are."""
    from ringtap.analysis.pcap.captured_traffic import Traffic

    if not isinstance(amounts, pd.DataFrame):
        if not isinstance(amounts, Job):
            instance_of(amounts, Traffic, "the traffic", "the result of read_captures or of open_job")
        amounts = rank_matrix(amounts) if isinstance(amounts, Job) else amounts.matrix()
    name = str(amounts.index.name or "host")
    return amounts, "host" if name == "source" else name.removeprefix("source_")


def rank_matrix(job: Job) -> pd.DataFrame:
    """Return the payload in bytes from each rank (row) to each rank (column); empty without flows between ranks."""
    flows = job.flows
    between = flows[
        (flows["traffic_class"] == "training") & flows[["source_rank", "destination_rank"]].notna().all(axis=1)
    ]
    amounts = between.groupby(["source_rank", "destination_rank"])["payload_bytes"].sum().astype(float)
    ranks = sorted({int(rank) for index in amounts.index for rank in index})
    square = amounts.unstack().reindex(index=ranks, columns=ranks).fillna(0.0)
    return square.rename_axis(index="source_rank", columns="destination_rank")


def rates(table: pd.DataFrame, ax: Axes | None = None, most: int = 5, **line: Any) -> list[Artist]:
    """Draw rates over time, one line for each conversation, flow or pair of hosts.

    Args:
        table: as from `Traffic.rates` with ``fill=True``.
        ax: the axes; None for a new figure.
        most: draw this many with the largest rates by themselves; the others are one line.
        **line: properties of all lines.

    Raises:
        UsageError: not such a table, or an empty one.
    """
    instance_of(table, pd.DataFrame, "the table", "one of Traffic.rates")
    value = next((name for name in ("rate_bps", "rate_pps") if name in table), None)
    if value is None or "t_ns" not in table or not len(table):
        raise UsageError("rates are drawn from a table of Traffic.rates, with rows, t_ns and rate_bps or rate_pps")
    with _on(ax, PAPER_HEIGHT_IN + _LEGEND_LINE_IN * (most + 1)) as axes:
        keys = [name for name in ("conversation", "flow", "source", "destination", "a", "b") if name in table]
        keys = keys[:1] if keys[:1] in (["conversation"], ["flow"]) else keys
        wide = table.pivot_table(index="t_ns", columns=keys, values=value, aggfunc="sum").fillna(0.0) if keys else None
        wide = table.set_index("t_ns")[[value]] if wide is None else wide
        order = wide.sum().sort_values(ascending=False, kind="stable").index
        unit, size = ("packets/s", 1.0)
        if value == "rate_bps":
            unit, size = next(one for one in _RATE_UNITS if float(wide.max().max()) >= one[1] or one[1] == 1)
        at_s = (wide.index.to_numpy(np.int64) - int(wide.index[0])) / 1e9
        drawn: list[Artist] = []
        for number, key in enumerate(order[:most]):
            own: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "label": _rate_name(table, keys, key)}
            own |= {"linewidth": 1.0}
            drawn += axes.plot(at_s, wide[key].to_numpy(np.float64) / size, **own | line)
        if len(order) > most:
            rest = wide[order[most:]].sum(axis=1).to_numpy(np.float64) / size
            own = {"color": FAINT, "label": f"{len(order) - most} others", "linewidth": 1.0}
            drawn += axes.plot(at_s, rest, **own | line)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("time in s")
        axes.set_ylabel(unit)
        if len(order) > 1:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22))
        return drawn


def _rate_name(table: pd.DataFrame, keys: list[str], key: Any) -> str:
    """Return the name of a line: its endpoints."""
    if not keys:
        return "all"
    if keys in (["conversation"], ["flow"]):
        row = table[table[keys[0]] == key].iloc[0]
        sides = ("a", "b") if "a" in table else ("source", "destination")
        ends = [f"{row[side]}:{row[f'{side}_port']}" if row.get(f"{side}_port") else str(row[side]) for side in sides]
        return (" – " if "a" in table else " → ").join(ends)
    return " → ".join(map(str, key))


def timeline(job: Job, iteration: int, ax: Axes | None = None) -> list[Artist]:
    """Draw an iteration of each rank from its begin to its end: compute, exposed communication, optimizer.

    Compute ends when the last gradient is ready, and communication that it hides is drawn inside it. Of many ranks,
    only those with the longest compute are drawn.

    Args:
        job: the run, recorded with DDP's times (``--collect ddp``).
        iteration: number of the iteration.
        ax: the axes; None for a new figure.

    Raises:
        UsageError: there is no such iteration, or its phases were not recorded.
    """
    instance_of(job, Job, "the job", "the result of open_job")
    number, table = check_iteration(job.path, job.logs.work.iterations, iteration), job.rank_iterations
    rows = table[(table["iteration"] == number) & table["ready_ns"].notna()]
    if not len(rows):
        raise UsageError(
            f"the phases of iteration {iteration} are not known: "
            f"{job.logs.work.why or 'no rank logged when its last gradient was ready (DDP on GPUs does not)'}"
        )
    rows = rows.sort_values("compute_s", ascending=False).head(MAX_RANKS).sort_values("rank")
    begin_ns = int(job.iterations["start_ns"].iloc[iteration])
    begin, ready, optimizer = (
        (rows[f"{name}_ns"] - begin_ns).to_numpy(np.float64) / 1e6 for name in ("begin", "ready", "step_start")
    )
    whole, compute, overlap, exposed, step = (
        rows[f"{name}_s"].fillna(0).to_numpy(np.float64) * 1e3
        for name in ("iteration", "compute", "overlap", "exposed", "optimizer")
    )
    hidden = np.minimum(overlap, compute)
    bars = [
        ("_other", LIGHT, 0.7, begin, whole),
        ("compute", BLUE, 0.7, ready - compute, compute),
        ("hides communication", GREEN, 0.3, ready - hidden, hidden),
        ("exposed communication", VERMILION, 0.7, ready, exposed),
        ("optimizer step", PURPLE, 0.7, optimizer, step),
    ]
    places = np.arange(len(rows))
    drawn: list[Artist] = []
    with _on(ax, 1.0 + 0.2 * len(rows)) as axes:
        for text, colour, height, left, length in bars:
            drawn += axes.barh(places, length, left=left, color=colour, height=height, label=text).patches
        axes.set_yticks(places, [f"rank {rank}" for rank in rows["rank"]])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"ms since iteration {iteration} began")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return drawn
