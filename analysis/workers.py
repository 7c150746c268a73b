"""Workers that read files and nodes one by one: this process, or others (`ringtap.analysis.dask_workers`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Workers(Protocol):
    """Something that calls a function many times."""

    def each(self, work: Callable[..., T], *columns: Iterable[Any]) -> Iterator[T]:
        """Call ``work`` with the first of every column, then the second ones, and so on, as `map` does.

        Args:
            work: a function of a module; what it is given and gives back must be picklable.
            *columns: its arguments.

        Returns:
            What each call gave, in their order. What a call raises is raised here.
        """


class _Alone:
    """This process, one call after the other."""

    def each(self, work: Callable[..., T], *columns: Iterable[Any]) -> Iterator[T]:
        return map(work, *columns)


ALONE: Workers = _Alone()
