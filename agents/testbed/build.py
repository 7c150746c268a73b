"""Builds a testbed's namespaces, links and limits with netlink, inside its init process.

A route attribute sets the congestion control, because it also applies to unmodified programs and is allowed where the
kernel-wide sysctl is not. TCP may pass only a few packets to a link in one piece (``gso_max_segs``): at 250 Mbit/s the
usual piece of 64 kB blocks a link for 2 ms, whereas single packets cost a timer each.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pyroute2 import IPRoute, NetlinkError, NetNS
from pyroute2 import netns as named_namespaces

from ringtap.agents.testbed import namespaces, shortest_path_routes
from ringtap.agents.testbed.topology import (
    AGGREGATOR_IP,
    SWITCH_NIC,
    Link,
    LinkCount,
    TestbedSpec,
    carried_bps,
    cross_nic,
)
from ringtap.collectors.netlink import HEADER_BYTES, ROUTE, NetlinkSocket
from ringtap.collectors.qdisc import BASIC, DUMP_DISCIPLINES, kind_and_statistics
from ringtap.core.errors import MeasurementError, UsageError, error_message
from ringtap.core.testbed_options import SWITCH

_T = TypeVar("_T")

HOSTS_FILE = "/run/ringtap-hosts"
# a larger range of ports: 1,100 short connections per second use up the default range in 25 s
_SYSCTLS = {
    "net/ipv4/ip_local_port_range": "10000 65000",
    "net/ipv4/tcp_tw_reuse": "1",
    "net/ipv4/conf/all/arp_ignore": "1",
    "net/ipv4/conf/all/arp_announce": "2",
}
# of a node that routes: it takes packets by any way, and spreads flows over shortest paths by their ports
_ROUTING_SYSCTLS = {
    "net/ipv4/ip_forward": "1",
    "net/ipv4/fib_multipath_hash_policy": "1",
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
}
_NO_PREFIX_ROUTE = 0x200
_NETEM_PACKETS = 1_000_000
_ON_LINK = 4  # the gateway is at the other end of the interface's link, in whatever network


class Subnet(NamedTuple):
    """Addresses of one kind of traffic.

    Attributes:
        destination: their network.
        address: function from a testbed and a host to the host's address.
        nic: function from an interface for training to the one for this traffic on the same link.
    """

    destination: str
    address: Callable[[TestbedSpec, str], str]
    nic: Callable[[str], str]


TRAINING = Subnet("10.77.0.0/24", TestbedSpec.training_ip, str)
CROSS = Subnet("10.78.0.0/24", TestbedSpec.cross_ip, cross_nic)


def job_network(spec: TestbedSpec, job: int) -> Subnet:
    """Return the addresses of a job's traffic."""
    return Subnet(
        spec.job_network(job), lambda spec, host: spec.job_ip(host, job), functools.partial(spec.job_nic, job)
    )


def build(spec: TestbedSpec) -> None:
    """Build the whole testbed in the current mount namespace.

    Raises:
        UsageError: the kernel lacks a feature that the testbed needs; the message names it.
    """
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # the netlink socket of a node takes four
    _write_hosts_file(spec)
    is_star = spec.topology == "star"
    for node in spec.nodes:
        named_namespaces.create(node)
        if node != SWITCH:
            in_namespace(node, lambda: _set_sysctls(_SYSCTLS if is_star else _SYSCTLS | _ROUTING_SYSCTLS))
    with contextlib.ExitStack() as stack:
        netlinks = {node: stack.enter_context(NetNS(node)) for node in spec.nodes}
        for netlink in netlinks.values():
            netlink.link("set", index=1, state="up")
        if is_star:
            bridge = _add_bridge(spec, netlinks[SWITCH])
        indexes: dict[tuple[str, str], int] = {}
        for link in spec.links:
            if (link.source, link.source_nic) not in indexes:
                indexes |= _add_link(link, netlinks)
        for link in spec.links:
            indexes |= _set_up(spec, netlinks[link.source], indexes[link.source, link.source_nic], link)
        networks = ((shortest_path_routes.routes(spec), network) for network in (TRAINING, CROSS))
        paths = ((shortest_path_routes.path_routes(spec, 0), job_network(spec, job)) for job in range(spec.jobs))
        for by_node, network in (*networks, *paths):
            for node, found in by_node.items():
                own = {nic: index for (owner, nic), index in indexes.items() if owner == node}
                set_routes(spec, netlinks[node], node, found, network, own, spec.congestion_control)
        if is_star:  # for a process there; the ports have changed the bridge
            netlinks[SWITCH].link("set", index=bridge, gso_max_segs=spec.offload_segments)
            netlinks[SWITCH].addr("add", index=bridge, address=AGGREGATOR_IP, prefixlen=24, flags=_NO_PREFIX_ROUTE)
            options = {"dst": "10.77.0.0/24", "oif": bridge, "prefsrc": AGGREGATOR_IP, "scope": "link"}
            set_route(netlinks[SWITCH], options, spec.congestion_control)


