"""Analyzes each series of a sweep: demand, congestion point, fits, and bandwidth that training left unused.

All numbers are in full-size units: Gbit/s and MB.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringtap.analysis.model.bytes_per_iteration import Demand, demand
from ringtap.analysis.model.congestion_point import CongestionResult, find_congestion_point
from ringtap.analysis.model.congestion_point_on_curve import CurveResult, find_curve_point
from ringtap.analysis.model.fit import MAX_LOAD, CongestionModel, FitResult
from ringtap.analysis.runs.run import SweepRun
from ringtap.analysis.statistics.to_arrays import Array
from ringtap.analysis.sweeps.points import Point
from ringtap.core.errors import UsageError
from ringtap.core.run_directory_schema import MERGE_SHARE, POINTS_JSONL, SIMULATED, VARIANTS
from ringtap.core.sweep_plans.training_jobs import model_label
from ringtap.core.units import counted, load_gbps

# Table 3.8 leaves out "very heavy" points; those of its series are at 24.7 of 25 Gbit/s
HEAVIEST_SHARE = 0.95
NO_LOAD_SHARE = 0.02  # of capacity: measured cross traffic below it counts as none


@dataclass(frozen=True)
class Spare:
    """Bandwidth that training could not use at one point (thesis, Tables 3.3, 3.5 and 3.7).

    Attributes:
        bandwidth_gbps: cross traffic.
        iteration_s: mean iteration time.
        ideal_gbps: demand over time, the bandwidth that an ideal job needs for this time.
        experimental_gbps: C - BW, the bandwidth that cross traffic left.
        difference_gbps: experimental minus ideal.
        difference_share: difference over experimental.
    """

    bandwidth_gbps: float
    iteration_s: float
    ideal_gbps: float
    experimental_gbps: float
    difference_gbps: float
    difference_share: float


@dataclass(frozen=True, repr=False)
class Series:
    """A model under one kind of cross traffic.

    Attributes:
        name: ``<model>-<traffic kind>``, and the transport, collective and topology if they are known.
        model: name of the model in the plan.
        title: name of the model in reports.
        traffic: traffic kind.
        transport: transport of the training traffic; empty if it was not recorded.
        collective: collective that exchanged the gradients; empty: that of the job's own backend.
        topology: topology of the testbed; empty: the sweep has one only.
        capacity_gbps: full-size capacity C of the bottleneck.
        points: its points, by load.
        used: the points with both a load and a time, by measured load; fits and congestion points use them.
        demand: data per iteration (equation 3.1).
        no_load_s: mean time over the points without cross traffic; None if there are none.
        required_gbps: demand over that time.
        measured_mb: training traffic per iteration that left the bottleneck port without cross traffic, as whole frames
            and acknowledgements; None if it was not counted.
        congestion: congestion point by the thesis's construction, or the reason why there is none.
        curve: congestion point on the fitted curve with its interval, or the reason why there is none; the points are
            weighted by the standard errors of their means, if their iterations are known.
        fit: fit with the exponent of least AICc; None if there are too few points.
        fit_reason: the reason why there is no fit, else empty.
        most_congested: the point with the most cross traffic.
        mean_difference_gbps: mean difference over the saturated points (Table 3.8).
        mean_difference_reason: the reason why there is none, else empty.
        saturated: number of points in that mean.
    """

    name: str
    model: str
    title: str
    traffic: str
    transport: str
    collective: str
    topology: str
    capacity_gbps: float
    points: tuple[Point, ...]
    used: tuple[Point, ...]
    demand: Demand
    no_load_s: float | None
    required_gbps: float | None
    measured_mb: float | None
    congestion: CongestionResult
    curve: CurveResult
    fit: FitResult | None
    fit_reason: str
    most_congested: Spare | None
    mean_difference_gbps: float | None
    mean_difference_reason: str
    saturated: int

    def __repr__(self) -> str:
        found = self.fit_reason if self.fit is None else f"R² {self.fit.r2:.4f} with {self.fit.name}"
        return f"<Series {self.name}: {counted(len(self.points), 'point')}; {found}>"

    @property
    def key(self) -> tuple[str, str, str]:
        """Model, traffic kind and variant."""
        return self.model, self.traffic, self.variant

    @property
    def variant(self) -> str:
        """Transport, collective and topology: ``tcp``, ``ring`` or ``tcp, ring``; empty if none is known."""
        return ", ".join(part for part in (getattr(self, name) for name in VARIANTS) if part)

    @property
    def over(self) -> str:
        """The variant within a sentence, after a blank: over tcp by ring."""
        return model_label("", *(getattr(self, name) for name in VARIANTS))

    @property
    def labels(self) -> dict[str, str]:
        """The columns of tables that identify it."""
        return {"model": self.title, "traffic": self.traffic} | {name: getattr(self, name) for name in VARIANTS}

    @property
    def is_simulated(self) -> bool:
        """True if its iterations are simulated."""
        return self.traffic == SIMULATED or self.traffic.startswith(f"{SIMULATED}-")

    @property
    def has_cross_traffic(self) -> bool:
        """True if cross traffic was requested or measured at one of its points."""
        loads = (point.requested_gbps or point.cross_gbps or 0.0 for point in self.points)
        return any(load >= NO_LOAD_SHARE * self.capacity_gbps for load in loads)

    @property
    def alone(self) -> list[Point]:
        """The used points without cross traffic, as measured."""
        return [point for point in self.used if (point.cross_gbps or 0.0) < NO_LOAD_SHARE * self.capacity_gbps]

    @property
    def loads_gbps(self) -> list[float]:
        """Measured cross traffic of the used points."""
        return [point.cross_gbps for point in self.used if point.cross_gbps is not None]

    @property
    def times_s(self) -> list[float]:
        """Mean iteration times of the used points."""
        return [point.mean_s for point in self.used if point.mean_s is not None]

    @property
    def iterations_s(self) -> list[Array] | None:
        """The iteration times behind each time; None if those of a point are not known."""
        return _iterations(self.used)

    def to_json(self) -> dict[str, Any]:
        """Return all numbers of the series as plain values."""
        item: dict[str, Any] = {"series": self.name, "model": self.model, "title": self.title, "traffic": self.traffic}
        item["has_cross_traffic"] = self.has_cross_traffic
        item |= {name: getattr(self, name) for name in VARIANTS}
        item["points"] = [point.to_json() for point in self.points]
        item["demand_mb"] = self.demand.worker_bytes / 1e6
        item |= {"workers": self.demand.workers, "parameters": self.demand.parameters}
        item |= {"no_load_s": self.no_load_s, "required_gbps": self.required_gbps, "measured_mb": self.measured_mb}
        point = self.congestion.point
        item["congestion_point"] = None if point is None else point.to_json()
        item["congestion_reason"] = self.congestion.reason
        item["congestion_over_demand"] = None if point is None else point.data_mb / item["demand_mb"]
        curve_point = self.curve.point
        item |= {"curve_point": None if curve_point is None else curve_point.to_json()}
        item |= {"curve_point_reason": self.curve.reason}
        item |= {"fit": None if self.fit is None else self.fit.to_json(), "fit_reason": self.fit_reason}
        item["most_congested"] = None if self.most_congested is None else vars(self.most_congested).copy()
        item["mean_difference_gbps"] = self.mean_difference_gbps
        item |= {"mean_difference_reason": self.mean_difference_reason, "saturated_points": self.saturated}
        return item


def analyze(sweep: SweepRun, points: Sequence[Point], max_load: float | str | None = None) -> list[Series]:
    """Analyze each series of a sweep, whose points are as from `ringtap.analysis.sweeps.points.measure`.

    Args:
        sweep: the sweep.
        points: its points.
        max_load: fits use only points at loads up to this one, in Gbit/s or as text; None: all.

    Raises:
        UsageError: the directory is not as docs/reference/run-directory.md describes.
    """
    capacity_gbps = float(sweep.plan["capacity_bps"]) * float(sweep.plan["scale"]) / 1e9
    found = []
    for name in sweep.series:
        of_series = [point for point in points if point.series == name]
        label = model_label(of_series[0].model, *(getattr(of_series[0], name) for name in VARIANTS))
        models = {
            model_label(item["name"], *(item.get(name) or "" for name in VARIANTS)): item
            for item in sweep.plan["models"]
        }
        model = models.get(label)
        if model is None:
            path = sweep.path / POINTS_JSONL
            raise UsageError(f"{path} has model {label!r}, which is not in the plan")
        title = str(model.get("title", model["name"]))
        needed = demand(int(model["parameters"]), _workers(sweep, of_series))
        found.append(series_of(of_series, title, needed, capacity_gbps, max_load))
    return found


def grouped(series: Sequence[Series], *names: str) -> list[list[Series]]:
    """Return the series that have the same values of some attributes, in order of appearance."""
    groups: dict[tuple[str, ...], list[Series]] = {}
    for one in series:
        groups.setdefault(tuple(getattr(one, name) for name in names), []).append(one)
    return list(groups.values())


def spare(load_gbps: float, iteration_s: float, demand_bytes: float, capacity_gbps: float) -> Spare:
    """Return the ideal and the experimental bandwidth at one point, and their difference."""
    ideal, experimental = demand_bytes * 8 / iteration_s / 1e9, capacity_gbps - load_gbps
    difference = experimental - ideal
    return Spare(load_gbps, iteration_s, ideal, experimental, difference, difference / experimental)


def mean_difference(
    loads_gbps: Sequence[float], times_s: Sequence[float], demand_bytes: float, capacity_gbps: float, from_gbps: float
) -> tuple[float | None, int]:
    """Return the mean difference in Gbit/s over the saturated points, and their number.

    The saturated points are those from the congestion point's load ``from_gbps`` up to 95 % of capacity. Table 3.8
    leaves out very heavy loads, too.
    """
    differences = [
        spare(load, seconds, demand_bytes, capacity_gbps).difference_gbps
        for load, seconds in zip(loads_gbps, times_s, strict=True)
        if from_gbps <= load <= HEAVIEST_SHARE * capacity_gbps
    ]
    return (statistics.fmean(differences), len(differences)) if differences else (None, 0)


def series_of(
    points: Sequence[Point], title: str, needed: Demand, capacity: float, max_load: float | str | None
) -> Series:
    """Analyze the points of one series.

    Args:
        points: the points.
        title: name of the model in reports.
        needed: data per iteration.
        capacity: full-size capacity of the bottleneck in Gbit/s.
        max_load: as for `analyze`.
    """
    used = sorted(
        (point.cross_gbps, point.mean_s, number)
        for number, point in enumerate(points)
        if point.cross_gbps is not None and point.mean_s is not None and point.cross_gbps < capacity
    )
    loads, times = [load for load, _, _ in used], [seconds for _, seconds, _ in used]
    alone = [points[number] for load, _, number in used if load < NO_LOAD_SHARE * capacity]
    no_load = _mean([point.mean_s for point in alone])
    measured = _mean(
        [point.training_gbps * point.mean_s * 125 for point in alone if point.training_gbps and point.mean_s]
    )
    limit_gbps = None if max_load is None else load_gbps(max_load, capacity, MAX_LOAD)
    fit, fit_reason = _fit(loads, times, capacity, limit_gbps)
    congestion = find_congestion_point(loads, times, capacity, samples=0)
    difference, saturated = None, 0
    if congestion.point is not None:
        # the congestion point is an average of replicates, some of which are a little lighter
        start = congestion.point.bandwidth_gbps - MERGE_SHARE * capacity
        difference, saturated = mean_difference(loads, times, needed.worker_bytes, capacity, start)
    first = points[0]
    return Series(
        name=first.series,
        model=first.model,
        title=title,
        traffic=first.traffic,
        transport=first.transport,
        collective=first.collective,
        topology=first.topology,
        capacity_gbps=capacity,
        points=tuple(points),
        used=tuple(points[number] for _, _, number in used),
        demand=needed,
        no_load_s=no_load,
        required_gbps=None if no_load is None else needed.required_bps(no_load) / 1e9,
        measured_mb=measured,
        congestion=congestion,
        curve=find_curve_point(
            loads, times, capacity, iterations_s=_iterations([points[number] for _, _, number in used])
        ),
        fit=fit,
        fit_reason=fit_reason,
        most_congested=spare(loads[-1], times[-1], needed.worker_bytes, capacity) if used else None,
        mean_difference_gbps=difference,
        mean_difference_reason="" if saturated else congestion.reason or "no point lies past the congestion point",
        saturated=saturated,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _iterations(used: Sequence[Point]) -> list[Array] | None:
    found = [point.iteration_s for point in used]
    return found if all(map(len, found)) else None


def _workers(sweep: SweepRun, points: list[Point]) -> int:
    """Return N of equation 3.1 for a series: the ranks in the plan, or those that recorded steps."""
    topology = sweep.plan["topology"]
    ranks_of = {host["name"]: host.get("ranks", 1) for host in topology.get("machines") or []}
    named = sum(ranks_of.get(name, 1) for name in topology.get("workers") or [])
    ranks = max(sweep.job(directory).ranks for directory in {point.directory for point in points})
    if named + ranks == 0:
        raise UsageError(f"{sweep.path / 'run.json'} names no workers and no rank of {points[0].series} left steps")
    return named or ranks


def _fit(
    loads: list[float], times: list[float], capacity: float, limit_gbps: float | None
) -> tuple[FitResult | None, str]:
    try:
        return CongestionModel(capacity).fit(loads, times, max_load=limit_gbps), ""
    except UsageError as error:
        return None, str(error)
