"""Compares a sweep with expectations that follow from the thesis."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ringtap.analysis import published_results
from ringtap.analysis.sweeps.compare_at_equal_loads import AtLoad, at_load
from ringtap.analysis.sweeps.series_analysis import Series
from ringtap.core.run_directory_schema import MAX_LATE_SHARE, REQUIRED_SHARE
from ringtap.core.units import counted

NO_LOAD_TOLERANCE = RATE_TOLERANCE = 0.10
FALL_TOLERANCE = 0.05  # of the mean: a smaller fall between neighbouring loads is noise
VOLUME_OVER_DEMAND = (0.9, 1.6)
VGG_R2_LOG = 0.97
CHOSEN_R2 = 0.9
LATE_SAMPLES = f"at most {MAX_LATE_SHARE:.0%} of the samples in each window are late"
SPREAD_FROM_SHARE = 0.5


@dataclass(frozen=True)
class Expectation:
    """One expectation and its result.

    Attributes:
        subject: series or part of the testbed.
        expected: the expectation, as text.
        found: the result, as text.
        ok: True if the expectation holds; None if it could not be judged.
    """

    subject: str
    expected: str
    found: str
    ok: bool | None


def check(info: dict[str, Any], series: Iterable[Series]) -> list[Expectation]:
    """Compare series with the expectations; ``info`` is their sweep's run.json, empty for a table."""
    checks = [_precheck(item) for item in info.get("precheck") or []]
    every = list(series)
    for one in every:
        checks += [*_late_samples(one), *_disturbances(one), *_no_load(one)]
        if one.has_cross_traffic:
            checks += [_growth(one), _volume(one), *_vgg_fit(one), _chosen_fit(one)]
    return checks + [check for one in every if one.traffic == "burst" for check in _burst_spread(one, every)]


def flow_rates(packets: Iterable[dict[str, Any]]) -> list[Expectation]:
    """Compare the rates of training flows at recorded points with those of Table 3.11, where it has the point."""
    return [
        _flow_rate(item, f"the training flow {where}", published[key], item[key], published["table"])
        for item in packets
        if (published := item["thesis"]) is not None
        for key, where in (
            ("alone_gbps", "apart from cross traffic"),
            ("shared_gbps", "beside cross traffic"),
        )
    ]


def _flow_rate(item: dict[str, Any], what: str, published: float, found: float | None, table: str) -> Expectation:
    expected = f"{what} has {published:g} Gbit/s while it sends, within {100 * RATE_TOLERANCE:.0f} % ({table})"
    if found is None:
        return Expectation(item["label"], expected, "its rate is not known", None)
    off = found / published - 1
    return Expectation(item["label"], expected, f"{found:.2f} Gbit/s, {off:+.0%}", abs(off) <= RATE_TOLERANCE)


def _precheck(item: dict[str, Any]) -> Expectation:
    subject, share = f"{item.get('kind', '?')} traffic", item.get("share_of_capacity")
    required = float(item.get("required_share", REQUIRED_SHARE))  # depends on the plan's heaviest load
    expected = f"the generator alone reaches {required:.0%} of capacity"
    if not isinstance(share, int | float):
        return Expectation(subject, expected, "its rate was not recorded", None)
    return Expectation(subject, expected, f"it reached {share:.1%}", share >= required)


def _late_samples(series: Series) -> list[Expectation]:
    late = [point.late_share for point in series.points if point.late_share is not None]
    if not late:
        return []
    over = sum(share > MAX_LATE_SHARE for share in late)
    found = f"{over} of {counted(len(late), 'window')} have more" if over else "no window has more"
    return [Expectation(series.name, LATE_SAMPLES, f"{found}; the worst has {max(late):.1%}", not over)]


def _disturbances(series: Series) -> list[Expectation]:
    disturbed = [point.disturbed for point in series.points if point.disturbed]
    known = any(point.other_gbps is not None for point in series.points)
    if not known and not disturbed:
        return []
    found = (
        f"{len(disturbed)} of {len(series.points)} points disturbed: {disturbed[0][0]}"
        if disturbed
        else "they were and did"
    )
    return [Expectation(series.name, "the links were up and carried only the sweep's traffic", found, not disturbed)]


