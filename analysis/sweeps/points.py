"""Measures the points of a sweep, from the raw logs: iteration times and traffic within each window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ringtap.analysis.notebook_formatting import with_section
from ringtap.analysis.runs.run import JobRun, SweepRun, window_on_reference, within_window
from ringtap.analysis.runs.samples_to_iterations import Borders, Integers, counter_steps, growth
from ringtap.analysis.statistics.mean_errors import independent_counts
from ringtap.analysis.statistics.quantiles import QuantileInterval, quantile_interval
from ringtap.analysis.statistics.to_arrays import Array
from ringtap.core.counter_log_reader import CounterLog
from ringtap.core.errors import UsageError
from ringtap.core.link_counter_sources import columns_of, log_of, stated_mtu
from ringtap.core.run_directory_schema import ACKNOWLEDGED, LOAD_BIN_NS, SIMULATED
from ringtap.core.thesis_neural_networks import PROFILES

Stated = tuple[Mapping[str, Any], Mapping[str, Any]]


class _Rate:
    """One of a point's rates as an attribute: ``_bps`` as measured, or ``_gbps`` of full size."""

    def __set_name__(self, owner: type[Point], name: str) -> None:
        self._rate, _, self._unit = name.removeprefix("unscaled_").rpartition("_")

    def __get__(self, point: Point, owner: type[Point]) -> float | None:
        rate: float | None = getattr(point, self._rate)
        if rate is None or (self._unit == "gbps") == (point.scale is None):
            return rate
        return rate * 1e9 if point.scale is None else rate * (point.scale / 1e9)


COLUMNS = {
    "series": "``<model>-<traffic kind>``, and the transport, collective and topology if they are known.",
    "model": "name of the model in the plan.",
    "traffic": "traffic kind.",
    "transport": "transport of the training traffic; empty if it was not recorded.",
    "collective": "collective that exchanged the gradients; empty: that of the job's own backend.",
    "topology": "topology of the testbed; empty: the sweep has one only.",
    "directory": "run directory of its job; empty for a point of a table.",
    "unscaled_requested_bps": "load requested from the generator; None for a point of a table.",
    "requested_gbps": "the same, full size.",
    "unscaled_cross_bps": "cross traffic that came through the bottleneck in the window, as frames on the wire "
    "(`ringtap.core.ethernet`), or, where no interface carries it alone, the part that the receiver acknowledged, "
    "or that of a simulation; None if it was not recorded.",
    "cross_gbps": "the same, full size.",
    "unscaled_cross_std_bps": "standard deviation of its rate over the bins of 0.1 s of the window; None if it is "
    "not known.",
    "cross_std_gbps": "the same, full size.",
    "iperf_streams": "parallel streams of iperf that sent it; None for other traffic, and if it was not recorded.",
    "unscaled_total_bps": "everything that left the bottleneck port.",
    "total_gbps": "the same, full size.",
    "utilisation": "total over the capacity of the bottleneck.",
    "unscaled_other_bps": "traffic at the bottleneck that is not the sweep's, as the sweep recorded it; None if it "
    "did not.",
    "other_gbps": "the same, full size.",
    "unscaled_training_bps": "total minus cross traffic and, if it is known, other traffic.",
    "training_gbps": "the same, full size.",
    "unscaled_counting_error_bps": "largest error of cross and total traffic from interpolation between the counters' "
    "samples at the window's ends; None if neither was counted.",
    "counting_error_gbps": "the same, full size.",
    "window_s": "length of the window; None for a point of a table.",
    "iterations": "number of whole iterations in the window; None if a table does not contain it.",
    "mean_s": "mean iteration time.",
    "median_s": "median.",
    "p99_s": "99th percentile, linear between the nearest ranks; near the maximum below about 100 iterations.",
    "p99_low_s": "lower end of its 95 % interval from order statistics; None if the iterations cannot bound it.",
    "p99_high_s": "upper end, likewise.",
    "independent": "effective number of independent iterations; from the correlation of all windows of the series "
    "for short windows.",
    "std_s": "standard deviation (n - 1); None for a single iteration.",
    "min_s": "shortest.",
    "max_s": "longest.",
    "variation": "standard deviation over mean.",
    "samples_per_s": "samples of all ranks in an iteration over the mean iteration time; None: batch not known.",
    "ended": "the reason for the window's end, as the sweep recorded it.",
    "late_share": "share of the recorder's samples that were late, as the sweep recorded it; None if it did not.",
    "disturbed": "links that were cut or had much other traffic, as the sweep recorded it, one sentence each.",
    "reasons": "missing numbers with the reason, one sentence each.",
    "iteration_s": "the iteration times in order of time, shape (iterations,); empty if only their mean is known.",
}


