"""Runs the launcher: it follows the plan on an absolute schedule and hands each flow's first bytes to the kernel.

It is a process of its own. The sender workers, which are other processes, open connections ahead and send the rest of
long flows, so neither other work in a loop nor the interpreter's lock delays a flow.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import ringtap
from ringtap.core.errors import RingtapError, UsageError
from ringtap.core.flow_plan_file import PlanFile
from ringtap.core.flow_plan_format import Flow
from ringtap.core.sent_flow_log import FIELDS as SENT_FIELDS
from ringtap.trafficgen import protocol
from ringtap.trafficgen.flow_log import FlowLog
from ringtap.trafficgen.outgoing_sockets import TcpState, in_force
from ringtap.trafficgen.plans.sending_requirements import PlanRequirements
from ringtap.trafficgen.sender import ipc
from ringtap.trafficgen.sender.completion_notices import Listener
from ringtap.trafficgen.sender.connection_pool import ConnectionPool, PooledConnection, Waiting, WorkerHandle
from ringtap.trafficgen.sender.ipc import FlowState
from ringtap.trafficgen.sender.options import FIRST_BYTES, PAYLOAD
from ringtap.trafficgen.statistics import Ending, FlowStatistics

if TYPE_CHECKING:
    from ringtap.trafficgen.sender.sender import SendPlan

NEVER = 2**63 - 1
# Lines in memory that wait for others, which come earlier in the plan: so many, or two iterations if those have more
_MOST_WAITING = 4096


class _Waiting:
    """A line that waits for others: how many are not complete yet, and when it is due by those that are."""

    __slots__ = ("due_ns", "flow", "left")

    def __init__(self, flow: Flow, due_ns: int) -> None:
        self.flow, self.due_ns, self.left = flow, due_ns, 0


class FlowQueue:
    """A plan as a queue ordered by time; times are CLOCK_MONOTONIC.

    Args:
        plan: the plan file, which is read one line ahead of the launches.
        needs: the plan's requirements, from its check.
        only_source: leave out lines of other sources; empty: leave out none.

    Attributes:
        next_ns: time at which the next line is due, NEVER if there is none.
        iteration_ends_ns: end of each complete iteration, if the plan has iterations: of the last line of the sources
            that are not left out.
    """

    def __init__(self, plan: PlanFile, needs: PlanRequirements, only_source: str) -> None:
        self.next_ns = NEVER
        self.iteration_ends_ns: list[int] = []
        self._lines: Iterator[tuple[int, Flow]] = enumerate(plan.flows())
        self._only_source = only_source
        self._path, self._needs = plan.path, needs
        self._line: tuple[int, Flow] | None = None
        self._line_ns = NEVER
        self._origin_ns = self._until_ns = 0
        self._ready: list[tuple[int, int, Flow]] = []
        self._waiting: dict[int, _Waiting] = {}
        self._followers: dict[int, list[tuple[int, int]]] = {}
        # Completion time of each line, 8 bytes each; only for plans with lines that wait for others
        self._completed_ns = array("q", bytes(8 * needs.lines)) if needs.dependent else None
        self._per_iteration = needs.lines // plan.iterations if plan.iterations else 0
        self._most_waiting = max(_MOST_WAITING, 2 * self._per_iteration)
        self._open: dict[int, set[int]] = {}  # iteration -> lines of it that have been read and are not complete
        self._read = -1  # iteration of the last line that has been read
        self._iteration_ns = 0
        self._ended = True  # nothing is read before the begin

    @property
    def is_complete(self) -> bool:
        """True if lines wait for others in this plan, and all have been launched."""
        return self._ended and self.next_ns == NEVER and not self._waiting and self._completed_ns is not None

    def begin(self, origin_ns: int, until_ns: int) -> None:
        """Set the origin of times and the end; leave out lines due at ``until_ns`` or later."""
        self._origin_ns, self._until_ns, self._ended = origin_ns, until_ns, False
        self._advance()

    def pop(self) -> tuple[int, Flow, int]:
        """Take the line that is due at ``next_ns``; return its number, the line and its due time.

        Raises:
            UsageError: the next line is wrong, because the plan was changed after its check.
        """
        if self._ready and self._ready[0][0] <= self._line_ns:
            due_ns, number, flow = heappop(self._ready)
            self._update_next()
            return number, flow, due_ns
        assert self._line is not None
        number, flow = self._line
        due_ns = self._line_ns
        self._advance()
        return number, flow, due_ns

    def arrived(self, number: int, at_ns: int) -> None:
        """Record the completion of a line; lines that waited for no other become ready."""
        if self._completed_ns is None or number >= len(self._completed_ns):
            return
        is_new = not self._completed_ns[number]
        self._completed_ns[number] = at_ns
        for follower, delay_ns in self._followers.pop(number, ()):
            waiting = self._waiting[follower]
            waiting.due_ns = max(waiting.due_ns, at_ns + delay_ns)
            waiting.left -= 1
            if not waiting.left:
                self._make_ready(follower, self._waiting.pop(follower))
        if self._line is None and not self._ended and len(self._waiting) < self._most_waiting:
            self._advance()
        if is_new and self._per_iteration:
            self._end_iterations(number, at_ns)
        self._update_next()

    def _end_iterations(self, number: int, at_ns: int) -> None:
        """Note a line that is complete, and the iterations that have ended with it."""
        lines = self._open.get(number // self._per_iteration)
        if lines is None or number not in lines:
            return  # of another source
        lines.remove(number)
        self._iteration_ns = max(self._iteration_ns, at_ns)
        while (following := len(self.iteration_ends_ns)) in self._open and not self._open[following]:
            if following == self._read and not self._ended:
                return
            del self._open[following]
            self.iteration_ends_ns.append(self._iteration_ns)

    def _advance(self) -> None:
        """Go to the next line that waits for no other; put aside those that wait."""
        self._line, self._line_ns = None, NEVER
        while len(self._waiting) < self._most_waiting:
            following = next(self._lines, None)
            if following is None:
                self._ended = True
                break
            number, flow = following
            self._check_known(number, flow)
            due_ns = self._origin_ns + flow.start_ns
            if due_ns >= self._until_ns:
                self._ended = True
                break
            if self._per_iteration:
                self._read = number // self._per_iteration
            if self._only_source and flow.source != self._only_source:
                continue
            if self._per_iteration:
                self._open.setdefault(self._read, set()).add(number)
            if not flow.after or self._completed_ns is None:
                self._line, self._line_ns = (number, flow), due_ns
                break
            waiting = _Waiting(flow, due_ns)
            for earlier, delay_ns in flow.after:
                completed_ns = self._completed_ns[earlier]
                if completed_ns:
                    waiting.due_ns = max(waiting.due_ns, completed_ns + delay_ns)
                else:
                    waiting.left += 1
                    self._followers.setdefault(earlier, []).append((number, delay_ns))
            if waiting.left:
                self._waiting[number] = waiting
            else:
                self._make_ready(number, waiting)
        self._update_next()

    def _check_known(self, number: int, flow: Flow) -> None:
        """Check that the plan has not changed since its check: nothing is prepared for other flows."""
        needs = self._needs
        known = number < needs.lines and (not flow.destination or (flow.source, flow.destination) in needs.most_at_once)
        if not known or (flow.after and not needs.dependent):
            raise UsageError(f"{self._path} was changed after it was checked, at flow {number}: send it again")

    def _make_ready(self, number: int, waiting: _Waiting) -> None:
        if waiting.due_ns < self._until_ns:
            heappush(self._ready, (waiting.due_ns, number, waiting.flow))

    def _update_next(self) -> None:
        self.next_ns = min(self._line_ns, self._ready[0][0]) if self._ready else self._line_ns


_CONNECT_PATIENCE_NS = 3_000_000_000  # since the last connection was made
_MIN_SILENCE_NS = 500_000_000  # a congested link may be silent for a round trip or two without a failure
_HANDLE_EVERY = 32  # launches without a pause between two rounds of message handling
_HEAD_BYTES = protocol.FLOW.size
_PAUSE_S = 0.05
_NO_TCP = TcpState(0, 0, 0)


class Go(NamedTuple):
    """The sender's command to launch: CLOCK_MONOTONIC and CLOCK_REALTIME of the launch, CLOCK_MONOTONIC of its end."""

    origin_ns: int
    origin_real_ns: int
    until_ns: int


