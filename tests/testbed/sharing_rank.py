"""A rank of a job without torch: it computes for 40 ms, then sends 500 kB to the other one, and marks its iteration."""

import os
import socket
import time

import ringtap

SIZE_BYTES, COMPUTE_S = 500_000, 0.04


def received(sock: socket.socket, count: int) -> None:
    while count:
        count -= len(sock.recv(min(count, 65536))) or count


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
    while True:
        time.sleep(COMPUTE_S)
        if os.environ["RANK"] == "0":
            received(sock, SIZE_BYTES)
            sock.sendall(b"!")
        else:
            sock.sendall(bytes(SIZE_BYTES))
            received(sock, 1)
        ringtap.step()


if __name__ == "__main__":
    main()
