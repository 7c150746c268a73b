"""Reads and writes addresses of receivers, ``HOST:PORT``."""

from __future__ import annotations

from ringtap.core.errors import UsageError
from ringtap.core.run_directory_schema import TRAFFIC_PORT

LOCAL = f"127.0.0.1:{TRAFFIC_PORT}"  # default address of a receiver of cross traffic


def parse_address(text: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` (``[::1]:5001`` for IPv6).

    Raises:
        UsageError: the text has no host, or no port from 0 to 65535.
    """
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    spaced = any(character.isspace() for character in text)
    if not colon or not host or spaced or not (port.isascii() and port.isdigit()) or len(port) > 5 or int(port) > 65535:
        raise UsageError(f"{text!r} is not an address: write HOST:PORT, for example {LOCAL}")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
