"""Keeps the iterations of a job on a grid of times by pauses, so that jobs that share links interleave.

The method is that of the agents of CASSINI (Rajasekaran, Ghobadi and Akella, NSDI 2024): a pause before an iteration,
never within one.
"""

from __future__ import annotations

import os
import time

from . import error_log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .settings import Settings

VARIABLE = "RINGTAP_ITERATION_GRID"
# first steps of a job, after which it waits for the grid wherever it is
_FIRST_STEPS = 5


class Grid:
    """Times at which iterations may begin: ``start_ns`` (CLOCK_MONOTONIC) and every ``period_ns`` after it.

    As soon as there is a file ``until``, iterations may begin at any time.
    """

    def __init__(self, start_ns: int, period_ns: int, until: str = "") -> None:
        self.start_ns, self.period_ns, self.until = start_ns, period_ns, until
        self._is_over = False

    def pause_ns(self, now_ns: int, step: int) -> int:
        """The time from now to the next point of the grid; 0 if the last one is nearer, so that the job can catch up.

        After its first steps, a job always waits, less than a period.
        """
        self._is_over = self._is_over or bool(self.until and os.path.exists(self.until))
        if self._is_over:
            return 0
        late_ns = (now_ns - self.start_ns) % self.period_ns
        is_late = step >= _FIRST_STEPS and 2 * late_ns < self.period_ns
        return 0 if is_late or not late_ns else self.period_ns - late_ns


def from_environment(settings: Settings) -> Grid | None:
    """The grid of ``RINGTAP_ITERATION_GRID="START_NS,PERIOD_NS[,FILE]"``; None if there is none, or a wrong one.

    START_NS is a time of CLOCK_REALTIME as it is now; if the clock is set later, the grid stays where it is.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        start, period, *until = text.split(",", 2)
        start_ns, period_ns = int(start), int(period)
        if period_ns < 1:
            raise ValueError(text)
    except ValueError:
        error_log.note(settings, VARIABLE)
        return None
    return Grid(start_ns - (time.time_ns() - time.monotonic_ns()), period_ns, *until)
