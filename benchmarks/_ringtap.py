"""Drives ``ringtap traffic`` through its command line: receivers, senders, plans and logs, over loopback."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _processes import BenchmarkError, Ended, Processes

from ringtap.core.errors import RingtapError
from ringtap.core.sent_flow_log import open_sent_log

HOST = "127.0.0.1"
_SLACK_S = 30.0


def free_port() -> int:
    """Return a port that is free."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def traffic(processes: Processes, *arguments: object, timeout_s: float = 120.0) -> Ended:
    """Run ``ringtap traffic ...`` until it ends successfully.

    Raises:
        BenchmarkError: it failed or took too long.
    """
    return processes.ringtap("traffic", *arguments).result(timeout_s)


class Receiver:
    """A context manager that runs ``ringtap traffic serve`` on a free port.

    Attributes:
        address: ``HOST:PORT``.
        summary: the summary that it printed at its end.
        cpu_s: user and system time, from its start to its end.
    """

    def __init__(self, processes: Processes, port: int, *arguments: object, cpus: Iterable[int] | None = None) -> None:
        self.address = f"{HOST}:{port}"
        self.summary: dict[str, Any] = {}
        self.cpu_s = 0.0
        self._child = processes.ringtap("traffic", "serve", "--bind", self.address, "--json", *arguments, cpus=cpus)

    def __enter__(self) -> Receiver:
        self._child.await_it(lambda: f"listening on {self.address}" in self._child.errors_so_far(), "listen")
        return self

    def __exit__(self, *_: object) -> None:
        ended = self._child.end()
        self.cpu_s = ended.cpu_s
        if ended.code == 0:
            self.summary = json.loads(ended.stdout.splitlines()[-1])

    @property
    def received_bytes(self) -> int:
        """The payload that the receiver counted.

        Raises:
            BenchmarkError: it failed, so there is no count.
        """
        if "bytes" not in self.summary:
            raise BenchmarkError("the receiver ended without a summary")
        return int(self.summary["bytes"])


@dataclass(frozen=True)
class Sent:
    """The summary of ``ringtap traffic send``, and its CPU time."""

    summary: dict[str, Any]
    cpu_s: float


def send(processes: Processes, plan: Path, *arguments: object, timeout_s: float) -> Sent:
    """Send a plan and wait for the sender's end.

    Raises:
        BenchmarkError: it failed or took too long.
    """
    ended = processes.ringtap("traffic", "send", plan, "--json", *arguments).result(timeout_s + _SLACK_S)
    return Sent(json.loads(ended.stdout.splitlines()[-1]), ended.cpu_s)


def write_plan(path: Path, destination: str, duration_s: float, flows: Iterable[tuple[int, int]]) -> Path:
    """Write a plan file by hand (docs/commands/traffic-plans.md): flows are (start in ns, bytes), in order."""
    lines = []
    total = 0
    for start_ns, size_bytes in flows:
        lines.append(f"{start_ns}\t-\t{destination}\t{size_bytes}\t-\n")
        total += size_bytes
    header = {"format": "ringtap-flow-plan", "version": 2, "kind": "benchmark", "duration_ns": round(duration_s * 1e9)}
    header |= {"destinations": [destination], "sources": [], "load_counts": "payload", "transport": {}}
    header |= {"starts": "ns after the sender's launch", "flows": len(lines), "bytes": total}
    path.write_text(json.dumps(header) + "\n" + "".join(lines))
    return path


def read_sent(path: Path, *names: str) -> list[tuple[int, ...]]:
    """Read columns of a sender's log, one tuple per flow.

    Raises:
        BenchmarkError: the file is not a readable log of a sender.
    """
    try:
        return [tuple(getattr(flow, name) for name in names) for flow in open_sent_log(path).flows()]
    except (OSError, RingtapError) as error:
        raise BenchmarkError(f"the sender's log cannot be read: {error}") from error
