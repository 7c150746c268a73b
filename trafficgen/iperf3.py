"""Builds the command lines of iperf3, and reads the error in its JSON report.

This module starts no process: the caller runs the command lines where they belong (a namespace, another host).
"""

from __future__ import annotations

import math
import shutil

from ringtap.core.errors import UsageError
from ringtap.core.json_validation import parse_json


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


def server_argv(program: str, port: int, bind: str) -> list[str]:
    """Return the command line of a server, which serves one client after another until it is stopped.

    Args:
        program: path of iperf3.
        port: port to listen on.
        bind: address to listen on.
    """
    return [program, "--server", "--port", str(port), "--bind", bind]


def client_argv(
    program: str, host: str, port: int, load_bps: float, duration_s: float, *, streams: int, bind: str, block_bytes: int
) -> list[str]:
    """Return the command line of a client that sends ``load_bps`` of payload and reports as JSON.

    Args:
        program: path of iperf3.
        host: the server.
        port: the server's port.
        load_bps: total over the streams; iperf3 itself takes a rate per stream.
        duration_s: rounded up to whole seconds, the resolution of iperf3.
        streams: parallel connections.
        bind: source address.
        block_bytes: bytes per write. iperf3 keeps its rate by pausing between whole blocks, so on a slow link its
            default of 128 KiB makes bursts.

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
    return [*argv, "--bind", bind, "--length", str(block_bytes)]


def report_error(text: str) -> str:
    """Return the error in the output of a client with ``--json``, which may be cut short; empty if there is none.

    iperf3 may exit with 0 despite an error.
    """
    try:
        report = parse_json(text)
    except ValueError:
        report = None
    if not isinstance(report, dict):
        return (
            "no report: iperf3 was killed or never ran" if not text.strip() else "its report is cut short or not JSON"
        )
    error, end = report.get("error", ""), report.get("end")
    sent = end.get("sum_sent") if isinstance(end, dict) else None
    return str(error) if error or (isinstance(sent, dict) and sent) else "its report has no totals"
