"""Check of a testbed's links: TCP around the ring of hosts, counted behind the rate limits.

Every host sends to the next, so each link is full in both directions at once. The rates come from the limits' own
counters: they count every frame, while an interface counts several packets in one piece once.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

from pyroute2 import NetNS

from ringtap.agents.testbed import namespaces
from ringtap.agents.testbed.topology import SWITCH, TRAINING_NIC, TestbedSpec
from ringtap.errors import MeasurementError

_WARM_UP_S = 0.5
_WINDOW_S = 1.0
_CHUNK_BYTES = 65536
TCP_CONGESTION = 13


def _socket_in(host: str) -> socket.socket:
    """A TCP socket in another network namespace; it stays there, whichever thread uses it."""
    made: list[socket.socket] = []

    def work() -> None:
        with open(f"/run/netns/{host}") as file:  # noqa: PTH123 - a namespace handle, not a file to read
            namespaces.setns(file.fileno(), namespaces.NEWNET)
        made.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return made[0]


def _send(sock: socket.socket) -> None:
    data = bytes(_CHUNK_BYTES)
    with contextlib.suppress(OSError):
        while True:
            sock.sendall(data)


def _discard(sock: socket.socket) -> None:
    buffer = bytearray(_CHUNK_BYTES)
    with contextlib.suppress(OSError):
        while sock.recv_into(buffer):
            pass


def _connect_ring(spec: TestbedSpec) -> tuple[list[socket.socket], list[socket.socket]]:
    senders, receivers = [], []
    for index, host in enumerate(spec.hosts):
        peer = spec.hosts[(index + 1) % len(spec.hosts)]
        listener, sender = _socket_in(peer), _socket_in(host)
        with listener:
            listener.bind((spec.training_ip(peer), 0))
            listener.listen()
            sender.settimeout(3)
            try:
                sender.connect(listener.getsockname())
            except OSError as error:
                raise MeasurementError(f"{peer} cannot be reached from {host}: {error}") from error
            sender.settimeout(None)
            receivers.append(listener.accept()[0])
        senders.append(sender)
    return senders, receivers


def _sent_bytes(netlink: NetNS, nic: str) -> tuple[float, int]:
    """Time (s) and bytes that an interface's limit has let through."""
    index = netlink.link_lookup(ifname=nic)[0]
    for qdisc in netlink.get_qdiscs(index=index):
        if qdisc.get_attr("TCA_KIND") == "tbf":
            return time.monotonic(), int(qdisc.get_attr("TCA_STATS2").get_attr("TCA_STATS_BASIC")["bytes"])
    raise MeasurementError(f"{nic} has lost its rate limit")


def measure_links(spec: TestbedSpec) -> list[dict[str, Any]]:
    """Measure every link in both directions at once.

    Returns:
        One item per host and direction: ``host``, ``direction`` (``up`` leaves the host), ``asked_bps``,
        ``measured_bps`` (Ethernet frames, as the limit counts them) and ``congestion_control`` in force.

    Raises:
        MeasurementError: a host cannot be reached.
    """
    senders, receivers = _connect_ring(spec)
    control = senders[0].getsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, 16).rstrip(b"\0").decode()
    threads = [threading.Thread(target=_send, args=(sock,), daemon=True) for sock in senders]
    threads += [threading.Thread(target=_discard, args=(sock,), daemon=True) for sock in receivers]
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(NetNS(SWITCH))
        limits = {(host, "down"): (switch, spec.port(host)) for host in spec.hosts}
        limits |= {(host, "up"): (stack.enter_context(NetNS(host)), TRAINING_NIC) for host in spec.hosts}
        for thread in threads:
            thread.start()
        time.sleep(_WARM_UP_S)
        before = {key: _sent_bytes(*limit) for key, limit in limits.items()}
        time.sleep(_WINDOW_S)
        after = {key: _sent_bytes(*limit) for key, limit in limits.items()}
    for sock in senders + receivers:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()
    for sock in senders + receivers:
        sock.close()
    links = []
    for host, direction in sorted(limits):
        seconds, size_bytes = (
            now - then for now, then in zip(after[host, direction], before[host, direction], strict=True)
        )
        item = {"host": host, "direction": direction, "asked_bps": spec.rate_bps}
        links.append(item | {"measured_bps": round(size_bytes * 8 / seconds), "congestion_control": control})
    return links
