"""iperf3 as a driven peer: its command lines, and what its JSON report says.

Nothing is started here: the caller runs the command lines where they belong (a namespace, another host).
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from typing import Any

from ringtap.errors import UsageError
from ringtap.json_validation import parse_json


@dataclass(frozen=True)
class Iperf3Report:
    """A client's report.

    Attributes:
        sent_bps: mean rate the client sent at; None when the report does not say.
        received_bps: mean rate the server received at; None unless the two exchanged their results at the end.
        retransmits: TCP segments sent again; None when the report does not say.
        duration_s: how long the client sent; None when the report does not say.
        congestion_control: the sender's, empty when the report does not say.
        version: for example ``iperf 3.12``, empty when the report does not say.
        error: what went wrong, empty when nothing did. iperf3 can exit with 0 all the same.
    """

    sent_bps: float | None
    received_bps: float | None
    retransmits: int | None
    duration_s: float | None
    congestion_control: str
    version: str
    error: str


def find_iperf3() -> str:
    """The path of iperf3.

    Raises:
        UsageError: it is not installed.
    """
    program = shutil.which("iperf3")
    if program is None:
        raise UsageError(
            "iperf3 is not on the PATH: install iperf3 with your package manager, or plan no iperf traffic"
        )
    return program


def server_argv(program: str, port: int, bind: str | None = None) -> list[str]:
    """The command line of a server; it serves client after client until stopped.

    Args:
        program: path of iperf3.
        port: where it listens.
        bind: address it listens on; None: all.
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
    """The command line of a client that sends ``load_bps`` of payload and reports as JSON.

    Args:
        program: path of iperf3.
        host: the server.
        port: the server's port.
        load_bps: total over the streams; iperf3 itself takes a rate a stream.
        duration_s: rounded up to whole seconds, all that iperf3 knows.
        streams: parallel connections.
        congestion_control: None: the kernel's choice.
        bind: source address; None: the routes' choice.
        block_bytes: bytes a write. iperf3 keeps its rate by pausing between whole blocks, so on a slow link its
            default of 128 KiB makes bursts; None: the default.

    Raises:
        UsageError: a load, duration or number of streams that iperf3 cannot do.
    """
    if streams < 1 or not math.isfinite(load_bps) or round(load_bps / streams) < 1:
        raise UsageError(
            f"iperf3 cannot send {load_bps} bit/s over {streams} streams: ask for 1 bit/s a stream or more"
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
    """Read what a client with ``--json`` printed, whole, interrupted, cut short or empty; never raises."""
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
    # An interrupted client prints a received rate of 0: it never heard the server's count
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
