"""Compares two samples of iteration times: effect sizes with intervals, then tests.

docs/method/method.md, "Traffic kinds compared", has the equations. Correlated iterations count for fewer
(`ringtap.analysis.statistics.autocorrelation`), which needs enough of them to see it; fewer are compared by stretches
(`ringtap.analysis.statistics.short_correlated_series`). The only assumption is that iterations are stationary.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from scipy import special

from ringtap.analysis.notebook_formatting import AVERAGES
from ringtap.analysis.statistics.autocorrelation import effective_count
from ringtap.analysis.statistics.quantiles import LEVEL, quantile_intervals
from ringtap.analysis.statistics.short_correlated_series import (
    MANY_VALUES,
    MIN_P,
    MIN_STRETCHED,
    median_difference,
    rank_difference,
)
from ringtap.analysis.statistics.to_arrays import Array, Values, sample
from ringtap.core.errors import UsageError
from ringtap.core.units import counted

MIN_VALUES = 5
TAIL_SHARE = 0.05  # the longest iterations of both samples together: those of the tail test
ALPHA = 0.05  # of all tests together
_EXACT_TO = 10_000  # values in the larger sample; above, the limiting distribution is as good, as scipy assumes, too
_SIMULATED_BELOW = 10  # effective values; for samples of 5, Student's t finds 8 % false differences at 5 %
_SIMULATED_TO = 200  # values of the larger sample; more change nothing if the other is small
_SIMULATIONS = 9_999


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; an end is None if the samples cannot bound it."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Test:
    """One test.

    Attributes:
        name: ``distribution`` (Kolmogorov and Smirnov), ``location`` (Brunner and Munzel) or ``tail`` (quantile test).
        statistic: greatest distance of the distribution functions; P(b > a) + P(b = a) / 2; share of the longest
            iterations that are b's, minus the share of all iterations that are b's.
        p: probability of as large a difference by chance; at least the smallest normal floating point number, never 0;
            None if the samples are too small for the test.
        p_holm: p corrected by Holm's method for all tests made together; None likewise.
    """

    __test__ = False  # not a test for pytest

    name: str
    statistic: float
    p: float | None
    p_holm: float | None

    @property
    def is_beyond_chance(self) -> bool:
        """True if the corrected p is below 5 %."""
        return self.p_holm is not None and self.p_holm < ALPHA


@dataclass(frozen=True, repr=False)
class Comparison:
    """Differences of sample b from sample a.

    Attributes:
        names: names of a and b.
        counts: their numbers of iterations.
        effective_counts: effective numbers of independent iterations.
        level: confidence of the intervals.
        median_ratio: median of b over that of a.
        p99_ratio: 99th percentile of b over that of a.
        p99_difference_s: b's p99 minus a's, in the samples' unit.
        shift_s: median of all differences b - a (Hodges and Lehmann), in the samples' unit.
        superiority: share of pairs in which b's iteration is the longer one, ties counting half.
        tests: distribution, location, tail.
        reason: why some of the tests were not made, one sentence; else empty.
    """

    names: tuple[str, str]
    counts: tuple[int, int]
    effective_counts: tuple[float, float]
    level: float
    median_ratio: Estimate
    p99_ratio: Estimate
    p99_difference_s: Estimate
    shift_s: Estimate
    superiority: Estimate
    tests: tuple[Test, ...]
    reason: str = ""

    @property
    def cliffs_delta(self) -> float:
        """Cliff's delta: 1 if every iteration of b is longer than any of a, -1 if every one is shorter."""
        return 2 * self.superiority.value - 1

    def __repr__(self) -> str:
        return f"<Comparison: {self.sentence}>"

    @property
    def sentence(self) -> str:
        """The comparison as two sentences."""
        a, b = self.names
        text = f"{b} against {a}: the median iteration takes {_times(self.median_ratio)} as long"
        text += f", p99 {_times(self.p99_ratio)}; {b} is the longer one in {self.superiority.value:.0%} of pairs"
        if all(test.p is None for test in self.tests):
            return f"{text}. {self.reason}."
        significant = [test for test in self.tests if test.is_beyond_chance]
        if not significant:
            return f"{text}. No difference beyond chance was found (corrected p >= {ALPHA:g})."
        names = " and ".join(test.name for test in significant)
        largest = max(test.p_holm or 0.0 for test in significant)
        p = "< 0.001" if largest < 0.001 else f"= {largest:.2g}"
        return f"{text}. Beyond chance in {names} (corrected p {p})."

    def to_json(self) -> dict[str, Any]:
        """Return all numbers as plain values, with the sentence."""
        item = asdict(self)
        item |= {"names": list(self.names), "counts": list(self.counts), "tests": [asdict(test) for test in self.tests]}
        item["effective_counts"] = list(self.effective_counts)
        return item | {"cliffs_delta": self.cliffs_delta, "sentence": self.sentence}


