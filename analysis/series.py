"""What each series of a sweep comes to: demand, congestion point, fits, and the bandwidth that training left unused.

Everything here is in full-size units: Gbit/s and MB.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringtap.analysis.congestion import MERGE_SHARE, CongestionResult, find_congestion_point
from ringtap.analysis.demand import Demand, demand
from ringtap.analysis.fit import CongestionModel, FitResult
from ringtap.analysis.points import Point, measure
from ringtap.analysis.runs import SweepRun
from ringtap.errors import UsageError

# Table 3.8 leaves out "very heavy" points; the ones that its series were tested at lie at 24.7 of 25 Gbit/s.
HEAVIEST_SHARE = 0.95
NO_LOAD_SHARE = 0.02  # of capacity: measured cross traffic below it counts as none


@dataclass(frozen=True)
class Spare:
    """Bandwidth that training could not use at one point (thesis, Tables 3.3, 3.5 and 3.7).

    Attributes:
        bandwidth_gbps: cross traffic.
        iteration_s: mean iteration time.
        ideal_gbps: demand over time: what an ideal job would need for that time.
        experimental_gbps: C - BW: what the cross traffic left.
        difference_gbps: experimental less ideal.
        difference_share: difference over experimental.
    """

    bandwidth_gbps: float
    iteration_s: float
    ideal_gbps: float
    experimental_gbps: float
    difference_gbps: float
    difference_share: float


@dataclass(frozen=True)
class Series:
    """A model under one kind of cross traffic.

    Attributes:
        name: ``<model>-<traffic kind>``.
        model: model as named in the plan.
        title: model as reports call it.
        traffic: traffic kind.
        points: its points, by load.
        used: the points with both a load and a time, by measured load; the fits and the congestion point rest on them.
        demand: data per iteration (equation 3.1).
        no_load_s: mean time over the points without cross traffic; None where there is none.
        required_gbps: demand over that time.
        measured_mb: training traffic an iteration that left the bottleneck port without cross traffic, as whole frames
            and acknowledgements; None where it was not counted.
        congestion: congestion point, or why there is none.
        fit: fit with the exponent of least AICc; None where there are too few points.
        fit_reason: why there is no fit, else empty.
        most_congested: the point with the most cross traffic.
        mean_difference_gbps: mean difference over the saturated points (Table 3.8).
        mean_difference_reason: why there is none, else empty.
        saturated: how many points that mean is over.
    """

    name: str
    model: str
    title: str
    traffic: str
    points: tuple[Point, ...]
    used: tuple[Point, ...]
    demand: Demand
    no_load_s: float | None
    required_gbps: float | None
    measured_mb: float | None
    congestion: CongestionResult
    fit: FitResult | None
    fit_reason: str
    most_congested: Spare | None
    mean_difference_gbps: float | None
    mean_difference_reason: str
    saturated: int

    @property
    def loads_gbps(self) -> list[float]:
        """Measured cross traffic of the used points."""
        return [point.cross_gbps for point in self.used if point.cross_gbps is not None]

    @property
    def times_s(self) -> list[float]:
        """Mean iteration times of the used points."""
        return [point.mean_s for point in self.used if point.mean_s is not None]

    def to_json(self) -> dict[str, Any]:
        """Every number of the series as plain values."""
        item: dict[str, Any] = {"series": self.name, "model": self.model, "title": self.title, "traffic": self.traffic}
        item["points"] = [point.to_json() for point in self.points]
        item["demand_mb"] = self.demand.worker_bytes / 1e6
        item |= {"workers": self.demand.workers, "parameters": self.demand.parameters}
        item |= {"no_load_s": self.no_load_s, "required_gbps": self.required_gbps, "measured_mb": self.measured_mb}
        point = self.congestion.point
        item["congestion_point"] = None if point is None else point.to_json()
        item["congestion_reason"] = self.congestion.reason
        item["congestion_over_demand"] = None if point is None else point.data_mb / item["demand_mb"]
        item |= {"fit": None if self.fit is None else self.fit.to_json(), "fit_reason": self.fit_reason}
        item["most_congested"] = None if self.most_congested is None else vars(self.most_congested).copy()
        item["mean_difference_gbps"] = self.mean_difference_gbps
        item |= {"mean_difference_reason": self.mean_difference_reason, "saturated_points": self.saturated}
        return item


def analyse(sweep: SweepRun) -> list[Series]:
    """Measure the points of a sweep and analyse each series.

    Raises:
        UsageError: the directory does not hold what docs/run-directory.md describes.
    """
    points = measure(sweep)
    return [_series(sweep, name, [point for point in points if point.series == name]) for name in sweep.series]


def spare(load_gbps: float, iteration_s: float, demand_bytes: float, capacity_gbps: float) -> Spare:
    """Ideal and experimental bandwidth at one point, and their difference."""
    ideal, experimental = demand_bytes * 8 / iteration_s / 1e9, capacity_gbps - load_gbps
    difference = experimental - ideal
    return Spare(load_gbps, iteration_s, ideal, experimental, difference, difference / experimental)


def mean_difference(
    loads_gbps: Sequence[float], times_s: Sequence[float], demand_bytes: float, capacity_gbps: float, from_gbps: float
) -> tuple[float | None, int]:
    """Mean difference in Gbit/s over the saturated points, and their number.

    Saturated are the points at or past the congestion point's load ``from_gbps``; loads past 95 % of capacity are left
    out, as Table 3.8 leaves out its very heavy ones.
    """
    differences = [
        spare(load, seconds, demand_bytes, capacity_gbps).difference_gbps
        for load, seconds in zip(loads_gbps, times_s, strict=True)
        if from_gbps <= load <= HEAVIEST_SHARE * capacity_gbps
    ]
    return (statistics.fmean(differences), len(differences)) if differences else (None, 0)


def _series(sweep: SweepRun, name: str, points: list[Point]) -> Series:
    plan = sweep.plan
    capacity = float(plan["capacity_bps"]) * float(plan["scale"]) / 1e9
    model = next((item for item in plan["models"] if item["name"] == points[0].model), None)
    if model is None:
        raise UsageError(f"{sweep.path / 'points.jsonl'} has model {points[0].model!r}, which is not in the plan")
    needed = demand(int(model["parameters"]), _workers(sweep, points))
    pairs = [(point.cross_gbps, point.mean_s, point) for point in points]
    used = sorted(
        (load, seconds, number)
        for number, (load, seconds, _) in enumerate(pairs)
        if load is not None and seconds is not None and load < capacity
    )
    loads, times = [load for load, _, _ in used], [seconds for _, seconds, _ in used]
    alone = [points[number] for load, _, number in used if load < NO_LOAD_SHARE * capacity]
    no_load = _mean([point.mean_s for point in alone])
    measured = _mean(
        [point.training_gbps * point.mean_s * 125 for point in alone if point.training_gbps and point.mean_s]
    )
    fit, fit_reason = _fit(loads, times, capacity)
    congestion = find_congestion_point(loads, times, capacity)
    difference, saturated = None, 0
    if congestion.point is not None:
        # the congestion point is an average of replicates; those a little lighter than it belong to it
        start = congestion.point.bandwidth_gbps - MERGE_SHARE * capacity
        difference, saturated = mean_difference(loads, times, needed.worker_bytes, capacity, start)
    return Series(
        name=name,
        model=points[0].model,
        title=str(model.get("title", model["name"])),
        traffic=points[0].traffic,
        points=tuple(points),
        used=tuple(points[number] for _, _, number in used),
        demand=needed,
        no_load_s=no_load,
        required_gbps=None if no_load is None else needed.required_bps(no_load) / 1e9,
        measured_mb=measured,
        congestion=congestion,
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


def _workers(sweep: SweepRun, points: list[Point]) -> int:
    """Workers of a series: as the plan names them, else the ranks that left steps."""
    named = len(sweep.plan["topology"].get("workers") or [])
    ranks = max(sweep.job(directory).steps["rank"].nunique() for directory in {point.directory for point in points})
    if named + ranks == 0:
        raise UsageError(f"{sweep.path / 'run.json'} names no workers and no rank of {points[0].series} left steps")
    return named or ranks


def _fit(loads: list[float], times: list[float], capacity: float) -> tuple[FitResult | None, str]:
    try:
        return CongestionModel(capacity).fit(loads, times), ""
    except UsageError as error:
        return None, str(error)
