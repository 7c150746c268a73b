"""Validates JSON from elsewhere: parses it within bounds, and checks the shape that its reader relies on.

A shape is a type (``str``, ``int``, ``float``, ``bool``, ``dict``), None, `Number`, `Text`, a list with the shape of
its items, an object with the shape of each key (``"key?"`` may be absent; ``str`` stands for every other key), or a
tuple of shapes of which one must fit. Keys that a shape does not name may hold anything.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ringtap
from ringtap.core.errors import UsageError
from ringtap.core.untrusted_files import MAX_BYTES, open_regular

_MAX_DEPTH = 64
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}
Shape = Any


class ShapeError(ValueError):
    """A wrong value; the message is a clause that names the value and its location."""


class NewerFormatError(UsageError):
    """A file that a newer ringtap has written.

    Args:
        path: the file or run directory.
        writer: the version that wrote it, as the file says; anything but text where it does not say.
        found: its format version.
        newest: the newest format version that this ringtap reads.
    """

    def __init__(self, path: object, writer: object, found: int, newest: int) -> None:
        who = f"ringtap {writer[:40]}" if isinstance(writer, str) and writer else "a newer ringtap"
        super().__init__(
            f"{path} was written by {who} (format {found}); this is ringtap {ringtap.__version__}, which reads formats "
            f"up to {newest}: upgrade ringtap"
        )


@dataclass(frozen=True)
class Number:
    """The shape of a number within bounds.

    Attributes:
        minimum: smallest allowed value.
        maximum: largest allowed value.
        whole: True for integers only.
    """

    minimum: float = -math.inf
    maximum: float = math.inf
    whole: bool = False


@dataclass(frozen=True)
class Text:
    """The shape of a text.

    Attributes:
        pattern: regular expression that the whole text matches.
        description: name in messages.
    """

    pattern: str
    description: str


NAME = Text(r"(?!\.\.?$)[^/\0]{1,255}", "a name that a file can have")
PATH = Text(r"[^\0]{1,4096}", "a path")
NS = Number(0, 2**62, whole=True)  # a time or a duration in nanoseconds: sums of two fit 64 bits
BPS = Number(0, 1e18)
COUNT = Number(0, 2**53, whole=True)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON from an untrusted source.

    Numbers are finite and whole ones fit 64 bits, nothing is nested deeper than 64 levels, and texts are valid Unicode
    (half characters become U+FFFD).

    Raises:
        ShapeError: it is not such JSON.
    """
    try:
        item = DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ShapeError(f"it is nested deeper than {_MAX_DEPTH} levels") from None
    except UnicodeDecodeError as error:
        raise ShapeError("it is not UTF-8") from error
    opening = (b"[", b"{", rb"\u") if isinstance(text, bytes) else ("[", "{", r"\u")
    if text.count(opening[0]) + text.count(opening[1]) > _MAX_DEPTH:  # type: ignore[arg-type]
        _check_depth(item)
    return whole(item) if opening[2] in text else item  # type: ignore[operator]


def _refuse(word: str) -> Any:
    raise ShapeError(f"{word} is not a number")


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**64:
        raise ShapeError("a whole number in it is too large")
    return number


def _number(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ShapeError("a number in it is too large")
    return number


# of one value within text
DECODER = json.JSONDecoder(parse_constant=_refuse, parse_int=_integer, parse_float=_number)


def _check_depth(item: Any) -> None:
    level = [item]
    for _ in range(_MAX_DEPTH):
        level = [
            one
            for inner in level
            for one in (inner.values() if isinstance(inner, dict) else inner)
            if isinstance(one, (dict, list))
        ]
        if not level:
            return
    raise ShapeError(f"it is nested deeper than {_MAX_DEPTH} levels")


def whole(item: Any) -> Any:
    """Return a JSON value with half characters replaced, because no encoding can write them."""
    if isinstance(item, str):
        return _HALF_CHARACTER.sub("\N{REPLACEMENT CHARACTER}", item)
    if isinstance(item, list):
        return [whole(one) for one in item]
    if isinstance(item, dict):
        return {whole(key): whole(value) for key, value in item.items()}
    return item


def load_json(path: Path, shape: Shape = None) -> Any:
    """Read a JSON file of at most 64 MiB and check it; without a shape it may be anything.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        ShapeError: it is not JSON, too large, or does not have the shape.
    """
    with open_regular(path) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ShapeError(f"it has more than {MAX_BYTES >> 20} MiB")
    try:
        item = parse_json(data)
    except ShapeError:
        raise
    except ValueError as error:
        raise ShapeError(f"it is not JSON: {error}") from error
    if shape is not None:
        check(item, shape)
    return item


def check(item: Any, shape: Shape, name: str = "") -> None:
    """Check that an item has a shape.

    Args:
        item: as `parse_json` gives it.
        shape: the shape.
        name: name of the item in messages; empty for a whole document.

    Raises:
        ShapeError: the item does not have the shape.
    """
    if isinstance(shape, dict):
        _check_object(item, shape, name)
    elif isinstance(shape, list):
        if not isinstance(item, list):
            raise ShapeError(f"{name or 'it'} is not a list")
        for number, one in enumerate(item):
            check(one, shape[0], f"{name}[{number}]")
    elif isinstance(shape, tuple):
        _check_any(item, shape, name)
    elif not _fits(item, shape):
        raise ShapeError(f"{name or 'it'} is not {_describe(shape)}")


def _check_object(item: Any, shape: dict[Any, Shape], name: str) -> None:
    if not isinstance(item, dict):
        raise ShapeError(f"{name or 'it'} is not an object")
    dot = f"{name}." if name else ""
    known = set()
    for key, inner in shape.items():
        if key is str:
            continue
        bare = key.removesuffix("?")
        known.add(bare)
        if bare in item:
            check(item[bare], inner, f"{dot}{bare}")
        elif bare == key:
            raise ShapeError(f"{name or 'it'} has no {bare}")
    if str in shape:
        for key, value in item.items():
            if key not in known:
                check(value, shape[str], f"{dot}{key}")


def _check_any(item: Any, shapes: tuple[Shape, ...], name: str) -> None:
    nested = [shape for shape in shapes if isinstance(shape, (dict, list))]
    for shape in nested:
        if isinstance(item, type(shape)):  # the intended shape: report the error within it
            check(item, shape, name)
            return
    if not any(_fits(item, shape) for shape in shapes if not isinstance(shape, (dict, list))):
        raise ShapeError(f"{name or 'it'} is not {' or '.join(dict.fromkeys(map(_describe, shapes)))}")


def _fits(item: Any, shape: Shape) -> bool:
    if shape is None:
        return item is None
    if isinstance(shape, Text):
        return isinstance(item, str) and re.fullmatch(shape.pattern, item) is not None
    if isinstance(shape, Number):
        if isinstance(item, bool) or not isinstance(item, int if shape.whole else (int, float)):
            return False
        return shape.minimum <= item <= shape.maximum
    if shape in (int, float):
        return isinstance(item, (int, float) if shape is float else int) and not isinstance(item, bool)
    return isinstance(item, shape)


def _describe(shape: Shape) -> str:
    if shape is None:
        return "null"
    if isinstance(shape, Text):
        return shape.description
    if isinstance(shape, Number):
        text = "a whole number" if shape.whole else "a number"
        if shape.minimum > -math.inf:
            text += f" of at least {shape.minimum:g}"
        return text + (f" and at most {shape.maximum:g}" if shape.maximum < math.inf else "")
    if isinstance(shape, (dict, list)):
        return "an object" if isinstance(shape, dict) else "a list"
    return _NAMES[shape]
