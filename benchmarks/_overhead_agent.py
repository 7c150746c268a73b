"""Measures the cost of the agent: CPU, memory and disk, beside connections with traffic, at several rates."""

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

import psutil
from _bench import Bench
from _processes import BenchmarkError, Child
from _ringtap import HOST

from ringtap.core.append_only_logs import open_records

CONNECTIONS = 50  # each has both its ends here
TRAFFIC = {"little": 1.0, "much": 0.02}  # seconds between two messages of 1 kB on a connection
_PROGRAM = str(Path(__file__).resolve().parent / "_overhead_sockets.py")
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
        with _connections(bench, traffic) as talker, _capture(bench, every, talker.pid) as run:
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
def _connections(bench: Bench, traffic: str) -> Iterator[Child]:
    """Start the connections; yield the talker, which is recorded."""
    server = bench.processes.start([sys.executable, _PROGRAM, "serve", HOST])
    _await_line(server)
    port = server.errors_so_far().split()[0]
    talker = bench.processes.start([sys.executable, _PROGRAM, "talk", HOST, port, CONNECTIONS, TRAFFIC[traffic]])
    try:
        _await_line(talker)
        yield talker
    finally:
        talker.end(signal.SIGKILL)
        server.end(signal.SIGKILL)


def _await_line(child: Child) -> None:
    child.await_it(lambda: child.errors_so_far().endswith("\n"), "start")


@contextlib.contextmanager
def _capture(bench: Bench, every: str, pid: int) -> Iterator[Path]:
    """Run ``ringtap record`` with its default collectors; yield the run's directory."""
    run = bench.folder / f"capture-{len(bench.samples.get('agent', []))}-{time.monotonic_ns()}"
    child = bench.processes.ringtap("record", "--every", every, "--pid", pid, "-o", run, "--node", "here")
    child.await_it((run / "nodes" / "here" / "sockets" / "sockets.rec").exists, "record")
    try:
        yield run
    finally:
        ended = child.end(signal.SIGINT)
    if ended.code != 0:
        raise BenchmarkError(f"ringtap record ended with {ended.code}: {ended.stderr.strip()[-300:]}")


def _usage(run: Path) -> Usage:
    """Read the usage of the processes with the run's directory on their command line: the agent and its parent."""
    cpu_ns: dict[str, int] = {}
    rss_bytes = 0
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error, OSError):
            if str(run) in (process.info["cmdline"] or ()):
                rss_bytes = max(rss_bytes, process.memory_info().rss)
                for task in Path(f"/proc/{process.pid}/task").iterdir():
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
