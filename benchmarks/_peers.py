"""Other programs that send TCP at full speed, each with its own server and client."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from _machine import congestion_control
from _namespaces import Route
from _processes import BenchmarkError, Processes, wait_until_listening

_SLACK_S = 20.0


@dataclass(frozen=True)
class Transfer:
    """A bulk transfer of a tool.

    Attributes:
        received_bytes: payload, as the receiver counted it.
        sending_s: time for which the sender sent.
        cpu_s: user and system time of sender and receiver together, from their start to their end.
    """

    received_bytes: int
    sending_s: float
    cpu_s: float


@dataclass(frozen=True)
class Peer:
    """A tool to compare with.

    Attributes:
        name: its name in the tables.
        run: function that sends; takes processes, route, port, streams, seconds, and bit/s in total (None: no limit).
        paced: True if it can send at a given rate.
    """

    name: str
    run: Callable[[Processes, Route, int, int, float, float | None], Transfer]
    paced: bool


def find_peers(given: list[str]) -> list[Peer]:
    """Return the peers of this machine: iperf3 if installed, and those given as ``NAME=PATH``.

    Raises:
        BenchmarkError: a given program cannot be run or is not supported.
    """
    installed = shutil.which("iperf3")
    named = [f"iperf3={installed}"] if installed else []
    peers = []
    for text in named + given:
        name, _, path = text.partition("=")
        if not (name and path):
            raise BenchmarkError(
                f"--peer {text!r} is not understood: write NAME=PATH, for example iperf2=/usr/bin/iperf"
            )
        peers += _known(name, path)
    if len({peer.name for peer in peers}) < len(peers):
        raise BenchmarkError("two peers have the same name: give --peer another NAME")
    return peers


def _known(name: str, path: str) -> list[Peer]:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        raise BenchmarkError(f"peer {name}: {path} cannot be run: {error}") from error
    version = (done.stdout + done.stderr).strip()
    if version.startswith("iperf 3"):
        plain, zero_copy = partial(_iperf3, path, False), partial(_iperf3, path, True)
        return [Peer(name, plain, True), Peer(f"{name} -Z", zero_copy, True)]
    if version.startswith("iperf version 2"):
        return [Peer(name, partial(_iperf2, path), False)]
    raise BenchmarkError(
        f"peer {name}: {Path(path).name} is neither iperf3 nor iperf 2 by its --version; others are not supported"
    )


def _iperf3(
    path: str,
    zero_copy: bool,
    processes: Processes,
    route: Route,
    port: int,
    streams: int,
    duration_s: float,
    rate_bps: float | None,
) -> Transfer:
    server = processes.start([path, "--server", "--one-off", "--port", str(port)], route.receiver)
    wait_until_listening(server, port)
    argv = [path, "--client", route.address, "--port", str(port), "--parallel", str(streams), "--json"]
    argv += ["--time", str(math.ceil(duration_s)), "--bitrate", str(round((rate_bps or 0) / streams))]
    argv += congestion_control("--congestion")
    client = processes.start(argv + (["--zerocopy"] if zero_copy else []), route.sender).wait(duration_s + _SLACK_S)
    received = server.wait(_SLACK_S)
    try:
        report = json.loads(client.stdout)
        if "error" in report:  # iperf3 may exit with 0 despite an error
            raise BenchmarkError(f"iperf3 failed: {report['error']}")
        end = report["end"]
        received_bytes, sending_s = int(end["sum_received"]["bytes"]), float(end["sum_sent"]["seconds"])
    except (ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"iperf3 printed no readable report: {client.stderr.strip()[:200]}") from error
    return Transfer(received_bytes, sending_s, client.cpu_s + received.cpu_s)


def _iperf2(
    path: str, processes: Processes, route: Route, port: int, streams: int, duration_s: float, rate_bps: float | None
) -> Transfer:
    if rate_bps is not None:
        raise BenchmarkError("iperf 2 is not driven at a given rate here")
    server = processes.start([path, "-s", "-p", str(port), "-y", "C"], route.receiver)
    wait_until_listening(server, port)
    argv = [path, "-c", route.address, "-p", str(port), "-P", str(streams), "-t", str(duration_s), "-y", "C"]
    argv += congestion_control("-Z")
    client = processes.start(argv, route.sender).result(duration_s + _SLACK_S)
    received = server.end()
    try:
        lines = [line.split(",") for line in received.stdout.split()]
        # one line per stream; several streams have one more line with their sum, numbered -1
        received_bytes = sum(int(columns[7]) for columns in lines if columns[5] != "-1")
        begun_s, ended_s = client.stdout.split()[-1].split(",")[6].split("-")
        return Transfer(received_bytes, float(ended_s) - float(begun_s), client.cpu_s + received.cpu_s)
    except (ValueError, IndexError) as error:
        raise BenchmarkError("iperf 2 printed no readable report") from error
