"""Runs the receiver: accepts connections, discards their flows' data, and notifies the sender of each complete flow."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.host_port import LOCAL, format_address
from ringtap.trafficgen import protocol
from ringtap.trafficgen.flow_log import RECEIVED_FIELDS, FlowLog
from ringtap.trafficgen.receiver.worker import MAX_PENDING_HELLOS, AcceptedConnection, ReceiverCounts, ReceiverWorker
from ringtap.trafficgen.worker_processes import WorkerProcesses, raise_file_limit

_BACKLOG = 4096
_OTHER_FILES = 64
_END_PATIENCE_S = 10.0


@dataclass(frozen=True)
class ReceiveOptions:
    """Options of the receiver.

    Attributes:
        bind: HOST:PORT to listen on; port 0 takes a free one.
        token: senders must give the same one; needed to listen beyond loopback.
        log_path: per-flow record file to create, or None.
        max_connections: limit of connections with a valid hello; further ones are refused.
        arrivals: Unix socket of a sender on this host that gets completion notices, or None.
        idle_s: a connection without data for this time is dropped.
        workers: processes; the kernel spreads new connections over all loops (SO_REUSEPORT).
        threads: threads in each process, each with a loop.
    """

    bind: str = LOCAL
    token: str = ""
    log_path: Path | None = None
    max_connections: int = 16384
    idle_s: float = 300.0
    workers: int = 1
    threads: int = 1
    arrivals: Path | None = None


class Receiver:
    """A receiver of flows, which runs until SIGINT or SIGTERM: ``Receiver(options).run()``.

    Args:
        options: its options.
        until: pipe that gets the listening address, and whose end also ends the receiver.
    """

    def __init__(self, options: ReceiveOptions, until: Connection | None = None) -> None:
        self._options = options
        self._until = until
        self._processes = WorkerProcesses(until)

    def run(self) -> dict[str, Any]:
        """Serve until SIGINT or SIGTERM; return the summary.

        Raises:
            UsageError: the address is in use or foreign, the token is missing, or the log cannot be created.
            MeasurementError: the log could not be completed, or a process of the receiver died.
        """
        options = self._options
        loops = options.workers * options.threads
        most, pending_hellos = _connection_limits(options, loops)
        listeners = _listen(options, loops)
        address = format_address(*listeners[0].getsockname()[:2])
        FlowLog(options.log_path, RECEIVED_FIELDS, {"source": "receiver", "listening": address}).close()
        began_ns = time.monotonic_ns()
        counts, error = ReceiverCounts(), ""
        with self._processes:
            controls = [
                self._processes.start(
                    partial(_run_workers, options, most, pending_hellos, listeners, first),
                    [*listeners[:first], *listeners[first + options.threads :]],
                )
                for first in range(0, loops, options.threads)
            ]
            for listener in listeners:
                listener.close()
            self._announce(address)
            first_message = self._processes.listen(None)
            for control in controls:
                with suppress(OSError):  # a worker that could not write its log has ended by itself
                    control.send(None)
            for final in self._final_messages(loops, first_message):
                counts.add(final.counts)
                error = error or final.error
        if error:
            raise MeasurementError(error)
        duration_s = (time.monotonic_ns() - began_ns) / 1e9
        summary = asdict(counts) | {"duration_s": duration_s, "stopped_by": self._processes.signalled or "log"}
        return summary | {"workers": options.workers, "threads": options.threads}

    def _announce(self, address: str) -> None:
        if self._until is None:
            print(f"listening on {address}", file=sys.stderr, flush=True)
        else:
            self._until.send(address)

    def _final_messages(self, loops: int, first_message: object) -> list[AcceptedConnection]:
        messages = [first_message] if isinstance(first_message, AcceptedConnection) else []
        deadline_s = time.monotonic() + _END_PATIENCE_S
        while len(messages) < loops:
            message = self._processes.listen(max(0.0, deadline_s - time.monotonic()))
            if isinstance(message, AcceptedConnection):
                messages.append(message)
            elif time.monotonic() > deadline_s:
                raise MeasurementError("the receiver's processes do not end; its log may lack the last flows")
        return messages


def _connection_limits(options: ReceiveOptions, loops: int) -> tuple[int, int]:
    """Return the limits per loop of connections with a valid hello and of those without."""
    most = -(-options.max_connections // loops)
    files = raise_file_limit(options.threads * (most + MAX_PENDING_HELLOS) + _OTHER_FILES)
    room = max(2, (files - _OTHER_FILES) // options.threads)
    pending_hellos = min(MAX_PENDING_HELLOS, max(1, room // 4, room - most))
    return min(most, room - pending_hellos), pending_hellos


def _run_workers(
    options: ReceiveOptions,
    most: int,
    pending_hellos: int,
    listeners: Sequence[socket.socket],
    first: int,
    control: Connection,
) -> None:
    lock = threading.Lock()

    def work(index: int) -> None:
        worker = ReceiverWorker(index, options, most, pending_hellos)
        asyncio.run(worker.run(listeners[index], control, lock))

    gc.freeze()
    threads = [threading.Thread(target=work, args=(first + at,)) for at in range(1, options.threads)]
    for thread in threads:
        thread.start()
    work(first)
    for thread in threads:
        thread.join()


def _listen(options: ReceiveOptions, loops: int) -> list[socket.socket]:
    """Open a listening socket for each loop; they share the port only among themselves."""
    family, address = protocol.resolve(options.bind)
    if not options.token and not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
        raise UsageError(f"others can reach {options.bind}: give --token-file or set RINGTAP_TOKEN, the same for all")
    listeners: list[socket.socket] = []
    try:
        listeners.append(_bind(family, address, share=False))
        if loops > 1:
            address = listeners[0].getsockname()[:2]
            listeners.pop().close()
            for _ in range(loops):
                listeners.append(_bind(family, address, share=True))
        for listener in listeners:
            listener.listen(_BACKLOG)
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise UsageError(
            f"cannot listen on {options.bind}: {error.strerror}; choose another --bind HOST:PORT"
        ) from error
    return listeners


def _bind(family: socket.AddressFamily, address: tuple[str, int], share: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock
