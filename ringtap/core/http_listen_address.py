"""Reads addresses at which a run is served, and listens there: ``:PORT`` on this machine alone, or ``HOST:PORT``.

Metrics are also sent to an OpenTelemetry Collector, at ``http://HOST:PORT``.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from urllib.parse import urlsplit

from ringtap.core.errors import UsageError
from ringtap.core.installation import require

METRICS_PATH = "/metrics"
_OTLP_PATH = "/v1/metrics"
_LOOPBACK = "127.0.0.1"
_BACKLOG = 16


def is_address(text: str) -> bool:
    """Return True if a text has the form ``:PORT`` or ``HOST:PORT``."""
    _, colon, port = text.rpartition(":")
    return bool(colon) and port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 1 << 16


def listen(option: str, address: str, public_option: str = "", is_public: bool = False) -> socket.socket:
    """Return a socket that listens at an address.

    Args:
        option: the option that gave the address, for messages.
        address: ``:PORT`` or ``HOST:PORT``; port 0 is any free one.
        public_option: the option that allows an address that other machines reach; empty: none does.
        is_public: allow such an address.

    Raises:
        UsageError: the address is wrong, in use or not allowed.
    """
    if not is_address(address):
        raise UsageError(f"{option} {address}: an address is :PORT or HOST:PORT, for example :9464")
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]") or _LOOPBACK, int(port), type=socket.SOCK_STREAM)
        family, _, _, _, end = found[0]
        if not (is_public or is_loopback(str(end[0]).partition("%")[0])):
            remedy = f"add {public_option}, or give :{port}" if public_option else f"give :{port}"
            raise UsageError(f"{option} {address} would show the run to other machines: {remedy}")
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(end)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        remedy = ": give another port" if getattr(error, "errno", 0) == errno.EADDRINUSE else ""
        raise UsageError(f"{option} {address} cannot be used: {why}{remedy}") from error
    return listener


def listener_or_url(address: str, is_public: bool) -> socket.socket | str:
    """Return a socket that listens at the address of ``--metrics``, or the URL to which metrics are sent.

    Raises:
        UsageError: as `listen`, a URL that cannot be used, or a package is missing.
    """
    is_url = address.startswith(("http://", "https://"))
    require("--metrics", ["prometheus_client", *(["opentelemetry.proto"] if is_url else [])])
    if not is_url:
        return listen("--metrics", address, "--metrics-public", is_public)
    if is_public:
        raise UsageError("--metrics-public is for metrics that are served, and these are sent: leave it out")
    try:
        parts = urlsplit(address)
        # a port that is no number raises ValueError; a password would be shown, and not used
        is_whole = bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:
        is_whole = False
    if not is_whole or not address.isascii() or not address.isprintable() or " " in address:
        raise UsageError(f"--metrics {address!r}: a Collector has an address such as http://localhost:4318")
    return address if parts.path.strip("/") or parts.query else address.rstrip("/") + _OTLP_PATH


def is_loopback(host: str) -> bool:
    """Return True if a host is ``localhost`` or an address of this machine alone; no name is looked up."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_loopback(host_header: str) -> bool:
    """Return True if a request's Host header names this machine alone, at any port: it may come through a tunnel.

    A page of another site whose name resolves to a loopback address (DNS rebinding) sends its own name.
    """
    try:
        return is_loopback(urlsplit(f"//{host_header}").hostname or "")
    except ValueError:
        return False


def url_of(listener: socket.socket, path: str) -> str:
    """Return the URL of a path that is served on a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"
