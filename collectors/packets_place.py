"""Where packets are captured: the interface, and what must be known of it to understand them.

Nothing is read from /sys/class/net: in a network namespace it may show another namespace's interfaces.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil

from ringtap.collectors.ethtool_ioctl import offloads

ROUTES = Path("/proc/net/route")
ROUTES6 = Path("/proc/net/ipv6_route")
_ANYWHERE6 = "00000000000000000000000000000000 00"


def _default_route() -> str:
    try:
        for line in ROUTES.read_text().splitlines()[1:]:
            columns = line.split()
            if columns[1] == columns[7] == "00000000":
                return columns[0]
        for line in ROUTES6.read_text().splitlines():
            if line.startswith(_ANYWHERE6) and not line.endswith(" lo"):
                return line.split()[-1]
    except OSError:
        pass
    return ""


def _is_loopback(stats: Any) -> bool:
    return "loopback" in stats.flags.split(",")


def exists(name: str) -> bool:
    """Whether there is an interface of this name; ``any`` is all of them."""
    return name == "any" or name in psutil.net_if_stats()


def is_loopback(name: str) -> bool:
    """Whether it is the loopback interface."""
    stats = psutil.net_if_stats().get(name)
    return stats is not None and _is_loopback(stats)


def default_interface() -> str:
    """The interface the training most likely uses; empty where there is none.

    In this order: what ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` names; the one with the default route; the
    first that is up.
    """
    there = psutil.net_if_stats()
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for word in os.environ.get(variable, "").split(","):
            if word.strip().lstrip("=") in there:
                return word.strip().lstrip("=")
    route = _default_route()
    if route in there:
        return route
    return next((name for name, stats in sorted(there.items()) if stats.isup and not _is_loopback(stats)), "")


def has_rdma() -> bool:
    """Whether the node has devices whose traffic goes past the kernel and so past any capture."""
    try:
        return any(Path("/sys/class/infiniband").iterdir())
    except OSError:
        return False


def facts(name: str) -> dict[str, Any]:
    """MTU and offloads of an interface; with segmentation offloads a captured packet holds many of the wire's."""
    stats = psutil.net_if_stats().get(name)
    return {"mtu": stats.mtu if stats else None, "offloads": offloads(name)}
