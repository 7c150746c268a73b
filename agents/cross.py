"""Cross traffic of a sweep: the receiver, and one sender a load step, on the testbed's hosts."""

from __future__ import annotations

import secrets
import zlib
from pathlib import Path

from ringtap.agents.hosts import RINGTAP, HostProcess, LabHosts
from ringtap.errors import MeasurementError, UsageError
from ringtap.plan import SweepPlan
from ringtap.trafficgen import iperf3
from ringtap.trafficgen.planfile import write_plan
from ringtap.trafficgen.plans import FlowPlan, PlanSpec

IPERF_PORT = 5201
FLOW_PORT = 5001
# iperf3 paces by whole blocks: its own 128 kB would be bursts of 4 ms at 250 Mbit/s
IPERF_BLOCK_BYTES = 131_072
LEAST_BLOCK_BYTES = 1448
_NS = 1_000_000_000


class CrossTraffic:
    """One kind of cross traffic from one host to another.

    Args:
        plan: the sweep.
        kind: ``iperf``, ``consistent`` or ``burst``.
        hosts: where processes run.
        cross_from: sending host.
        cross_to: receiving host.
        run_folder: the job run directory that plans and logs go to.
    """

    def __init__(
        self, plan: SweepPlan, kind: str, hosts: LabHosts, cross_from: str, cross_to: str, run_folder: Path
    ) -> None:
        self._plan, self.kind, self._hosts = plan, kind, hosts
        self._from, self._to = cross_from, cross_to
        self._sent = run_folder / "nodes" / cross_from / "sent"
        self._received = run_folder / "nodes" / cross_to / "received"
        self._token = secrets.token_hex(8)  # of this run's sender and receiver
        self._sender: HostProcess | None = None
        self._report = self._sent

    def start_receiver(self) -> None:
        """Start the receiving side and wait until it listens.

        Raises:
            MeasurementError: it does not come up.
        """
        address = self._hosts.spec.cross_ip(self._to)
        self._received.mkdir(parents=True, exist_ok=True)
        if self.kind == "iperf":
            port, command = IPERF_PORT, iperf3.server_argv(iperf3.find_iperf3(), IPERF_PORT, address)
        else:
            port = FLOW_PORT
            log = ["--log", str(self._received / "flows.rec"), "--token", self._token]
            command = [*RINGTAP, "traffic", "serve", "--bind", f"{address}:{port}", *log]
        server = self._hosts.start(self._to, f"{self.kind} receiver", command, self._received / "receiver.log")
        if not self._hosts.wait_for_port(self._to, port, server):
            server.stop()
            raise MeasurementError(f"the {server.name} does not listen on port {port}: {server.last_words()}")

    def start_sender(self, load_bps: float, name: str, longest_s: float) -> None:
        """Start sending.

        Args:
            load_bps: load asked for: payload, bits per second, at the testbed's scale.
            name: name of the step, for its files.
            longest_s: how long it may have to go on.
        """
        address = self._hosts.spec.cross_ip(self._to)
        source = self._hosts.spec.cross_ip(self._from)
        self._sent.mkdir(parents=True, exist_ok=True)
        if self.kind == "iperf":
            streams = self._plan.iperf_streams
            block_bytes = max(LEAST_BLOCK_BYTES, round(IPERF_BLOCK_BYTES / self._plan.scale))
            command = iperf3.client_argv(
                iperf3.find_iperf3(),
                address,
                IPERF_PORT,
                load_bps,
                longest_s,
                streams=streams,
                bind=source,
                block_bytes=block_bytes,
            )
        else:
            plan_path = self._sent / f"{name}.plan"
            write_plan(self._flow_plan(load_bps, name, longest_s, f"{address}:{FLOW_PORT}"), plan_path)
            record = ["--log", str(self._sent / f"{name}.rec"), "--json", "--token", self._token]
            record += ["--line-rate", f"{self._plan.capacity_bps}bit"]
            command = [*RINGTAP, "traffic", "send", str(plan_path), "--source", source, *record]
        log, self._report = self._sent / f"{name}.log", self._sent / f"{name}.json"
        self._sender = self._hosts.start(self._from, f"{self.kind} sender", command, log, report=self._report)

    def _flow_plan(self, load_bps: float, name: str, longest_s: float, destination: str) -> FlowPlan:
        if self.kind not in ("consistent", "burst"):
            raise UsageError(f"{self.kind} is no kind of flow plan")
        burst = self._plan.burst
        return FlowPlan(
            PlanSpec(
                kind=self.kind,  # type: ignore[arg-type]
                load_bps=load_bps,
                duration_ns=round(longest_s * _NS),
                destinations=[destination],
                seed=zlib.crc32(f"{self._plan.seed} {self.kind} {name}".encode()),
                scale=self._plan.scale,
                burst_height=burst.height,
                burst_length_ns=round(burst.length_s * _NS),
                burst_period_ns=round(burst.period_s * _NS),
            )
        )

    def check(self) -> None:
        """See that the sender still sends.

        Raises:
            MeasurementError: it has ended.
        """
        if self._sender is not None and self._sender.exit_code() is not None:
            why = self._sender.last_words()
            if self.kind == "iperf":
                why = iperf3.parse_report(self._report.read_text()).error or why
            raise MeasurementError(f"the {self._sender.name} ended early: {why}")

    def stop_sender(self) -> None:
        """End the load step; its logs are complete afterwards."""
        if self._sender is not None:
            self._sender.stop()
            self._sender = None
