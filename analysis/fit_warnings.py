"""What to know before the numbers of a fit are used, one sentence each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from ringtap.analysis.noise import RESIDUAL_FLOOR, Noise
from ringtap.analysis.regression import FREE_BOUNDS, Array, Solution, log_predict

if TYPE_CHECKING:
    from ringtap.analysis.fit_result import FitResult

UNSURE_SHARE = 0.5  # of A: with a larger standard error its size is not known
EXTREME_CORRELATION = 0.995
WIDE_INTERVAL = 2.0  # ends of the interval of n, the one over the other, from which on n is not told from B
ALIKE_AICC = 2.0  # models this near the best one have substantial support (Burnham and Anderson, section 2.6)
OUTLIER_SHARE = 0.5  # of its weight: a point that counts for less is named


def notes(
    solution: Solution, load: Array, capacity: float, noise: Noise, log_time: Array, correlation: float | None
) -> list[str]:
    """Sentences on one fit; ``correlation`` is that of ln A with B where n was given."""
    residual = log_time - log_predict(solution, load, capacity)
    parameters = 2 if solution.n_interval is None else 3
    grows = _grows(noise, residual, log_time, parameters)
    said = _exponent(solution)
    if not grows:
        said.append("B is statistically zero: the points show no growth with load, so n says nothing")
    elif solution.covariance is None:
        said.append("standard errors are undefined: the parameters cannot be told apart")
    if grows and solution.b < 0:
        said.append("B is negative: the iteration time falls as the load grows")
    if correlation is not None and abs(correlation) > EXTREME_CORRELATION:
        said.append(f"A and B are hardly told apart (correlation {correlation:.4f}): the loads span too little")
    heaviest, lightest = load[-1] / capacity, load[0] / capacity
    if heaviest < 0.7:
        said.append(f"the heaviest load is {heaviest:.0%} of capacity: the curve beyond it is extrapolated")
    if lightest > 0.2:
        said.append(f"the lightest load is {lightest:.0%} of capacity: the curve below it is extrapolated")
    for share, at, off in zip(noise.share(residual), load, np.expm1(np.clip(residual, -50, 50)), strict=True):
        if share < OUTLIER_SHARE:
            said.append(f"the point at {at:.4g} Gbit/s lies {off:+.0%} off the curve and counts for {share:.2g} of one")
    return said


def alike(chosen: FitResult, candidates: Sequence[FitResult]) -> list[str]:
    """A sentence where other exponents describe the points about as well as the chosen one."""
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


def _exponent(solution: Solution) -> list[str]:
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
    """Whether the model beats a constant time, by the F test at 5 %; the t test of B where n is given."""
    if float(np.sum((log_time - log_time.mean()) ** 2)) <= len(log_time) * RESIDUAL_FLOOR**2:
        return False
    level = log_time - np.average(log_time, weights=noise.weight)
    if noise.cut is not None:
        level = log_time - np.median(log_time)
    freedom = len(log_time) - parameters
    cost, total = float(noise.cost(residual)), float(noise.cost(level))
    unit = 1.0 if noise.known else cost / freedom
    limit = stats.f.ppf(0.95, parameters - 1, freedom)
    return bool((total - cost) / (parameters - 1) > limit * unit)
