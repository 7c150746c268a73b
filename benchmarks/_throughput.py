"""Bulk transfers with one stream and several; ringtap and the peers take turns, so that all see the same machine."""

from __future__ import annotations

import time
from pathlib import Path

from _context import Bench
from _machine import congestion_control
from _namespaces import Route
from _peers import Transfer
from _ringtap import Receiver, free_port, send, traffic

RINGTAP = "ringtap"


class Throughput:
    """Rounds of transfers on one route: in each, ringtap and every peer with every number of streams."""

    def __init__(self, bench: Bench, route: Route) -> None:
        self._bench = bench
        self._route = route
        self._port = free_port()
        self._plans: dict[int, Path] = {}
        self._rounds = 0
        self.round_s = 0.0

    def round(self) -> None:
        """Take one sample of everything; every second round in reverse order, so that drift favours no tool."""
        begun_s = time.monotonic()
        self._rounds += 1
        for streams in (1, *self._bench.settings.streams):
            names = [RINGTAP, *(peer.name for peer in self._bench.peers if self._is_wanted(peer.name, streams))]
            for name in reversed(names) if self._rounds % 2 == 0 else names:
                self._transfer(name, streams)
        self.round_s = time.monotonic() - begun_s

    def _is_wanted(self, name: str, streams: int) -> bool:
        """Return False for the variant of iperf3 without a target in a quick run."""
        return not self._bench.settings.quick or name != ("iperf3" if streams == 1 else "iperf3 -Z")

    def _transfer(self, name: str, streams: int) -> None:
        bench, route = self._bench, self._route
        case = {"route": route.name, "streams": streams, "tool": name, "round": self._rounds}
        with bench.sample("throughput", **case) as figures:
            if name == RINGTAP:
                done = self._ringtap(streams)
            else:
                peer = next(peer for peer in bench.peers if peer.name == name)
                done = peer.run(bench.processes, route, free_port(), streams, bench.settings.bulk_s, None)
            figures["goodput_bps"] = done.received_bytes * 8 / done.sending_s
            figures["cpu_s_per_gb"] = done.cpu_s / (done.received_bytes / 1e9)

    def _ringtap(self, streams: int) -> Transfer:
        bench, duration = self._bench, f"{self._bench.settings.bulk_s}s"
        with Receiver(bench.processes, self._route, self._port) as receiver:
            if streams not in self._plans:
                path = bench.path(f"bulk-{self._route.name}-{streams}.plan")
                arguments = ["--kind", "long-lived", "--flows", streams, "--duration", duration]
                traffic(bench.processes, "plan", *arguments, "--to", receiver.address, "-o", path)
                self._plans[streams] = path
            sent = send(
                bench.processes,
                self._route,
                self._plans[streams],
                *congestion_control("--congestion-control"),
                timeout_s=bench.settings.bulk_s,
            )
        return Transfer(receiver.received_bytes, float(sent.summary["duration_s"]), sent.cpu_s + receiver.cpu_s)
