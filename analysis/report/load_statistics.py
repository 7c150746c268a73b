"""Compares series at some loads: slowdown, spread and quantiles of iteration times, and order of traffic kinds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import special

from ringtap.analysis import published_results
from ringtap.analysis.plots.style import joined, title_of
from ringtap.analysis.statistics.quantiles import LEVEL
from ringtap.analysis.statistics.two_sample import MIN_VALUES, Comparison, compare, correct_together
from ringtap.analysis.sweeps.points import Point
from ringtap.analysis.sweeps.series_analysis import Series, grouped
from ringtap.core.run_directory_schema import MERGE_SHARE, VARIANTS

LIGHT_SHARE, HEAVY_SHARE = 0.30, 0.80  # the loads that figures 3-5 and B-1 compare
BY = ("traffic", *VARIANTS)  # what pairs of series differ in
ORDER_SHARES = (0.60, HEAVY_SHARE)  # the loads at which kinds of traffic are put in order
NEAR_SHARE = 0.08  # of capacity: largest distance of a measured load from them
QUANTILES = (0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99)
MIN_INDEPENDENT = 3.0  # the interval of a mean of fewer iterations is too wide to be useful

Interval = tuple[float, float]


@dataclass(frozen=True)
class Loaded:
    """A series at a light or a heavy load.

    Attributes:
        share: target load, as a share of capacity.
        bandwidth_gbps: measured load of the point nearest to it.
        iterations: number of iterations of this point.
        mean_s: mean iteration time.
        mean_interval_s: its 95 % interval; None if iterations are too few, or their number or spread is not known.
        p99_s: 99th percentile.
        p99_low_s: lower end of its 95 % interval.
        p99_high_s: upper end; an end is None if the iterations cannot bound it.
        spread: standard deviation over mean.
        quantiles_s: quantile -> time; empty if single iterations are not known.
    """

    share: float
    bandwidth_gbps: float
    iterations: int | None
    mean_s: float
    mean_interval_s: Interval | None
    p99_s: float | None
    p99_low_s: float | None
    p99_high_s: float | None
    spread: float | None
    quantiles_s: dict[float, float]


@dataclass(frozen=True)
class Tails:
    """Effects of load on a series.

    Attributes:
        light: the series at about 30 % of capacity; None without a point near it.
        heavy: the series at about 80 % of capacity; likewise.
        growth: mean at the heavy load over that without cross traffic; None without either.
        growth_interval: its 95 % interval; None if either mean has none.
        p99_over_mean: p99 over mean, averaged over the points; None without any.
    """

    light: Loaded | None
    heavy: Loaded | None
    growth: float | None
    growth_interval: Interval | None
    p99_over_mean: float | None

    def to_json(self) -> dict[str, Any]:
        """The tails as plain values; quantiles keyed as ``p50``."""
        item = asdict(self)
        for name, loaded in (("light", self.light), ("heavy", self.heavy)):
            if loaded is not None:
                item[name]["quantiles_s"] = {f"p{q * 100:g}": value for q, value in loaded.quantiles_s.items()}
        return item


@dataclass(frozen=True)
class Slowdown:
    """Mean iteration time at a load over that without cross traffic.

    Attributes:
        bandwidth_gbps: measured load of the point nearest to the target; None without one.
        ratio: the ratio of the means; None if it is not known.
        interval: its 95 % interval; None if either mean has none.
        reason: the reason why the ratio is not known, else empty.
    """

    bandwidth_gbps: float | None
    ratio: float | None
    interval: Interval | None
    reason: str


def slowdown(series: Series, share: float) -> Slowdown:
    """Compare a series at about a share of capacity with itself without cross traffic."""
    point = nearest_point(series, share)
    if point is None or point.mean_s is None:
        near = f"within {100 * NEAR_SHARE:.0f} percentage points of that load"
        return Slowdown(None, None, None, f"no point of several iterations lies {near}")
    if not series.no_load_s:
        return Slowdown(point.cross_gbps, None, None, "no point without cross traffic was measured")
    return Slowdown(point.cross_gbps, point.mean_s / series.no_load_s, _ratio_interval(point, series.alone), "")


def tails(series: Series) -> Tails:
    """Compare a series at about 30 % and 80 % of capacity with itself without cross traffic."""
    light, heavy = (nearest_point(series, share) for share in (LIGHT_SHARE, HEAVY_SHARE))
    ratios = [point.p99_s / point.mean_s for point in series.used if point.p99_s is not None and point.mean_s]
    growth = slowdown(series, HEAVY_SHARE)
    return Tails(
        light=None if light is None else _loaded(light, LIGHT_SHARE),
        heavy=None if heavy is None else _loaded(heavy, HEAVY_SHARE),
        growth=growth.ratio,
        growth_interval=growth.interval,
        p99_over_mean=float(np.mean(ratios)) if ratios else None,
    )


def nearest_point(series: Series, share: float) -> Point | None:
    """Find the point nearest to a share of capacity, within 8 %; points of a single iteration do not count."""
    target = share * series.capacity_gbps
    near = [
        (abs(point.cross_gbps - target), number)
        for number, point in enumerate(series.used)
        if point.cross_gbps is not None and point.iterations != 1
    ]
    if not near or min(near)[0] > NEAR_SHARE * series.capacity_gbps:
        return None
    return series.used[min(near)[1]]


def mean_interval(point: Point) -> Interval | None:
    """95 % interval of the mean iteration time, in s: mean ± t * s / sqrt(m), m the independent iterations."""
    error = _relative_error(point)
    if error is None or point.mean_s is None:
        return None
    half = point.mean_s * error[0] * _t(error[1])
    return point.mean_s - half, point.mean_s + half


def _relative_error(point: Point) -> tuple[float, float] | None:
    """Relative standard error of the mean, and the effective number of independent iterations behind it."""
    count = point.iterations if point.independent is None else point.independent
    if count is None or count < MIN_INDEPENDENT or point.variation is None:
        return None
    return point.variation / math.sqrt(count), count


def _t(count: float) -> float:
    return float(special.stdtrit(count - 1, (1 + LEVEL) / 2))


def _ratio_interval(heavy: Point, alone: list[Point]) -> Interval | None:
    """Interval of the heavy point's mean over that of the others, symmetric in its logarithm (delta method)."""
    of_heavy, of_alone = _relative_error(heavy), [_relative_error(point) for point in alone]
    known = [error for error in of_alone if error is not None]
    if of_heavy is None or heavy.mean_s is None or not alone or len(known) < len(of_alone):
        return None
    error = math.hypot(of_heavy[0], math.sqrt(sum(each * each for each, _ in known)) / len(known))
    mean_s = sum(point.mean_s or 0.0 for point in alone) / len(alone)
    reach = _t(min(of_heavy[1], *(count for _, count in known))) * error
    return heavy.mean_s / mean_s * math.exp(-reach), heavy.mean_s / mean_s * math.exp(reach)


