"""Loads chosen by the measurement against the fixed grid of examples/reproduce.toml: seconds to the same interval.

python benchmarks/loads.py [--quick] [-o FILE]        simulated series whose truth is known (docs/notes/auto-loads.md)
python benchmarks/loads.py --coverage [--quick]       how often the interval of a fixed grid holds the true point
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401 -- first: lets the others import ringtap
import numpy as np
from _result import write_result
from scipy import signal

from ringtap.analysis.model.congestion_point import CURVED_SHARE
from ringtap.analysis.model.congestion_point_on_curve import CurvePoint, find_curve_point, place
from ringtap.analysis.statistics.mean_errors import relative_error
from ringtap.analysis.statistics.to_arrays import Array
from ringtap.analysis.sweeps.next_load import Aims, Measured, choose
from ringtap.core.sweep_plans.sweep_plan import load_plan

CAPACITY_GBPS, TARGET_GBPS = 25.0, 1.0
GRID = load_plan("examples/reproduce.toml")
AUTO = load_plan({"sweep": {"loads": "auto"}, "models": [{"name": "resnet50"}]})
MAX_PASSES = 8


@dataclass(frozen=True)
class Truth:
    """A simulated series: t = A exp(B/(C-BW)^n), with log-normal iterations that resemble their neighbours.

    Attributes:
        title: name in the table.
        a: A in seconds.
        b: B in (Gbit/s)^n.
        n: exponent.
        spread: standard deviation of the iterations over their mean, at loads from 0 to 23.7 Gbit/s.
    """

    title: str
    a: float
    b: float
    n: float
    spread: tuple[float, ...]

    def time_s(self, load_gbps: float) -> float:
        """Mean iteration time at a load."""
        return self.a * math.exp(self.b / (CAPACITY_GBPS - load_gbps) ** self.n)

    @property
    def point_gbps(self) -> float:
        """Congestion point on the true curve."""
        return -CAPACITY_GBPS * math.expm1(-place(self.b / CAPACITY_GBPS**self.n, self.n))


# the thesis's exponents; spreads under consistent traffic as in docs/notes/reproduction-points.csv, up to 40 %
TRUTHS = {
    "resnet50": Truth(
        "ResNet-50", 0.077, 2.933, 0.5, (0.01, 0.019, 0.037, 0.07, 0.095, 0.11, 0.16, 0.266, 0.35, 0.4, 0.4)
    ),
    "vgg16": Truth(
        "VGG-16", 0.1215, 5.5, 0.5, (0.01, 0.048, 0.067, 0.094, 0.102, 0.126, 0.154, 0.204, 0.311, 0.324, 0.4)
    ),
}
SPREAD_GBPS = (0.0, 3.75, 8.0, 11.7, 14.5, 16.0, 18.0, 19.5, 20.9, 22.3, 23.7)
CORRELATION = 0.3  # of neighbouring iterations
HEADERS, LOAD_ERROR = 1.045, 0.01  # measured over requested load, and the standard deviation of that ratio


class Simulated:
    """Windows of a simulated series."""

    def __init__(self, truth: Truth, seed: int) -> None:
        self._truth, self._draw = truth, np.random.default_rng(seed)

    def window(self, asked: float, is_enough: Callable[[Array], bool], max_s: float, settle_s: float) -> Measured:
        """Simulate a window that ends as one of a sweep does."""
        load = min(asked * CAPACITY_GBPS * HEADERS * (1 + LOAD_ERROR * self._draw.normal()), 0.97 * CAPACITY_GBPS)
        mean_s, spread = self._truth.time_s(load), np.interp(load, SPREAD_GBPS, np.log(self._truth.spread))
        width = math.sqrt(math.log1p(math.exp(spread) ** 2))
        times: list[float] = []
        place = self._draw.normal()
        while sum(times) < max_s and not is_enough(np.array(times)):
            times.append(mean_s * math.exp(width * place - width**2 / 2))
            place = CORRELATION * place + math.sqrt(1 - CORRELATION**2) * self._draw.normal()
        if sum(times) > max_s and len(times) > 1:
            times.pop()  # a window ends with the last iteration that has ended
        return Measured(asked, load, np.array(times), settle_s + sum(times))


@dataclass(frozen=True)
class Reached:
    """Measured time until the interval was reached.

    Attributes:
        seconds: measured time, settling included.
        windows: number of windows.
        point: the congestion point.
    """

    seconds: float
    windows: int
    point: CurvePoint


def curve_point(windows: Sequence[Measured]) -> CurvePoint | None:
    """Find the congestion point, as a sweep does."""
    loads = [min(one.load_gbps, 0.99 * CAPACITY_GBPS) for one in windows]
    means = np.array([one.iteration_s.mean() for one in windows])
    return find_curve_point(loads, means, CAPACITY_GBPS, [one.iteration_s for one in windows]).point


def reached(windows: Sequence[Measured], every: int = 1) -> Reached | None:
    """Return what it took to reach the interval; with ``every``, only whole passes of so many windows count."""
    for count in range(max(every, len(AUTO.loads)), len(windows) + 1, every):
        point = curve_point(windows[:count])
        if point is not None and point.half_width_gbps <= TARGET_GBPS:
            return Reached(sum(one.spent_s for one in windows[:count]), count, point)
    return None


def simulate_grid(truth: Truth, seed: int, every: int = len(GRID.loads)) -> Reached | None:
    """Measure the fixed grid, again and again, until the interval is reached; with ``every=1`` within a pass, too."""
    window, series = GRID.window, Simulated(truth, seed)

    def is_enough(times: Array) -> bool:
        return bool(times.sum() >= window.min_s and len(times) >= window.min_iterations)

    windows: list[Measured] = []
    for _ in range(MAX_PASSES):
        windows += [series.window(load, is_enough, window.max_s, window.settle_s) for load in GRID.loads]
        if found := reached(windows, every):
            return found
    return None


def simulate_auto(truth: Truth, seed: int) -> Reached | None:
    """Measure the loads that are chosen until the interval is reached."""
    assert AUTO.auto is not None
    window, series = AUTO.window, Simulated(truth, 10_000 + seed)
    aims = Aims(
        CAPACITY_GBPS, AUTO.loads, TARGET_GBPS, AUTO.auto.target_mean, AUTO.auto.budget_s,
        window.settle_s, window.min_s, window.min_iterations, window.max_s,
    )  # fmt: skip

    def is_enough(times: Array) -> bool:
        long = times.sum() >= window.min_s and len(times) >= window.min_iterations
        return bool(long and relative_error(times) <= aims.mean)

    windows: list[Measured] = []
    while (load := choose(windows, aims).load) is not None:
        windows.append(series.window(load, is_enough, window.max_s, window.settle_s))
        if len(windows) >= len(aims.first):
            point = curve_point(windows)
            if point is not None and point.half_width_gbps <= TARGET_GBPS:
                return Reached(sum(one.spent_s for one in windows), len(windows), point)
    return None


def simulate(truth: Truth, seed: int) -> tuple[Reached | None, Reached | None]:
    """Simulate both kinds of sweep."""
    return simulate_grid(truth, seed), simulate_auto(truth, seed)


def rows(model: str, pairs: Sequence[tuple[Reached | None, Reached | None]]) -> list[list[str]]:
    """Return the rows of a table: one for each of the first seeds."""
    found = []
    for seed, (fixed, auto) in enumerate(pairs[:3], 1):
        row = [TRUTHS[model].title, str(seed)]
        for one in (fixed, auto):
            row += ["-", "-", "-"] if one is None else [f"{one.seconds:.0f}", str(one.windows), shown(one.point)]
        if fixed and auto:
            row += [f"{auto.seconds / fixed.seconds:.2f}", "yes" if holds(fixed.point, auto.point) else "no"]
        found.append(row + ["-"] * (10 - len(row)))
    return found


def shown(point: CurvePoint) -> str:
    """Return a point with its interval."""
    return f"{point.bandwidth_gbps:.1f} ({point.low_gbps:.1f} to {point.high_gbps:.1f})"


def holds(interval: CurvePoint, point: CurvePoint) -> bool:
    """Return True if the interval of one point contains the other point."""
    return interval.low_gbps <= point.bandwidth_gbps <= interval.high_gbps


def summary(
    model: str, pairs: Sequence[tuple[Reached | None, Reached | None]], stopped: Sequence[Reached | None]
) -> dict[str, Any]:
    """Return the figures of many seeds; ``stopped`` are the grids that end within a pass."""
    both = [(fixed, auto) for fixed, auto in pairs if fixed and auto]
    truth = TRUTHS[model].point_gbps
    ratios = [auto.seconds / fixed.seconds for fixed, auto in both]

    def held(found: Sequence[Reached | None]) -> float:
        return statistics.fmean(one.point.low_gbps <= truth <= one.point.high_gbps for one in found if one)

    return {
        "model": model,
        "seeds": len(pairs),
        "reached_by_grid": sum(fixed is not None for fixed, _ in pairs),
        "reached_by_auto": sum(auto is not None for _, auto in pairs),
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_at_most_half": round(statistics.fmean(ratio <= 0.5 for ratio in ratios), 3),
        "grid_s_median": round(statistics.median(fixed.seconds for fixed, _ in both), 1),
        "auto_s_median": round(statistics.median(auto.seconds for _, auto in both), 1),
        "stopped_grid_s_median": round(statistics.median(one.seconds for one in stopped if one), 1),
        "true_gbps": round(truth, 2),
        "coverage_grid": round(held([fixed for fixed, _ in pairs]), 3),
        "coverage_auto": round(held([auto for _, auto in pairs]), 3),
        "within_grid_interval": round(statistics.fmean(holds(fixed.point, auto.point) for fixed, auto in both), 3),
    }


KINDS, NOISES, COUNTS = ("smooth", "broken"), ("even", "uneven"), (6, 11)
ITERATIONS, EVEN_SPREAD, HELD_OUT = 30, 0.1, 20_000


def true_point_gbps(log_time: Callable[[Array], Array]) -> float:
    """Return the point of the thesis's construction on a dense grid of a true curve, given as ln t at u, or NaN."""
    share = np.linspace(0, 0.97, 20_001)
    u = -np.log1p(-share)
    elasticity, times = np.diff(log_time(u)) / np.diff(u), np.exp(log_time(u))
    start = int(np.argmax(elasticity >= elasticity[0] + CURVED_SHARE * (1 - elasticity[0])))
    if not start:
        return math.nan
    slope, level = np.polyfit(share[: start + 1], times[: start + 1], 1)
    tangent = (times[start + 1] - times[start]) / (share[start + 1] - share[start])
    return float(CAPACITY_GBPS * (times[start] - tangent * share[start] - level) / (slope - tangent))


