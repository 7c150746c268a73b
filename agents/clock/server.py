"""The clock server on the reference node: it answers pings once another node asks, and watches its own clock."""

from __future__ import annotations

import ipaddress
import json
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ringtap.agents.clock.log import ClockLog
from ringtap.agents.clock.system_clock import Clock, StepWatch, boot_id
from ringtap.schema import PINGS_REC

if TYPE_CHECKING:
    from ringtap.agents.clock.protocol import Responder

_TURN_S = 1.0  # the longest time between two looks for a step of the clock
_SOON_S = 0.25
_SOON_FOR_S = 20.0
_LINGER_S = 1.0  # nodes of one job end together: the others' last pings may still arrive
_A_NODE_MS = 200  # with 20 pings per burst: at most 100 pings per second in all


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
    """A clock server: it answers the other nodes' pings, and opens its sockets only when one of them asks.

    Args:
        run: the run directory.
        node: this node.
        account: the log that publishes its clock.
        clock: its clocks.
        period_s: seconds between the bursts of a client.
    """

    def __init__(self, run: Path, node: str, account: ClockLog, clock: Clock, period_s: float) -> None:
        self._nodes, self._node, self.account, self._clock = run / "nodes", node, account, clock
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
        self.account.publish()
        began_s = time.monotonic()
        try:
            while not self._stop.is_set():
                if self._responder is not None:
                    self._responder.serve(_TURN_S)
                elif self._asked():
                    self._open()
                else:
                    self._stop.wait(_SOON_S if time.monotonic() - began_s < _SOON_FOR_S else _TURN_S)
                self._look()
            self._linger()
        finally:
            self._close()
        return self.account.publish()

    def _asked(self) -> bool:
        """True if another node has opened its log of pings."""
        try:
            with os.scandir(self._nodes) as found:  # listing a folder refreshes a network file system's cache
                others = [entry.name for entry in found if entry.name != self._node]
        except OSError:
            return False
        return any((self._nodes / name / PINGS_REC).exists() for name in others)

    def _open(self) -> None:
        from ringtap.agents.clock.protocol import (
            Responder,  # imports the digests' library, which a single node does not need
        )

        token = os.urandom(16)
        try:
            self._responder = Responder(addresses(), token, self._clock, self._wish_ms, self._look)
        except OSError as error:
            self.account.reason = f"no socket for the other nodes' pings: {error.strerror}"
            self._say({"addresses": [], "why": self.account.reason})
            self._stop.wait(_TURN_S)
            return
        self.account.reason = ""
        self._say({"addresses": self._responder.addresses, "port": self._responder.port, "token": token.hex()})

    def _say(self, item: dict[str, Any]) -> None:
        """Write server.json, readable by this user only: whoever has the token can send pings."""
        path = self.account.folder / "server.json"
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(json.dumps(item | {"boot_id": boot_id(), "t_ns": self._clock.real_ns()}, indent=1) + "\n")
        temporary.replace(path)

    def _wish_ms(self, askers: int) -> int:
        return max(self._period_ms, askers * _A_NODE_MS)

    def _look(self) -> int:
        """Look for a step of the clock; returns the number of steps so far."""
        step = self._watch.look()
        if step is not None:
            self.account.steps.append(step)
            self.account.publish()
        return len(self.account.steps)

    def _linger(self) -> None:
        """Answer for up to 1 s more while other nodes have still to send their last pings."""
        end_s = time.monotonic() + _LINGER_S
        responder, within_s = self._responder, 2 * self._period_ms / 1000
        while responder is not None and responder.waiting(within_s) and time.monotonic() < end_s:
            responder.serve(0.05)

    def _close(self) -> None:
        responder, self._responder = self._responder, None
        if responder is not None:
            answered = {"pings_answered": responder.answered, "datagrams_refused": responder.refused}
            self.account.facts |= answered | {"kernel_stamps": responder.kernel_stamps}
            responder.close()
            self._say({"addresses": [], "why": "the reference's agent has ended"})
