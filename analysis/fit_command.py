"""What ``ringtap fit`` makes of a file of points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringtap.analysis.congestion import CongestionResult, find_congestion_point
from ringtap.analysis.fit import CongestionModel, FitResult
from ringtap.analysis.points_csv import Points
from ringtap.analysis.segmented import BreakResult, Placed, compared, find_break
from ringtap.units import format_duration


@dataclass(frozen=True)
class Found:
    """A fit with both kinds of congestion point.

    Attributes:
        fit: the fit.
        construction: the congestion point as the thesis's appendix A.2 makes it.
        placed: the break of two segments.
    """

    fit: FitResult
    construction: CongestionResult
    placed: BreakResult

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values; a missing point is null, and a warning says why."""
        item = self.fit.to_json()
        for name, found in (("congestion_point", self.construction), ("break", self.placed)):
            item[name] = None if found.point is None else found.point.to_json()
            if found.point is None:
                item["warnings"].append(f"no {name.replace('_', ' ')}: {found.reason}")
        if self.placed.point is not None and (text := compared(self.placed.point, self.fit)):
            item["break"]["warnings"].append(text)
        return item

    def lines(self) -> list[str]:
        """Text for a terminal."""
        lines = [self.fit.report()]
        point, place = self.construction.point, self.placed.point
        if point is None:
            lines.append(f"No congestion point: {self.construction.reason}")
        else:
            at = f"{point.bandwidth_gbps:.4g} Gbit/s, {format_duration(point.iteration_s)}"
            lines.append(f"Congestion point  {at}: {point.data_mb:.1f} MB an iteration")
        if place is None:
            return [*lines, f"No break: {self.placed.reason}"]
        load, volume = _between(place.bandwidth_gbps, "Gbit/s"), _between(place.data_mb, "MB an iteration")
        lines.append(f"Break of two lines  {load}: {volume}")
        told = [*place.warnings, *filter(None, [compared(place, self.fit)])]
        return [*lines, *(f"  warning: {text}" for text in told)]


def fit(model: CongestionModel, points: Points, robust: bool, samples: int) -> Found:
    """Fit the points and look for both kinds of congestion point."""
    loads, times, capacity = points.bandwidth_gbps, points.iteration_s, model.capacity_gbps
    found = model.fit(loads, times, spread_s=points.error_s, robust=robust, bootstrap=samples)
    return Found(found, find_congestion_point(loads, times, capacity), find_break(loads, times, capacity))


def _between(number: Placed, unit: str) -> str:
    return f"{number.value:.4g} ({number.low:.4g} to {number.high:.4g}) {unit}"
