"""Fits measured points, and finds the congestion point on the curve and that of the thesis's construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringtap.analysis.model.congestion_point import CongestionResult, find_congestion_point
from ringtap.analysis.model.congestion_point_on_curve import CurvePoint, CurveResult, find_curve_point
from ringtap.analysis.model.fit import CongestionModel
from ringtap.analysis.model.fit_result import FitResult
from ringtap.analysis.sweeps.points_csv import Points
from ringtap.core.units import format_duration, listed


@dataclass(frozen=True)
class PointsFit:
    """A fit with both kinds of congestion point.

    Attributes:
        fit: the fit.
        curve: the congestion point on the fitted curve.
        construction: the congestion point by the construction in the thesis's appendix A.2.
    """

    fit: FitResult
    curve: CurveResult
    construction: CongestionResult

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values; a missing point is null, with the reason as a warning."""
        item = self.fit.to_json()
        for name, found in (("curve_point", self.curve), ("congestion_point", self.construction)):
            item[name] = None if found.point is None else found.point.to_json()
            if found.point is None:
                item["warnings"].append(f"no {name.replace('_', ' ')}: {found.reason}")
        return item

    def lines(self) -> list[str]:
        """Return the curve, the load where congestion begins, and warnings, for a terminal, line by line."""
        fit, point = self.fit, self.construction.point
        compared = ["free" if one.free else one.name.removeprefix("n = ") for one in fit.candidates]
        choice = f" ({fit.name} has the least AICc of {listed(compared)})" if compared else ""
        quality = "" if fit.r2 is None else f", R² {fit.r2:.3f}"
        loads = f" at loads {fit.range}" if fit.range else ""
        begins = f"{self.curve.clause[0].upper()}{self.curve.clause[1:]}"
        return [
            f"With a capacity of {fit.capacity_gbps:g} Gbit/s{loads}: {fit.formula}{quality}{choice}.",
            f"{begins}."
            + ("" if point is None else f" The thesis's construction gives {point.bandwidth_gbps:.3g} Gbit/s."),
            *(f"  warning: {text}" for text in fit.warnings),
        ]

    def details(self) -> list[str]:
        """Return every model that was compared, with intervals, and both congestion points, line by line."""
        lines = [*self.fit.report().splitlines()]
        for title, no, found in (
            ("Congestion point", "No congestion point", self.curve),
            ("Thesis's construction", "No point by the thesis's construction", self.construction),
        ):
            point = found.point
            if point is None:
                lines.append(f"{no}: {found.reason}")
                continue
            at = f"{point.bandwidth_gbps:.4g} Gbit/s"
            if isinstance(point, CurvePoint):
                at += f" ({point.low_gbps:.4g} to {point.high_gbps:.4g})"
            lines.append(f"{title}  {at}, {format_duration(point.iteration_s)}: {point.data_mb:.1f} MB per iteration")
        return lines


def fit_points(
    model: CongestionModel, points: Points, robust: bool, samples: int, max_load: str | None = None
) -> PointsFit:
    """Fit the points up to a load, or all, and look for both kinds of congestion point among all but outliers."""
    found = model.fit(
        points.bandwidth_gbps, points.iteration_s, spread_s=points.error_s, robust=robust, bootstrap=samples,
        max_load=max_load,
    )  # fmt: skip
    if robust:
        points = _without_outliers(points, found)
    loads, times, capacity = points.bandwidth_gbps, points.iteration_s, model.capacity_gbps
    curve = find_curve_point(loads, times, capacity, points.iterations_s, points.error_s)
    return PointsFit(found, curve, find_congestion_point(loads, times, capacity, samples=0))


def _without_outliers(points: Points, found: FitResult) -> Points:
    fitted, limit = set(zip(found.bandwidth_gbps, found.iteration_s, strict=True)), found.max_load_gbps
    kept = [
        number
        for number, point in enumerate(zip(points.bandwidth_gbps, points.iteration_s, strict=True))
        if point in fitted or (limit is not None and point[0] > limit)
    ]
    return points.at(kept)
