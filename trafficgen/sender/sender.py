"""Runs the sender: starts launcher and workers, commands the launch, and merges the flow statistics."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.flow_plan_file import PlanFile
from ringtap.core.sent_flow_log import FIELDS as SENT_FIELDS
from ringtap.trafficgen import protocol
from ringtap.trafficgen.flow_log import FlowLog
from ringtap.trafficgen.outgoing_sockets import Transport, outgoing_socket
from ringtap.trafficgen.plans.sending_requirements import requirements
from ringtap.trafficgen.sender import ipc
from ringtap.trafficgen.sender.completion_notices import Listener
from ringtap.trafficgen.sender.connection_pool import WorkerHandle
from ringtap.trafficgen.sender.flow_launcher import Done, Go, Launcher, Ready
from ringtap.trafficgen.sender.ipc import Channel, SharedSlots
from ringtap.trafficgen.sender.options import SendOptions
from ringtap.trafficgen.sender.worker import Destination, Report, SenderWorker
from ringtap.trafficgen.statistics import FlowStatistics
from ringtap.trafficgen.worker_processes import WorkerProcesses, raise_file_limit

_LEAD_NS = 5_000_000  # from the command to the launch, so that the launcher receives it in time
_START_AHEAD_NS = 1_000_000_000  # from the command to an absolute start: short, because the clock may step before it
_END_PATIENCE_S = 10.0
_PROGRESS_S = 1.0


class WorkerLink(NamedTuple):
    """The link between a sender worker and the launcher: two channel ends and the shared slots."""

    launchers: Any
    workers: Any
    slots: SharedSlots


class Sender:
    """The sender of one plan, used once: ``Sender(plan, options).run()``.

    Args:
        plan: the plan.
        options: how to send it.
        until: pipe to a parent process, whose message or end stops the sender; None: only signals stop it.
        warn: called with a sentence for each destination that no receiver answers for.
        progress: called about once a second with the seconds since the launch and those of the whole plan.

    Attributes:
        options: how it sends the plan.
        first_failure: reason of the first failed flow, empty if none failed.
        load_bps: payload rate of the plan, mean over its length.
        flows_per_s: flows that the plan starts per second, mean over its length.

    Raises:
        UsageError: the plan is wrong or this host cannot send it; nothing has been sent.
    """

    def __init__(
        self,
        plan: PlanFile,
        options: SendOptions,
        until: Connection | None = None,
        warn: Callable[[str], None] = lambda _: None,
        progress: Callable[[float, float], None] = lambda _passed_s, _all_s: None,
    ) -> None:
        self.first_failure = ""
        self._warn, self._progress = warn, progress
        self._plan, self.options = plan, options
        self._setup = SendPlan(plan, options)
        length_s = plan.duration_ns / 1e9
        self.load_bps = self._setup.needs.bytes * 8 / length_s if length_s else 0.0
        self.flows_per_s = self._setup.needs.flows / length_s if length_s else 0.0
        self._processes = WorkerProcesses(until)
        # before any receiver of this host can have received a flow
        self._arrivals = None if options.arrivals is None else Listener(options.arrivals)
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
        try:
            with self._processes:
                self._setup.probe(lambda: bool(self._processes.signalled))
                self._fork()
                go = self._command_launch()
                done, outcome = self._await_end(go)
        finally:
            if self._arrivals is not None:
                self._arrivals.close()
        error = self._error or done.error
        if error:
            raise MeasurementError(error)
        return self._summarize(go, done, outcome)

    def _fork(self) -> None:
        options, setup = self.options, self._setup
        links = [
            WorkerLink(*ipc.pair(), SharedSlots(setup.most_per_worker))
            for _ in range(options.workers * options.threads)
        ]
        ends = [end for link in links for end in link[:2]]
        for first in range(0, len(links), options.threads):
            mine = links[first : first + options.threads]
            kept = [link.workers for link in mine]
            foreign = [end for end in ends if end not in kept]
            self._processes.start(partial(_run_workers, setup, mine), foreign)
        kept = [link.launchers for link in links]
        foreign = [end for end in ends if end not in kept]
        self._launcher = self._processes.start(partial(_run_launcher, setup, links, self._arrivals), foreign)
        for end in ends:
            end.close()

    def _command_launch(self) -> Go | None:
        """Wait for connections, set the origin of all times, create the log and command the launch."""
        ready = self._next_message(None)
        if not isinstance(ready, Ready):
            return None
        self._in_force = ready.in_force
        self._check_unreachable(self._setup.unreachable | ready.unreachable)
        start_at_ns = self.options.start_at_ns
        if start_at_ns is not None:
            while (left_ns := start_at_ns - time.time_ns()) > _START_AHEAD_NS:
                self._next_message(min(1.0, (left_ns - _START_AHEAD_NS) / 1e9))
                if self._stopped:
                    return None
            if left_ns < 0:
                raise UsageError(f"--start-at passed {-left_ns / 1e9:.3f} s before all was ready: name a later time")
        now_ns, real_ns = _clocks()
        lead_ns = _LEAD_NS if start_at_ns is None else start_at_ns - real_ns
        go = Go(now_ns + lead_ns, real_ns + lead_ns, now_ns + lead_ns + self._setup.duration_ns)
        FlowLog(self.options.log_path, SENT_FIELDS, self._about(go)).close()
        self._send_command(go)
        return go

    def _check_unreachable(self, unreachable: dict[str, str]) -> None:
        texts = [f"{name} ({why})" for name, why in unreachable.items()]
        if len(unreachable) == len({endpoints.name for endpoints in self._setup.places}):
            raise MeasurementError(
                f"no receiver answers at {', '.join(texts)}: it has ended, or never began; start "
                "'ringtap traffic serve --bind HOST:PORT' there"
            )
        for text in texts:
            self._warn(f"no receiver answers at {text}; its flows will fail")

    def _about(self, go: Go) -> dict[str, Any]:
        plan = self._plan
        about = {"source": "sender", "sender": self._setup.sender, "plan": plan.header, "sources": list(plan.sources)}
        about |= {"destinations": list(plan.destinations), "transport": self._in_force}
        return about | {"origin_ns": go.origin_real_ns, "origin_monotonic_ns": go.origin_ns}

    def _await_end(self, go: Go | None) -> tuple[Done, FlowStatistics]:
        done: Done | None = None
        reports: list[Report] = []
        workers = self.options.workers * self.options.threads
        silent_s = 0.0
        while done is None or len(reports) < workers:
            message = self._next_message(_PROGRESS_S)
            is_ending = self._stopped or done is not None
            silent_s = silent_s + _PROGRESS_S if message is None and is_ending else 0.0
            if isinstance(message, Done):
                done = message
            elif isinstance(message, Report):
                reports.append(message)
                if message.error:
                    self._error = self._error or message.error
                    self._stop()
            elif silent_s > _END_PATIENCE_S:
                raise MeasurementError("the sender's processes do not end; its log may lack the last flows")
            elif go is not None and done is None:
                passed_s = max(0.0, (time.monotonic_ns() - go.origin_ns) / 1e9)
                self._progress(passed_s, self._setup.duration_ns / 1e9)
        outcome = done.outcome
        for report in reports:
            outcome.merge(report.outcome)
        return done, outcome

    def _next_message(self, timeout_s: float | None) -> Any:
        message = self._processes.listen(timeout_s)
        if message is None and self._processes.signalled:
            self._stop()
        return message

    def _stop(self) -> None:
        """Tell the launcher to launch nothing more and to end at once."""
        if not self._stopped:
            self._stopped = True
            self._send_command(None)

    def _send_command(self, command: Go | None) -> None:
        assert self._launcher is not None
        try:
            self._launcher.send(command)
        except OSError:
            self._error = self._error or "the launcher is gone; its log may lack the last flows"

    def _summarize(self, go: Go | None, done: Done, outcome: FlowStatistics) -> dict[str, Any]:
        self.first_failure = outcome.first_failure
        origin_ns = 0 if go is None else go.origin_ns
        launched_s = 0.0 if go is None else max(0.0, (done.ended_ns - origin_ns) / 1e9)
        # Step of CLOCK_REALTIME during the run, against CLOCK_MONOTONIC
        now_ns, real_ns = _clocks()
        step_ns = 0 if go is None else real_ns - now_ns - go.origin_real_ns + go.origin_ns
        stopped_by = self._processes.signalled or (
            "duration" if self._setup.duration_ns < self._plan.duration_ns else "plan"
        )
        options = self.options
        summary = outcome.summary(origin_ns, launched_s) | {"stopped_by": stopped_by, "clock_step_s": step_ns / 1e9}
        summary |= {"workers": options.workers, "threads": options.threads, "method": options.method}
        if self._plan.iterations:
            summary["iterations"] = _iterations(done.iteration_ends_ns)
        return summary | {
            "connection_use": options.connections,
            "real_time_launcher": done.real_time,
            "transport": self._in_force,
        }


def _iterations(ends_ns: Sequence[int]) -> dict[str, Any]:
    """Summarize the iterations of a plan; times do not count the first one."""
    times_s = [(end_ns - before_ns) / 1e9 for before_ns, end_ns in pairwise(ends_ns)]
    middle_s, mean_s = (median(times_s), fmean(times_s)) if times_s else (None, None)
    return {"count": len(ends_ns), "mean_s": mean_s, "median_s": middle_s}


def _avoid_processor(cpu: int | None) -> None:
    """Run on other processors than that of the launcher, if there are any."""
    others = os.sched_getaffinity(0) - {cpu}
    if cpu is not None and others:
        os.sched_setaffinity(0, others)


def _clocks() -> tuple[int, int]:
    """Read CLOCK_MONOTONIC and CLOCK_REALTIME of the same moment: the fastest of several readings."""
    readings = []
    for _ in range(16):
        before_ns, real_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after_ns - before_ns, (before_ns + after_ns) // 2, real_ns))
    return min(readings)[1:]


def _run_launcher(setup: SendPlan, links: Sequence[WorkerLink], arrivals: Listener | None, control: Connection) -> None:
    workers = [WorkerHandle(Channel(link.launchers), link.slots) for link in links]
    Launcher(setup, workers, control, arrivals).run()


def _run_workers(setup: SendPlan, links: Sequence[WorkerLink], control: Connection) -> None:
    lock = threading.Lock()

    def work(link: WorkerLink) -> None:
        asyncio.run(SenderWorker(link, setup).run(control, lock))

    _avoid_processor(setup.options.launcher_cpu)
    gc.freeze()
    threads = [threading.Thread(target=work, args=(link,)) for link in links[1:]]
    for thread in threads:
        thread.start()
    work(links[0])
    for thread in threads:
        thread.join()


_MIN_AHEAD = 64
_USUAL_MAX = 1024
_OTHER_FILES = 128
_PROBE_S = 3.0
_PROBE_PAUSE_S = 0.1


class SendPlan:
    """A checked plan and the options for sending it.

    Attributes:
        needs: requirements of the plan.
        pairs: (source, destination) of each connection pool.
        places: endpoints of each pool.
        ahead: connections to open in each pool before the launch.
        most: most connections in each pool at a time.
        transport: options of every connection.
        duration_ns: length of the part that is sent.
        sender: the sender's number in the receivers' logs.
        unreachable: destinations that ``probe`` found without a receiver, with reasons.

    Raises:
        UsageError: the plan is wrong or requires more than this host has.
    """

    def __init__(self, plan: PlanFile, options: SendOptions) -> None:
        self.plan, self.options = plan, options
        self.needs = requirements(plan)
        self.pairs = [
            pair for pair in self.needs.most_at_once if not options.only_source or pair[0] == options.only_source
        ]
        if not self.pairs:
            raise UsageError(f"{plan.path} has no flow from {options.only_source!r}: see its header's sources")
        if options.only_source and self.needs.dependent and options.arrivals is None:
            raise UsageError(
                f"flows of {plan.path} wait for flows of other sources: give sender and receiver of this host the same "
                "--arrivals SOCKET, or send the whole plan from one host"
            )
        self.transport = _transport(plan, options.transport)
        self.places = [self._destination(*pair) for pair in self.pairs]
        limit = options.max_connections or plan.max_connections
        at_once = [self.needs.most_at_once[pair] for pair in self.pairs]
        self.most = [limit or max(_USUAL_MAX, count) for count in at_once]
        self.ahead = [min(most, max(_MIN_AHEAD, count)) for most, count in zip(self.most, at_once, strict=True)]
        self.duration_ns = plan.duration_ns
        if options.duration_s is not None:
            self.duration_ns = min(self.duration_ns, int(options.duration_s * 1e9))
        self.sender = secrets.randbits(63)
        self.hello = protocol.hello(options.token, self.sender)
        self.unreachable: dict[str, str] = {}
        self._check_limits(at_once)
        self._check_host()

    def probe(self, is_stopped: Callable[[], bool]) -> None:
        """Ask each receiver whether it accepts this sender, if each flow opens its own connection or they start now.

        Args:
            is_stopped: returns True when there is no need to wait for receivers any longer.
        """
        if self.options.connections != "new" and not self.options.receivers_wait_s:
            return
        deadline_s = time.monotonic() + self.options.receivers_wait_s
        for endpoints in {endpoints.name: endpoints for endpoints in self.places}.values():
            while (why := self._probe_destination(endpoints)) and time.monotonic() < deadline_s and not is_stopped():
                time.sleep(_PROBE_PAUSE_S)
            if why:
                self.unreachable[endpoints.name] = why

    def _probe_destination(self, endpoints: Destination) -> str:
        try:
            with outgoing_socket(endpoints.family, self.transport, endpoints.source) as sock:
                sock.settimeout(_PROBE_S)
                sock.connect(endpoints.address)
                sock.sendall(self.hello)
                number, verdict = protocol.NOTICE.unpack(sock.recv(protocol.NOTICE.size, socket.MSG_WAITALL))
        except TimeoutError:
            return "no answer"
        except OSError as error:
            return protocol.failure_words(error.errno or 0)
        except ValueError:
            return protocol.failure_words(protocol.NO_RECEIVER)
        if number != protocol.HELLO_NUMBER or verdict == protocol.WELCOME:
            return "" if number == protocol.HELLO_NUMBER else protocol.failure_words(protocol.NO_RECEIVER)
        return protocol.failure_words(-verdict)

    def _destination(self, source: str, destination: str) -> Destination:
        family, address = protocol.resolve(destination)
        local = source or self.options.source
        outgoing_socket(family, self.transport, local).close()
        sources = list(self.plan.sources)
        index = sources.index(source) if source else -1
        return Destination(local, family, address, destination, index, self.plan.destinations.index(destination))

    def _check_limits(self, at_once: list[int]) -> None:
        """Check that open files and local ports suffice for the connections that the plan certainly needs."""
        workers = self.options.workers * self.options.threads
        wanted = sum(self.ahead)
        limit = raise_file_limit(sum(self.most) + _OTHER_FILES)
        if wanted + _OTHER_FILES > limit:
            raise UsageError(
                f"{self.plan.path} starts {sum(at_once)} flows at once, but a process may open {limit} files here: "
                "raise the limit ('ulimit -n'), or send it from several hosts with --as"
            )
        more = (limit - _OTHER_FILES - wanted) // len(self.pairs)
        self.most = [min(most, ahead + more) for ahead, most in zip(self.ahead, self.most, strict=True)]
        # Twice as many, because a closed connection may still hold its slot when the next one is opened
        self.most_per_worker = 2 * -(-sum(self.most) // workers) + 2 * len(self.pairs) + _MIN_AHEAD
        first, last = _local_ports()
        for pair, count in zip(self.pairs, at_once, strict=True):
            if count > last - first + 1:
                raise UsageError(
                    f"{self.plan.path} starts {count} flows at once to {pair[1]}, but this host has {last - first + 1} "
                    "local ports for them: widen net.ipv4.ip_local_port_range, or use more destinations or sources"
                )

    def _check_host(self) -> None:
        cpu = self.options.launcher_cpu
        if cpu is not None and cpu not in os.sched_getaffinity(0):
            raise UsageError(f"--launcher-cpu {cpu}: this process may use {sorted(os.sched_getaffinity(0))}")
        path = self.options.log_path
        if path is not None and path.exists():
            raise UsageError(f"{path} exists: a log is never overwritten, name another file")


def _transport(plan: PlanFile, requested: Transport) -> Transport:
    """Return the requested options, completed with those of the plan."""
    of_plan: dict[str, Any] = plan.header.get("transport") or {}
    known = {field.name for field in fields(Transport)}
    chosen = {name: value for name, value in of_plan.items() if name in known and getattr(requested, name) is None}
    return replace(requested, **chosen)


def _local_ports() -> tuple[int, int]:
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return 32768, 60999
    return int(first), int(last)
