"""Implements ``ringtap traffic send``: sends the flows of a plan, each at its time, and prints their statistics."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtap.core.command_options import add_json, add_verbose
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.host_port import parse_address
from ringtap.core.terminal_escaping import unguarded
from ringtap.core.units import counted, format_rate, format_size, parse_duration_s, parse_rate_bps, parse_size_bytes
from ringtap.trafficgen.commands.common import (
    add_token,
    add_worker_options,
    at_least,
    print_settings,
    read_token,
    seconds_words,
)

if TYPE_CHECKING:
    from ringtap.core.flow_plan_file import PlanFile
    from ringtap.trafficgen.sender.options import SendOptions

_MAX_DURATION_S = 365 * 86_400.0
_RECEIVERS_S = 60.0


def register(verbs: Any, name: str, summary: str) -> None:
    """Add the ``send`` sub-verb."""
    parser = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    add = parser.add_argument
    add("plan", type=Path, metavar="PLAN", help="file written by 'ringtap traffic plan'")
    add("--log", type=Path, metavar="FILE.rec", help="per-flow log to create")
    add("--duration", metavar="TIME", help="launch flows for this long (default: to the plan's end)")
    add_token(parser)
    add("--connections", choices=("kept", "new"), default="kept", help="reused, or a new one per flow (default kept)")
    add("--as", dest="only_source", default="", metavar="ADDRESS", help="send only the plan's flows from this source")
    add("--receive", action="store_true", help="also receive the flows to the hosts of --as, and wait for other hosts")
    add("--arrivals", type=Path, help=argparse.SUPPRESS)  # replays without --receive: docs/commands/traffic.md
    add("--start-at", type=int, metavar="NS", help="launch at this CLOCK_REALTIME, in nanoseconds")
    add("--patience", default="5s", metavar="TIME", help="time to wait for outstanding flows (default 5s)")
    add("--max-connections", type=int, metavar="N", help="limit per destination (default 1024, or what the plan needs)")
    _add_transport(parser)
    add_worker_options(parser)
    add("--launcher-cpu", type=int, metavar="N", help="processor for the launcher alone (default: any)")
    add("--capacity", metavar="RATE", help="capacity of the link, for slowdowns")
    add("--baseline", type=Path, metavar="FILE.rec", help="log of a run without congestion, to compare with")
    add_json(parser)
    add_verbose(parser)
    parser.set_defaults(handler=_send)


def _add_transport(parser: Any) -> None:
    add = parser.add_argument
    add("--congestion-control", metavar="NAME", help="for example cubic (default: the plan's, or the kernel's)")
    add("--dscp", type=int, metavar="N", help="differentiated services code point, 0 to 63")
    add("--send-buffer", metavar="SIZE", help="SO_SNDBUF of each connection (default: the kernel adapts it)")
    add("--pacing", metavar="RATE", help="highest rate of each connection")
    add("--source", default="", metavar="ADDRESS", help="source address of flows for which the plan names none")
    add("--interface", metavar="NAME", help="send through this interface only")


def _send(options: argparse.Namespace) -> int:
    from ringtap.core.flow_plan_file import PlanFile
    from ringtap.trafficgen.calibrate_host_limits import load
    from ringtap.trafficgen.sender.sender import Sender
    from ringtap.trafficgen.statistics import congestion_impact

    settings, calibration, plan = _send_options(options), load(), PlanFile(options.plan)
    if calibration is not None:
        settings = calibration.applied_to(settings)
    if options.verbose:
        print_settings({"plan": options.plan, **_printed_settings(settings)})
    with ExitStack() as ends:
        if options.receive:
            settings = _receiving(settings, ends)
        sender = Sender(plan, settings, warn=_warn, progress=_show_progress)
        if calibration is not None and (doubt := calibration.doubt(sender)):
            _warn(doubt)
        baseline = None if options.baseline is None else congestion_impact(options.baseline)
        if options.receive:
            _start_receivers(plan, settings, ends)
        summary = sender.run()
    summary |= {"congestion_impact": None if baseline is None else baseline.of(summary)}
    if options.json:
        print(json.dumps(summary))
    else:
        _print_summary(summary, options.log)
    if summary["failed"]:
        raise MeasurementError(
            f"{summary['failed']} of {counted(summary['flows'], 'flow')} failed; the first: {sender.first_failure}"
        )
    return 0


def _receiving(settings: SendOptions, ends: ExitStack) -> SendOptions:
    """Return the options of a sender that waits for other hosts and whose own receivers send it completion notices."""
    if settings.arrivals is not None:
        raise UsageError("--arrivals names the socket of receivers that you have started: leave it out with --receive")
    folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="ringtap-"))
    return replace(settings, arrivals=Path(folder, "arrivals"), receivers_wait_s=_RECEIVERS_S)


def _start_receivers(plan: PlanFile, settings: SendOptions, ends: ExitStack) -> None:
    """Start a receiver for each destination of the plan on this host."""
    from ringtap.trafficgen.helper_process import Helper
    from ringtap.trafficgen.receiver.receiver import ReceiveOptions

    for address in plan.destinations:
        if settings.only_source in ("", parse_address(address)[0]):
            helper = ends.enter_context(Helper())
            helper.ask("serve", ReceiveOptions(address, settings.token, arrivals=settings.arrivals))
            helper.receive()


def _warn(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr)


def _show_progress(passed_s: float, all_s: float) -> None:
    if sys.stderr.isatty():
        print(f"\r{passed_s:.0f} of {all_s:.0f} s ", end="", file=unguarded(sys.stderr), flush=True)


def _printed_settings(settings: SendOptions) -> dict[str, Any]:
    """Return the settings to print, one level deep and without the token."""
    shown = {name: value for name, value in vars(settings).items() if name != "transport"}
    return shown | vars(settings.transport) | {"token": "set" if settings.token else "empty"}


def _send_options(options: argparse.Namespace) -> SendOptions:
    from ringtap.trafficgen.outgoing_sockets import Transport, check_transport_options
    from ringtap.trafficgen.sender.options import SendOptions

    for option in ("workers", "threads", "max_connections"):
        value = getattr(options, option)
        if value is not None:
            at_least(f"--{option.replace('_', '-')}", value, 1)
    transport = Transport(
        options.congestion_control,
        options.dscp,
        None if options.send_buffer is None else parse_size_bytes(options.send_buffer, "--send-buffer"),
        None if options.pacing is None else int(parse_rate_bps(options.pacing, "--pacing")),
        options.interface,
    )
    settings = SendOptions(
        log_path=options.log,
        duration_s=None if options.duration is None else parse_duration_s(options.duration, "--duration"),
        token=read_token(options),
        transport=transport,
        source=options.source,
        only_source=options.only_source,
        arrivals=options.arrivals,
        connections=options.connections,
        start_at_ns=options.start_at,
        patience_s=parse_duration_s(options.patience, "--patience"),
        max_connections=options.max_connections,
        workers=options.workers,
        threads=options.threads,
        launcher_cpu=options.launcher_cpu,
        capacity_bps=0.0 if options.capacity is None else parse_rate_bps(options.capacity, "--capacity"),
    )
    if not all(
        0 < seconds <= _MAX_DURATION_S
        for seconds in (settings.patience_s, _MAX_DURATION_S if settings.duration_s is None else settings.duration_s)
    ):
        raise UsageError("--duration and --patience must be above 0 and not above a year")
    given = {name: value for name, value in vars(transport).items() if value is not None and name != "interface"}
    check_transport_options(given)
    return settings


def _print_summary(summary: dict[str, Any], log: Path | None) -> None:
    if (found := summary.get("iterations")) is not None:
        times = f", {found['median_s']:.4g} s each (median)" if found["median_s"] is not None else ""
        print(f"{counted(found['count'], 'iteration')}{times}")
    print(
        f"{counted(summary['flows'], 'flow')} in {seconds_words(summary['duration_s'])}: "
        f"{summary['finished']} finished, {summary['unfinished']} unfinished, {summary['failed']} failed; "
        f"{summary['retransmits']} retransmissions"
    )
    print(f"{format_rate(summary['offered_bps'])} offered, {format_rate(summary['achieved_bps'])} achieved (payload)")
    for row in summary["fct_by_size"]:
        if row["flows"]:
            print(_size_class_words(row))
    if summary["lateness_p50_us"] is not None:
        late = [seconds_words(summary[f"lateness_{name}_us"] / 1e6) for name in ("p50", "p99", "max")]
        print(f"lateness: median {late[0]}, p99 {late[1]}, most {late[2]}; {summary['missed_slots']} over 1 ms")
    impact = summary["congestion_impact"]
    if impact is not None:
        print(
            f"congestion impact factor: {impact['mean']:.3g} on mean completion times, {impact['p99']:.3g} on their p99"
        )
    if log is not None:
        print(f"Wrote {log}")


def _size_class_words(row: dict[str, Any]) -> str:
    low, high = row["from_bytes"], row["to_bytes"]
    sizes = f"from {format_size(low)}" if low else ""
    sizes += f"{' ' if low and high else ''}below {format_size(high)}" if high else ""
    times = ", ".join(f"{name} {seconds_words(row[f'fct_{name}_s'])}" for name in ("mean", "p50", "p99"))
    slow = ""
    if row["slowdown_mean"] is not None:
        slow = f"; slowdown mean {row['slowdown_mean']:.3g}, p99 {row['slowdown_p99']:.3g}"
    return f"completion time {sizes} ({row['flows']}): {times}{slow}"
