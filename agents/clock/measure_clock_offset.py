"""Runs the clock service of a node: it measures the offset to the reference node's clock while the job runs."""

from __future__ import annotations

import ipaddress
import json
import os
import random
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from ringtap.agents.clock.clock_log import ClockLog
from ringtap.agents.clock.local_clock import Clock, StepWatch, boot_id
from ringtap.agents.clock.ping_protocol import LAST, PING, Ping, Responder, pings
from ringtap.core.errors import RingtapError, error_message
from ringtap.core.run_directory import RunDirectory, read_json
from ringtap.core.run_directory_schema import PINGS_REC, SERVER, SERVER_JSON
from ringtap.core.untrusted_files import replace_file

PERIOD_S = 10.0
_STOP_S = 3.0
_ELECTION_TRIES = 40


def reference_of(run: RunDirectory, node: str) -> str:
    """The reference node of a run: run.json's ``reference``, or else the first node that calls this.

    The election uses the file ``reference`` in the run directory: the node that creates it is elected.
    """
    named = run.info.get("reference")
    if isinstance(named, str) and named:
        return named
    path = run.path / "reference"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        for _ in range(_ELECTION_TRIES):
            if found := path.read_text().strip():
                return found
            time.sleep(0.05)
        return node
    with os.fdopen(fd, "w") as file:
        file.write(node + "\n")
    return node


