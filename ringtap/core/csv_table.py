"""Reads tables that users give, with commas between cells and decimal points; refuses rows longer than the header.

A decimal comma would otherwise divide a number, and move every cell behind it into the wrong column.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from ringtap.core.errors import UsageError, file_errors, what_reads
from ringtap.core.units import counted

_OTHER_SEPARATORS = {";": "';'", "\t": "tabs"}
_REMEDY = "write ',' between cells, and a point in decimals (0.1)"


def read_csv(path: Path, needed: Sequence[str], max_bytes: int = -1) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the columns of a CSV file, and the number and the cells of each non-empty line below the header.

    Args:
        path: a CSV file with a header line.
        needed: columns that it must have; others must not be there twice, either.
        max_bytes: size of the largest file; -1 for any.

    Raises:
        UsageError: the file cannot be read, is not CSV, lacks a column or has one twice, or a row has too many cells.
    """
    with file_errors(path), path.open("rb") as file:
        data = file.read(max_bytes + 1 if max_bytes >= 0 else -1)
    what = f"is no table: give a CSV file with {', '.join(needed)}"
    if path.suffix != ".csv" and (words := what_reads(path.name)):
        raise UsageError(f"{path} {what}; {words}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} {what}; it is not UTF-8 text") from error
    if 0 <= max_bytes < len(data):
        raise UsageError(f"{path} has more than {max_bytes:,} bytes: shorten it")
    reader = csv.reader(text.splitlines(), skipinitialspace=True)
    try:
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if any(map(str.strip, cells))]
    except csv.Error as error:
        raise UsageError(f"{path} {what}; line {reader.line_num}: {error}") from error
    if not lines:
        raise UsageError(f"{path} is empty: a header line with {', '.join(needed)} is needed")
    (number, header), *rows = lines
    _check_header(f"{path} line {number}", header, needed)
    for number, cells in rows:
        check_cells(f"{path} line {number}", cells, header)
    return header, rows


def _check_header(where: str, header: list[str], needed: Sequence[str]) -> None:
    twice = next((name for name in header if name and header.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{where} has column {twice} twice")
    missing = next((column for column in needed if column not in header), None)
    if missing is None:
        return
    for separator, name in _OTHER_SEPARATORS.items():
        if len(needed) > 1 and set(needed) <= {cell.strip() for cell in ",".join(header).split(separator)}:
            raise UsageError(f"{where} has {name} between its cells: {_REMEDY}")
    raise UsageError(f"{where} has no column {missing}: the columns needed are {', '.join(needed)}")


def check_cells(where: str, cells: Sequence[str], header: Sequence[str]) -> None:
    """Raise UsageError if a row has more cells than the header has columns, empty ones at its end left out."""
    more = [cell for cell in cells[len(header) :] if cell.strip()]
    if more:
        raise UsageError(
            f"{where} has {counted(len(cells), 'cell')} between ',' but the header has "
            f"{counted(len(header), 'column')}: {_REMEDY}"
        )