@with_section("Attributes", COLUMNS)
@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a series. ``unscaled_`` rates are those of the testbed, ``_gbps`` full-size ones.

    Each rate is stored once: in bit/s of the testbed, whose rates are multiplied by ``scale`` for full size; without a
    testbed (``scale`` is None) in Gbit/s.
    """

    series: str
    model: str
    traffic: str
    transport: str
    collective: str
    topology: str
    directory: str = ""
    requested: float | None = None
    cross: float | None = None
    cross_std: float | None = None
    iperf_streams: int | None = None
    total: float | None = None
    utilisation: float | None = None
    other: float | None = None
    training: float | None = None
    counting_error: float | None = None
    window_s: float | None = None
    iterations: int | None = None
    mean_s: float | None = None
    median_s: float | None = None
    p99_s: float | None = None
    p99_low_s: float | None = None
    p99_high_s: float | None = None
    independent: float | None = None
    std_s: float | None = None
    min_s: float | None = None
    max_s: float | None = None
    variation: float | None = None
    samples_per_s: float | None = None
    ended: str = ""
    late_share: float | None = None
    disturbed: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    scale: float | None
    iteration_s: Array = field(repr=False, compare=False)

    unscaled_requested_bps, requested_gbps = _Rate(), _Rate()
    unscaled_cross_bps, cross_gbps = _Rate(), _Rate()
    unscaled_cross_std_bps, cross_std_gbps = _Rate(), _Rate()
    unscaled_total_bps, total_gbps = _Rate(), _Rate()
    unscaled_other_bps, other_gbps = _Rate(), _Rate()
    unscaled_training_bps, training_gbps = _Rate(), _Rate()
    unscaled_counting_error_bps, counting_error_gbps = _Rate(), _Rate()

    def to_json(self) -> dict[str, Any]:
        """The point's numbers as plain values, without the single iteration times."""
        item = {name: getattr(self, name) for name in _names()}
        return item | {"disturbed": list(self.disturbed), "reasons": list(self.reasons)}


def ordered_windows(sweep: SweepRun) -> list[dict[str, Any]]:
    """Return the sweep's windows in the order of `measure`."""
    order = {name: number for number, name in enumerate(sweep.series)}
    return sorted(
        sweep.windows, key=lambda item: (order[item["series"]], item["requested_bps"], item["window_start_ns"])
    )


def measure(sweep: SweepRun, workers: Executor | None = None) -> list[Point]:
    """Measure every window of a sweep; the points are ordered by series, requested load and time.

    Args:
        sweep: the sweep.
        workers: executor that reads the jobs, one call per job; None: this process reads them.
    """
    windows = ordered_windows(sweep)
    numbers: dict[str, list[int]] = {}
    for number, window in enumerate(windows):
        numbers.setdefault(window["directory"], []).append(number)
    points: dict[int, Point] = {}
    found = (workers.map if workers else map)(
        partial(_points_of, sweep), numbers, [[windows[number] for number in of_job] for of_job in numbers.values()]
    )
    for (directory, of_job), (measured, ranks, torn) in zip(numbers.items(), found, strict=True):
        points.update(zip(of_job, measured, strict=True))
        job = sweep.job(directory)
        job.ranks = ranks
        job.torn |= torn
    of_series: dict[str, list[int]] = {}
    for number in sorted(points):
        of_series.setdefault(points[number].series, []).append(number)
    for some in of_series.values():
        points.update(zip(some, of_one_correlation([points[number] for number in some]), strict=True))
    return [points[number] for number in range(len(windows))]


def of_one_correlation(points: Sequence[Point]) -> list[Point]:
    """Return the points of a series with their independent iterations by the correlation of all of them."""
    counts = independent_counts([one.iteration_s for one in points])
    return [
        replace(one, independent=float(count)) if len(one.iteration_s) else one
        for one, count in zip(points, counts, strict=True)
    ]


def _points_of(
    sweep: SweepRun, directory: str, windows: Sequence[dict[str, Any]]
) -> tuple[list[Point], int, dict[str, int]]:
    """Return the points of one job, its number of ranks, and its torn logs."""
    if not sweep.path.is_dir():
        raise UsageError(f"the workers cannot see {sweep.path}: they need the file system that it lies on")
    logs: dict[Path, CounterLog] = {}
    job = sweep.job(directory)
    return [_point(sweep, window, logs) for window in windows], job.ranks, job.torn


