"""Defines the errors that ringtap shows its user: one sentence each, with a documented exit code."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

FILE_LIMIT = ": a log has reached the largest size that this user's files may have (ulimit -f)"


class RingtapError(Exception):
    """A problem the user can act on; printed as one sentence, never as a traceback."""

    exit_code = 1


class UsageError(RingtapError):
    """Wrong arguments, a bad file, a missing tool or privilege: exit code 2."""

    exit_code = 2


class MeasurementError(RingtapError):
    """The job or the measurement failed: exit code 1."""

    exit_code = 1


class RingtapWarning(UserWarning):
    """A measurement that could be read only in part, or that its numbers describe badly."""


@contextmanager
def file_errors(
    name: object, failure: str = "cannot be read", kind: type[RingtapError] = UsageError, remedy: str = ""
) -> Iterator[None]:
    """Turn the system's errors within the block into one that names the file: ``NAME cannot be read: REASON``."""
    try:
        yield
    except OSError as error:
        raise kind(f"{name} {failure}: {error.strerror}{remedy}") from error


_READERS = {
    r"\.csv$": "ringtap fit reads tables of points",
    r"\.toml$": "ringtap sweep measures plans",
    r"\.pcap(ng)?(\.\w+)?$": "ringtap flows reads captures",
    r"\.html$": "a browser shows pages",
    r"\.parquet$": "ringtap analyze reads tables of operations",
    r"\.et$": "ringtap workload reads directories of execution traces",
    r"trace\.json$|\.json\.gz$": "ringtap workload new --kineto reads traces of torch.profiler",
}


def did_you_mean(name: object, known: Iterable[object], before: str = "") -> str:
    """Return the question for the known name that is most like a wrong one, with a blank after it; empty if none is.

    Args:
        name: the wrong name.
        known: the known names.
        before: what the question has before the known name, such as the folder of a file.
    """
    import difflib  # takes 5 ms, which a program without mistakes need not spend

    spelled = {str(one).lower(): str(one) for one in known}
    near = difflib.get_close_matches(str(name).lower(), spelled, 1)
    return f"did you mean {before + spelled[near[0]]!r}? " if near else ""


def what_reads(file: str) -> str:
    """Say which command reads a file, by its name; empty for other files."""
    return next((words for name, words in _READERS.items() if re.search(name, file)), "")


def system_message(number: int) -> str:
    """Return the system's message for an error number, with the cause where it does not name it."""
    return os.strerror(number) + {errno.EFBIG: FILE_LIMIT, errno.EMFILE: " (ulimit -n)"}.get(number, "")


def error_message(error: BaseException) -> str:
    """Return a clause for an error: ringtap's own text, the system's message for a system error, else type and text."""
    if isinstance(error, OSError) and error.errno is not None:
        is_own = error.strerror and (not error.errno or error.strerror != os.strerror(error.errno))
        return str(error.strerror) if is_own else system_message(error.errno)
    text = str(error)
    if text and isinstance(error, RingtapError | OSError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def failure_message(error: BaseException) -> str:
    """Return `error_message`, behind the name of the file that a system error has."""
    name = error.filename if isinstance(error, OSError) else None
    return error_message(error) if name is None else f"{os.fsdecode(name)}: {error_message(error)}"


_NUMBERED = re.compile(r"^\w+: \[Errno \d+\] ")


def without_number(line: str) -> str:
    """Return the last line of a traceback without the type and number of a system error."""
    return _NUMBERED.sub("", line)


def last_line(text: str) -> str:
    """Return the last line that a program wrote to standard error, which says why it failed."""
    return without_number((text.strip().splitlines() or ["no message"])[-1].strip())


def exit_words(code: int) -> str:
    """Return a clause for an exit code: Python's, below 0 for a signal, or a shell's, 128 and the signal's number."""
    import signal

    if code < 0:
        return signal.Signals(-code).name
    shell = f" (128 + {signal.Signals(code - 128).name})" if code - 128 in set(signal.Signals) else ""
    return f"exit code {code}{shell}"
