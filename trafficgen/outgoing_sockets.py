"""Makes outgoing sockets: options that a plan may request, their values in the kernel, a connection's state."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_format import transport_problem
from ringtap.core.tcp_info import OFFSETS, UNKNOWN_RTT_US

_BIND_ADDRESS_NO_PORT = 24  # IP_BIND_ADDRESS_NO_PORT: lets connections to different receivers share a port
_MAX_PACING_RATE = 47  # SO_MAX_PACING_RATE; TCP paces by itself where the link has no fq qdisc
_QUEUED_BYTES = 0x5411  # SIOCOUTQ: bytes that are not yet acknowledged
_STATE_AT = [OFFSETS[name] for name in ("total_retrans", "rtt_us", "min_rtt_us")]
_WORD = struct.Struct("=I")
_TCP_INFO_BYTES = max(_STATE_AT) + _WORD.size


@dataclass(frozen=True)
class Transport:
    """Socket options of outgoing connections; None leaves a value to the kernel.

    Attributes:
        congestion_control: TCP_CONGESTION, by name.
        dscp: differentiated services code point, 0 to 63.
        send_buffer_bytes: requested SO_SNDBUF; the kernel doubles it for its own bookkeeping.
        pacing_bps: SO_MAX_PACING_RATE of each connection, in bit/s.
        interface: SO_BINDTODEVICE.
    """

    congestion_control: str | None = None
    dscp: int | None = None
    send_buffer_bytes: int | None = None
    pacing_bps: float | None = None
    interface: str | None = None


# By name in a plan: option of the command line
TRANSPORT_OPTIONS = {
    "congestion_control": "--congestion-control",
    "dscp": "--dscp",
    "send_buffer_bytes": "--send-buffer",
    "pacing_bps": "--pacing",
}


def check_transport_options(values: Mapping[str, object]) -> None:
    """Check options of the command line, given by their names in a plan.

    Raises:
        UsageError: an option cannot be used.
    """
    problem = transport_problem(values)
    if problem is not None:
        name, why = problem
        raise UsageError(f"{TRANSPORT_OPTIONS[name]} {values[name]} is not usable: it {why}")


class TcpState(NamedTuple):
    """State of a connection from TCP_INFO.

    Attributes:
        retransmits: retransmitted segments so far.
        rtt_us: smoothed round-trip time in µs; 0: unknown.
        min_rtt_us: smallest round-trip time of the last minutes in µs; 0: unknown.
    """

    retransmits: int
    rtt_us: int
    min_rtt_us: int


def outgoing_socket(family: int, transport: Transport, source: str = "") -> socket.socket:
    """Return a non-blocking TCP socket that is not yet connected.

    Raises:
        UsageError: the kernel refuses an option or the source address.
        OSError: the kernel provides no socket.
    """
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _apply(sock, family, transport)
        if source:
            _bind_source(sock, source)
    except BaseException:
        sock.close()
        raise
    return sock


def in_force(sock: socket.socket) -> dict[str, Any]:
    """Return the options of a socket as the kernel reports them."""
    is_ipv6 = sock.family == socket.AF_INET6
    level, name = (socket.IPPROTO_IPV6, socket.IPV6_TCLASS) if is_ipv6 else (socket.IPPROTO_IP, socket.IP_TOS)
    pacing = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, 8), "little")
    return {
        "congestion_control": sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode(),
        "dscp": sock.getsockopt(level, name) >> 2,
        "send_buffer_bytes": sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF),
        "pacing_bps": None if pacing in (2**32 - 1, 2**64 - 1) else pacing * 8,
        "interface": sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).split(b"\0")[0].decode() or None,
        "segment_bytes": sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG),
    }


def tcp_state(sock: socket.socket) -> TcpState:
    """Read the state of a connection from the kernel; all zeros if that fails."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return TcpState(0, 0, 0)
    if len(info) < _TCP_INFO_BYTES:
        return TcpState(0, 0, 0)
    retransmits, *times_us = (_WORD.unpack_from(info, offset)[0] for offset in _STATE_AT)
    return TcpState(retransmits, *(0 if time_us == UNKNOWN_RTT_US else time_us for time_us in times_us))


def unacked_bytes(sock: socket.socket) -> int:
    """Return the bytes that the kernel accepted and the peer's kernel has not acknowledged."""
    return int(struct.unpack("i", fcntl.ioctl(sock, _QUEUED_BYTES, b"\0\0\0\0"))[0])


def _apply(sock: socket.socket, family: int, transport: Transport) -> None:
    control, interface = transport.congestion_control, transport.interface
    if control is not None:
        advice = "load its module, or allow it in net.ipv4.tcp_allowed_congestion_control"
        _set(
            sock, socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode(), f"congestion control {control!r}", advice
        )
    if transport.dscp is not None:
        is_ipv6 = family == socket.AF_INET6
        level, name = (socket.IPPROTO_IPV6, socket.IPV6_TCLASS) if is_ipv6 else (socket.IPPROTO_IP, socket.IP_TOS)
        _set(sock, level, name, transport.dscp << 2, f"DSCP {transport.dscp}", "choose one from 0 to 63")
    if transport.send_buffer_bytes is not None:
        _set(sock, socket.SOL_SOCKET, socket.SO_SNDBUF, transport.send_buffer_bytes, "the send buffer", "ask for less")
    if transport.pacing_bps is not None:
        rate = struct.pack("=Q", max(1, round(transport.pacing_bps / 8)))
        _set(sock, socket.SOL_SOCKET, _MAX_PACING_RATE, rate, "the pacing rate", "leave --pacing out")
    if interface is not None:
        advice = "name one of this host's interfaces ('ip link' lists them)"
        _set(sock, socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode(), f"interface {interface!r}", advice)


def _set(sock: socket.socket, level: int, name: int, value: int | bytes, what: str, advice: str) -> None:
    try:
        sock.setsockopt(level, name, value)
    except OSError as error:
        raise UsageError(f"the kernel refuses {what} ({os.strerror(error.errno or 0).lower()}): {advice}") from error


def _bind_source(sock: socket.socket, source: str) -> None:
    try:
        sock.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
        sock.bind((source, 0))
    except (OSError, UnicodeError) as error:
        why = str(getattr(error, "strerror", None) or error).lower()
        raise UsageError(f"source address {source!r} cannot be used here: {why}") from error
