"""Tries the TCP connections that a sweep will make between the hosts of a cluster.

Command on the hosts: ``python -m ringtap.agents.sweep.tcp_reachability listen|try|end JSON``.
"""

from __future__ import annotations

import errno
import json
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from ringtap.agents.hosts import Hosts, understood
from ringtap.agents.sweep.host_roles import SweepRoles
from ringtap.core.errors import MeasurementError, last_line
from ringtap.core.isolated_python import python_command

# enough for full packets, which are lost if the MTUs along the path differ, although handshakes succeed
_TRIAL_BYTES = 1 << 18
_CONNECT_S = 4.0
_REFUSED_S = 15.0  # a listener may not have started yet
_LISTEN_S = 40.0
_ANSWER_S = 60.0
_AT_ONCE = 16


class TcpPath(NamedTuple):
    """Connection that the sweep will make.

    Attributes:
        source: host that connects.
        source_address: its address.
        target: host that listens.
        target_address: its address.
        use: purpose of the connection: ``training``, ``rendezvous`` or ``cross traffic``.
    """

    source: str
    source_address: str
    target: str
    target_address: str
    use: str


def _planned_paths(network: SweepRoles) -> list[TcpPath]:
    """Return all connections that a sweep will make between its hosts."""
    roles, training = network.roles, network.training
    first, *others = dict.fromkeys((*roles.workers, *roles.servers))
    found = [
        TcpPath(source, training[source], target, training[target], "training")
        for source in (first, *others)
        for target in (first, *others)
        if source != target
    ]
    if network.ports:
        found += [TcpPath(source, training[source], first, training[first], "rendezvous") for source in others]
    if roles.cross_to:
        source, target = roles.cross_from, roles.cross_to
        found.append(TcpPath(source, network.cross[source], target, network.cross[target], "cross traffic"))
    return found


def check_reachability(network: SweepRoles, hosts: Hosts) -> list[str]:
    """Try all connections that a sweep will make.

    Returns:
        One sentence per group of failed connections; the last one names the ports to open. Empty if all succeed.

    Raises:
        MeasurementError: a host does not answer.
    """
    from ringtap.agents.sweep.cross_traffic import free_port  # not needed on the hosts

    planned = _planned_paths(network)
    targets = list(dict.fromkeys((path.target, path.target_address, _ports(network, path)) for path in planned))
    with ThreadPoolExecutor(2 * len(hosts.names) + 1) as pool:  # each listener occupies a thread
        found = [pool.submit(free_port, hosts, host, address, ports=ports) for host, address, ports in targets]
        free = {target: answer.result() for target, answer in zip(targets, found, strict=True)}
        port = {path: free[path.target, path.target_address, _ports(network, path)] for path in planned}
        listening = {}
        for host in dict.fromkeys(path.target for path in planned):
            places = sorted({(path.target_address, port[path]) for path in planned if path.target == host})
            callers = len([path for path in planned if path.target == host])
            listening[host] = pool.submit(_ask, hosts, host, "listen", {"places": places, "callers": callers})
        trying = {}
        for host in dict.fromkeys(path.source for path in planned):
            own = [path for path in planned if path.source == host]
            calls = [[path.source_address, path.target_address, port[path]] for path in own]
            trying[host] = own, pool.submit(_ask, hosts, host, "try", {"calls": calls})
        failed: dict[TcpPath, str] = {}
        for own, answer in trying.values():
            with understood(own[0].source):
                failed |= {path: str(why) for path, why in zip(own, answer.result()["failed"], strict=True) if why}
        for host in {path.target for path in failed}:  # its listener still waits for callers
            place = next([path.target_address, port[path]] for path in planned if path.target == host)
            _ask(hosts, host, "end", {"place": place})
        for listener in listening.values():
            with suppress(MeasurementError):  # the callers report it
                listener.result()
    return _sentences(network, failed, port)


def _ports(network: SweepRoles, path: TcpPath) -> tuple[int, int] | None:
    """Return the plan's ports; None for training, as gloo and NCCL listen on ports that the kernel picks."""
    return None if path.use == "training" else network.ports


def _ask(hosts: Hosts, host: str, verb: str, question: dict[str, Any]) -> dict[str, Any]:
    command = python_command(hosts.python(host), "ringtap.agents.sweep.tcp_reachability", verb, json.dumps(question))
    done = hosts.ask(host, command, _ANSWER_S)
    if done.returncode:
        message = last_line(done.stderr)
        raise MeasurementError(f"host {host} cannot try its connections: {message}")
    with understood(host):
        return dict(json.loads(done.stdout or "{}"))


