"""``ringtap traffic``: plan, serve and send cross traffic."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ringtap.errors import MeasurementError, UsageError
from ringtap.units import format_duration, format_rate, format_size, parse_duration_s, parse_rate_bps


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the ``traffic`` verb and its three sub-verbs."""
    parser = subparsers.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="traffic_verb", metavar="COMMAND", required=True)
    _add_plan(verbs)
    _add_serve(verbs)
    _add_send(verbs)


def _add_plan(verbs: Any) -> None:
    text = "write a flow plan: which flow starts when, where to and how large"
    parser = verbs.add_parser("plan", help=text, description=text, allow_abbrev=False)
    parser.add_argument("--kind", required=True, choices=("consistent", "burst"), help="Poisson arrivals, or bursts")
    parser.add_argument("--load", required=True, metavar="RATE", help="payload bits per second, for example 10gbit")
    parser.add_argument("--duration", required=True, metavar="TIME", help="length of the plan, for example 60s")
    parser.add_argument("--to", action="append", default=[], metavar="HOST:PORT", help="a receiver; may be repeated")
    parser.add_argument("--seed", type=int, default=1, help="seed of everything random (default 1)")
    parser.add_argument("--scale", type=float, default=1.0, help="divide flow sizes by this (default 1)")
    parser.add_argument("--burst-height", type=float, default=3.0, help="rate in a burst over the load (default 3)")
    parser.add_argument("--burst-length", default="1ms", metavar="TIME", help="length of a burst (default 1ms)")
    parser.add_argument("--burst-period", default="10ms", metavar="TIME", help="from burst to burst (default 10ms)")
    parser.add_argument("-o", "--output", type=Path, metavar="PLAN", help="file to write")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    parser.add_argument("--summary", action="store_true", help="print what the plan holds; needs no -o and no --to")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.set_defaults(handler=_plan)


def _add_serve(verbs: Any) -> None:
    text = "receive flows and discard their data, until SIGINT or SIGTERM"
    parser = verbs.add_parser("serve", help=text, description=text, allow_abbrev=False)
    parser.add_argument("--bind", default="127.0.0.1:5001", metavar="HOST:PORT", help="where (default 127.0.0.1:5001)")
    parser.add_argument("--log", type=Path, metavar="FILE.rec", help="per-flow log to create")
    parser.add_argument("--token", default="", help="senders must give the same one (default: empty)")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.set_defaults(handler=_serve)


def _add_send(verbs: Any) -> None:
    text = "send the flows of a plan, each at its time"
    parser = verbs.add_parser("send", help=text, description=text, allow_abbrev=False)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="file written by 'ringtap traffic plan'")
    parser.add_argument("--log", type=Path, metavar="FILE.rec", help="per-flow log to create")
    parser.add_argument("--duration", metavar="TIME", help="stop launching after this (default: the plan's end)")
    parser.add_argument("--token", default="", help="the receiver's token (default: empty)")
    parser.add_argument("--congestion-control", metavar="NAME", help="for example cubic (default: the kernel's)")
    parser.add_argument("--source", metavar="ADDRESS", help="source address of the connections")
    parser.add_argument("--start-at", type=int, metavar="NS", help="launch at this CLOCK_REALTIME, in nanoseconds")
    parser.add_argument("--patience", default="5s", metavar="TIME", help="wait so long for what is outstanding")
    parser.add_argument("--max-connections", type=int, default=1024, help="to each destination (default 1024)")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.set_defaults(handler=_send)


def _plan(options: argparse.Namespace) -> int:
    from ringtap.trafficgen.planfile import write_plan
    from ringtap.trafficgen.plans import FlowPlan, PlanSpec

    if options.output is None and not options.summary:
        raise UsageError("nothing to do: name a file with -o, or ask for --summary")
    if options.output is not None and not options.to:
        raise UsageError("a plan needs a destination: give --to HOST:PORT")
    spec = PlanSpec(
        kind=options.kind,
        load_bps=parse_rate_bps(options.load),
        duration_ns=_nanoseconds(options.duration),
        destinations=options.to or ["127.0.0.1:5001"],
        seed=options.seed,
        scale=options.scale,
        burst_height=options.burst_height,
        burst_length_ns=_nanoseconds(options.burst_length),
        burst_period_ns=_nanoseconds(options.burst_period),
    )
    plan = FlowPlan(spec)
    _print_settings(plan.header)
    if options.output is not None:
        write_plan(plan, options.output, options.force)
    if options.summary:
        _print_plan_summary(plan.header, options.json)
    if options.output is not None:
        stream = sys.stderr if options.json else sys.stdout
        print(f"Wrote {options.output}", file=stream)
        print(f"Next: ringtap traffic send {options.output}", file=stream)
    return 0


