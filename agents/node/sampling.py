"""Runs the recorders of a node: the clock, and collectors on sampling threads, each on its own absolute schedule."""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ringtap.agents.node.recording_settings import RunSettings
from ringtap.collectors.collector_interface import Collector, Context
from ringtap.collectors.registry import ORDER, collector_class
from ringtap.core.errors import error_message
from ringtap.core.run_directory import RunDirectory
from ringtap.core.units import parse_duration_s


class Entry:
    """A collector with its state; ``facts`` is its entry in node.json.

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
        """Check and start the collector."""
        try:
            check = self._collector.check()
            self.facts = {"state": check.state, "reason": check.reason, "remedy": check.remedy}
            if check.state == "unavailable":
                return
            self._collector.start()
        except (Exception, SystemExit) as error:
            self._fail("could not be started", error)
            return
        self.every_s = float(self._collector.every_s)
        self.facts |= {"every_s": self.every_s, "missed_samples": 0}
        self.running = True

    def sample(self) -> bool:
        """Take the sample that is due; returns False if the collector failed and takes no more."""
        try:
            self._collector.sample()
        except (Exception, SystemExit) as error:
            self._fail("stopped early", error)
            with contextlib.suppress(Exception, SystemExit):
                self.facts |= self._collector.stop()
            return False
        self._samples += 1
        self.due_s += self.every_s
        late = int((time.monotonic() - self.due_s) / self.every_s)
        if late > 0:  # samples that are overdue are counted, not taken later
            self._missed += late
            self.facts["missed_samples"] = self._missed
            self.due_s += late * self.every_s
        return True

    def end(self) -> None:
        """Take the last sample and close the collector's logs."""
        if not self.running:
            return
        try:
            self.facts |= self._collector.stop()
        except (Exception, SystemExit) as error:
            self._fail("could not be ended in order", error)
        self.facts |= {"samples": self._samples, "missed_samples": self._missed}
        self.running = False

    def _fail(self, what: str, error: Exception | SystemExit) -> None:
        self.running = False
        text = error_message(error) if isinstance(error, OSError) else str(error) or type(error).__name__
        text = f"it ended with exit code {error}" if isinstance(error, SystemExit) else text
        self.facts |= {"state": "failed", "reason": f"{what}: {text}", "failed_ns": time.time_ns()}
        if not isinstance(error, OSError):
            text = "".join(traceback.format_exception(error)).rstrip()
        self._say(f"the {self.name} collector {what}: {text}")


class Sampler(threading.Thread):
    """A thread that runs collectors until `stop`.

    Args:
        name: the thread's name.
        entries: the collectors.

    Attributes:
        ready: set when every collector has taken its first sample, or has failed to.
    """

    def __init__(self, name: str, entries: list[Entry]) -> None:
        super().__init__(name=name, daemon=True)
        self._entries = entries
        self._gate = threading.Lock()  # a wait with a timeout costs a third of one for an Event
        self._gate.acquire()
        self.ready = threading.Event()

    def run(self) -> None:
        """Start the collectors, sample them until `stop`, and end them."""
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
        """Ask the thread to end; `join` waits for its end."""
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
        self._gate.acquire()  # no collector is left: wait for `stop`


_STOP_S = 10.0


