"""Takes a snapshot of a run once a second, beside the program that shows it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from ringtap.analysis.live.snapshot import Snapshot
from ringtap.core.errors import RingtapError

EVERY_S = 1.0


class Poller(threading.Thread):
    """Thread that takes a snapshot every second, so that a slow file system never delays a key.

    Attributes:
        latest: the newest snapshot.
        error: error that ended the polling; None if there was none.
    """

    def __init__(self, take: Callable[[], Snapshot], every_s: float = EVERY_S) -> None:
        super().__init__(name="live", daemon=True)  # a hung file system must not delay the exit
        self.latest: Snapshot | None = None
        self.error: BaseException | None = None
        self._take, self._every_s, self._end = take, every_s, threading.Event()

    def run(self) -> None:
        """Take snapshots until `finish` is called."""
        due_s = time.monotonic()
        try:
            while not self._end.wait(max(0.0, due_s - time.monotonic())):
                self.latest = self._take()
                due_s = max(due_s + self._every_s, time.monotonic() + self._every_s / 2)
        except Exception as error:  # for `finish`, once the terminal is restored
            self.error = error

    def finish(self) -> Snapshot | None:
        """Stop after the current snapshot, and print the error of a run that cannot be read any more.

        Returns:
            The last snapshot; None if none was taken.

        Raises:
            Exception: polling ended in an error other than RingtapError and OSError.
        """
        self._end.set()
        if self.error is not None:
            if not isinstance(self.error, (RingtapError, OSError)):
                raise self.error
            print(f"ringtap: the view ended: {self.error}", file=sys.stderr)
        return self.latest
