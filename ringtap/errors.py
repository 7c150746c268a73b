"""Errors that ringtap shows its user: one sentence each, with a documented exit code."""

from __future__ import annotations

import errno
import os

import ringtap

FILE_LIMIT = ": a log has reached the largest size that this user's files may have (ulimit -f)"


class RingtapError(Exception):
    """A problem the user can act on; printed as one sentence, never as a traceback."""

    exit_code = 1


class UsageError(RingtapError):
    """Wrong arguments, a bad file, a missing tool or privilege: exit code 2."""

    exit_code = 2


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


class MeasurementError(RingtapError):
    """The job or the measurement failed: exit code 1."""

    exit_code = 1


def system_words(number: int) -> str:
    """Return the system's message for an error number, with the cause where it does not name it."""
    return os.strerror(number) + (FILE_LIMIT if number == errno.EFBIG else "")


def words_of(error: Exception) -> str:
    """Return a clause for an unforeseen error: the system's message for a system error, else its type and text."""
    if isinstance(error, OSError) and error.errno and error.strerror:
        return system_words(error.errno)
    return f"{type(error).__name__}: {error}"
