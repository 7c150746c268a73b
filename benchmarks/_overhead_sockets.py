"""Keeps connections with traffic, which the agent records while its cost is measured.

``python _overhead_sockets.py serve ADDRESS`` prints its port and echoes data; ``… talk ADDRESS PORT CONNECTIONS
PERIOD_S`` sends 1 kB on each connection once per period and receives 1 kB, evenly spread. Both run until killed.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time

_BYTES = 1000


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_BYTES):
        writer.write(data)


async def _serve(address: str) -> None:
    server = await asyncio.start_server(_echo, address, 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], file=sys.stderr, flush=True)
    await server.serve_forever()


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
        asyncio.run(_serve(sys.argv[2]))
    else:
        _talk(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
