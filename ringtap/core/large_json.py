"""Reads a JSON object in a file member by member, such as the traces of PyTorch's profiler."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringtap.core.errors import UsageError
from ringtap.core.json_validation import ShapeError
from ringtap.core.untrusted_files import open_regular

MAX_BYTES = 4 << 30  # uncompressed
_MAX_VALUE, _CHUNK = 16 << 20, 1 << 20  # characters of a value, and of a read
_MAX_RATIO, _ANY_RATIO = 200, 64 << 20  # of unpacked to packed characters, beyond some; traces have about 15
# a string, also one that goes on in what follows, or the colon of a member without a value
_STRING_OR_LONE_COLON = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|:(?=[ \t\r\n]*[,}])', re.DOTALL)
_SPACE, _AFTER_VALUES = re.compile(r"[ \t\r\n]*"), set(" \t\r\n,:]}")


def members(path: Path, items: str) -> Iterator[tuple[str, Any]]:
    """Yield key and value of the members of a JSON object in a file, and each item of one list.

    Raises:
        ShapeError: it is not such JSON, or too large.
        UsageError: the file cannot be read.
    """
    try:
        with open_regular(path) as file:
            is_compressed = file.read(2) == b"\x1f\x8b"
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            most = min(MAX_BYTES, _ANY_RATIO + _MAX_RATIO * size)
            data = gzip.GzipFile(fileobj=file) if is_compressed else file
            with io.TextIOWrapper(data, encoding="utf-8", errors="replace") as text:
                yield from _Scanner(text, most).members(items)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{path} is cut short or damaged: copy it again") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


class _Scanner:
    """A JSON object in a file, of which only a part is in memory.

    Numbers are taken as Python reads them: traces have infinite occupancies and ids of more than 64 bits. Texts may
    have control characters: names of operations have them. A member without a value is null: some versions of PyTorch
    leave out the description of a group.
    """

    def __init__(self, file: io.TextIOWrapper, most: int) -> None:
        self._file, self._text, self._at, self._most, self._left = file, "", 0, most, most
        self._decoder = json.JSONDecoder(strict=False)

    def members(self, items: str) -> Iterator[tuple[str, Any]]:
        """Yield key and value of each member, and of each item of one list."""
        self._take("{", "it is not a JSON object")
        while self._peek() != "}":
            key = self._value()
            self._take(":", "a key has no value")
            if key == items:
                self._take("[", f"{items} is not a list")
                while self._peek() != "]":
                    yield key, self._value()
                    self._separate("]")
                self._at += 1
            else:
                yield str(key), self._value()
            self._separate("}")

    def _more(self) -> bool:
        size = max(_CHUNK, len(self._text) - self._at)
        text = self._file.read(size)
        self._left -= len(text)
        if self._left < 0:
            raise ShapeError(f"it has more than {self._most >> 20} MiB when it is unpacked")
        self._text, self._at = self._text[self._at :] + text, 0
        return bool(text)

    def _peek(self) -> str:
        while True:
            found = _SPACE.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                raise ShapeError("it is cut short")

    def _take(self, mark: str, otherwise: str) -> None:
        if self._peek() != mark:
            raise ShapeError(otherwise)
        self._at += 1

    def _separate(self, end: str) -> None:
        if self._peek() == ",":
            self._at += 1
        elif self._peek() != end:
            raise ShapeError("a comma is missing")

    def _value(self) -> Any:
        self._peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except RecursionError:
                raise ShapeError("it is nested too deeply") from None
            except json.JSONDecodeError as error:
                at, end = error.pos, len(self._text)
                if self._text[at : at + 1] in (",", "}") and self._text[max(0, at - 4) : at].rstrip().endswith(":"):
                    # all of them at once, as the value is parsed anew from its begin
                    rest = _STRING_OR_LONE_COLON.sub(lambda one: ":null" if one[0] == ":" else one[0], self._text[at:])
                    self._text = f"{self._text[:at]}null{rest}"
                    continue
            except ValueError:
                end = len(self._text)
            if self._text[end : end + 1] in _AFTER_VALUES:
                self._at = end
                return value
            # the value, or a number that seems to have ended, goes on in what follows
            if len(self._text) - self._at > _MAX_VALUE or not self._more():
                raise ShapeError("it is cut short or not JSON")
