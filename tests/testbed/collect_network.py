"""Two network namespaces with a shaped link, real transfers over it, and the fast collectors beside them.

``python -m tests.testbed.collect_network DIR`` (from the checkout) records into DIR and prints, as JSON, what ``ss``,
``tc`` and ``ip`` said of the same moment: when it is quiet, so that they and the last records must agree to the byte.
"""

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ringtap.agents.testbed import namespaces
from ringtap.collectors.collector_interface import Context
from ringtap.collectors.nic import NicCollector
from ringtap.collectors.qdisc import QdiscCollector
from ringtap.collectors.sockets import SocketsCollector
from ringtap.core.parent_death import die_with_parent

V4, V6 = ("10.80.0.1", "10.80.0.2"), ("fd80::1", "fd80::2")
PORT = 7000
BYTES = {"10.80.0.2": 6_000_000, "fd80::2": 5_000_000}
SHAPE = ("rate", "30mbit", "burst", "20000", "limit", "30000")
QUIET_S = 1.5
MOVED = 75  # exit code: a late packet came between the last samples and the tools, nothing can be compared


def command(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def furnish(interface: str, place: int) -> None:
    command("ip", "link", "set", "lo", "up")
    command("ip", "address", "add", f"{V4[place]}/24", "dev", interface)
    command("ip", "address", "add", f"{V6[place]}/64", "dev", interface, "nodad")
    command("ip", "link", "set", interface, "up")


def serve(connections: int) -> None:
    """Take what comes, and keep every connection open until killed."""
    with socket.create_server(("::", PORT), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        for _ in range(connections):
            taken, _ = server.accept()
            threading.Thread(target=drain, args=(taken,), daemon=True).start()
        signal.pause()


def drain(taken: socket.socket) -> None:
    while taken.recv(1 << 16):
        pass
    taken.close()


def peer(ready: int, go_on: int, end_with_left: Callable[[], None]) -> None:
    """The other host: in a namespace of its own, from which the near one fetches its end of the link."""
    end_with_left()
    namespaces.unshare(namespaces.NEWNET)
    os.write(ready, b"1")
    os.read(go_on, 1)
    furnish("right", 1)
    serve(len(BYTES) + 1)


def connect(address: str) -> socket.socket:
    for _ in range(200):  # links come up in the background
        try:
            connection = socket.create_connection((address, PORT), 5)
        except OSError:
            time.sleep(0.05)
        else:
            connection.settimeout(60)  # sendall counts it from its beginning to its end
            return connection
    raise TimeoutError(address)


def unacknowledged(sockets: dict[str, socket.socket]) -> int:
    """Bytes that a program has handed over and the other side has not confirmed."""
    waiting = bytearray(4)
    total = 0
    for one in sockets.values():
        fcntl.ioctl(one, termios.TIOCOUTQ, waiting)
        total += int.from_bytes(waiting, sys.byteorder)
    return total


def ask_the_tools() -> dict[str, Any]:
    return {
        "ss": command("ss", "--tcp", "--info", "--numeric", "--extended", "--oneline", "--no-header"),
        "tc": command("tc", "-s", "-j", "qdisc", "show", "dev", "left"),
        "ip": command("ip", "-s", "-j", "link"),
    }


def without_ages(said: dict[str, Any]) -> dict[str, Any]:
    return said | {"ss": re.sub(r"last\w+:\d+", "", said["ss"])}


def main(folder: Path) -> None:
    namespaces.isolate(namespaces.NEWNET)
    ready, go_on = os.pipe(), os.pipe()
    end_with_left = die_with_parent()
    other = os.fork()
    if other == 0:
        peer(ready[1], go_on[0], end_with_left)
    os.read(ready[0], 1)
    command("ip", "link", "add", "left", "type", "veth", "peer", "name", "right", "netns", str(other))
    furnish("left", 0)
    # a queue too short for slow start, so that there are drops and retransmissions
    command("tc", "qdisc", "add", "dev", "left", "root", "handle", "7:", "tbf", *SHAPE)
    os.write(go_on[1], b"1")
    sockets = {address: connect(address) for address in BYTES}
    context = Context(folder, 0.01, lambda: [os.getpid()])
    collectors = [SocketsCollector(context), QdiscCollector(context), NicCollector(context)]
    checks = {collector.name: collector.check().state for collector in collectors}
    for collector in collectors:
        collector.start()
    pool = ThreadPoolExecutor(len(BYTES))
    senders = [pool.submit(sockets[address].sendall, b"x" * n) for address, n in BYTES.items()]
    short = connect(V4[1])
    short.sendall(b"y" * 1000)
    short_port = short.getsockname()[1]
    until_s = time.monotonic() + 60
    while (now_s := time.monotonic()) < until_s:
        time.sleep(0.01)
        for collector in collectors:
            collector.sample()
        if short.fileno() >= 0 and all(sender.done() for sender in senders) and not unacknowledged(sockets):
            short.close()
            until_s = now_s + QUIET_S
    for sender in senders:
        sender.result()
    command("ip", "link", "add", "late", "type", "veth", "peer", "name", "later")
    said = ask_the_tools()
    facts = {collector.name: collector.stop() for collector in collectors}
    if without_ages(ask_the_tools()) != without_ages(said):
        sys.exit(MOVED)
    ports = {address: one.getsockname()[1] for address, one in sockets.items()}
    outer = [path.name for path in Path("/sys/class/net").iterdir()]
    said |= {"facts": facts, "ports": ports, "short_port": short_port, "pid": os.getpid(), "checks": checks}
    print(json.dumps(said | {"outer_nics": outer}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
