"""Chooses the next load of a series, for sweeps with ``loads = "auto"``.

``python -m ringtap.analysis.sweeps.next_load RUN`` is the process that a sweep asks while it measures. It reads one
JSON object per line and answers with one: ``{"series": NAME}`` with the next load by the run directory, and
``{"iteration_s": [...]}`` with the standard error of their mean.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ringtap.analysis.model.congestion_point_on_curve import CurveFamily, curves_through, find_curve_point
from ringtap.analysis.runs.run import SweepRun, read_run
from ringtap.analysis.statistics.mean_errors import mean_errors, relative_error
from ringtap.analysis.statistics.to_arrays import Array
from ringtap.analysis.sweeps.points import measure
from ringtap.core.errors import RingtapError, UsageError
from ringtap.core.run_directory import read_points
from ringtap.core.run_directory_schema import MERGE_SHARE, REJECTED_JSONL

LOADS_WITHOUT_POINT = 10  # different loads after which a series without a congestion point gets no more
_STEP = 0.02  # of the capacity: candidate loads
_MOST_LOAD = 0.99  # of the capacity: a load measured beyond it counts as this one, as the curve ends at the capacity


@dataclass(frozen=True)
class Measured:
    """A window that was measured.

    Attributes:
        asked: requested load, as a share of the capacity.
        load_gbps: measured load.
        iteration_s: its iteration times in order of time, one at least.
        spent_s: length of the window with its settling time.
    """

    asked: float
    load_gbps: float
    iteration_s: Array
    spent_s: float


@dataclass(frozen=True)
class Aims:
    """Targets, budget and windows of a series with chosen loads.

    Attributes:
        capacity_gbps: full-size capacity of the bottleneck.
        first: loads of the first pass, as shares of the capacity, ascending.
        interval_gbps: largest half-width of the congestion point's interval.
        mean: largest standard error of each mean as a share of it.
        budget_s: longest measured time of the series, settling included.
        settle_s: settling time before each window.
        min_s: shortest window.
        min_iterations: least iterations of a window.
        max_s: longest window.
    """

    capacity_gbps: float
    first: tuple[float, ...]
    interval_gbps: float
    mean: float
    budget_s: float
    settle_s: float
    min_s: float
    min_iterations: int
    max_s: float


@dataclass(frozen=True)
class Choice:
    """The next load, or the reason to stop.

    Attributes:
        load: requested load as a share of the capacity; None: stop.
        known: what is known of the congestion point and what is uncertain, one sentence.
        stop: the reason to stop; empty if there is a next load.
    """

    load: float | None
    known: str
    stop: str = ""


def choose(measured: Sequence[Measured], aims: Aims, lost_s: float = 0.0) -> Choice:
    """Choose the next load of a series from the windows measured so far; the same windows give the same load.

    While the congestion point's interval is wide, the candidate counts whose window reduces most, for each second, the
    variance of the point, if the window shows what the curves expect. Locally optimal designs are chosen so, one point
    after the other (Atkinson, Donev and Tobias, Optimum Experimental Designs, with SAS, 2007, chapters 10 and 17).
    Then, the means that are still uncertain are measured longer, the cheapest first.

    Args:
        measured: the windows that count.
        aims: targets, budget and windows of the series.
        lost_s: time of windows that were measured again.
    """
    spent_s = lost_s + sum(one.spent_s for one in measured)
    asked = [one.asked for one in measured]
    missing = [load for load in aims.first if load not in asked]
    if missing:
        load, seconds, known = missing[0], aims.settle_s + aims.min_s, ""
    else:
        state = _State(measured, aims)
        known, uncertain = state.known(), state.uncertain()
        if state.is_wide():
            load, seconds = state.narrowing(list(uncertain))
        elif uncertain:
            seconds, load = min((seconds, load) for load, seconds in uncertain.items())
        else:
            return Choice(
                None, known, "more loads would not show one" if state.has_none() else "the targets are reached"
            )
    if spent_s + seconds > aims.budget_s:
        return Choice(None, known, f"the budget of {aims.budget_s:g} s is spent")
    return Choice(load, known)


class _State:
    """Results of the windows measured so far, and the value of further ones."""

    def __init__(self, measured: Sequence[Measured], aims: Aims) -> None:
        self._aims, capacity = aims, aims.capacity_gbps
        self._asked = np.array([one.asked for one in measured])
        self._load = np.array([one.load_gbps for one in measured])
        self._mean = np.array([one.iteration_s.mean() for one in measured])
        self._count = np.array([len(one.iteration_s) for one in measured])
        self._spent_s = np.array([one.spent_s for one in measured])
        self._error = mean_errors(self._load, capacity, [one.iteration_s for one in measured])
        spread_s = self._error * self._mean
        self._found = find_curve_point(self._load, self._mean, capacity, spread_s=spread_s)

    def is_wide(self) -> bool:
        """Return True if more loads are needed for the congestion point, or may show one."""
        point = self._found.point
        if point is None:
            return self._found.is_open or len(np.unique(self._asked)) < LOADS_WITHOUT_POINT
        return point.half_width_gbps > self._aims.interval_gbps

    def has_none(self) -> bool:
        """Return True if there is no congestion point."""
        return self._found.point is None

    def uncertain(self) -> dict[float, float]:
        """Return the loads whose mean is uncertain, ascending, each with the expected seconds of its next window."""
        found = {}
        for load in np.unique(self._asked).tolist():
            windows = self._asked == load
            error = float(np.sum(self._error[windows] ** -2.0) ** -0.5)
            if error > self._aims.mean:
                needed_s = float(self._spent_s[windows].sum()) * ((error / self._aims.mean) ** 2 - 1)
                found[load] = self._aims.settle_s + min(max(needed_s, self._aims.min_s), self._aims.max_s)
        return found

    def known(self) -> str:
        """Return what is known of the congestion point, and which means are uncertain."""
        point = self._found.point
        if point is None:
            text = self._found.clause
        else:
            text = f"congestion point {point.bandwidth_gbps:.1f} ± {point.half_width_gbps:.1f} Gbit/s"
        if loads := [f"{load * self._aims.capacity_gbps:.1f}" for load in self.uncertain()]:
            text += f"; means known worse than {self._aims.mean:.0%} at {', '.join(loads)} Gbit/s"
        return text

    def narrowing(self, uncertain: list[float]) -> tuple[float, float]:
        """Return the load whose window narrows the intervals most for each second, and its expected seconds.

        Candidates are the loads that differ from all measured ones by 2 % of the capacity, and the uncertain ones; if
        there are none, all measured ones.
        """
        aims = self._aims
        every = np.arange(round(aims.first[-1] / _STEP) + 1) * _STEP
        apart = np.abs(every[:, None] - self._asked).min(axis=1) > 2 * MERGE_SHARE - 1e-9
        candidates = np.array(sorted({*every[apart].round(4).tolist(), *uncertain} or set(self._asked.tolist())))
        load = np.interp(candidates, *_averaged(self._asked, self._load))
        spread, time = (
            np.exp(np.interp(load, *_averaged(self._load, np.log(values))))
            for values in (self._error * np.sqrt(self._count), self._mean)
        )
        needed = np.maximum((spread / aims.mean) ** 2, aims.min_iterations)
        window_s = np.clip(needed * time, aims.min_s, aims.max_s)
        seconds = aims.settle_s + window_s
        curves = self._found.curves
        if curves is None or not curves.variance:  # nothing to narrow, as where no curve has a point
            gain = np.abs(load[:, None] - self._load).min(axis=1)
        else:
            errors = spread * np.sqrt(time / window_s)
            left = [self._left(curves, *one) for one in zip(load.tolist(), errors.tolist(), strict=True)]
            gain = np.maximum(1 - np.array(left), 0.0)
        best = int((gain / seconds).argmax())
        return float(candidates[best]), float(seconds[best])

    def _left(self, curves: CurveFamily, load_gbps: float, error: float) -> float:
        """Return which share of the point's variance is left if a window at a load shows what the curves expect."""
        expected_s = curves.time_s(load_gbps / self._aims.capacity_gbps)
        load, time = np.append(self._load, load_gbps), np.append(self._mean, expected_s)
        more = curves_through(load, time, self._aims.capacity_gbps, np.append(self._error, error))
        assert more is not None
        return more.variance / curves.variance


