"""Points of a sweep measured again from the raw logs: iteration times and traffic within each window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import pandas as pd

from ringtap.analysis.regression import Array
from ringtap.analysis.runs import JobRun, SweepRun
from ringtap.wire import frame_bytes

# Counters are sampled every 10 ms; an edge of a window in a longer gap would be a guess.
LONGEST_GAP_SHARE = 0.05
ETHERNET_MTU = 1500


@dataclass(frozen=True)
class Point:
    """One window of a series. Rates ending in ``_bps`` are those of the testbed, ``_gbps`` full-size ones.

    Attributes:
        series: ``<model>-<traffic kind>``.
        model: model as named in the plan.
        traffic: traffic kind.
        directory: job run directory it was measured in.
        requested_bps: load asked of the generator.
        requested_gbps: the same, full size.
        cross_bps: cross traffic that came through the bottleneck in the window, as frames on the wire (`ringtap.wire`);
            None where it was not recorded.
        cross_gbps: the same, full size.
        total_bps: everything that left the bottleneck port.
        total_gbps: the same, full size.
        training_bps: total less cross traffic.
        training_gbps: the same, full size.
        window_s: length of the window.
        iterations: whole iterations in the window.
        mean_s: mean iteration time.
        median_s: median.
        p99_s: 99th percentile, linear between the nearest ranks; near the maximum below about 100 iterations.
        std_s: standard deviation (n - 1); None for a single iteration.
        min_s: shortest.
        max_s: longest.
        variation: standard deviation over mean.
        ended: why the window ended, as the sweep noted it.
        late_share: share of the recorder's samples that came late, as the sweep noted it; None where it did not.
        reasons: what is missing and why, one sentence each.
        iteration_s: the iteration times, shape (iterations,).
    """

    series: str
    model: str
    traffic: str
    directory: str
    requested_bps: float
    requested_gbps: float
    cross_bps: float | None
    cross_gbps: float | None
    total_bps: float | None
    total_gbps: float | None
    training_bps: float | None
    training_gbps: float | None
    window_s: float
    iterations: int
    mean_s: float | None
    median_s: float | None
    p99_s: float | None
    std_s: float | None
    min_s: float | None
    max_s: float | None
    variation: float | None
    ended: str
    late_share: float | None
    reasons: tuple[str, ...]
    iteration_s: Array = field(repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """The point's numbers as plain values, without the single iteration times."""
        item = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "iteration_s"}
        return item | {"reasons": list(self.reasons)}


def measure(sweep: SweepRun) -> list[Point]:
    """Measure every window of a sweep; ordered by series, then by requested load, then by time."""
    order = {name: number for number, name in enumerate(sweep.series)}
    windows = sorted(
        sweep.windows, key=lambda item: (order[item["series"]], item["requested_bps"], item["window_start_ns"])
    )
    return [_point(sweep, window) for window in windows]


def table(points: Sequence[Point]) -> pd.DataFrame:
    """Points as a table; missing numbers are ``pd.NA``, the reasons one text."""
    rows = [{**point.to_json(), "reasons": "; ".join(point.reasons)} for point in points]
    columns = [item.name for item in fields(Point) if item.name != "iteration_s"]
    result = pd.DataFrame(rows, columns=columns)
    numbers = [name for name in columns if name.endswith(("_bps", "_gbps", "_s"))] + ["variation"]
    return result.astype(dict.fromkeys(numbers, "Float64"))


@dataclass(frozen=True)
class _Times:
    mean_s: float | None = None
    median_s: float | None = None
    p99_s: float | None = None
    std_s: float | None = None
    min_s: float | None = None
    max_s: float | None = None
    variation: float | None = None


def _times(seconds: Array) -> _Times:
    if not len(seconds):
        return _Times()
    mean, median = float(seconds.mean()), float(np.median(seconds))
    std = float(seconds.std(ddof=1)) if len(seconds) > 1 else None
    p99, low, high = float(np.percentile(seconds, 99)), float(seconds.min()), float(seconds.max())
    return _Times(mean, median, p99, std, low, high, None if std is None else std / mean)