def _add_bridge(spec: TestbedSpec, switch: NetNS) -> int:
    need("bridge", lambda: switch.link("add", ifname=SWITCH_NIC, kind="bridge"))
    bridge: int = switch.link_lookup(ifname=SWITCH_NIC)[0]
    switch.link("set", index=bridge, state="up", mtu=spec.mtu)
    return bridge


def _write_hosts_file(spec: TestbedSpec) -> None:
    lines = ["127.0.0.1 localhost"]
    lines += [f"{AGGREGATOR_IP} {spec.aggregator}"] if spec.aggregator else []
    lines += [f"{spec.training_ip(host)} {host}" for host in spec.hosts]
    lines += [f"{spec.cross_ip(host)} {host}-cross" for host in spec.hosts]
    Path(HOSTS_FILE).write_text("\n".join(lines) + "\n")


def _add_link(link: Link, netlinks: Mapping[str, NetNS]) -> dict[tuple[str, str], int]:
    """Add a link and return the indexes of its interfaces by node and name."""
    source = netlinks[link.source]
    peer = {"ifname": link.target_nic, "net_ns_fd": link.target}
    need("veth", lambda: source.link("add", ifname=link.source_nic, kind="veth", peer=peer))
    ends = ((link.source, link.source_nic), (link.target, link.target_nic))
    return {(node, nic): netlinks[node].link_lookup(ifname=nic)[0] for node, nic in ends}


def _set_up(spec: TestbedSpec, netlink: NetNS, index: int, link: Link) -> dict[tuple[str, str], int]:
    """Set up the interface from which a link leads, with its limit and its addresses.

    Returns:
        The indexes of a host's further interfaces, by node and name.
    """
    netlink.link("set", index=index, mtu=spec.mtu, state="up", gso_max_segs=spec.offload_segments)
    limit(spec, netlink, index, link.rate_bps)
    if link.target not in (*spec.hosts, SWITCH):
        options = {"dst": f"{spec.switch_ip(link.target)}/32", "oif": index, "scope": "link"}
        set_route(netlink, options, spec.congestion_control)
    if link.source in spec.hosts:
        host = link.source
        netlink.addr("add", index=index, address=spec.training_ip(host), prefixlen=24, flags=_NO_PREFIX_ROUTE)
        above = [CROSS, *(job_network(spec, job) for job in range(spec.jobs))]
        return {
            (host, nic): _add_macvlan(spec, netlink, index, nic, network.address(spec, host))
            for network in above
            for nic in [network.nic(link.source_nic)]
        }
    if link.source == SWITCH:
        netlink.link("set", index=index, master=netlink.link_lookup(ifname=SWITCH_NIC)[0])
    else:
        netlink.addr("add", index=index, address=spec.switch_ip(link.source), prefixlen=32)
    return {}


def _add_macvlan(spec: TestbedSpec, netlink: NetNS, below: int, name: str, address: str) -> int:
    """Add an interface with an address to a host's link, and return its index."""
    need("macvlan", lambda: netlink.link("add", ifname=name, kind="macvlan", link=below, macvlan_mode="bridge"))
    index: int = netlink.link_lookup(ifname=name)[0]
    netlink.link("set", index=index, mtu=spec.mtu, state="up", gso_max_segs=spec.offload_segments)
    netlink.addr("add", index=index, address=address, prefixlen=24, flags=_NO_PREFIX_ROUTE)
    return index


def need(kind: str, action: Callable[[], object]) -> None:
    """Use a feature of the kernel.

    Raises:
        UsageError: the kernel lacks it.
    """
    try:
        action()
    except NetlinkError as error:
        if error.code in (errno.EOPNOTSUPP, errno.ENODEV, errno.EINVAL, errno.ENOENT):
            use = ", which delays links" if kind == "sch_netem" else ""
            raise UsageError(
                f"this kernel has no {kind}{use}: load it (modprobe {kind}) or use another kernel"
            ) from error
        raise


