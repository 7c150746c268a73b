"""Defines flow size distributions: published workloads, CDF files, and four distributions given by a formula."""

from __future__ import annotations

import math
import random
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

from ringtap.core.errors import UsageError, file_errors
from ringtap.core.units import parse_size_bytes
from ringtap.core.untrusted_files import new_file
from ringtap.trafficgen.plans.sampling import Draw

_MAX_BYTES = 10**15
_MIN_SHARE = 2.0**-54  # half the step of random(), for inverse CDFs without a smallest value

# (bytes, cumulative probability); docs/commands/traffic-plans.md names the sources
_WEB_SEARCH = (
    (10_000, 0.15), (20_000, 0.20), (30_000, 0.30), (50_000, 0.40), (80_000, 0.53), (200_000, 0.60),
    (1_000_000, 0.70), (2_000_000, 0.80), (5_000_000, 0.90), (10_000_000, 0.97), (30_000_000, 1.0)
)  # fmt: skip
_DATA_MINING = (
    (180, 0.1), (216, 0.2), (560, 0.3), (900, 0.4), (1_100, 0.5), (1_870, 0.6), (3_160, 0.7), (10_000, 0.8),
    (400_000, 0.9), (3_160_000, 0.95), (100_000_000, 0.98), (1_000_000_000, 1.0)
)  # fmt: skip
_FACEBOOK_HADOOP = (
    (100, 0.01), (200, 0.02), (300, 0.05), (350, 0.15), (400, 0.2), (500, 0.3), (600, 0.4), (700, 0.5),
    (1_000, 0.6), (2_000, 0.67), (7_000, 0.7), (30_000, 0.72), (50_000, 0.82), (80_000, 0.87), (120_000, 0.9),
    (300_000, 0.95), (1_000_000, 0.975), (2_000_000, 0.99), (10_000_000, 1.0)
)  # fmt: skip
_ALI_STORAGE = (
    (4_000, 0.2293), (8_000, 0.6921), (16_000, 0.8061), (32_000, 0.9047), (64_000, 0.9353), (128_000, 0.9677),
    (256_000, 0.9753), (2_000_000, 1.0)
)  # fmt: skip


def point_fault(low: tuple[float, float], high: tuple[float, float]) -> str:
    """Return the reason why one point of a CDF cannot follow another; empty if it can."""
    if not (math.isfinite(high[0]) and high[0] >= low[0]):
        return f"size {high[0]:.15g} is smaller than {low[0]:.15g} before it"
    if not low[1] <= high[1] <= 1.0:
        return f"probability {high[1]:.15g} does not lie between {low[1]:.15g} before it and 1"
    if high == low:
        return f"the point {high[0]:.15g} {high[1]:.15g} is named twice"
    return "size 0 has a probability" if high[0] == 0 and high[1] > 0 else ""


class Sizes(Protocol):
    """A distribution of flow sizes.

    Attributes:
        name: its name in plans and reports.
        mean_bytes: its exact mean.
    """

    name: str
    mean_bytes: float

    def sampler(self, rng: random.Random) -> Draw:
        """Return a function that draws one size in bytes, not rounded, from ``rng``."""

    def scaled(self, factor: float) -> Sizes:
        """Return the same distribution with every size multiplied by ``factor``."""


class SizeDistribution:
    """A distribution of flow sizes given by points of its CDF, which is linear between them.

    Two points of the same size form a step: this size itself has a probability.

    Args:
        name: its name in plans and reports.
        points: (size in bytes, cumulative probability), both rising, ending at probability 1. If the first point has
            a probability above 0, the CDF rises to it from 0 at size 0.

    Attributes:
        points: the points, beginning at probability 0.

    Raises:
        UsageError: the points are not a CDF.
    """

    def __init__(self, name: str, points: Sequence[tuple[float, float]]) -> None:
        self.name = name
        given = [(float(size), float(share)) for size, share in points]
        start = [(0.0, 0.0)] if not given or given[0][1] != 0.0 else []
        self.points = tuple(start + given)
        steps = list(pairwise(self.points))
        wrong = not steps or self.points[0][0] < 0 or self.points[-1][1] != 1.0
        if wrong or any(point_fault(low, high) for low, high in steps):
            raise UsageError(
                f"size distribution {name!r} is not a CDF: sizes must rise and probabilities must rise from 0 to 1"
            )
        while self.points[1][1] == 0.0:
            self.points = self.points[1:]
        # Fractions of the decimal texts, so that the mean is the published one and not a sum of rounding errors
        mean = sum(
            (Fraction(repr(high[1])) - Fraction(repr(low[1]))) * (Fraction(high[0]) + Fraction(low[0])) / 2
            for low, high in pairwise(self.points)
        )
        self.mean_bytes = float(mean)

    def sampler(self, rng: random.Random) -> Draw:
        """Return a function that draws one size in bytes, not rounded, from ``rng``."""
        uniform, shares = rng.random, [share for _, share in self.points]
        # For each point, start and extent, in size and in probability, of the segment that ends there
        segments = [(0.0, 0.0, 0.0, 1.0)]
        segments += [(low[0], high[0] - low[0], low[1], high[1] - low[1]) for low, high in pairwise(self.points)]

        def draw() -> float:
            share = uniform()
            low_size, more_size, low_share, more_share = segments[bisect_left(shares, share) or 1]
            return low_size + more_size * (share - low_share) / more_share

        return draw

    def scaled(self, factor: float) -> SizeDistribution:
        """Return the same distribution with every size multiplied by ``factor``."""
        return SizeDistribution(self.name, [(size * factor, share) for size, share in self.points])


