"""Burst plans on the wire: the bytes of each burst and quiet part, captured on the sender's side of the veth pair."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _context import Bench
from _machine import congestion_control, cores
from _namespaces import Route
from _own_core import send_from_own_core
from _processes import BenchmarkError, Child, Processes
from _ringtap import TRAFFIC, Receiver, free_port, traffic

SHARES = (0.03, 0.1)  # small, because a burst has three times the load, and the capture costs as much again
_LENGTH_S = 3.0
_VERIFY_S = 300.0
_HEADERS_BYTES = 128  # captured bytes of each packet; the rest is random payload
_BUFFER_KIB = 65536


def measure(bench: Bench, ceiling_bps: float, repeat: int) -> None:
    """Take one sample at each share, if there is a veth pair and tcpdump."""
    route = bench.routes[-1]
    for share in SHARES:
        with bench.sample("wire", share=share, repeat=repeat) as figures:
            if route.name != "veth":
                raise BenchmarkError("there is no veth pair to capture on")
            figures.update(_capture(bench, route, share * ceiling_bps))


def _capture(bench: Bench, route: Route, load_bps: float) -> dict[str, Any]:
    plan, log, capture = (bench.path(name) for name in ("wire.plan", "wire.rec", "wire.pcap"))
    port = free_port()
    arguments = ["--kind", "burst", "--load", f"{round(load_bps)}bit", "--duration", f"{_LENGTH_S}s"]
    traffic(bench.processes, "plan", *arguments, "--to", f"{route.address}:{port}", "-o", plan)
    others = cores()[:-1] or cores()
    dump = _tcpdump(bench.processes, route, capture, port, others)
    with Receiver(bench.processes, route, port, cpus=others):
        send_from_own_core(
            bench.processes, route, plan, "--log", log, *congestion_control("--congestion-control"), timeout_s=_LENGTH_S
        )
    lost = re.search(r"(\d+) packets dropped by kernel", dump.end(signal.SIGINT).stderr)
    verdict = _verify(bench, plan, log, capture)
    capture.unlink()
    figures = {"load_bps": load_bps, "lost_packets": int(lost[1]) if lost else None}
    for part, errors in verdict["bursts"].items():
        figures |= {f"{part}_{key}": value for key, value in errors.items()}
    return figures


def _verify(bench: Bench, plan: Path, log: Path, capture: Path) -> dict[str, Any]:
    """Return the result of ``ringtap traffic verify``; deviations are a result, not a failure."""
    argv = [*TRAFFIC, "verify", str(plan), "--sent", str(log), "--capture", str(capture), "--json"]
    ended = bench.processes.start(argv).wait(_VERIFY_S)
    if not ended.stdout.startswith("{"):
        raise BenchmarkError(f"ringtap traffic verify: {ended.stderr.strip()[-300:]}")
    verdict: dict[str, Any] = json.loads(ended.stdout)
    return verdict


def _tcpdump(processes: Processes, route: Route, capture: Path, port: int, cpus: Sequence[int]) -> Child:
    program = shutil.which("tcpdump") or shutil.which("tcpdump", path="/usr/sbin:/sbin")
    if program is None:
        raise BenchmarkError("tcpdump is not installed")
    options = ["-n", "-s", str(_HEADERS_BYTES), "-B", str(_BUFFER_KIB), "-i", route.interface, "-w", str(capture)]
    options += ["-Z", "root", "--time-stamp-precision=nano"]
    dump = processes.start([program, *options, f"tcp dst port {port}"], route.sender, cpus)
    deadline_s = time.monotonic() + 10
    while "listening on" not in dump.errors_so_far():
        if dump.is_over(0.01) or time.monotonic() > deadline_s:
            raise BenchmarkError(f"tcpdump does not capture: {dump.end().stderr.strip()[-200:]}")
    return dump
