"""Checks the arguments of public calls: a wrong one is answered in a sentence."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

from ringtap.core.errors import UsageError

T = TypeVar("T")
_NAMES = {"str": "text", "Real": "a number", "DataFrame": "a pandas DataFrame"}
_MOST_SHOWN = 60
_OPTION = re.compile(r"--([a-z][a-z-]*[a-z])")
_SEE = re.compile(r" \(see ringtap [a-z ]+ --help\)")
_ARGUMENTS = {"token-file": "token"}  # options whose argument has another name


@contextmanager
def option_names_as_arguments() -> Iterator[None]:
    """Name options in errors within the block as Python does: ``--burst-length`` becomes ``burst_length``."""
    try:
        yield
    except UsageError as error:
        raise UsageError(_OPTION.sub(_argument_of, _SEE.sub("", str(error)))) from error


def _argument_of(option: re.Match[str]) -> str:
    return _ARGUMENTS.get(option[1], option[1].replace("-", "_"))


def path_of(value: object, name: str) -> Path:
    """Return a path that is given as text or as a path object.

    Raises:
        UsageError: it is neither; the message begins with ``name``.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise UsageError(f"{name} is {_shown(value)}, not a path: give text or a pathlib.Path")
    return Path(value)


def paths_of(value: object, noun: str) -> list[str | os.PathLike[str]]:
    """Return one path or several, as they are given, as a list.

    Raises:
        UsageError: there is none, or one is neither text nor a path object.
    """
    several: list[Any] = [value] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
    for one in several:
        path_of(one, f"a {noun}")
    if not several:
        raise UsageError(f"no {noun} was named: give one or several")
    return several


def instance_of(value: object, kind: type[T], name: str, example: str = "") -> T:
    """Return a value of a type.

    Args:
        value: the value.
        kind: the type.
        name: the argument, for messages.
        example: an expression that gives such a value.

    Raises:
        UsageError: it is not of this type.
    """
    if not isinstance(value, kind):
        kind_name = _NAMES.get(kind.__name__, f"of type {kind.__name__}")
        hint = f": give {example}" if example else ""
        raise UsageError(f"{name} is {_shown(value)}, not {kind_name}{hint}")
    return value


def number(value: object, name: str) -> float:
    """Return a number as a float.

    Raises:
        UsageError: it is not a number; the message begins with ``name``.
    """
    return float(instance_of(value, Real, name))  # type: ignore[type-abstract]


def whole_number(value: object, name: str) -> int:
    """Return a whole number as an int; a float such as 138e6 is one.

    Raises:
        UsageError: it is not one; the message begins with ``name``.
    """
    if isinstance(value, Real) and float(value).is_integer():
        return int(value)  # type: ignore[call-overload,no-any-return]
    raise UsageError(f"{name} must be a whole number, not {_shown(value)}")


def check_callback(function: object) -> None:
    """Check that a callback, if there is one, can be called.

    Raises:
        UsageError: it cannot.
    """
    if function is not None and not callable(function):
        raise UsageError(f"progress is {_shown(function)}, not a function")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN and "\n" not in text else f"a {type(value).__name__}"
