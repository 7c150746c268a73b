"""Opens run directories of sweeps and jobs, and presents a sweep as tables and series."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator
from concurrent.futures import Executor
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ringtap.analysis.job.run import Job
from ringtap.analysis.notebook_formatting import described_table
from ringtap.analysis.runs.run import JobRun, SweepRun, read_run
from ringtap.analysis.statistics.two_sample import Comparison
from ringtap.analysis.sweeps import points
from ringtap.analysis.sweeps.compare_at_equal_loads import AtLoad, at_load, common_share, compare_moved
from ringtap.analysis.sweeps.series_analysis import Series, analyze
from ringtap.core.check_api_arguments import instance_of
from ringtap.core.errors import UsageError, did_you_mean
from ringtap.core.units import counted, rate_gbps

if TYPE_CHECKING:
    from ringtap.analysis.pcap.scan_captures import Progress
    from ringtap.analysis.pcap.single_packets import CapturedPackets, Slice


class Sweep:
    """A sweep's run: its points, the iterations behind them, and the analysis of each series.

    Iterating over a sweep gives its series. Values that were not measured are missing (``pandas.NA``), never 0.

    Attributes:
        path: the run directory.
        run: the run directory as `ringtap.analysis.runs.run.SweepRun`.
        workers: they read its jobs; None: this process does.
    """

    def __init__(self, run: SweepRun, workers: Executor | None = None) -> None:
        self.run = run
        self.path = run.path
        self.workers = None if workers is None else instance_of(workers, Executor, "workers")

    def __repr__(self) -> str:
        shown = f"{counted(len(self.names), 'series', 'series')}, {counted(len(self.run.windows), 'point')}"
        return f"<Sweep {self.path}: {self.run.info.get('status', 'status unknown')}, {shown}>"

    def _repr_html_(self) -> str:
        rows = [_row(series) for series in self]
        shown = pd.DataFrame(rows).to_html(index=False, na_rep="–", float_format="{:.4g}".format, border=0)
        return f"<p>{html.escape(repr(self)[1:-1])}</p>{shown}"

    @property
    def names(self) -> list[str]:
        """Names of the series, in the order of their first points."""
        return self.run.series

    @property
    def capacity_gbps(self) -> float:
        """Full-size capacity of the bottleneck."""
        return float(self.run.plan["capacity_bps"]) * float(self.run.plan["scale"]) / 1e9

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Series]:
        return iter(self._analyzed.values())

    def __getitem__(self, name: str) -> Series:
        """Return the analysis of a series by its name.

        Raises:
            UsageError: there is no such series.
        """
        return self._analyzed[self._known(name)]

    @cached_property
    def _analyzed(self) -> dict[str, Series]:
        return {series.name: series for series in analyze(self.run, self.measured)}

    @cached_property
    def measured(self) -> list[points.Point]:
        """Points measured from the raw logs, by series and load, as in `points`."""
        return points.measure(self.run, self.workers)

    def _known(self, name: str) -> str:
        if name not in self.names:
            raise UsageError(
                f"{self.path} has no series {name!r}: {did_you_mean(name, self.names)}its series are "
                f"{', '.join(self.names) or 'none yet'}"
            )
        return name

    @property
    @described_table({"point": "number of the point, from 0"} | points.COLUMNS)
    def points(self) -> pd.DataFrame:
        """Points measured from the raw logs, one row per window, by series and load."""
        found = points.table(self.measured)
        found.insert(0, "point", np.arange(len(found)))
        return found

    @property
    @described_table(
        {
            "point": "number of the point, as in `points`",
            "series": "name of its series",
            "cross_gbps": "cross traffic measured in its window, full size",
            "place": "number of the iteration in the window, from 0",
            "iteration_s": "iteration time",
        }
    )
    def iterations(self) -> pd.DataFrame:
        """Iterations within the windows of the points, in order of time for each point."""
        measured = self.measured
        counts = [len(point.iteration_s) for point in measured]
        columns = {
            "point": np.repeat(np.arange(len(measured)), counts),
            "series": np.repeat(np.array([point.series for point in measured], object), counts),
            "cross_gbps": np.repeat(np.array([point.cross_gbps for point in measured], np.float64), counts),
            "place": np.concatenate([np.empty(0, np.int64), *map(np.arange, counts)]),
            "iteration_s": np.concatenate([np.empty(0), *(point.iteration_s for point in measured)]),
        }
        return pd.DataFrame(columns).astype({"cross_gbps": "Float64"})

    def job(self, series: str) -> Job:
        """Return the job of a series; of several attempts, the last one.

        Raises:
            UsageError: there is no such series.
        """
        directories = [window["directory"] for window in self.run.windows if window["series"] == self._known(series)]
        return Job(self.run.job(directories[-1]), self.workers)

    def at(self, series: str, load: float | str) -> AtLoad:
        """Return a series at exactly a load: the iterations of its nearest point, moved there along the curve.

        Args:
            series: name of the series.
            load: cross traffic, in Gbit/s or as text.

        Raises:
            UsageError: there is no such series, or it is not known at this load.
        """
        return self._at(series, rate_gbps(load) / self.capacity_gbps)

    def compare(self, first: str, second: str, load: float | str | None = None) -> Comparison:
        """Compare the iterations of two series at the same load; intervals and tests hold what `at` leaves open.

        Args:
            first: name of the first series.
            second: name of the second one.
            load: as for `at`; None: 80 % of the capacity, or the heaviest load near it that both reach.

        Raises:
            UsageError: there is no such series, one of them is not known at this load, or it has too few iterations.
        """
        share = common_share([self[first], self[second]]) if load is None else rate_gbps(load) / self.capacity_gbps
        return compare_moved(self._at(first, share), self._at(second, share), (first, second))

    def _at(self, name: str, share: float) -> AtLoad:
        found = at_load(self[name], share)
        if isinstance(found, str):
            raise UsageError(f"{name} is not known at {share * self.capacity_gbps:.3g} Gbit/s: {found}")
        return found

    def packets(
        self, series: str, step: int, filter: str | None = None, *, progress: Progress | None = None
    ) -> CapturedPackets:
        """Read the packets that were recorded at a point, as `Job.packets` does for an iteration.

        Args:
            series: name of the series.
            step: position of the point's load in the plan's ``loads``, from 0.
            filter: keep only the packets that this filter in tcpdump's language accepts.
            progress: as for `read_captures`.

        Raises:
            UsageError: there is no such series or step, no packets were recorded there, or the filter is wrong.
        """
        return read_point(self, series, step, filter, progress).packets


def read_point(
    sweep: Sweep, series: str, step: int, filter: str | None = None, progress: Progress | None = None
) -> Slice:
    """Read the packets of `Sweep.packets`, with what is known of them."""
    from ringtap.analysis.job.packets_in_time_span import PointSpan, read_slice

    windows = [window for window in sweep.run.windows if window["series"] == sweep._known(series)]
    points = [window for window in windows if window.get("step") == step]
    name = f"point {series}:{step}"
    if not points:
        steps = ", ".join(str(number) for number in sorted({window["step"] for window in windows if "step" in window}))
        raise UsageError(f"{sweep.path} has no {name}: the steps of {series} are {steps or 'not known'}")
    point = points[-1]
    begin_ns, end_ns = (point.get(f"packets_{end}_ns") for end in ("start", "end"))
    if begin_ns is None or end_ns is None:
        why = point.get("packets_why") or "the plan's key capture asks for them"
        raise UsageError(f"no packets were recorded at {name}: {why}")
    job = Job(sweep.run.job(point["directory"]), sweep.workers)
    span = PointSpan(name, sweep.path.resolve().name, begin_ns, end_ns, shares_clock="lab" in sweep.run.info)
    return read_slice(job, filter=filter, span=span, progress=progress)


def _row(series: Series) -> dict[str, object]:
    """Return the row of a series in a notebook."""
    begins = series.curve.point
    return {
        "series": series.name,
        "points": len(series.points),
        "no load, s": series.no_load_s,
        "congestion begins, Gbit/s": None if begins is None else begins.bandwidth_gbps,
        "95 % interval": "" if begins is None else f"{begins.low_gbps:.3g} to {begins.high_gbps:.3g}",
        "fit": series.fit_reason if series.fit is None else series.fit.name,
        "R²": None if series.fit is None else series.fit.r2,
    }


def open_sweep(path: str | os.PathLike[str], workers: Executor | None = None) -> Sweep:
    """Open the run directory of a sweep; ``workers`` read its jobs.

    Raises:
        UsageError: not a run directory, or that of a job.
    """
    run = read_run(path)
    if isinstance(run, JobRun):
        raise UsageError(f"{run.path} is a job, not a sweep: ringtap analyze (open_job) reads it")
    return Sweep(run, workers)


def open_run(path: str | os.PathLike[str], workers: Executor | None = None) -> Job | Sweep:
    """Open the run directory of a job or of a sweep; ``workers`` read its nodes or its jobs.

    Raises:
        UsageError: not a run directory, one of a newer schema, or of a kind that this version does not know.
    """
    run = read_run(path)
    return Job(run, workers) if isinstance(run, JobRun) else Sweep(run, workers)
