"""Draws the figures of one job's report: iterations, iteration times, ranks, bytes, and traffic between ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ringtap.analysis.job.run import Job
from ringtap.analysis.job.stragglers import slow_places
from ringtap.analysis.plots import figures_on_axes as on_axes
from ringtap.analysis.plots.figure import Drawn, label, line_handle, new_figure, sheet
from ringtap.analysis.plots.figures_on_axes import MAX_RANKS, PARTS, group_size, grouped_iterations, parts_of, time_unit
from ringtap.analysis.plots.style import BLUE, GREEN, INK, LIGHT, PURPLE, VERMILION

# losses of the network in an iteration: column -> text, marker, colour
_LOSSES = {
    "retransmissions": ("retransmitted segments", "o", PURPLE),
    "queue_drops": ("packets dropped in queues", "x", GREEN),
    "nic_drops": ("packets dropped by interfaces", "+", BLUE),
}
_MAX_MARKS = 100
_MAX_QUANTILES = 2000  # in the table of the distribution
_MAX_PAIRS = 64
_SIZE = (5.2, 2.3)


def _iterations(job: Job) -> Drawn:
    """Draw iteration times with the slow ones marked, and below them the losses of the network, if there are any."""
    table = grouped_iterations(job.iterations, list(PARTS))
    lost = {name: look for name, look in _LOSSES.items() if (job.iterations[name].fillna(0) > 0).any()}
    slow = slow_places(job)
    if len(slow) > _MAX_MARKS:
        seconds = job.iterations["iteration_s"].to_numpy(float)
        slow = np.sort(slow[np.argsort(-seconds[slow], kind="stable")[:_MAX_MARKS]])
    parts = parts_of(job)
    handles = [line_handle(text, color=colour) for name, (text, colour) in parts.items() if table[name].notna().any()]
    handles += [line_handle("slow iteration", linestyle="none", marker="v", color=INK)] * bool(len(slow))
    handles += [line_handle(text, linestyle="none", marker=mark, color=colour) for text, mark, colour in lost.values()]
    on = sheet(1 + bool(lost), 1, _SIZE, handles, label_columns=3)
    axes = on.panels[0]
    on_axes.iteration_times(job, axes)
    unit, factor = time_unit(float(table["longest_s"].max()))
    if len(slow):
        times = job.iterations["iteration_s"].to_numpy(float)[slow] * factor
        texts = [_tooltip(job, number) for number in slow.tolist()]
        on.mark(axes, slow, times, texts, marker="v", markersize=4, color=INK, zorder=3)
    axes.set_xlabel("")
    for name, (_, mark, colour) in lost.items():
        numbers = job.iterations[name].astype("Float64").astype(float)
        table[name] = numbers.groupby(np.arange(len(numbers)) // group_size(len(numbers))).mean()
        some = table[table[name] > 0]
        on.panels[1].vlines(some["iteration"], 0, some[name], color=colour, linewidth=0.6, alpha=0.5)
        on.panels[1].plot(some["iteration"], some[name], linestyle="none", marker=mark, markersize=3, color=colour)
    if lost:
        on.panels[1].set_ylim(bottom=0)
        on.panels[1].set_xlim(axes.get_xlim())
        on.panels[1].set_ylabel("segments, packets")
        on.panels[1].yaxis.set_major_locator(MaxNLocator(5, integer=True))
    for panel in on.panels:
        panel.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    on.panels[-1].set_xlabel("iteration")
    return on.drawn(
        "job-iterations", _iterations_caption(job, unit, len(table) < len(job.iterations), len(slow), list(lost)), table
    )


def _iterations_caption(job: Job, unit: str, grouped: bool, slow: int, lost: list[str]) -> str:
    caption = f"Each iteration and its parts, in {unit}"
    if grouped:
        caption += ", medians of groups; grey: up to the longest of each"
    if slow:
        caption += f". Marked: the {slow} slowest"
    if lost:
        caption += ". The other panel: " + " and ".join(_LOSSES[name][0] for name in lost) + " in each"
        caption += ", means of groups" if grouped else ""
    none = [text for name, (text, *_) in _LOSSES.items() if name not in lost and job.iterations[name].notna().any()]
    if none:
        caption += f". None: {', '.join(none)}"
    return f"{caption}."


def _tooltip(job: Job, number: int) -> str:
    """Tooltip of a slow iteration: its time and the losses of the network."""
    row = job.iterations.iloc[number]
    lines = [f"iteration {number}: {row['iteration_s'] * 1e3:.4g} ms"]
    lines += [f"{text}: {row[name]:.3g}" for name, (text, *_) in _LOSSES.items() if pd.notna(row[name])]
    return "\n".join(lines)


def _times(job: Job) -> Drawn:
    seconds = np.sort(job.iterations["iteration_s"].to_numpy(float)[job.logs.measured])
    share = np.arange(1, len(seconds) + 1) / len(seconds)
    on = sheet(1, 1, _SIZE)
    (axes,) = on.panels
    on_axes.cdf(job, axes, color=BLUE)
    marks = [(float(np.median(seconds)), 50, "median"), (float(np.percentile(seconds, 99)), 99, "p99")]
    texts = [f"{name} {value * 1e3:.4g} ms" for value, _, name in marks]
    on.mark(axes, [value for value, _, _ in marks], [at for _, at, _ in marks], texts, marker="o", color=VERMILION)
    rows = np.unique(np.linspace(0, len(seconds) - 1, min(len(seconds), _MAX_QUANTILES)).round().astype(np.int64))
    numbers = pd.DataFrame({"iteration_s": seconds[rows], "share": share[rows]})
    caption = "Distribution of the iteration times without warm-up; marked: median and p99."
    return on.drawn("job-times", caption, numbers)


def _ranks(job: Job) -> Drawn | None:
    """Draw the parts of each rank's iterations; of many ranks, only those with the longest and shortest compute."""
    table = job.ranks
    columns = ["compute_s", "overlap_s", "exposed_s", "optimizer_s", "unattributed_s"]
    if not len(table) or table[columns[:3]].isna().all(axis=None):
        return None
    numbers = table[["rank", "node", *columns]].copy()
    numbers[columns] = numbers[columns].astype("Float64").astype(float)
    shown = numbers
    if len(numbers) > MAX_RANKS:
        order = numbers.sort_values("compute_s", ascending=False)
        shown = pd.concat((order.head(MAX_RANKS // 2), order.tail(MAX_RANKS // 2)))
    parts = {"exposed_s": ("exposed communication", VERMILION)}
    # by Horovod's timeline, the optimizer step includes the exposed communication, and the rest is not known
    if numbers["unattributed_s"].notna().any():
        parts |= {"optimizer_s": ("optimizer step", PURPLE), "unattributed_s": ("not attributed", LIGHT)}
    what = job.logs.computation
    kinds = ((what, BLUE), (f"{what} that hides communication", GREEN), *parts.values())
    handles = [Patch(color=colour, label=text) for text, colour in kinds]
    on = sheet(1, 1, (_SIZE[0], 0.5 + 0.22 * len(shown)), handles, label_columns=3, left=1.9)
    (axes,) = on.panels
    rows = np.arange(len(shown))
    compute, overlap = (shown[name].fillna(0).to_numpy() * 1e3 for name in columns[:2])
    axes.barh(rows, compute, color=BLUE, height=0.7)
    hidden = np.minimum(overlap, compute)
    axes.barh(rows, hidden, left=compute - hidden, color=GREEN, height=0.3)
    left = compute
    for name, (_, colour) in parts.items():
        length = shown[name].fillna(0).to_numpy() * 1e3
        axes.barh(rows, length, left=left, color=colour, height=0.7)
        left = left + length
    axes.set_yticks(rows, [label(f"rank {row.rank} on {row.node}")[:26] for row in shown.itertuples()])
    axes.invert_yaxis()
    axes.set_xlabel("ms per iteration, means")
    caption = "The parts of an iteration of each rank"
    if len(shown) < len(numbers):
        caption += f"; of {len(numbers)} ranks, only those with the longest and the shortest compute"
    if "unattributed_s" in parts:
        forward = "" if job.logs.computation == "compute" else "forward passes, "
        untimed = f"{forward}loading data, Python between the phases, other waiting"
        caption += f". Not attributed is what no recorder times: {untimed}"
    else:
        caption += ". The bars are shorter than the iterations: the rest was not timed"
    caption += "."
    return on.drawn("job-ranks", caption, numbers)


def _rates(job: Job) -> Drawn | None:
    table = job.iterations
    kinds = {"training": ("training", BLUE), "cross": ("cross traffic", VERMILION), "other": ("other", PURPLE)}
    looks = {f"{kind}_bytes": look for kind, look in kinds.items()}
    known = {name: look for name, look in looks.items() if table[name].notna().any() and table[name].sum() > 0}
    if not known:
        return None
    grouped = grouped_iterations(table, ["iteration_s", *known])
    handles = [line_handle(text, color=colour) for text, colour in known.values()]
    on = sheet(1, 1, _SIZE, handles, label_columns=3)
    (axes,) = on.panels
    for name, (_, colour) in known.items():
        axes.plot(grouped["iteration"], grouped[name] / 1e6, color=colour, linewidth=1.1)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.set_xlabel("iteration")
    axes.set_ylabel("MB per iteration")
    return on.drawn(
        "job-rates", "Payload that the recorded nodes sent in each iteration, from their socket logs.", grouped
    )


def _pairs(job: Job) -> Drawn | None:
    """Draw the payload between each pair of ranks; return None without flows of ranks, or with too many ranks."""
    matrix = on_axes.rank_matrix(job)
    if not 0 < len(matrix) <= _MAX_PAIRS:
        return None
    figure = new_figure(4.6, 3.2)
    on_axes.matrix(matrix, figure.add_subplot())
    numbers = matrix.reset_index().melt("source_rank", value_name="payload_bytes").query("payload_bytes > 0")
    return Drawn("job-pairs", "Payload between ranks over the whole recording, in MB.", figure, numbers)


# file name -> function that draws the figure of a run with iterations, in the order of the report
FIGURES: dict[str, Callable[[Job], Drawn | None]] = {
    "job-iterations": _iterations,
    "job-times": _times,
    "job-ranks": _ranks,
    "job-rates": _rates,
    "job-pairs": _pairs,
}
