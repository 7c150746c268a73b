"""The sampling threads: every collector on an absolute schedule of its own, and none harmed by another's failure."""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ringtap.collectors.base import Collector
from ringtap.errors import words_of


class Entry:
    """One collector with its state; ``facts`` is its entry in node.json.

    Args:
        name: the collector's name.
        collector: the collector.
        say: writes to the agent's log.
    """

    def __init__(self, name: str, collector: Collector, say: Callable[[str], None]) -> None:
        self.name, self._collector, self._say = name, collector, say
        self.slow = bool(collector.slow)
        self.facts: dict[str, Any] = {"state": "starting", "reason": "", "remedy": ""}
        self.running = False
        self.due_s = self.every_s = 0.0
        self._samples = self._missed = 0

    def begin(self) -> None:
        """Check and start it."""
        try:
            check = self._collector.check()
            self.facts = {"state": check.state, "reason": check.reason, "remedy": check.remedy}
            if check.state == "unavailable":
                return
            self._collector.start()
        except Exception as error:
            self._fail("could not be started", error)
            return
        self.every_s = float(self._collector.every_s)
        self.facts |= {"every_s": self.every_s, "missed_samples": 0}
        self.running = True

    def sample(self) -> bool:
        """Take the sample that is due; returns whether there will be a next one."""
        try:
            self._collector.sample()
        except Exception as error:
            self._fail("stopped early", error)
            with contextlib.suppress(Exception):
                self.facts |= self._collector.stop()
            return False
        self._samples += 1
        self.due_s += self.every_s
        late = int((time.monotonic() - self.due_s) / self.every_s)
        if late > 0:  # a slot that has passed is counted, not made up for
            self._missed += late
            self.facts["missed_samples"] = self._missed
            self.due_s += late * self.every_s
        return True

    def end(self) -> None:
        """Take the last sample and close the logs."""
        if not self.running:
            return
        try:
            self.facts |= self._collector.stop()
        except Exception as error:
            self._fail("could not be ended in order", error)
        self.facts |= {"samples": self._samples, "missed_samples": self._missed}
        self.running = False

    def _fail(self, what: str, error: Exception) -> None:
        self.running = False
        words = words_of(error) if isinstance(error, OSError) else str(error) or type(error).__name__
        self.facts |= {"state": "failed", "reason": f"{what}: {words}", "failed_ns": time.time_ns()}
        if not isinstance(error, OSError):
            words = "".join(traceback.format_exception(error)).rstrip()
        self._say(f"the {self.name} collector {what}: {words}")


class Sampler(threading.Thread):
    """Runs some collectors, in their order, until told to stop.

    Args:
        name: of the thread.
        entries: the collectors.

    Attributes:
        ready: set when every collector has taken its first sample, or has failed to.
    """

    def __init__(self, name: str, entries: list[Entry]) -> None:
        super().__init__(name=name, daemon=True)
        self._entries = entries
        self._gate = threading.Lock()  # waited for with a timeout: a third of what an Event costs a wait
        self._gate.acquire()
        self.ready = threading.Event()

    def run(self) -> None:
        """Begin, sample, end."""
        try:
            for entry in self._entries:
                entry.begin()
            self.ready.set()
            self._keep_sampling()
            for entry in self._entries:
                entry.end()
        finally:
            self.ready.set()

    def stop(self) -> None:
        """Have it end; `join` waits for that."""
        self._gate.release()

    def _keep_sampling(self) -> None:
        begin_s = time.monotonic()
        queue = []
        for number, entry in enumerate(self._entries):
            if entry.running:
                entry.due_s = begin_s + entry.every_s
                queue.append((entry.due_s, number, entry))
        heapq.heapify(queue)
        while queue:
            due_s, number, entry = queue[0]
            if self._gate.acquire(timeout=max(0.0, due_s - time.monotonic())):
                return
            if entry.sample():
                heapq.heapreplace(queue, (entry.due_s, number, entry))
            else:
                heapq.heappop(queue)
        self._gate.acquire()  # none is left
