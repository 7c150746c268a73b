"""What sender and receiver say to each other on a connection.

The sender opens with a hello (magic, version, SHA-256 of the token) and the receiver answers with a notice. Then, a
flow after the other: the sender's flow header (number, size), that many bytes of payload, and the receiver's notice
(number, time at which it had them all). Integers are big-endian.
"""

from __future__ import annotations

import hashlib
import socket
import struct

from ringtap.errors import UsageError

MAGIC = b"ringtap\n"
VERSION = 1
HELLO = struct.Struct("!8sI32s")
FLOW = struct.Struct("!QQ")
NOTICE = struct.Struct("!QQ")

# A notice with this flow number answers the hello; its second number is one of the verdicts
HELLO_NUMBER = 2**64 - 1
WELCOME, WRONG_TOKEN, WRONG_VERSION, FULL = range(4)
VERDICTS = {
    WRONG_TOKEN: "it refused the token: give both sides the same --token",
    WRONG_VERSION: "it speaks another version of the protocol: use the same ringtap on both sides",
    FULL: "it has as many connections as it takes",
}
LARGEST_FLOW_BYTES = 2**63 - 1


def hello(token: str) -> bytes:
    """The sender's first bytes on a connection."""
    return HELLO.pack(MAGIC, VERSION, token_digest(token))


def token_digest(token: str) -> bytes:
    """What of the token goes over the wire; it keeps strangers' flows apart and is no protection against attack."""
    return hashlib.sha256(token.encode()).digest()


def parse_address(text: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` (``[::1]:5001`` for IPv6).

    Raises:
        UsageError: no host, or no port from 0 to 65535.
    """
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    spaced = any(character.isspace() for character in text)
    if not colon or not host or spaced or not (port.isascii() and port.isdigit()) or int(port[:6]) > 65535:
        raise UsageError(f"{text!r} is no address: write HOST:PORT, for example 127.0.0.1:5001")
    return host, int(port)


def resolve(text: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Look up ``HOST:PORT``; returns the first TCP address.

    Raises:
        UsageError: not an address, or the host is not known.
    """
    host, port = parse_address(text)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"host {host!r} is not known: {getattr(error, 'strerror', None) or error}") from error
    return family, (str(address[0]), int(address[1]))


def format_address(host: str, port: int) -> str:
    """``HOST:PORT``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
