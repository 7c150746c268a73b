"""Defines the protocol between sender and receiver on a connection.

The sender opens with a hello (magic, version, SHA-256 of the token, its own number) and the receiver answers with a
notice. Then each flow follows: the sender's flow header (number, size), the payload, and the receiver's
notice (number, time of complete reception). Two flags share the integer of the size: an OPEN_ENDED flow continues
until the sender shuts its side down, and the receiver closes the connection after the LAST flow, so that the
TIME_WAIT state holds the receiver's port and none of the sender's few. Integers are big-endian.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct

from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_format import MAX_FLOW_BYTES
from ringtap.core.host_port import parse_address

MAGIC = b"ringtap\n"
VERSION = 2
HELLO = struct.Struct("!8sI32sQ")
FLOW = struct.Struct("!QQ")
NOTICE = struct.Struct("!QQ")

# A notice with this flow number answers the hello; its second number is one of the verdicts
HELLO_NUMBER = 2**64 - 1
WELCOME, WRONG_TOKEN, WRONG_VERSION, FULL = range(4)
VERDICTS = {
    WRONG_TOKEN: "it refused the token: give both sides the same (RINGTAP_TOKEN or --token-file)",
    WRONG_VERSION: "it speaks another version of the protocol: use the same ringtap on both sides",
    FULL: "it has as many connections as it takes",
}
# Reasons for a broken connection that are neither a verdict nor an errno; all below 0 (``failure_words``)
CLOSED, NO_RECEIVER = -101, -102
LAST = 2**63
OPEN_ENDED = MAX_FLOW_BYTES + 1


def hello(token: str, sender: int) -> bytes:
    """Return the sender's first bytes on a connection; ``sender`` is its number in the receiver's log."""
    return HELLO.pack(MAGIC, VERSION, token_digest(token), sender)


def token_digest(token: str) -> bytes:
    """Return the digest that is sent for a token; it keeps unrelated flows apart, but stops no attack."""
    return hashlib.sha256(token.encode()).digest()


def failure_words(code: int) -> str:
    """Return the text of a failure code: above 0 an errno, below 0 a reason of this module or a verdict, 0: silence."""
    if code == 0:
        return "it has gone silent"
    if code > 0:
        return os.strerror(code).lower()
    reasons = {CLOSED: "it closed the connection", NO_RECEIVER: "it does not answer as a ringtap receiver does"}
    return reasons.get(code) or VERDICTS.get(-code, "it refused the connection")


def resolve(text: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Look up ``HOST:PORT``; return the first TCP address.

    Raises:
        UsageError: the text is not an address, or the host is not known.
    """
    host, port = parse_address(text)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"host {host!r} is not known: {getattr(error, 'strerror', None) or error}") from error
    return family, (str(address[0]), int(address[1]))
