"""Finds the periodicity of one payload stream: a silence after each equal volume of bytes.

A training job sends the same number of bytes in every iteration, however long that takes, and is silent while it
computes the forward pass. Plotted over *bytes sent* instead of time, these silences are equally far apart: slow
iterations, jitter and stalls of the transport do not move them. The distance is the iteration's volume, and the ends of
the silences are the boundaries of the iterations.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.special import bdtrc

Integers = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]

# bins that together hold less than the first share of a stream's bytes, and each less than the second share of a usual
# bin, count as silent: they hold a library's own small messages
_QUIET_SHARE, _QUIET_BIN = 0.01, 0.1
# largest distance of a silence from its expected position, as a share of the volume (retransmissions shift it)
TOLERANCE = 0.02
MIN_ITERATIONS = 4
_MIN_SILENCE_BINS = 2
# a silence counts as found if it has this share of the usual length
_LIKE_USUAL = 0.8
_FAR_FROM_USUAL = 0.4  # a silence with a smaller share is skipped
# of the volumes whose silences have at least this share of the best length, the smallest is chosen: the others are
# its multiples
_NEARLY = 0.75
# another stream's volume is adopted if its silences are longer than all others by this factor
_STANDS_OUT = 1.2
_MAX_ITERATIONS = 20_000
_MAX_BUCKETS, _MIN_ROWS = 256, 3  # buckets of an iteration, and iterations compared
# least ratio of silences between iterations to those between buckets; the larger one for fewer than four iterations
_LONGER, _FAR_LONGER = 1.05, 1.5
_CANDIDATES_EACH, _LAGS = 10, 12
_SCORED_ITERATIONS = 120
_ANCHORS = 6
# approximate number of volumes and anchors tried
_TRIED = 500
_MAX_PARTS, _PARTED_ITERATIONS = 128, 64  # equal parts of a volume, and volumes compared
_PARTED = 0.8  # share of the volumes in which a part begins with a silence
# more small exchanges in the silences between volumes than in those between their parts, as an evaluation has
_EVALUATED = 2
# largest probability that the silences of an accepted volume arise by chance, over all volumes tried
_UNLIKELY = 1e-3


@dataclass(frozen=True)
class Silences:
    """Spans in which a stream sent (almost) nothing, in order of time; arrays of one shape.

    Attributes:
        position: payload bytes sent before the end of each.
        length: length of each in bins.
        end: the bin that ended it.
        total: payload bytes of the stream.
    """

    position: Integers
    length: Integers
    end: Integers
    total: int

    def __len__(self) -> int:
        return len(self.position)

    @cached_property
    def positions(self) -> list[int]:
        """`position` as a list, which is much faster to search."""
        found: list[int] = self.position.tolist()
        return found


@dataclass(frozen=True)
class Periodicity:
    """Periodicity of a stream.

    The chance model places silences of the same lengths anywhere in the stream. A step of one volume then meets a
    silence with a probability equal to the share of the stream's bytes within the tolerance of such a silence.

    Attributes:
        volume: payload bytes between two boundaries, median.
        starts: bin in which each iteration's communication begins, ascending.
        found: True for starts with a silence; other starts are the bins in which the volume was reached.
        silence_bins: usual length of the silences at the boundaries (lower quartile).
        long_bins: 90th percentile of their lengths.
        other_bins: usual length of the longest other silence in an iteration (lower quartile).
        confidence: 1 less the probability of finding as many boundaries by chance, over all volumes tried.
        parts: equal parts of a volume with a silence before each; 1: there are none.
        between_pauses: periodicity of these parts, if small messages are exchanged in the silences between volumes,
            as in an evaluation; else None.
    """

    volume: float
    starts: Integers
    found: npt.NDArray[np.bool_]
    silence_bins: float
    long_bins: float
    other_bins: float
    confidence: float
    parts: int = 1
    between_pauses: Periodicity | None = None

    @property
    def found_share(self) -> float:
        """Share of the boundaries at which there was a silence."""
        return float(self.found.mean())


def is_loud(payload: Integers) -> npt.NDArray[np.bool_]:
    """Return a mask of the bins with more than a library's own small messages.

    Args:
        payload: bytes in bins with payload.
    """
    ascending = np.sort(payload)
    passed = np.cumsum(ascending)
    # half of all bytes are in bins of this size or larger
    usual = ascending[np.searchsorted(passed, passed[-1] / 2)]
    most = ascending[np.searchsorted(passed, _QUIET_SHARE * passed[-1])]
    return np.asarray(payload >= min(most, _QUIET_BIN * usual))


def silences_of(bins: Integers, payload: Integers) -> Silences:
    """Return the silences of a stream.

    Args:
        bins: numbers of the bins with payload, strictly ascending.
        payload: bytes in each.
    """
    total = int(payload.sum())
    loud = np.flatnonzero(is_loud(payload))
    length = np.diff(bins[loud]) - 1
    keep = length >= _MIN_SILENCE_BINS
    after = loud[1:][keep]
    passed = np.cumsum(payload) - payload
    # the silence before a stream begins has an unknown length
    longest = int(length.max(initial=0))
    position, end = np.append(passed[loud[0]], passed[after]), np.append(bins[loud[0]], bins[after])
    return Silences(position, np.append(longest, length[keep]), end, total)


def find_periodicity(bins: Integers, payload: Integers, known: Sequence[float] = ()) -> Periodicity | None:
    """Find the periodicity of a stream; None if no volume recurs at least `MIN_ITERATIONS` times beyond chance.

    Args:
        bins: numbers of the bins with payload, strictly ascending.
        payload: bytes in each.
        known: volumes of other streams, tried first, because all streams of a ring have the same volume.
    """
    silences = silences_of(bins, payload)
    if len(silences) < MIN_ITERATIONS:
        return None
    chosen = _choose(silences, np.array(known))
    path = np.empty(0, np.int64) if chosen is None else _follow(silences, chosen)
    if chosen is None or _usual(silences, path) < _STANDS_OUT * _longest_between(silences, path):
        chosen = _choose(silences, _candidates(silences))
        if chosen is None:
            return None
        path = _follow(silences, chosen)
    steps = _multiple(silences, path)
    larger = _periodicity(silences, _follow(silences, chosen * steps), bins, payload) if steps > 1 else None
    if larger is not None and larger.confidence >= 1 - _UNLIKELY:
        return _with_parts(silences, _follow(silences, chosen * steps), larger, bins, payload)
    found = _periodicity(silences, path, bins, payload)
    return found if found is None else _with_parts(silences, path, found, bins, payload)


def _with_parts(
    silences: Silences, path: Integers, found: Periodicity, bins: Integers, payload: Integers
) -> Periodicity:
    """Return a periodicity with the number of its equal parts, and that of the parts if these may be the iterations.

    Buckets of one size and iterations with a pause after every few look the same, unless small messages are exchanged
    in the pause: then it may be no forward pass, but an evaluation.
    """
    parts, between = _equal_parts(silences, path)
    if parts == 1:
        return found
    small = _small_exchanges(bins, payload)
    at_ends = _small_in(small, silences, path[path >= 0])
    if np.median(at_ends) - np.median(_small_in(small, silences, between)) >= _EVALUATED:
        usual = float(np.median(silences.length[between]))
        middle = int(between[len(between) // 2])
        track = _track(silences, found.volume / parts, middle, _MAX_ITERATIONS, _LIKE_USUAL * usual)
        shorter = _periodicity(silences, track, bins, payload)
        if shorter is not None and shorter.confidence >= 1 - _UNLIKELY:
            return replace(found, parts=parts, between_pauses=shorter)
    return replace(found, parts=parts)


def _equal_parts(silences: Silences, path: Integers) -> tuple[int, Integers]:
    """Return the largest number of equal parts that begin with silences of nearly the longest kind, and these silences.

    Returns:
        The number of parts, 1 if there are none, and the silences between them.
    """
    steps = np.flatnonzero((path[:-1] >= 0) & (path[1:] >= 0))[:_PARTED_ITERATIONS]
    begin, end = silences.position[path[steps]], silences.position[path[steps + 1]]
    found: list[tuple[float, int, Integers]] = []
    for parts in range(2, _MAX_PARTS + 1):
        wanted = begin[:, None] + (end - begin)[:, None] * np.arange(1, parts) / parts
        after = np.clip(np.searchsorted(silences.position, wanted), 1, len(silences) - 1)
        nearest = after - (wanted - silences.position[after - 1] < silences.position[after] - wanted)
        near = np.abs(silences.position[nearest] - wanted) <= TOLERANCE * (end - begin)[:, None] / parts
        if len(steps) and (near.mean(axis=0) >= _PARTED).all():
            lengths = np.where(near, silences.length[nearest], 0)
            found.append((float(np.median(lengths, axis=0).min()), parts, np.unique(nearest[near])))
    longest = max((length for length, _, _ in found), default=0.0)
    for length, parts, between in reversed(found):
        if length >= max(_NEARLY * longest, _MIN_SILENCE_BINS):
            return parts, between
    return 1, np.empty(0, np.int64)


def _small_exchanges(bins: Integers, payload: Integers) -> Integers:
    """Return the first bin of each group of bins with a library's own small messages."""
    quiet = bins[~is_loud(payload)]
    return quiet[np.diff(quiet, prepend=quiet[:1] - _MIN_SILENCE_BINS - 1) > _MIN_SILENCE_BINS]


