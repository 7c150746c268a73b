"""Addresses at which a run's metrics are served: ``:PORT`` on this machine alone, or ``HOST:PORT``."""

from __future__ import annotations

import ipaddress
import socket

from ringtap.errors import UsageError
from ringtap.installation import lacking

METRICS_PATH = "/metrics"
_LOOPBACK = "127.0.0.1"
_BACKLOG = 16


def listen(address: str, is_public: bool) -> socket.socket:
    """Return a socket that listens at an address.

    Args:
        address: ``:PORT`` or ``HOST:PORT``; port 0 is any free one.
        is_public: allow an address that other machines reach.

    Raises:
        UsageError: a package is missing, or the address is wrong, in use or not allowed.
    """
    if missing := lacking("--metrics", ["prometheus_client"]):
        raise UsageError(missing)
    host, colon, port = address.rpartition(":")
    if not (colon and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UsageError(f"--metrics {address}: an address is :PORT or HOST:PORT, for example :9464")
    try:
        found = socket.getaddrinfo(host.strip("[]") or _LOOPBACK, int(port), type=socket.SOCK_STREAM)
        family, _, _, _, end = found[0]
        if not (is_public or ipaddress.ip_address(str(end[0]).partition("%")[0]).is_loopback):
            raise UsageError(
                f"--metrics {address} would show the run to other machines: add --metrics-public, or give :{port}"
            )
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(end)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--metrics {address} cannot be used: {getattr(error, 'strerror', None) or error}") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of the metrics that a listening socket serves."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{METRICS_PATH}"
