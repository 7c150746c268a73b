"""What the tests of the traffic engine share: receivers and senders as processes, plans, logs, the kernel's table."""

from __future__ import annotations

import ipaddress
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ringtap.core.append_only_logs import open_records
from ringtap.core.flow_plan_file import MadePlan, write_plan
from ringtap.core.flow_plan_format import FORMAT, VERSION, Flow
from ringtap.trafficgen.plans.registry import make_plan
from tests.unit.web_plans import PlanSpec, web_plan

MS = 1_000_000
COMMAND = [sys.executable, "-m", "ringtap.cli", "traffic"]
TIME_WAIT, LISTEN = 6, 10  # in /proc/net/tcp

# ``ringtap traffic``, with a log's file turned into /dev/full once its header stands
FULL_DISK = """
import os, sys
from ringtap.core.append_only_logs import RecordWriter
made = RecordWriter.__init__
def full(self, *arguments):
    made(self, *arguments)
    os.dup2(os.open("/dev/full", os.O_WRONLY), self._fd)
RecordWriter.__init__ = full
from ringtap.cli import main
sys.exit(main(["traffic", *sys.argv[1:]]))
"""


@dataclass
class Serve:
    """A receiver in a process of its own."""

    process: subprocess.Popen[str]
    address: str
    words: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def end(self) -> dict[str, Any]:
        self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=10)
        self.words += err.splitlines()
        assert self.process.returncode == 0
        assert "Traceback" not in err
        summary: dict[str, Any] = json.loads(out)
        return summary


@contextmanager
def serving(*arguments: object, command: Sequence[str] = COMMAND) -> Iterator[Serve]:
    process = subprocess.Popen(
        [*command, "serve", "--bind", "127.0.0.1:0", "--json", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("listening on "):
                yield Serve(process, line.split()[-1])
                break
    finally:
        process.kill()
        process.communicate()


def plan_for(folder: Path, *addresses: str, load_bps: float = 20e6, seconds: float = 0.5, scale: float = 100) -> Path:
    path = folder / "flows.plan"
    write_plan(web_plan(PlanSpec("consistent", load_bps, int(seconds * 1e9), addresses, 1, scale)), path, force=True)
    return path


def plan_of(path: Path, flows: Sequence[Flow], duration_ns: int, **more: object) -> Path:
    """A plan of these very flows."""
    header = {"format": FORMAT, "version": VERSION, "duration_ns": duration_ns, "flows": len(flows)}
    header |= {"bytes": sum(flow.size_bytes for flow in flows)}
    header |= {"destinations": list(dict.fromkeys(flow.destination for flow in flows))}
    header |= {"sources": [source for source in dict.fromkeys(flow.source for flow in flows) if source], **more}
    write_plan(MadePlan(header, lambda: iter(flows)), path, force=True)
    return path


def plan_of_kind(path: Path, kind: str, **given: object) -> Path:
    """A plan as ``ringtap traffic plan --kind`` writes it; times in ns, rates in bit/s."""
    write_plan(make_plan(kind, given), path, force=True)
    return path


def traffic(
    *arguments: object, expect: int = 0, timeout_s: float = 30, **popen: Any
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=timeout_s, check=False, **popen
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == expect, done.stderr
    return done


def send(plan: Path, *arguments: object, expect: int = 0) -> tuple[dict[str, Any], str]:
    """Send a plan; returns the summary and the last line on stderr, empty where there is none."""
    done = traffic("send", plan, "--json", *arguments, expect=expect)
    return json.loads(done.stdout or "{}"), done.stderr.rstrip("\n").rpartition("\n")[2]


@contextmanager
def running(plan: Path, log: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, "send", str(plan), "--json", "--log", str(log), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(fulfilled: Callable[[], object], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not fulfilled():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def wait_for_log(path: Path) -> None:
    """Wait for the header of a log, which is one write after the file is there."""
    wait_until(lambda: path.exists() and path.stat().st_size > 0)


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that it forked, in that order: a sender's workers before its launcher."""
    return sorted(psutil.Process(process.pid).children(recursive=True), key=lambda child: child.pid)


def rows(path: Path) -> list[dict[str, Any]]:
    log = open_records(path)
    assert log.torn_bytes == 0
    names = [column.name for column in log.fields]
    return [dict(zip(names, row, strict=True)) for row in log.tail()]


def by_flow(path: Path) -> list[dict[str, Any]]:
    """A log's records in the order of the plan; no flow may be there twice."""
    logged = sorted(rows(path), key=lambda row: row["flow"])
    assert len({row["flow"] for row in logged}) == len(logged)
    return logged


class Connection(NamedTuple):
    """A line of /proc/net/tcp."""

    local: tuple[str, int]
    remote: tuple[str, int]
    state: int


def connections(port: int) -> list[Connection]:
    """What the kernel knows of IPv4 connections from or to a port."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *_ = line.split()
        found.append(Connection(_endpoint(local), _endpoint(remote), int(state, 16)))
    return [one for one in found if port in (one.local[1], one.remote[1])]


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.partition(":")
    return str(ipaddress.ip_address(struct.pack("=I", int(host, 16)))), int(port, 16)


@contextmanager
def peer(behave: Any) -> Iterator[str]:
    """A listening socket with ``behave(connection)`` run on each connection; None: nobody ever accepts."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    threads: list[threading.Thread] = []
    accepted: list[socket.socket] = []

    def talk(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            behave(connection)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                accepted.append(connection)
                threads.append(threading.Thread(target=talk, args=(connection,)))
                threads[-1].start()

    acceptor = threading.Thread(target=accept)
    if behave is not None:
        acceptor.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        if behave is not None:
            acceptor.join()
        listener.close()
        for connection in accepted:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"
