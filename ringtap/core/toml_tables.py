"""Reads the tables of a plan, of a file or a dict, key by key; errors name the file's line (docs/reference/plan.md)."""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NoReturn

from ringtap.core.errors import UsageError
from ringtap.core.units import parse_duration_s, parse_size_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_CHARACTERS = 2**24
_RATE = 'rate such as "25gbit"'
_QUANTITIES: dict[Callable[..., float], str] = {
    parse_size_bytes: 'size such as "400kB"',
    parse_duration_s: 'time such as "6s"',
}


class TomlTable:
    """One table of a plan, read key by key; errors name the line of the key, if the plan is a file."""

    def __init__(self, path: Path | None, name: str, items: dict[str, Any], first_line: int, lines: list[str]) -> None:
        self._path, self._name, self._items, self._first_line, self._lines = path, name, items, first_line, lines
        self._known: list[str] = []

    def _line(self, key: str) -> int:
        for number in range(self._first_line, len(self._lines) + 1):
            line = self._lines[number - 1]
            if re.match(rf"\s*\"?{re.escape(key)}\"?\s*=", line):
                return number
            if number > self._first_line and re.match(r"\s*\[+\s*\w+\s*\]+\s*(#|$)", line):  # the next table
                break
        return self._first_line

    def where(self) -> str:
        """Return the file and the line of the table's heading."""
        return _place(self._path, self._first_line)

    def has(self, key: str) -> bool:
        """Return True if the plan has a key."""
        return key in self._items

    def is_text(self, key: str) -> bool:
        """Return True if the value of a key is a text."""
        return isinstance(self._items.get(key), str)

    def fail(self, key: str, reason: str) -> NoReturn:
        """Refuse a key's value."""
        raise UsageError(f"{_place(self._path, self._line(key))}: {self._name}.{key} {reason}")

    def take(
        self, key: str, kind: type | tuple[type, ...], default: Any, check: Callable[[Any], bool], rule: str
    ) -> Any:
        """Return the value of a key if its type and the check fit; the default ``...`` makes the key required."""
        self._known.append(key)
        if key not in self._items:
            if default is ...:
                near = difflib.get_close_matches(key, self._items.keys() - self._known, 1)
                if near:
                    self.fail(near[0], f"is not a key of this table; did you mean {key}?")
                self.fail(key, "is missing")
            return default
        value = self._items[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or not check(value):
            self.fail(key, f"= {value!r} is not {rule}")
        return value

    def number(self, key: str, default: Any, least: float, most: float) -> float:
        """Return a number within bounds."""
        rule = f"a number from {least:g} to {most:g}"
        return float(self.take(key, (int, float), default, lambda value: least <= value <= most, rule))

    def integer(self, key: str, default: Any, least: int, most: int) -> int:
        """Return an integer within bounds."""
        rule = f"a whole number from {least} to {most}"
        return int(self.take(key, int, default, lambda value: least <= value <= most, rule))

    def text(self, key: str, default: Any, choices: tuple[str, ...] = ()) -> str:
        """Return a string, one of the choices if there are any; the error names the nearest one."""
        rule = f"one of {', '.join(choices)}" if choices else "a text"
        near = difflib.get_close_matches(str(self._items.get(key, "")).lower(), choices, 1)
        rule += f"; did you mean {near[0]}?" if near else ""
        return str(self.take(key, str, default, lambda value: not choices or value in choices, rule))

    def texts(self, key: str, default: Any) -> tuple[str, ...]:
        """Return a list of strings."""
        value = self._items.get(key)
        rule = (
            f"a list of texts: write {json.dumps(value.split())}"
            if value and isinstance(value, str)
            else "a list of texts"
        )
        return tuple(self.take(key, list, default, lambda value: all(isinstance(one, str) for one in value), rule))

    def variables(self, key: str, refused: Collection[str]) -> dict[str, str]:
        """Return environment variables with their values; numbers need no quotes.

        Args:
            key: the key.
            refused: names that a plan may not set, because ringtap sets them.
        """
        rule = 'a table of variables, such as { NCCL_DEBUG = "INFO" }'
        items = self.take(key, dict, {}, lambda _: True, rule)
        for name, value in items.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                self.fail(key, f"holds {name!r}, which is not the name of an environment variable")
            if isinstance(value, bool) or not isinstance(value, (str, int, float)) or "\0" in str(value):
                self.fail(key, f"gives {name} the value {value!r}: write it as a text")
            if name in refused or name.startswith("RINGTAP_"):
                self.fail(key, f"gives {name}, which ringtap sets by itself")
        return {name: str(value) for name, value in items.items()}

    def quantity(self, key: str, default: Any, parse: Callable[[str], float]) -> float:
        """Return a rate, size or duration in its base unit: bit/s, bytes or s, in which a dict may have numbers."""
        number = self._items.get(key)
        if self._path is None and isinstance(number, (int, float)) and not isinstance(number, bool):
            rule = "a number of 0 or more"
            return float(self.take(key, (int, float), default, lambda value: math.isfinite(value) and value >= 0, rule))
        if number is not None and not isinstance(number, str):
            self.fail(key, f"= {number!r} is not a text: write a {_QUANTITIES.get(parse, _RATE)}")
        text = self.text(key, default)
        try:
            return parse(text)
        except UsageError as error:
            self.fail(key, f"= {text!r} is not understood: {error}")

    def finish(self) -> None:
        """Refuse unknown keys; the error names the nearest known one."""
        for key in self._items:
            if key not in self._known:
                near = difflib.get_close_matches(key, self._known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(self._known)}"
                self.fail(key, f"is not a key of this table; {hint}")


def _place(path: Path | None, line: int) -> str:
    return "the plan" if path is None else f"{path} line {line}"


def _plain(value: Any) -> Any:
    """Return a value as a TOML file would give it: dicts, lists and texts in place of what is like them."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if hasattr(value, "tolist"):  # an array, a series, or a number of NumPy
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return fspath(value) if isinstance(value, PathLike) else value


def _text(path: Path) -> str:
    try:
        with path.open() as file:
            text = file.read(MAX_CHARACTERS + 1)
    except IsADirectoryError as error:
        raise UsageError(f"{path} is a directory: name the file of a plan") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    if len(text) > MAX_CHARACTERS:
        raise UsageError(f"{path} has more than {MAX_CHARACTERS:,} characters, which is too long for such a file")
    return text


class PlanTables:
    """The tables of a plan.

    Args:
        source: the plan's file, or a dict of its tables.
        single: names of tables that occur at most once.
        repeated: names of tables that may be repeated, each under ``[[name]]``.

    Raises:
        UsageError: the file cannot be read, is not TOML, or the plan has an unknown table.
    """

    def __init__(self, source: Path | Mapping[str, Any], single: set[str], repeated: set[str]) -> None:
        self._path = source if isinstance(source, Path) else None
        text = _text(source) if isinstance(source, Path) else ""
        try:
            self._root: dict[str, Any] = tomllib.loads(text) if isinstance(source, Path) else _plain(source)
        except (ValueError, RecursionError) as error:  # also of very long numbers and deep arrays
            twice = re.match(r"Cannot declare \('(\w+)',\) twice", str(error))
            how = f"; write [[{twice[1]}]] before each" if twice and twice[1] in repeated else ""
            raise UsageError(f"{source} is not TOML: {error}{how}") from error
        self._lines = text.splitlines() or [""]
        known = sorted(single | repeated)
        for key, value in self._root.items():
            if key not in known:
                near = next(iter(difflib.get_close_matches(key, known, 1)), "")
                hint = f"did you mean {f'[[{near}]]' if near in repeated else f'[{near}]'}?"
                hint = hint if near else f"known: {', '.join(known)}"
                raise UsageError(f"{self._at(key)}: [{key}] is not a known table; {hint}")
            if key in single and not isinstance(value, dict):
                how = f"write [{key}] before its keys" if self._path else "give a dict"
                raise UsageError(f"{self._at(key)}: {key} must be a table: {how}")
            if key in repeated and not (isinstance(value, list) and all(isinstance(one, dict) for one in value)):
                how = f"write [[{key}]] before each" if self._path else "give a list of dicts"
                raise UsageError(f"{self._at(key)}: {key} must be tables: {how}")

    @property
    def name(self) -> str:
        """The plan's file, for messages."""
        return str(self._path or "the plan")

    def _at(self, name: str) -> str:
        return _place(self._path, self._line(name))

    def _line(self, name: str) -> int:
        for number, line in enumerate(self._lines, 1):
            if re.match(rf"\s*\[*\s*{re.escape(name)}\b", line):
                return number
        return 1

    def has(self, name: str) -> bool:
        """Return True if the plan has a table."""
        return name in self._root

    def one(self, name: str, *, needed: bool = False) -> TomlTable:
        """Return a table that occurs at most once; it is empty if the plan has none.

        Raises:
            UsageError: the table is needed but missing.
        """
        if needed and not self.has(name):
            raise UsageError(f"{self.name}: [{name}] is missing")
        return self._table(name, self._root.get(name, {}), 0)

    def each(self, name: str, *, needed: bool = False) -> list[TomlTable]:
        """Return the tables with a name, in order.

        Raises:
            UsageError: at least one is needed, but there is none.
        """
        if needed and not self._root.get(name):
            raise UsageError(f"{self.name}: [[{name}]] is missing")
        return [self._table(name, items, count) for count, items in enumerate(self._root.get(name, []))]

    def _table(self, name: str, items: dict[str, Any], count: int) -> TomlTable:
        heads = [n for n, one in enumerate(self._lines, 1) if re.match(rf"\s*\[+\s*{name}\s*\]", one)]
        return TomlTable(self._path, name, items, heads[count] if count < len(heads) else 1, self._lines)
