"""Calculates what Crux (SIGCOMM 2024) maximizes: FLOPs per second of all jobs, and a rule's gain over equal shares.

The GPU intensity of a job times the rate of its bytes at its slowest link is the job's FLOPs per second times the
capacity of the link, so that their sum over jobs measures how well they use GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
from scipy import special

from ringtap.analysis.statistics.quantiles import LEVEL
from ringtap.analysis.statistics.short_correlated_series import MIN_STRETCHED, stretches_of

_ROUNDED = 1 + 1e-9  # whole numbers of iterations may be a little less
MAX_FLOP = 1e30  # of an iteration, as in plans


@dataclass(frozen=True)
class Computation:
    """FLOPs per second of all jobs at a point.

    Attributes:
        flop_per_s: mean over the time in which all jobs have whole iterations.
        low_flop_per_s: lower end of its 95 % interval; None if there are too few iterations.
        high_flop_per_s: upper end, likewise.
        predicted_flop_per_s: from the predicted iteration times; None if one is not known.
        gain: ``flop_per_s`` over the mean of the points with equal shares, less 1; None for these, and without them.
        gain_low: lower end of its 95 % interval; None if that of a point is not known.
        gain_high: upper end, likewise.
        predicted_gain: the same of the predictions; None if one is not known.
    """

    flop_per_s: float
    low_flop_per_s: float | None
    high_flop_per_s: float | None
    predicted_flop_per_s: float | None
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    predicted_gain: float | None = None
    error: float | None = field(default=None, repr=False)  # relative standard error
    freedom: float = field(default=0.0, repr=False)


def computation(
    tables: Sequence[pd.DataFrame], flop: Sequence[float], predicted_s: Sequence[float | None]
) -> Computation | None:
    """Return the FLOPs per second of jobs that run at the same time; None if there is no such time.

    The interval is that of stretches of time, in which all jobs count, so that what one job loses to another one adds
    no error. Their number follows from the iterations of the slowest job. Within an iteration, FLOPs count as spread
    evenly.

    Args:
        tables: ``begin_ns`` and ``iteration_s`` of each job's iterations.
        flop: FLOPs of an iteration of each job.
        predicted_s: predicted iteration time of each job.
    """
    edges_ns = [
        np.append(one["begin_ns"], one["begin_ns"].iloc[-1] + 1e9 * one["iteration_s"].iloc[-1]) for one in tables
    ]
    begin_ns, end_ns = max(float(edges[0]) for edges in edges_ns), min(float(edges[-1]) for edges in edges_ns)
    if end_ns <= begin_ns:
        return None
    longest_ns = 1e9 * max(float(one["iteration_s"].mean()) for one in tables)
    count = int((end_ns - begin_ns) / longest_ns * _ROUNDED)
    number = stretches_of(count) if count >= MIN_STRETCHED else 1
    cuts_ns = np.linspace(begin_ns, end_ns, number + 1)
    done = sum(
        each * np.interp(cuts_ns, edges, np.arange(len(edges))) for each, edges in zip(flop, edges_ns, strict=True)
    )
    rates = np.diff(done) / np.diff(cuts_ns) * 1e9
    mean, error, freedom = float(rates.mean()), None, 0.0
    if number > 1:
        error, freedom = float(rates.std(ddof=1)) / math.sqrt(number) / mean, number - 1.0
    low, high = _interval(mean, error, freedom)
    known = [each / time_s for each, time_s in zip(flop, predicted_s, strict=True) if time_s]
    predicted = sum(known) if len(known) == len(flop) else None
    return Computation(mean, low, high, predicted, error=error, freedom=freedom)


def _interval(mean: float, error: float | None, freedom: float) -> tuple[float | None, float | None]:
    if error is None or freedom <= 0:
        return None, None
    half = mean * error * float(special.stdtrit(freedom, (1 + LEVEL) / 2))
    return mean - half, mean + half


def with_gain(found: Computation, equal: Sequence[Computation]) -> Computation:
    """Return the computation of a point with its gain over points with equal shares.

    The interval of the gain holds for the paths that jobs had at these points, and has the degrees of freedom of Welch
    and Satterthwaite.
    """
    mean = sum(one.flop_per_s for one in equal) / len(equal)
    ratio = found.flop_per_s / mean
    parts = [(found.error, found.freedom)]
    parts += [
        (None if one.error is None else one.error * one.flop_per_s / mean / len(equal), one.freedom) for one in equal
    ]
    known = [(error**2, freedom) for error, freedom in parts if error is not None and freedom > 0]
    low = high = None
    if len(known) == len(parts) and (variance := sum(each for each, _ in known)):
        freedom = variance**2 / sum(each**2 / own for each, own in known)
        low, high = _interval(ratio, math.sqrt(variance), freedom)
    predicted = [one.predicted_flop_per_s for one in equal if one.predicted_flop_per_s]
    predicted_gain = None
    if found.predicted_flop_per_s and len(predicted) == len(equal):
        predicted_gain = found.predicted_flop_per_s / (sum(predicted) / len(predicted)) - 1
    return replace(
        found,
        gain=ratio - 1,
        gain_low=None if low is None else low - 1,
        gain_high=None if high is None else high - 1,
        predicted_gain=predicted_gain,
    )


def flop_of(plan: Mapping[str, object]) -> dict[str, float]:
    """Return the FLOPs of an iteration of each job of a plan that gives them."""
    jobs = plan.get("jobs")
    found = {}
    for job in jobs if isinstance(jobs, list) else ():
        if isinstance(job, dict) and isinstance(flop := job.get("flop"), (int, float)) and 0 < flop <= MAX_FLOP:
            found[str(job.get("name"))] = float(flop)
    return found
