"""Prepares results for notebooks: units and documented columns in ``attrs``, times as UTC, texts as HTML."""

from __future__ import annotations

import functools
import html
import inspect
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ringtap.core.check_api_arguments import instance_of
from ringtap.core.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

Arguments = ParamSpec("Arguments")
Owner = TypeVar("Owner")
Item = TypeVar("Item", bound=Callable[..., Any])
Columns = Mapping[str, str]

AVERAGES = "averages"  # in ``attrs`` of a table: a sentence about iterations of several loads, without its end
SINCE_EPOCH = "ns since 1970-01-01 UTC"
_TIMES = frozenset(f"{what}_ns" for what in ("t", "start", "end", "begin", "step_start", "ready", "first", "last"))
# the longest suffix counts
_UNITS = {
    "_gbps": "Gbit/s",
    "_bps": "bit/s",
    "_pps": "packets/s",
    "bytes": "bytes",
    "payload": "bytes",
    "_mb": "MB",
    "_s": "s",
    "_per_s": "1/s",
    "_us": "µs",
    "_ns": "ns",
    "_pct": "%",
    "_cores": "processors",
    "packets": "packets",
    "segments": "segments",
    "_drops": "packets",
    "retransmissions": "segments",
    "segments_retransmitted": "segments",
    "ce_marked": "packets",
    "ecn_marks": "packets",
    "pause_frames": "frames",
}
_DIRECTION = re.compile("_(ab|ba)$")


def unit_of(column: str) -> str:
    """Return the unit of a column by its name; empty for names, numbers of things, and shares."""
    if column in _TIMES:
        return SINCE_EPOCH
    column = _DIRECTION.sub("", column)
    found = [suffix for suffix in _UNITS if column.endswith(suffix)]
    return _UNITS[max(found, key=len)] if found else ""


def described(table: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    """Set ``attrs["units"]`` and ``attrs["columns"]`` of a table, by name of the column, and return it.

    Args:
        table: the table; other descriptions in its ``attrs["columns"]`` stay.
        columns: descriptions of its columns (`by_name`).
    """
    names = [str(name) for name in table]
    known = {**table.attrs.get("columns", {}), **by_name(columns)}
    table.attrs["units"] = _Texts({name: unit for name in names if (unit := unit_of(name))})
    table.attrs["columns"] = _Texts({name: known[name] for name in names if name in known})
    return table


class _Texts(dict[str, str]):
    """Texts in ``attrs``, of which pandas makes a deep copy on each access to a column: texts need none."""

    def __deepcopy__(self, memo: object) -> _Texts:
        return _Texts(self)


def by_name(columns: Columns) -> dict[str, str]:
    """Return the description of each column; columns with the same one may be one key: ``"source, destination"``."""
    return {name: text for names, text in columns.items() for name in names.split(", ")}


def with_section(name: str, items: Columns) -> Callable[[Item], Item]:
    """Append descriptions as a section to the docstring of a function or a class; ``python -OO`` has no docstrings."""

    def decorate(item: Item) -> Item:
        if item.__doc__:
            item_form = "    {}: {}" if name == "Attributes" else "    - ``{}``: {}"
            lines = [item_form.format(*pair) for pair in items.items()]
            item.__doc__ = "\n".join([inspect.cleandoc(item.__doc__), "", f"{name}:", *lines, ""])
        return item

    return decorate


def documented(columns: Columns) -> Callable[[Callable[Arguments, pd.DataFrame]], Callable[Arguments, pd.DataFrame]]:
    """Add units and ``columns`` to the ``attrs`` of the table that a function returns, and to its docstring."""

    def decorate(make: Callable[Arguments, pd.DataFrame]) -> Callable[Arguments, pd.DataFrame]:
        @with_section("Columns", columns)
        @functools.wraps(make)
        def made(*args: Arguments.args, **options: Arguments.kwargs) -> pd.DataFrame:
            return described(make(*args, **options), columns)

        return made

    return decorate


def described_table(columns: Columns) -> Callable[[Callable[[Owner], pd.DataFrame]], Callable[[Owner], pd.DataFrame]]:
    """Make a documented table once, and return a copy of it on each access."""

    def decorate(build: Callable[[Owner], pd.DataFrame]) -> Callable[[Owner], pd.DataFrame]:
        name, make = f"_table_{build.__name__}", documented(columns)(build)

        @functools.wraps(make)
        def made(owner: Owner) -> pd.DataFrame:
            if name not in owner.__dict__:
                owner.__dict__[name] = make(owner)
            kept: pd.DataFrame = owner.__dict__[name]
            return kept.copy()

        return made

    return decorate


def as_time_ns(time: object) -> int:
    """Return a time as nanoseconds since 1970: a whole number of them, a ``datetime``, a ``Timestamp`` or text in UTC.

    Raises:
        UsageError: it is none of these.
    """
    import pandas as pd

    if hasattr(time, "__index__"):
        return int(time.__index__())
    try:
        stamp = pd.Timestamp(time)  # type: ignore[arg-type]
        return int((stamp.tz_localize("UTC") if stamp.tz is None else stamp).value)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{time!r} is not a time: give nanoseconds since 1970, a datetime, or text such as 2026-11-23 10:00:00.25"
        ) from error


def utc(table: pd.DataFrame) -> pd.DataFrame:
    """Return a copy of a table with its times as UTC.

    Each column of nanoseconds since 1970 becomes one of type ``datetime64[ns, UTC]`` at the same place: ``start_ns``
    becomes ``start_utc``. Durations stay as they are.

    Raises:
        UsageError: the table has no column of times.
    """
    import pandas as pd

    times = [name for name in instance_of(table, pd.DataFrame, "the table") if name in _TIMES]
    if not times:
        raise UsageError(f"the table has no column of times to convert: it has {', '.join(map(str, table))}")
    result = table.copy()
    for name in times:
        result[name] = pd.to_datetime(result[name].astype("Int64"), unit="ns", utc=True)
    names = {name: f"{str(name).removesuffix('_ns')}_utc" for name in times}
    result = result.rename(columns=names)
    units = dict(table.attrs.get("units", {}))
    result.attrs["units"] = {name: unit for name, unit in units.items() if name not in times}
    columns = table.attrs.get("columns", {})
    result.attrs["columns"] = {names.get(name, name): text for name, text in columns.items()}
    return result


def html_of_text(text: str) -> str:
    """Return a text as HTML that keeps its lines and columns."""
    return f'<pre style="white-space: pre; overflow-x: auto">{html.escape(text)}</pre>'
