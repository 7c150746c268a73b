"""Estimates the number of independent values in a series of iteration times, and resamples it in blocks."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ringtap.analysis.statistics.to_arrays import Array, Values, sample

_NOTICED = 2.0  # in standard errors of independent values; a smaller first autocorrelation counts as 0


def correlation_time(values: Values) -> float:
    """Integrated autocorrelation time of values in order of time, at least 1: the number of values that count as one.

    It is calculated from ranks, so that a few long iterations do not hide the rest. Pairs of neighbouring lags are
    summed as long as they are positive (Geyer, Statist. Sci. 7, 1992, section 3.3). The sum is corrected because the
    mean is that of the sample (Wolff, Comput. Phys. Commun. 156, 2004, equation 49). The time is 1 if the first
    autocorrelation is below two standard errors of independent values.
    """
    ordered = sample(values)
    count = len(ordered)
    if count < 4:
        return 1.0
    ranks = pd.Series(ordered).rank().to_numpy(copy=True)
    ranks -= ranks.mean()
    energy = float(ranks @ ranks)
    if energy == 0:
        return 1.0
    spectrum = np.fft.rfft(ranks, 2 * count)
    autocorrelation = np.fft.irfft(spectrum * spectrum.conj())[: count // 2] / energy
    if autocorrelation[1] < _NOTICED / np.sqrt(count):
        return 1.0
    pairs = autocorrelation[: len(autocorrelation) // 2 * 2].reshape(-1, 2).sum(axis=1)
    ended = np.flatnonzero(pairs <= 0)
    used = int(ended[0]) if len(ended) else len(pairs)
    return max(1.0, (2 * float(pairs[:used].sum()) - 1) * (1 + (4 * used - 1) / count))


def effective_count(values: Values) -> float:
    """Effective sample size of values in order of time: their number over the correlation time."""
    ordered = sample(values)
    return max(1.0, len(ordered) / correlation_time(ordered))


def block_means(values: Values, samples: int, draw: np.random.Generator) -> Array:
    """Means of resampled series from the circular block bootstrap, shape (samples,).

    Politis and Romano (1992). A block is as long as two correlation times; for independent values, it is 1 value.
    """
    ordered = sample(values)
    count, time = len(ordered), correlation_time(ordered)
    length = 1 if time == 1.0 else min(int(np.ceil(2 * time)), max(count // 2, 1))
    blocks = -(-count // length)
    # the sum of each circular block is calculated once; resampled series only add up the sums of their blocks
    running = np.concatenate(([0.0], np.cumsum(np.concatenate((ordered, ordered[: length - 1])))))
    sums = running[length:] - running[:-length]
    result: Array = sums[draw.integers(0, count, (samples, blocks))].sum(axis=1) / (blocks * length)
    return result