def _names() -> Iterator[str]:
    """Yield the names of a point's numbers and texts, with both of each rate."""
    for item in fields(Point):
        if f"{item.name}_gbps" in vars(Point):
            yield from (f"unscaled_{item.name}_bps", f"{item.name}_gbps")
        elif item.name not in ("scale", "iteration_s"):
            yield item.name


def table(points: Sequence[Point]) -> pd.DataFrame:
    """Return points as a table; missing numbers are ``pd.NA``, and lists of sentences are joined."""
    texts = ("disturbed", "reasons")
    rows = [{**point.to_json(), **{name: "; ".join(getattr(point, name)) for name in texts}} for point in points]
    columns = list(_names())
    result = pd.DataFrame(rows, columns=columns)
    kinds = ("_bps", "_gbps", "_s", "variation", "independent", "utilisation", "late_share")
    numbers = [name for name in columns if name.endswith(kinds)]
    return result.astype(dict.fromkeys(numbers, "Float64") | {"iperf_streams": "Int64"})


def times_of(seconds: Array) -> dict[str, Any]:
    """Return the statistics of iteration times in order of time, shape (iterations,), with the names of `Point`."""
    if not len(seconds):
        return {}
    mean, std = float(seconds.mean()), float(seconds.std(ddof=1)) if len(seconds) > 1 else None
    tail: QuantileInterval = quantile_interval(seconds, 0.99)
    return {
        "mean_s": mean,
        "median_s": float(np.median(seconds)),
        "p99_s": tail.value,
        "p99_low_s": tail.low,
        "p99_high_s": tail.high,
        "independent": tail.effective_count,
        "std_s": std,
        "min_s": float(seconds.min()),
        "max_s": float(seconds.max()),
        "variation": None if std is None or mean <= 0 else std / mean,
    }


def _point(sweep: SweepRun, window: dict[str, Any], logs: dict[Path, CounterLog]) -> Point:
    job = sweep.job(window["directory"])
    start, end = window_on_reference((int(window["window_start_ns"]), int(window["window_end_ns"])), job)
    reasons = []
    steps = job.iterations
    is_inside = within_window(steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy(), (start, end))
    inside = steps["iteration_s"].to_numpy(dtype=np.float64)[is_inside]
    if not len(inside):
        reasons.append("no iteration of all ranks lies within the window")
    bottleneck = job.info.get("bottleneck") or sweep.info.get("bottleneck") or {}
    errors: list[float] = []
    stated = bottleneck, sweep.plan["topology"]

    def rate(name: str) -> float | str:
        if bottleneck.get(name) in (ACKNOWLEDGED, SIMULATED):
            recorded = window.get(f"{name}_bps")
            return window.get("cross_why") or "the sweep did not record it" if recorded is None else float(recorded)
        counted = counted_bps(job, bottleneck.get(name), stated, (start, end), logs)
        if isinstance(counted, str):
            return counted
        errors.append(counted[1])
        return counted[0]

    def known(what: str, found: float | str) -> float | None:
        if isinstance(found, str):
            reasons.append(f"{what}: {found}")
            return None
        return found

    cross, total = (known(f"{name} traffic", rate(name)) for name in ("cross", "total"))
    cross_std = None
    if cross is not None:
        found = _cross_std(job, bottleneck["cross"], stated, (start, end), logs)
        cross_std = known("standard deviation of the cross traffic", found)
    other = None if window.get("other_bps") is None else float(window["other_bps"])
    if window.get("other_why"):
        reasons.append(f"other traffic: {window['other_why']}")
    training = None if cross is None or total is None else max(total - cross - (other or 0.0), 0.0)
    times, batch = times_of(inside), _batch(sweep, window["model"])
    if batch is None:
        reasons.append(f"samples/s: the plan has no batch for {window['model']}")

    return Point(
        series=window["series"],
        model=window["model"],
        traffic=window["traffic"],
        transport=window.get("transport") or "",
        collective=window.get("collective") or "",
        topology=window.get("topology") or "",
        directory=window["directory"],
        requested=float(window["requested_bps"]),
        cross=cross,
        cross_std=cross_std,
        iperf_streams=window.get("iperf_streams"),
        total=total,
        utilisation=None if total is None else total / float(sweep.plan["capacity_bps"]),
        other=other,
        training=training,
        counting_error=max(errors, default=None),
        window_s=(end - start) / 1e9,
        iterations=len(inside),
        samples_per_s=job.ranks * batch / times["mean_s"] if batch is not None and times.get("mean_s") else None,
        ended=window.get("ended") or "",
        late_share=window.get("late_share"),
        disturbed=(*(window.get("cut") or ()), *(window.get("others") or ())),
        reasons=tuple(reasons),
        scale=float(sweep.plan["scale"]),
        iteration_s=inside,
        **times,
    )


