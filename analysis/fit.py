"""The general model t = A*exp(B/(C-BW)^n) fitted to measured points (thesis, equation 3.7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from ringtap.analysis import regression
from ringtap.analysis.regression import FREE_BOUNDS, Array, Solution
from ringtap.errors import UsageError

EXPONENTS = (0.5, 1.0, 2.0)
MIN_POINTS, MIN_LOADS = 4, 3
MIN_POINTS_FREE, MIN_LOADS_FREE = 6, 4
# Iteration times are read from clocks that resolve about a microsecond in a second: smaller residuals say nothing.
RESIDUAL_FLOOR = 1e-8
UNSURE_SHARE = 0.5  # of A: with a larger standard error its size is not known
EXTREME_CORRELATION = 0.995

Exponent = float | Literal["free"]
Values = Sequence[float] | npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class FitResult:
    """One fit of equation 3.7, or the best of several.

    Attributes:
        A: factor, in seconds.
        B: numerator of the exponent, in (Gbit/s)^n.
        n: exponent; n = 1/2, 1 and 2 are equations 3.5, 3.3 and 3.6.
        C_gbps: capacity of the bottleneck, given and not fitted.
        free: whether n was fitted too.
        space: ``log`` when ln t was fitted, ``linear`` when t was.
        r2: coefficient of determination of t; None where all times are equal or a prediction overflows.
        r2_log: the same of ln t.
        aicc: Akaike's criterion with the correction for few points, on residuals of ln t; None where it is undefined.
        stderr: standard errors of A, B and n; None where undefined, n's also where n was given.
        warnings: what to know before using the numbers, one sentence each.
        bandwidth_gbps: loads of the points, ascending, shape (points,).
        iteration_s: times of the points in the same order, shape (points,).
        linear: the same model fitted to t itself; None where that does not converge, and within a linear fit.
        candidates: every model that was compared when no exponent was asked for, the chosen one among them.
    """

    A: float
    B: float
    n: float
    C_gbps: float
    free: bool
    space: Literal["log", "linear"]
    r2: float | None
    r2_log: float | None
    aicc: float | None
    stderr: dict[str, float | None]
    warnings: tuple[str, ...]
    bandwidth_gbps: Array = field(repr=False, compare=False)
    iteration_s: Array = field(repr=False, compare=False)
    linear: FitResult | None = field(default=None, repr=False)
    candidates: tuple[FitResult, ...] = field(default=(), repr=False)

    @property
    def name(self) -> str:
        """How reports call the model: ``n = 1/2``, ``n = 1``, ``n = 2`` or ``n free``."""
        return "n free" if self.free else f"n = {'1/2' if self.n == 0.5 else f'{self.n:g}'}"

    def predict(self, bandwidth_gbps: Values) -> Array:
        """Iteration time in seconds at the given loads in Gbit/s; the same shape as the argument.

        Raises:
            UsageError: a load is negative, at or past the capacity, or not a number.
        """
        load = np.asarray(bandwidth_gbps, dtype=np.float64)
        if not np.all((load >= 0) & (load < self.C_gbps)):
            raise UsageError(f"a load to predict at must be from 0 to below the capacity of {self.C_gbps:g} Gbit/s")
        with np.errstate(over="ignore"):
            result: Array = self.A * np.exp(self.B / (self.C_gbps - load) ** self.n)
        return result

    def bootstrap(self, samples: int = 1000, seed: int = 0, level: float = 0.95) -> dict[str, tuple[float, float]]:
        """Percentile intervals of A, B and n from resampled residuals of ln t.

        The loads stay as they are; residuals are widened by sqrt(points / degrees of freedom). Efron and Tibshirani,
        An Introduction to the Bootstrap (1993), section 9.4.

        Args:
            samples: number of resampled data sets.
            seed: seed of the resampling; the same seed gives the same intervals.
            level: share of the resampled values inside an interval.
        """
        log_time = np.log(self.iteration_s)
        fitted = math.log(self.A) + self.B / (self.C_gbps - self.bandwidth_gbps) ** self.n
        residual = log_time - fitted
        freedom = len(log_time) - (3 if self.free else 2)
        residual = (residual - residual.mean()) * math.sqrt(len(log_time) / freedom)
        draw = np.random.default_rng(seed)
        rows = []
        for _ in range(samples):
            resampled = fitted + draw.choice(residual, size=len(residual))
            solution = _solve_log(self.bandwidth_gbps, resampled, self.C_gbps, "free" if self.free else self.n)
            rows.append(_public(solution, self.C_gbps))
        tails = ((1 - level) / 2, 1 - (1 - level) / 2)
        bounds = np.quantile(np.array(rows), tails, axis=0)
        return {name: (float(bounds[0, i]), float(bounds[1, i])) for i, name in enumerate(("A", "B", "n"))}

    def report(self) -> str:
        """The fit as text for a terminal, several lines."""
        lines = [f"t = A*exp(B/(C-BW)^n), C = {self.C_gbps:g} Gbit/s, {len(self.iteration_s)} points, fitted to ln t"]
        for fit in self.candidates or (self,):
            mark = "*" if fit.name == self.name and self.candidates else " "
            lines.append(f"{mark} {fit.name:8s} {_numbers(fit)}")
            if fit.linear is not None:
                lines.append(f"  {'  on t':8s} {_numbers(fit.linear)}")
        if self.candidates:
            lines.append("* least AICc")
        lines += [f"  warning: {text}" for text in self.warnings]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The numbers as plain values for JSON; linear fit and candidates nested."""
        item: dict[str, Any] = {"A": self.A, "B": self.B, "n": self.n, "C_gbps": self.C_gbps, "model": self.name}
        item |= {"space": self.space, "points": len(self.iteration_s), "r2": self.r2, "r2_log": self.r2_log}
        item |= {"aicc": self.aicc, "stderr": self.stderr, "warnings": list(self.warnings)}
        if self.space == "log":
            item["linear"] = None if self.linear is None else self.linear.to_json()
        if self.candidates:
            item["candidates"] = [fit.to_json() for fit in self.candidates]
        return item


