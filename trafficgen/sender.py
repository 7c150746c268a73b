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
from ringtap.trafficgen.connections import Pool, SentFlow, SocketOptions
from ringtap.trafficgen.flowlog import FAILED, FINISHED, FLUSH_S, SENT_FIELDS, UNFINISHED, FlowLog
from ringtap.trafficgen.limits import raise_file_limit
from ringtap.trafficgen.planfile import PlanFile
from ringtap.trafficgen.plans import Flow
from ringtap.trafficgen.tally import Tally
from ringtap.trafficgen.timer import Alarm

_OPENED_AHEAD = 16
_CONNECT_PATIENCE_S = 3.0
_MISSED_NS = 1_000_000
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
    """Sends one plan once: ``await Sender(plan, options).run()``."""

    def __init__(self, plan: PlanFile, options: SendOptions) -> None:
        plan.check()
        self.plan = plan
        self.options = options
        self.counts = {"finished": 0, "unfinished": 0, "failed": 0}
        self._due: Iterator[tuple[int, Flow]] = enumerate(plan.flows())
        self._next: SentFlow | None = None
        self._places = {name: index for index, name in enumerate(plan.destinations)}
        self._pools: list[Pool] = []
        self._origin_ns = 0
        self._origin_real_ns = 0
        self._launch_until_ns = 0
        self._bytes = 0
        self._acked_bytes = 0
        self._last_finish_ns = 0
        self._first_failure = ""
        self._lateness, self._completion = Tally(), Tally()
        self._missed = 0
        self._log = FlowLog(None, SENT_FIELDS, {})
        self._stop = asyncio.Event()
        self._stopped_by = ""
        self._error: RingtapError | None = None
        self._alarm: Alarm | None = None
        self._ended_ns = 0
        self._congestion_control = ""

    @property
    def first_failure(self) -> str:
        """Why the first flow that failed did; empty when none has."""
        return self._first_failure

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
            await self._begin()
            await self._launch_all()
            await self._settle()
        finally:
            self._end()
        if self._error is not None:
            raise self._error
        return self._summary()

    def stop(self, why: str) -> None:
        """Launch nothing more and end at once."""
        self._stopped_by = self._stopped_by or why
        self._stop.set()

    def launch_due(self) -> None:
        """Start every flow whose time has come."""
        now_ns = time.monotonic_ns()
        while self._next is not None and self._next.due_ns <= now_ns and not self._stop.is_set():
            flow = self._next
            self._bytes += flow.size_bytes
            self._advance()
            self._pools[flow.destination].carry(flow)

    def finished(self, flow: SentFlow) -> None:
        """Count and log a flow that the receiver has whole."""
        self._last_finish_ns = time.monotonic_ns()
        self._completion.add(self._last_finish_ns - flow.due_ns - flow.lateness_ns)
        self._record(flow, "finished", FINISHED)

    def failed(self, flow: SentFlow, why: str) -> None:
        """Count and log a flow whose connection failed."""
        self._first_failure = self._first_failure or why
        self._record(flow, "failed", FAILED)

    async def _connect(self) -> None:
        options = self.options
        wanted = options.most_connections * len(self.plan.destinations) + 64
        most = min(options.most_connections, (raise_file_limit(wanted) - 64) // len(self.plan.destinations))
        sockets = SocketOptions(options.congestion_control, options.source)
        self._pools = [Pool(name, self, options.token, sockets, max(1, most)) for name in self.plan.destinations]
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

    async def _begin(self) -> None:
        now_ns, real_ns = time.monotonic_ns(), time.time_ns()
        start_at_ns = self.options.start_at_ns
        if start_at_ns is not None and start_at_ns < real_ns:
            ago_s = (real_ns - start_at_ns) / 1e9
            raise UsageError(f"--start-at passed {ago_s:.3f} s before the connections stood: name a later time")
        self._origin_ns = now_ns + _LEAD_NS if start_at_ns is None else now_ns + start_at_ns - real_ns
        self._origin_real_ns = real_ns + self._origin_ns - now_ns
        asked_ns = self.plan.duration_ns
        if self.options.duration_s is not None:
            asked_ns = min(asked_ns, int(self.options.duration_s * 1e9))
        self._launch_until_ns = self._origin_ns + asked_ns
        self._log = FlowLog(self.options.log_path, SENT_FIELDS, self._about())
        self._flush_regularly()
        self._advance()
        self._alarm = Alarm(asyncio.get_running_loop(), self._ring)
        self._ring()

    def _about(self) -> dict[str, Any]:
        names = (pool.congestion_control() for pool in self._pools)
        self._congestion_control = next((name for name in names if name), "")
        about = {"source": "sender", "plan": self.plan.header, "destinations": self.plan.destinations}
        return about | {"congestion_control": self._congestion_control, "origin_ns": self._origin_real_ns}

    def _advance(self) -> None:
        """Take the plan's next flow, unless it lies beyond the end."""
        self._next = None
        try:
            number, flow = next(self._due)
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
                whole = self._launch_until_ns - self._origin_ns >= self.plan.duration_ns
                self._stopped_by = "plan" if whole else "duration"
                return
            await self._wait(max(0.001, left_s))

    async def _settle(self) -> None:
        limit_ns = time.monotonic_ns() + int(self.options.patience_s * 1e9)
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
            self._log.flush()
        except MeasurementError as error:
            self._error = error
            self.stop("log")
        if not self._stop.is_set():
            asyncio.get_running_loop().call_later(FLUSH_S, self._flush_regularly)

    def _end(self) -> None:
        """Account for every flow that was launched and close everything."""
        self._ended_ns = time.monotonic_ns()
        if self._alarm is not None:
            self._alarm.close()
        silent_ns = self._ended_ns - int(self.options.patience_s * 1e9)
        for pool in self._pools:
            outstanding = pool.outstanding()
            pool.close()
            old = [flow for flow in outstanding if flow.due_ns <= silent_ns]
            silent = max((pool.last_notice_ns, *(flow.moved_ns for flow in old))) <= silent_ns
            for flow in outstanding:
                if silent and flow.due_ns <= silent_ns:
                    self.failed(flow, f"{pool.name}: it has gone silent")
                else:
                    self._record(flow, "unfinished", UNFINISHED)
        self._log.close()

    def _record(self, flow: SentFlow, state: str, code: int) -> None:
        self.counts[state] += 1
        self._acked_bytes += flow.acked_bytes
        if flow.start_ns:
            self._lateness.add(flow.lateness_ns)
            self._missed += flow.lateness_ns > _MISSED_NS
        intended_ns = self._origin_real_ns + flow.due_ns - self._origin_ns
        times = (intended_ns, flow.start_ns, flow.finish_ns, flow.received_ns, flow.lateness_ns)
        volumes = (flow.size_bytes, flow.sent_bytes, flow.acked_bytes)
        self._log.add(flow.number, *times, *volumes, code, flow.destination)

    def _summary(self) -> dict[str, Any]:
        launched_s = (min(self._ended_ns, self._launch_until_ns) - self._origin_ns) / 1e9
        elapsed_s = max(launched_s, (self._last_finish_ns - self._origin_ns) / 1e9)
        summary: dict[str, Any] = {"flows": sum(self.counts.values()), **self.counts}
        summary |= {"bytes": self._bytes, "acked_bytes": self._acked_bytes, "duration_s": max(0.0, launched_s)}
        summary |= {"offered_bps": _rate(self._bytes, launched_s), "achieved_bps": _rate(self._acked_bytes, elapsed_s)}
        for name, tally, shares, unit, divisor in (
            ("fct", self._completion, (0.5, 0.99), "s", 1e9),
            ("lateness", self._lateness, (0.5, 0.99), "us", 1e3),
        ):
            summary[f"{name}_mean_{unit}"] = _over(tally.mean(), divisor)
            for share in shares:
                summary[f"{name}_p{share * 100:.0f}_{unit}"] = _over(tally.quantile(share), divisor)
        summary |= {"lateness_max_us": self._lateness.greatest / 1e3, "missed_slots": self._missed}
        summary |= {"connections": sum(pool.opened for pool in self._pools), "stopped_by": self._stopped_by}
        return summary | {"congestion_control": self._congestion_control}


def _rate(size_bytes: int, seconds: float) -> float:
    return size_bytes * 8 / seconds if seconds > 0 else 0.0


def _over(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor
