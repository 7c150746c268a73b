"""Driver for iperf3: its command lines and its JSON report.

This module starts no process: the caller runs the command lines where they belong (a namespace, another host).
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from typing import Any

from ringtap.core.errors import UsageError
from ringtap.core.json_validation import parse_json


@dataclass(frozen=True)
class Iperf3Report:
    """A client's report; values that it lacks are None, or empty texts.

    Attributes:
        sent_bps: mean rate at which the client sent.
        received_bps: mean rate at which the server received; None unless the two exchanged their results at the end.
        retransmits: retransmitted TCP segments.
        duration_s: time for which the client sent, in seconds.
        congestion_control: the sender's congestion control.
        version: for example ``iperf 3.12``.
        error: the error, empty if there was none; iperf3 may exit with 0 despite an error.
    """

    sent_bps: float | None
    received_bps: float | None
    retransmits: int | None
    duration_s: float | None
    congestion_control: str
    version: str
    error: str


def find_iperf3() -> str:
    """Return the path of iperf3.

    Raises:
        UsageError: iperf3 is not installed.
    """
    program = shutil.which("iperf3")
    if program is None:
        raise UsageError(
            "iperf3 is not on the PATH: install iperf3 with your package manager, or plan no iperf traffic"
        )
    return program


def server_argv(program: str, port: int, bind: str | None = None) -> list[str]:
    """Return the command line of a server, which serves one client after another until it is stopped.

    Args:
        program: path of iperf3.
        port: port to listen on.
        bind: address to listen on; None: all.
    """
    return [program, "--server", "--port", str(port), *(["--bind", bind] if bind else [])]


def client_argv(
    program: str,
    host: str,
    port: int,
    load_bps: float,
    duration_s: float,
    *,
    streams: int = 2,
    congestion_control: str | None = None,
    bind: str | None = None,
    block_bytes: int | None = None,
) -> list[str]:
    """Return the command line of a client that sends ``load_bps`` of payload and reports as JSON.

    Args:
        program: path of iperf3.
        host: the server.
        port: the server's port.
        load_bps: total over the streams; iperf3 itself takes a rate per stream.
        duration_s: rounded up to whole seconds, the resolution of iperf3.
        streams: parallel connections.
        congestion_control: None: the kernel's choice.
        bind: source address; None: the routing table's choice.
        block_bytes: bytes per write. iperf3 keeps its rate by pausing between whole blocks, so on a slow link its
            default of 128 KiB makes bursts; None: the default.

    Raises:
        UsageError: iperf3 does not support the load, duration or number of streams.
    """
    if streams < 1 or not math.isfinite(load_bps) or round(load_bps / streams) < 1:
        raise UsageError(
            f"iperf3 cannot send {load_bps} bit/s over {streams} streams: ask for 1 bit/s per stream or more"
        )
    if not 0 < duration_s <= 86400:
        raise UsageError(f"iperf3 cannot send for {duration_s} s: ask for more than 0 and at most a day")
    argv = [program, "--client", host, "--port", str(port), "--json", "--parallel", str(streams)]
    argv += ["--bitrate", str(round(load_bps / streams)), "--time", str(math.ceil(duration_s))]
    argv += ["--congestion", congestion_control] if congestion_control else []
    argv += ["--bind", bind] if bind else []
    argv += ["--length", str(block_bytes)] if block_bytes else []
    return argv


def parse_report(text: str) -> Iperf3Report:
    """Parse the output of a client with ``--json``: complete, interrupted, cut short or empty; never raises."""
    try:
        report = parse_json(text)
    except ValueError:
        report = None
    if not isinstance(report, dict):
        why = "no report: iperf3 was killed or never ran" if not text.strip() else "its report is cut short or not JSON"
        return Iperf3Report(None, None, None, None, "", "", why)
    error = report.get("error", "")
    end = _member(report, "end")
    sent, received = _member(end, "sum_sent"), _member(end, "sum_received")
    # An interrupted client prints a received rate of 0: it did not get the server's count
    return Iperf3Report(
        sent_bps=_number(sent.get("bits_per_second")),
        received_bps=None if error else _number(received.get("bits_per_second")),
        retransmits=_whole(sent.get("retransmits")),
        duration_s=_number(sent.get("seconds")),
        congestion_control=str(end.get("sender_tcp_congestion", "")),
        version=str(_member(report, "start").get("version", "")),
        error=str(error) if error or sent else "its report has no totals",
    )


def _member(item: dict[str, Any], key: str) -> dict[str, Any]:
    value = item.get(key)
    return value if isinstance(value, dict) else {}


def _number(value: object) -> float | None:
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable and isinstance(value, (int, float)) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