def _print_plan_summary(header: dict[str, Any], as_json: bool) -> None:
    flows, total, duration_s = header["flows"], header["bytes"], header["duration_ns"] / 1e9
    summary = {"flows": flows, "bytes": total, "duration_s": duration_s}
    summary |= {"mean_size_bytes": total / flows, "offered_bps": total * 8 / duration_s}
    if as_json:
        print(json.dumps(summary))
        return
    print(
        f"{flows} flows of {format_size(summary['mean_size_bytes'])} on average, {format_size(total)} in "
        f"{format_duration(duration_s)}: {format_rate(summary['offered_bps'])} of payload"
    )


def _serve(options: argparse.Namespace) -> int:
    import asyncio

    from ringtap.trafficgen.receiver import Receiver

    _print_settings({"bind": options.bind, "log": options.log, "token": "set" if options.token else "empty"})
    summary = asyncio.run(_run_receiver(Receiver, options))
    if options.json:
        print(json.dumps(summary))
    else:
        print(
            f"{summary['flows']} flows and {format_size(summary['bytes'])} received on {summary['connections']} "
            f"connections; {summary['unfinished']} flows unfinished, {summary['refused']} connections refused, "
            f"{summary['malformed']} malformed"
        )
    return 0


async def _run_receiver(receiver: Any, options: argparse.Namespace) -> dict[str, Any]:
    return dict(await receiver(options.token, options.log).run(options.bind))


def _send(options: argparse.Namespace) -> int:
    import asyncio

    from ringtap.trafficgen.planfile import PlanFile
    from ringtap.trafficgen.sender import SendOptions

    asked = SendOptions(
        log_path=options.log,
        duration_s=None if options.duration is None else parse_duration_s(options.duration),
        token=options.token,
        congestion_control=options.congestion_control,
        source=options.source,
        start_at_ns=options.start_at,
        patience_s=parse_duration_s(options.patience),
        most_connections=options.max_connections,
    )
    if asked.most_connections < 1:
        raise UsageError("--max-connections must be 1 or more")
    if asked.patience_s <= 0 or (asked.duration_s is not None and asked.duration_s <= 0):
        raise UsageError("--duration and --patience must be above 0")
    plan = PlanFile(options.plan)
    shown = vars(asked) | {"token": "set" if options.token else "empty"}
    _print_settings({"plan": options.plan, **shown})
    summary, failure = asyncio.run(_run_sender(plan, asked))
    if options.json:
        print(json.dumps(summary))
    else:
        _print_send_summary(summary, options.log)
    if summary["failed"]:
        raise MeasurementError(f"{summary['failed']} of {summary['flows']} flows failed; the first: {failure}")
    return 0


async def _run_sender(plan: Any, asked: Any) -> tuple[dict[str, Any], str]:
    from ringtap.trafficgen.sender import Sender

    sender = Sender(plan, asked)
    summary = await sender.run()
    return summary, sender.outcome.first_failure


def _print_send_summary(summary: dict[str, Any], log: Path | None) -> None:
    print(
        f"{summary['flows']} flows in {format_duration(summary['duration_s'])}: {summary['finished']} finished, "
        f"{summary['unfinished']} unfinished, {summary['failed']} failed"
    )
    print(f"{format_rate(summary['offered_bps'])} offered, {format_rate(summary['achieved_bps'])} achieved (payload)")
    if summary["finished"]:
        fct = [format_duration(summary[f"fct_{name}_s"]) for name in ("mean", "p50", "p99")]
        print(f"completion time: mean {fct[0]}, median {fct[1]}, p99 {fct[2]}")
    if summary["lateness_p50_us"] is not None:
        late = [format_duration(summary[f"lateness_{name}_us"] / 1e6) for name in ("p50", "p99", "max")]
        print(f"lateness: median {late[0]}, p99 {late[1]}, most {late[2]}; {summary['missed_slots']} over 1 ms")
    if log is not None:
        print(f"Wrote {log}")


def _nanoseconds(text: str) -> int:
    return round(parse_duration_s(text) * 1e9)


def _print_settings(settings: dict[str, Any]) -> None:
    words = " ".join(f"{key}={'default' if value is None else value}" for key, value in settings.items())
    print(words, file=sys.stderr, flush=True)
