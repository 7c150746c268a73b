"""Compares series at some loads: slowdown, spread and quantiles of iteration times, and order of traffic kinds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from ringtap.analysis import published_results
from ringtap.analysis.plots.style import joined, title_of
from ringtap.analysis.statistics.two_sample import MIN_VALUES, Comparison, correct_together
from ringtap.analysis.sweeps.compare_at_equal_loads import (
    AtLoad,
    Interval,
    at_load,
    common_share,
    compare_moved,
    relative_error,
    student_t,
)
from ringtap.analysis.sweeps.points import Point
from ringtap.analysis.sweeps.series_analysis import Series, grouped
from ringtap.core.run_directory_schema import VARIANTS

LIGHT_SHARE, MIDDLE_SHARE, ORDER_SHARE = 0.30, 0.50, 0.60  # loads beside the heavy one
BY = ("traffic", *VARIANTS)  # what pairs of series differ in
QUANTILES = (0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99)


@dataclass(frozen=True)
class Loaded:
    """A series at exactly a light or a heavy load, by the iterations of the nearest point moved there.

    Attributes:
        share: the load, as a share of capacity.
        bandwidth_gbps: the load.
        measured_gbps: load of the point whose iterations these are.
        iterations: number of iterations of this point.
        mean_s: mean iteration time.
        mean_interval_s: its 95 % interval; None if iterations are too few, or their number or spread is not known.
        p99_s: 99th percentile.
        p99_low_s: lower end of its 95 % interval.
        p99_high_s: upper end; an end is None if the iterations cannot bound it.
        spread: standard deviation over mean, between the two points next to the load.
        quantiles_s: quantile -> time; empty if single iterations are not known.
    """

    share: float
    bandwidth_gbps: float
    measured_gbps: float
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
        light: the series at 30 % of capacity; None if it is not known there.
        heavy: the series at the heavy load of `common_share`; likewise.
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
        ratio: the ratio of the means; None if it is not known.
        interval: its 95 % interval; None if either mean has none.
        mean_s: mean iteration time at the load.
        mean_interval_s: its 95 % interval, likewise.
        reason: the reason why the ratio is not known, else empty.
    """

    ratio: float | None
    interval: Interval | None
    mean_s: float | None
    mean_interval_s: Interval | None
    reason: str


def slowdown(series: Series, share: float) -> Slowdown:
    """Compare a series at a share of capacity with itself without cross traffic."""
    found = at_load(series, share)
    if isinstance(found, str):
        return Slowdown(None, None, None, None, found)
    if not series.no_load_s:
        reason = "no point without cross traffic was measured"
        return Slowdown(None, None, found.mean_s, found.interval_s, reason)
    ratio = found.mean_s / series.no_load_s
    return Slowdown(ratio, _ratio_interval(found, series.alone), found.mean_s, found.interval_s, "")


def tails(series: Series, heavy_share: float) -> Tails:
    """Compare a series at 30 % of capacity and at a heavy load with itself without cross traffic."""
    light, heavy = (at_load(series, share) for share in (LIGHT_SHARE, heavy_share))
    ratios = [point.p99_s / point.mean_s for point in series.used if point.p99_s is not None and point.mean_s]
    growth = slowdown(series, heavy_share)
    return Tails(
        light=None if isinstance(light, str) else _loaded(light, series.capacity_gbps),
        heavy=None if isinstance(heavy, str) else _loaded(heavy, series.capacity_gbps),
        growth=growth.ratio,
        growth_interval=growth.interval,
        p99_over_mean=float(np.mean(ratios)) if ratios else None,
    )


def _ratio_interval(loaded: AtLoad, alone: list[Point]) -> Interval | None:
    """Interval of the mean at a load over that of the others, symmetric in its logarithm (delta method)."""
    of_alone = [relative_error(point) for point in alone]
    known = [error for error in of_alone if error is not None]
    if loaded.error is None or not alone or len(known) < len(of_alone):
        return None
    error = math.hypot(loaded.error, math.sqrt(sum(each * each for each, _ in known)) / len(known))
    ratio = loaded.mean_s / (sum(point.mean_s or 0.0 for point in alone) / len(alone))
    reach = student_t(min(loaded.count, *(count for _, count in known))) * error + loaded.bend
    return ratio * math.exp(-reach), ratio * math.exp(reach)


