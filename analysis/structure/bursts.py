"""Communication and silence within iterations, bursts, and peak to mean at several time scales."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd

from ringtap.analysis.structure.periodicity import Integers, is_loud

SCALES_S = (0.001, 0.01, 0.1, 1.0)
# pauses of fewer bins do not separate two bursts
_PAUSE_BINS = 2


def loud_bins(payload: Integers) -> Integers:
    """Return the bins in which a stream sent more than small messages (`periodicity.is_loud`).

    Args:
        payload: bytes in each bin, shape (bins,).
    """
    used = np.flatnonzero(payload)
    return used[is_loud(payload[used])].astype(np.int64)


def iterations_of(
    payload: Integers, starts: Integers, found: npt.NDArray[np.bool_], start_ns: int, bin_ns: int
) -> pd.DataFrame:
    """Return the iterations, one row per iteration, each from the start of its communication to the next start.

    Columns: ``start_ns``, ``end_ns`` (CLOCK_REALTIME), ``iteration_s``, ``communication_s`` (first to last payload),
    ``silence_s`` (after it), ``bytes`` (payload of ``payload``), ``seen`` (a silence was found before and after it).

    Args:
        payload: training payload in each bin, shape (bins,).
        starts: bins in which communication begins, ascending.
        found: True for starts that follow a silence.
        start_ns: begin of bin 0.
        bin_ns: width of a bin.
    """
    loud = loud_bins(payload)
    last = loud[np.clip(np.searchsorted(loud, starts[1:]) - 1, 0, len(loud) - 1)]
    ends = np.maximum(last + 1, starts[:-1] + 1)
    table = {
        "start_ns": start_ns + starts[:-1] * bin_ns,
        "end_ns": start_ns + starts[1:] * bin_ns,
        "iteration_s": np.diff(starts) * (bin_ns / 1e9),
        "communication_s": (ends - starts[:-1]) * (bin_ns / 1e9),
        "silence_s": (starts[1:] - ends) * (bin_ns / 1e9),
        "bytes": np.add.reduceat(payload[: starts[-1]], starts[:-1]),
        "seen": found[:-1] & found[1:],
    }
    return pd.DataFrame(table)


def bursts_of(payload: Integers, starts: Integers, bin_ns: int) -> pd.DataFrame:
    """Return the bursts of one sender within the iterations; pauses under two bins do not separate bursts.

    Columns: ``iteration`` (its number), ``begin_s`` (since the iteration's start), ``length_s``, ``bytes``.

    Args:
        payload: bytes that the host sent in each bin, shape (bins,).
        starts: bins in which iterations begin, ascending.
        bin_ns: width of a bin.
    """
    loud = loud_bins(payload)
    loud = loud[(loud >= starts[0]) & (loud < starts[-1])]
    if not len(loud):
        return pd.DataFrame({"iteration": [], "begin_s": [], "length_s": [], "bytes": []})
    heads = np.flatnonzero(np.concatenate(([True], np.diff(loud) > _PAUSE_BINS)))
    begin, end = loud[heads], loud[np.append(heads[1:] - 1, len(loud) - 1)] + 1
    passed = np.concatenate(([0], np.cumsum(payload)))
    iteration = np.searchsorted(starts, begin, side="right") - 1
    table = {
        "iteration": iteration,
        "begin_s": (begin - starts[iteration]) * (bin_ns / 1e9),
        "length_s": (end - begin) * (bin_ns / 1e9),
        "bytes": passed[end] - passed[begin],
    }
    return pd.DataFrame(table)


def peak_to_mean(senders: Mapping[str, Integers], starts: Integers, bin_ns: int) -> pd.DataFrame:
    """Return the highest rate in windows of several lengths, relative to the mean rate of whole iterations.

    Columns: ``host``, ``scale_s``, ``peak_bps`` (highest over sliding windows), ``mean_bps``, ``peak_to_mean``. Scales
    below a bin or above half of the iterations' span are left out.

    Args:
        senders: bytes that each host sent in each bin, shape (bins,).
        starts: bins in which iterations begin, ascending.
        bin_ns: width of a bin.
    """
    rows = []
    for host, payload in senders.items():
        inside = payload[starts[0] : starts[-1]]
        passed = np.concatenate(([0], np.cumsum(inside)))
        mean_bps = float(passed[-1]) * 8e9 / (len(inside) * bin_ns)
        for scale_s in SCALES_S:
            width = round(scale_s * 1e9 / bin_ns)
            if width < 1 or width > len(inside) // 2 or mean_bps <= 0:
                continue
            peak_bps = float((passed[width:] - passed[:-width]).max()) * 8e9 / (width * bin_ns)
            rows.append((host, scale_s, peak_bps, mean_bps, peak_bps / mean_bps))
    return pd.DataFrame(rows, columns=["host", "scale_s", "peak_bps", "mean_bps", "peak_to_mean"])
