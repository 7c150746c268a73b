"""Reads CSV files of points and of iteration times for fits and reports, and checks them line by line."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ringtap.analysis.model.bytes_per_iteration import demand
from ringtap.analysis.statistics.to_arrays import Array
from ringtap.analysis.sweeps.points import Point, of_one_correlation, times_of
from ringtap.analysis.sweeps.series_analysis import Series, series_of
from ringtap.core.csv_table import read_csv
from ringtap.core.errors import UsageError
from ringtap.core.run_directory_schema import VARIANTS
from ringtap.core.thesis_neural_networks import PROFILES, profile_of
from ringtap.core.units import rate_gbps

COLUMNS = ("bandwidth_gbps", "iteration_s")
DEVIATION, COUNT = "std_s", "count"


@dataclass(frozen=True)
class Points:
    """Points in the order of their file.

    Attributes:
        bandwidth_gbps: cross traffic.
        iteration_s: mean iteration time.
        error_s: standard error of each mean; None if no column of errors was requested.
        iterations_s: iteration times behind each mean, in order of time; None if they are not known.
    """

    bandwidth_gbps: list[float]
    iteration_s: list[float]
    error_s: list[float] | None
    iterations_s: list[Array] | None = None

    def at(self, kept: Sequence[int]) -> Points:
        """Return some of the points."""
        return Points(
            [self.bandwidth_gbps[number] for number in kept],
            [self.iteration_s[number] for number in kept],
            None if self.error_s is None else [self.error_s[number] for number in kept],
            None if self.iterations_s is None else [self.iterations_s[number] for number in kept],
        )


def capacity_for(path: Path, capacity: float | str | None) -> float:
    """Return the capacity of the bottleneck of a table, in Gbit/s, as a number or text gives it.

    Raises:
        UsageError: it was not given, or is not a positive rate.
    """
    if capacity is None:
        raise UsageError(
            f"{path} does not say the capacity of the bottleneck: give --capacity RATE (capacity=), such as 25gbit; "
            "ethtool NIC shows the speed of a link"
        )
    return rate_gbps(capacity, "capacity")


@dataclass(frozen=True)
class PointRow:
    """One line of a CSV file, with its location for messages; its methods raise `UsageError` for an invalid cell."""

    cells: dict[str, str]
    path: Path
    line: int

    @property
    def where(self) -> str:
        """The line, for messages."""
        return f"{self.path} line {self.line}"

    def text(self, column: str) -> str:
        """The text of a cell; empty if there is none."""
        return self.cells.get(column, "")

    def number(self, column: str, least: float = -math.inf) -> float:
        """The finite number of a cell, which must be at least ``least``."""
        text = self.text(column)
        if not text:
            raise UsageError(f"{self.where}: {column} is missing")
        try:
            value = float(text)
        except ValueError as error:
            raise UsageError(f"{self.where}: {column} is {text!r}, not a number") from error
        if not math.isfinite(value):
            raise UsageError(f"{self.where}: {column} is {text}, not a finite number")
        if value < least:
            raise UsageError(f"{self.where}: {column} is {value:g}, below {least:g}")
        return value

    def optional(self, column: str) -> float | None:
        """The number of a cell, 0 or more; None if the cell is empty."""
        return self.number(column, 0.0) if self.text(column) else None

    def whole(self, column: str, least: int) -> int | None:
        """The whole number of a cell, which must be at least ``least``; None if the cell is empty."""
        value = self.number(column, least) if self.text(column) else None
        if value is not None and value != int(value):
            raise UsageError(f"{self.where}: {column} is {value:g}, not a whole number")
        return None if value is None else int(value)

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
            raise UsageError(f"{self.where}: {COUNT} is {count:g}; a mean needs at least one iteration")
        return spread / math.sqrt(count)


def read_points_csv(path: Path, capacity: float | str | None, errors: str | None = None) -> Points:
    """Read cross traffic in Gbit/s, iteration time in seconds and, if a column is named, its standard error.

    Other columns are ignored, the order of lines does not matter, and a load may be repeated (replicates).

    Args:
        path: a CSV file with a header line.
        capacity: capacity of the bottleneck, as for `capacity_for`; loads at or above it are refused.
        errors: column with the standard error of each time; ``std_s`` is a standard deviation and needs ``count``.

    Raises:
        UsageError: the file cannot be read, or a value is invalid; names the file and the line.
    """
    needed = COLUMNS if errors is None else (*COLUMNS, errors, *[COUNT] * (errors == DEVIATION))
    loads, times, spreads = [], [], []
    rows = read_rows(path, needed)[1]
    capacity_gbps = capacity_for(path, capacity)
    for row in rows:
        loads.append(row.load_gbps(capacity_gbps))
        times.append(row.time_s())
        if errors is not None:
            spreads.append(row.error_s(errors))
    if not loads:
        raise UsageError(f"{path} has no points below its header")
    return Points(loads, times, None if errors is None else spreads)


def read_rows(path: Path, needed: tuple[str, ...]) -> tuple[list[str], list[PointRow]]:
    """Return the columns of a CSV file, which include those needed, and its non-empty lines below the header.

    Raises:
        UsageError: as in `ringtap.core.csv_table.read_csv`.
    """
    header, lines = read_csv(path, needed)
    return header, [PointRow(dict(zip(header, cells, strict=False)), path, line) for line, cells in lines]


NEEDED = ("model", "traffic", "bandwidth_gbps", "iteration_s")
OF_A_POINT = ("count", "std_s", "p99_s")
OPTIONAL = (*VARIANTS, "parameters", "workers", "batch")
_KEY = ("model", "traffic", *VARIANTS)
_KNOWN_TRAFFIC = ("iperf", "consistent", "burst")


@dataclass(frozen=True)
class SweepTable:
    """A table of measurements.

    Attributes:
        series: the series, in order of appearance.
        rows: rows read.
        by_iteration: True if a row is an iteration, False if it is a point.
        ignored: columns that are not used.
        capacity_gbps: capacity of the bottleneck.
    """

    series: list[Series]
    rows: int
    by_iteration: bool
    ignored: tuple[str, ...]
    capacity_gbps: float


@dataclass(frozen=True)
class _Row:
    """A row as a point that has only its numbers, and what a series has in common."""

    line: int
    point: Point
    title: str
    parameters: int | None
    workers: int | None
    batch: int | None


def read_table(
    path: Path, capacity: float | str | None, workers: int | None = None, max_load: float | str | None = None
) -> SweepTable:
    """Read a table of iteration times and analyze each series.

    Args:
        path: a CSV file with a header line.
        capacity: capacity of the bottleneck, as for `capacity_for`; loads at or above it are refused.
        workers: workers of the ring, if the table has no such column.
        max_load: fits use only points at loads up to this one, in Gbit/s or as text; None: all.

    Raises:
        UsageError: the file cannot be read or a value is invalid; names the file and the line.
    """
    header, lines = read_rows(path, NEEDED)
    if not lines:
        raise UsageError(f"{path} has no rows below its header")
    capacity_gbps = capacity_for(path, capacity)
    rows = [_row(line, capacity_gbps) for line in lines]
    groups: dict[tuple[str, ...], list[_Row]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row.point, name) for name in _KEY), []).append(row)
    per_point = any(name in header for name in OF_A_POINT)
    repeated = any(len({row.point.cross_gbps for row in group}) < len(group) for group in groups.values())
    by_iteration = repeated and not per_point
    series = [_series(path, group, by_iteration, capacity_gbps, workers, max_load) for group in groups.values()]
    ignored = tuple(name for name in header if name and name not in (*NEEDED, *OF_A_POINT, *OPTIONAL))
    return SweepTable(series, len(rows), by_iteration, ignored, capacity_gbps)


def _row(row: PointRow, capacity_gbps: float) -> _Row:
    for name in ("model", "traffic"):
        if not row.text(name):
            raise UsageError(f"{row.where}: {name} is missing")
    text, profile = row.text("model"), profile_of(row.text("model"))
    model, title = (text, text) if profile is None else (profile.name, profile.title)
    traffic = row.text("traffic").lower() if row.text("traffic").lower() in _KNOWN_TRAFFIC else row.text("traffic")
    transport, collective, topology = map(row.text, VARIANTS)
    load_gbps, mean_s = row.load_gbps(capacity_gbps), row.time_s()
    parameters, workers, batch = row.whole("parameters", 1), row.whole("workers", 2), row.whole("batch", 1)
    count, std_s = row.whole("count", 1), row.optional("std_s")
    point = Point(
        series="-".join(filter(None, (model, traffic, transport, collective, topology))),
        model=model,
        traffic=traffic,
        transport=transport,
        collective=collective,
        topology=topology,
        cross=load_gbps,
        iterations=count,
        mean_s=mean_s,
        p99_s=row.optional("p99_s"),
        std_s=std_s,
        variation=None if std_s is None else std_s / mean_s,
        scale=None,
        iteration_s=np.empty(0),
    )
    return _Row(row.line, point, title, parameters, workers, batch)


def _series(
    path: Path, rows: list[_Row], by_iteration: bool, capacity_gbps: float, workers: int | None,
    max_load: float | str | None,
) -> Series:  # fmt: skip
    first = rows[0]
    model = first.point.model
    known = PROFILES.get(model)
    parameters = _common(path, rows, "parameters", lambda row: row.parameters) or (known.parameters if known else None)
    if parameters is None:
        names = ", ".join(PROFILES)
        raise UsageError(f"{path} line {first.line}: model {model!r} is not one of {names}: add a column parameters")
    ring = _common(path, rows, "workers", lambda row: row.workers) or workers
    if ring is None:
        raise UsageError(f"{path} does not say how many workers trained: give --workers N, or add a column workers")
    points = _by_load(rows) if by_iteration else [row.point for row in rows]
    if batch := _common(path, rows, "batch", lambda row: row.batch):
        rates = [ring * batch / point.mean_s if point.mean_s else None for point in points]
        points = [replace(point, samples_per_s=rate) for point, rate in zip(points, rates, strict=True)]
    points.sort(key=lambda point: point.cross_gbps or 0.0)
    return series_of(points, first.title, demand(parameters, ring), capacity_gbps, max_load)


def _common(path: Path, rows: list[_Row], column: str, value: Callable[[_Row], int | None]) -> int | None:
    """Return the value of a column that is the same throughout a series."""
    found = value(rows[0])
    for row in rows:
        if value(row) != found:
            shown = "nothing" if found is None else f"{found:,}"
            raise UsageError(f"{path} line {row.line}: {column} differs from the {shown} that this series began with")
    return found


def _by_load(rows: list[_Row]) -> list[Point]:
    groups: dict[float | None, list[float | None]] = {}
    for row in rows:
        groups.setdefault(row.point.cross_gbps, []).append(row.point.mean_s)
    points = []
    for load, seconds in groups.items():
        times = np.array(seconds, np.float64)
        points.append(replace(rows[0].point, cross=load, iterations=len(times), iteration_s=times, **times_of(times)))
    return of_one_correlation(points)
