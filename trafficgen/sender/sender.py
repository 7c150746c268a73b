"""The sender: starts launcher and workers, gives the command to launch, and adds up the flow statistics."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from ringtap.errors import MeasurementError, UsageError
from ringtap.terminal import unguarded
from ringtap.trafficgen.flow_log import SENT_FIELDS, FlowLog
from ringtap.trafficgen.plans.plan_file import PlanFile
from ringtap.trafficgen.processes import WorkerProcesses
from ringtap.trafficgen.sender import ipc
from ringtap.trafficgen.sender.completions import Listener
from ringtap.trafficgen.sender.ipc import Channel, SharedSlots
from ringtap.trafficgen.sender.launcher import Done, Go, Launcher, Ready
from ringtap.trafficgen.sender.options import SendOptions
from ringtap.trafficgen.sender.pool import Carrying, Route
from ringtap.trafficgen.sender.preparation import SendPlan
from ringtap.trafficgen.sender.schedule import Schedule
from ringtap.trafficgen.sender.worker import Report, SenderWorker
from ringtap.trafficgen.statistics import FlowStatistics

_LEAD_NS = 5_000_000  # from the command to the launch, so that the launcher has it by then
_START_AHEAD_NS = 1_000_000_000  # from the command to an absolute start: short, because the clock may step before it
_LAST_WORDS_S = 10.0
_PROGRESS_S = 1.0


class WorkerLink(NamedTuple):
    """The link between a sender worker and the launcher: two channel ends and the shared slots."""

    launchers: Any
    workers: Any
    slots: SharedSlots


class Sender:
    """The sender of one plan, used once: ``Sender(plan, options).run()``.

    Attributes:
        first_failure: reason of the first failed flow, empty if none failed.
        load_bps: payload rate of the plan, mean over its length.
        flows_per_s: flows that the plan starts per second, mean over its length.

    Raises:
        UsageError: the plan is wrong or this host cannot send it; nothing has been sent.
    """

    def __init__(self, plan: PlanFile, options: SendOptions) -> None:
        self.first_failure = ""
        self._plan, self._options = plan, options
        self._what = SendPlan(plan, options)
        length_s = plan.duration_ns / 1e9
        self.load_bps = self._what.needs.bytes * 8 / length_s if length_s else 0.0
        self.flows_per_s = self._what.needs.flows / length_s if length_s else 0.0
        self._crew = WorkerProcesses()
        self._arrivals: Listener | None = None
        self._launcher: Connection | None = None
        self._in_force: dict[str, object] = {}
        self._error = ""
        self._stopped = False

    def run(self) -> dict[str, Any]:
        """Connect, launch, wait for outstanding flows; return the summary.

        Raises:
            UsageError: the log cannot be created, or ``start_at_ns`` has passed.
            MeasurementError: no receiver answered, a process of the sender died, or the log could not be written.
        """
        if self._options.arrivals is not None:
            self._arrivals = Listener(self._options.arrivals)
        try:
            with self._crew:
                self._what.probe()
                self._fork()
                go = self._give_word()
                done, outcome = self._await_end(go)
        finally:
            if self._arrivals is not None:
                self._arrivals.close()
        error = self._error or done.error
        if error:
            raise MeasurementError(error)
        return self._sum_up(go, done, outcome)

    def _fork(self) -> None:
        options, what = self._options, self._what
        lines = [
            WorkerLink(*ipc.pair(), SharedSlots(what.most_per_worker)) for _ in range(options.workers * options.threads)
        ]
        ends = [end for line in lines for end in line[:2]]
        for first in range(0, len(lines), options.threads):
            mine = lines[first : first + options.threads]
            kept = [line.workers for line in mine]
            foreign = [end for end in ends if end not in kept]
            self._crew.start(partial(_carry, what, mine), foreign)
        kept = [line.launchers for line in lines]
        foreign = [end for end in ends if end not in kept]
        self._launcher = self._crew.start(partial(_launch, what, lines, self._arrivals), foreign)
        for end in ends:
            end.close()

    def _give_word(self) -> Go | None:
        """Wait for connections, set the origin of all times, create the log and give the command to the launcher."""
        ready = self._hear(None)
        if not isinstance(ready, Ready):
            return None
        self._in_force = ready.in_force
        self._see_deaf(self._what.deaf | ready.deaf)
        start_at_ns = self._options.start_at_ns
        if start_at_ns is not None:
            while (left_ns := start_at_ns - time.time_ns()) > _START_AHEAD_NS:
                self._hear(min(1.0, (left_ns - _START_AHEAD_NS) / 1e9))
                if self._stopped:
                    return None
            if left_ns < 0:
                raise UsageError(f"--start-at passed {-left_ns / 1e9:.3f} s before all was ready: name a later time")
        now_ns, real_ns = _clocks()
        lead_ns = _LEAD_NS if start_at_ns is None else start_at_ns - real_ns
        go = Go(now_ns + lead_ns, real_ns + lead_ns, now_ns + lead_ns + self._what.duration_ns)
        FlowLog(self._options.log_path, SENT_FIELDS, self._about(go)).close()
        self._tell(go)
        return go

    def _see_deaf(self, deaf: dict[str, str]) -> None:
        words = [f"{name} ({why})" for name, why in deaf.items()]
        if len(deaf) == len({place.name for place in self._what.places}):
            raise MeasurementError(
                f"no receiver answers at {', '.join(words)}: start 'ringtap traffic serve --bind HOST:PORT' there first"
            )
        for word in words:
            print(f"warning: no receiver answers at {word}; its flows will fail", file=sys.stderr)

    def _about(self, go: Go) -> dict[str, Any]:
        plan = self._plan
        about = {"source": "sender", "sender": self._what.sender, "plan": plan.header, "sources": list(plan.sources)}
        about |= {"destinations": list(plan.destinations), "transport": self._in_force}
        return about | {"origin_ns": go.origin_real_ns, "origin_monotonic_ns": go.origin_ns}

    def _await_end(self, go: Go | None) -> tuple[Done, FlowStatistics]:
        done: Done | None = None
        reports: list[Report] = []
        workers = self._options.workers * self._options.threads
        silent_s = 0.0
        while done is None or len(reports) < workers:
            word = self._hear(_PROGRESS_S)
            silent_s = 0.0 if word is not None else silent_s + _PROGRESS_S
            if isinstance(word, Done):
                done = word
            elif isinstance(word, Report):
                reports.append(word)
                if word.error:
                    self._error = self._error or word.error
                    self._stop()
            elif (self._stopped or done is not None) and silent_s > _LAST_WORDS_S:
                raise MeasurementError("the sender's processes do not end; its log may lack the last flows")
            elif go is not None and done is None:
                self._show_progress(go)
        outcome = done.outcome
        for report in reports:
            outcome.merge(report.outcome)
        return done, outcome

    def _hear(self, longest_s: float | None) -> Any:
        word = self._crew.listen(longest_s)
        if word is None and self._crew.signalled:
            self._stop()
        return word

    def _stop(self) -> None:
        """Tell the launcher to launch nothing more and to end at once."""
        if not self._stopped:
            self._stopped = True
            self._tell(None)

    def _tell(self, word: Go | None) -> None:
        assert self._launcher is not None
        try:
            self._launcher.send(word)
        except OSError:
            self._error = self._error or "the launcher is gone; its log may lack the last flows"

    def _show_progress(self, go: Go) -> None:
        if sys.stderr.isatty():
            passed_s = max(0.0, (time.monotonic_ns() - go.origin_ns) / 1e9)
            print(
                f"\r{passed_s:.0f} of {self._what.duration_ns / 1e9:.0f} s ",
                end="",
                file=unguarded(sys.stderr),
                flush=True,
            )

    def _sum_up(self, go: Go | None, done: Done, outcome: FlowStatistics) -> dict[str, Any]:
        self.first_failure = outcome.first_failure
        origin_ns = 0 if go is None else go.origin_ns
        launched_s = 0.0 if go is None else max(0.0, (done.ended_ns - origin_ns) / 1e9)
        # Step of CLOCK_REALTIME relative to CLOCK_MONOTONIC, which times everything here
        now_ns, real_ns = _clocks()
        step_ns = 0 if go is None else real_ns - now_ns - go.origin_real_ns + go.origin_ns
        stopped_by = self._crew.signalled or ("duration" if self._what.duration_ns < self._plan.duration_ns else "plan")
        options = self._options
        summary = outcome.summary(origin_ns, launched_s) | {"stopped_by": stopped_by, "clock_step_s": step_ns / 1e9}
        summary |= {"workers": options.workers, "threads": options.threads, "method": options.method}
        return summary | {
            "connection_use": options.connections,
            "real_time_launcher": done.real_time,
            "transport": self._in_force,
        }


def _leave_alone(cpu: int | None) -> None:
    """Run on other processors than the launcher's, if there are any."""
    others = os.sched_getaffinity(0) - {cpu}
    if cpu is not None and others:
        os.sched_setaffinity(0, others)


