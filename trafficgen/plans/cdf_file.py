"""CDF files of flow sizes as TrafficGenerator and HPCC's traffic_gen use them: two columns, size and probability."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

from ringtap.errors import UsageError
from ringtap.trafficgen.plans.sizes import SizeDistribution, point_fault

_LARGEST_FILE = 2**20
_EMPIRICAL_POINTS = 1000


def read_cdf(path: Path) -> SizeDistribution:
    """Read a CDF file; probabilities may rise to 1 or to 100. Empty lines and those that begin with # are skipped.

    Raises:
        UsageError: the file cannot be read or is not a CDF that rises to 1; the message names file and line.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
        lines = data.decode("utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} cannot be read: it is no text") from error
    if len(data) > _LARGEST_FILE:
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
        # "0 0" as the first point only says where the CDF begins
        fault = point_fault(before, point) if point != (0.0, 0.0) or number != points[0][0] else ""
        if fault:
            raise UsageError(f"{path} line {number}: {fault}")
        before = point
    return SizeDistribution(f"file:{path.name}", shares)


def write_cdf(points: Iterable[tuple[float, float]], path: Path, force: bool = False) -> None:
    """Write points of a CDF in bytes and probabilities up to 1; each number reads back as the same float.

    Raises:
        UsageError: the file exists and ``force`` is not set, or it cannot be written.
    """
    text = "".join(f"{_digits(size)} {_digits(share)}\n" for size, share in points)
    try:
        with path.open("w" if force else "x", encoding="ascii") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(f"{path} exists: name another file or add --force") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


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
    return _number(columns[0], "size", where), _number(columns[1], "probability", where)


def _number(text: str, name: str, where: str) -> Fraction:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1e18 or "_" in text:
        raise UsageError(f"{where}: {name} {text[:40]!r} is not a number from 0 to 10^18")
    # From the decimal text: 22.93 of 100 is then the double nearest to 0.2293
    return Fraction(repr(value))


def _digits(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
