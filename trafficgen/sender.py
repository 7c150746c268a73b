"""The sender: walks a flow plan on an absolute schedule and logs what became of every flow."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringtap.errors import MeasurementError, RingtapError, UsageError
from ringtap.trafficgen.connections import Pool, SentFlow
from ringtap.trafficgen.flowlog import FLUSH_S, SENT_FIELDS, FlowLog
from ringtap.trafficgen.limits import raise_file_limit
from ringtap.trafficgen.outcome import Outcome
from ringtap.trafficgen.planfile import PlanFile
from ringtap.trafficgen.plans import Flow
from ringtap.trafficgen.sockets import SocketOptions
from ringtap.trafficgen.timer import Alarm

_OPENED_AHEAD = 64
_CONNECT_PATIENCE_S = 3.0
_LEAST_SILENCE_S = 0.5  # a congested link is silent for a round trip or two, and that is no failure
_LEAD_NS = 2_000_000  # from having connected to the launch, so that the first flows are not late


@dataclass(frozen=True)
class SendOptions:
    """How a plan is sent.

    Attributes:
        log_path: per-flow record file to create, or None.
        duration_s: stop launching then; None: at the plan's end.
        token: the receivers' token.
        congestion_control: TCP_CONGESTION of every connection; None: the kernel's choice.
        source: source address of every connection; None: the routes' choice.
        start_at_ns: CLOCK_REALTIME of the launch; None: as soon as connected.
        patience_s: how long to wait for outstanding flows after the last launch, and how long a destination with
            flows outstanding may be silent before they count as failed.
        most_connections: connections to each destination.
    """

    log_path: Path | None = None
    duration_s: float | None = None
    token: str = ""
    congestion_control: str | None = None
    source: str | None = None
    start_at_ns: int | None = None
    patience_s: float = 5.0
    most_connections: int = 1024


class Sender:
    """Sends one plan once: ``await Sender(plan, options).run()``.

    Attributes:
        outcome: what became of the flows so far.

    Raises:
        UsageError: a line of the plan is wrong.
    """

    def __init__(self, plan: PlanFile, options: SendOptions) -> None:
        plan.check()
        self.outcome = Outcome(FlowLog(None, SENT_FIELDS, {}), 0, 0)
        self._plan = plan
        self._options = options
        self._flows: Iterator[tuple[int, Flow]] = enumerate(plan.flows())
        self._next: SentFlow | None = None
        self._places = {name: index for index, name in enumerate(plan.destinations)}
        self._pools: list[Pool] = []
        self._alarm: Alarm | None = None
        self._origin_ns = 0
        self._launch_until_ns = 0
        self._ended_ns = 0
        self._congestion_control = ""
        self._stop = asyncio.Event()
        self._stopped_by = ""
        self._error: RingtapError | None = None

    async def run(self) -> dict[str, Any]:
        """Connect, launch, wait for what is outstanding; returns the summary.

        Raises:
            UsageError: an address, the congestion control or the log cannot be used.
            MeasurementError: no receiver answered, or the log could not be written to its end.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop, number.name)
        try:
            await self._connect()
            self._begin()
            await self._launch_all()
            await self._settle()
        finally:
            self._end()
        if self._error is not None:
            raise self._error
        launched_s = max(0.0, (min(self._ended_ns, self._launch_until_ns) - self._origin_ns) / 1e9)
        summary = self.outcome.summary(launched_s) | {"connections": sum(pool.opened for pool in self._pools)}
        return summary | {"congestion_control": self._congestion_control, "stopped_by": self._stopped_by}

    def stop(self, why: str) -> None:
        """Launch nothing more and end at once."""
        self._stopped_by = self._stopped_by or why
        self._stop.set()

    def launch_due(self) -> None:
        """Start every flow whose time has come."""
        now_ns = time.monotonic_ns()
        while self._next is not None and self._next.due_ns <= now_ns and not self._stop.is_set():
            flow = self._next
            self.outcome.launched_bytes += flow.size_bytes
            self._advance()
            self._pools[flow.destination].carry(flow)

    def finished(self, flow: SentFlow) -> None:
        """A pool says that the receiver has all of a flow."""
        self.outcome.finished(flow)

    def failed(self, flow: SentFlow, why: str) -> None:
        """A pool says that a flow's connection failed."""
        self.outcome.failed(flow, why)

    async def _connect(self) -> None:
        options, count = self._options, len(self._plan.destinations)
        files = raise_file_limit(options.most_connections * count + 64)
        most = max(1, min(options.most_connections, (files - 64) // count))
        sockets = SocketOptions(options.congestion_control, options.source)
        self._pools = [Pool(name, self, options.token, sockets, most) for name in self._plan.destinations]
        for pool in self._pools:
            pool.probe()
            pool.open_ahead(_OPENED_AHEAD)
        limit_ns = time.monotonic_ns() + int(_CONNECT_PATIENCE_S * 1e9)
        while any(pool.connecting() for pool in self._pools) and time.monotonic_ns() < limit_ns:
            if self._stop.is_set():
                return
            await asyncio.sleep(0.002)
        deaf = [f"{pool.name} ({pool.why or 'no answer'})" for pool in self._pools if not pool.last_notice_ns]
        if len(deaf) == len(self._pools):
            raise MeasurementError(
                f"no receiver answers at {', '.join(deaf)}: start 'ringtap traffic serve --bind HOST:PORT' there first"
            )
        for words in deaf:
            print(f"warning: no receiver answers at {words}; its flows will fail", file=sys.stderr)

    def _begin(self) -> None:
        """Fix the origin of all times and arm the alarm for the first flow."""
        now_ns, real_ns = time.monotonic_ns(), time.time_ns()
        start_at_ns = self._options.start_at_ns
        if start_at_ns is not None and start_at_ns < real_ns:
            ago_s = (real_ns - start_at_ns) / 1e9
            raise UsageError(f"--start-at passed {ago_s:.3f} s before the connections stood: name a later time")
        self._origin_ns = now_ns + (_LEAD_NS if start_at_ns is None else start_at_ns - real_ns)
        origin_real_ns = real_ns + self._origin_ns - now_ns
        asked_ns = self._plan.duration_ns
        if self._options.duration_s is not None:
            asked_ns = min(asked_ns, int(self._options.duration_s * 1e9))
        self._launch_until_ns = self._origin_ns + asked_ns
        log = FlowLog(self._options.log_path, SENT_FIELDS, self._about(origin_real_ns))
        self.outcome = Outcome(log, self._origin_ns, origin_real_ns)
        self._flush_regularly()
        if sys.stderr.isatty():
            self._show_progress()
        self._advance()
        self._alarm = Alarm(asyncio.get_running_loop(), self._ring)
        self._ring()

    def _about(self, origin_real_ns: int) -> dict[str, Any]:
        names = (pool.congestion_control() for pool in self._pools)
        self._congestion_control = next((name for name in names if name), "")
        about = {"source": "sender", "plan": self._plan.header, "destinations": self._plan.destinations}
        return about | {"congestion_control": self._congestion_control, "origin_ns": origin_real_ns}

    def _advance(self) -> None:
        """Take the plan's next flow, unless it lies beyond the end."""
        self._next = None
        try:
            number, flow = next(self._flows)
        except StopIteration:
            return
        except RingtapError as error:  # the file was changed after it was checked
            self._error = error
            self.stop("plan")
            return
        due_ns = self._origin_ns + flow.start_ns
        if due_ns < self._launch_until_ns:
            self._next = SentFlow(number, self._places[flow.destination], flow.size_bytes, due_ns)

    def _ring(self) -> None:
        self.launch_due()
        if self._alarm is not None and self._next is not None and not self._stop.is_set():
            self._alarm.set(self._next.due_ns)

    async def _launch_all(self) -> None:
        while not self._stop.is_set():
            left_s = (self._launch_until_ns - time.monotonic_ns()) / 1e9
            if left_s <= 0 and self._next is None:
                whole = self._launch_until_ns - self._origin_ns >= self._plan.duration_ns
                self._stopped_by = "plan" if whole else "duration"
                return
            await self._wait(max(0.001, left_s))

    async def _settle(self) -> None:
        """Wait for the outstanding flows, as long as patience lasts."""
        limit_ns = time.monotonic_ns() + int(self._options.patience_s * 1e9)
        while any(pool.outstanding() for pool in self._pools) and time.monotonic_ns() < limit_ns:
            if self._stop.is_set():
                return
            await self._wait(0.01)

    async def _wait(self, seconds: float) -> None:
        waiter = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({waiter}, timeout=seconds)
        waiter.cancel()

    def _flush_regularly(self) -> None:
        try:
            self.outcome.log.flush()
        except MeasurementError as error:
            self._error = error
            self.stop("log")
        if not self._stop.is_set():
            asyncio.get_running_loop().call_later(FLUSH_S, self._flush_regularly)

    def _show_progress(self) -> None:
        outstanding = sum(len(pool.outstanding()) for pool in self._pools)
        print(
            f"\r{sum(self.outcome.counts.values())} flows ended, {outstanding} on their way ", end="", file=sys.stderr
        )
        if not self._stop.is_set():
            asyncio.get_running_loop().call_later(1.0, self._show_progress)

    def _end(self) -> None:
        """Account for every flow that was launched and close everything."""
        self._ended_ns = time.monotonic_ns()
        if self._alarm is not None:
            self._alarm.close()
            if sys.stderr.isatty():
                print(file=sys.stderr)
        silent_ns = self._ended_ns - int(max(_LEAST_SILENCE_S, self._options.patience_s) * 1e9)
        for pool in self._pools:
            outstanding = pool.outstanding()
            pool.close()
            old = [flow for flow in outstanding if flow.due_ns <= silent_ns]
            silent = max((pool.last_notice_ns, *(flow.moved_ns for flow in old))) <= silent_ns
            for flow in outstanding:
                if silent and flow.due_ns <= silent_ns:
                    self.outcome.failed(flow, f"{pool.name}: it has gone silent")
                else:
                    self.outcome.unfinished(flow)
        self.outcome.log.close()
