"""TCP connections of this network namespace, from the kernel's socket diagnostics (sock_diag), for every user.

The kernel walks its whole table of connections to answer "all": 0.15 ms on a machine with 262,144 places, whoever has
how few. So "all" is asked three times a second at most, and in between the connections that carry much are asked for
by name. What comes back is stored as it came, and only if it changed.
"""

from __future__ import annotations

import socket
import sys
import time
from typing import Any

from ringtap.collectors import sockets_layout as layout
from ringtap.collectors.base import Check, Context
from ringtap.collectors.netlink import DUMP, SOCK_DIAG, NetlinkSocket, aligned, is_done, message_at, request
from ringtap.collectors.socket_owners import SocketOwners
from ringtap.collectors.sockets_table import APART, BUSY_NS, SocketTable
from ringtap.records import HoldingRecordWriter

_DUMP_EVERY_NS = 300_000_000
_DUMP_COST = 50  # dumps take a fiftieth of a core's time at most
_ASKED_MOST = 32  # by name in one sample: 0.06 ms when caches are warm, 0.15 ms when they are not
_FAILURES_MOST = 10  # in a row


class SocketsCollector:
    """Writes ``sockets/sockets.rec``, a record for each connection that changed, and ``sockets/owners.jsonl``."""

    name = "sockets"
    slow = False

    def __init__(self, context: Context) -> None:
        self._context = context
        self._folder = context.folder / "sockets"
        self.every_s = context.every_s
        self._dump_due_ns = 0
        self._failures = 0
        self._facts = {"dumps": 0, "samples": 0, "lost_answers": 0, "most_connections": 0}

    def check(self) -> Check:
        """Whether the kernel answers, and how much of tcp_info it has."""
        if sys.byteorder != "little":
            return Check("unavailable", "records of sockets are the kernel's own bytes, and this machine is big-endian")
        try:
            netlink, requests = _connect()
            netlink.close()
            absent = layout.absent_fields(_kernel_info_bytes())
        except OSError as error:
            return Check(
                "unavailable",
                f"the kernel refuses socket diagnostics: {error.strerror}",
                "ask the administrator to load the modules inet_diag and tcp_diag (modprobe tcp_diag); "
                "in a container, to allow netlink sockets",
            )
        if absent:
            return Check("degraded", f"this kernel's tcp_info is old: it lacks {', '.join(absent)}", "a newer kernel")
        how = "one walk for IPv4 and IPv6" if len(requests) == 1 else "IPv4 and IPv6 apart"
        return Check("ok", f"TCP connections of this network namespace, {how}")

    def start(self) -> None:
        """Open the socket and the logs and take the first sample."""
        self._netlink, self._requests = _connect()
        self._slots = [self._netlink.buffer[at : at + APART] for at in range(0, _ASKED_MOST * APART, APART)]
        info_bytes = _kernel_info_bytes()
        about = {
            "collector": self.name,
            "source": "NETLINK_SOCK_DIAG, INET_DIAG_INFO",
            "every_s": self.every_s,
            "dump_every_s": max(self.every_s, _DUMP_EVERY_NS / 1e9),
            "asked_by_name_most": _ASKED_MOST,
            "asked_by_name_s": BUSY_NS / 1e9,
            "kernel_tcp_info_bytes": info_bytes,
            "absent": layout.absent_fields(info_bytes),
        }
        self._writer = HoldingRecordWriter(self._folder / "sockets.rec", layout.FIELDS, about)
        self._owners = SocketOwners(self._folder / "owners.jsonl", self._context.pids)
        self._table = SocketTable(self._owners.want, _ASKED_MOST)
        self.sample()

    def sample(self) -> None:
        """Record what changed.

        Raises:
            OSError: the disk is full, or the kernel has not answered ten times in a row.
        """
        now_ns = time.monotonic_ns()
        self._table.begin(time.time_ns(), now_ns)
        self._facts["samples"] += 1
        try:
            if now_ns >= self._dump_due_ns:
                self._dump(now_ns)
            elif self._table.asked:
                self._ask()
            self._failures = 0
        except OSError as error:  # answers that did not fit (ENOBUFS), say: the next sample asks for everything
            self._facts["lost_answers"] += 1
            self._failures += 1
            self._dump_due_ns = 0
            self._table.break_off_dump()
            self._netlink.drain()
            if self._failures >= _FAILURES_MOST:
                raise OSError(error.errno, f"the kernel's socket diagnostics fail: {error.strerror}") from error
        self._writer.hold(self._table.records(), now_ns)

    def stop(self) -> dict[str, Any]:
        """Take a last sample of everything and close; returns how many samples, dumps and losses there were."""
        self._dump_due_ns = 0
        try:
            self.sample()
        finally:
            self._netlink.close()
            self._writer.close()
            self._owners.close()
        facts = self._facts | {"interrupted_messages": self._table.interrupted}
        return facts | ({"owners_stopped": self._owners.failure} if self._owners.failure else {})

    def _dump(self, now_ns: int) -> None:
        """Ask for all connections."""
        begun_ns = time.thread_time_ns()
        self._table.begin_dump()
        for message in self._requests:
            self._netlink.dump(message, self._table.take)
        self._table.end_dump()
        self._facts["dumps"] += 1
        self._facts["most_connections"] = max(self._facts["most_connections"], len(self._table))
        cost_ns = time.thread_time_ns() - begun_ns
        every_ns = int(self.every_s * 1e9)
        # half a period early: samples come a little early, or late
        self._dump_due_ns = now_ns + max(_DUMP_EVERY_NS, every_ns, cost_ns * _DUMP_COST) - every_ns // 2

    def _ask(self) -> None:
        """Ask for the connections that move; the answers come one by one."""
        receive = self._netlink.receive_into
        self._netlink.send(self._table.question)
        for slot in self._slots[: len(self._table.asked)]:
            receive(slot)
        self._table.take_answers(self._netlink.buffer)


def _connect() -> tuple[NetlinkSocket, list[bytes]]:
    """A socket that the kernel has answered on, and the requests that make a dump there.

    Raises:
        OSError: it answers neither kind of request.
    """
    netlink = NetlinkSocket(SOCK_DIAG)
    try:
        for compatible in (True, False):
            kind = layout.COMPATIBLE if compatible else layout.BY_FAMILY
            requests = [request(kind, DUMP, body) for body in layout.dump_requests(compatible)]
            try:
                for message in requests:
                    netlink.dump(message, _pass_over)
            except OSError:
                if not compatible:
                    raise
            else:
                return netlink, requests
    except OSError:
        netlink.close()
        raise
    raise AssertionError  # the loop returns or raises


def _pass_over(data: memoryview, length: int) -> bool:
    """Walk a datagram for its end alone."""
    position = 0
    while True:
        size, kind, _ = message_at(data, position, length)
        if not size:
            return not is_done(kind)
        position += aligned(size)


def _kernel_info_bytes() -> int:
    """Length of this kernel's tcp_info, from a socket that is connected to nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return len(probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1024))