def _sentences(network: SweepRoles, failed: dict[TcpPath, str], port: dict[TcpPath, int]) -> list[str]:
    """Describe failed connections: one sentence for those that fail alike; the last one names the ports to open."""
    callers: dict[tuple[str, str, str, tuple[int, int] | None], list[TcpPath]] = {}
    for path, why in failed.items():
        callers.setdefault((path.target, path.target_address, why, _ports(network, path)), []).append(path)
    places: dict[tuple[str, str, str], list[str]] = {}
    needs = []
    for (target, address, why, ports), group in callers.items():
        sources = " and ".join(dict.fromkeys(path.source for path in group))
        uses = " and ".join(dict.fromkeys(path.use for path in group))
        among = ", ".join(map(str, sorted({port[path] for path in group})))
        places.setdefault((sources, uses, why), []).append(f"{target} ({address}, TCP port {among})")
        if ports:
            needs.append("ports {}-{} of the plan".format(*ports))
            continue
        need = "the ports that the kernel picks"
        if network.kernel_ports.get(target):
            need += " ({}-{}, net.ipv4.ip_local_port_range)".format(*network.kernel_ports[target])
        needs.append(need)
    found = [
        f"{sources} cannot reach {' and '.join(where)} for {uses}: {why}"
        for (sources, uses, why), where in places.items()
    ]
    if found:
        found[-1] += f"; open {' and '.join(dict.fromkeys(needs))} between these hosts"
    return found


# on the hosts


def listen(places: Sequence[Sequence[Any]], callers: int) -> None:
    """Answer the given number of callers, until a caller requests the end, or for at most 40 s.

    Raises:
        OSError: a port is in use.
    """
    deadline_s = time.monotonic() + _LISTEN_S
    with ExitStack() as stack, selectors.DefaultSelector() as selector, ThreadPoolExecutor(_AT_ONCE) as pool:
        for address, port in places:
            selector.register(stack.enter_context(socket.create_server((address, port))), selectors.EVENT_READ)
        answers: list[Future[bool]] = []
        while len(answers) < callers and (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in selector.select(min(left_s, 0.1)):
                connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                answers.append(pool.submit(_answer, connection))
            if any(answer.done() and answer.result() for answer in answers):
                return


def _answer(connection: socket.socket) -> bool:
    """Receive a caller's data and send as much back; return True if the caller sends none, which requests the end."""
    with connection, suppress(OSError):
        connection.settimeout(_CONNECT_S)
        received_bytes = 0
        while received_bytes < _TRIAL_BYTES:
            data = connection.recv(65_536)
            if not data:
                return received_bytes == 0
            received_bytes += len(data)
        connection.sendall(bytes(_TRIAL_BYTES))
    return False


def call(source: str, target: str, port: int) -> str:
    """Connect and exchange some data; return the reason for a failure, empty if it succeeds."""
    deadline_s = time.monotonic() + _REFUSED_S
    while True:
        try:
            with socket.create_connection((target, port), timeout=_CONNECT_S, source_address=(source, 0)) as connection:
                return _exchange(connection)
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                return "the connection is refused, by a firewall or because nothing can listen there"
        except TimeoutError:
            return f"no answer within {_CONNECT_S:g} s, as where a firewall drops it or the answer"
        except OSError as error:
            if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM):
                return f"{error.strerror}, as where a firewall rejects it or there is no route"
            return str(error.strerror or error)
        time.sleep(0.1)


def _exchange(connection: socket.socket) -> str:
    try:
        connection.sendall(bytes(_TRIAL_BYTES))
        received_bytes = 0
        while received_bytes < _TRIAL_BYTES:
            data = connection.recv(65_536)
            if not data:
                return "the connection was cut"
            received_bytes += len(data)
    except OSError:
        return f"it connects, but {_TRIAL_BYTES >> 10} kB do not come through: are the MTUs along the path the same?"
    return ""


def main() -> int:
    """Run a listener, try connections, or end a listener; print the answer as JSON."""
    verb, question = sys.argv[1], json.loads(sys.argv[2])
    answer: dict[str, Any] = {}
    if verb == "listen":
        listen(**question)
    elif verb == "try":
        calls = question["calls"]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answer["failed"] = list(pool.map(lambda arguments: call(*arguments), calls))
    else:
        with suppress(OSError):
            socket.create_connection(tuple(question["place"]), timeout=_CONNECT_S).close()
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