def _loaded(point: Point, share: float) -> Loaded:
    times = point.iteration_s
    return Loaded(
        share=share,
        bandwidth_gbps=float(point.cross_gbps or 0.0),
        iterations=point.iterations,
        mean_s=float(point.mean_s or 0.0),
        mean_interval_s=mean_interval(point),
        p99_s=point.p99_s,
        p99_low_s=point.p99_low_s,
        p99_high_s=point.p99_high_s,
        spread=point.variation,
        quantiles_s={q: float(np.quantile(times, q)) for q in QUANTILES} if len(times) else {},
    )


@dataclass(frozen=True)
class Pair:
    """Two series of a model at about the same load.

    Attributes:
        title: the model, and the traffic kind and variants that both have in common.
        by: the difference: a name of `BY`.
        share: target load, as a share of capacity.
        series: names of both series.
        bandwidth_gbps: measured loads of both.
        result: comparison of the second series with the first.
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
    """Compare series of a model that differ in one of `BY` only, at about 30 % and 80 % of capacity.

    Collectives, which may be many, are compared with the first one. The p values of all pairs are corrected together.
    Pairs without single iteration times are left out.
    """
    found: list[Pair] = []
    for number, one in enumerate(series):
        for other in series[number + 1 :]:
            if len(by := _differences(one, other)) != 1 or by == ["model"]:
                continue
            if by == ["collective"] and any(_differences(before, one) == by for before in series[:number]):
                continue
            for share in (LIGHT_SHARE, HEAVY_SHARE):
                pair = _pair(one, other, by[0], share)
                if pair is not None:
                    found.append(pair)
    corrected = correct_together([pair.result for pair in found])
    return [replace(pair, result=result) for pair, result in zip(found, corrected, strict=True)]


def _differences(one: Series, other: Series) -> list[str]:
    return [name for name in ("model", *BY) if getattr(one, name) != getattr(other, name)]


def _pair(one: Series, other: Series, by: str, share: float) -> Pair | None:
    points = [nearest_point(each, share) for each in (one, other)]
    first, second = points
    if first is None or second is None or min(len(first.iteration_s), len(second.iteration_s)) < MIN_VALUES:
        return None
    common = [_name(one, name) for name in BY if name != by and getattr(one, name)]
    names = (_name(one, by), _name(other, by))
    return Pair(
        title=", ".join((one.title, *common)),
        by=by,
        share=share,
        series=(one.name, other.name),
        bandwidth_gbps=(float(first.cross_gbps or 0.0), float(second.cross_gbps or 0.0)),
        result=compare(first.iteration_s, second.iteration_s, names),
    )


def _name(series: Series, by: str) -> str:
    return title_of(series.traffic) if by == "traffic" else getattr(series, by) or f"{by} not noted"


@dataclass(frozen=True)
class KindAtLoad:
    """Mean iteration time of a model under one kind of traffic, at exactly a share of capacity.

    Attributes:
        traffic: traffic kind.
        mean_s: mean iteration time, from a straight line of ln t between the two neighbouring points; None if no point
            of several iterations lies on one of the sides.
        interval_s: its 95 % interval; None if one of the two means has none.
    """

    traffic: str
    mean_s: float | None
    interval_s: Interval | None


@dataclass(frozen=True)
class KindOrder:
    """Kinds of traffic in order of how much they slow a model at the same load.

    Attributes:
        title: the model, and its variants if they are known.
        share: the load, as a share of capacity.
        kinds: the kinds, shortest mean first; those without a mean last.
        firm: for each pair of neighbours with a mean, True if their 95 % intervals do not overlap.
        thesis: the same kinds in the thesis's order; empty if the thesis has not measured the model.
    """

    title: str
    share: float
    kinds: tuple[KindAtLoad, ...]
    firm: tuple[bool, ...]
    thesis: tuple[str, ...]


def order_kinds(series: Sequence[Series]) -> list[KindOrder]:
    """Put the kinds of traffic of each model in order at 60 % and 80 % load; models under one kind are left out."""
    groups = [group for group in grouped(series, "model", "variant") if len(group) > 1]
    return [_order(group, share) for group in groups for share in ORDER_SHARES]


def _order(series: Sequence[Series], share: float) -> KindOrder:
    kinds = sorted(
        (_at_load(one, share * one.capacity_gbps) for one in series),
        key=lambda kind: math.inf if kind.mean_s is None else kind.mean_s,
    )
    measured = [kind for kind in kinds if kind.mean_s is not None]
    firm = [
        before.interval_s is not None and after.interval_s is not None and before.interval_s[1] < after.interval_s[0]
        for before, after in pairwise(measured)
    ]
    names, first = {kind.traffic for kind in kinds}, series[0]
    published = published_results.KINDS_BY_SLOWDOWN if first.model in published_results.NO_LOAD_S else ()
    return KindOrder(
        title=joined(first.title, first.variant),
        share=share,
        kinds=tuple(kinds),
        firm=tuple(firm),
        thesis=tuple(kind for kind in published if kind in names),
    )


def _at_load(series: Series, load_gbps: float) -> KindAtLoad:
    """Interpolate the mean iteration time at a load, and its interval by the delta method."""
    points = [point for point in series.used if point.iterations != 1]
    loads = [point.cross_gbps or 0.0 for point in points]
    after = bisect_left(loads, load_gbps)
    if after == len(loads) > 1 and load_gbps - loads[-1] <= MERGE_SHARE * series.capacity_gbps:
        after -= 1  # the heaviest point is as good as at this load
    if after in (0, len(loads)):
        return KindAtLoad(series.traffic, None, None)
    pair = points[after - 1], points[after]
    weight = (load_gbps - loads[after - 1]) / (loads[after] - loads[after - 1])
    weights = (1 - weight, weight)
    mean_s = math.exp(sum(part * math.log(point.mean_s or 0.0) for part, point in zip(weights, pair, strict=True)))
    errors = [error for error in map(_relative_error, pair) if error is not None]
    if len(errors) < 2:
        return KindAtLoad(series.traffic, mean_s, None)
    error = math.hypot(*(part * each for part, (each, _) in zip(weights, errors, strict=True)))
    reach = _t(min(count for _, count in errors)) * error
    return KindAtLoad(series.traffic, mean_s, (mean_s * math.exp(-reach), mean_s * math.exp(reach)))
