"""Guards the reader's terminal: text of a run, a host or a file name has no control over it.

Reasons, remedies, names of nodes and files and command lines come from other machines and other people. `guarded` puts
a filter before standard output and standard error that writes control characters as escapes (``\\x1b``). `as_command`
does the same for modules that run on their own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO, cast

from ringtap.core.errors import RingtapError


def fill_standard_descriptors() -> None:
    """Open the null device in place of closed standard descriptors; call it first in every program.

    A file or socket opened later would take their numbers, and be read, written or closed as a standard stream. What
    is opened here is not inherited: a wrapped job finds closed what its caller has closed.
    """
    try:
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(descriptor)
    except OSError:  # no descriptor left: then none of the three is free
        return
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # print() takes such a standard error for standard output
            stream = open(number, "w" if number else "r", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


@contextmanager
def shown_log() -> Iterator[None]:
    """Print to standard error what the library logs within the block, one line each, unless the program has a log."""
    import logging

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print(f"ringtap: {one_line(record.getMessage())}", file=sys.stderr, flush=True)

    log, lines = logging.getLogger("ringtap"), Lines()
    if log.handlers:
        yield
        return
    level = log.level
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(lines)
        log.setLevel(level)


def discard_output() -> None:
    """Redirect standard output to the null device, once a write to it has failed."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


# control characters but newline and tab, bidirectional and invisible formatting, line separators, half characters
_STEERING = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
# bytes that are not text in the encoding of this process, as Python has them (PEP 383), and as repr() then writes them
_BYTES = re.compile(r"[\udc80-\udcff]+|(?:\\udc[89a-f][0-9a-f])+")
_NAMED = {"\r": "\\r", "\b": "\\b", "\f": "\\f", "\v": "\\v", "\a": "\\a"}


def readable(text: str) -> str:
    r"""Return a name, argument or message with the bytes that Python could not decode as UTF-8, or as ``\xc3``.

    With ``LC_ALL=C`` and ``PYTHONUTF8=0``, every character beyond ASCII in a file name is such bytes.
    """
    return _BYTES.sub(_decoded, text) if "\\udc" in text or not text.isascii() else text


def _decoded(match: re.Match[str]) -> str:
    found = match[0]
    data = bytes.fromhex(found.replace("\\udc", "")) if found[0] == "\\" else found.encode(errors="surrogateescape")
    return data.decode(errors="backslashreplace")


def visible(text: str) -> str:
    """Return `readable` text with control, bidirectional and invisible characters escaped; newlines and tabs stay."""
    text = readable(text)
    # a line of text needs no search
    return text if text.isascii() and text.replace("\n", "").isprintable() else _STEERING.sub(_escaped, text)


def one_line(text: str) -> str:
    """Return `visible` text without newlines: a reason from elsewhere could look like ringtap's next line."""
    return visible(text).replace("\n", "\\n")


def masked(line: str) -> str:
    """Return text as one line of a full-screen view: U+FFFD for each character that `visible` escapes, no newlines."""
    return _STEERING.sub("\N{REPLACEMENT CHARACTER}", line).translate({10: 32, 9: 32})


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    number = ord(character)
    if number < 0x100:
        return _NAMED.get(character, f"\\x{number:02x}")
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def shell_word(path: str | os.PathLike[str]) -> str:
    """Quote a path for a shell, for commands that the reader is to type.

    Words with control characters are written as bash and zsh write them (``$'a\\x1bb'``).
    """
    text = os.fspath(path)
    if text.startswith("-"):
        text = f"./{text}"
    if "\n" not in text and "\t" not in text and visible(text) == text:
        return shlex.quote(text)
    shown = (
        chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}"
        for byte in text.encode(errors="surrogateescape" if _is_path(text) else "replace")
    )
    return f"$'{''.join(shown)}'"


def _is_path(text: str) -> bool:
    """Return True if the text's half characters, if it has any, stand for bytes of a file name."""
    try:
        text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


class _Guarded:
    """A text stream that writes only `visible` text."""

    def __init__(self, stream: TextIO) -> None:
        self.unguarded = stream

    def write(self, text: str) -> int:
        shown, encoding = visible(text), self.unguarded.encoding or "utf-8"
        try:
            self.unguarded.write(shown)
        except UnicodeEncodeError:  # a terminal of another encoding
            self.unguarded.write(shown.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)


@contextmanager
def guarded() -> Iterator[None]:
    """Make standard output and standard error write only `visible` text."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        stream if stream is None or isinstance(stream, _Guarded) else cast(TextIO, _Guarded(stream))
        for stream in before
    )
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def as_command(work: Callable[[], int]) -> int:
    """Run the work of a module that runs on its own (``python -m``), with guarded streams and errors in one sentence.

    Returns:
        Its exit code.
    """
    fill_standard_descriptors()
    with guarded():
        try:
            return work()
        except RingtapError as error:
            print(f"ringtap: {one_line(str(error))}", file=sys.stderr)
            return error.exit_code


def unguarded(stream: TextIO) -> TextIO:
    """Return the stream behind a guard, for ringtap's own colours and bars; pass other text through `visible`."""
    return stream.unguarded if isinstance(stream, _Guarded) else stream


def text_table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return the lines of a table, the first ``left`` columns aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if number < left else text.rjust(width)
            for number, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def progress_bar(*columns: str) -> Any:
    """Start a progress bar on standard error (``rich.progress.Progress``); None without a terminal, or without rich.

    Args:
        *columns: names of rich's column classes, or texts of a `TextColumn`.
    """
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        return None
    from rich import progress
    from rich.console import Console

    made = [
        getattr(progress, name)() if hasattr(progress, name) else progress.TextColumn(name, markup=False)
        for name in columns
    ]
    # other output does not pass through the bar; it is guarded elsewhere
    bar = progress.Progress(
        *made, console=Console(file=unguarded(sys.stderr)), transient=True, redirect_stdout=False, redirect_stderr=False
    )
    bar.start()
    return bar
