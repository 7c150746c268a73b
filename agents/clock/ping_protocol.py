"""Implements the clock protocol: pings that compare two clocks, from clock clients to the clock server of a run.

A ping and its answer have 64 bytes each. Both carry a keyed digest; the key is the run's token, which never crosses the
network. A datagram without a valid digest is not answered, and an answer is never larger than its ping. The kernel
timestamps received datagrams (SO_TIMESTAMPNS), so a late wake-up of the program does not matter.
"""

from __future__ import annotations

import errno
import hashlib
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from ringtap.agents.clock.local_clock import Clock
from ringtap.core.clock_steps import CLOCK_STEP_NS

SIZE = 64
PING, PONG, LAST = 0, 1, 2  # LAST: the last ping of its node
KERNEL_STAMP = 1
_BODY = struct.Struct("!4sBBH8sIIqqq")
_MAGIC, _VERSION = b"RTCK", 1
_DIGEST_BYTES = SIZE - _BODY.size
_SO_TIMESTAMPNS = 35  # the socket module names it from Python 3.14 on
_TIMESPEC = struct.Struct("@ll")
_MAX_ADDRESSES = 16
_BAD_A_REST = 100  # datagrams without a valid digest before the responder pauses
_REST_S = 0.05
# a timestamp further than this from the program's own reading comes from another clock
_PLAUSIBLE_NS = 10_000_000_000


class Datagram(NamedTuple):
    """A datagram of the clock protocol; times are CLOCK_REALTIME in ns of the node that read them.

    Attributes:
        kind: PING, PONG or LAST.
        steps_seen: in answers, twice the number of times that the server's clock was set so far (modulo 2^15), plus
            KERNEL_STAMP if the receive timestamp is the kernel's.
        client: the clock client, 8 random bytes.
        sequence: number of the ping.
        wish: in answers, the least period in ms that the server can serve, so that many nodes do not overload it.
        sent_ns: time at which the client sent the ping.
        received_ns: in answers, time at which the server received the ping.
        answered_ns: in answers, time at which the server answered.
    """

    kind: int
    steps_seen: int
    client: bytes
    sequence: int
    wish: int = 0
    sent_ns: int = 0
    received_ns: int = 0
    answered_ns: int = 0

    def pack(self, token: bytes) -> bytes:
        """The datagram as bytes, with its digest."""
        body = _BODY.pack(_MAGIC, _VERSION, *self)
        return body + hashlib.blake2s(body, key=token, digest_size=_DIGEST_BYTES).digest()


def unpack(data: bytes, token: bytes) -> Datagram | None:
    """The datagram in these bytes if its digest is valid for the token; None for anything else."""
    if len(data) != SIZE:
        return None
    body = data[: _BODY.size]
    magic, version, *fields = _BODY.unpack(body)
    if magic != _MAGIC or version != _VERSION:
        return None
    if hashlib.blake2s(body, key=token, digest_size=_DIGEST_BYTES).digest() != data[_BODY.size :]:
        return None
    return Datagram(*fields)


def open_socket(address: str, port: int = 0) -> socket.socket:
    """A UDP socket bound to an address, with kernel timestamps if available."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM)
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    try:
        sock.setblocking(False)
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock


def receive(sock: socket.socket, clock: Clock) -> tuple[bytes, tuple[str, int], int, bool]:
    """Receive a datagram; returns bytes, sender, arrival time (CLOCK_REALTIME, ns) and True if the kernel gave it."""
    data, control, _, sender = sock.recvmsg(SIZE + 1, socket.CMSG_SPACE(_TIMESPEC.size))
    now_ns = clock.real_ns()
    for level, kind, value in control:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(value) == _TIMESPEC.size:
            seconds, nanoseconds = _TIMESPEC.unpack(value)
            stamp_ns = clock.of_kernel(seconds * 1_000_000_000 + nanoseconds)
            if 0 <= now_ns - stamp_ns < _PLAUSIBLE_NS:
                return data, sender, stamp_ns, True
    return data, sender, now_ns, False


class Responder:
    """The responder of the clock server: one socket per address of this node, all on one port.

    Args:
        addresses: this node's addresses.
        token: the run's token.
        clock: this node's clocks.
        wish: returns the period in ms at which this node can serve so many clients.
        steps: returns the number of times that this node's clock was set so far.

    Raises:
        OSError: none of the addresses can be bound.
    """

    def __init__(
        self, addresses: Sequence[str], token: bytes, clock: Clock, wish: Callable[[int], int], steps: Callable[[], int]
    ) -> None:
        self._token, self._clock, self._wish, self._steps = token, clock, wish, steps
        self.answered = 0
        self.refused = 0
        self._bad = 0  # since the last pause
        self.kernel_stamps = True
        self._clients: dict[bytes, float] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self.port = 0
        self.addresses: list[str] = []
        last_error: OSError | None = None
        for address in list(addresses)[:_MAX_ADDRESSES]:
            try:
                sock = open_socket(address, self.port)
            except OSError as error:  # the address is still being set up, or its port is taken
                last_error = error
                continue
            self.port = self.port or sock.getsockname()[1]
            self.addresses.append(address)
            self._selector.register(sock, selectors.EVENT_READ)
        if not self.addresses:
            self.close()
            raise last_error or OSError(errno.EADDRNOTAVAIL, "no address")

    def serve(self, seconds: float) -> None:
        """Answer the pings that arrive within so many seconds, or until `wake`."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            ready = [key.fileobj for key, _ in self._selector.select(left_s)]
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
                return
            if sum(self._drain(sock) for sock in ready if isinstance(sock, socket.socket)):
                time.sleep(_REST_S)  # the port is flooded: the kernel drops the rest, and the job keeps its processor

    def wake(self) -> None:
        """Make `serve` return at once; may be called from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def _drain(self, sock: socket.socket) -> bool:
        """Answer the datagrams waiting on a socket; returns True if too many were not valid pings."""
        while self._bad < _BAD_A_REST:
            try:
                data, sender, received_ns, by_kernel = receive(sock, self._clock)
            except BlockingIOError:
                return False
            except OSError:  # an ICMP error of an earlier answer
                return False
            ping = unpack(data, self._token)
            if ping is None or ping.kind == PONG:
                self._bad += 1
                self.refused += 1
                continue
            self._answer(sock, sender, ping, received_ns, by_kernel)
        self._bad = 0
        return True

    def _answer(
        self, sock: socket.socket, sender: tuple[str, int], ping: Datagram, received_ns: int, by_kernel: bool
    ) -> None:
        if ping.kind == LAST:
            self._clients.pop(ping.client, None)
        else:
            self._clients[ping.client] = time.monotonic()
        self.kernel_stamps = self.kernel_stamps and by_kernel
        flags = (self._steps() & 0x7FFF) << 1 | (KERNEL_STAMP if by_kernel else 0)
        wish = self._wish(len(self._clients))
        now_ns = self._clock.real_ns()
        pong = Datagram(PONG, flags, ping.client, ping.sequence, wish, ping.sent_ns, received_ns, now_ns)
        self.answered += 1
        with suppress(OSError):  # a full queue is a lost ping
            sock.sendto(pong.pack(self._token), sender)

    def waiting(self, within_s: float) -> int:
        """Number of nodes that have pinged within this many seconds and have not announced their last ping."""
        since_s = time.monotonic() - within_s
        return sum(last_s >= since_s for last_s in self._clients.values())

    def close(self) -> None:
        """Close the sockets."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        os.close(self._wake_fd)