def _clocks() -> tuple[int, int]:
    """Read CLOCK_MONOTONIC and CLOCK_REALTIME of the same moment: the closest of several readings."""
    readings = []
    for _ in range(16):
        before_ns, real_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after_ns - before_ns, (before_ns + after_ns) // 2, real_ns))
    return min(readings)[1:]


def _launch(what: SendPlan, lines: Sequence[WorkerLink], arrivals: Listener | None, control: Connection) -> None:
    workers = [Carrying(Channel(line.launchers), line.slots) for line in lines]
    routes = {}
    new = what.options.connections == "new"
    for index, (pair, place) in enumerate(zip(what.pairs, what.places, strict=True)):
        route = Route(index, place.source_index, place.destination_index, place.name, workers, what.most[index], new)
        route.address = place.address
        routes[pair] = route
    schedule = Schedule(what.plan, what.needs, what.options.only_source)
    outcome = FlowStatistics(what.options.line_rate_bps)
    ahead = dict(zip(what.pairs, what.ahead, strict=True))
    Launcher(schedule, routes, workers, what.options, control, outcome, ahead, arrivals).run()


def _carry(what: SendPlan, lines: Sequence[WorkerLink], control: Connection) -> None:
    """Run the sender workers of one process, one per thread."""
    lock = threading.Lock()

    def work(line: WorkerLink) -> None:
        worker = SenderWorker(
            Channel(line.workers),
            line.slots,
            what.places,
            what.options,
            what.transport,
            what.hello,
            FlowStatistics(what.options.line_rate_bps),
            what.most_per_worker,
        )
        asyncio.run(worker.run(control, lock))

    _leave_alone(what.options.launcher_cpu)
    gc.freeze()
    threads = [threading.Thread(target=work, args=(line,)) for line in lines[1:]]
    for thread in threads:
        thread.start()
    work(lines[0])
    for thread in threads:
        thread.join()