def _no_load(series: Series) -> list[Expectation]:
    published, where = published_results.no_load(series.model, series.transport)
    if published is None or series.collective:  # the thesis has the backend's own
        return []
    expected = f"iteration time without cross traffic within 10 % of {published:g} s ({where})"
    if series.no_load_s is None:
        return [Expectation(series.name, expected, "no point without cross traffic was measured", None)]
    off = series.no_load_s / published - 1
    return [Expectation(series.name, expected, f"{series.no_load_s:.3f} s, {off:+.1%}", abs(off) <= NO_LOAD_TOLERANCE)]


def _growth(series: Series) -> Expectation:
    expected = "the mean iteration time rises with the load"
    loads, times = series.loads_gbps, series.times_s
    if len(times) < 2:
        return Expectation(series.name, expected, "fewer than two points were measured", None)
    falls = [
        f"{times[i - 1]:.3f} s at {loads[i - 1]:.1f} Gbit/s but {times[i]:.3f} s at {loads[i]:.1f} Gbit/s"
        for i in range(1, len(times))
        if times[i] < (1 - FALL_TOLERANCE) * times[i - 1]
    ]
    return Expectation(series.name, expected, "; ".join(falls) or "it does", not falls)


def _volume(series: Series) -> Expectation:
    low, high = VOLUME_OVER_DEMAND
    expected = f"data volume of the congestion point from {low:g} to {high:g} times the demand"
    point = series.curve.point
    if point is None:
        return Expectation(series.name, expected, f"there is no congestion point: {series.curve.reason}", None)
    ratio = point.data_mb * 1e6 / series.demand.worker_bytes
    found = f"{point.data_mb:.1f} MB, {ratio:.2f} times {series.demand.worker_bytes / 1e6:.1f} MB"
    return Expectation(series.name, expected, found, low <= ratio <= high)


def _vgg_fit(series: Series) -> list[Expectation]:
    if (series.model, series.traffic) != ("vgg16", "consistent"):
        return []
    expected = f"R² of ln t at least {VGG_R2_LOG:g} with n = 1/2 (equation 3.5)"
    half = next((fit for fit in series.fit.candidates if fit.n == 0.5 and not fit.free), None) if series.fit else None
    if half is None or half.r2_log is None:
        return [Expectation(series.name, expected, series.fit_reason or "R² is undefined", None)]
    return [Expectation(series.name, expected, f"{half.r2_log:.4f}", half.r2_log >= VGG_R2_LOG)]


def _burst_spread(burst: Series, every: list[Series]) -> list[Expectation]:
    """Check that times spread more under burst traffic; in the thesis, 39.3 % of the mean against 7.8 %."""
    consistent = next((one for one in every if one.key == (burst.model, "consistent", burst.variant)), None)
    if consistent is None:
        return []
    expected = "burst traffic spreads iteration times more than consistent traffic of the same load, from half of C on"
    spreads = []
    for load in burst.loads_gbps:
        share = load / burst.capacity_gbps
        found = [at_load(one, share) for one in (burst, consistent)] if share >= SPREAD_FROM_SHARE else []
        known = [one.spread for one in found if isinstance(one, AtLoad) and one.spread is not None]
        spreads += [known] if len(known) == 2 else []
    if not spreads:
        return [Expectation(burst.name, expected, "both were not measured at such a load", None)]
    of_burst, of_consistent = (fmean(each) for each in zip(*spreads, strict=True))
    found_text = (
        f"standard deviation {of_burst:.1%} and {of_consistent:.1%} of the mean, over {counted(len(spreads), 'load')}"
    )
    return [Expectation(burst.name, expected, found_text, of_burst > of_consistent)]


def _chosen_fit(series: Series) -> Expectation:
    expected = f"R² of the chosen fit at least {CHOSEN_R2:g}"
    if series.fit is None or series.fit.r2 is None:
        return Expectation(series.name, expected, series.fit_reason or "R² is undefined", None)
    return Expectation(series.name, expected, f"{series.fit.r2:.4f} with {series.fit.name}", series.fit.r2 >= CHOSEN_R2)
