"""The clock service of a node: it measures the offset to the reference node's clock while the job runs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringtap.agents.clock.log import ClockLog
from ringtap.agents.clock.server import ClockServer
from ringtap.agents.clock.system_clock import Clock
from ringtap.errors import words_of
from ringtap.rundir import RunDirectory

if TYPE_CHECKING:
    from ringtap.agents.clock.client import ClockClient

PERIOD_S = 10.0
_STOP_S = 3.0
_ELECTION_TRIES = 40


def reference_of(run: RunDirectory, node: str) -> str:
    """The reference node of a run: run.json's ``reference``, or else the first node that asks.

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
    node creates its log of pings in the run directory, so a run of one node opens none. Failures are reasons in
    clock.json, in `stop`'s result and in the agent's log; none is raised.

    Args:
        run: the run directory.
        node: this node's name in it.
        reference: the reference node; empty for the one that `reference_of` finds.
        clock: this node's clocks.
        period_s: seconds between bursts of pings.
        say: writes a line to the agent's log.
    """

    def __init__(
        self,
        run: RunDirectory,
        node: str,
        reference: str = "",
        *,
        clock: Clock | None = None,
        period_s: float = PERIOD_S,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._run, self._node, self._reference = run, node, reference
        self._clock, self._period_s, self._say = clock or Clock(), period_s, say
        self._role: ClockServer | ClockClient | None = None
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._lock, self._ended = threading.Lock(), False
        self._summary: dict[str, Any] = {}

    def start(self) -> None:
        """Start the thread; never raises."""
        try:
            reference = self._reference or reference_of(self._run, self._node)
            account = ClockLog(self._run.path, self._node, reference, self._clock)
            if reference == self._node:
                self._role = ClockServer(self._run.path, self._node, account, self._clock, self._period_s)
            else:
                from ringtap.agents.clock.client import ClockClient

                self._role = ClockClient(self._run.path, account, self._clock, self._period_s)
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
        self._failure = f"the clock stopped: {words_of(error)}"
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
        reason, remedy = (role.account.reason, role.account.remedy) if role else ("it was not started", "")
        return {"state": _state(self._summary), "reason": reason, "remedy": remedy, **self._summary}


def _state(summary: dict[str, Any]) -> str:
    """``ok`` with a measured offset or one clock, ``degraded`` with time daemons' bounds only, else ``unavailable``."""
    source = summary.get("source", "none")
    return {"none": "unavailable", "time daemons": "degraded"}.get(source, "ok")