def compare(a: Values, b: Values, names: tuple[str, str] = ("a", "b"), level: float = LEVEL) -> Comparison:
    """Compare two samples of iteration times.

    Args:
        a: iteration times of the first sample, in order of time, in seconds; shape (iterations,).
        b: iteration times of the second sample, likewise.
        names: their names.
        level: confidence of the intervals.

    It warns of times that are those of a whole series of a sweep, under all its loads: see `Sweep.compare`.

    Raises:
        UsageError: fewer than 5 iterations in a sample, or a time that is not positive and finite.
    """
    for values in (a, b):
        if averaged := getattr(values, "attrs", {}).get(AVERAGES):
            warnings.warn(f"{averaged}; Sweep.compare compares series at one load", stacklevel=2)
    first, second = (_times_of(values, name) for values, name in zip((a, b), names, strict=True))
    of_count = _of_many if min(len(first), len(second)) >= MANY_VALUES else _of_few
    return of_count(first, second, names, level)


def _of_many(first: Array, second: Array, names: tuple[str, str], level: float) -> Comparison:
    low, high = (np.sort(first), np.sort(second))
    medians, tails = zip(*(quantile_intervals(values, (0.5, 0.99), level) for values in (first, second)), strict=True)
    counts = medians[0].effective_count, medians[1].effective_count
    ends = [[Estimate(one.value, one.low, one.high) for one in pair] for pair in (medians, tails)]
    superiority, p_location = _superiority(low, high, counts, level)
    distance, (tail, longest) = _distance(low, high), _tail(low, high)
    p_distance = _distance_p(distance, *(max(1, round(count)) for count in counts))
    p_tail = _tail_p(longest, (len(low), len(high)), counts)
    tests = _tests((distance, superiority.value, tail), (p_distance, p_location, p_tail))
    return Comparison(
        names=names,
        counts=(len(first), len(second)),
        effective_counts=counts,
        level=level,
        median_ratio=_ratio(*ends[0]),
        p99_ratio=_ratio(*ends[1]),
        p99_difference_s=difference(*ends[1]),
        shift_s=_shift(low, high, counts, level),
        superiority=superiority,
        tests=tests,
    )


def _of_few(first: Array, second: Array, names: tuple[str, str], level: float) -> Comparison:
    """Compare with the interval and the test alone that hold for few iterations, however correlated."""
    low, high = (np.sort(first), np.sort(second))
    counts = len(first), len(second)
    medians, tails = ([Estimate(float(np.quantile(one, q)), None, None) for one in (low, high)] for q in (0.5, 0.99))
    p, ratio, reason = None, _ratio(*medians), few_reason(counts, names)
    if min(counts) >= MIN_STRETCHED:
        logs = median_difference(np.log(first), np.log(second))
        p, ends = logs.p, np.exp(logs.interval(level))
        ratio = Estimate(ratio.value, float(ends[0]), float(ends[1]))
        reason = f"Distribution and tail are compared from {MANY_VALUES} iterations of each on"
    superiority = float(_placements(high, low).mean())
    return Comparison(
        names=names,
        counts=counts,
        effective_counts=(effective_count(first), effective_count(second)),
        level=level,
        median_ratio=ratio,
        p99_ratio=_ratio(*tails),
        p99_difference_s=difference(*tails),
        shift_s=Estimate(_difference_at(low, high, 0.5), None, None),
        superiority=Estimate(superiority, None, None),
        tests=_tests((_distance(low, high), superiority, _tail(low, high)[0]), (None, p, None)),
        reason=reason,
    )


def few_reason(counts: Sequence[int], names: Sequence[str]) -> str:
    """Return a sentence about samples that are too small for any test."""
    few = [
        f"{counted(count, 'iteration')} of {name}"
        for count, name in zip(counts, names, strict=True)
        if count < MIN_STRETCHED
    ]
    return f"Whether beyond chance is not known from {' and '.join(few)}: record {MIN_STRETCHED} or more"


