"""Comparisons of traffic kinds and of transports at a light and at a heavy load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringtap.analysis.plots.style import title_of
from ringtap.analysis.report.tails import HEAVY_SHARE, LIGHT_SHARE, nearest_point
from ringtap.analysis.statistics.two_sample import MIN_VALUES, Comparison, compare, correct_together
from ringtap.analysis.sweeps.points import Point
from ringtap.analysis.sweeps.series import Series


@dataclass(frozen=True)
class Pair:
    """Two series of a model at about the same load.

    Attributes:
        title: the model, and what else both have in common.
        by: ``traffic`` or ``transport``: what differs.
        share: target load, as a share of capacity.
        series: names of both series.
        bandwidth_gbps: measured loads of both.
        result: second against first.
    """

    title: str
    by: str
    share: float
    series: tuple[str, str]
    bandwidth_gbps: tuple[float, float]
    result: Comparison

    def to_json(self) -> dict[str, Any]:
        """The pair as plain values."""
        item: dict[str, Any] = {"title": self.title, "by": self.by, "share": self.share}
        item |= {"series": list(self.series), "bandwidth_gbps": list(self.bandwidth_gbps)}
        return item | self.result.to_json()


def compare_kinds(series: Sequence[Series]) -> list[Pair]:
    """Compare series of a model that differ in traffic or transport alone, at about 30 % and 80 % of capacity.

    The p values of all pairs are corrected together. Pairs without single iteration times are left out.
    """
    found: list[Pair] = []
    for number, one in enumerate(series):
        for other in series[number + 1 :]:
            if one.model != other.model or (one.traffic != other.traffic) == (one.transport != other.transport):
                continue
            for share in (LIGHT_SHARE, HEAVY_SHARE):
                pair = _pair(one, other, share)
                if pair is not None:
                    found.append(pair)
    corrected = correct_together([pair.result for pair in found])
    return [
        Pair(pair.title, pair.by, pair.share, pair.series, pair.bandwidth_gbps, result)
        for pair, result in zip(found, corrected, strict=True)
    ]


def _pair(one: Series, other: Series, share: float) -> Pair | None:
    points = [nearest_point(each, share) for each in (one, other)]
    first, second = points
    if first is None or second is None or min(len(first.iteration_s), len(second.iteration_s)) < MIN_VALUES:
        return None
    by = "traffic" if one.traffic != other.traffic else "transport"
    common = one.transport if by == "traffic" else title_of(one.traffic)
    names = (_name(one, by), _name(other, by))
    return Pair(
        title=", ".join(part for part in (one.title, common) if part),
        by=by,
        share=share,
        series=(one.name, other.name),
        bandwidth_gbps=(_load(first), _load(second)),
        result=compare(first.iteration_s, second.iteration_s, names),
    )


def _name(series: Series, by: str) -> str:
    return title_of(series.traffic) if by == "traffic" else series.transport or "transport not noted"


def _load(point: Point) -> float:
    return float(point.cross_gbps or 0.0)