def _loaded(found: AtLoad, capacity_gbps: float) -> Loaded:
    point, times = found.point, found.times_s
    return Loaded(
        share=found.share,
        bandwidth_gbps=found.share * capacity_gbps,
        measured_gbps=float(point.cross_gbps or 0.0),
        iterations=point.iterations,
        mean_s=found.mean_s,
        mean_interval_s=found.interval_s,
        p99_s=None if point.p99_s is None else point.p99_s * found.factor,
        p99_low_s=found.moved(point.p99_low_s, -1),
        p99_high_s=found.moved(point.p99_high_s, 1),
        spread=found.spread,
        quantiles_s={q: float(np.quantile(times, q)) for q in QUANTILES} if len(times) else {},
    )


@dataclass(frozen=True)
class Pair:
    """Two series of a model at the same load, by the iterations of their nearest points moved there.

    Attributes:
        title: the model, and the traffic kind and variants that both have in common.
        by: the difference: a name of `BY`.
        share: the load, as a share of capacity.
        series: names of both series.
        bandwidth_gbps: measured loads of the points whose iterations were moved to this load.
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
    """Compare series of a model that differ in one of `BY` only, at 30 % of capacity and at the heavy load.

    Collectives, which may be many, are compared with the first one. The p values of all pairs are corrected together.
    Pairs without single iteration times are left out.
    """
    found: list[Pair] = []
    loads = [{share: at_load(one, share) for share in (LIGHT_SHARE, common_share(series))} for one in series]
    for number, one in enumerate(series):
        for later, other in enumerate(series[number + 1 :], number + 1):
            if len(by := _differences(one, other)) != 1 or by == ["model"]:
                continue
            if by == ["collective"] and any(_differences(before, one) == by for before in series[:number]):
                continue
            for first, second in zip(loads[number].values(), loads[later].values(), strict=True):
                if isinstance(first, AtLoad) and isinstance(second, AtLoad):
                    found += _pair(one, other, by[0], first, second)
    corrected = correct_together([pair.result for pair in found])
    return [replace(pair, result=result) for pair, result in zip(found, corrected, strict=True)]


def _differences(one: Series, other: Series) -> list[str]:
    return [name for name in ("model", *BY) if getattr(one, name) != getattr(other, name)]


def _pair(one: Series, other: Series, by: str, first: AtLoad, second: AtLoad) -> list[Pair]:
    if min(len(first.times_s), len(second.times_s)) < MIN_VALUES:
        return []
    common = [_name(one, name) for name in BY if name != by and getattr(one, name)]
    pair = Pair(
        title=", ".join((one.title, *common)),
        by=by,
        share=first.share,
        series=(one.name, other.name),
        bandwidth_gbps=(float(first.point.cross_gbps or 0.0), float(second.point.cross_gbps or 0.0)),
        result=compare_moved(first, second, (_name(one, by), _name(other, by))),
    )
    return [pair]


def _name(series: Series, by: str) -> str:
    return title_of(series.traffic) if by == "traffic" else getattr(series, by) or f"{by} not noted"


@dataclass(frozen=True)
class KindAtLoad:
    """Mean iteration time of a model under one kind of traffic, at exactly a share of capacity.

    Attributes:
        traffic: traffic kind.
        mean_s: mean iteration time; None if it is not known there.
        interval_s: its 95 % interval; None if one of the means beside it has none.
        reason: the reason why the mean is not known, else empty.
    """

    traffic: str
    mean_s: float | None
    interval_s: Interval | None
    reason: str


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
    """Put the kinds of traffic of each model in order at 60 % and the heavy load; leave out models under one kind."""
    groups = [group for group in grouped(series, "model", "variant") if len(group) > 1]
    return [_order(group, share) for group in groups for share in (ORDER_SHARE, common_share(series))]


def _order(series: Sequence[Series], share: float) -> KindOrder:
    kinds = sorted(
        (_kind(one.traffic, at_load(one, share)) for one in series),
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


def _kind(traffic: str, found: AtLoad | str) -> KindAtLoad:
    if isinstance(found, str):
        return KindAtLoad(traffic, None, None, found)
    return KindAtLoad(traffic, found.mean_s, found.interval_s, "")