def _numbers(fit: FitResult) -> str:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    parts = [f"{key} {getattr(fit, key):.4g} ± {shown(fit.stderr[key], '.2g')}" for key in ("A", "B")]
    parts.append(f"n {fit.n:.3g}" + (f" ± {shown(fit.stderr['n'], '.2g')}" if fit.free else ""))
    parts += [f"R² {shown(fit.r2, '.4f')}", f"R² log {shown(fit.r2_log, '.4f')}"]
    if fit.space == "log":
        parts.append(f"AICc {shown(fit.aicc, '.1f')}")
    return "  ".join(parts)


@dataclass(frozen=True)
class CongestionModel:
    """Equation 3.7 for a bottleneck of known capacity.

    Attributes:
        capacity_gbps: capacity C of the bottleneck in Gbit/s.
        n: exponent (1/2, 1, 2 or another number), ``"free"`` to fit it within 0.1 to 4, or None to let the corrected
            Akaike criterion choose among 1/2, 1, 2 and, with enough points, a free one.
    """

    capacity_gbps: float = 25.0
    n: Exponent | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.capacity_gbps) and self.capacity_gbps > 0):
            raise UsageError(f"a capacity of {self.capacity_gbps:g} Gbit/s is not a positive rate")
        if isinstance(self.n, str):
            if self.n != "free":
                raise UsageError(f"exponent {self.n!r} is unknown: give 0.5, 1, 2 or free")
        elif self.n is not None and not FREE_BOUNDS[0] <= self.n <= FREE_BOUNDS[1]:
            raise UsageError(f"exponent {self.n:g} is outside {FREE_BOUNDS[0]:g} to {FREE_BOUNDS[1]:g}")

    def guess(self, bandwidth_gbps: Values, iteration_s: Values) -> tuple[float, float, float]:
        """A, B and n of the curve through the lightest and the heaviest point, with n = 1/2 where it is not given.

        Raises:
            UsageError: the points make no sense or are too few.
        """
        load, time = _checked(bandwidth_gbps, iteration_s, self.capacity_gbps, MIN_POINTS, MIN_LOADS)
        n = self.n if isinstance(self.n, int | float) else EXPONENTS[0]
        x = regression.reduced_load(load, self.capacity_gbps, n)
        b = math.log(time[-1] / time[0]) / (x[-1] - x[0])
        return _public(Solution(math.log(time[0]) - b * float(x[0]), float(b), n, None), self.capacity_gbps)

    def fit(self, bandwidth_gbps: Values, iteration_s: Values) -> FitResult:
        """Fit the model to points.

        Args:
            bandwidth_gbps: cross traffic in Gbit/s, shape (points,), in any order; repeated loads are replicates.
            iteration_s: mean iteration time in seconds at each, shape (points,).

        Returns:
            The fit in log space with its linear-space twin; with ``n=None`` the one of least AICc.

        Raises:
            UsageError: a value makes no sense, or fewer than 4 points at 3 loads (6 at 4 for a free exponent).
        """
        least = (MIN_POINTS_FREE, MIN_LOADS_FREE) if self.n == "free" else (MIN_POINTS, MIN_LOADS)
        load, time = _checked(bandwidth_gbps, iteration_s, self.capacity_gbps, *least)
        if self.n is not None:
            return _fit_one(load, time, self.capacity_gbps, self.n)
        exponents: list[Exponent] = list(EXPONENTS)
        if len(time) >= MIN_POINTS_FREE and _distinct(load, self.capacity_gbps) >= MIN_LOADS_FREE:
            exponents.append("free")
        fits = []
        for exponent in exponents:
            try:
                fits.append(_fit_one(load, time, self.capacity_gbps, exponent))
            except UsageError as error:
                failure = error
        if not fits:
            raise failure
        candidates = tuple(fits)
        return replace(_choose(candidates), candidates=candidates)


