"""Converts what a caller gives to arrays of numbers: lists, NumPy arrays, columns of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ringtap.core.errors import UsageError
from ringtap.core.units import counted, parse_duration_s, parse_load

Array = npt.NDArray[np.float64]
Values = npt.ArrayLike
"""Numbers: a list, a NumPy array, a pandas column."""


def as_array(values: Values, name: str) -> Array:
    """Return numbers as an array of any shape; missing ones are NaN.

    Raises:
        UsageError: they are not numbers; the message names them.
    """
    convert = getattr(values, "to_numpy", None)  # a pandas column of a type that can be NA
    try:
        if convert is not None:
            return np.asarray(convert(dtype=np.float64, na_value=np.nan), dtype=np.float64)
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} must be numbers, in a list, an array or a column: {error}") from error


def as_gbps(loads: Values, capacity_gbps: float) -> Array:
    """Return loads as an array in Gbit/s; text is a rate (``10gbit``) or a share of the capacity (``80%``).

    Raises:
        UsageError: they are neither numbers nor loads.
    """
    return _with_units(loads, "loads", lambda text: parse_load(text, capacity_gbps * 1e9).bps / 1e9)


def as_seconds(times: Values, name: str = "times") -> Array:
    """Return times as an array in seconds; text has a unit, such as ``370ms``.

    Raises:
        UsageError: they are neither numbers nor durations.
    """
    return _with_units(times, name, parse_duration_s)


def as_points(loads: Values, times: Values, capacity_gbps: float) -> tuple[Array, Array]:
    """Return the loads in Gbit/s and the times in seconds of points, in their order.

    Raises:
        UsageError: not two lists of one length, or a value is not finite, negative, or not below the capacity.
    """
    load, seconds = as_gbps(loads, capacity_gbps), as_seconds(times)
    if load.ndim != 1 or load.shape != seconds.shape:
        raise UsageError(f"loads and times must be two lists of one length, not {load.shape} and {seconds.shape}")
    if not (np.all(np.isfinite(load)) and np.all(np.isfinite(seconds))):
        raise UsageError("loads and times must be finite numbers")
    if not (np.all(load >= 0) and np.all(seconds > 0)):
        raise UsageError("loads must not be negative and times must be positive")
    if not np.all(load < capacity_gbps):
        raise UsageError(f"a load of {load.max():g} Gbit/s is not below the capacity of {capacity_gbps:g} Gbit/s")
    return load, seconds


def as_samples(samples: Iterable[Values] | None, points: int) -> list[Array] | None:
    """Return the iteration times behind each point as arrays; None if they are not known.

    Raises:
        UsageError: not one list for each point, or a list that is not a sample.
    """
    if samples is None:
        return None
    if not isinstance(samples, Iterable):
        raise UsageError(f"the iterations are {samples!r}, not a list with those of each point")
    found = [sample(one) for one in samples]
    if len(found) != points:
        raise UsageError(f"{len(found)} lists of iterations for {counted(points, 'point')}: give one for each")
    return found


def _with_units(values: Values, name: str, parse: Callable[[str], float]) -> Array:
    try:
        return as_array(values, name)
    except UsageError:
        if isinstance(values, str):
            return np.array(parse(values))
        if not isinstance(values, Iterable) or not any(isinstance(value, str) for value in values):
            raise
        numbers: list[Any] = [parse(value) if isinstance(value, str) else value for value in values]
        return as_array(numbers, name)


def sample(values: Values, least: int = 1) -> Array:
    """Check values and return them as an array.

    Raises:
        UsageError: not one list, too few, or a value that is not a finite number.
    """
    result = as_array(values, "the values of a sample")
    if result.ndim != 1 or len(result) < least:
        raise UsageError(f"a list of at least {least} values is needed, not one of shape {result.shape}")
    if not np.all(np.isfinite(result)):
        raise UsageError("a sample must hold finite numbers only")
    return result