def limit(spec: TestbedSpec, netlink: NetNS | IPRoute, index: int, rate_bps: int) -> None:
    """Give the link that leads from an interface its delay, its rate and its queue."""
    parent = {}
    if spec.delay_s:
        delay_us = round(spec.delay_s * 1e6)
        need(
            "sch_netem",
            lambda: netlink.tc("add", "netem", index, handle="1:", delay=delay_us, limit=_NETEM_PACKETS),
        )
        parent = {"parent": "1:1"}
    limit = {"rate": rate_bps // 8, "burst": spec.burst_bytes, "limit": spec.queue_bytes}
    need("sch_tbf", lambda: netlink.tc("add", "tbf", index, **limit, **parent))


def set_routes(
    spec: TestbedSpec,
    netlink: NetNS | IPRoute,
    node: str,
    routes: Iterable[shortest_path_routes.Route],
    network: Subnet,
    indexes: Mapping[str, int],
    congestion_control: str,
) -> None:
    """Add or replace routes of a node for one kind of traffic; a bridge has none.

    Args:
        spec: the testbed.
        netlink: socket in the node's namespace.
        node: the node.
        routes: its routes.
        network: the traffic.
        indexes: indexes of the node's interfaces by name.
        congestion_control: congestion control of connections that begin on the routes.
    """
    is_host = node in spec.hosts
    for route in routes if node != SWITCH else ():
        if route.host not in (None, *spec.hosts) and network != TRAINING:
            continue
        destination = network.destination if route.host is None else f"{network.address(spec, route.host)}/32"
        options: dict[str, Any] = {"dst": destination}
        options |= {"prefsrc": network.address(spec, node)} if is_host else {}
        hops = []
        for link in route.links:
            nic = network.nic(link.source_nic) if is_host else link.source_nic
            via = network.address(spec, link.target) if link.target in spec.hosts else spec.switch_ip(link.target)
            gateway = {"scope": "link"} if link.target == SWITCH else {"gateway": via, "flags": _ON_LINK}
            hops.append({"oif": indexes[nic]} | gateway)
        set_route(netlink, options | (hops[0] if len(hops) == 1 else {"multipath": hops}), congestion_control)


def set_route(netlink: NetNS | IPRoute, options: Mapping[str, Any], congestion_control: str) -> None:
    """Add or replace a route, with the congestion control of TCP connections that begin on it.

    Raises:
        UsageError: the kernel lacks the congestion control.
    """
    try:
        netlink.route("replace", metrics={"cc_algo": congestion_control}, **options)
    except NetlinkError as error:
        if error.code != errno.EINVAL:
            raise
        known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().strip()
        raise UsageError(
            f"this kernel has no congestion control {congestion_control!r} loaded (it has: {known}); "
            f"choose one of these or load it (modprobe tcp_{congestion_control})"
        ) from error


def _set_sysctls(sysctls: Mapping[str, str]) -> None:
    """Write the namespace's own sysctls; /proc/sys shows those of the calling thread's network namespace."""
    for name, value in sysctls.items():
        Path("/proc/sys", name).write_text(value)


def in_namespace(host: str, work: Callable[[], _T]) -> _T:
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
_CHUNK_BYTES = 262_144
AT_ONCE_BPS = 4_000_000_000  # of links that are measured at the same time: about half a core
TCP_CONGESTION = 13


def _socket_in(host: str) -> socket.socket:
    """Return a TCP socket in another network namespace, to which it belongs whichever thread uses it."""
    return in_namespace(host, lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))


def _send(sock: socket.socket) -> None:
    data = bytes(_CHUNK_BYTES)
    with contextlib.suppress(OSError):
        while True:
            sock.sendall(data)


def _discard(sock: socket.socket) -> None:
    buffer = bytearray(_CHUNK_BYTES)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _CHUNK_BYTES)  # wakes up less often
        while sock.recv_into(buffer, 0, socket.MSG_TRUNC):  # does not copy
            pass


def _connect(source: str, target: str, address: str, nic: str = "") -> tuple[socket.socket, socket.socket]:
    """Connect a node with an address of another one, by an interface if one is given; return both ends."""
    listener, sender = _socket_in(target), _socket_in(source)
    with listener:
        listener.bind((address, 0))
        listener.listen()
        sender.settimeout(3)
        try:
            if nic:
                sender.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, nic.encode())
            sender.connect(listener.getsockname())
        except OSError as error:
            raise MeasurementError(f"{target} cannot be reached from {source}: {error_message(error)}") from error
        sender.settimeout(None)
        return sender, listener.accept()[0]


