"""Points from a CSV file, checked line by line: ``bandwidth_gbps``, ``iteration_s`` and, on request, their errors."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ringtap.errors import UsageError

COLUMNS = ("bandwidth_gbps", "iteration_s")
DEVIATION, COUNT = "std_s", "count"


@dataclass(frozen=True)
class Points:
    """Points in the order of their file.

    Attributes:
        bandwidth_gbps: cross traffic.
        iteration_s: mean iteration time.
        error_s: standard error of each mean; None where no column of errors was asked for.
    """

    bandwidth_gbps: list[float]
    iteration_s: list[float]
    error_s: list[float] | None


@dataclass(frozen=True)
class PointRow:
    """One line of a CSV file, with its location for messages."""

    cells: dict[str, str | None]
    where: str

    def number(self, column: str) -> float:
        """Return the finite number of a column.

        Raises:
            UsageError: the cell is empty or holds something else; as all methods here.
        """
        text = self.cells.get(column)
        if text is None or not text.strip():
            raise UsageError(f"{self.where}: {column} is missing")
        try:
            value = float(text)
        except ValueError as error:
            raise UsageError(f"{self.where}: {column} is {text.strip()!r}, not a number") from error
        if not math.isfinite(value):
            raise UsageError(f"{self.where}: {column} is {text.strip()}, not a finite number")
        return value

    def load_gbps(self, capacity_gbps: float) -> float:
        """The load, from 0 to below the capacity."""
        load = self.number(COLUMNS[0])
        if load < 0:
            raise UsageError(f"{self.where}: bandwidth_gbps is {load:g}; a load cannot be negative")
        if load >= capacity_gbps:
            raise UsageError(f"{self.where}: bandwidth_gbps is {load:g}, not below the capacity of {capacity_gbps:g}")
        return load

    def time_s(self, column: str = COLUMNS[1]) -> float:
        """A positive time."""
        seconds = self.number(column)
        if seconds <= 0:
            raise UsageError(f"{self.where}: {column} is {seconds:g}; a time must be positive")
        return seconds

    def error_s(self, column: str) -> float:
        """Standard error of the time: the column itself, or ``std_s`` over the root of ``count``."""
        spread = self.number(column)
        if spread < 0:
            raise UsageError(f"{self.where}: {column} is {spread:g}; an error cannot be negative")
        if column != DEVIATION:
            return spread
        count = self.number(COUNT)
        if count < 1:
            raise UsageError(f"{self.where}: {COUNT} is {count:g}; a mean is of one iteration at least")
        return spread / math.sqrt(count)


def read_points_csv(path: Path, capacity_gbps: float, errors: str | None = None) -> Points:
    """Read cross traffic in Gbit/s, iteration time in seconds and, where a column is named, its standard error.

    Other columns are ignored, the order of lines does not matter, and a load may come several times (replicates).

    Args:
        path: a CSV file with a header line.
        capacity_gbps: capacity of the bottleneck; loads at or past it are refused.
        errors: column with the standard error of each time; ``std_s`` is a standard deviation and needs ``count``.

    Raises:
        UsageError: the file cannot be read, or a value is invalid; names the file and the line.
    """
    needed = COLUMNS if errors is None else (*COLUMNS, errors, *[COUNT] * (errors == DEVIATION))
    loads, times, spreads = [], [], []
    for row in read_rows(path, needed):
        loads.append(row.load_gbps(capacity_gbps))
        times.append(row.time_s())
        if errors is not None:
            spreads.append(row.error_s(errors))
    if not loads:
        raise UsageError(f"{path} has no points below its header")
    return Points(loads, times, None if errors is None else spreads)


def read_rows(path: Path, needed: tuple[str, ...]) -> Iterator[PointRow]:
    """Yield the lines below the header of a CSV file that has the columns needed.

    Raises:
        UsageError: the file cannot be read, is not CSV or lacks a column.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{path} cannot be read: {reason}") from error
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    try:
        header = [(name or "").strip() for name in reader.fieldnames or []]
        reader.fieldnames = header
        for column in needed:
            if column not in header:
                raise UsageError(f"{path} line 1 has no column {column}: the columns needed are {', '.join(needed)}")
        for cells in reader:
            yield PointRow(cells, f"{path} line {reader.line_num}")
    except csv.Error as error:
        raise UsageError(f"{path} line {reader.line_num} is not CSV: {error}") from error
