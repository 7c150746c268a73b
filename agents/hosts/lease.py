"""Lease that a sweep holds on a host's links while it measures.

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
_LONGEST_BYTES = 4096
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
            Empty if the sweep has the lease. Otherwise the facts that its holder sends about itself, or ``silent``
            with the ``pid`` and ``uid`` of its process, as far as they are known, if it sends none.

        Raises:
            OSError: this machine does not support such sockets.
        """
        words = json.dumps(holder).encode()
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
        self._holder = words
        return {}

    def fileno(self) -> int:
        """Descriptor that is readable when a client connects to the lease; -1 if the lease is not held here."""
        return -1 if self._socket is None else self._socket.fileno()

    def answer(self) -> None:
        """Send facts about the holder to all waiting clients."""
        assert self._socket is not None
        with suppress(OSError):
            while True:
                caller, _ = self._socket.accept()
                with caller, suppress(OSError):
                    caller.setblocking(False)
                    caller.send(self._holder)


def held() -> Holder:
    """Facts about the sweep that holds this network namespace's lease; empty if none does."""
    found = _ask()
    return {} if found == {"silent": True} else found  # no holder to connect to


def _ask() -> Holder:
    """Ask the holder of the lease for its facts; ``silent`` is set if it sends none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(_ANSWER_S)
        who: Holder = {"silent": True}
        try:
            caller.connect(_NAME)
            pid, uid, _ = _CREDENTIALS.unpack(
                caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            who |= {"pid": pid, "uid": uid}
            words = caller.recv(_LONGEST_BYTES)
            found = json.loads(words)
        except (OSError, ValueError, RecursionError):  # the holder may send anything
            return who
        return found if found and isinstance(found, dict) else who