class LogNormal:
    """Sizes whose logarithm is normal.

    Args:
        name: its name in plans and reports.
        mean_bytes: mean size.
        sigma: standard deviation of the natural logarithm.
    """

    def __init__(self, name: str, mean_bytes: float, sigma: float) -> None:
        self.name, self.mean_bytes = name, mean_bytes
        self._sigma = sigma
        self._normal = NormalDist(math.log(mean_bytes) - sigma * sigma / 2, sigma)

    def sampler(self, rng: random.Random) -> Draw:
        """Return a function that draws one size in bytes, not rounded, from ``rng``."""
        uniform, quantile = rng.random, self._normal.inv_cdf
        return lambda: math.exp(quantile(uniform() or _MIN_SHARE))

    def scaled(self, factor: float) -> LogNormal:
        """Return the same distribution with every size multiplied by ``factor``."""
        return LogNormal(self.name, self.mean_bytes * factor, self._sigma)


class Pareto:
    """Pareto-distributed sizes, P(size > x) = (smallest / x)^shape from the smallest size on.

    Args:
        name: its name in plans and reports.
        mean_bytes: mean size.
        shape: above 1, so that the mean is finite; up to 2 the variance is infinite.
    """

    def __init__(self, name: str, mean_bytes: float, shape: float) -> None:
        self.name, self.mean_bytes = name, mean_bytes
        self._shape = shape
        self._least_bytes = mean_bytes * (shape - 1) / shape

    def sampler(self, rng: random.Random) -> Draw:
        """Return a function that draws one size in bytes, not rounded, from ``rng``."""
        uniform, least, power = rng.random, self._least_bytes, -1.0 / self._shape
        return lambda: float(least * (1.0 - uniform()) ** power)

    def scaled(self, factor: float) -> Pareto:
        """Return the same distribution with every size multiplied by ``factor``."""
        return Pareto(self.name, self.mean_bytes * factor, self._shape)


WEB_SEARCH = SizeDistribution("web-search", _WEB_SEARCH)
# From VL2, in bytes as published with TrafficGenerator; the ns-2 version in packets has another mean
DATA_MINING = SizeDistribution("data-mining", _DATA_MINING)
FACEBOOK_HADOOP = SizeDistribution("facebook-hadoop", _FACEBOOK_HADOOP)
ALI_STORAGE = SizeDistribution("ali-storage-2019", _ALI_STORAGE)
WORKLOADS = {sizes.name: sizes for sizes in (WEB_SEARCH, DATA_MINING, FACEBOOK_HADOOP, ALI_STORAGE)}
FORMULAS = ("fixed:SIZE", "uniform:LOW:HIGH", "lognormal:MEAN:SIGMA", "pareto:MEAN:SHAPE", "file:PATH")


