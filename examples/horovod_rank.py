"""Starts one rank of a Horovod job where neither ssh nor MPI reaches the hosts, with any Horovod script unedited.

It reads what torchrun sets (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR``,
``MASTER_PORT``), sets what ``horovodrun --gloo`` would, and becomes the command. Rank 0 also runs Horovod's rendezvous
server, on the port after ``MASTER_PORT``; it ends with the rank. Every host runs the same number of ranks.

    python horovod_rank.py python train.py
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence

_PR_SET_PDEATHSIG = 1
_START_TIMEOUT_S = 60.0
_LAUNCHERS_OWN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank_environment(launcher: Mapping[str, str]) -> dict[str, str]:
    """Horovod's variables for this rank, from torchrun's.

    Raises:
        KeyError: one of torchrun's is missing.
    """
    rank, size = int(launcher["RANK"]), int(launcher["WORLD_SIZE"])
    local_rank, local_size = int(launcher.get("LOCAL_RANK", "0")), int(launcher.get("LOCAL_WORLD_SIZE", "1"))
    host = rank // local_size
    variables = {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(local_size),
        "HOROVOD_CROSS_RANK": str(host),
        "HOROVOD_CROSS_SIZE": str(size // local_size),
        "HOROVOD_HOSTNAME": f"host{host}",  # tells hosts apart in the rendezvous, is not resolved
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": launcher["MASTER_ADDR"],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(int(launcher["MASTER_PORT"]) + 1),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    if "GLOO_SOCKET_IFNAME" in launcher:
        variables["HOROVOD_GLOO_IFACE"] = launcher["GLOO_SOCKET_IFNAME"]
    return variables


def serve(variables: Mapping[str, str], parent: int) -> None:
    """Run the rendezvous server until the parent process ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # ended before it could be watched
        return
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    local_size, hosts = variables["HOROVOD_LOCAL_SIZE"], int(variables["HOROVOD_CROSS_SIZE"])
    plan = get_host_assignments(
        parse_hosts(",".join(f"host{number}:{local_size}" for number in range(hosts))), int(variables["HOROVOD_SIZE"])
    )
    server = RendezvousHTTPServer(("", int(variables["HOROVOD_GLOO_RENDEZVOUS_PORT"])), RendezvousHandler, 0)
    server.init(plan)
    server.serve_forever()


def wait_for_server(address: str, port: int) -> None:
    """Return when the rendezvous server takes connections: Horovod itself would give up after 1.5 s.

    Raises:
        TimeoutError: it did not come up within a minute.
    """
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            socket.create_connection((address, port), timeout=5).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank 0's rendezvous server at {address}:{port} does not answer: {error}"
                ) from error
            time.sleep(0.05)
        else:
            return


def main(argv: Sequence[str]) -> None:
    """Set the environment and become the command."""
    missing = [name for name in _LAUNCHERS_OWN if name not in os.environ]
    if missing or not argv:
        sys.exit(f"usage: python horovod_rank.py COMMAND, with torchrun's variables set (missing: {missing})")
    variables = rank_environment(os.environ)
    parent = os.getpid()
    if variables["HOROVOD_RANK"] == "0" and os.fork() == 0:
        try:
            serve(variables, parent)
        finally:
            os._exit(0)
    try:
        wait_for_server(variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(variables["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
    except TimeoutError as error:
        sys.exit(f"horovod_rank: {error}")
    os.execvpe(argv[0], list(argv), os.environ | variables)


if __name__ == "__main__":
    main(sys.argv[1:])
