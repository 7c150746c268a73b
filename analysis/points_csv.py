"""Points from a CSV file, checked line by line: columns ``bandwidth_gbps`` and ``iteration_s``."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from ringtap.errors import UsageError

COLUMNS = ("bandwidth_gbps", "iteration_s")


def read_points_csv(path: Path, capacity_gbps: float) -> tuple[list[float], list[float]]:
    """Read cross traffic in Gbit/s and iteration time in seconds.

    Other columns are ignored, the order of lines does not matter, and a load may come several times (replicates).

    Args:
        path: a CSV file with a header line.
        capacity_gbps: capacity of the bottleneck; loads at or past it are refused.

    Returns:
        The loads and the iteration times, both in the file's order.

    Raises:
        UsageError: the file cannot be read, or a value makes no sense; names the file and the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{path} cannot be read: {reason}") from error
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    header = [(name or "").strip() for name in reader.fieldnames or []]
    reader.fieldnames = header
    for column in COLUMNS:
        if column not in header:
            raise UsageError(f"{path} line 1 has no column {column}: the columns needed are {', '.join(COLUMNS)}")
    loads: list[float] = []
    times: list[float] = []
    try:
        for row in reader:
            where = f"{path} line {reader.line_num}"
            load = _number(row.get(COLUMNS[0]), COLUMNS[0], where)
            seconds = _number(row.get(COLUMNS[1]), COLUMNS[1], where)
            if load < 0:
                raise UsageError(f"{where}: bandwidth_gbps is {load:g}; a load cannot be negative")
            if load >= capacity_gbps:
                raise UsageError(f"{where}: bandwidth_gbps is {load:g}, not below the capacity of {capacity_gbps:g}")
            if seconds <= 0:
                raise UsageError(f"{where}: iteration_s is {seconds:g}; a time must be positive")
            loads.append(load)
            times.append(seconds)
    except csv.Error as error:
        raise UsageError(f"{path} line {reader.line_num} is not CSV: {error}") from error
    if not loads:
        raise UsageError(f"{path} has no points below its header")
    return loads, times


def _number(text: str | None, column: str, where: str) -> float:
    if text is None or not text.strip():
        raise UsageError(f"{where}: {column} is missing")
    try:
        value = float(text)
    except ValueError as error:
        raise UsageError(f"{where}: {column} is {text.strip()!r}, not a number") from error
    if not math.isfinite(value):
        raise UsageError(f"{where}: {column} is {text.strip()}, not a finite number")
    return value
