"""Construction of a testbed's namespaces, links and limits with netlink, inside its init process.

A route attribute sets the congestion control, because it also applies to unmodified programs and is allowed where the
kernel-wide sysctl is not. TCP may pass only a few packets to a link in one piece (``gso_max_segs``): at 250 Mbit/s the
usual piece of 64 kB blocks a link for 2 ms, whereas single packets cost a timer each.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pyroute2 import NetlinkError, NetNS
from pyroute2 import netns as named_namespaces

from ringtap.agents.testbed import namespaces
from ringtap.agents.testbed.topology import CROSS_NIC, SWITCH, SWITCH_IP, SWITCH_NIC, TRAINING_NIC, TestbedSpec
from ringtap.errors import MeasurementError, UsageError

_T = TypeVar("_T")

HOSTS_FILE = "/run/ringtap-hosts"
# a larger range of ports: 1,100 short connections per second use up the default range in 25 s
_SYSCTLS = {
    "net/ipv4/ip_local_port_range": "10000 65000",
    "net/ipv4/tcp_tw_reuse": "1",
    "net/ipv4/conf/all/arp_ignore": "1",
    "net/ipv4/conf/all/arp_announce": "2",
}
_NO_PREFIX_ROUTE = 0x200


def build(spec: TestbedSpec) -> None:
    """Build the whole testbed in the current mount namespace.

    Raises:
        UsageError: the kernel lacks a feature that the testbed needs; the message names it.
    """
    _write_hosts_file(spec)
    for name in (SWITCH, *spec.hosts):
        named_namespaces.create(name)
    with NetNS(SWITCH) as switch:
        switch.link("set", index=1, state="up")
        _need("bridge", lambda: switch.link("add", ifname=SWITCH_NIC, kind="bridge"))
        bridge = switch.link_lookup(ifname=SWITCH_NIC)[0]
        switch.link("set", index=bridge, state="up", mtu=spec.mtu)
        for host in spec.hosts:
            _add_host(spec, host, switch, bridge)
        switch.link("set", index=bridge, gso_max_segs=spec.offload_segments)  # its ports have changed it
        _address(spec, switch, bridge, SWITCH_IP, "10.77.0.0/24")


def _write_hosts_file(spec: TestbedSpec) -> None:
    lines = ["127.0.0.1 localhost"]
    lines += [f"{SWITCH_IP} {SWITCH}", *(f"{spec.training_ip(host)} {host}" for host in spec.hosts)]
    lines += [f"{spec.cross_ip(host)} {host}-cross" for host in spec.hosts]
    Path(HOSTS_FILE).write_text("\n".join(lines) + "\n")


def _add_host(spec: TestbedSpec, host: str, switch: NetNS, bridge: int) -> None:
    port = spec.port(host)
    peer = {"ifname": TRAINING_NIC, "net_ns_fd": host}
    _need("veth", lambda: switch.link("add", ifname=port, kind="veth", peer=peer))
    port_index = switch.link_lookup(ifname=port)[0]
    switch.link("set", index=port_index, mtu=spec.mtu, master=bridge, gso_max_segs=spec.offload_segments)
    _limit(spec, switch, port_index)
    switch.link("set", index=port_index, state="up")
    with NetNS(host) as inside:
        inside.link("set", index=1, state="up")
        training = inside.link_lookup(ifname=TRAINING_NIC)[0]
        inside.link("set", index=training, mtu=spec.mtu, state="up", gso_max_segs=spec.offload_segments)
        _limit(spec, inside, training)
        _need(
            "macvlan",
            lambda: inside.link("add", ifname=CROSS_NIC, kind="macvlan", link=training, macvlan_mode="bridge"),
        )
        cross = inside.link_lookup(ifname=CROSS_NIC)[0]
        inside.link("set", index=cross, mtu=spec.mtu, state="up", gso_max_segs=spec.offload_segments)
        _address(spec, inside, training, spec.training_ip(host), "10.77.0.0/24")
        _address(spec, inside, cross, spec.cross_ip(host), "10.78.0.0/24")
        _in_namespace(host, _set_sysctls)


def _need(kind: str, action: Callable[[], object]) -> None:
    try:
        action()
    except NetlinkError as error:
        if error.code in (errno.EOPNOTSUPP, errno.ENODEV, errno.EINVAL):
            raise UsageError(f"this kernel has no {kind}: load it (modprobe {kind}) or use another kernel") from error
        raise


def _limit(spec: TestbedSpec, netlink: NetNS, index: int) -> None:
    rate = spec.rate_bps // 8
    _need("sch_tbf", lambda: netlink.tc("add", "tbf", index, rate=rate, burst=spec.burst_bytes, limit=spec.queue_bytes))


def _address(spec: TestbedSpec, netlink: NetNS, index: int, address: str, network: str) -> None:
    netlink.addr("add", index=index, address=address, prefixlen=24, flags=_NO_PREFIX_ROUTE)
    metrics = {"cc_algo": spec.congestion_control}
    try:
        netlink.route("add", dst=network, oif=index, prefsrc=address, scope="link", metrics=metrics)
    except NetlinkError as error:
        if error.code != errno.EINVAL:
            raise
        known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().strip()
        raise UsageError(
            f"this kernel has no congestion control {spec.congestion_control!r} loaded (it has: {known}); "
            f"choose one of these or load it (modprobe tcp_{spec.congestion_control})"
        ) from error


def _set_sysctls() -> None:
    """Write the namespace's own sysctls; /proc/sys shows those of the calling thread's network namespace."""
    for name, value in _SYSCTLS.items():
        Path("/proc/sys", name).write_text(value)


def _in_namespace(host: str, work: Callable[[], _T]) -> _T:
    """Call a function in a thread that has joined the network namespace of a host.

    Raises:
        OSError: the namespace cannot be joined, or as the function raises.
    """

    def joined() -> _T:
        with Path("/run/netns", host).open() as file:
            namespaces.setns(file.fileno(), namespaces.NEWNET)
        return work()

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(joined).result()


_WARM_UP_S = 0.5
_WINDOW_S = 1.0
_CHUNK_BYTES = 65536
TCP_CONGESTION = 13


def _socket_in(host: str) -> socket.socket:
    """Return a TCP socket in another network namespace, to which it belongs whichever thread uses it."""
    return _in_namespace(host, lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))


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
    """Return the present time (s) and the number of bytes that an interface's limit has let through."""
    index = netlink.link_lookup(ifname=nic)[0]
    for qdisc in netlink.get_qdiscs(index=index):
        if qdisc.get_attr("TCA_KIND") == "tbf":
            return time.monotonic(), int(qdisc.get_attr("TCA_STATS2").get_attr("TCA_STATS_BASIC")["bytes"])
    raise MeasurementError(f"{nic} has lost its rate limit")


def measure_links(spec: TestbedSpec) -> list[dict[str, Any]]:
    """Measure all links in both directions at once.

    Returns:
        One item per host and direction: ``host``, ``direction`` (``up`` leaves the host), ``asked_bps``,
        ``measured_bps`` (Ethernet frames, as the limit counts them) and ``congestion_control`` (the one in use).

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
