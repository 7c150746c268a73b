"""Shows a progress bar for long reads of captures, on a terminal only."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from ringtap.core.terminal_escaping import progress_bar

_PATIENCE_S = 0.5  # a shorter read needs no bar, and the bar's library takes long to load


class Bar:
    """Progress bar of bytes read, their rate and the time left, on standard error if that is a terminal."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._is_started = False
        self._bar: Any = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done_bytes: int, total_bytes: int | None) -> None:
        """Show the bytes read so far and the total; None if the total is not known."""
        if not self._is_started and time.monotonic() - self._begin_s > _PATIENCE_S:
            self._is_started = True
            self._bar = progress_bar("BarColumn", "DownloadColumn", "TransferSpeedColumn", "TimeRemainingColumn")
            if self._bar is not None:
                self._task = self._bar.add_task("reading", total=None)
        if self._bar is not None:
            self._bar.update(self._task, completed=done_bytes, total=total_bytes)