def _choose(candidates: tuple[FitResult, ...]) -> FitResult:
    if candidates[0].aicc is not None:
        return min((fit for fit in candidates if fit.aicc is not None), key=lambda fit: fit.aicc or 0.0)
    # With four points the correction is undefined, but equal for all fixed exponents: the least residual wins.
    return min(candidates, key=_rss_log)


def _distinct(load: Array, capacity: float) -> int:
    return len(np.unique(np.round(load / capacity, 6)))


def _checked(bandwidth: Values, time: Values, capacity: float, points: int, loads: int) -> tuple[Array, Array]:
    """Sorted arrays of the points, once they make sense."""
    load, seconds = np.asarray(bandwidth, dtype=np.float64), np.asarray(time, dtype=np.float64)
    if load.ndim != 1 or load.shape != seconds.shape:
        raise UsageError(f"loads and times must be two lists of one length, not {load.shape} and {seconds.shape}")
    if not (np.all(np.isfinite(load)) and np.all(np.isfinite(seconds))):
        raise UsageError("loads and times must be finite numbers")
    if not (np.all(load >= 0) and np.all(seconds > 0)):
        raise UsageError("loads must not be negative and times must be positive")
    if not np.all(load < capacity):
        raise UsageError(f"a load of {load.max():g} Gbit/s is not below the capacity of {capacity:g} Gbit/s")
    distinct = _distinct(load, capacity)
    if len(load) < points or distinct < loads:
        raise UsageError(
            f"{len(load)} points at {distinct} loads are too few: this fit needs {points} at {loads} different loads"
        )
    order = np.lexsort((seconds, load))
    return load[order], seconds[order]


def _solve_log(load: Array, log_time: Array, capacity: float, n: Exponent) -> Solution:
    if isinstance(n, str):
        return regression.solve_log_free(load, log_time, capacity)
    return regression.solve_log_fixed(load, log_time, capacity, n)


def _public(solution: Solution, capacity: float) -> tuple[float, float, float]:
    """A, B and n of a solution."""
    try:
        values = math.exp(solution.log_t0 - solution.b), solution.b * capacity**solution.n, solution.n
    except OverflowError:
        values = math.inf, solution.b, solution.n
    if not (all(map(math.isfinite, values)) and values[0] > 0):
        raise UsageError("these points give no finite A and B: the times change by too many orders of magnitude")
    return values


def _r2(values: Array, fitted: Array) -> float | None:
    """Coefficient of determination; None where the values do not vary or a fitted one overflows."""
    total = float(np.sum((values - values.mean()) ** 2))
    with np.errstate(over="ignore", invalid="ignore"):
        residual = float(np.sum((values - fitted) ** 2))
    if total <= len(values) * (RESIDUAL_FLOOR * float(np.abs(values).max())) ** 2 or not math.isfinite(residual):
        return None
    return 1 - residual / total


def _rss_log(fit: FitResult) -> float:
    fitted = math.log(fit.A) + fit.B / (fit.C_gbps - fit.bandwidth_gbps) ** fit.n
    return float(np.sum((np.log(fit.iteration_s) - fitted) ** 2))