def drawn(kind: str, draw: np.random.Generator) -> Callable[[Array], Array]:
    """Return a curve of equation 3.7 or two lines of ln t, whose point lies within the loads, as ln t at u."""
    while True:
        if kind == "smooth":
            n = math.exp(draw.uniform(math.log(0.5), math.log(2)))
            log_time = partial(_smooth, draw.uniform(0.02, 0.7) / n, n)
        else:
            at = -math.log1p(-draw.uniform(8, 19) / CAPACITY_GBPS)
            log_time = partial(_broken, draw.uniform(0, 0.3), draw.uniform(0.85, 1), at)
        if 8 <= true_point_gbps(log_time) <= 20:
            return log_time


def _smooth(b: float, n: float, u: Array) -> Array:
    result: Array = b * np.expm1(n * u)
    return result


def _broken(first: float, last: float, at: float, u: Array) -> Array:
    result: Array = first * u + (last - first) * np.maximum(u - at, 0.0)
    return result


def covered(kind: str, noise: str, count: int, is_weighted: bool, seed: int) -> tuple[bool | None, float]:
    """Simulate a series; return whether the interval holds the true point, and its half-width; None: no point."""
    draw = np.random.default_rng([seed, KINDS.index(kind), NOISES.index(noise), count])
    log_time = drawn(kind, draw)
    grid = np.array(SPREAD_GBPS[:: 10 // (count - 1)])
    load = np.minimum(grid * (1 + LOAD_ERROR * draw.normal(size=count)), 0.97 * CAPACITY_GBPS)
    spread = np.full(count, EVEN_SPREAD)
    if noise == "uneven":
        spread = np.interp(load, SPREAD_GBPS, TRUTHS["resnet50"].spread)
    width = np.sqrt(np.log1p(spread**2))[:, None]
    noises = draw.normal(size=(count, ITERATIONS + 50)) * math.sqrt(1 - CORRELATION**2)
    places = signal.lfilter([1.0], [1.0, -CORRELATION], noises)[:, 50:]
    windows = np.exp(log_time(-np.log1p(-load / CAPACITY_GBPS))[:, None] + width * places - width**2 / 2)
    known = list(windows) if is_weighted else None
    point = find_curve_point(load, windows.mean(axis=1), CAPACITY_GBPS, iterations_s=known).point
    if point is None:
        return None, math.nan
    return point.low_gbps <= true_point_gbps(log_time) <= point.high_gbps, point.half_width_gbps


def coverage(is_quick: bool, workers: ProcessPoolExecutor) -> list[list[str]]:
    """Return the rows of a table: how often a point was given, and how often its interval held the true one."""
    found, seeds = [], range(HELD_OUT, HELD_OUT + (10 if is_quick else 300))
    for is_weighted, count in itertools.product((True, False), COUNTS):
        errors, every = "from iterations" if is_weighted else "not known", []
        for kind, noise in itertools.product(KINDS, NOISES):
            one = partial(covered, kind, noise, count, is_weighted)
            series = list(workers.map(one, seeds, chunksize=10))
            every += series
            found.append([errors, str(count), kind, noise, *_shares(series)])
        found.append([errors, str(count), "all", "all", *_shares(every)])
    return found


def _shares(series: Sequence[tuple[bool | None, float]]) -> list[str]:
    known = [one for one in series if one[0] is not None]
    held = sum(bool(one) for one, _ in known) / max(len(known), 1)
    half = statistics.median(half for _, half in known) if known else math.nan
    return [f"{len(known) / len(series):.0%}", f"{held:.1%}", f"{half:.1f}"]


COVERAGE_HEAD = ["errors", "loads", "truth", "noise", "given", "held the truth", "half-width, Gbit/s"]
HEAD = ["series", "seed"]
HEAD += [f"{kind} {what}" for kind in ("grid", "auto") for what in ("s", "windows", "point, Gbit/s")]
HEAD += ["ratio of seconds", "within the grid's interval"]


def main() -> int:
    """Print a table and, last, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer seeds of simulated series")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write the JSON object to a file")
    parser.add_argument("--coverage", action="store_true", help="coverage of the interval on fixed loads")
    options = parser.parse_args()
    if options.coverage:
        with ProcessPoolExecutor(2) as workers:
            print_table(COVERAGE_HEAD, coverage(options.quick, workers), {}, options.output)
        return 0
    found: dict[str, Any] = {"target_gbps": TARGET_GBPS, "summaries": []}
    table: list[list[str]] = []
    with ProcessPoolExecutor(2) as workers:
        for model, truth in TRUTHS.items():
            seeds = range(1, 3 if options.quick else 21)
            pairs = list(workers.map(partial(simulate, truth), seeds))
            stopped = list(workers.map(partial(simulate_grid, truth, every=1), seeds))
            found["summaries"].append(summary(model, pairs, stopped))
            table += rows(model, pairs)
    print_table(HEAD, table, found, options.output)
    return 0


def print_table(head: list[str], table: list[list[str]], found: dict[str, Any], output: Path | None) -> None:
    """Print a table and the JSON object with its rows."""
    for row in [head, ["---"] * len(head), *table]:
        print(f"| {' | '.join(row)} |")
    write_result(found | {"rows": [dict(zip(head, row, strict=True)) for row in table]}, output)


if __name__ == "__main__":
    sys.exit(main())
