"""Runs the cross traffic of a sweep between two of its hosts: one receiver, and one sender per load step."""

from __future__ import annotations

import secrets
import zlib
from pathlib import Path
from typing import Any

from ringtap.agents.hosts import HostProcess, Hosts, understood
from ringtap.agents.sweep.host_roles import SweepRoles
from ringtap.core.errors import MeasurementError, UsageError, last_line
from ringtap.core.flow_plan_file import FlowSource, write_plan
from ringtap.core.isolated_python import LEAVE_FOLDER_OUT
from ringtap.core.sweep_plans.sweep_plan import LoadPlan
from ringtap.trafficgen import iperf3
from ringtap.trafficgen.commands.common import TOKEN_VARIABLE
from ringtap.trafficgen.plans.registry import make_plan

# iperf3 paces whole blocks: its default of 128 kB would give bursts of 4 ms at 250 Mbit/s
IPERF_BLOCK_BYTES = 131_072
MIN_BLOCK_BYTES = 1448
# numbers of streams of the iperf kind, if each load takes as many as it needs; as in the thesis, section 3.2
STREAMS = (1, 2, 4, 6, 8, 10)
_NS = 1_000_000_000
_RECEIVER_S = 1.0
_CONNECT_S = 60.0  # time limit for a sender's first connection: Python may start slowly on a shared file system