def corrected_akaike(rss: float, points: int, parameters: int) -> float | None:
    """AICc of a least-squares fit; ``parameters`` counts the residuals' variance as well.

    m ln(RSS/m) + 2k + 2k(k+1)/(m-k-1): Burnham and Anderson, Model Selection and Multimodel Inference (2002),
    sections 2.2 and 2.4. None where m <= k + 1.
    """
    if points <= parameters + 1:
        return None
    variance = max(rss / points, RESIDUAL_FLOOR**2)
    correction = 2 * parameters * (parameters + 1) / (points - parameters - 1)
    return points * math.log(variance) + 2 * parameters + correction


def _fit_one(load: Array, time: Array, capacity: float, n: Exponent) -> FitResult:
    free = isinstance(n, str)
    solution = _solve_log(load, np.log(time), capacity, n)
    result = _result(solution, load, time, capacity, space="log", free=free)
    linear = regression.solve_linear(load, time, capacity, solution, free)
    try:
        if linear is not None:
            return replace(result, linear=_result(linear, load, time, capacity, space="linear", free=free))
    except UsageError:
        pass
    return replace(result, warnings=(*result.warnings, "the fit to t itself (linear space) does not converge"))


def _result(
    solution: Solution, load: Array, time: Array, capacity: float, *, free: bool, space: Literal["log", "linear"]
) -> FitResult:
    A, B, n = _public(solution, capacity)
    fitted = regression.log_predict(solution, load, capacity)
    log_time = np.log(time)
    rss = float(np.sum((log_time - fitted) ** 2))
    aicc = corrected_akaike(rss, len(time), 4 if free else 3) if space == "log" else None
    with np.errstate(over="ignore"):
        relative = np.exp(fitted - log_time.max())
    stderr, correlation = _errors(solution, capacity, A)
    grows = _grows(rss, log_time, 3 if free else 2)
    notes = _notes(solution, load, capacity, correlation, grows)
    if stderr["A"] is not None and stderr["A"] > A * UNSURE_SHARE:
        notes.append(
            f"A is not identifiable: its standard error is {stderr['A'] / A:.0%} of it; n and B make up for it"
        )
    if space == "log" and aicc is None:
        notes.append(f"AICc is undefined with {len(time)} points, so models are compared by their residuals alone")
    r2 = _r2(time / time.max(), relative)
    return FitResult(A, B, n, capacity, free, space, r2, _r2(log_time, fitted), aicc, stderr, tuple(notes), load, time)


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


def _grows(rss: float, log_time: Array, parameters: int) -> bool:
    """Whether the model beats a constant time, by the F test at 5 %; the t test of B where n is given."""
    total = float(np.sum((log_time - log_time.mean()) ** 2))
    if total <= len(log_time) * RESIDUAL_FLOOR**2:
        return False
    freedom = len(log_time) - parameters
    limit = stats.f.ppf(0.95, parameters - 1, freedom)
    return bool((total - rss) / (parameters - 1) > limit * rss / freedom)


def _notes(solution: Solution, load: Array, capacity: float, correlation: float | None, grows: bool) -> list[str]:
    notes = []
    if solution.n_interval is not None:
        low, high = solution.n_interval
        if low <= FREE_BOUNDS[0] and high >= FREE_BOUNDS[1]:
            notes.append("n is not identifiable: every exponent from 0.1 to 4 describes these points about as well")
        elif min(solution.n / FREE_BOUNDS[0], FREE_BOUNDS[1] / solution.n) < 1.001:
            notes.append(f"n is at its boundary of {solution.n:.3g}: the points ask for a value beyond it")
    if not grows:
        notes.append("B is statistically zero: the points show no growth with load, so n says nothing")
    elif solution.covariance is None:
        notes.append("standard errors are undefined: the parameters cannot be told apart")
    if grows and solution.b < 0:
        notes.append("B is negative: the iteration time falls as the load grows")
    if correlation is not None and abs(correlation) > EXTREME_CORRELATION:
        notes.append(f"A and B are hardly told apart (correlation {correlation:.4f}): the loads span too little")
    heaviest, lightest = load[-1] / capacity, load[0] / capacity
    if heaviest < 0.7:
        notes.append(f"the heaviest load is {heaviest:.0%} of capacity: the curve beyond it is extrapolated")
    if lightest > 0.2:
        notes.append(f"the lightest load is {lightest:.0%} of capacity: the curve below it is extrapolated")
    return notes
