"""Fit of measured points, with both kinds of congestion point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringtap.analysis.model.breakpoint import BreakCandidate, BreakResult, compared, find_break
from ringtap.analysis.model.congestion_point import CongestionResult, find_congestion_point
from ringtap.analysis.model.fit import CongestionModel
from ringtap.analysis.model.fit_result import FitResult
from ringtap.analysis.sweeps.tables import Points
from ringtap.core.units import format_duration


@dataclass(frozen=True)
class PointsFit:
    """A fit with both kinds of congestion point.

    Attributes:
        fit: the fit.
        construction: the congestion point by the construction in the thesis's appendix A.2.
        placed: the break of two fitted line segments.
    """

    fit: FitResult
    construction: CongestionResult
    placed: BreakResult

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values; a missing point is null, with the reason as a warning."""
        item = self.fit.to_json()
        for name, found in (("congestion_point", self.construction), ("break", self.placed)):
            item[name] = None if found.point is None else found.point.to_json()
            if found.point is None:
                item["warnings"].append(f"no {name.replace('_', ' ')}: {found.reason}")
        if self.placed.point is not None and (text := compared(self.placed.point, self.fit)):
            item["break"]["warnings"].append(text)
        return item

    def _answer(self) -> str:
        """Return the exponent and the load where congestion begins, or the reason why there is none, as in a report."""
        fit, point, break_point = self.fit, self.construction.point, self.placed.point
        shape = f"n = {fit.n:.3g} (fitted)" if fit.free else fit.name
        quality = "" if fit.r2 is None else f" (R² {fit.r2:.3f})"
        if break_point is not None:
            load = break_point.bandwidth_gbps
            low, value, high = (100 * end / fit.C_gbps for end in (load.low, load.value, load.high))
            begins = f"congestion begins at {load.value:.4g} Gbit/s, {value:.0f} % of the capacity"
            begins += f" (95 % interval {low:.0f} to {high:.0f} %)"
        elif point is not None:
            begins = f"congestion begins at {point.bandwidth_gbps:.4g} Gbit/s, "
            begins += f"{100 * point.bandwidth_gbps / fit.C_gbps:.0f} % of the capacity (without an interval)"
        else:
            begins = f"no congestion point was found, because {self.construction.reason}"
        times = f"The times at loads {fit.range}" if fit.range else "The times"
        return f"{times} fit {shape}{quality}; {begins}."

    def lines(self) -> list[str]:
        """Return the text for a terminal, line by line."""
        lines = [self._answer(), "", self.fit.report()]
        point, break_point = self.construction.point, self.placed.point
        if point is None:
            lines.append(f"No congestion point: {self.construction.reason}")
        else:
            at = f"{point.bandwidth_gbps:.4g} Gbit/s, {format_duration(point.iteration_s)}"
            lines.append(f"Congestion point  {at}: {point.data_mb:.1f} MB per iteration")
        if break_point is None:
            return [*lines, f"No break: {self.placed.reason}"]
        load = _with_interval(break_point.bandwidth_gbps, "Gbit/s")
        volume = _with_interval(break_point.data_mb, "MB per iteration")
        lines.append(f"Break of two lines  {load}: {volume}")
        warnings = [*break_point.warnings, *filter(None, [compared(break_point, self.fit)])]
        return [*lines, *(f"  warning: {text}" for text in warnings)]


def fit_points(
    model: CongestionModel, points: Points, robust: bool, samples: int, max_load: str | None = None
) -> PointsFit:
    """Fit the points up to a load, or all, and look for both kinds of congestion point among all but outliers."""
    loads, times, capacity = points.bandwidth_gbps, points.iteration_s, model.capacity_gbps
    found = model.fit(loads, times, spread_s=points.error_s, robust=robust, bootstrap=samples, max_load=max_load)
    if robust:
        fitted, limit = set(zip(found.bandwidth_gbps, found.iteration_s, strict=True)), found.max_load_gbps
        every = zip(loads, times, strict=True)
        kept = [one for one in every if one in fitted or (limit is not None and one[0] > limit)]
        loads, times = [load for load, _ in kept], [seconds for _, seconds in kept]
    return PointsFit(
        found, find_congestion_point(loads, times, capacity, samples=0), find_break(loads, times, capacity)
    )


def _with_interval(number: BreakCandidate, unit: str) -> str:
    return f"{number.value:.4g} ({number.low:.4g} to {number.high:.4g}) {unit}"