def parse_sizes(text: str) -> Sizes:
    """Return the distribution that ``--sizes`` names.

    Args:
        text: a workload's name or one of ``FORMULAS``.

    Raises:
        UsageError: the text names no distribution, its numbers are not usable, or the file is not a CDF.
    """
    if text in WORKLOADS:
        return WORKLOADS[text]
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return read_cdf(Path(rest))
    numbers = rest.split(":")
    if kind == "fixed" and len(numbers) == 1:
        size = _size(numbers[0], text)
        return SizeDistribution(text, [(size, 0.0), (size, 1.0)])
    if len(numbers) == 2 and kind == "uniform":
        low, high = _size(numbers[0], text), _size(numbers[1], text)
        if low >= high:
            raise UsageError(f"sizes {text!r}: the second size must be the larger one")
        return SizeDistribution(text, [(low, 0.0), (high, 1.0)])
    if len(numbers) == 2 and kind == "lognormal":
        return LogNormal(text, _size(numbers[0], text), _number(numbers[1], text, 0.0, 10.0))
    if len(numbers) == 2 and kind == "pareto":
        return Pareto(text, _size(numbers[0], text), _number(numbers[1], text, 1.0, 100.0))
    raise UsageError(f"sizes {text!r} are unknown: choose one of {', '.join((*WORKLOADS, *FORMULAS))}")


def _size(text: str, whole: str) -> int:
    size = parse_size_bytes(f"{text}B" if text.isascii() and text.isdigit() else text)
    if not 1 <= size <= _MAX_BYTES:
        raise UsageError(f"sizes {whole!r}: {text} is not from 1 byte to {_MAX_BYTES} bytes")
    return size


def _number(text: str, whole: str, above: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not above < value <= most:
        raise UsageError(f"sizes {whole!r}: {text!r} must be a number above {above:g} and at most {most:g}")
    return value


_MAX_FILE_BYTES = 2**20
_EMPIRICAL_POINTS = 1000


def read_cdf(path: Path) -> SizeDistribution:
    """Read a CDF file; probabilities may rise to 1 or to 100. Empty lines and those that begin with # are skipped.

    Raises:
        UsageError: the file cannot be read or is not a CDF that rises to 1; the message names file and line.
    """
    with file_errors(path), path.open("rb") as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} cannot be read: it is not text") from error
    if len(data) > _MAX_FILE_BYTES:
        raise UsageError(f"{path} is larger than 1 MiB: a CDF file has two columns and some points")
    points = [
        (number, *_point(line, f"{path} line {number}"))
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not points:
        raise UsageError(f"{path} has no points: write two columns, size and probability")
    last_number, _, last_share = points[-1]
    if last_share not in (1, 100):
        raise UsageError(f"{path} line {last_number}: the last probability is {float(last_share):g}, not 1 or 100")
    shares = [(float(size), float(share / last_share)) for _, size, share in points]
    before = (0.0, 0.0)
    for (number, _, _), point in zip(points, shares, strict=True):
        # "0 0" as the first point is valid: it only marks the start of the CDF
        fault = point_fault(before, point) if point != (0.0, 0.0) or number != points[0][0] else ""
        if fault:
            raise UsageError(f"{path} line {number}: {fault}")
        before = point
    return SizeDistribution(f"file:{path.name}", shares)


def write_cdf(points: Iterable[tuple[float, float]], path: Path, force: bool = False) -> None:
    """Write points of a CDF as sizes in bytes and probabilities up to 1; each number reads back as the same float.

    Raises:
        UsageError: the file exists and ``force`` is not set, or it cannot be written.
    """
    text = "".join(f"{_digits(size)} {_digits(share)}\n" for size, share in points)
    with new_file(path, force) as file:
        file.write(text)


def empirical_points(sizes: Iterable[int]) -> list[tuple[float, float]]:
    """Return points of the CDF of given sizes, up to 1000 steps; takes 45 bytes of memory per size.

    Raises:
        UsageError: there are no sizes.
    """
    ordered: Sequence[int] = sorted(array("q", sizes))
    if not ordered:
        raise UsageError("there are no flows with a size: a CDF needs some")
    steps = min(_EMPIRICAL_POINTS, len(ordered))
    points = [(float(ordered[0]), 0.0)]
    for step in range(1, steps + 1):
        point = (float(ordered[len(ordered) * step // steps - 1]), step / steps)
        # Of points with the same size, only the first and the last matter
        if len(points) > 1 and points[-1][0] == points[-2][0] == point[0]:
            points[-1] = point
        else:
            points.append(point)
    return points


def _point(line: str, where: str) -> tuple[Fraction, Fraction]:
    columns = line.split()
    if len(columns) != 2:
        raise UsageError(f"{where}: a point is two columns, size and probability")
    return _fraction(columns[0], "size", where), _fraction(columns[1], "probability", where)


def _fraction(text: str, name: str, where: str) -> Fraction:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1e18 or "_" in text:
        raise UsageError(f"{where}: {name} {text[:40]!r} is not a number from 0 to 10^18")
    # From the decimal text, so that 22.93 of 100 becomes the double nearest to 0.2293
    return Fraction(repr(value))


def _digits(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