def _small_in(small: Integers, silences: Silences, which: Integers) -> Integers:
    """Return how many small exchanges begin in each of some silences."""
    end = silences.end[which]
    return np.searchsorted(small, end) - np.searchsorted(small, end - silences.length[which])


def _choose(silences: Silences, volumes: Numbers) -> float | None:
    """Return the smallest volume whose silences are nearly as long as any other's; None if all may be chance."""
    scored = [(volume, *_score(silences, volume)) for volume in volumes]
    beyond = [(volume, usual) for volume, usual, _, unlikely in scored if usual > 0 and unlikely < _UNLIKELY]
    if not beyond:
        return None
    best = max(usual for _, usual in beyond)
    return float(min(volume for volume, usual in beyond if usual >= _NEARLY * best))


def _candidates(silences: Silences) -> Numbers:
    """Return frequent volumes between the longest silences: of the 8 longest, the 16 longest and so on."""
    middle = _middle(silences)
    position = silences.position[middle]
    longest = np.argsort(-silences.length[middle], kind="stable")
    found: list[Numbers] = []
    for power in range(3, max(len(longest) - 1, 8).bit_length() + 1):
        chosen = np.sort(longest[: 1 << power])
        lags = range(1, min(_LAGS, len(chosen) - 1) + 1)
        distance = np.concatenate([position[chosen][lag:] - position[chosen][:-lag] for lag in lags])
        found.append(_frequent(distance.astype(np.float64), silences.total))
    return np.unique(np.concatenate(found))