class Recorders:
    """The collectors that a run asks for, and the clock service.

    Args:
        run: the run directory.
        node: this node's name in it.
        settings: what to record.
        pids: returns the recorded processes.
        say: writes to the agent's log.

    Attributes:
        are_stopped: True after `stop`.
    """

    def __init__(
        self,
        run: RunDirectory,
        node: str,
        settings: RunSettings,
        pids: Callable[[], list[int]],
        say: Callable[[str], None],
    ) -> None:
        self._run, self._node, self._settings, self._pids, self._say = run, node, settings, pids, say
        self._entries: list[Entry] = []
        self._added: list[Entry] = []  # of plug-ins
        self._missing: dict[str, dict[str, Any]] = {}
        self._given: dict[str, str] = {}  # by the collector's name, the one that --collect gave
        self._threads: list[Sampler] = []
        self._added_threads: list[Sampler] = []
        self._clock: Any = None
        self._clock_facts: dict[str, Any] = {}
        self.are_stopped = False

    def start(self) -> None:
        """Start the threads; returns before the first samples are taken."""
        folder = self._run.path / "nodes" / self._node
        for name in self._settings.collectors:
            options = self._settings.options.get(name, {})
            try:
                every_s = parse_duration_s(options["every"]) if "every" in options else self._settings.every_s
                context = Context(folder, every_s, self._pids, options, self._settings.disk_limit_bytes)
                collector = collector_class(name)(context)
                (self._entries if name in ORDER else self._added).append(Entry(collector.name, collector, self._say))
                self._given[collector.name] = name
            except ImportError as error:
                reason = f"a package is missing: {error.name or error}"
                self._missing[name] = {"state": "unavailable", "reason": reason, "remedy": f"install {error.name}"}
            except (Exception, SystemExit) as error:
                why = error_message(error) if isinstance(error, Exception) else f"it ended with exit code {error}"
                self._missing[name] = {"state": "failed", "reason": f"could not be made: {why}", "remedy": ""}
                self._say(f"the {name} collector could not be made: {traceback.format_exc()}")
        for label, slow in (("fast", False), ("slow", True)):
            entries = [entry for entry in self._entries if entry.slow is slow]
            if entries:
                self._threads.append(Sampler(label, entries))
        # a plug-in that blocks delays neither ringtap's collectors nor another plug-in
        self._added_threads = [Sampler(entry.name, [entry]) for entry in self._added]
        for thread in (*self._threads, *self._added_threads):
            thread.start()
        # the hosts of a testbed share one clock, and pings would use its links
        if self._settings.collectors and not self._run.info.get("one_clock"):
            threading.Thread(target=self._start_clock, name="clock-start", daemon=True).start()

    def _start_clock(self) -> None:
        try:
            from ringtap.agents.clock.measure_clock_offset import ClockService

            self._clock = ClockService(self._run, self._node, say=self._say)
            self._clock.start()
        except Exception as error:
            self._clock = None
            self._note_clock_failure(f"not compared: {error_message(error)}")

    def are_ready(self) -> bool:
        """True if every collector of ringtap's own has taken its first sample or has failed to."""
        return all(thread.ready.is_set() for thread in self._threads)

    def facts(self) -> dict[str, dict[str, Any]]:
        """The collectors' entries for node.json."""
        found = self._missing | {
            entry.name: entry.facts | ({} if (given := self._given[entry.name]) == entry.name else {"class": given})
            for entry in (*self._entries, *self._added)
        }
        order = [name for name in self._settings.collectors if name in found]
        entries = {name: found[name] for name in dict.fromkeys((*order, *found))}
        return entries | ({"clock": self._clock_facts} if self._clock_facts else {})

    def stop(self, early: str = "") -> None:
        """Take the last samples and close the logs, within 10 s.

        Args:
            early: reason if the recording ends before its time; each collector's entry then has it.
        """
        self.are_stopped = True
        recording = [entry for entry in (*self._entries, *self._added) if entry.running and early]
        for sampler in (*self._threads, *self._added_threads):
            sampler.stop()
        stopper = threading.Thread(target=self._stop_clock, daemon=True)
        stopper.start()
        deadline = time.monotonic() + _STOP_S
        threads: list[threading.Thread] = [*self._threads, stopper, *self._added_threads]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for entry in (*self._entries, *self._added):
            if entry.running:
                entry.facts |= {"state": "failed", "reason": f"did not end within {_STOP_S:g} s"}
        for entry in recording:
            entry.facts |= {"state": "failed", "reason": f"stopped early: {early}", "failed_ns": time.time_ns()}
        if recording:
            self._say(f"the collectors stop: {early}")

    def _stop_clock(self) -> None:
        if self._clock is None:
            return
        try:
            self._clock_facts = self._clock.stop()
        except Exception as error:
            self._note_clock_failure(f"not compared to the end: {error_message(error)}")

    def _note_clock_failure(self, why: str) -> None:
        self._clock_facts = {"state": "degraded", "reason": why, "remedy": ""}
        self._say(f"the clock is {why}")