class ClockService:
    """A thread that compares this node's clock with the reference node's, from `start` to `stop`.

    On the reference node it runs the clock server, elsewhere a clock client. The server opens its sockets once another
    node creates its log of pings in the run directory, so a run of one node opens none. Failures are not raised: their
    reasons go to clock.json, to `stop`'s result and to ``say``.

    Args:
        run: the run directory.
        node: this node's name in it.
        clock: this node's clocks.
        period_s: seconds between bursts of pings.
        say: writes a line to the agent's log.
    """

    def __init__(
        self,
        run: RunDirectory,
        node: str,
        *,
        clock: Clock | None = None,
        period_s: float = PERIOD_S,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._run, self._node = run, node
        self._clock, self._period_s, self._say = clock or Clock(), period_s, say
        self._role: ClockServer | ClockClient | None = None
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._lock, self._ended = threading.Lock(), False
        self._summary: dict[str, Any] = {}

    def start(self) -> None:
        """Start the thread; never raises."""
        try:
            reference = reference_of(self._run, self._node)
            log = ClockLog(self._run.path, self._node, reference, self._clock)
            if reference == self._node:
                self._role = ClockServer(self._run.path, self._node, log, self._clock, self._period_s)
            else:
                self._role = ClockClient(self._run.path, log, self._clock, self._period_s)
            thread = threading.Thread(target=self._work, args=(self._role,), name="clock", daemon=True)
            with self._lock:
                if not self._ended:  # the run may end before the reference node is known
                    thread.start()
                    self._thread = thread
        except Exception as error:
            self._fail(error)

    def _work(self, role: ClockServer | ClockClient) -> None:
        try:
            self._summary = role.work()
        except Exception as error:  # the job and the other recordings continue
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failure = f"the clock stopped: {error_message(error)}"
        self._say(self._failure)

    def stop(self) -> dict[str, Any]:
        """Measure once more and end, within about 3 s.

        Returns:
            ``state``, ``reason``, ``remedy`` and, where known, ``source``, ``reference``, ``offset_ns``, ``drift_ppm``,
            ``error_ns``, ``measurements``, ``steps`` and counts of the role. Never raises.
        """
        with self._lock:
            self._ended = True
        if self._role is not None:
            self._role.end()
        if self._thread is not None:
            self._thread.join(_STOP_S)
            if self._thread.is_alive():
                self._failure = self._failure or f"the clock did not end within {_STOP_S:g} s"
        if self._failure:
            return {"state": "degraded", "reason": self._failure, "remedy": "", **self._summary}
        role = self._role
        reason, remedy = (role.log.reason, role.log.remedy) if role else ("it was not started", "")
        states = {"none": "unavailable", "time daemons": "degraded"}
        state = states.get(self._summary.get("source", "none"), "ok")
        return {"state": state, "reason": reason, "remedy": remedy, **self._summary}


_CHECK_S = 1.0  # between checks for a step of the clock
_FIRST_CHECKS_S = 0.25
_FIRST_CHECKS_FOR_S = 20.0
_LINGER_S = 1.0  # nodes of one job end together: the others' last pings may still arrive
_MS_PER_CLIENT = 200  # with 20 pings per burst: at most 100 pings per second in all


def addresses() -> list[str]:
    """This node's addresses that another node may reach, loopback last."""
    found = []
    up = {name for name, row in psutil.net_if_stats().items() if row.isup}
    for name, rows in psutil.net_if_addrs().items():
        for row in rows if name in up else ():
            try:
                address = ipaddress.ip_address(row.address.partition("%")[0])
            except ValueError:  # a hardware address
                continue
            if not address.is_link_local and not address.is_multicast:
                found.append(address)
    found.sort(key=lambda address: (address.is_loopback, address.version))
    return [str(address) for address in found]


class ClockServer:
    """A clock server, which answers the other nodes' pings; it opens its sockets when the first of them asks.

    Args:
        run: the run directory.
        node: this node.
        log: the node's clock log.
        clock: the node's clocks.
        period_s: seconds between the bursts of a client.
    """

    def __init__(self, run: Path, node: str, log: ClockLog, clock: Clock, period_s: float) -> None:
        self._nodes, self._node, self.log, self._clock = run / "nodes", node, log, clock
        self._period_ms = int(period_s * 1000)
        self._watch = StepWatch(clock)
        self._stop = threading.Event()
        self._responder: Responder | None = None

    def end(self) -> None:
        """Ask `work` to end."""
        self._stop.set()
        if (responder := self._responder) is not None:
            responder.wake()

    def work(self) -> dict[str, Any]:
        """Serve until `end` is called; returns the summary for node.json."""
        self.log.publish()
        began_s = time.monotonic()
        try:
            while not self._stop.is_set():
                if self._responder is not None:
                    self._responder.serve(_CHECK_S)
                elif self._is_asked():
                    self._open()
                else:
                    self._stop.wait(_FIRST_CHECKS_S if time.monotonic() - began_s < _FIRST_CHECKS_FOR_S else _CHECK_S)
                self._look()
            self._linger()
        finally:
            self._close()
        return self.log.publish()

    def _is_asked(self) -> bool:
        """True if another node has opened its log of pings."""
        try:
            with os.scandir(self._nodes) as found:  # listing a folder refreshes a network file system's cache
                others = [entry.name for entry in found if entry.name != self._node]
        except OSError:
            return False
        return any((self._nodes / name / PINGS_REC).exists() for name in others)

    def _open(self) -> None:
        token = os.urandom(16)
        try:
            self._responder = Responder(addresses(), token, self._clock, self._wish_ms, self._look)
        except OSError as error:
            self.log.reason = f"no socket for the other nodes' pings: {error.strerror}"
            self._write({"addresses": [], "why": self.log.reason})
            self._stop.wait(_CHECK_S)
            return
        self.log.reason = ""
        self._write({"addresses": self._responder.addresses, "port": self._responder.port, "token": token.hex()})

    def _write(self, item: dict[str, Any]) -> None:
        """Write server.json, readable by this user only, because its token allows pings."""
        text = json.dumps(item | {"boot_id": boot_id(), "t_ns": self._clock.real_ns()}, indent=1) + "\n"
        replace_file(self.log.folder / "server.json", text.encode(), 0o600)

    def _wish_ms(self, clients: int) -> int:
        return max(self._period_ms, clients * _MS_PER_CLIENT)

    def _look(self) -> int:
        """Look for a step of the clock; returns the number of steps so far."""
        step = self._watch.look()
        if step is not None:
            self.log.steps.append(step)
            self.log.publish()
        return len(self.log.steps)

    def _linger(self) -> None:
        """Answer for up to 1 s more, until all other nodes have sent their last pings."""
        end_s = time.monotonic() + _LINGER_S
        responder, within_s = self._responder, 2 * self._period_ms / 1000
        while responder is not None and responder.waiting(within_s) and time.monotonic() < end_s:
            responder.serve(0.05)

    def _close(self) -> None:
        responder, self._responder = self._responder, None
        if responder is not None:
            answered = {"pings_answered": responder.answered, "datagrams_refused": responder.refused}
            self.log.facts |= answered | {"kernel_stamps": responder.kernel_stamps}
            responder.close()
            self._write({"addresses": [], "why": "the reference's agent has ended"})


PINGS_A_BURST = 20
# the first bursts follow closely, to determine the drift even in a short run
_FIRST_GAPS_S = (0.5, 1.5, 4.0)
_GAP_S = 0.004  # mean time between two pings of a burst, so that they meet different queues
_TIMEOUT_S = 0.25
_SCAN_TIMEOUT_S = 0.1
_SCAN_PINGS = 3
_GIVE_UP_AFTER = 4  # pings lost in a row
_LAST_BURST_S = 0.6


class ClockClient:
    """A clock client, which pings the clock server and logs the answers.

    Args:
        run: the run directory.
        log: this node's clock log.
        clock: this node's clocks.
        period_s: seconds between bursts.
    """

    def __init__(self, run: Path, log: ClockLog, clock: Clock, period_s: float) -> None:
        self._server_path = run / "nodes" / log.reference / SERVER_JSON
        self.log, self._clock, self._period_s = log, clock, period_s
        self._watch = StepWatch(clock)
        self._stop = threading.Event()
        self._client_id = os.urandom(8)
        self._numbers = count()
        self._server: dict[str, Any] = {}
        self._address = ""
        self._steps_seen: int | None = None

    def end(self) -> None:
        """Ask `work` to end."""
        self._stop.set()

    def work(self) -> dict[str, Any]:
        """Ping until `end` is called; returns the summary for node.json."""
        log = self.log
        log.open_pings()
        try:
            self._find()
            gaps = iter(_FIRST_GAPS_S)
            while not self._stop.is_set():
                self._send_burst("during" if log.measurements else "before")
                if log.due():
                    log.publish()
                self._wait(min(self._period_s, next(gaps, self._period_s)))
            if self._address:
                self._send_burst("after")
            self._set_reason()
            log.refine_breaks()
            return log.publish()
        finally:
            log.close()

    def _set_reason(self) -> None:
        log = self.log
        log.reason, log.remedy = "", ""
        if log.measurements:
            return
        self._read_server()
        if self._server.get("port"):
            where = ", ".join(self._server["addresses"])
            log.reason = f"the reference answers no ping at {where}, UDP port {self._server['port']}"
            log.remedy = "let UDP pass between the nodes, or run a time daemon (chrony) on them"
        else:
            why = self._server.get("why") or "none was started, or the run directory is not on a shared file system"
            log.reason = f"no clock server found on {log.reference}: {why}"
            log.remedy = "put the run directory on a file system that all nodes share"

    def _find(self) -> None:
        """Wait for the clock server's server.json; after 20 s, look for it less often."""
        began_s = time.monotonic()
        while not self._stop.is_set() and not self._read_server():
            self._watch_clock()
            self._stop.wait(0.1 if time.monotonic() - began_s < _FIRST_CHECKS_FOR_S else _CHECK_S)

    def _read_server(self) -> bool:
        try:
            # listing a folder refreshes a network file system's cache
            if self._server_path.name not in os.listdir(self._server_path.parent):  # noqa: PTH208
                return False
            item = read_json(self._server_path, SERVER)
        except (OSError, RingtapError):
            return False
        self._server = item
        return bool(self._server.get("port"))

    def _wait(self, seconds: float) -> None:
        """Wait for the next burst; return early if this node's clock was set."""
        end_s = time.monotonic() + seconds
        while not self._stop.is_set() and (left_s := end_s - time.monotonic()) > 0:
            self._stop.wait(min(_CHECK_S, left_s))
            if self._watch_clock():
                return

    def _watch_clock(self) -> bool:
        step = self._watch.look()
        if step is None:
            return False
        self.log.steps.append(step)
        return True

    def _send_burst(self, phase: str) -> None:
        """Send a burst of pings and log it; if none is answered, the next burst chooses an address anew."""
        if not self._address and not (self._read_server() and self._scan()):
            return
        end_s = time.monotonic() + (_LAST_BURST_S if phase == "after" else 1e9)
        halt = self._stop.is_set if phase != "after" else lambda: time.monotonic() > end_s
        answered, lost = self._ping(self._address, PINGS_A_BURST, _TIMEOUT_S, halt)
        if phase == "after":
            last, _ = self._ping(self._address, 1, _SCAN_TIMEOUT_S, lambda: False, LAST)
            answered += last
        if not answered and phase != "after" and not self._stop.is_set():
            self._address = ""
        if self._watch_clock():  # this node's clock was set during the burst: its pings mix the times before and after
            answered = []
        before = self.log.measurements[-1].mono_ns if self.log.measurements else None
        # those after the server's clock was last set
        answered = [ping for ping in answered if ping.steps_seen == answered[-1].steps_seen]
        found = self.log.note_burst(phase, answered, lost)
        if found is None:
            return
        seen = answered[-1].steps_seen
        if self._steps_seen is not None and seen != self._steps_seen and before is not None:
            self.log.breaks.append((before, found.mono_ns))
        self._steps_seen = seen
        self._period_s = max(self._period_s, answered[-1].wish_s)

    def _scan(self) -> bool:
        """Choose the clock server's address that answers fastest; returns False if none answers."""
        best: tuple[int, str] | None = None
        for address in self._server.get("addresses", []):
            if address in ("127.0.0.1", "::1") and (best or self._server.get("boot_id") != boot_id()):
                continue  # this node's own loopback, unless both nodes are one machine
            answered, _ = self._ping(address, _SCAN_PINGS, _SCAN_TIMEOUT_S, self._stop.is_set)
            trips = [ping.round_trip_ns for ping in answered]
            if trips and (best is None or min(trips) < best[0]):
                best = (min(trips), address)
        self._address = best[1] if best else ""
        return best is not None

    def _ping(
        self, address: str, number: int, timeout_s: float, halt: Callable[[], bool], kind: int = PING
    ) -> tuple[list[Ping], int]:
        """Send pings; returns the answered ones and the number of lost ones."""
        answered: list[Ping] = []
        lost = in_a_row = 0
        token = bytes.fromhex(self._server.get("token", ""))
        sequences = [next(self._numbers) & 0xFFFFFFFF for _ in range(number)]
        try:
            for ping in pings(
                address, self._server["port"], token, self._client_id, self._clock, sequences, timeout_s, kind
            ):
                in_a_row = 0 if ping else in_a_row + 1
                lost += ping is None
                if ping:
                    answered.append(ping)
                if in_a_row >= _GIVE_UP_AFTER or halt():
                    break
                time.sleep(random.uniform(0.5, 1.5) * _GAP_S)
        except (OSError, KeyError, ValueError):  # the server cannot be reached, or has ended
            pass
        return answered, lost