def _tests(statistics: Sequence[float], p_values: Sequence[float | None]) -> tuple[Test, ...]:
    """Return the three tests, corrected together."""
    within = [None if p is None else min(1.0, max(p, MIN_P)) for p in p_values]
    names = ("distribution", "location", "tail")
    return _corrected([Test(*one, None) for one in zip(names, statistics, within, strict=True)])


def _corrected(tests: Sequence[Test]) -> tuple[Test, ...]:
    corrected = iter(holm([test.p for test in tests if test.p is not None]))
    return tuple(test if test.p is None else replace(test, p_holm=next(corrected)) for test in tests)


def location_p(a: Values, b: Values) -> float:
    """Return the p value of the location test alone, for samples of any numbers in order of time, such as bytes.

    Fewer than `MANY_VALUES` are compared by their medians, or by their ranks if the same value is the most frequent one
    in both, such as 0. Then other values may be too rare to show their scatter between stretches, and the larger p of
    this test and of that for independent values holds.

    Raises:
        UsageError: fewer than `MIN_STRETCHED` values in a sample, or one that is not finite.
    """
    first, second = sample(a, MIN_STRETCHED), sample(b, MIN_STRETCHED)
    is_few = min(len(first), len(second)) < MANY_VALUES
    if is_few and not _most_frequent(first) & _most_frequent(second):
        return median_difference(first, second).p
    counts = (len(first), len(second)) if is_few else (effective_count(first), effective_count(second))
    p = max(MIN_P, _superiority(np.sort(first), np.sort(second), counts, 0.95)[1])
    return max(p, rank_difference(first, second).p) if is_few else p


def _most_frequent(values: Array) -> set[float]:
    """Return the most frequent values, if any value occurs twice."""
    found, counts = np.unique(values, return_counts=True)
    return set(found[counts == counts.max()].tolist()) if counts.max() > 1 else set()


