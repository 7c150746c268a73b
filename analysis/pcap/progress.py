"""A progress bar for long reads of captures, shown on a terminal only."""

from __future__ import annotations

import importlib.util
import sys
import time
from types import TracebackType
from typing import Any

from ringtap.terminal import unguarded

_PATIENCE_S = 0.5  # a shorter read needs no bar, and the bar's library takes long to load


class Bar:
    """Progress bar of bytes read, their rate and the time left, on standard error if that is a terminal."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._shown = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
        self._bar: Any = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done_bytes: int, total_bytes: int | None) -> None:
        """Show the bytes read so far and the total; None if the total is not known."""
        if self._shown and self._bar is None and time.monotonic() - self._begin_s > _PATIENCE_S:
            self._start()
        if self._bar is not None:
            self._bar.update(self._task, completed=done_bytes, total=total_bytes)

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        console = Console(file=unguarded(sys.stderr))
        self._bar = Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
        self._task = self._bar.add_task("reading", total=None)
        self._bar.start()
