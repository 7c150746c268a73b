"""Progress of a sweep on standard error: a bar with the remaining time on a terminal, else one line per point."""

from __future__ import annotations

import importlib.util
import sys
import time
from typing import Any

from ringtap.terminal import unguarded, visible
from ringtap.units import format_duration


class Progress:
    """Progress display of a sweep.

    Args:
        total_s: expected duration of the sweep in seconds.
    """

    def __init__(self, total_s: float) -> None:
        self._total_s, self._done_s, self._begin_s = total_s, 0.0, time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty() and importlib.util.find_spec("rich"):
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeRemainingColumn(),
            )
            console = Console(file=unguarded(sys.stderr))
            # other output does not pass through the bar; it is guarded elsewhere
            self._bar = Bar(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
            self._task = self._bar.add_task("sweep", total=total_s)
            self._bar.start()

    def tick(self, label: str, step_s: float) -> None:
        """Show the present step and the seconds that it has run."""
        if self._bar:
            self._bar.update(
                self._task, description=visible(label), completed=min(self._done_s + step_s, self._total_s)
            )

    def done(self, line: str, expected_s: float) -> None:
        """Print the line of a completed step and count its expected duration as done."""
        self._done_s += expected_s
        spent_s = time.monotonic() - self._begin_s
        left_s = max(0.0, self._total_s - self._done_s) * (spent_s / self._done_s if self._done_s else 1.0)
        if self._bar:
            self._bar.update(self._task, completed=self._done_s)
            self._bar.console.print(visible(line), highlight=False, markup=False)
        else:
            print(f"{line}  (about {format_duration(left_s)} left)", file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self._bar:
            self._bar.console.print(visible(line), highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar:
            self._bar.stop()
