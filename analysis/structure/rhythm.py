"""The rhythm of one stream of payload: a silence each time the same volume has passed.

A training job moves the same bytes in every iteration, whatever time they take, and is silent while it computes the
forward pass. Over *bytes passed* instead of time, these silences are equally far apart: slow iterations, jitter and
stalls of the transport do not move them. The equal distance is the iteration's volume; the ends of the silences are
the iterations' boundaries.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import bdtrc

Integers = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]

# bins that together hold less than this share of a stream's bytes count as silent: acknowledged trifles of a library
QUIET_SHARE = 0.01
# how far from where it is due a silence may lie, as a share of the volume (bytes sent again are in the way)
TOLERANCE = 0.02
LEAST_ITERATIONS = 4
_LEAST_SILENCE_BINS = 2
# a silence counts as found where it has this share of the usual length
_LIKE_USUAL = 0.8
# of volumes whose silences are nearly as long, the smallest: the others are its multiples
_NEARLY = 0.75
_MOST_ITERATIONS = 20_000
_CANDIDATES = 48
_SCORED_ITERATIONS = 120
_ANCHORS = 6
_NULL_VOLUMES = 100
_SIMPLE_RATIOS = np.array([1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4, 1, 4 / 3, 3 / 2, 2, 3, 4])


@dataclass(frozen=True)
class Silences:
    """Spans in which a stream sent (next to) nothing, in order of time; arrays of one shape.

    Attributes:
        position: payload bytes that had passed when it ended.
        length: its bins.
        end: the bin that ended it.
        total: payload bytes of the stream.
    """

    position: Integers
    length: Integers
    end: Integers
    total: int

    def __len__(self) -> int:
        return len(self.position)


@dataclass(frozen=True)
class Rhythm:
    """What repeats in a stream.

    Attributes:
        volume: payload bytes between two boundaries, median.
        starts: bin in which each iteration's communication begins, ascending.
        found: for each of these, whether a silence was there; else the bin is where the volume was reached.
        silence_bins: usual length of the silences at the boundaries (lower quartile).
        other_bins: the same at volumes that are not its multiples: what chance and the rest of the pattern give.
        confidence: 1 less the probability of finding as many boundaries by chance, over all volumes tried.
    """

    volume: float
    starts: Integers
    found: npt.NDArray[np.bool_]
    silence_bins: float
    other_bins: float
    confidence: float

    @property
    def found_share(self) -> float:
        """Share of the boundaries at which there was a silence."""
        return float(self.found.mean())


def silences_of(bins: Integers, payload: Integers) -> Silences:
    """The silences of a stream.

    Args:
        bins: numbers of the bins with payload, strictly ascending.
        payload: bytes in each.
    """
    order = np.argsort(payload, kind="stable")
    total = int(payload.sum())
    quiet = np.zeros(len(bins), bool)
    quiet[order[np.cumsum(payload[order]) <= QUIET_SHARE * total]] = True
    loud = np.flatnonzero(~quiet)
    length = np.diff(bins[loud]) - 1
    keep = length >= _LEAST_SILENCE_BINS
    after = loud[1:][keep]
    passed = np.cumsum(payload) - payload
    return Silences(passed[after], length[keep], bins[after], total)


def find_rhythm(bins: Integers, payload: Integers) -> Rhythm | None:
    """The rhythm of a stream; None where no volume recurs at least `LEAST_ITERATIONS` times.

    Args:
        bins: numbers of the bins with payload, strictly ascending.
        payload: bytes in each.
    """
    silences = silences_of(bins, payload)
    if len(silences) < LEAST_ITERATIONS:
        return None
    volumes = _candidates(silences)
    if not len(volumes):
        return None
    scores = np.array([_score(silences, volume)[0] for volume in volumes])
    best = float(scores.max())
    if best <= 0:
        return None
    volume = float(volumes[scores >= _NEARLY * best].min())
    path = _follow(silences, volume)
    many = _multiple(silences, path)
    if many > 1:
        path = _follow(silences, volume * many)
    return _rhythm(silences, path, bins, payload)


def _candidates(silences: Silences) -> Numbers:
    """Volumes between long silences that occur often."""
    middle = _middle(silences)
    position, length = silences.position[middle], silences.length[middle].astype(np.float64)
    distances, weights = [], []
    longest = np.argsort(-length, kind="stable")
    count = 8
    while count // 2 < len(longest):
        chosen = np.sort(longest[:count])
        for lag in range(1, min(16, len(chosen) - 1) + 1):
            distances.append(position[chosen][lag:] - position[chosen][:-lag])
            weights.append(np.minimum(length[chosen][lag:], length[chosen][:-lag]))
        count *= 2
    distance, weight = np.concatenate(distances).astype(np.float64), np.concatenate(weights)
    keep = (distance > silences.total / _MOST_ITERATIONS) & (distance < silences.total / (LEAST_ITERATIONS - 1))
    distance, weight = distance[keep], weight[keep]
    if not len(distance):
        return np.empty(0)
    place = np.floor(np.log(distance) / np.log1p(TOLERANCE / 2)).astype(np.int64)
    place -= place.min()
    mass = np.bincount(place, weight)
    smooth = np.convolve(mass, [0.5, 1.0, 0.5], mode="same")
    chosen = np.argsort(-smooth, kind="stable")[:_CANDIDATES]
    found = [np.median(distance[np.abs(place - one) <= 1]) for one in chosen if smooth[one] > 0 and mass[one] > 0]
    return np.unique(np.array(found))


def _middle(silences: Silences) -> slice:
    """A part of the silences that is enough to find candidates."""
    most = 4096
    begin = max(0, (len(silences) - most) // 2)
    return slice(begin, begin + most)


def _score(silences: Silences, volume: float) -> tuple[float, int]:
    """How long the silences at multiples of a volume usually are (lower quartile), and the best silence to start at."""
    best, at = 0.0, -1
    for anchor in _anchors(silences, volume):
        path = _track(silences, volume, anchor, _SCORED_ITERATIONS // 2)
        if len(path) < LEAST_ITERATIONS:
            continue
        usual = float(np.quantile(_lengths(silences, path), 0.25))
        if usual > best:
            best, at = usual, anchor
    return best, at


def _anchors(silences: Silences, volume: float) -> list[int]:
    """Silences to start from: the longest of several stretches of one volume each, about the middle."""
    middle = silences.position[len(silences) // 2]
    borders = middle + (np.arange(_ANCHORS + 1) - _ANCHORS / 2) * volume
    places = np.searchsorted(silences.position, borders)
    return [
        int(begin + np.argmax(silences.length[begin:end])) for begin, end in itertools.pairwise(places) if end > begin
    ]


def _lengths(silences: Silences, path: Integers) -> Numbers:
    return np.where(path >= 0, silences.length[np.maximum(path, 0)], 0).astype(np.float64)


def _follow(silences: Silences, volume: float) -> Integers:
    """The silences one volume apart over the whole stream; -1 where there is none."""
    _, anchor = _score(silences, volume)
    return _track(silences, volume, anchor, _MOST_ITERATIONS) if anchor >= 0 else np.empty(0, np.int64)


def _track(silences: Silences, volume: float, anchor: int, most: int) -> Integers:
    """Step from a silence to those about one volume on and back; -1 where a step finds none."""
    back = _steps(silences, -volume, anchor, most)
    return np.array([*reversed(back), anchor, *_steps(silences, volume, anchor, most)], np.int64)


def _steps(silences: Silences, step: float, anchor: int, most: int) -> list[int]:
    position, length = silences.position, silences.length
    path: list[int] = []
    at, missed = float(position[anchor]), 0
    while len(path) < most:
        at += step
        slack = abs(step) * min(TOLERANCE * (1 + missed), 0.2)
        if at < position[0] - slack or at > position[-1] + slack:
            break
        begin, end = np.searchsorted(position, (at - slack, at + slack))
        if end > begin:
            found = int(begin + np.argmax(length[begin:end]))
            path.append(found)
            at, missed = float(position[found]), 0
        else:
            path.append(-1)
            missed += 1
    while path and path[-1] < 0:
        path.pop()
    return path


def _multiple(silences: Silences, path: Integers) -> int:
    """How many steps make one iteration: 1, or the smallest number after which lengths and volumes repeat.

    Evenly spaced buckets of one size have a rhythm of their own; every so many, the silence is longer.
    """
    usable = path[path >= 0]
    if len(usable) < 3 * LEAST_ITERATIONS:
        return 1
    length = np.log(silences.length[usable].astype(np.float64))
    limit = np.quantile(length, (0.02, 0.98))
    length = np.clip(length, *limit)
    length = length - length.mean()
    power = float((length**2).mean())
    if power < np.log(1.1) ** 2:
        return 1
    most = min(len(length) // LEAST_ITERATIONS, 256)
    likeness = np.array([float((length[lag:] * length[:-lag]).mean()) / power for lag in range(1, most + 1)])
    best = float(likeness.max(initial=0.0))
    if best < 0.5:
        return 1
    return int(np.flatnonzero(likeness >= 0.9 * best)[0]) + 1


def _rhythm(silences: Silences, path: Integers, bins: Integers, payload: Integers) -> Rhythm | None:
    lengths = _lengths(silences, path)
    if len(path) < LEAST_ITERATIONS or not (path >= 0).any():
        return None
    usual = float(np.quantile(lengths, 0.25))
    if usual <= 0:
        return None
    # a stall at the rim is no boundary: begin and end with silences as they usually are
    good = np.flatnonzero(lengths >= _LIKE_USUAL * usual)
    path, lengths = path[good[0] : good[-1] + 1], lengths[good[0] : good[-1] + 1]
    found = path >= 0
    if found.sum() < LEAST_ITERATIONS:
        return None
    steps = np.flatnonzero(found)
    position = np.interp(np.arange(len(path)), steps, silences.position[path[steps]])
    volume = float(np.median(np.diff(position)))
    passed = np.cumsum(payload)
    starts = bins[np.minimum(np.searchsorted(passed, position, side="right"), len(bins) - 1)]
    starts[found] = silences.end[path[found]]
    hits = int((lengths >= _LIKE_USUAL * usual).sum())
    chance, other = _by_chance(silences, volume, usual)
    # the first boundary was chosen, the others could have failed
    unlikely = float(bdtrc(hits - 2, len(path) - 1, chance)) if chance < 1 else 1.0
    confidence = 1.0 - min(1.0, _CANDIDATES * _ANCHORS * unlikely)
    return Rhythm(volume, starts, found, usual, other, confidence)


def _by_chance(silences: Silences, volume: float, usual: float) -> tuple[float, float]:
    """How often a step of another volume meets such a silence, and the silences usual there."""
    random = np.random.default_rng(1)
    others = volume * np.exp(random.uniform(np.log(1 / 4), np.log(4), _NULL_VOLUMES))
    apart = np.abs(np.log(others[:, None] / (volume * _SIMPLE_RATIOS))).min(axis=1)
    hits, steps, usuals = 1, 2, [0.0]
    for other in others[apart > 3 * TOLERANCE]:
        for anchor in _anchors(silences, other)[:2]:
            path = _track(silences, float(other), anchor, _SCORED_ITERATIONS // 4)
            if len(path) < LEAST_ITERATIONS:
                continue
            lengths = _lengths(silences, path)
            hits += int((lengths >= _LIKE_USUAL * usual).sum()) - 1
            steps += len(path) - 1
            usuals.append(float(np.quantile(lengths, 0.25)))
    return hits / steps, float(np.quantile(usuals, 0.9))
