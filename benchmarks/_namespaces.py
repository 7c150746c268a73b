"""Two network namespaces with a veth pair, held by a child process: when it ends, the kernel removes them.

Run as a program (``python _namespaces.py``), this module is that process: it creates the namespaces, prints which
processes hold them, and waits until it is ended. It needs root, or permission to create user namespaces.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _processes import Processes

from ringtap.agents.testbed import namespaces
from ringtap.core.errors import RingtapError
from ringtap.core.parent_death import die_with_parent

LEFT, RIGHT = "10.79.0.1", "10.79.0.2"
# One connection per flow uses up the default port range within seconds; a port can be reused only after a minute.
_SYSCTLS = {"ip_local_port_range": "10000 65000", "tcp_tw_reuse": "1"}


class Namespace:
    """A network namespace that a process holds, with file descriptors to enter it."""

    def __init__(self, pid: int) -> None:
        base, own = Path(f"/proc/{pid}/ns"), Path("/proc/self/ns")
        kinds = {"user": namespaces.NEWUSER, "net": namespaces.NEWNET}
        # the user namespace first, if it is another one: it gives permission to enter the network namespace
        self._handles = [
            (os.open(base / name, os.O_RDONLY | os.O_CLOEXEC), kind)
            for name, kind in kinds.items()
            if (base / name).stat().st_ino != (own / name).stat().st_ino
        ]

    def join(self) -> None:
        """Enter the namespace; only for a forked process that then runs its command."""
        for fd, kind in self._handles:
            namespaces.setns(fd, kind)


@dataclass(frozen=True)
class Route:
    """The ends of a measured path: where sender and receiver run, and the receiver's address.

    Attributes:
        name: ``loopback`` or ``veth``.
        sender: the sender's namespace; None: the benchmark's.
        receiver: the receiver's namespace.
        address: the receiver's address.
        interface: the interface on which the sender sends.
    """

    name: str
    sender: Namespace | None
    receiver: Namespace | None
    address: str
    interface: str


def make_routes(processes: Processes) -> tuple[list[Route], str]:
    """Create the routes: loopback and veth, or only this machine's loopback and a sentence with the reason."""
    holder = processes.start([sys.executable, str(Path(__file__).resolve())])
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s and not holder.errors_so_far().endswith("\n"):
        time.sleep(0.01)
    try:
        pids = json.loads(holder.errors_so_far())
        left, right = Namespace(pids["left"]), Namespace(pids["right"])
    except (ValueError, KeyError, OSError):
        why = holder.end().stderr.strip().splitlines()
        sentence = f"Loopback only, without namespaces: {why[-1] if why else 'they were not ready in time'}"
        return [Route("loopback", None, None, "127.0.0.1", "lo")], sentence
    return [Route("loopback", left, left, "127.0.0.1", "lo"), Route("veth", left, right, RIGHT, "left")], ""


def _hold() -> None:
    """Create the namespaces, report them on standard error, and wait to be ended."""
    from pyroute2 import IPRoute

    namespaces.isolate(namespaces.NEWNET)
    ready, go_on = os.pipe(), os.pipe()
    end_with_left = die_with_parent()
    other = os.fork()
    if other == 0:
        end_with_left()
        namespaces.unshare(namespaces.NEWNET)
        os.write(ready[1], b"1")
        os.read(go_on[0], 1)
        _configure(IPRoute, "right", RIGHT)
        _await_carrier(IPRoute, "right")
        os.write(ready[1], b"2")
        while True:
            signal.pause()
    _expect(ready[0], b"1")
    with IPRoute() as link:
        link.link("add", ifname="left", kind="veth", peer={"ifname": "right", "net_ns_fd": f"/proc/{other}/ns/net"})
    _configure(IPRoute, "left", LEFT)
    os.write(go_on[1], b"1")
    _expect(ready[0], b"2")
    _await_carrier(IPRoute, "left")
    print(json.dumps({"left": os.getpid(), "right": other}), file=sys.stderr, flush=True)
    while True:
        signal.pause()


def _configure(netlink: Any, interface: str, address: str) -> None:
    with netlink() as link:
        link.link("set", index=1, state="up")
        index = link.link_lookup(ifname=interface)[0]
        link.addr("add", index=index, address=address, prefixlen=24)
        link.link("set", index=index, state="up")
    for name, value in _SYSCTLS.items():
        Path(f"/proc/sys/net/ipv4/{name}").write_text(value)


def _await_carrier(netlink: Any, interface: str) -> None:
    """Wait until a link is up, which may take a second after its configuration."""
    with netlink() as link:
        index = link.link_lookup(ifname=interface)[0]
        for _ in range(300):
            if link.get_links(index)[0].get_attr("IFLA_OPERSTATE") == "UP":
                return
            time.sleep(0.01)
    raise OSError(f"the link {interface} of the veth pair does not come up")


def _expect(fd: int, word: bytes) -> None:
    if os.read(fd, 1) != word:
        raise OSError("the second namespace could not be made")


if __name__ == "__main__":
    try:
        _hold()
    except (RingtapError, OSError, ImportError) as error:
        sys.exit(f"{error}")
    except Exception as error:  # pyroute2's own exceptions; the benchmark runs without veth and prints the sentence
        sys.exit(f"the veth pair could not be built: {error}")
