"""Finds the diagnosis of a running job again and again, as often as a small share of a processor allows."""

from __future__ import annotations

import time

from ringtap.analysis.live.follow_run import RunFollower
from ringtap.analysis.live.snapshot import Diagnosis
from ringtap.core import installation

_SHARE = 0.05  # of a processor


class RepeatedDiagnosis:
    """The newest diagnosis of a run.

    Args:
        follower: the run, which somebody else polls.
    """

    def __init__(self, follower: RunFollower) -> None:
        self._follower = follower
        self._latest = Diagnosis()
        self._due_s = 0.0

    def look(self) -> Diagnosis:
        """Return the diagnosis of the last iterations, or the one before if the next is not due."""
        files = [file for file in self._follower.ranks if file.counts]
        newest = max((file.generation for file in files), default=0)
        files = [file for file in files if file.generation == newest]
        if not files or not all(file.ends for file in files) or time.monotonic() < self._due_s:
            return self._latest
        try:
            from ringtap.analysis.live.diagnose_recent import diagnose
        except ImportError as error:
            missing = installation.missing(error)
            if missing is None:
                raise
            self._due_s = float("inf")
            self._latest = Diagnosis((f"Why an iteration takes this long cannot be told: {missing}.",))
            return self._latest
        begin_s = time.thread_time()
        self._latest = diagnose(self._follower, files)
        self._due_s = time.monotonic() + (time.thread_time() - begin_s) / _SHARE
        return self._latest
