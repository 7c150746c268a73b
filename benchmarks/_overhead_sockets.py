"""Connections with traffic, which the agent records while its cost is measured.

``python _overhead_sockets.py serve ADDRESS`` prints its port and echoes data; ``… talk ADDRESS PORT CONNECTIONS
PERIOD_S`` sends 1 kB on each connection once per period and receives 1 kB, evenly spread. Both run until killed.
"""

from __future__ import annotations

import selectors
import socket
import sys
import time

_BYTES = 1000


def _serve(address: str) -> None:
    poll = selectors.DefaultSelector()
    with socket.create_server((address, 0), backlog=1024) as server:
        print(server.getsockname()[1], file=sys.stderr, flush=True)
        poll.register(server, selectors.EVENT_READ)
        while True:
            for key, _ in poll.select():
                if key.fileobj is server:
                    poll.register(server.accept()[0], selectors.EVENT_READ)
                    continue
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                connection.sendall(connection.recv(_BYTES))


def _talk(address: str, port: int, connections: int, period_s: float) -> None:
    opened = [socket.create_connection((address, port)) for _ in range(connections)]
    print("ready", file=sys.stderr, flush=True)
    due_s = time.monotonic()
    while True:
        for connection in opened:
            due_s += period_s / connections
            time.sleep(max(0.0, due_s - time.monotonic()))
            connection.sendall(b"x" * _BYTES)
            left = _BYTES
            while left:
                left -= len(connection.recv(left))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(sys.argv[2])
    else:
        _talk(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
