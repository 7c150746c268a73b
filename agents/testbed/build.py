"""Construction of a testbed's namespaces, links and limits with netlink, inside its init process.

A route attribute sets the congestion control: it affects unedited programs and is allowed where the kernel-wide sysctl
is not. TCP may hand only a few packets to a link in one piece (``gso_max_segs``): at 250 Mbit/s the usual 64 kB
super-packet blocks a link for 2 ms, and single packets cost a timer each.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from pyroute2 import NetlinkError, NetNS
from pyroute2 import netns as named_namespaces

from ringtap.agents.testbed.topology import CROSS_NIC, SWITCH, TRAINING_NIC, TestbedSpec
from ringtap.errors import UsageError

HOSTS_FILE = "/run/ringtap-hosts"
# Ports must last for kept and for many short connections: 1,100 flows/s use up the default range in 25 s.
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
        UsageError: the kernel lacks something the testbed needs; the message names it.
    """
    _write_hosts_file(spec)
    for name in (SWITCH, *spec.hosts):
        named_namespaces.create(name)
    with NetNS(SWITCH) as switch:
        switch.link("set", index=1, state="up")
        _need("bridge", lambda: switch.link("add", ifname="bridge", kind="bridge"))
        bridge = switch.link_lookup(ifname="bridge")[0]
        switch.link("set", index=bridge, state="up", mtu=spec.mtu)
        for host in spec.hosts:
            _add_host(spec, host, switch, bridge)


def _write_hosts_file(spec: TestbedSpec) -> None:
    lines = ["127.0.0.1 localhost"]
    lines += [f"{spec.training_ip(host)} {host}" for host in spec.hosts]
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
        _set_sysctls(host)


def _need(kind: str, action: Callable[[], object]) -> None:
    try:
        action()
    except NetlinkError as error:
        if error.code in (errno.EOPNOTSUPP, errno.ENODEV, errno.EINVAL):
            raise UsageError(f"this kernel has no {kind}: load it (modprobe {kind}) or use another kernel") from error
        raise


def _limit(spec: TestbedSpec, netlink: NetNS, index: int) -> None:
    # the filter's own minimum MTU guards against frames that can never pass; the bucket holds at least one
    rate = spec.rate_bps // 8
    _need(
        "sch_tbf",
        lambda: netlink.tc("add", "tbf", index, rate=rate, burst=spec.burst_bytes, limit=spec.queue_bytes),
    )


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


def _set_sysctls(host: str) -> None:
    """Write the namespace's own sysctls; /proc/sys shows those of the calling thread's network namespace."""
    import threading

    from ringtap.agents.testbed import namespaces

    failures: list[OSError] = []

    def work() -> None:
        try:
            with Path("/run/netns", host).open() as file:
                namespaces.setns(file.fileno(), namespaces.NEWNET)
            for name, value in _SYSCTLS.items():
                Path("/proc/sys", name).write_text(value)
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