@dataclass(frozen=True)
class Ping:
    """An answered ping: its four times and the other fields of the answer.

    Attributes:
        mono_ns: CLOCK_MONOTONIC of this node at its sending.
        sequence: its number.
        t1_ns, t4_ns: times of sending and of receiving the answer, by this node's clock.
        t2_ns, t3_ns: times of receiving and of answering, by the server's clock.
        kernel_stamps: 1: the server's receive timestamp is the kernel's, 2: this node's is, 3: both are, 0: none is.
        steps_seen: number of times that the server's clock was set so far.
        wish_s: the least period that the server asks for.
    """

    mono_ns: int
    sequence: int
    t1_ns: int
    t2_ns: int
    t3_ns: int
    t4_ns: int
    kernel_stamps: int
    steps_seen: int
    wish_s: float

    @property
    def round_trip_ns(self) -> int:
        """Time on the network, without the time at the server; 0 or less means that a clock was set meanwhile."""
        return (self.t4_ns - self.t1_ns) - (self.t3_ns - self.t2_ns)

    @property
    def offset_ns(self) -> int:
        """This node's clock minus the server's, if both directions take equally long."""
        return ((self.t1_ns - self.t2_ns) + (self.t4_ns - self.t3_ns)) // 2


def pings(
    address: str,
    port: int,
    token: bytes,
    client: bytes,
    clock: Clock,
    sequences: Sequence[int],
    timeout_s: float,
    kind: int = PING,
) -> Iterator[Ping | None]:
    """Send pings one after the other; yields each answered ping, or None for one without an answer in time.

    Raises:
        OSError: there is no route to the address.
    """
    with open_socket("::" if ":" in address else "0.0.0.0") as sock, selectors.DefaultSelector() as selector:
        sock.connect((address, port))
        selector.register(sock, selectors.EVENT_READ)
        for sequence in sequences:
            mono_ns, sent_ns = clock.mono_ns(), clock.real_ns()
            try:
                sock.send(Datagram(kind, 0, client, sequence, sent_ns=sent_ns).pack(token))
                yield _await(sock, selector, token, client, clock, (sequence, mono_ns, sent_ns), timeout_s)
            except ConnectionRefusedError:  # no server listens there any more
                yield None


def _await(
    sock: socket.socket,
    selector: selectors.BaseSelector,
    token: bytes,
    client: bytes,
    clock: Clock,
    sent: tuple[int, int, int],
    timeout_s: float,
) -> Ping | None:
    sequence, mono_ns, sent_ns = sent
    end_s = time.monotonic() + timeout_s
    while (left_s := end_s - time.monotonic()) > 0:
        if not selector.select(left_s):
            return None
        try:
            data, _, received_ns, by_kernel = receive(sock, clock)
        except BlockingIOError:  # the kernel dropped a datagram with a wrong checksum
            continue
        pong = unpack(data, token)
        if pong is None or (pong.kind, pong.client, pong.sequence, pong.sent_ns) != (PONG, client, sequence, sent_ns):
            continue
        if received_ns - sent_ns > clock.mono_ns() - mono_ns + CLOCK_STEP_NS:  # the clock was set meanwhile
            return None
        stamps = (pong.steps_seen & KERNEL_STAMP) | (2 if by_kernel else 0)
        times_ns = (sent_ns, pong.received_ns, pong.answered_ns, received_ns)
        return Ping(mono_ns, sequence, *times_ns, stamps, pong.steps_seen >> 1, pong.wish / 1000)
    return None
