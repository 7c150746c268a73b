"""Iteration time found in packets, with its confidence interval, a verdict, and the reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ringtap.analysis.structure.autocorrelation import Likeness
from ringtap.analysis.structure.detection import Training

SURE, LIKELY, DOUBTFUL = "sure", "likely", "doubtful"

_RESAMPLES = 2000
_FEW_ITERATIONS = 16


@dataclass(frozen=True)
class Period:
    """Iteration time.

    Attributes:
        iterations: whole iterations captured.
        mean_s: mean of the iteration times.
        low_s: lower end of the mean's 95 % interval, by bootstrap over iterations.
        high_s: upper end of this interval.
        median_s: median of the iteration times.
        p99_s: 99th percentile of the iteration times.
        verdict: ``sure``, ``likely`` or ``doubtful``.
        confidence: 1 less the probability that chance gives as many silences at the boundaries.
        found_share: share of the boundaries at which there was a silence.
        silence_s: usual silence before a boundary (lower quartile).
        other_silence_s: usual length of the longest silence within an iteration (lower quartile).
        autocorrelation: autocorrelation of the training rate at its peak near the median; None: no peak there.
        autocorrelation_s: lag of this peak; None: no peak.
        reasons: arguments against the period, one sentence each.
    """

    iterations: int
    mean_s: float
    low_s: float
    high_s: float
    median_s: float
    p99_s: float
    verdict: str
    confidence: float
    found_share: float
    silence_s: float
    other_silence_s: float
    autocorrelation: float | None
    autocorrelation_s: float | None
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the period as plain values."""
        return vars(self) | {"reasons": list(self.reasons)}


def period_of(training: Training, iterations: pd.DataFrame, alike: Likeness, bin_ns: int) -> Period:
    """Summarize the iteration times, and give a verdict with reasons.

    Args:
        training: the job.
        iterations: as from `bursts.iterations_of`.
        alike: autocorrelation of the training payload.
        bin_ns: width of a bin.
    """
    rhythm = training.reference.rhythm
    assert rhythm is not None  # the reference has its own periodicity
    times = iterations["iteration_s"].to_numpy(np.float64)
    draws = np.random.default_rng(1).integers(0, len(times), (_RESAMPLES, len(times)))
    low, high = np.quantile(times[draws].mean(axis=1), (0.025, 0.975))
    # a boundary may lie anywhere in its bin
    grain_s = bin_ns / 1e9 / len(times)
    reasons = []
    contrast = rhythm.silence_bins / rhythm.other_bins if rhythm.other_bins else np.inf
    if len(times) < 8:
        reasons.append(f"only {len(times)} whole iterations were captured")
    if rhythm.found_share < 0.9:
        reasons.append(f"{1 - rhythm.found_share:.0%} of the boundaries have no silence")
    if contrast < 1.5:
        reasons.append("a silence within the iterations is nearly as long as those between them")
    long = rhythm.long_bins > 2 * rhythm.silence_bins
    if long:
        reasons.append("some silences are far longer than usual, so that several bursts may be one iteration")
    if rhythm.silence_bins < 4:
        reasons.append("silences are only a few bins long: --bin with a smaller one shows them better")
    near = alike.period_bins is not None and abs(alike.period_bins * bin_ns / 1e9 / np.median(times) - 1) < 0.1
    if not near and float(np.std(times)) < 0.1 * float(times.mean()):
        reasons.append("the rate's autocorrelation has no peak at this period")
    # of a few silences, a far longer one may be the only one between iterations
    several = long and len(times) < _FEW_ITERATIONS
    verdict = SURE if not reasons else LIKELY if len(reasons) == 1 and not several else DOUBTFUL
    return Period(
        len(times),
        float(times.mean()),
        float(low) - grain_s,
        float(high) + grain_s,
        float(np.median(times)),
        float(np.quantile(times, 0.99)),
        verdict,
        rhythm.confidence,
        rhythm.found_share,
        rhythm.silence_bins * bin_ns / 1e9,
        rhythm.other_bins * bin_ns / 1e9,
        alike.at_period if near else None,
        alike.period_bins * bin_ns / 1e9 if near and alike.period_bins is not None else None,
        tuple(reasons),
    )
