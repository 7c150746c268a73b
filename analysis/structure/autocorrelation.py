"""Autocorrelation of a payload rate: a second, independent estimate of the iteration period."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_MOST_LAGS = 4


@dataclass(frozen=True, eq=False)
class Likeness:
    """Autocorrelation of a payload rate.

    Attributes:
        lags: lags in bins, ascending from 0.
        values: autocorrelation at each lag, 1 at lag 0.
        period_bins: lag of the peak near the expected period; None: no peak there.
        at_period: autocorrelation at this lag; None: no peak.
    """

    lags: Integers
    values: Numbers
    period_bins: float | None
    at_period: float | None


def likeness(payload: Integers, expected_bins: float) -> Likeness:
    """Return the autocorrelation of payload at lags up to four expected periods, and the peak at the period.

    The payload is smoothed over 5 % of the period. The peak is the highest positive value between 0.75 and 1.33 of the
    expected period; it does not count at either end of this range.

    Args:
        payload: bytes in each bin, shape (bins,).
        expected_bins: the expected period.
    """
    width = max(1, round(expected_bins * 0.05))
    rate = np.convolve(payload.astype(np.float64), np.ones(width) / width, mode="same")
    rate -= rate.mean()
    size = 1 << (2 * len(rate) - 1).bit_length()
    power = np.abs(np.fft.rfft(rate, size)) ** 2
    most = min(len(rate) - 1, int(_MOST_LAGS * expected_bins))
    values = np.fft.irfft(power, size)[: most + 1]
    # fewer pairs at longer lags
    values = values / (len(rate) - np.arange(most + 1))
    values = values / values[0] if values[0] > 0 else np.zeros(most + 1)
    lags = np.arange(most + 1, dtype=np.int64)
    begin, end = int(0.75 * expected_bins), min(int(1.33 * expected_bins) + 1, most)
    if end - begin < 3:
        return Likeness(lags, values, None, None)
    place = begin + int(np.argmax(values[begin : end + 1]))
    if place in (begin, end) or values[place] <= 0:
        return Likeness(lags, values, None, None)
    return Likeness(lags, values, float(place), float(values[place]))
