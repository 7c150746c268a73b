"""Writes the overview of a sweep, a row of numbers per series, and sentences: the answer, lines, and findings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringtap.analysis import published_results
from ringtap.analysis.plots.style import title_of
from ringtap.analysis.report.load_statistics import LIGHT_SHARE, MIDDLE_SHARE, Pair, Tails, slowdown
from ringtap.analysis.report.thesis_expectations import LATE_SAMPLES, Expectation
from ringtap.analysis.statistics.quantiles import LEVEL
from ringtap.analysis.statistics.short_correlated_series import MIN_STRETCHED
from ringtap.analysis.statistics.two_sample import MIN_VALUES, Estimate
from ringtap.analysis.sweeps.compare_at_equal_loads import HEAVY_SHARE, AtLoad, at_load, common_share
from ringtap.analysis.sweeps.series_analysis import Series
from ringtap.core.run_directory_schema import VARIANTS
from ringtap.core.sweep_plans.training_jobs import model_label
from ringtap.core.units import counted, listed

FIRM_HALF_WIDTH = 0.10  # of the value: a wider interval leaves the first digit open
FIRM_R2_LOG = 0.97
_MAX_NAMES, _MAX_POINTS = 4, 3

Row = dict[str, Any]


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


def overview(series: Sequence[Series]) -> list[Row]:
    """Return the row of each series as plain values: no-load time, congestion point, slowdowns, fit and caveats.

    A slowdown is the mean iteration time over that without cross traffic, minus 1, at the same two loads in all rows.
    An unknown number is None, and its ``why`` has the reason. A caveat is a sentence that limits the fit.
    """
    shares = (MIDDLE_SHARE, common_share(series))
    return [_row_of(one, shares) for one in series]


def _row_of(series: Series, shares: Sequence[float]) -> Row:
    row: Row = {"series": series.name, "name": name_in_text(series), "title": series.title, "traffic": series.traffic}
    row |= {
        **{name: getattr(series, name) for name in VARIANTS},
        "has_cross_traffic": series.has_cross_traffic,
        "points": len(series.used),
        "no_load_s": series.no_load_s,
    }
    row["slowdowns"] = [_slowdown_row(series, share) for share in shares]
    row["congestion"], row["caveats"] = _congestion_row(series), []
    fit = series.fit
    row["fit"] = {"why": series.fit_reason}
    if fit is not None:
        numbers = {"A": fit.A, "B": fit.B, "n": fit.n, "model": fit.name, "r2": fit.r2, "range": fit.range}
        row["fit"] = numbers | {"points": len(fit.iteration_s), "why": ""}
        row["caveats"] = list(fit.warnings)
    return row


def _slowdown_row(series: Series, share: float) -> Row:
    found = slowdown(series, share)
    return {
        "share": share,
        "slowdown": None if found.ratio is None else found.ratio - 1,
        "interval": None if found.interval is None else [end - 1 for end in found.interval],
        "mean_s": found.mean_s,
        "mean_interval_s": found.mean_interval_s,
        "why": found.reason,
    }


def _congestion_row(series: Series) -> Row:
    """The point on the fitted curve."""
    found, point = series.curve, series.curve.point
    row: Row = {"bandwidth_gbps": None, "share": None, "interval_share": None}
    row |= {"text": found.clause, "why": found.reason}
    if point is not None:
        row |= {"bandwidth_gbps": point.bandwidth_gbps, "share": point.bandwidth_gbps / series.capacity_gbps}
        row["interval_share"] = list(point.interval_share)
    return row


def answer(rows: Sequence[Row], is_running: bool = False) -> str:
    """Return how much iterations slow down at the heavy load, and the load where congestion begins.

    Without any cross traffic, it is the time of an iteration. While a sweep is running, it says first that both are
    still to come.
    """
    measured = [row for row in rows if row["points"]]
    if is_running and all(row["slowdowns"][-1]["slowdown"] is row["congestion"]["share"] is None for row in measured):
        points = counted(sum(row["points"] for row in measured), "point")
        load = _percent(rows[0]["slowdowns"][-1]["share"] if rows else HEAVY_SHARE)
        return f"{points} so far: the slowdown at {load} load and the congestion point need more."
    if not measured:
        return "No point was measured."
    if not any(row["has_cross_traffic"] for row in measured):
        return _alone(measured)
    return f"{_slowdowns(measured)}; {_congestions(measured)}."


def series_lines(series: Sequence[Series], capacity: str, checks: Sequence[Expectation]) -> list[str]:
    """Return the results as lines: the sweep, each series, the expectations."""
    points = sum(len(one.points) for one in series)
    iterations = sum(point.iterations or 0 for one in series for point in one.points)
    kinds = [title_of(kind) for kind in dict.fromkeys(one.traffic for one in series if one.has_cross_traffic)]
    models = list(dict.fromkeys(one.title for one in series))
    if not points:
        return ["No point was measured."]
    amount = counted(points, "point") + (f", {counted(iterations, 'iteration')}" if iterations else "")
    under = f"under {_listed(kinds)} cross traffic" if kinds else "without cross traffic"
    lines = [f"{_listed(models)} {under}, capacity {capacity}: {amount}."]
    lines += [_series_line(one) for one in series]
    held, failed, unjudged = (sum(item.ok is state for item in checks) for state in (True, False, None))
    verdicts = [f"{held} {'holds' if held == 1 else 'hold'}"] if held < len(checks) else ["all hold"]
    verdicts += [f"{failed} {'does' if failed == 1 else 'do'} not"] * bool(failed)
    verdicts += [f"{unjudged} could not be judged"] * bool(unjudged)
    expected = counted(len(checks), "expectation")
    return [*lines, f"Of {expected} taken from the thesis, its set-up included, {listed(verdicts)}."]


def findings(
    series: Sequence[Series],
    rows: Sequence[Row],
    found: Sequence[Tails],
    pairs: Sequence[Pair],
    checks: Sequence[Expectation],
) -> list[Finding]:
    """Return the statements of a report, the firm ones first; both groups are in order of importance."""
    measured = [one for one in series if one.used]
    if not measured:
        return []
    tails = [tail for one, tail in zip(series, found, strict=True) if one.used]
    statements = [
        *_simulated(measured),
        *_growth([row for row in rows if row["points"]], tails),
        *_kinds(pairs),
        *_congestion([row for row in rows if row["points"]], measured),
        *_curve(measured),
    ]
    statements += _utilisation(measured, common_share(series))
    statements += [*_few_iterations(measured), *_tail_bounds(measured), *_late_samples(checks)]
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


def _growth(rows: Sequence[Row], tails: Sequence[Tails]) -> list[Finding]:
    known = [(tail.growth, _narrow(tail.growth_interval, tail.growth)) for tail in tails if tail.growth is not None]
    if not known:
        return []
    narrow = sum(is_narrow for _, is_narrow in known)
    reason = (
        f"the ratio of means is known to ± {100 * FIRM_HALF_WIDTH:.0f} % ({100 * LEVEL:.0f} % interval) in {narrow} of "
        f"{counted(len(known), 'series', 'series')}"
    )
    return [Finding(f"{_slowdowns(rows)}.", min(known)[1] and max(known)[1], reason)]


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
        heavy = [pair for pair in pairs if pair.by == by and pair.share > LIGHT_SHARE]
        if not heavy:
            continue
        beyond = [pair for pair in heavy if any(test.is_beyond_chance for test in pair.result.tests)]
        most = max(beyond or heavy, key=_effect)
        result, (first, second) = most.result, most.result.names
        text = (
            f"{among} {second} and {first} differ most, for {most.title} at {_percent(most.share)} of the "
            f"capacity: {relation} {second} the median iteration takes {_ratio(result.median_ratio)} as long, and the "
            f"99th percentile is {_ratio(result.p99_ratio)} as large."
        )
        reason = f"{len(beyond)} of {len(heavy)} pairs at that load differ beyond chance, corrected for their number"
        untested = sum(all(test.p is None for test in pair.result.tests) for pair in heavy)
        if untested:
            reason += f"; whether {untested} of them do is not known: they have fewer than {MIN_STRETCHED} iterations"
        statements.append(Finding(text, bool(beyond), reason))
    return statements


def _effect(pair: Pair) -> float:
    """Larger difference of two kinds, in the median or in the 99th percentile, as a logarithm of the ratio."""
    return max(abs(math.log(ratio.value)) for ratio in (pair.result.median_ratio, pair.result.p99_ratio))


def _ratio(estimate: Estimate) -> str:
    bounded = estimate.low is not None and estimate.high is not None
    return f"{estimate.value:.3g} times" + (f" ({estimate.low:.3g} to {estimate.high:.3g})" if bounded else "")


def _congestion(rows: Sequence[Row], series: Sequence[Series]) -> list[Finding]:
    found = [(one, one.curve.point) for one in series if one.curve.point is not None]
    if not found:
        return []
    over = sorted(point.data_mb * 1e6 / one.demand.worker_bytes for one, point in found)
    begins = _congestions(rows)
    text = (
        f"{begins[0].upper()}{begins[1:]}, which leaves room for {_range(over, '.2f')} times the data that training "
        "needs."
    )
    narrow = sum(point.half_width_gbps <= FIRM_HALF_WIDTH * point.capacity_gbps for _, point in found)
    reason = (
        f"it is known to ± {100 * FIRM_HALF_WIDTH:.0f} % of the capacity ({100 * LEVEL:.0f} % interval) in {narrow} of "
        f"{counted(len(found), 'series', 'series')}"
    )
    return [Finding(text, narrow == len(found), reason)]


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


def _utilisation(series: Sequence[Series], share: float) -> list[Finding]:
    """Say how much the bottleneck carried under each kind of traffic, at the same load."""
    used: dict[str, list[float]] = {}
    for one in series:
        found = None if one.is_simulated or not one.has_cross_traffic else at_load(one, share)
        if isinstance(found, AtLoad) and found.utilisation is not None:
            used.setdefault(one.traffic, []).append(found.utilisation)
    if not used:
        return []
    carried = [
        f"{_range(sorted(100 * each for each in ends), '.0f')} % under {title_of(kind)}" for kind, ends in used.items()
    ]
    reason = (
        "the port's counters hold every frame, with headers, acknowledgements and repeated segments; the thesis "
        f"(chapter 4) has an effective utilization of around {100 * published_results.BURST_UTILISATION:.0f} % under "
        "burst traffic"
    )
    text = f"Of its capacity, the bottleneck carried {_listed(carried)} at {_percent(share)} load."
    return [Finding(text, True, reason)]


def _few_iterations(series: Sequence[Series]) -> list[Finding]:
    names = [
        f"{name_in_text(one)} at {point.cross_gbps or 0.0:.3g} Gbit/s ({point.iterations})"
        for one in series
        for point in one.used
        if point.iterations is not None and point.iterations < MIN_VALUES
    ]
    if not names:
        return []
    whose = "its" if len(names) == 1 else "their"
    text = f"Few iterations were measured of {_listed(names, _MAX_POINTS)}: {whose} spread and percentiles say little."
    return [Finding(text, False, f"fewer than {MIN_VALUES} iterations hardly show how their times vary")]


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


def _listed(names: Sequence[str], most: int = _MAX_NAMES) -> str:
    shown = list(names[:most])
    if len(names) > most:
        shown.append(f"{len(names) - most} more")
    return listed(shown)


def _series_line(series: Series) -> str:
    parts = []
    if series.no_load_s is not None:
        takes = f"takes {series.required_gbps:.2f} Gbit/s"  # by equation 3.1
        takes = f"which {takes}" if series.collective in ("", "ring") else f"which with a ring {takes}"
        parts.append(f"{series.no_load_s:.3f} s per iteration alone, {takes}")
    if series.has_cross_traffic:
        parts.append(series.curve.clause)
    worst = series.most_congested
    if worst is not None and series.no_load_s is not None and len(series.used) > 1:
        times = worst.iteration_s / series.no_load_s
        parts.append(f"{times:.1f} times as long at {worst.bandwidth_gbps:.2f} Gbit/s")
    return f"{name_in_text(series)}: {'; '.join(parts) or 'no point was measured'}."


def _alone(rows: Sequence[Row]) -> str:
    least, most = (pick(rows, key=lambda row: row["no_load_s"]) for pick in (min, max))
    if least is most:
        return f"An iteration of {least['name']} takes {least['no_load_s']:.3f} s without cross traffic."
    ends = [f"{row['no_load_s']:.3f} s ({row['name']})" for row in (least, most)]
    return f"Without cross traffic an iteration takes {' to '.join(ends)}."


def _one_slowdown(row: Row) -> str:
    heavy, iterations = row["slowdowns"][-1], f"iterations of {row['title']}"
    at = f"at {_percent(heavy['share'])} load"
    over = model_label("", *(row[name] for name in VARIANTS))
    kind = f"cross traffic ({title_of(row['traffic'])})"
    if heavy["slowdown"] is None:
        what = f"The slowdown of {row['title']}{over} under {kind} {at}"
        return f"{what} is not known, because {heavy['why']}{_times([row])}"
    interval = heavy["interval"]
    if interval is not None and interval[0] <= 0 <= interval[1]:
        measured = f"{_percent(heavy['slowdown'])}, {_within(interval)}"
        return f"C{kind[1:]} does not measurably slow {iterations}{over} {at} ({measured})"
    return f"C{kind[1:]} {'slows' if heavy['slowdown'] >= 0 else 'changes'} {iterations}{over} by {_by(row)} {at}"


def _slowdowns(rows: Sequence[Row]) -> str:
    if len(rows) == 1:
        return _one_slowdown(rows[0])
    known = [row for row in rows if row["slowdowns"][-1]["slowdown"] is not None]
    load = f"{_percent(rows[0]['slowdowns'][-1]['share'])} load"
    if not known:
        return f"The slowdown at {load} is not known, because {rows[0]['slowdowns'][-1]['why']}{_times(rows)}"
    least, most = (pick(known, key=_heavy) for pick in (min, max))
    by = f"by {' to '.join(_by(row, row['name']) for row in (least, most))}"
    if len(known) == 1:
        by = f"of {most['name']} by {_by(most)}"
    verb = "slows" if _heavy(least) >= 0 else "changes"
    some = "" if len(known) == len(rows) else f"; for {len(rows) - len(known)} of {len(rows)} series this is not known"
    return f"Cross traffic at {load} {verb} iterations {by}{some}"


def _times(rows: Sequence[Row]) -> str:
    """Return how long iterations take at the heavy load, where nothing says how much longer that is."""
    known = [row for row in rows if row["slowdowns"][-1]["mean_s"] is not None]
    if not known:
        return ""
    ends = [pick(known, key=lambda row: row["slowdowns"][-1]["mean_s"]) for pick in (min, max)]
    times = [f"{row['slowdowns'][-1]['mean_s']:.3g} s ({row['name']})" for row in ends[: len(known)]]
    return f"; there, an iteration takes {' to '.join(times)}"


def _by(row: Row, *words: str) -> str:
    """Return a slowdown with words and its interval."""
    interval = row["slowdowns"][-1]["interval"]
    about = [*words, *([] if interval is None else [_within(interval)])]
    return _percent(_heavy(row)) + (f" ({', '.join(about)})" if about else "")


def _within(interval: Sequence[float]) -> str:
    low, high = map(_whole, interval)
    return f"{LEVEL * 100:.0f} % interval {low} to {high} %"


def _congestions(rows: Sequence[Row]) -> str:
    if len(rows) == 1:
        return str(rows[0]["congestion"]["text"])
    shares = sorted(row["congestion"]["share"] for row in rows if row["congestion"]["share"] is not None)
    if not shares:
        reasons = _listed(list(dict.fromkeys(row["congestion"]["why"] for row in rows)))
        return f"no congestion point is known in any of {counted(len(rows), 'series', 'series')}: {reasons}"
    low, high = _whole(shares[0]), _whole(shares[-1])
    where = f"{low} %" if low == high else f"{low} to {high} %"
    ends = [end for row in rows for end in row["congestion"]["interval_share"] or ()]
    within = f"{LEVEL * 100:.0f} % intervals from {_whole(min(ends))} to {_whole(max(ends))} %"
    which = "" if len(shares) == len(rows) else f" in {len(shares)} of {len(rows)} series"
    return f"congestion begins at {where} of the capacity ({within}){which}"


def _heavy(row: Row) -> float:
    return float(row["slowdowns"][-1]["slowdown"])


def _percent(share: float) -> str:
    return f"{_whole(share)} %"


def _whole(share: float) -> str:
    """Per cent without decimals; below 1 %, with one decimal."""
    percent = share * 100
    return f"{round(percent, 0 if abs(percent) >= 1 else 1) + 0.0:g}".replace("-", "−")
