"""Leases a host's links to one sweep at a time, while it measures.

The lease is an abstract Unix socket. Its name exists once per network namespace, for all users, and the kernel removes
it with the process that holds it, so a lease never outlives its holder. A client that connects receives facts about
the holder.
"""

from __future__ import annotations

import errno
import json
import socket
import struct
from contextlib import suppress
from typing import Any

_NAME = b"\0ringtap-sweep"
_MAX_BYTES = 4096
_ANSWER_S = 1.0
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid

Holder = dict[str, Any]


class Lease:
    """Lease of this host's network namespace; at most one sweep holds it."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._holder = b""

    def take(self, holder: Holder) -> Holder:
        """Take the lease.

        Two hosts of one sweep may share a network namespace; then the first of them holds it for both.

        Args:
            holder: facts about the sweep; ``id`` identifies it.

        Returns:
            Empty if the sweep has the lease; otherwise facts about the holder. A holder that does not answer is
            described by ``silent`` and, if known, the ``pid`` and ``uid`` of its process.

        Raises:
            OSError: this machine does not support abstract Unix sockets.
        """
        facts = json.dumps(holder).encode()
        if self._socket is None:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind(_NAME)
                listener.listen()
                listener.setblocking(False)
            except OSError as error:
                listener.close()
                if error.errno != errno.EADDRINUSE:
                    raise
                other = _ask()
                return {} if other.get("id") == holder["id"] else other
            self._socket = listener
        self._holder = facts
        return {}

    def fileno(self) -> int:
        """Descriptor that becomes readable when a client connects to the lease; -1 if this object does not hold it."""
        return -1 if self._socket is None else self._socket.fileno()

    def answer(self) -> None:
        """Send facts about the holder to all waiting clients."""
        assert self._socket is not None
        with suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                with client, suppress(OSError):
                    client.setblocking(False)
                    client.send(self._holder)


def held() -> Holder:
    """Return facts about the sweep that holds this network namespace's lease; empty if none does."""
    found = _ask()
    return {} if found == {"silent": True} else found  # alone, it means that nothing listens


def _ask() -> Holder:
    """Ask the holder of the lease for its facts; ``silent`` is set if it sends none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(_ANSWER_S)
        peer: Holder = {"silent": True}
        try:
            caller.connect(_NAME)
            pid, uid, _ = _CREDENTIALS.unpack(
                caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            peer |= {"pid": pid, "uid": uid}
            found = json.loads(caller.recv(_MAX_BYTES))
        except (OSError, ValueError, RecursionError):  # the holder may be another program
            return peer
        return found if found and isinstance(found, dict) else peer
