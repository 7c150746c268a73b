"""Adds the options that verbs of ``ringtap traffic`` share, reads the token, and prints settings."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringtap.core.errors import UsageError, file_errors
from ringtap.core.units import format_duration
from ringtap.trafficgen.worker_processes import usual_workers

TOKEN_VARIABLE = "RINGTAP_TOKEN"
_MAX_TOKEN_LENGTH = 4096


def add_worker_options(parser: Any) -> None:
    """Add ``--workers`` and ``--threads``."""
    workers, threads = usual_workers()
    parser.add_argument("--workers", type=int, default=workers, metavar="N", help=f"worker processes (here {workers})")
    text = f"threads per process, each with a loop (here {threads})"
    parser.add_argument("--threads", type=int, default=threads, metavar="N", help=text)


class _RefuseToken(argparse.Action):
    """Action that refuses ``--token WORD``, because every user of the host can read command lines."""

    def __call__(
        self, _parser: object, _options: object, _value: str | Sequence[Any] | None, _name: object = ""
    ) -> None:
        raise UsageError(
            f"--token shows the token to every user of this host: set {TOKEN_VARIABLE}, or give --token-file FILE"
        )


def add_token(parser: Any) -> None:
    """Add ``--token-file``."""
    text = f"file with the token that receiver and senders share, such as /dev/fd/3 (default: {TOKEN_VARIABLE})"
    parser.add_argument("--token-file", type=Path, metavar="FILE", help=text)
    parser.add_argument("--token", action=_RefuseToken, help=argparse.SUPPRESS)


def read_token(options: argparse.Namespace) -> str:
    """Return the token: the first line of ``--token-file``, else that of the environment; empty without either.

    Raises:
        UsageError: the file cannot be read, or its first line is empty.
    """
    path: Path | None = options.token_file
    if path is None:
        return os.environ.get(TOKEN_VARIABLE, "")
    with file_errors(f"the token's file {path}"), path.open(errors="surrogateescape") as file:
        token = file.readline(_MAX_TOKEN_LENGTH).strip()
    if not token:
        raise UsageError(f"{path} holds no token on its first line")
    return token


def at_least(option: str, value: float, least: float) -> None:
    """Refuse a number that is too small.

    Raises:
        UsageError: the number is too small.
    """
    if not value >= least:
        raise UsageError(f"{option} {value} is too small: give {least} or more")


def print_settings(settings: dict[str, Any]) -> None:
    """Print effective settings as key=value on stderr."""
    text = " ".join(f"{key}={'default' if value is None else value}" for key, value in settings.items())
    print(text, file=sys.stderr, flush=True)


def seconds_words(seconds: float | None) -> str:
    """Return the text of a duration; a dash for None."""
    return "-" if seconds is None else format_duration(seconds)
