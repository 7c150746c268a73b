"""The clock client of every node but the reference node: bursts of pings before, during and after the job."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from ringtap.agents.clock.log import ClockLog
from ringtap.agents.clock.protocol import LAST, PING, Ping, pings
from ringtap.agents.clock.system_clock import Clock, StepWatch, boot_id
from ringtap.errors import RingtapError
from ringtap.rundir import read_json
from ringtap.schema import SERVER, SERVER_JSON

PINGS_A_BURST = 20
# the first bursts follow closely, to determine the drift even in a short run
_FIRST_GAPS_S = (0.5, 1.5, 4.0)
_TURN_S = 1.0
_GAP_S = 0.004  # mean time between two pings of a burst, so that they meet different queues
_TIMEOUT_S = 0.25
_SCAN_TIMEOUT_S = 0.1
_SCAN_PINGS = 3
_GIVE_UP_AFTER = 4  # pings lost in a row
_LAST_BURST_S = 0.6
_SOON_FOR_S = 20.0


class ClockClient:
    """A clock client: it pings the clock server and logs the answers.

    Args:
        run: the run directory.
        account: the log that publishes this node's clock.
        clock: this node's clocks.
        period_s: seconds between bursts.
    """

    def __init__(self, run: Path, account: ClockLog, clock: Clock, period_s: float) -> None:
        self._server_path = run / "nodes" / account.reference / SERVER_JSON
        self.account, self._clock, self._period_s = account, clock, period_s
        self._watch = StepWatch(clock)
        self._stop = threading.Event()
        self._asker = os.urandom(8)
        self._numbers = count()
        self._server: dict[str, Any] = {}
        self._address = ""
        self._steps_seen: int | None = None

    def end(self) -> None:
        """Ask `work` to end."""
        self._stop.set()

    def work(self) -> dict[str, Any]:
        """Ping until `end` is called; returns the summary for node.json."""
        account = self.account
        account.open_pings()
        try:
            self._find()
            gaps = iter(_FIRST_GAPS_S)
            while not self._stop.is_set():
                self._burst("during" if account.measurements else "before")
                if account.due():
                    account.publish()
                self._wait(min(self._period_s, next(gaps, self._period_s)))
            if self._address:
                self._burst("after")
            self._explain()
            account.refine_breaks()
            return account.publish()
        finally:
            account.close()

    def _explain(self) -> None:
        account = self.account
        account.reason, account.remedy = "", ""
        if account.measurements:
            return
        self._read_server()
        if self._server.get("port"):
            where = ", ".join(self._server["addresses"])
            account.reason = f"the reference answers no ping at {where}, UDP port {self._server['port']}"
            account.remedy = "let UDP pass between the nodes, or run a time daemon (chrony) on them"
        else:
            why = self._server.get("why") or "none was started, or the run directory is not on a shared file system"
            account.reason = f"no clock server found on {account.reference}: {why}"
            account.remedy = "put the run directory on a file system that all nodes share"

    def _find(self) -> None:
        """Wait for the clock server's server.json; after 20 s, look for it less often."""
        began_s = time.monotonic()
        while not self._stop.is_set() and not self._read_server():
            self._watch_clock()
            self._stop.wait(0.1 if time.monotonic() - began_s < _SOON_FOR_S else _TURN_S)

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
            self._stop.wait(min(_TURN_S, left_s))
            if self._watch_clock():
                return

    def _watch_clock(self) -> bool:
        step = self._watch.look()
        if step is None:
            return False
        self.account.steps.append(step)
        return True

    def _burst(self, phase: str) -> None:
        """Send a burst of pings and log it; if none is answered, the next burst chooses an address anew."""
        if not self._address and not (self._read_server() and self._scan()):
            return
        end_s = time.monotonic() + (_LAST_BURST_S if phase == "after" else 1e9)
        halt = self._stop.is_set if phase != "after" else lambda: time.monotonic() > end_s
        answered, lost = self._ping(self._address, PINGS_A_BURST, _TIMEOUT_S, halt)
        if phase == "after":
            said_last, _ = self._ping(self._address, 1, _SCAN_TIMEOUT_S, lambda: False, LAST)
            answered += said_last
        if not answered and phase != "after" and not self._stop.is_set():
            self._address = ""
        if self._watch_clock():  # this node's clock was set during the burst: its pings mix two times
            answered = []
        before = self.account.measurements[-1].mono_ns if self.account.measurements else None
        found = self.account.note_burst(phase, _after_steps(answered), lost)
        if found is None:
            return
        seen = answered[-1].steps_seen
        if self._steps_seen is not None and seen != self._steps_seen and before is not None:
            self.account.breaks.append((before, found.mono_ns))
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
                address, self._server["port"], token, self._asker, self._clock, sequences, timeout_s, kind
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


def _after_steps(answered: list[Ping]) -> list[Ping]:
    """The pings that the clock server answered after its clock was last set."""
    return [ping for ping in answered if ping.steps_seen == answered[-1].steps_seen]
