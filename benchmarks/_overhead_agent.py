"""Cost of the agent: CPU, memory and disk, beside 100 connections, at several rates."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _context import Bench
from _namespaces import Route
from _processes import BenchmarkError, Child

from ringtap.core.records import open_records

SOCKETS = 100
TRAFFIC = {"little": 1.0, "much": 0.02}  # seconds between two messages of 1 kB on a connection
_PROGRAM = str(Path(__file__).resolve().parent / "_overhead_sockets.py")
_START_S = 20.0
_SETTLE_S = 1.0  # for the agent's first samples, clock measurement and look-up of socket owners, which it does once


@dataclass(frozen=True)
class Usage:
    """Resources that the processes of a run have used so far.

    Attributes:
        cpu_ns: CPU time of each running thread.
        rss_bytes: resident memory of the largest process.
        disk_bytes: size of the run's directory.
        t_s: time of the reading.
    """

    cpu_ns: dict[str, int]
    rss_bytes: int
    disk_bytes: int
    t_s: float


def measure(bench: Bench, every: str, traffic: str, window_s: float) -> None:
    """Take one sample: an agent at one rate beside connections with this traffic."""
    with bench.sample("agent", every=every, traffic=traffic) as figures:
        route = bench.routes[-1]
        with _connections(bench, route, traffic) as talker, _capture(bench, route, every, talker.pid) as run:
            time.sleep(_SETTLE_S)
            before = _usage(run)
            time.sleep(window_s)
            after = _usage(run)
        seconds = after.t_s - before.t_s
        # threads that have ended do not count: an agent does their work only once
        cpu_ns = sum(used - before.cpu_ns.get(thread, 0) for thread, used in after.cpu_ns.items())
        figures["agent_cpu_pct"] = cpu_ns / 1e7 / seconds
        figures["rss_mb"] = after.rss_bytes / 1e6
        figures["disk_mb_per_hour"] = (after.disk_bytes - before.disk_bytes) / seconds * 3600 / 1e6
        figures.update(_sampling(run))


@contextlib.contextmanager
def _connections(bench: Bench, route: Route, traffic: str) -> Iterator[Child]:
    """Start the connections (half as many on loopback, which has both ends); yield the talker, which is recorded."""
    count = SOCKETS if route.name == "veth" else SOCKETS // 2
    server = bench.processes.start([sys.executable, _PROGRAM, "serve", route.address], route.receiver)
    port = _wait_for_line(server)
    argv = [sys.executable, _PROGRAM, "talk", route.address, port, str(count), str(TRAFFIC[traffic])]
    talker = bench.processes.start(argv, route.sender)
    try:
        _wait_for_line(talker)
        yield talker
    finally:
        talker.end(signal.SIGKILL)
        server.end(signal.SIGKILL)


def _wait_for_line(child: Child) -> str:
    """Wait until a program writes its first line to standard error; return the line's first word."""
    deadline_s = time.monotonic() + _START_S
    while not child.errors_so_far().endswith("\n"):
        if child.is_over(0.01) or time.monotonic() > deadline_s:
            raise BenchmarkError(f"'{child.name}' did not start: {child.end().stderr.strip()[-200:]}")
    return child.errors_so_far().split()[0]


@contextlib.contextmanager
def _capture(bench: Bench, route: Route, every: str, pid: int) -> Iterator[Path]:
    """Run ``ringtap capture`` with its default collectors; yield the run's directory."""
    run = bench.folder / f"capture-{len(bench.samples.get('agent', []))}-{time.monotonic_ns()}"
    argv = [sys.executable, "-m", "ringtap.cli", "capture", "--every", every, "--pid", str(pid), "-o", str(run)]
    child = bench.processes.start([*argv, "--node", "here"], route.sender)
    log = run / "nodes" / "here" / "sockets" / "sockets.rec"
    deadline_s = time.monotonic() + _START_S
    while not log.exists():
        if child.is_over(0.05) or time.monotonic() > deadline_s:
            raise BenchmarkError(f"the agent does not record: {child.end(signal.SIGINT).stderr.strip()[-300:]}")
    try:
        yield run
    finally:
        ended = child.end(signal.SIGINT)
    if ended.code != 0:
        raise BenchmarkError(f"ringtap capture ended with {ended.code}: {ended.stderr.strip()[-300:]}")


def _usage(run: Path) -> Usage:
    """Read the usage of the processes with the run's directory on their command line: the agent and its parent."""
    cpu_ns: dict[str, int] = {}
    rss_bytes = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if str(run).encode() not in (folder / "cmdline").read_bytes().split(b"\0"):
                continue
            status = (folder / "status").read_text().split("VmRSS:")[1]
            rss_bytes = max(rss_bytes, int(status.split()[0]) * 1024)
            for task in (folder / "task").iterdir():
                cpu_ns[task.name] = int((task / "schedstat").read_text().split()[0])
    if not cpu_ns:
        raise BenchmarkError(f"no process records into {run}, or the kernel has no /proc/<pid>/schedstat")
    disk_bytes = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    return Usage(cpu_ns, rss_bytes, disk_bytes, time.monotonic())


def _sampling(run: Path) -> dict[str, Any]:
    """Return the samples per second actually taken, the missed samples, and the connections seen."""
    times = [row[1] for row in open_records(run / "nodes" / "here" / "nic" / "nic.rec").walk()]
    collectors = json.loads((run / "nodes" / "here" / "node.json").read_text())["collectors"]
    return {
        "samples_per_s": (len(times) - 1) * 1e9 / (times[-1] - times[0]),
        "missed_samples": collectors["nic"]["missed_samples"],
        "connections": collectors["sockets"]["most_connections"],
    }
