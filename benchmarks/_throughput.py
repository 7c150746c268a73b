"""Measures bulk transfers of ``ringtap traffic`` and of iperf3 with one stream and several, in turn."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from _bench import Bench
from _machine import congestion_control
from _processes import BenchmarkError
from _report import Samples, paired_ratio, select
from _ringtap import HOST, Receiver, free_port, send, traffic

RINGTAP, IPERF3, ZERO_COPY = "ringtap", "iperf3", "iperf3 -Z"
STREAMS = 4
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


def measure(bench: Bench, length_s: float, rounds: int) -> None:
    """Take samples of each tool with one stream and with several."""
    installed = shutil.which("iperf3")
    if installed is None:
        bench.notes.append("iperf3 is not installed, so the ratios to it are null.")
    tools = {}
    for streams in (1, STREAMS):
        for tool in (RINGTAP, IPERF3, ZERO_COPY) if installed else (RINGTAP,):
            # a quick run leaves out the variant of iperf3 that no figure is compared with
            if not bench.options.quick or tool != (IPERF3 if streams == 1 else ZERO_COPY):
                tools[f"{tool} with {streams}"] = partial(_sample, bench, tool, streams, length_s)
    bench.rounds(tools, rounds)


def _sample(bench: Bench, tool: str, streams: int, length_s: float, turn: int) -> None:
    with bench.sample("throughput", tool=tool, streams=streams, round=turn) as figures:
        if tool == RINGTAP:
            done = _ringtap(bench, streams, length_s)
        else:
            done = _iperf3(bench, streams, length_s, ["--zerocopy"] if tool == ZERO_COPY else [])
        figures["goodput_gbps"] = done.received_bytes * 8 / done.sending_s / 1e9
        figures["cpu_s_per_gb"] = done.cpu_s / (done.received_bytes / 1e9)


def _ringtap(bench: Bench, streams: int, length_s: float) -> Transfer:
    with Receiver(bench.processes, free_port()) as receiver:
        plan = _plan(bench, streams, length_s, receiver.address)
        control = congestion_control("--congestion-control")
        sent = send(bench.processes, plan, *control, timeout_s=length_s)
    return Transfer(receiver.received_bytes, float(sent.summary["duration_s"]), sent.cpu_s + receiver.cpu_s)


def _plan(bench: Bench, streams: int, length_s: float, address: str) -> Path:
    plan = bench.path("bulk.plan")
    flows = ["--kind", "long-lived", "--flows", streams, "--duration", f"{length_s}s"]
    traffic(bench.processes, "plan", *flows, "--to", address, "-o", plan)
    return plan


def _iperf3(bench: Bench, streams: int, length_s: float, options: list[str]) -> Transfer:
    port = free_port()
    server = bench.processes.start(["iperf3", "--server", "--one-off", "--port", port])
    # without a connection, for which the server would end
    listening = {("LISTEN", port)}
    sockets = psutil.Process(server.pid).net_connections
    server.await_it(lambda: listening <= {(one.status, one.laddr.port) for one in sockets("tcp")}, "listen")
    argv = ["iperf3", "--client", HOST, "--port", port, "--parallel", streams, "--json", "--time", math.ceil(length_s)]
    argv += [*congestion_control("--congestion"), *options]
    client = bench.processes.start(argv).wait(length_s + _SLACK_S)
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


def ratio(samples: Samples, streams: int, peer: str) -> float | None:
    """Return the median over rounds of ringtap's goodput divided by the peer's in the same round."""
    ours, theirs = (select(samples, "throughput", streams=streams, tool=tool) for tool in (RINGTAP, peer))
    return paired_ratio(ours, theirs, "goodput_gbps")
