"""Fits the general model t = A*exp(B/(C-BW)^n) to measured points (thesis, equation 3.7), with warnings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import special

from ringtap.analysis.model.fit_result import FitResult, Terms
from ringtap.analysis.model.model_least_squares import (
    FREE_BOUNDS,
    Exponent,
    Solution,
    jacobian,
    log_predict,
    parameter_intervals,
    reduced_load,
    solve_linear,
    solve_log,
)
from ringtap.analysis.model.outliers import DECISIVE_LEVERAGE, MOST_SHARE, find_outliers
from ringtap.analysis.model.outliers import LEVEL as OUTLIER_LEVEL
from ringtap.analysis.model.scatter_and_weights import RESIDUAL_FLOOR, Noise, from_errors, scatter_between
from ringtap.analysis.statistics.quantiles import LEVEL
from ringtap.analysis.statistics.to_arrays import Array, Values, as_points, as_seconds
from ringtap.core.check_api_arguments import number
from ringtap.core.errors import UsageError
from ringtap.core.run_directory_schema import MIN_FIT_LOADS
from ringtap.core.units import counted, load_gbps, rate_gbps

__all__ = ["CongestionModel", "FitResult", "corrected_akaike"]

EXPONENTS = (0.5, 1.0, 2.0)
MAX_LOAD = "--max-load (max_load=)"  # in messages
MIN_POINTS = 4
MIN_POINTS_FREE, MIN_LOADS_FREE = 6, 4
BOOTSTRAP_SAMPLES = 1000
UNSURE_SHARE = 0.5  # of A: with a larger standard error its size is not known
EXTREME_CORRELATION = 0.995
WIDE_INTERVAL = 2.0  # ratio of the ends of the interval of n; above it, n and B cannot be distinguished
ALIKE_AICC = 2.0  # models within this of the best one have substantial support (Burnham and Anderson, section 2.6)


def fit_warnings(
    solution: Solution, load: Array, capacity: float, noise: Noise, log_time: Array, correlation: float | None
) -> list[str]:
    """Return the warnings of one fit; ``correlation`` is that of ln A with B if n was given."""
    residual = log_time - log_predict(solution, load, capacity)
    parameters = 2 if solution.n_interval is None else 3
    grows = _grows(noise, residual, log_time, parameters)
    warnings = _exponent_warnings(solution)
    if not grows:
        warnings.append("B is statistically zero: the points show no growth with load, so n has no meaning")
    elif solution.covariance is None:
        warnings.append("standard errors are undefined: the parameters cannot be distinguished")
    if grows and solution.b < 0:
        warnings.append("B is negative: the iteration time falls as the load grows")
    if correlation is not None and abs(correlation) > EXTREME_CORRELATION:
        warnings.append(f"A and B are hardly told apart (correlation {correlation:.4f}): the loads span too little")
    heaviest, lightest = load[-1] / capacity, load[0] / capacity
    if heaviest < 0.7:
        warnings.append(f"the heaviest load is {heaviest:.0%} of capacity: the curve beyond it is extrapolated")
    if lightest > 0.2:
        warnings.append(f"the lightest load is {lightest:.0%} of capacity: the curve below it is extrapolated")
    return warnings


def alike(chosen: FitResult, candidates: Sequence[FitResult]) -> list[str]:
    """Return a warning if other exponents describe the points about as well as the chosen one."""
    if chosen.aicc is None:
        return []
    near = [
        f"{_named(fit)} (AICc {fit.aicc - chosen.aicc:+.1f})"
        for fit in candidates
        if fit.name != chosen.name and fit.aicc is not None and fit.aicc - chosen.aicc < ALIKE_AICC
    ]
    if not near:
        return []
    return [f"n and B are hardly told apart: {_named(chosen)} is hardly better than {' and '.join(near)}"]


def _named(fit: FitResult) -> str:
    return f"n = {fit.n:.3g} with B = {fit.B:.3g}" if fit.free else f"{fit.name} with B = {fit.B:.3g}"


def _exponent_warnings(solution: Solution) -> list[str]:
    if solution.n_interval is None:
        return []
    low, high = solution.n_interval
    if low <= FREE_BOUNDS[0] and high >= FREE_BOUNDS[1]:
        return ["n is not identifiable: every exponent from 0.1 to 4 describes these points about as well"]
    if min(solution.n / FREE_BOUNDS[0], FREE_BOUNDS[1] / solution.n) < 1.001:
        return [f"n is at its boundary of {solution.n:.3g}: the points ask for a value beyond it"]
    if high > WIDE_INTERVAL * low:
        return [f"n and B are hardly told apart: any n from {low:.2g} to {high:.2g} describes these points (95 %)"]
    return []


def _grows(noise: Noise, residual: Array, log_time: Array, parameters: int) -> bool:
    """Return True if the model beats a constant time by the F test at 5 %, which is the t test of B if n is given."""
    if float(np.sum((log_time - log_time.mean()) ** 2)) <= len(log_time) * RESIDUAL_FLOOR**2:
        return False
    level = log_time - np.average(log_time, weights=noise.weight)
    freedom = len(log_time) - parameters
    cost, total = float(noise.cost(residual)), float(noise.cost(level))
    unit = 1.0 if noise.known else cost / freedom
    limit = special.fdtri(parameters - 1, freedom, 0.95)
    return bool((total - cost) / (parameters - 1) > limit * unit)


@dataclass(frozen=True, init=False)
class CongestionModel:
    """Equation 3.7 for a bottleneck of known capacity: t = A·exp(B/(C−BW)^n).

    Attributes:
        capacity_gbps: capacity C of the bottleneck in Gbit/s.
        n: exponent (1/2, 1, 2 or another number), ``"free"`` to fit it within 0.1 to 4, or None to let the corrected
            Akaike criterion choose among 1/2, 1, 2 and, with enough points, a free one.
    """

    capacity_gbps: float
    n: Exponent | None

    def __init__(self, capacity_gbps: float | str, n: Exponent | None = None) -> None:
        """Create a model.

        Args:
            capacity_gbps: capacity of the bottleneck, in Gbit/s or as text such as ``25gbit``.
            n: the exponent, as described above.

        Raises:
            UsageError: the capacity is not a positive rate, or the exponent is out of range.
        """
        if isinstance(n, str):
            if n != "free":
                raise UsageError(f"exponent {n!r} is unknown: give 0.5, 1, 2 or free")
        elif n is not None and not FREE_BOUNDS[0] <= number(n, "the exponent") <= FREE_BOUNDS[1]:
            raise UsageError(f"exponent {n:g} is outside {FREE_BOUNDS[0]:g} to {FREE_BOUNDS[1]:g}")
        object.__setattr__(self, "capacity_gbps", rate_gbps(capacity_gbps, "capacity"))
        object.__setattr__(self, "n", n)

    def guess(self, bandwidth_gbps: Values, iteration_s: Values) -> tuple[float, float, float]:
        """Return A, B and n of the curve through the lightest and the heaviest point, with n = 1/2 if it is not given.

        Raises:
            UsageError: the points are invalid or too few.
        """
        load, time = as_points(bandwidth_gbps, iteration_s, self.capacity_gbps)
        _check_number(load, self.capacity_gbps, MIN_POINTS, MIN_FIT_LOADS)
        order = np.lexsort((time, load))
        load, time = load[order], time[order]
        n = self.n if isinstance(self.n, int | float) else EXPONENTS[0]
        x = reduced_load(load, self.capacity_gbps, n)
        b = math.log(time[-1] / time[0]) / (x[-1] - x[0])
        return _public(Solution(math.log(time[0]) - b * float(x[0]), float(b), n, None), self.capacity_gbps)

    def fit(
        self, bandwidth_gbps: Values, iteration_s: Values, *, spread_s: Values | None = None, robust: bool = False,
        bootstrap: int = BOOTSTRAP_SAMPLES, seed: int = 0, max_load: float | str | None = None,
    ) -> FitResult:  # fmt: skip
        """Fit the model to points.

        Args:
            bandwidth_gbps: cross traffic, shape (points,), in any order; repeated loads are replicates. Numbers are
                Gbit/s; text has a unit.
            iteration_s: mean iteration time at each, shape (points,). Numbers are seconds; text has a unit.
            spread_s: standard error of each mean in seconds, shape (points,). The points are weighted by it and by the
                scatter between points that it does not explain.
            robust: leave out outliers, the points that the curve through the others contradicts; warnings name them.
            bootstrap: number of resampled sets for the intervals; 0 for no intervals.
            seed: seed of the resampling; the same seed gives the same intervals.
            max_load: fit only the points at loads up to this one, in Gbit/s or as text; None: all. The thesis's
                equation 3.6 holds below 17 Gbit/s.

        Returns:
            The fit in log space, with the fit in linear space as ``linear``; with ``n=None`` the fit of least AICc.

        Raises:
            UsageError: a value is invalid, or fewer than 4 points at 3 loads (6 at 4 for a free exponent).
        """
        least = (MIN_POINTS_FREE, MIN_LOADS_FREE) if self.n == "free" else (MIN_POINTS, MIN_FIT_LOADS)
        limit_gbps = None if max_load is None else load_gbps(max_load, self.capacity_gbps, MAX_LOAD)
        load, time = as_points(bandwidth_gbps, iteration_s, self.capacity_gbps)
        error = None if spread_s is None else relative_errors(spread_s, time)
        if limit_gbps is not None:
            kept = load <= limit_gbps
            load, time, error = load[kept], time[kept], error if error is None else error[kept]
        _check_number(load, self.capacity_gbps, *least, limit_gbps)
        order = np.lexsort((time, load) if error is None else (error, time, load))
        every = _Points(load[order], time[order], None if error is None else error[order], self.capacity_gbps)
        points = _without_outliers(every, self.n or "free", least) if robust else every
        load, time = points.load, points.time
        exponents: list[Exponent] = list(EXPONENTS) if self.n is None else [self.n]
        enough = len(time) >= MIN_POINTS_FREE and _distinct(load, self.capacity_gbps) >= MIN_LOADS_FREE
        if self.n is None and enough:
            exponents.append("free")
        fits, failure = [], UsageError("no model was fitted")
        for exponent in exponents:
            try:
                fits.append(_fit_one(points, exponent))
            except UsageError as reason:
                failure = reason
        if not fits:
            raise failure
        chosen = fits[0]
        if self.n is None:
            chosen = replace(_choose(fits), candidates=tuple(fits))
            chosen = replace(chosen, warnings=(*chosen.warnings, *alike(chosen, fits)))
        chosen = replace(chosen, max_load_gbps=limit_gbps)
        if robust:
            notes = _outlier_warnings(chosen, every, points)
            chosen = replace(chosen, robust=True, warnings=(*chosen.warnings, *notes))
        return chosen if not bootstrap else _with_intervals(chosen, points, bootstrap, seed)


@dataclass(frozen=True)
class _Points:
    """Points in order of load; ``error`` is the standard error of each ln t, or None if it is not known."""

    load: Array
    time: Array
    error: Array | None
    capacity: float

    def at(self, kept: npt.NDArray[np.bool_]) -> _Points:
        """Return some of the points."""
        error = None if self.error is None else self.error[kept]
        return _Points(self.load[kept], self.time[kept], error, self.capacity)


def _without_outliers(points: _Points, n: Exponent, least: tuple[int, int]) -> _Points:
    """Return the points without their outliers, but at least as many points and loads as a fit needs."""
    most = min(max(1, int(len(points.load) * MOST_SHARE)), len(points.load) - least[0])
    while most > 0:
        outliers = find_outliers(points.load, np.log(points.time), points.capacity, n, points.error, most)
        kept = points.at(~outliers)
        if _distinct(kept.load, kept.capacity) >= least[1]:
            return kept
        most -= 1
    return points


def _outlier_warnings(fit: FitResult, every: _Points, kept: _Points) -> list[str]:
    """Return sentences about the outliers, and about points that could be outliers without being found."""
    warnings = []
    if len(every.load) <= MIN_POINTS:
        warnings.append(f"{len(every.load)} points are too few to tell an outlier: none was looked for")
    left_out = set(zip(every.load, every.time, strict=True)) - set(zip(kept.load, kept.time, strict=True))
    for at, seconds in sorted(left_out):
        # the curve itself can leave the range of floating point
        ratio = math.log(seconds) - fit.terms.log_t0 - fit.terms.b * float(reduced_load(at, fit.capacity_gbps, fit.n))
        off = f"{math.expm1(ratio):+.0%} off" if ratio < math.log(10) else "more than 10 times above"
        warnings.append(f"the point at {at:.4g} Gbit/s lies {off} the curve and is left out")
    columns = jacobian(kept.load, kept.capacity, fit.terms.b, fit.n, fit.free)
    leverage = (np.linalg.qr(columns / np.linalg.norm(columns, axis=0))[0] ** 2).sum(axis=1)
    warnings += [
        f"the point at {at:.4g} Gbit/s decides the curve there: from the others alone, an outlier of less than "
        f"{least:.0%} would not be found, and the intervals hold if it is none"
        for at, own in zip(kept.load, leverage, strict=True)
        if own > DECISIVE_LEVERAGE and (least := _least_found(fit, own)) > 0.001
    ]
    return warnings


def _least_found(fit: FitResult, leverage: float) -> float:
    """Return the relative size of the smallest outlier that would be found half of the time at a point."""
    points, freedom = len(fit.iteration_s), fit.terms.freedom - 1
    if freedom < 1 or leverage >= 1:
        return math.inf
    limit = -float(special.stdtrit(freedom, OUTLIER_LEVEL / points / 2)) * fit.terms.scatter / math.sqrt(1 - leverage)
    return math.expm1(min(limit, 700.0))


def _choose(candidates: Sequence[FitResult]) -> FitResult:
    if candidates[0].aicc is not None:
        return min((fit for fit in candidates if fit.aicc is not None), key=lambda fit: fit.aicc or 0.0)
    # With four points, the correction is undefined but the same for all fixed exponents, so the least residual wins
    return min(candidates, key=lambda fit: fit.deviance)


def _distinct(load: Array, capacity: float) -> int:
    return len(np.unique(np.round(load / capacity, 6)))


def _check_number(load: Array, capacity: float, points: int, loads: int, limit_gbps: float | None = None) -> None:
    """Check that there are enough points at enough loads, up to a limit if there is one."""
    distinct = _distinct(load, capacity)
    if len(load) < points or distinct < loads:
        upto = "" if limit_gbps is None else f" up to {limit_gbps:g} Gbit/s"
        raise UsageError(
            f"{counted(len(load), 'point')} at {counted(distinct, 'load')}{upto} are too few: this fit needs {points} "
            f"at {loads} different loads"
        )


def relative_errors(spread: Values, time: Array) -> Array:
    """Standard errors of ln t from those of t (delta method).

    Raises:
        UsageError: not one for each time, or a value is not finite or is negative.
    """
    seconds = as_seconds(spread, "standard errors")
    if seconds.shape != time.shape:
        raise UsageError(f"{seconds.size} spreads for {time.size} times: give one for each")
    if not (np.all(np.isfinite(seconds)) and np.all(seconds >= 0)):
        raise UsageError("the standard error of a time must be a finite number, not below zero")
    result: Array = seconds / time
    return result


def _public(solution: Solution, capacity: float) -> tuple[float, float, float]:
    """Return A, B and n of a solution."""
    try:
        values = math.exp(solution.log_t0 - solution.b), solution.b * capacity**solution.n, solution.n
    except OverflowError:
        values = math.inf, solution.b, solution.n
    if not (all(map(math.isfinite, values)) and values[0] > 0):
        raise UsageError("these points give no finite A and B: the times change by too many orders of magnitude")
    return values


def _r2(values: Array, fitted: Array) -> float | None:
    """Coefficient of determination; None if the values do not vary or a fitted one overflows."""
    total = float(np.sum((values - values.mean()) ** 2))
    with np.errstate(over="ignore", invalid="ignore"):
        residual = float(np.sum((values - fitted) ** 2))
    if total <= len(values) * (RESIDUAL_FLOOR * float(np.abs(values).max())) ** 2 or not math.isfinite(residual):
        return None
    return 1 - residual / total


def corrected_akaike(deviance: float, points: int, parameters: int) -> float | None:
    """AICc of a fit; ``parameters`` counts the scatter of the residuals as well.

    -2 ln L + 2k + 2k(k+1)/(m-k-1), where -2 ln L is m ln(RSS/m) without weights: Burnham and Anderson, Model Selection
    and Multimodel Inference (2002), sections 2.2 and 2.4. None if m <= k + 1.
    """
    if points <= parameters + 1:
        return None
    return deviance + 2 * parameters + 2 * parameters * (parameters + 1) / (points - parameters - 1)


def _fit_one(points: _Points, n: Exponent) -> FitResult:
    free = isinstance(n, str)
    log_time = np.log(points.time)
    noise = weigh(points.load, log_time, points.capacity, n, points.error)
    solution = solve_log(points.load, log_time, points.capacity, n, noise)
    result = _result(solution, points, noise, free=free, space="log")
    linear = solve_linear(points.load, points.time, points.capacity, solution, free, noise)
    try:
        if linear is not None:
            return replace(result, linear=_result(linear, points, noise, free=free, space="linear"))
    except UsageError:
        pass
    return replace(result, warnings=(*result.warnings, "the fit to t itself (linear space) does not converge"))


def _with_intervals(fit: FitResult, points: _Points, samples: int, seed: int) -> FitResult:
    n: Exponent = "free" if fit.free else fit.n
    log_time = np.log(points.time)
    noise = weigh(points.load, log_time, points.capacity, n, points.error)
    solution = Solution(fit.terms.log_t0, fit.terms.b, fit.n, None)
    intervals = parameter_intervals(points.load, log_time, points.capacity, n, noise, solution, samples, seed, LEVEL)
    error_a, error_b = fit.stderr["A"], fit.stderr["B"]
    if fit.robust and not fit.free and error_a is not None and error_b is not None:
        # without the outliers the residuals are few, and resampling them makes the interval of B too narrow
        reach = float(special.stdtrit(fit.terms.freedom, (1 + LEVEL) / 2))
        ends = np.exp(np.clip(math.log(fit.A) + reach * error_a / fit.A * np.array([-1, 1]), -700, 700)).tolist()
        intervals |= {"A": (ends[0], ends[1]), "B": (fit.B - reach * error_b, fit.B + reach * error_b)}
    return replace(fit, intervals=intervals, samples=samples)


def _result(
    solution: Solution, points: _Points, noise: Noise, *, free: bool, space: Literal["log", "linear"]
) -> FitResult:
    load, time, capacity = points.load, points.time, points.capacity
    A, B, n = _public(solution, capacity)
    log_time, parameters = np.log(time), 3 if free else 2
    fitted = log_predict(solution, load, capacity)
    residual = log_time - fitted
    deviance = noise.deviance(residual, points.error)
    aicc = corrected_akaike(deviance, len(time), parameters + 1) if space == "log" else None
    with np.errstate(over="ignore"):
        relative = np.exp(fitted - log_time.max())
    stderr, correlation = _errors(solution, capacity, A)
    notes = fit_warnings(solution, load, capacity, noise, log_time, correlation)
    if stderr["A"] is not None and stderr["A"] > A * UNSURE_SHARE:
        notes.append(
            f"A is not identifiable: its standard error is {stderr['A'] / A:.0%} of it; n and B compensate for it"
        )
    if space == "log" and aicc is None:
        notes.append(
            f"AICc is undefined with {counted(len(time), 'point')}, so models are compared by their residuals alone"
        )
    covariance = None if solution.covariance is None else tuple(map(tuple, solution.covariance.tolist()))
    return FitResult(
        A, B, n, capacity, free, space,
        r2=_r2(time / time.max(), relative),
        r2_log=_r2(log_time, fitted),
        deviance=deviance,
        aicc=aicc,
        stderr=stderr,
        warnings=tuple(notes),
        bandwidth_gbps=load,
        iteration_s=time,
        terms=Terms(
            solution.log_t0, solution.b, covariance, len(time) - parameters, noise.scatter(residual, parameters)
        ),
        weighted=noise.known,
        between=noise.between,
    )  # fmt: skip


def _errors(solution: Solution, capacity: float, A: float) -> tuple[dict[str, float | None], float | None]:
    """Standard errors of A, B and n, and the correlation of ln A with B."""
    if solution.covariance is None:
        return {"A": None, "B": None, "n": None}, None
    scale = capacity**solution.n
    rows = [[1.0, -1.0], [0.0, scale]]
    if len(solution.covariance) == 3:
        rows = [[1.0, -1.0, 0.0], [0.0, scale, solution.b * scale * math.log(capacity)], [0.0, 0.0, 1.0]]
    change = np.array(rows)
    covariance = change @ solution.covariance @ change.T
    deviation = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    correlation = None
    if deviation[0] > 0 and deviation[1] > 0 and len(deviation) == 2:
        correlation = float(covariance[0, 1] / (deviation[0] * deviation[1]))
    stderr_n = float(deviation[2]) if len(deviation) == 3 else None
    return {"A": A * float(deviation[0]), "B": float(deviation[1]), "n": stderr_n}, correlation


def weigh(load: Array, log_time: Array, capacity: float, n: Exponent, error: Array | None) -> Noise:
    """Estimate the scatter of the points around the curve, and their weights.

    Args:
        load: loads, shape (points,).
        log_time: ln t of the points.
        capacity: capacity of the bottleneck.
        n: exponent of the curve.
        error: standard error of each ln t; None if it is not known.
    """
    if error is None:
        return Noise(np.ones(len(load)))
    freedom = len(load) - (3 if isinstance(n, str) else 2)

    def excess(between: float) -> float:
        noise = from_errors(error, between)
        solution = solve_log(load, log_time, capacity, n, noise)
        return float(noise.cost(log_time - log_predict(solution, load, capacity))) - freedom

    return from_errors(error, scatter_between(excess, log_time))
