"""Draws and writes figures of a job's structure: flows, injection rates, period, iterations, traffic matrix, bursts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from ringtap.analysis.plots.figure import Drawn, legend, new_figure, styled
from ringtap.analysis.plots.style import BLUE, COLOURS, FAINT, INK, VERMILION
from ringtap.analysis.structure import flow_roles_and_rates
from ringtap.analysis.structure.structure import Structure
from ringtap.analysis.traffic.delivered import Passed, instantaneous
from ringtap.analysis.traffic.plots import rates_figure
from ringtap.core.errors import UsageError
from ringtap.core.units import format_duration, format_rate, format_size

ROLE_COLOURS = {
    flow_roles_and_rates.ONLY: BLUE,
    flow_roles_and_rates.SHARED: VERMILION,
    flow_roles_and_rates.CROSSING: FAINT,
}
_SHOWN_ITERATIONS = 4
SAMPLES = 30  # width of the moving average in figures 3-10 (a) and 3-11 (a)
_MIN_SAMPLES = 3
_FOLDS = 80


def draw(found: Structure, samples: int | None = None) -> list[Drawn]:
    """Draw all figures.

    Args:
        found: the structure.
        samples: bins of the moving average in the figure of the flows; None: 30, or a tenth of an iteration if that is
            less, but at least 3.
    """
    with styled():
        return [
            flows_figure(found, samples),
            histogram(found),
            period_figure(found),
            iterations_figure(found),
            matrix_figure(found),
            bursts_figure(found),
        ]


def flows_figure(found: Structure, samples: int | None = None) -> Drawn:
    """Draw the injection rates of the three flows on one clock, with iterations marked (figures 3-10 and 3-11)."""
    streams, starts = found.streams, found.training.starts
    width = samples or max(_MIN_SAMPLES, min(SAMPLES, round(found.period.median_s * 1e8 / streams.bin_ns)))
    first = max(0, (len(starts) - 1 - _SHOWN_ITERATIONS) // 2)
    shown = starts[first : first + _SHOWN_ITERATIONS + 1]
    margin = int(shown[-1] - shown[0]) // 20
    begin, end = max(0, int(shown[0]) - margin), min(streams.bins, int(shown[-1]) + margin)
    at_s = (np.arange(begin, end) - shown[0]) * (streams.bin_ns / 1e9)
    numbers = pd.DataFrame({"t_ns": streams.start_ns + np.arange(begin, end) * streams.bin_ns, "at_s": at_s})
    rates = {
        role: flow_roles_and_rates.moving_average(streams.dense(role.streams), width, streams.bin_ns)
        for role in found.roles
    }
    unit, size = _unit(max(float(values[begin:end].max()) for values in rates.values()))
    figure = new_figure(7.0, 3.9)
    axes = figure.subplots()
    handles = []
    for role, values in rates.items():
        colour = ROLE_COLOURS[role.role]
        axes.plot(at_s * 1e3, values[begin:end] / size, color=colour, linewidth=1.1, zorder=3)
        label = f"{role.role}: {role.source} > {role.destination}"
        handles.append(Line2D([], [], color=colour, label=label))
        numbers[f"{role.role}: rate_bps"] = values[begin:end]
    for start in shown:
        axes.axvline((start - shown[0]) * streams.bin_ns / 1e6, color=INK, linestyle=(0, (4, 2)), linewidth=0.9)
    handles.append(Line2D([], [], color=INK, linestyle=(0, (4, 2)), linewidth=0.9, label="communication begins"))
    axes.set_xlim(at_s[0] * 1e3, at_s[-1] * 1e3)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time in ms")
    axes.set_ylabel(f"payload rate in {unit}")
    legend(figure, handles, 1)
    span = f"{width} bins of {format_duration(streams.bin_ns / 1e9)}"
    missing = f" Note: {found.roles_missing}." if found.roles_missing else ""
    caption = (
        f"Injection rate of each flow's payload, in {unit}, on one clock, as a moving average of {span}, over "
        f"{len(shown) - 1} iterations in the middle of the capture; dashed lines mark where communication "
        f"begins.{missing}"
    )
    return Drawn("flows", caption, figure, numbers)


def histogram(found: Structure) -> Drawn:
    """Draw the instantaneous injection rates of the largest sender and of the cross traffic (like figure 3-8)."""
    starts, streams = found.training.starts, found.streams
    host, sent = max(found.senders.items(), key=lambda item: int(item[1].sum()))
    amounts = {f"training, sent by {host}": sent}
    for role in found.roles:
        if role.role == flow_roles_and_rates.CROSSING:
            amounts[f"cross traffic {role.source} > {role.destination}"] = streams.dense(role.streams)
    rates = []
    for label, values in amounts.items():
        passed = Passed.of_bins(values[starts[0] : starts[-1]], streams.bin_ns)
        rates.append(instantaneous(label, passed, int(passed.at_ns[-1]), float(streams.bin_ns)))
    return rates_figure(rates)


def period_figure(found: Structure) -> Drawn:
    """Draw the autocorrelation of the training rate, and the rate within an iteration."""
    bin_s = found.streams.bin_ns / 1e9
    lags_s, values = found.alike.lags * bin_s, found.alike.values
    phase_s, quartiles = _fold(found)
    unit, size = _unit(float(quartiles.max()))
    figure = new_figure(7.0, 3.2)
    left, right = figure.subplots(1, 2)
    left.plot(lags_s * 1e3, values, color=COLOURS[0], linewidth=1.1)
    left.axvline(found.period.median_s * 1e3, color=INK, linestyle=(0, (4, 2)), linewidth=0.9)
    left.axhline(0, color=FAINT, linewidth=0.8)
    left.set_xlabel("lag in ms")
    left.set_ylabel("autocorrelation")
    right.fill_between(phase_s * 1e3, quartiles[0] / size, quartiles[2] / size, color=COLOURS[0], alpha=0.22, lw=0)
    right.plot(phase_s * 1e3, quartiles[1] / size, color=COLOURS[0], linewidth=1.1)
    right.set_xlabel("time since communication began in ms")
    right.set_ylabel(f"training payload in {unit}")
    right.set_ylim(bottom=0)
    handles = [
        Line2D([], [], color=INK, linestyle=(0, (4, 2)), linewidth=0.9, label="median iteration"),
        Line2D([], [], color=COLOURS[0], label="left: autocorrelation; right: median and quartiles over iterations"),
    ]
    legend(figure, handles, 2)
    caption = (
        f"Left: autocorrelation of the rate of all training payload in {format_duration(bin_s)}, against the lag; the "
        f"median iteration is dashed. Right: rate of all training payload in {unit} against the time since an "
        f"iteration's communication began: median and quartiles over {found.period.iterations} iterations."
    )
    parts = [
        pd.DataFrame({"part": "autocorrelation", "at_s": lags_s, "value": values}),
        pd.DataFrame(
            {"part": "fold", "at_s": phase_s, "value": quartiles[1], "q25_bps": quartiles[0], "q75_bps": quartiles[2]}
        ),
    ]
    return Drawn("period", caption, figure, pd.concat(parts, ignore_index=True))


def _fold(found: Structure) -> tuple[np.ndarray, np.ndarray]:
    """Return times since the start of an iteration, and quartiles of the training rate over iterations, (3, slots)."""
    starts, bin_ns = found.training.starts, found.streams.bin_ns
    length = max(1, round(float(np.median(np.diff(starts)))))
    width = max(1, round(length / _FOLDS))
    passed = np.concatenate(([0], np.cumsum(found.streams.dense([one.stream for one in found.training.major]))))
    edges = np.arange(0, length + 1, width)
    bins = np.minimum(starts[:-1, None] + edges[None, :], np.minimum(starts[1:, None], len(passed) - 1))
    rates = np.diff(passed[bins], axis=1) * 8e9 / (width * bin_ns)
    return edges[:-1] * bin_ns / 1e9, np.quantile(rates, (0.25, 0.5, 0.75), axis=0)


def iterations_figure(found: Structure) -> Drawn:
    """Draw the time of each iteration, and the communication part of it."""
    mine = found.iterations
    at_s = (mine["start_ns"] - mine["start_ns"].iloc[0]) / 1e9
    figure = new_figure(7.0, 3.4)
    axes = figure.subplots()
    axes.plot(at_s, mine["iteration_s"] * 1e3, color=COLOURS[0], marker="o", markersize=2.5, linewidth=0.9)
    axes.plot(at_s, mine["communication_s"] * 1e3, color=COLOURS[1], marker="s", markersize=2.5, linewidth=0.9)
    axes.axhline(found.period.mean_s * 1e3, color=FAINT, linewidth=1.2, zorder=1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time in s")
    axes.set_ylabel("ms")
    handles = [
        Line2D([], [], color=COLOURS[0], marker="o", markersize=4, label="iteration"),
        Line2D([], [], color=COLOURS[1], marker="s", markersize=4, label="communication part"),
        Line2D([], [], color=FAINT, label=f"mean iteration, {format_duration(found.period.mean_s)}"),
    ]
    legend(figure, handles, 3)
    caption = (
        "Time of each iteration in ms, from the start of its communication to the start of the next one's, and the "
        "part from its first to its last payload, against the time since the first iteration in s."
    )
    return Drawn("iterations", caption, figure, mine)


def matrix_figure(found: Structure) -> Drawn:
    """Draw the bytes that each host sends to each other host per iteration."""
    table = found.matrix
    values = table.to_numpy() / 1e6
    figure = new_figure(5.2, 4.4)
    axes = figure.subplots()
    axes.grid(False)
    shown = np.where(values > 0, values, np.nan)
    image = axes.imshow(shown, cmap="Blues", vmin=0, vmax=float(values.max()) * 1.3)
    for row, column in zip(*np.nonzero(values), strict=True) if len(values) <= 12 else ():
        axes.text(column, row, f"{values[row, column]:.3g}", ha="center", va="center", color=INK, fontsize=8)
    axes.set_xticks(range(len(table)), list(table.columns), rotation=30, ha="right")
    axes.set_yticks(range(len(table)), list(table.index))
    axes.set_xlabel("receiver")
    axes.set_ylabel("sender")
    figure.colorbar(image, ax=axes, label="MB per iteration", shrink=0.8)
    caption = (
        f"Gradient payload in MB per iteration (median) from each sender to each receiver: {found.shape.name}. Hosts "
        "of a ring are in its order. Empty cells: nothing was sent, or it was not captured."
    )
    return Drawn("matrix", caption, figure, table.rename_axis("sender").reset_index())


def bursts_figure(found: Structure) -> Drawn:
    """Draw the lengths of bursts, and the ratio of peak to mean at several time scales."""
    figure = new_figure(7.0, 3.4)
    left, right = figure.subplots(1, 2)
    handles = []
    for number, (host, part) in enumerate(found.bursts.groupby("host")):
        colour = COLOURS[number % len(COLOURS)]
        length = np.sort(part["length_s"].to_numpy()) * 1e3
        left.step(length, np.arange(1, len(length) + 1) / len(length), where="post", color=colour, linewidth=1.1)
        mine = found.peaks[found.peaks["host"] == host]
        right.plot(mine["scale_s"] * 1e3, mine["peak_to_mean"], color=colour, marker="o", markersize=4)
        mean = format_rate(float(mine["mean_bps"].iloc[0])) if len(mine) else format_size(0)
        handles.append(Line2D([], [], color=colour, label=f"{host}, mean {mean}"))
    left.set_xlabel("burst length in ms")
    left.set_ylabel("share of bursts")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    left.set_ylim(0, 1.02)
    right.set_xlabel("window in ms")
    right.set_ylabel("peak over mean")
    right.set_ylim(bottom=0)
    legend(figure, handles, 2)
    caption = (
        "Left: distribution of the lengths of bursts of training payload, in ms, by sender; pauses of one bin do not "
        "separate them. Right: highest rate in sliding windows, over the mean rate, against the window's length in ms."
    )
    table = found.bursts.assign(part="burst")
    return Drawn("bursts", caption, figure, pd.concat([table, found.peaks.assign(part="peak")], ignore_index=True))


def _unit(most_bps: float) -> tuple[str, float]:
    return ("Gbit/s", 1e9) if most_bps >= 1e9 else ("Mbit/s", 1e6)


def write(found: Structure, folder: Path, samples: int | None = None) -> list[Path]:
    """Write figures, tables and structure.json into a folder, which is created; return the files' paths.

    Args:
        found: the structure.
        folder: target folder; files of the same names are overwritten.
        samples: bins of the moving average in the figure of the flows; None: as in `draw`.

    Raises:
        UsageError: the folder or a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths, captions = [], {}
        for drawn in draw(found, samples):
            paths += drawn.write(folder)
            captions[drawn.name] = drawn.caption
        for name, table in (("streams", found.table()), ("flow-rates", found.flow_rates)):
            paths.append(folder / f"{name}.csv")
            table.to_csv(paths[-1], index=False)
        paths.append(folder / "structure.json")
        data = found.to_json() | {"captions": captions}
        paths[-1].write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise UsageError(f"{error.filename or folder} cannot be written: {error.strerror}") from error
    return paths
