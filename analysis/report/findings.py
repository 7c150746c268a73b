"""Findings of a sweep as sentences, each with its certainty."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ringtap.analysis import thesis
from ringtap.analysis.plots.style import title_of
from ringtap.analysis.report.load_statistics import HEAVY_SHARE, LEVEL, Pair, Tails
from ringtap.analysis.report.thesis_expectations import LATE_SAMPLES, Expectation
from ringtap.analysis.statistics.stretches import MIN_STRETCHED
from ringtap.analysis.statistics.two_sample import Estimate
from ringtap.analysis.sweeps.series_analysis import Series
from ringtap.core.units import counted

FIRM_HALF_WIDTH = 0.10  # of the value: a wider interval leaves the first digit open
FIRM_R2_LOG = 0.97
_MAX_NAMES = 4


@dataclass(frozen=True)
class Finding:
    """One statement.

    Attributes:
        text: the statement, a sentence.
        firm: True if the measurement supports it.
        why: reason why it is firm or not.
    """

    text: str
    firm: bool
    why: str


def findings(
    series: Sequence[Series], found: Sequence[Tails], pairs: Sequence[Pair], checks: Sequence[Expectation]
) -> list[Finding]:
    """Return the statements of a report, the firm ones first; both groups are in order of importance."""
    measured = [one for one in series if one.used]
    if not measured:
        return []
    tails = [tail for one, tail in zip(series, found, strict=True) if one.used]
    statements = [
        *_simulated(measured),
        *_growth(measured, tails),
        *_kinds(pairs),
        *_congestion(measured),
        *_curve(measured),
    ]
    statements += _utilisation(measured)
    statements += [*_tail_bounds(measured), *_late_samples(checks)]
    return sorted(statements, key=lambda one: not one.firm)


def paragraph(statements: Sequence[Finding]) -> str:
    """Return the statements as one text, the firm ones first."""
    firm, open_ones = [one for one in statements if one.firm], [one for one in statements if not one.firm]
    parts = [one.text for one in firm]
    if open_ones:
        parts += [f"Less sure: {one.text[0].lower()}{one.text[1:-1]}; {one.why}." for one in open_ones]
    return " ".join(parts)


def name_in_text(series: Series) -> str:
    """Name of a series within a sentence."""
    under = f" under {title_of(series.traffic)}" if series.has_cross_traffic else ""
    return f"{series.title}{under}{series.over}"


def _simulated(series: Sequence[Series]) -> list[Finding]:
    names = [name_in_text(one) for one in series if one.is_simulated]
    if not names:
        return []
    text = f"The iterations of {_listed(names)} are simulated: nothing was measured there."
    return [Finding(text, True, "the run says so; intervals of these numbers hold only how simulated iterations vary")]


def _growth(series: Sequence[Series], tails: Sequence[Tails]) -> list[Finding]:
    known = [(one, tail, tail.growth) for one, tail in zip(series, tails, strict=True) if tail.growth is not None]
    if not known:
        return []
    least, most = min(known, key=lambda item: item[2]), max(known, key=lambda item: item[2])
    text = (
        f"With cross traffic at about {100 * HEAVY_SHARE:.0f} % of the capacity an iteration takes "
        f"{_times(*least[1:])} as long as alone for {name_in_text(least[0])}"
    )
    if len(known) > 1:
        text += f", and {_times(*most[1:])} for {name_in_text(most[0])}"
    named = [least, most]
    wide = [name_in_text(one) for one, tail, growth in known if not _narrow(tail.growth_interval, growth)]
    firm = all(_narrow(tail.growth_interval, growth) for _, tail, growth in named)
    reason = f"the {100 * LEVEL:.0f} % interval of each ratio of means lies within {100 * FIRM_HALF_WIDTH:.0f} % of it"
    if wide:
        reason += f", but for {_listed(wide)}, whose iterations are too few or too uneven"
    return [Finding(f"{text}.", firm, reason)]


def _times(tail: Tails, growth: float) -> str:
    bounds = "" if tail.growth_interval is None else " ({:.3g} to {:.3g})".format(*tail.growth_interval)
    return f"{growth:.3g} times{bounds}"


def _narrow(interval: tuple[float, float] | None, value: float) -> bool:
    return interval is not None and (interval[1] - interval[0]) / 2 <= FIRM_HALF_WIDTH * value


def _kinds(pairs: Sequence[Pair]) -> list[Finding]:
    """The largest difference between two kinds at the heavy load, for traffic, transport, collective and topology."""
    statements = []
    kinds = (
        ("traffic", "Of all kinds of traffic,", "under"),
        ("transport", "Of all transports,", "over"),
        ("collective", "Of the first collective and each other one,", "by"),
        ("topology", "Of all topologies,", "on"),
    )
    for by, among, relation in kinds:
        heavy = [pair for pair in pairs if pair.by == by and pair.share == HEAVY_SHARE]
        if not heavy:
            continue
        beyond = [pair for pair in heavy if any(test.is_beyond_chance for test in pair.result.tests)]
        most = max(beyond or heavy, key=_effect)
        result, (first, second) = most.result, most.result.names
        text = (
            f"{among} {second} and {first} differ most, for {most.title} at about {100 * HEAVY_SHARE:.0f} % of the "
            f"capacity: {relation} {second} the median iteration takes {_ratio(result.median_ratio)} as long, and the "
            f"99th percentile is {_ratio(result.p99_ratio)} as large."
        )
        reason = f"{len(beyond)} of {len(heavy)} pairs at that load differ beyond chance, corrected for their number"
        untested = sum(all(test.p is None for test in pair.result.tests) for pair in heavy)
        if untested:
            reason += f"; whether {untested} of them do is not known: they have fewer than {MIN_STRETCHED} iterations"
        loads = [abs(pair.bandwidth_gbps[0] - pair.bandwidth_gbps[1]) for pair in heavy]
        if max(loads) > 0.5:
            reason += f"; their loads differ by up to {max(loads):.1f} Gbit/s"
        statements.append(Finding(text, bool(beyond), reason))
    return statements


def _effect(pair: Pair) -> float:
    """Larger difference of two kinds, in the median or in the 99th percentile, as a logarithm of the ratio."""
    return max(abs(math.log(ratio.value)) for ratio in (pair.result.median_ratio, pair.result.p99_ratio))


def _ratio(estimate: Estimate) -> str:
    bounded = estimate.low is not None and estimate.high is not None
    return f"{estimate.value:.3g} times" + (f" ({estimate.low:.3g} to {estimate.high:.3g})" if bounded else "")


def _congestion(series: Sequence[Series]) -> list[Finding]:
    found = [(one, one.congestion.point) for one in series if one.congestion.point is not None]
    if not found:
        return []
    loads = sorted(point.bandwidth_gbps for _, point in found)
    over = sorted(point.data_mb * 1e6 / one.demand.worker_bytes for one, point in found)
    which = "in every series" if len(found) == len(series) else f"in {len(found)} of {len(series)} series"
    text = (
        f"Congestion begins {which} at {_range(loads, '.1f')} Gbit/s of cross traffic, which leaves room for "
        f"{_range(over, '.2f')} times the data that training needs."
    )
    narrow = inside = 0
    for one, point in found:
        break_point = one.segments.point
        if break_point is not None:
            low, high = break_point.bandwidth_gbps.low, break_point.bandwidth_gbps.high
            narrow += (high - low) / 2 <= FIRM_HALF_WIDTH * one.capacity_gbps
            inside += low <= point.bandwidth_gbps <= high
    reason = (
        f"the point of the thesis's construction lies in the {100 * LEVEL:.0f} % interval of the break of two segments "
        f"in {inside} of {counted(len(found), 'series', 'series')}, and this interval is at most "
        f"± {100 * FIRM_HALF_WIDTH:.0f} % of the capacity in {narrow}"
    )
    return [Finding(text, inside == narrow == len(found), reason)]


def _curve(series: Sequence[Series]) -> list[Finding]:
    fits = [(one, one.fit) for one in series if one.fit is not None and one.fit.r2_log is not None]
    if not fits:
        return []
    good = [one for one, fit in fits if (fit.r2_log or 0.0) >= FIRM_R2_LOG]
    middle = statistics.median(fit.r2_log or 0.0 for _, fit in fits)
    text = f"The times follow t = A·exp(B/(C−BW)ⁿ), with a median R² (log) of {middle:.3f} over {len(fits)} series."
    reason = f"{len(good)} of {len(fits)} reach {FIRM_R2_LOG:g}"
    statements = [Finding(text, 2 * len(good) > len(fits), reason)]
    unsure = [name_in_text(one) for one, fit in fits if any(text.startswith("n ") for text in fit.warnings)]
    free = [name_in_text(one) for one, fit in fits if fit.free and name_in_text(one) not in unsure]
    if unsure or free:
        text = f"The exponent n remains open for {_listed([*unsure, *free])}."
        reason = "the measured loads do not distinguish n, A and B there, or n was fitted"
        statements.append(Finding(text, False, reason))
    return statements


def _utilisation(series: Sequence[Series]) -> list[Finding]:
    """The fullest that the bottleneck was under each kind of traffic, and what was of use of it past congestion."""
    fullest: dict[str, float] = {}
    of_use: dict[str, list[float]] = {}
    for one in (one for one in series if not one.is_simulated):
        for point in one.points:
            if point.utilisation is not None:
                under = f"under {title_of(one.traffic)}" if one.has_cross_traffic else "without cross traffic"
                fullest[under] = max(fullest.get(under, 0.0), point.utilisation)
        if one.mean_difference_gbps is not None:
            of_use.setdefault(one.traffic, []).append(1 - one.mean_difference_gbps / one.capacity_gbps)
    if not fullest:
        return []
    carried = [f"{share:.0%} {under}" for under, share in fullest.items()]
    text = f"Of its capacity, the bottleneck carried at most {_listed(carried)}"
    used = [f"{statistics.fmean(shares):.0%} under {title_of(kind)}" for kind, shares in of_use.items()]
    if used:
        text += f"; past the congestion point, cross traffic and the demand of training took {_listed(used)}"
    reason = (
        "the port's counters hold every frame, with headers, acknowledgements and repeated segments; the thesis "
        f"(chapter 4) has an effective utilization of around {thesis.BURST_UTILISATION:.0%} under burst traffic"
    )
    return [Finding(f"{text}.".replace("%", " %"), True, reason.replace("%", " %"))]


def _tail_bounds(series: Sequence[Series]) -> list[Finding]:
    points = [point for one in series for point in one.used if point.p99_s is not None]
    if not points:
        return []
    bounded = sum(point.p99_low_s is not None and point.p99_high_s is not None for point in points)
    if bounded == len(points):
        text = "Every 99th percentile has an interval with both ends."
        return [Finding(text, True, "each point has the roughly 300 independent iterations that this needs")]
    open_ones = f"{len(points) - bounded} of {counted(len(points), 'point')}"
    text = f"The 99th percentiles of {open_ones} have no upper bound: they are close to the longest iteration."
    return [Finding(text, False, "an upper bound needs about 300 independent iterations")]


def _late_samples(checks: Sequence[Expectation]) -> list[Finding]:
    late = [one.subject for one in checks if one.expected == LATE_SAMPLES and one.ok is False]
    if not late:
        return []
    text = f"In {_listed(late)} the testbed was too busy: many samples came late."
    return [Finding(text, False, "the iteration times in these windows may be up to half too long")]


def _range(ordered: Sequence[float], form: str) -> str:
    low, high = format(ordered[0], form), format(ordered[-1], form)
    return low if low == high else f"{low} to {high}"


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:_MAX_NAMES])
    if len(names) > _MAX_NAMES:
        shown.append(f"{len(names) - _MAX_NAMES} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
