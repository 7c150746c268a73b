"""Outgoing sockets: their options, and what the kernel says of them."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from dataclasses import dataclass

from ringtap.errors import UsageError

_BIND_ADDRESS_NO_PORT = 24  # IP_BIND_ADDRESS_NO_PORT: lets connections to different receivers share a port
_QUEUED_BYTES = 0x5411  # SIOCOUTQ: bytes that TCP has not had acknowledged


@dataclass(frozen=True)
class SocketOptions:
    """How connections are made: congestion control by name, source address; None leaves it to the kernel."""

    congestion_control: str | None = None
    source: str | None = None


def outgoing_socket(family: socket.AddressFamily, options: SocketOptions) -> socket.socket:
    """A non-blocking TCP socket, not yet connected.

    Raises:
        UsageError: the kernel refuses the congestion control or the source address.
        OSError: no socket is to be had.
    """
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if options.congestion_control is not None:
            _set_congestion_control(sock, options.congestion_control)
        if options.source is not None:
            _bind_source(sock, options.source)
    except BaseException:
        sock.close()
        raise
    return sock


def congestion_control(sock: socket.socket) -> str:
    """The congestion control that the kernel says is in force."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()


def unacked_bytes(sock: socket.socket) -> int:
    """Bytes that the kernel took but the peer's kernel has not acknowledged."""
    return int(struct.unpack("i", fcntl.ioctl(sock, _QUEUED_BYTES, b"\0\0\0\0"))[0])


def errno_words(code: int | None) -> str:
    """An error number in words: ``connection refused``."""
    return os.strerror(code or 0).lower()


def _set_congestion_control(sock: socket.socket, name: str) -> None:
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as error:
        raise UsageError(
            f"the kernel refuses congestion control {name!r} ({errno_words(error.errno)}): load its module, or allow "
            "it in net.ipv4.tcp_allowed_congestion_control"
        ) from error


def _bind_source(sock: socket.socket, source: str) -> None:
    try:
        sock.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
        sock.bind((source, 0))
    except (OSError, UnicodeError) as error:
        why = errno_words(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise UsageError(f"source address {source!r} cannot be used: {why}") from error
