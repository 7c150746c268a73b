"""What the traffic commands print and read in common."""

from __future__ import annotations

import sys
from typing import Any

from ringtap.errors import UsageError
from ringtap.trafficgen.limits import usual_crew
from ringtap.units import format_duration


def add_crew(parser: Any) -> None:
    """Add ``--workers`` and ``--threads``."""
    workers, threads = usual_crew()
    parser.add_argument("--workers", type=int, default=workers, metavar="N", help=f"processes (here {workers})")
    text = f"threads, each with a loop, in each of them (here {threads})"
    parser.add_argument("--threads", type=int, default=threads, metavar="N", help=text)


def at_least(option: str, value: float, least: float) -> None:
    """Refuse a number that is too small.

    Raises:
        UsageError: it is.
    """
    if not value >= least:
        raise UsageError(f"{option} {value} is too small: give {least} or more")


def print_settings(settings: dict[str, Any]) -> None:
    """Print effective settings as key=value on stderr."""
    words = " ".join(f"{key}={'default' if value is None else value}" for key, value in settings.items())
    print(words, file=sys.stderr, flush=True)


def seconds_words(seconds: float | None) -> str:
    """A duration, or a dash."""
    return "-" if seconds is None else format_duration(seconds)