def _connections(spec: TestbedSpec, links: Sequence[Link]) -> list[tuple[socket.socket, socket.socket]]:
    """Return connections that fill links: from host to host around a star, or one within each link."""
    if spec.topology == "star":
        ring = zip(spec.hosts, (*spec.hosts[1:], spec.hosts[0]), strict=True)
        return [_connect(host, peer, spec.training_ip(peer)) for host, peer in ring]
    return [
        _connect(
            link.source,
            link.target,
            spec.training_ip(link.target) if link.target in spec.hosts else spec.switch_ip(link.target),
            link.source_nic,
        )
        for link in links
    ]


class _NodeCounters:
    """Counters of the limits in a node's network namespace, which the making thread has joined."""

    def __init__(self) -> None:
        self._netlink = NetlinkSocket(ROUTE)
        self._names = dict(socket.if_nameindex())
        self._found: dict[str, tuple[int, int]] = {}

    def read(self) -> dict[str, LinkCount]:
        """Return the counters of each interface with a limit."""
        self._found.clear()
        begin_ns = time.monotonic_ns()
        self._netlink.dump_each(DUMP_DISCIPLINES, self._take)
        end_ns = time.monotonic_ns()
        return {nic: LinkCount(begin_ns, end_ns, *counts) for nic, counts in self._found.items()}

    def _take(self, _: int, data: memoryview, begin: int, end: int) -> None:
        kind, places = kind_and_statistics(data, begin, end)
        if kind == "tbf" and BASIC in places:
            (index,) = struct.unpack_from("=I", data, begin + HEADER_BYTES + 4)
            self._found[self._names[index]] = struct.unpack_from("=QI", data, places[BASIC])


class LinkCounters:
    """Counters of a testbed's links, by a socket in the namespace of each node."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        nodes = dict.fromkeys(link.source for link in links)
        self._nodes = {node: in_namespace(node, _NodeCounters) for node in nodes}

    def read(self) -> list[LinkCount]:
        """Return the counters of each link.

        Raises:
            MeasurementError: a link has lost its limit.
        """
        found = {(node, nic): count for node, one in self._nodes.items() for nic, count in one.read().items()}
        for link in self._links:
            if (link.source, link.source_nic) not in found:
                raise MeasurementError(f"{link.source_nic} of {link.source} has lost its rate limit")
        return [found[link.source, link.source_nic] for link in self._links]


def measure_links(spec: TestbedSpec, numbers: Sequence[int] = ()) -> dict[int, dict[str, Any]]:
    """Measure links, as many at once as this machine can carry; those of a star all at once.

    Args:
        spec: the testbed.
        numbers: numbers of the links in ``spec.links`` (default: all).

    Returns:
        By number of the link: ``host``, ``direction`` (``up`` leaves the host), ``asked_bps``, ``measured_bps``
        (Ethernet frames, as the limit counts them) and ``congestion_control`` (the one in use).

    Raises:
        MeasurementError: a node cannot be reached, or its counters were reset.
    """
    if spec.topology == "star":
        return _measure_at_once(spec, range(len(spec.links)))
    found: dict[int, dict[str, Any]] = {}
    batch: list[int] = []
    for number in numbers or range(len(spec.links)):
        if batch and sum(spec.links[each].rate_bps for each in (*batch, number)) > AT_ONCE_BPS:
            found |= _measure_at_once(spec, batch)
            batch = []
        batch.append(number)
    return found | _measure_at_once(spec, batch)


def _measure_at_once(spec: TestbedSpec, numbers: Sequence[int]) -> dict[int, dict[str, Any]]:
    links = [spec.links[number] for number in numbers]
    connections = _connections(spec, links)
    control = connections[0][0].getsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, 16).rstrip(b"\0").decode()
    threads = [
        threading.Thread(target=work, args=(sock,), daemon=True)
        for ends in connections
        for work, sock in zip((_send, _discard), ends, strict=True)
    ]
    for thread in threads:
        thread.start()
    time.sleep(_WARM_UP_S)
    counters = LinkCounters(links)
    before = counters.read()
    time.sleep(_WINDOW_S)
    after = counters.read()
    sockets = [sock for ends in connections for sock in ends]
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()
    for sock in sockets:
        sock.close()
    found = {}
    for number, link, first, last in zip(numbers, links, before, after, strict=True):
        host, direction = link.place
        item = {"host": host, "direction": direction, "asked_bps": link.rate_bps}
        found[number] = item | {"measured_bps": round(carried_bps(link, first, last)), "congestion_control": control}
    return found