def _averaged(at: Array, values: Array) -> tuple[Array, Array]:
    """Return the distinct abscissae, ascending, with the mean of the values at each."""
    distinct, place = np.unique(at, return_inverse=True)
    return distinct, np.bincount(place, values) / np.bincount(place)


def next_of(path: Path, series: str) -> Choice:
    """Choose the next load of a series by its run directory.

    Raises:
        UsageError: the run directory is damaged, or lacks the load or the iterations of a window.
    """
    run = read_run(path)
    assert isinstance(run, SweepRun)
    plan: dict[str, Any] = run.plan
    capacity_bps, window, auto = plan["capacity_bps"], plan["window"], plan["auto"]
    aims = Aims(
        capacity_gbps=capacity_bps * plan["scale"] / 1e9,
        first=tuple(plan["loads"]),
        interval_gbps=auto["target_interval_gbps"],
        mean=auto["target_mean"],
        budget_s=auto["budget_s"],
        settle_s=window["settle_s"],
        min_s=window["min_s"],
        min_iterations=window["min_iterations"],
        max_s=window["max_s"],
    )
    run.keep(series)
    measured = []
    for point in measure(run):
        if point.cross_gbps is None or not len(point.iteration_s):
            raise UsageError(f"a window of {series} has no load or no iteration: {'; '.join(point.reasons)}")
        asked = round((point.unscaled_requested_bps or 0.0) / capacity_bps, 4)
        load = min(point.cross_gbps, _MOST_LOAD * aims.capacity_gbps)
        measured.append(Measured(asked, load, point.iteration_s, aims.settle_s + (point.window_s or 0.0)))
    again = [item for item in read_points(path / REJECTED_JSONL)[0] if item["series"] == series]
    lost_s = sum(aims.settle_s + (item["window_end_ns"] - item["window_start_ns"]) / 1e9 for item in again)
    return choose(measured, aims, lost_s)


def main() -> None:
    """Answer the questions of a sweep until its end."""
    path = Path(sys.argv[1])
    for line in sys.stdin:
        question = json.loads(line)
        answer: dict[str, Any]
        try:
            if "series" in question:
                answer = asdict(next_of(path, question["series"]))
            else:
                answer = {"error": relative_error(np.array(question["iteration_s"]))}
        except RingtapError as error:
            answer = {"problem": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
