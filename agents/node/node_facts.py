"""Collects facts about a node: kernel, processors, interfaces, offloads, queueing disciplines, kernel settings."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import platform
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from ringtap.collectors.ethtool_ioctl import Ethtool
from ringtap.core.errors import failure_message
from ringtap.core.parent_death import die_with_parent

_SYSCTLS = (
    "net/ipv4/tcp_congestion_control",
    "net/ipv4/tcp_available_congestion_control",
    "net/ipv4/tcp_ecn",
    "net/ipv4/tcp_rmem",
    "net/ipv4/tcp_wmem",
    "net/ipv4/tcp_slow_start_after_idle",
    "net/ipv4/tcp_tw_reuse",
    "net/ipv4/ip_local_port_range",
    "net/core/default_qdisc",
    "net/core/rmem_max",
    "net/core/wmem_max",
)
# linux/ethtool.h: ETHTOOL_GTXCSUM, GSG, GTSO, GGSO, GGRO
_OFFLOADS = {"tx_checksum": 0x16, "scatter_gather": 0x18, "tso": 0x1E, "gso": 0x23, "gro": 0x2B}
TIMEOUT_S = 10.0


def node_facts() -> dict[str, Any]:
    """Facts about this node now; if netlink fails, ``links_missing`` with the reason replaces ``links``."""
    import psutil

    facts: dict[str, Any] = {
        "t_ns": time.time_ns(),
        "host": platform.node(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average_1min": os.getloadavg()[0],
        "nics": {name: row._asdict() | {"duplex": str(row.duplex)} for name, row in psutil.net_if_stats().items()},
        "sysctls": {name.replace("/", "."): _sysctl(name) for name in _SYSCTLS},
    }
    addresses = _addresses()
    for name, nic in facts["nics"].items():
        own = addresses.get(name, {"addresses": [], "networks": []})
        nic.update(own, offloads=_offloads(name), driver=_driver(name))
    try:
        facts["links"] = _links()
    except Exception as error:  # netlink facts are optional: the reason is recorded, the run continues
        facts["links_missing"] = failure_message(error)
    return facts


def _sysctl(name: str) -> str | None:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return None


def _addresses() -> dict[str, dict[str, list[str]]]:
    """The IP addresses of each interface, and the networks that they are in."""
    import psutil

    families, found = (socket.AF_INET, socket.AF_INET6), {}
    for nic, rows in psutil.net_if_addrs().items():
        of_ip = [(row.address.partition("%")[0], row.netmask) for row in rows if row.family in families]
        networks = sorted({network for address, mask in of_ip if mask and (network := _network(address, mask))})
        found[nic] = {"addresses": [address for address, _ in of_ip], "networks": networks}
    return found


def _network(address: str, mask: str) -> str:
    """The network of an address, such as ``10.0.0.0/24``; empty for an address that other nodes cannot reach."""
    length = bin(int(ipaddress.ip_address(mask))).count("1")  # an IPv6 mask is no prefix length to this module
    network = ipaddress.ip_network(f"{address}/{length}", strict=False)
    return "" if network.is_loopback or network.is_link_local else str(network)


def _driver(nic: str) -> str | None:
    with contextlib.suppress(OSError):
        return Path(f"/sys/class/net/{nic}/device/driver").readlink().name
    return None


def _offloads(nic: str) -> dict[str, bool]:
    """The state of the offloads that affect packet captures; unknown ones are left out."""
    found = {}
    with contextlib.closing(Ethtool()) as ethtool:
        for name, command in _OFFLOADS.items():
            with contextlib.suppress(OSError):
                found[name] = bool(ethtool.value(nic, command))
    return found


def _links() -> dict[str, Any]:
    """Interfaces from netlink: offload segments, queueing discipline and its limits, and the interfaces below."""
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        found = list(netlink.get_links())
        links = {
            link["index"]: {
                "name": link.get_attr("IFLA_IFNAME"),
                "index": link["index"],
                "qdisc": link.get_attr("IFLA_QDISC"),
                "gso_max_segs": link.get_attr("IFLA_GSO_MAX_SEGS"),
                "tx_queue_packets": link.get_attr("IFLA_TXQLEN"),
                "below": [],
            }
            for link in found
        }
        for link in found:
            _stack(link, links)
        for qdisc in netlink.get_qdiscs():
            options = qdisc.get_attr("TCA_OPTIONS")
            limits = options.get_attr("TCA_TBF_PARMS") if qdisc.get_attr("TCA_KIND") == "tbf" and options else None
            if limits:
                links[qdisc["index"]] |= {"rate_bps": limits["rate"] * 8, "queue_bytes": limits["limit"]}
    return {str(link.pop("name")): link for link in links.values()}


def _stack(link: Any, links: dict[int, dict[str, Any]]) -> None:
    """Note the interface below this one (VLAN, macvlan), or this one below its master (bond, bridge)."""
    info = link.get_attr("IFLA_LINKINFO")
    kind = info.get_attr("IFLA_INFO_KIND") if info else None
    lower, master = link.get_attr("IFLA_LINK"), link.get_attr("IFLA_MASTER")
    # IFLA_LINK of a veth names its peer; in another network namespace, indices differ
    if lower in links and lower != link["index"] and kind != "veth" and link.get_attr("IFLA_LINK_NETNSID") is None:
        links[link["index"]]["below"].append(links[lower]["name"])
    if master in links:
        links[master]["below"].append(links[link["index"]]["name"])


class FactsChild:
    """A child process that collects the node's facts, so that its end frees the 20 MB of netlink's library.

    Start it before there are threads, or while all threads are idle.
    """

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        end_with_agent = die_with_parent()
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                end_with_agent()
                with contextlib.suppress(OSError):
                    Path("/proc/self/comm").write_text("ringtap-facts")
                with os.fdopen(writer, "w") as file:
                    json.dump(node_facts(), file)
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        self._deadline_s = time.monotonic() + TIMEOUT_S
        self._data = b""

    def fileno(self) -> int:
        """The pipe's file descriptor, for polling."""
        return self._reader

    def poll(self, seconds: float = 0.0) -> dict[str, Any] | None:
        """The facts; None if they are not complete within so many seconds, ``{}`` if they could not be collected."""
        until_s = min(self._deadline_s, time.monotonic() + seconds)
        while True:
            left_s = until_s - time.monotonic()
            if select.select([self._reader], [], [], max(0.0, left_s))[0]:
                chunk = os.read(self._reader, 1 << 16)
                self._data += chunk
                if not chunk:
                    return self._end()
            elif time.monotonic() >= self._deadline_s:
                return self._end()
            elif left_s <= 0:
                return None

    def _end(self) -> dict[str, Any]:
        os.close(self._reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        try:
            facts: dict[str, Any] = json.loads(self._data)
        except ValueError:
            return {}
        return facts