class Ready(NamedTuple):
    """The launcher's message that connections are established.

    Attributes:
        unreachable: reason for each destination without a connection.
        in_force: socket options as the kernel reports them.
    """

    unreachable: dict[str, str]
    in_force: dict[str, object]


class Done(NamedTuple):
    """The launcher's final message.

    Attributes:
        ended_ns: CLOCK_MONOTONIC of the end of launching, 0 if nothing was launched.
        error: the error, empty if there was none.
        real_time: True if it ran with real-time priority on its processor.
        outcome: its flow statistics.
        iteration_ends_ns: CLOCK_MONOTONIC of the end of each iteration of the plan.
    """

    ended_ns: int
    error: str
    real_time: bool
    outcome: FlowStatistics
    iteration_ends_ns: list[int]


class Launcher:
    """The launcher, which runs in a process of its own until the plan has ended or the sender stops it.

    Args:
        setup: the checked plan and the options for sending it.
        workers: the sender workers, which provide connections.
        control: pipe to the sender.
        arrivals: completion notices from this host's receivers, or None.
    """

    def __init__(
        self, setup: SendPlan, workers: Sequence[WorkerHandle], control: Connection, arrivals: Listener | None
    ) -> None:
        options = setup.options
        self._new = options.connections == "new"
        self._schedule, self._workers = FlowQueue(setup.plan, setup.needs, options.only_source), workers
        self._by_index = [
            ConnectionPool(index, place, workers, most, self._new)
            for index, (place, most) in enumerate(zip(setup.places, setup.most, strict=True))
        ]
        self._routes, self._ahead = dict(zip(setup.pairs, self._by_index, strict=True)), setup.ahead
        self._options, self._control, self._outcome = options, control, FlowStatistics(options.capacity_bps)
        self._inputs: list[int] = [control.fileno(), *(worker.channel.fileno() for worker in workers)]
        self._by_file = {worker.channel.fileno(): worker for worker in workers}
        self._arrivals = arrivals
        if arrivals is not None:
            self._inputs.append(arrivals.fileno())
        self._stopped = False
        self._go: Go | None = None
        self._busy = 0
        self._waiting = 0
        self._real_time = False
        self._error = ""

    def run(self) -> None:
        """Connect, wait for the command, launch, wait for outstanding flows, record the others as not finished."""
        with suppress(OSError):  # otherwise sleeps end up to 50 µs late
            Path("/proc/self/timerslack_ns").write_text("1")
        self._real_time = self._take_processor()
        gc.freeze()
        gc.disable()
        self._connect()
        launched_ns = 0
        try:
            self._wait_for_go()
            if self._go is not None:
                self._launch_all(self._go)
                launched_ns = min(time.monotonic_ns(), self._go.until_ns)
                self._await_outstanding()
        except RingtapError as error:
            self._error = str(error)
        self._end()
        with suppress(OSError):
            done = Done(
                launched_ns, self._error, self._real_time, self._outcome.without_log(), self._schedule.iteration_ends_ns
            )  # fmt: skip
            self._control.send(done)

    def _take_processor(self) -> bool:
        """Pin the launcher to its processor; return True if it also got real-time priority there."""
        if self._options.launcher_cpu is None:
            return False
        alone = len(os.sched_getaffinity(0)) > 1
        os.sched_setaffinity(0, {self._options.launcher_cpu})
        if not alone:  # the sender workers have to run there too
            return False
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(os.sched_get_priority_min(os.SCHED_FIFO)))
        except OSError:
            return False
        return True

    def _connect(self) -> None:
        for route, ahead in zip(self._by_index, self._ahead, strict=True):
            route.open_ahead(ahead)
        deadline_ns = time.monotonic_ns() + _CONNECT_PATIENCE_NS
        pending = -1
        while not self._stopped and (still_pending := sum(route.pending for route in self._by_index)):
            if still_pending != pending:
                pending, deadline_ns = still_pending, time.monotonic_ns() + _CONNECT_PATIENCE_NS
            if time.monotonic_ns() > deadline_ns:
                break
            self._handle_messages(_PAUSE_S)
        unreachable = {
            route.name: protocol.failure_words(route.why) if route.why else "no answer"
            for route in self._by_index
            if not route.joined_any
        }
        link = next((link for worker in self._workers for link in worker.links.values()), None)
        with suppress(OSError):
            self._control.send(Ready(unreachable, {} if link is None else in_force(link.sock)))

    def _wait_for_go(self) -> None:
        while self._go is None and not self._stopped:
            self._handle_messages(_PAUSE_S)
        if self._go is None:
            return
        log = FlowLog(self._options.log_path, SENT_FIELDS, None)
        self._outcome.begin(log, self._go.origin_ns, self._go.origin_real_ns)
        self._schedule.begin(self._go.origin_ns, self._go.until_ns)
        for worker in self._workers:
            worker.channel.put(ipc.BEGIN, 0, self._go.origin_ns, self._go.origin_real_ns)
            worker.channel.flush()

    def _launch_all(self, go: Go) -> None:
        """Launch the scheduled flows: sleep until shortly before a flow is due, poll the clock, launch.

        The end of an iteration of the plan is an iteration of this process under ``ringtap run``.
        """
        schedule, clock, spin_ns = self._schedule, time.monotonic_ns, self._options.spin_ns
        without_pause = iterations = 0
        while not self._stopped:
            if len(schedule.iteration_ends_ns) > iterations:
                iterations += 1
                ringtap.step()
            elif schedule.is_complete:
                return
            due_ns = min(schedule.next_ns, go.until_ns)
            left_ns = due_ns - clock()
            if left_ns > spin_ns:
                without_pause = 0
                self._handle_messages(min(1.0, (left_ns - spin_ns) / 1e9))
                continue
            if due_ns == go.until_ns and schedule.next_ns >= due_ns:
                if left_ns <= 0:
                    return
                self._handle_messages(left_ns / 1e9)
                continue
            number, flow, due_ns = schedule.pop()
            if not flow.destination:
                schedule.arrived(number, due_ns)
                continue
            route = self._routes[flow.source, flow.destination]
            while clock() < due_ns:
                pass
            self._launch(route, Waiting(number, flow.size_bytes, due_ns))
            without_pause += 1
            if without_pause % _HANDLE_EVERY == 0:
                self._handle_messages(0)

    def _launch(self, route: ConnectionPool, flow: Waiting) -> None:
        while (link := route.take()) is not None:
            if self._start(link, flow):
                self._outcome.due(flow.size_bytes, flow.due_ns)
                route.open_more()
                return
        self._outcome.due(flow.size_bytes, flow.due_ns)
        route.waiting.append(flow)
        self._waiting += 1
        route.open_more()
        self._handle_messages(0)

    def _start(self, link: PooledConnection, flow: Waiting) -> bool:
        """Start a flow on a connection; return False if the connection turns out to be broken."""
        number, size_bytes, due_ns = flow
        channel = link.worker.channel
        now_ns = time.monotonic_ns()
        link.worker.slots.fill(link.slot, number, size_bytes, due_ns, now_ns)
        if self._new:
            code = link.sock.connect_ex(link.route.address)
            channel.put(ipc.START, link.slot, 0 if code == errno.EINPROGRESS else code)
            channel.flush()
            taken = 0
        else:
            link.once = not size_bytes
            head = protocol.FLOW.pack(number, size_bytes or protocol.OPEN_ENDED)
            try:
                taken = os.writev(link.file, (head, PAYLOAD[: min(size_bytes or FIRST_BYTES, FIRST_BYTES)]))
            except BlockingIOError:
                taken = 0
            except OSError:
                return False  # the sender worker will report it
            if taken < _HEAD_BYTES + size_bytes or not size_bytes:
                channel.put(ipc.REST, link.slot, taken)
                channel.flush()
            self._outcome.moved(now_ns, max(0, taken - _HEAD_BYTES))
        link.busy, link.sent = True, taken
        self._busy += 1
        self._outcome.launched(now_ns - due_ns)
        return True

    def _handle_messages(self, timeout_s: float) -> None:
        """Handle messages of the sender and its workers; wait for them at most ``timeout_s`` seconds."""
        ready, _, _ = select.select(self._inputs, (), (), timeout_s)
        for file in ready:
            worker = self._by_file.get(file)
            if self._arrivals is not None and file == self._arrivals.fileno():
                for number, at_ns in self._arrivals.arrivals():
                    self._schedule.arrived(number, at_ns)
                continue
            if worker is None:
                self._handle_command()
                continue
            for what, place, first, second in worker.channel.messages():
                self._handle_message(worker, what, place, first, second)
            if worker.channel.ended:
                self._inputs.remove(file)  # the sender notices the end of the process and handles it
            else:
                worker.channel.flush()

    def _handle_command(self) -> None:
        try:
            command = self._control.recv()
        except (EOFError, OSError):
            command = None
        if isinstance(command, Go):
            self._go = command
        else:
            self._stopped = True
            self._inputs.remove(self._control.fileno())

    def _handle_message(self, worker: WorkerHandle, what: int, place: int, first: int, second: int) -> None:
        if what == ipc.FREE:
            self._finished(worker.links[place], first, second)
        elif what == ipc.SOCKET:
            route = self._by_index[first]
            link = PooledConnection(route, worker, place, worker.channel.files.popleft(), self._new)
            worker.links[place] = link
            route.joined()
            if not self._new:  # with new connections, nothing has been sent yet
                route.heard_ns = time.monotonic_ns()
            self._idle(link)
        elif what == ipc.LOST:
            broken = worker.links.get(place)
            if broken is not None:  # otherwise it was dropped while this message was on its way
                self._lost(broken, first)
        elif what == ipc.REFUSED:
            self._refused(self._by_index[place], first)

    def _finished(self, link: PooledConnection, number: int, finish_ns: int) -> None:
        link.busy = False
        self._busy -= 1
        link.route.heard_ns = finish_ns
        self._schedule.arrived(number, finish_ns)
        if link.once:
            self._drop(link, -1)
            link.route.open_more()
        else:
            self._idle(link)

    def _idle(self, link: PooledConnection) -> None:
        route = link.route
        if not route.waiting:
            route.give(link)
        elif self._start(link, route.waiting[0]):
            route.waiting.popleft()
            self._waiting -= 1

    def _lost(self, link: PooledConnection, why: int) -> None:
        link.route.why = why
        sent = link.sent if link.busy else -1
        self._drop(link, sent)
        if link.busy:
            self._busy -= 1
        link.route.open_more(spares=False)  # avoid endless reopening to a receiver that breaks every connection

    def _drop(self, link: PooledConnection, sent: int) -> None:
        """Close the launcher's copy of a connection and tell its sender worker to close it."""
        link.route.left(link)
        del link.worker.links[link.slot]
        link.sock.close()
        link.worker.channel.put(ipc.GONE, link.slot, sent)
        link.worker.channel.flush()

    def _refused(self, route: ConnectionPool, why: int) -> None:
        route.refused(why)
        if len(route.waiting) > route.pending:
            self._waiting -= 1
            self._give_up(route, route.waiting.popleft(), "failed")

    def _await_outstanding(self) -> None:
        """End the open-ended flows, and wait for outstanding flows for at most ``patience_s``."""
        deadline_ns = time.monotonic_ns() + int(self._options.patience_s * 1e9)
        for worker in self._workers:
            worker.channel.put(ipc.FINISH, 0)
            worker.channel.flush()
        while (self._busy or self._waiting) and not self._stopped and time.monotonic_ns() < deadline_ns:
            self._handle_messages(_PAUSE_S)

    def _end(self) -> None:
        now_ns = time.monotonic_ns()
        silent_ns = now_ns - max(_MIN_SILENCE_NS, int(self._options.patience_s * 1e9))
        for route in self._by_index:
            for flow in route.waiting:
                silent = route.heard_ns <= silent_ns and flow.due_ns <= silent_ns
                self._give_up(route, flow, "failed" if silent else "unfinished")
        for worker in self._workers:
            for link in worker.links.values():
                if link.busy:
                    worker.channel.put(ipc.GONE, link.slot, link.sent, silent_ns)
            worker.channel.put(ipc.END, 0)
            while not worker.channel.flush() and time.monotonic_ns() < now_ns + _CONNECT_PATIENCE_NS:
                time.sleep(0.001)
        try:
            self._outcome.flush()
        except RingtapError as error:
            self._error = self._error or str(error)

    def _give_up(self, route: ConnectionPool, flow: Waiting, state: str) -> None:
        if state == "failed" and not self._outcome.first_failure:
            self._outcome.first_failure = f"{route.name}: {protocol.failure_words(route.why)}"
        never_started = FlowState(flow.number, flow.size_bytes, flow.due_ns, 0)
        self._outcome.ended(never_started, Ending(state), _NO_TCP, route.source, route.destination)