def _frequent(distance: Numbers, total: int) -> Numbers:
    """Return the most frequent distances, to 1 %."""
    distance = distance[(distance > total / _MAX_ITERATIONS) & (distance < total / (MIN_ITERATIONS - 1))]
    if not len(distance):
        return np.empty(0)
    bucket = np.floor(np.log(distance) / np.log1p(TOLERANCE / 2)).astype(np.int64)
    bucket -= bucket.min()
    count = np.bincount(bucket)
    smoothed = np.convolve(count, [0.5, 1.0, 0.5])[1:-1]
    chosen = [number for number in np.argsort(-smoothed, kind="stable")[:_CANDIDATES_EACH] if count[number] > 0]
    return np.array([np.median(distance[np.abs(bucket - number) <= 1]) for number in chosen])


def _middle(silences: Silences) -> slice:
    """Return the slice of the middle silences, which are enough to find candidates."""
    most = 4096
    begin = max(0, (len(silences) - most) // 2)
    return slice(begin, begin + most)


def _score(silences: Silences, volume: float) -> tuple[float, int, float]:
    """Score a volume by the usual length (lower quartile) of the silences at its multiples.

    Returns:
        The length, the best silence to start from, and the probability of such silences by chance.
    """
    best, at, unlikely = 0.0, -1, 1.0
    for anchor in _anchors(silences, volume):
        path = _track(silences, volume, anchor, _SCORED_ITERATIONS // 2)
        if len(path) < MIN_ITERATIONS:
            continue
        lengths = _lengths(silences, path)
        usual = _lower_quartile(lengths)
        if usual > best:
            best, at, unlikely = usual, anchor, _by_chance(silences, volume, lengths, usual)
    return best, at, unlikely


def _by_chance(silences: Silences, volume: float, lengths: Numbers, usual: float) -> float:
    """Return the probability of as many silences of the usual length by chance, over all volumes and anchors tried."""
    least = _LIKE_USUAL * usual
    position = silences.position[silences.length >= least]
    near = 2 * TOLERANCE * volume
    covered = float(np.minimum(np.diff(position), near).sum() + near) / max(silences.total, 1)
    # the first silence was chosen, only the others are trials
    hits, steps = int((lengths >= least).sum()) - 1, len(lengths) - 1
    return min(1.0, _TRIED * float(bdtrc(hits - 1, steps, min(covered, 1.0))))


def _anchors(silences: Silences, volume: float) -> list[int]:
    """Return silences to start from: the longest in each of several stretches of one volume around the middle."""
    middle = silences.position[len(silences) // 2]
    borders = middle + (np.arange(_ANCHORS + 1) - _ANCHORS / 2) * volume
    indices = np.searchsorted(silences.position, borders)
    return [
        int(begin + np.argmax(silences.length[begin:end])) for begin, end in itertools.pairwise(indices) if end > begin
    ]


def _usual(silences: Silences, path: Integers) -> float:
    return _lower_quartile(_lengths(silences, path))


def _lower_quartile(values: Numbers) -> float:
    # called for thousands of short arrays: np.quantile takes 50 us for each
    return float(np.sort(values)[(len(values) - 1) // 4])


def _lengths(silences: Silences, path: Integers) -> Numbers:
    return np.where(path >= 0, silences.length[np.maximum(path, 0)], 0).astype(np.float64)


def _follow(silences: Silences, volume: float) -> Integers:
    """Return the silences one volume apart over the whole stream; -1 if there is none."""
    usual, anchor, _ = _score(silences, volume)
    if anchor < 0:
        return np.empty(0, np.int64)
    return _track(silences, volume, anchor, _MAX_ITERATIONS, _LIKE_USUAL * usual)


def _track(silences: Silences, volume: float, anchor: int, most: int, enough: float = np.inf) -> Integers:
    """Step from a silence to those about one volume before and after; -1 if a step finds none.

    Of several silences in reach, a step takes the longest; if some are as long as ``enough``, the nearest of these,
    because a stall of the transport may be longer than the silence sought. Much shorter silences do not count: stepping
    on from them would lose the period where bytes were retransmitted.
    """
    least = _FAR_FROM_USUAL * min(enough, float(silences.length[anchor]))
    back = _steps(silences, -volume, anchor, most, enough, least)
    return np.array([*reversed(back), anchor, *_steps(silences, volume, anchor, most, enough, least)], np.int64)


def _steps(silences: Silences, step: float, anchor: int, most: int, enough: float, least: float) -> list[int]:
    position, length = silences.positions, silences.length
    path: list[int] = []
    at, missed = float(position[anchor]), 0
    while len(path) < most:
        at += step
        slack = abs(step) * min(TOLERANCE * (1 + missed), 0.2)
        if at < position[0] - slack or at > position[-1] + slack:
            break
        begin = bisect_left(position, at - slack)
        end = bisect_left(position, at + slack, begin)
        if end > begin:
            found = begin if end == begin + 1 else begin + int(length[begin:end].argmax())
        if end > begin and length[found] >= least:
            if length[found] >= enough:
                long = [index for index in range(begin, end) if length[index] >= enough]
                found = min(long, key=lambda index: abs(position[index] - at))
            path.append(found)
            at, missed = float(position[found]), 0
        else:
            path.append(-1)
            missed += 1
    return path


def _multiple(silences: Silences, path: Integers) -> int:
    """Return the steps per iteration: the smallest n for which every n-th silence is longer than the others, else 1.

    Evenly spaced buckets of one size have a period of their own; the silence between iterations is a little longer.
    """
    lengths = _lengths(silences, path[path != 0])  # the silence before the stream has an unknown length
    for many in range(2, min(len(lengths) // _MIN_ROWS, _MAX_BUCKETS) + 1):
        whole = lengths[: len(lengths) // many * many].reshape(-1, many)
        longest = int(np.argmax(np.median(whole, axis=0)))
        # stalls occur anywhere, so the others include some too
        others = float(np.quantile(np.delete(whole, longest, axis=1), 0.9))
        longer = _LONGER if len(whole) >= MIN_ITERATIONS else _FAR_LONGER
        if float(np.quantile(whole[:, longest], 0.1)) > longer * others:
            return many
    return 1


def _periodicity(silences: Silences, path: Integers, bins: Integers, payload: Integers) -> Periodicity | None:
    """Return the periodicity whose boundaries are on a path; None if these are too few."""
    lengths = _lengths(silences, path)
    if len(path) < MIN_ITERATIONS or not (path >= 0).any():
        return None
    usual = _usual(silences, path)
    if usual <= 0:
        return None
    # a stall at either end is not a boundary: begin and end with silences of usual length
    good = np.flatnonzero(lengths >= _LIKE_USUAL * usual)
    path, lengths = path[good[0] : good[-1] + 1], lengths[good[0] : good[-1] + 1]
    found = path >= 0
    if found.sum() < MIN_ITERATIONS:
        return None
    steps = np.flatnonzero(found)
    position = np.interp(np.arange(len(path)), steps, silences.position[path[steps]])
    volume = float(np.median(np.diff(position)))
    passed = np.cumsum(payload)
    starts = bins[np.minimum(np.searchsorted(passed, position, side="right"), len(bins) - 1)]
    starts[found] = silences.end[path[found]]
    confidence = 1.0 - _by_chance(silences, volume, lengths, usual)
    long = float(np.quantile(lengths, 0.9))
    return Periodicity(volume, starts, found, usual, long, _longest_between(silences, path), confidence)


def _longest_between(silences: Silences, path: Integers) -> float:
    """Return the usual length (lower quartile) of the longest silence between two successive boundaries."""
    pairs = [(a, b) for a, b in itertools.pairwise(path) if a >= 0 and b >= 0]
    longest = [int(silences.length[a + 1 : b].max(initial=0)) for a, b in pairs]
    return _lower_quartile(np.array(longest, np.float64)) if longest else 0.0


_MAX_LAGS = 4


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
    most = min(len(rate) - 1, int(_MAX_LAGS * expected_bins))
    values = np.fft.irfft(power, size)[: most + 1]
    # longer lags have fewer pairs
    values = values / (len(rate) - np.arange(most + 1))
    values = values / values[0] if values[0] > 0 else np.zeros(most + 1)
    lags = np.arange(most + 1, dtype=np.int64)
    begin, end = int(0.75 * expected_bins), min(int(1.33 * expected_bins) + 1, most)
    if end - begin < 3:
        return Likeness(lags, values, None, None)
    peak = begin + int(np.argmax(values[begin : end + 1]))
    if peak in (begin, end) or values[peak] <= 0:
        return Likeness(lags, values, None, None)
    return Likeness(lags, values, float(peak), float(values[peak]))
