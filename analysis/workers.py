"""Workers that read files and nodes one by one: this process, or others (`ringtap.analysis.dask_workers`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Workers(Protocol):
    """Protocol of an object that calls a function many times."""

    def each(self, work: Callable[..., T], *columns: Iterable[Any]) -> Iterator[T]:
        """Call ``work`` with the first of every column, then the second ones, and so on, as `map` does.

        Args:
            work: a module-level function; its arguments and results must be picklable.
            *columns: its arguments.

        Returns:
            The result of each call, in order. An exception of a call is raised here.
        """


class _Alone:
    """This process, one call after the other."""

    def each(self, work: Callable[..., T], *columns: Iterable[Any]) -> Iterator[T]:
        return map(work, *columns)


ALONE: Workers = _Alone()
