"""A rank of a job without torch: it computes for 40 ms, then sends 500 kB to the other one, and marks its iteration.

python sharing_rank.py [ITERATIONS [COMPUTE_S]]
"""

import os
import socket
import sys
import time
from itertools import count

import ringtap

SIZE_BYTES, COMPUTE_S = 500_000, 0.04


def received(sock: socket.socket, left: int) -> None:
    while left:
        left -= len(sock.recv(min(left, 65536))) or left


def main() -> None:
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if os.environ["RANK"] == "0":
        sock = socket.create_server(address).accept()[0]
    else:
        deadline_s = time.monotonic() + 60
        while True:
            try:
                sock = socket.create_connection(address)
                break
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)
    given = sys.argv[1:]
    compute_s = float(given[1]) if given[1:] else COMPUTE_S
    for _ in range(int(given[0])) if given else count():
        time.sleep(compute_s)
        if os.environ["RANK"] == "0":
            received(sock, SIZE_BYTES)
            sock.sendall(b"!")
        else:
            sock.sendall(bytes(SIZE_BYTES))
            received(sock, 1)
        ringtap.step()


if __name__ == "__main__":
    main()