def _point(sweep: SweepRun, window: dict[str, Any]) -> Point:
    start, end = int(window["window_start_ns"]), int(window["window_end_ns"])
    job = sweep.job(window["directory"])
    reasons = []
    times = job.iterations
    inside = times[(times["start_ns"] >= start) & (times["end_ns"] <= end)]["iteration_s"].to_numpy(dtype=np.float64)
    if not len(inside):
        reasons.append("no iteration of all ranks lies within the window")
    mtu = int(sweep.plan.get("topology", {}).get("mtu", ETHERNET_MTU))
    cross, why_cross = _rate(job, sweep.info.get("bottleneck", {}).get("cross"), mtu, start, end)
    total, why_total = _rate(job, sweep.info.get("bottleneck", {}).get("total"), mtu, start, end)
    reasons += [f"{name}: {why}" for name, why in (("cross traffic", why_cross), ("total traffic", why_total)) if why]
    training = None if cross is None or total is None else max(total - cross, 0.0)
    full = float(sweep.plan["scale"]) / 1e9

    def gbps(bps: float | None) -> float | None:
        return None if bps is None else bps * full

    requested = float(window["requested_bps"])
    return Point(
        series=window["series"],
        model=window["model"],
        traffic=window["traffic"],
        directory=window["directory"],
        requested_bps=requested,
        requested_gbps=requested * full,
        cross_bps=cross,
        cross_gbps=gbps(cross),
        total_bps=total,
        total_gbps=gbps(total),
        training_bps=training,
        training_gbps=gbps(training),
        window_s=(end - start) / 1e9,
        iterations=len(inside),
        ended=str(window.get("ended", "")),
        late_share=None if "late_share" not in window else float(window["late_share"]),
        reasons=tuple(reasons),
        iteration_s=inside,
        **asdict(_times(inside)),
    )


def _rate(job: JobRun, counters: Any, mtu: int, start_ns: int, end_ns: int) -> tuple[float | None, str]:
    """Mean rate in bit/s on the wire behind one or several interface counters in a window, or why there is none."""
    if isinstance(counters, dict):
        counters = [counters]
    if not counters:
        return None, "run.json names no counter for it"
    if end_ns <= start_ns:
        return None, "the window has no length"
    total_bytes = 0.0
    for counter in counters:
        log = job.nic(counter["node"])
        grown = []
        for unit in ("bytes", "packets"):
            column = f"{counter['nic']}.{counter['direction']}_{unit}"
            if log.empty or column not in log:
                return None, f"node {counter['node']} has no counter {column}"
            counted = _counted(log["t_ns"].to_numpy(), log[column].to_numpy(), start_ns, end_ns)
            if isinstance(counted, str):
                return None, f"counter {column} of node {counter['node']} {counted}"
            grown.append(counted)
        total_bytes += frame_bytes(grown[0], grown[1], mtu)
    return total_bytes * 8e9 / (end_ns - start_ns), ""


def _counted(t_ns: Any, values: Any, start_ns: int, end_ns: int) -> float | str:
    """Growth of a counter within a window, by linear interpolation at its edges, or what is wrong with it."""
    if len(t_ns) < 2 or t_ns[0] > start_ns or t_ns[-1] < end_ns:
        return "does not cover the window"
    first, last = np.searchsorted(t_ns, start_ns, side="right") - 1, np.searchsorted(t_ns, end_ns, side="left")
    # differences first: nanoseconds since 1970 do not fit a float
    seconds = (t_ns[first : last + 1] - start_ns) / 1e9
    steps = np.diff(values[first : last + 1].astype(np.int64))
    if len(steps) and steps.min() < 0:
        return "ran backwards within the window"
    length = (end_ns - start_ns) / 1e9
    if max(seconds[1] - seconds[0], seconds[-1] - seconds[-2]) > LONGEST_GAP_SHARE * length:
        return "has a gap at an edge of the window"
    grown = np.concatenate(([0], np.cumsum(steps)))
    at_start, at_end = np.interp([0.0, length], seconds, grown)
    return float(at_end - at_start)
