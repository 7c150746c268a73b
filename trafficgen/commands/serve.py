"""Implements ``ringtap traffic serve``: receives flows and discards their data."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ringtap.core.command_options import add_json
from ringtap.core.host_port import LOCAL
from ringtap.core.units import counted, format_size, parse_duration_s
from ringtap.trafficgen.commands.common import add_token, add_worker_options, at_least, read_token


def register(verbs: Any, name: str, summary: str) -> None:
    """Add the ``serve`` sub-verb."""
    parser = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    add = parser.add_argument
    add("--bind", default=LOCAL, metavar="HOST:PORT", help=f"address to listen on (default {LOCAL})")
    add("--log", type=Path, metavar="FILE.rec", help="per-flow log to create")
    add_token(parser)
    add("--max-connections", type=int, default=16384, metavar="N", help="further ones are refused (default 16384)")
    add("--idle", default="5min", metavar="TIME", help="drop a connection after this long without data (default 5min)")
    add("--arrivals", type=Path, help=argparse.SUPPRESS)  # for such a sender on this host
    add_worker_options(parser)
    add_json(parser)
    parser.set_defaults(handler=_serve)


def _serve(options: argparse.Namespace) -> int:
    from ringtap.trafficgen.receiver.receiver import ReceiveOptions, Receiver

    settings = ReceiveOptions(
        bind=options.bind,
        token=read_token(options),
        log_path=options.log,
        max_connections=options.max_connections,
        idle_s=parse_duration_s(options.idle, "--idle"),
        workers=options.workers,
        threads=options.threads,
        arrivals=options.arrivals,
    )
    for option in ("max_connections", "workers", "threads"):
        at_least(f"--{option.replace('_', '-')}", getattr(options, option), 1)
    at_least("--idle", settings.idle_s, 1)
    summary = Receiver(settings).run()
    if options.json:
        print(json.dumps(summary))
    else:
        print(
            f"{counted(summary['flows'], 'flow')} and {format_size(summary['bytes'])} received on "
            f"{counted(summary['connections'], 'connection')}; {counted(summary['unfinished'], 'flow')} unfinished; "
            f"{counted(summary['refused'], 'connection')} refused, "
            f"{summary['malformed']} malformed, {summary['idle']} idle"
        )
    if options.log is not None:
        print(f"Wrote {options.log}", file=sys.stderr if options.json else sys.stdout)
    return 0
