"""Entry point of every benchmark: errors as one sentence, and no process left running after Ctrl-C."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from _processes import BenchmarkError


def guarded(work: Callable[[], int]) -> int:
    """Run a benchmark and return its exit code; 1: a measure failed, 130: interrupted."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return work()
    except BenchmarkError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("benchmark: interrupted; nothing was left running", file=sys.stderr)
        return 130


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
