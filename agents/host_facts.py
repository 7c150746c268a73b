"""What a host of a cluster says of itself before a sweep: ``python -m ringtap.agents.host_facts``."""

from __future__ import annotations

import json
import shutil
import socket
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from ringtap.agents.clock.source import boot_id

MODULES = ("torch", "horovod")
_TRIES = 100
_USUAL_MTU = 1500


def host_facts() -> dict[str, Any]:
    """The host's facts.

    Returns:
        ``boot_id``, ``iperf3`` (its path or ""), ``modules`` (those of `MODULES` that are
        there) and ``interfaces``: by name ``addresses`` (IPv4), ``mtu`` and ``below`` (interfaces it stands on).
    """
    states = psutil.net_if_stats()
    interfaces: dict[str, dict[str, Any]] = {}
    for label, entries in psutil.net_if_addrs().items():
        name = label.partition(":")[0]  # eth0:1 is a label of another address of eth0
        below = []
        with suppress(OSError):
            below = [path.name.removeprefix("lower_") for path in Path("/sys/class/net", name).glob("lower_*")]
        mtu = states[name].mtu if name in states else _USUAL_MTU
        item = interfaces.setdefault(name, {"addresses": [], "below": below, "mtu": mtu})
        item["addresses"] += [entry.address for entry in entries if entry.family == socket.AF_INET]
    return {
        "boot_id": boot_id(),
        "iperf3": shutil.which("iperf3") or "",
        "modules": [name for name in MODULES if find_spec(name)],
        "interfaces": interfaces,
    }


def free_port(address: str, count: int = 1) -> int:
    """The first of so many TCP ports in a row that nobody listens on.

    Raises:
        OSError: the address is not this host's, or its ports are all in use.
    """
    for attempt in range(_TRIES):
        with ExitStack() as stack:
            try:
                first = stack.enter_context(socket.create_server((address, 0))).getsockname()[1]
                for number in range(1, count):
                    stack.enter_context(socket.create_server((address, first + number)))
            except (OSError, OverflowError):
                if attempt == _TRIES - 1:
                    raise
                continue
            return int(first)
    raise AssertionError


if __name__ == "__main__":
    print(json.dumps(host_facts()))