def correct_together(comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Return the comparisons with the p values of all of them corrected as one family."""
    corrected = iter(_corrected([test for one in comparisons for test in one.tests]))
    return tuple(replace(one, tests=tuple(next(corrected) for _ in one.tests)) for one in comparisons)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for their number, in the same order (Holm, Scand. J. Statist. 6, 1979)."""
    result, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        result[index] = largest
    return result


def _times_of(values: Values, name: str) -> Array:
    try:
        result = sample(values, MIN_VALUES)
    except UsageError as error:
        raise UsageError(f"sample {name}: {error}") from error
    if result.min() <= 0:
        raise UsageError(f"sample {name} has an iteration time of {result.min():g}: times must be positive")
    return result


def _times(ratio: Estimate) -> str:
    low, high = ("" if end is None else f"{end:.3g}" for end in (ratio.low, ratio.high))
    interval = f"{low} to {high}" if low and high else f"{low} or more" if low else f"{high} or less" if high else ""
    return f"{ratio.value:.3g} times ({interval or 'without bounds'})"


def difference(a: Estimate, b: Estimate) -> Estimate:
    """Return b minus a, with an interval from both intervals (MOVER: Zou and Donner, Statist. Med. 27, 2008)."""
    value = b.value - a.value
    low = high = None
    if b.low is not None and a.high is not None:
        low = value - math.hypot(b.value - b.low, a.high - a.value)
    if b.high is not None and a.low is not None:
        high = value + math.hypot(b.high - b.value, a.value - a.low)
    return Estimate(value, low, high)


def _ratio(a: Estimate, b: Estimate) -> Estimate:
    """Return b over a, by the same method on logarithms."""
    logs = [
        Estimate(math.log(one.value), *(None if end is None else math.log(end) for end in (one.low, one.high)))
        for one in (a, b)
    ]
    found = difference(*logs)
    ends = (None if end is None else math.exp(end) for end in (found.low, found.high))
    return Estimate(math.exp(found.value), *ends)


def _placements(of: Array, among: Array) -> Array:
    """Return for each value the share of the other sample below it; ties count half. Both are sorted."""
    below, upto = np.searchsorted(among, of, side="left"), np.searchsorted(among, of, side="right")
    result: Array = (below + upto) / (2 * len(among))
    return result


def _scatter(a: Array, b: Array, counts: tuple[float, float]) -> tuple[float, float, float]:
    """Share of pairs with b longer, its standard error and its degrees of freedom (Brunner and Munzel 2000)."""
    share = _placements(b, a)
    parts = [float(np.var(_placements(a, b), ddof=1)) / counts[0], float(np.var(share, ddof=1)) / counts[1]]
    variance = sum(parts)
    if variance == 0:
        return float(share.mean()), 0.0, 1.0
    freedom = variance**2 / sum(part**2 / max(count - 1, 1) for part, count in zip(parts, counts, strict=True))
    return float(share.mean()), math.sqrt(variance), freedom


def _superiority(a: Array, b: Array, counts: tuple[float, float], level: float) -> tuple[Estimate, float]:
    """Return P(b > a) + P(b = a) / 2 with its interval, and the p value against one half."""
    share, error, freedom = _scatter(a, b, counts)
    if error == 0:
        return _separated(share, counts, level)
    p = _location_p(abs(share - 0.5) / error, counts, freedom)
    # on the logit scale, so that the ends stay within 0 and 1
    reach = special.stdtrit(freedom, (1 + level) / 2) * error / (share * (1 - share))
    ends = special.expit(special.logit(share) + np.array([-reach, reach]))
    return Estimate(share, float(ends[0]), float(ends[1])), p


def _location_p(ratio: float, counts: tuple[float, float], freedom: float) -> float:
    """Two-sided p value of Brunner and Munzel's ratio, from Student's t or, for few effective values, by simulation.

    Neubert and Brunner (Comput. Statist. Data Anal. 51, 2007) use permutations for the same reason. Counts are rounded.
    """
    if min(counts) >= _SIMULATED_BELOW:
        return float(2 * special.stdtr(freedom, -ratio))
    simulated = _ratios_by_chance(*sorted(min(max(2, round(count)), _SIMULATED_TO) for count in counts))
    # rounding may turn a difference of 0 into 1e-16
    as_large = len(simulated) - np.searchsorted(simulated, ratio * (1 - 1e-9) - 1e-9)
    return float((1 + as_large) / (1 + len(simulated)))


@functools.lru_cache(maxsize=64)
def _ratios_by_chance(first: int, second: int) -> Array:
    """Simulate Brunner and Munzel's absolute ratios for two samples of one distribution, sorted."""
    draw = np.random.default_rng(0)
    ranks = draw.random((_SIMULATIONS, first + second)).argsort(axis=1) + 1.0
    parts = []
    for own, other in ((ranks[:, :first], second), (ranks[:, first:], first)):
        ordered = np.sort(own, axis=1)
        parts.append((ordered - np.arange(1, ordered.shape[1] + 1)) / other)
    variance = parts[0].var(axis=1, ddof=1) / first + parts[1].var(axis=1, ddof=1) / second
    with np.errstate(divide="ignore"):
        result: Array = np.sort(np.abs(parts[1].mean(axis=1) - 0.5) / np.sqrt(variance))
    return result


def _separated(share: float, counts: tuple[float, float], level: float) -> tuple[Estimate, float]:
    """Superiority of samples that do not overlap or do not vary, so that their scatter does not give the share's error.

    Its variance is at most that of a proportion of the smaller sample (Birnbaum and Klose, Ann. Math. Statist. 28,
    1957), whose Wilson interval is used. The p value is that of the most extreme way to divide the iterations between
    the samples.
    """
    least, z = min(counts), float(special.ndtri((1 + level) / 2))
    centre, scale = (share + z * z / (2 * least)), 1 + z * z / least
    reach = z * math.sqrt(share * (1 - share) / least + (z / (2 * least)) ** 2)
    ends = max(0.0, (centre - reach) / scale), min(1.0, (centre + reach) / scale)
    ways = special.gammaln(sum(counts) + 1) - sum(special.gammaln(count + 1) for count in counts)
    return Estimate(share, *ends), 1.0 if share == 0.5 else min(1.0, 2 * math.exp(-float(ways)))


def _shift(a: Array, b: Array, counts: tuple[float, float], level: float) -> Estimate:
    """Median of all differences b - a, with an interval from Brunner and Munzel's error of the share of pairs."""
    value = _difference_at(a, b, 0.5)
    _, error, freedom = _scatter(a, b - value, counts)
    reach = float(special.stdtrit(freedom, (1 + level) / 2)) * error
    low = _difference_at(a, b, 0.5 - reach) if reach < 0.5 else None
    high = _difference_at(a, b, 0.5 + reach) if reach < 0.5 else None
    return Estimate(value, low, high)


def _difference_at(a: Array, b: Array, share: float) -> float:
    """Find the difference b - a that this share of all pairs does not exceed, by bisection, without listing them."""
    low, high = float(b[0] - a[-1]), float(b[-1] - a[0])
    wanted = share * len(a) * len(b)
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high or high - low <= 1e-12 * max(abs(low), abs(high)):
            break
        if np.searchsorted(b, a + middle, side="right").sum() >= wanted:
            high = middle
        else:
            low = middle
    return high


def _distance(a: Array, b: Array) -> float:
    """Return the statistic of Kolmogorov and Smirnov's two-sample test."""
    both = np.concatenate((a, b))
    shares = [np.searchsorted(one, both, side="right") / len(one) for one in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max())


def _distance_p(distance: float, first: int, second: int) -> float:
    """Probability of as large a distance between the distribution functions of two samples drawn from one distribution.

    Every order of the values is a path from (0, 0) to (first, second), and all paths are equally likely. The recurrence
    runs over the share of the paths to each corner that have been as far from the diagonal (Hodges, Ark. Mat. 3, 1958).
    It adds only positive terms, so that small p keep their digits.
    """
    if distance <= 0:
        return 1.0
    if max(first, second) > _EXACT_TO:
        from scipy import stats  # takes as long to import as all that is used of scipy here

        return float(stats.kstwo.sf(distance, round(first * second / (first + second))))
    few, many = sorted((first, second))
    along, steps = np.arange(few + 1.0), np.arange(1, few + many + 1)
    # distances are multiples of 1 / (few * many); half of one allows for rounding
    border = distance * few * many - 0.5
    # of the corners that a step leads to, those up to the lowest and from the highest are as far from the diagonal
    lowest = np.floor((steps * few - border) / (few + many)).astype(int).tolist()
    highest = np.ceil((steps * few + border) / (few + many)).astype(int).tolist()
    share = np.zeros(few + 1)
    for step, low, high in zip(steps.tolist(), lowest, highest, strict=True):
        begin, end = max(low, 0) + 1, min(few, step, high - 1) + 1
        right = along[begin:end]
        share[begin:end] = (right * share[begin - 1 : end - 1] + (step - right) * share[begin:end]) / step
        share[: max(low + 1, 0)] = share[high : step + 1] = 1.0
    return float(share[few])


def _tail(a: Array, b: Array) -> tuple[float, tuple[int, int]]:
    """Return the statistic of the quantile test (Johnson et al. 1987), and how many of the longest are of each sample.

    The longest iterations are those of both samples together.
    """
    border = np.quantile(np.concatenate((a, b)), 1 - TAIL_SHARE)
    longest = int(np.sum(a > border)), int(np.sum(b > border))
    if sum(longest) == 0:
        return 0.0, longest
    return longest[1] / sum(longest) - len(b) / (len(a) + len(b)), longest


def _tail_p(longest: tuple[int, int], sizes: tuple[int, int], counts: tuple[float, float]) -> float:
    """Return the p value of the quantile test, with effective numbers of iterations."""
    if sum(longest) == 0:
        return 1.0
    rows = zip(longest, sizes, counts, strict=True)
    return _fisher_p(*((round(many * count / size), max(1, round(count))) for many, size, count in rows))


def _fisher_p(a: tuple[int, int], b: tuple[int, int]) -> float:
    """Two-sided p value of Fisher's exact test of two shares: of all divisions that are at most as likely.

    Args:
        a: number of longest iterations of the first sample, and of all its iterations.
        b: those of the second sample.
    """
    both = a[0] + b[0]
    found = np.arange(max(0, both - b[1]), min(a[1], both) + 1.0)

    def log_ways(of: int, chosen: Array) -> Array:
        result: Array = special.gammaln(of + 1) - special.gammaln(chosen + 1) - special.gammaln(of - chosen + 1)
        return result

    logs = log_ways(a[1], found) + log_ways(b[1], both - found)
    logs -= special.logsumexp(logs)
    # equally likely divisions differ by rounding
    return float(np.exp(logs[logs <= logs[a[0] - int(found[0])] + 1e-7]).sum())