class CrossTraffic:
    """One kind of cross traffic from one host to another.

    Args:
        plan: the sweep.
        kind: ``iperf``, ``consistent`` or ``burst``.
        hosts: the hosts on which processes run.
        network: roles and addresses of the hosts, and the load limit.
        run: the published job run directory for plans and logs.

    Attributes:
        port: TCP port on which the receiver listens; 0 before `start_receiver`.
    """

    def __init__(self, plan: LoadPlan, kind: str, hosts: Hosts, network: SweepRoles, run: Path) -> None:
        self._plan, self.kind, self._hosts, self._network = plan, kind, hosts, network
        self._from, self._to = network.roles.cross_from, network.roles.cross_to
        self._sent = run / "nodes" / self._from / "sent"
        self._received = run / "nodes" / self._to / "received"
        # shared by this run's sender and receiver through the environment, which other users of the hosts cannot read
        self._token = {TOKEN_VARIABLE: secrets.token_hex(8)}
        self.port = 0
        self._sender: HostProcess | None = None
        self._receiver: HostProcess | None = None
        self._report = self._sent

    def start_receiver(self) -> None:
        """Start the receiver and wait until it listens; does nothing if the plan has no cross traffic.

        Raises:
            MeasurementError: the receiver does not listen in time.
        """
        if not self._plan.heaviest_load:
            return
        address = self._network.cross[self._to]
        self.port = free_port(self._hosts, self._to, address, ports=self._network.ports)
        if self.kind == "iperf":
            command = iperf3.server_argv(self._network.iperf3[self._to], self.port, address)
        else:
            log = self._hosts.path(self._to, self._received / "flows.rec")
            bind = f"{address}:{self.port}"
            command = [*self._hosts.ringtap(self._to), "traffic", "serve", "--bind", bind, "--log", log]
        name, output = f"{self.kind} receiver", self._received / "receiver.log"
        server = self._hosts.start(self._to, name, command, output, environment=self._token)
        if not self._hosts.wait_for_port(self._to, self.port, server):
            server.stop()
            raise MeasurementError(f"the {server.name} does not listen on port {self.port}: {server.last_words()}")
        self._receiver = server

    def start_sender(self, load_bps: float, name: str, duration_s: float, streams: int = 1) -> None:
        """Start sending, and wait until the sender has connected to the receiver: it sends from then on.

        Args:
            load_bps: requested load, in bits of payload per second, at the scale of the links.
            name: name of the step, for its files.
            duration_s: seconds after which the sender ends by itself.
            streams: parallel streams of the iperf kind.

        Raises:
            UsageError: the load exceeds the limit of the plan.
            MeasurementError: the host is lost, or the sender ended, or did not connect in time.
        """
        most_bps = self._network.most_load_bps
        if most_bps and round(load_bps) > most_bps:  # rounded as in the plan
            raise UsageError(f"{load_bps:.0f} bit/s are more than the plan's most_load of {most_bps} bit/s")
        self._sent.mkdir(parents=True, exist_ok=True)
        if self.kind == "iperf":
            command = self._iperf(load_bps, duration_s, streams)
        else:
            command = self._flows(load_bps, name, duration_s)
        log, self._report = self._sent / f"{name}.log", self._sent / f"{name}.json"
        name = f"{self.kind} sender"
        self._sender = self._hosts.start(self._from, name, command, log, environment=self._token, report=self._report)
        if not self._hosts.wait_for_connection(self._from, self.port, self._sender, _CONNECT_S):
            self.check()
            raise MeasurementError(
                f"the {self._sender.name} has not connected to port {self.port} of its receiver within "
                f"{_CONNECT_S:g} s: {self._sender.last_words()}"
            )

    def _iperf(self, load_bps: float, duration_s: float, streams: int) -> list[str]:
        most_bps = self._network.most_load_bps
        command = iperf3.client_argv(
            self._network.iperf3[self._from],
            self._network.cross[self._to],
            self.port,
            load_bps,
            duration_s,
            streams=streams,
            bind=self._network.cross[self._from],
            block_bytes=max(MIN_BLOCK_BYTES, round(IPERF_BLOCK_BYTES / self._plan.scale)),
        )
        # pacing by the kernel also limits the rate at which iperf3 catches up after a pause
        return [*command, "--fq-rate", str(round(most_bps / streams))] if most_bps else command

    def _flows(self, load_bps: float, name: str, duration_s: float) -> list[str]:
        destination, most_bps = f"{self._network.cross[self._to]}:{self.port}", self._network.most_load_bps
        path = self._sent / f"{name}.plan"
        write_plan(self._flow_plan(load_bps, name, duration_s, destination), path)
        self._hosts.put(self._from, path)
        log = self._hosts.path(self._from, self._sent / f"{name}.rec")
        record = ["--log", log, "--json", "--capacity", f"{self._plan.capacity_bps}bit"]
        record += ["--pacing", f"{most_bps}bit"] if most_bps else []
        plan = self._hosts.path(self._from, path)
        source = self._network.cross[self._from]
        return [*self._hosts.ringtap(self._from), "traffic", "send", plan, "--source", source, *record]

    def _flow_plan(self, load_bps: float, name: str, duration_s: float, destination: str) -> FlowSource:
        burst = self._plan.burst
        given: dict[str, Any] = {"load": load_bps, "duration": round(duration_s * _NS), "to": [destination]}
        given |= {"seed": zlib.crc32(f"{self._plan.seed} {self.kind} {name}".encode()), "scale": self._plan.scale}
        if self.kind == "burst":
            given |= {"burst_height": burst.height, "burst_length": round(burst.length_s * _NS)}
            given |= {"burst_period": round(burst.period_s * _NS), "quiet_budget": burst.quiet_budget}
        return make_plan(self.kind, given)

    def check(self) -> None:
        """Check that the receiver and the sender still run.

        Raises:
            MeasurementError: one of them has ended.
        """
        has_ended = self._sender is not None and self._sender.exit_code() is not None
        # the sender ends because its receiver has, which may become known a moment later
        if self._receiver is not None and self._receiver.has_ended(_RECEIVER_S if has_ended else 0.0):
            raise MeasurementError(f"the {self._receiver.name} ended early: {self._receiver.last_words()}")
        if self._sender is not None and has_ended:
            why = self._sender.last_words()
            if self.kind == "iperf" and (self._sender.exit_code() or 0) >= 0:
                why = iperf3.report_error(self._report.read_text()) or why
            raise MeasurementError(f"the {self._sender.name} ended early: {why}")

    def stop_sender(self) -> None:
        """Stop the sender; its logs are complete afterwards."""
        if self._sender is not None:
            self._sender.stop()
            self._sender = None


def free_port(hosts: Hosts, host: str, address: str, count: int = 1, ports: tuple[int, int] | None = None) -> int:
    """Return the first of ``count`` consecutive TCP ports that are free at an address of a host.

    Raises:
        MeasurementError: there are no such ports, or the host does not answer.
    """
    call = f"free_port({address!r}, {count}, {ports!r})"
    code = f"{LEAVE_FOLDER_OUT}\nfrom ringtap.agents.sweep.host_facts import free_port\nprint({call})"
    done = hosts.ask(host, [hosts.python(host), "-c", code])
    if done.returncode:
        message = last_line(done.stderr)
        among = f" among {ports[0]}-{ports[1]}" if ports else ""
        raise MeasurementError(f"host {host} has no free port at {address}{among}: {message}")
    with understood(host):
        port = int(done.stdout)
        if not 0 < port <= 65536 - count:
            raise ValueError(port)
    return port