def _batch(sweep: SweepRun, name: str) -> int | None:
    """Return the samples of a rank in an iteration; in plans of older versions those of the profile."""
    model: dict[str, Any] = next((item for item in sweep.plan["models"] if item["name"] == name), {})
    profile = PROFILES.get(name)
    default = profile.batch if profile and not model.get("command") else None
    batch: int | None = model.get("batch", default)
    return batch


def counted_bps(
    job: JobRun, counters: Any, stated: Stated, window_ns: tuple[int, int], logs: dict[Path, CounterLog]
) -> tuple[float, float] | str:
    """Return the mean rate on the wire in a window by counters and its largest error, or the reason why there is none.

    Args:
        job: the job that recorded them.
        counters: one counter of run.json, or several; an empty list stands for traffic that was not sent.
        stated: ``bottleneck`` of run.json and ``topology`` of its plan, which may have the MTU of interfaces.
        window_ns: start and end of the window.
        logs: logs that were opened before; further ones are added.

    Returns:
        Both in bit/s, or the reason as a sentence.
    """
    if isinstance(counters, dict):
        counters = [counters]
    if counters is None:
        return "run.json names no counter for it"
    start_ns, end_ns = window_ns
    if end_ns <= start_ns:
        return "the window has no length"
    try:
        found = [
            _log_of(job, counter, logs).frame_bytes(
                counter, stated_mtu(counter, *stated), *job.by_node(counter["node"], window_ns).tolist()
            )
            for counter in counters
        ]
    except UsageError as error:
        return str(error)
    total_bytes, error_bytes = (sum(part[side] for part in found) for side in (0, 1))
    to_bps = 8e9 / (end_ns - start_ns)
    return total_bytes * to_bps, error_bytes * to_bps


def _cross_std(
    job: JobRun, counters: Any, stated: Stated, window_ns: tuple[int, int], logs: dict[Path, CounterLog]
) -> float | str:
    """Return the standard deviation in bit/s (n - 1) of a known rate over the bins of a window, or why it is unknown.

    The bins are those of `ringtap.core.run_directory_schema.LOAD_BIN_NS`; the rest at the end of the window does not
    count.
    """
    if counters == ACKNOWLEDGED:
        return "the sweep recorded only the mean of what the receiver acknowledged"
    if counters == SIMULATED:
        return "the simulation gives only the mean"
    count = (window_ns[1] - window_ns[0]) // LOAD_BIN_NS
    if count < 2:
        return f"the window has fewer than two bins of {LOAD_BIN_NS / 1e9:g} s"
    edges = window_ns[0] + LOAD_BIN_NS * np.arange(count + 1)
    in_bins = np.zeros(count)
    for counter in [counters] if isinstance(counters, dict) else counters:
        log, edges_ns = _log_of(job, counter, logs), job.by_node(counter["node"], edges)
        known = [each for column in columns_of(counter) if (each := _in_bins(log, column, edges_ns)) is not None]
        if len(known) < len(columns_of(counter)):
            return f"the counters of node {counter['node']} have gaps of more than a bin"
        mtu = stated_mtu(counter, *stated)
        in_bins += [log.as_frames(counter, each, mtu) for each in zip(*known, strict=True)]
    return float(np.std(in_bins * 8e9 / LOAD_BIN_NS, ddof=1))


def _in_bins(log: CounterLog, column: str, edges_ns: Integers) -> Array | None:
    """Return the growth of a counter in each bin; None if it was reset, or not sampled for longer than a bin."""
    assert log.file is not None  # its growth is known
    times_ns, values = map(np.array, log.samples(column, int(edges_ns[0]), int(edges_ns[-1])))
    steps = counter_steps(values[:-1], values[1:], log.file.column(column).wraps_at_bits)
    # each bin's own rate counts, so that a gap may be as long as a bin, however far apart samples usually are
    grown = growth(times_ns, steps, Borders(edges_ns, np.arange(len(edges_ns) - 1)), np.diff(edges_ns))
    return None if np.isnan(grown).any() else grown


def _log_of(job: JobRun, counter: Mapping[str, str], logs: dict[Path, CounterLog]) -> CounterLog:
    path = job.path / "nodes" / counter["node"] / log_of(counter)
    if path not in logs:
        logs[path] = CounterLog(path)
        if logs[path].torn:
            job.torn[str(path.relative_to(job.path))] = logs[path].torn
    return logs[path]
