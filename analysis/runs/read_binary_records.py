"""Reads record files of run directories as tables, mapped into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pandas as pd

from ringtap.core.append_only_logs import RecordFile, is_header_torn
from ringtap.core.errors import UsageError
from ringtap.core.run_directory import open_log
from ringtap.core.untrusted_files import open_regular

Records = npt.NDArray[Any]


def map_records(path: Path) -> tuple[RecordFile | None, Records, int]:
    """Map a record file into memory without reading it; raw bytes (``V16``) come as NumPy voids.

    Returns:
        The header (None if the job was killed while writing it), the records as a structured array, and the number
        of torn last records (0 or 1).

    Raises:
        FileNotFoundError: the file is missing.
        UsageError: the file cannot be read, is not a record file, is of a newer version, or its content does not match
            its name.
    """
    try:
        if is_header_torn(path):
            return None, np.empty(0, np.dtype([("t_ns", "<i8")])), 1
        with open_regular(path) as stream:
            file = open_log(path)
            return file, map_file(file, stream), int(file.torn_bytes > 0)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def map_file(file: RecordFile, stream: BinaryIO) -> Records:
    """Map the records of an open record file into memory."""
    dtype = np.dtype([(field.name, field.type) for field in file.fields])
    if file.count < 1:
        return np.empty(0, dtype)
    return np.memmap(stream, dtype=dtype, mode="r", offset=file.offset, shape=(file.count,))


def read_records(path: Path) -> tuple[pd.DataFrame, int]:
    """Read a record file.

    Returns:
        The records, one column per field with its type, and the number of torn last records (0 or 1). Fields of raw
        bytes, such as addresses and ports, are ``bytes`` in network order: ``int.from_bytes(sport, "big")`` is a port.

    Raises:
        UsageError: not a record file, one of a newer version, or a header that contradicts itself.
    """
    file, records, torn = map_records(path)
    if file is None:
        return pd.DataFrame(), torn
    return pd.DataFrame({name: _column(records[name]) for name in records.dtype.names or ()}), torn


def _column(values: Records) -> Records:
    """Copy a column into memory, with NumPy's voids as ``bytes``, because pandas cannot hold voids."""
    if values.dtype.kind != "V":
        return np.array(values)
    column = np.empty(len(values), object)
    column[:] = [bytes(value) for value in values]
    return column
