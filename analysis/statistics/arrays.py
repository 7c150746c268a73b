"""Arrays of numbers from what a caller gives: lists, NumPy arrays, columns of a table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ringtap.errors import UsageError

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
