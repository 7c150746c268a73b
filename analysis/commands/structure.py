"""Implements ``ringtap structure``: finds iterations, topology and volume of a training job in its packets alone."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ringtap.core.command_options import add_force, add_json
from ringtap.core.errors import UsageError
from ringtap.core.terminal_escaping import shell_word, shown_log
from ringtap.core.units import parse_duration_s


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="FILE|RUN",
        help="captures, of one or several hosts, or a job's run directory with packets in it",
    )
    parser.add_argument("--bin", default="1ms", metavar="TIME", help="width of the time bins (1ms)")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME=ADDRESS,…",
        help="addresses of one host that has several, or a name for one address; may be repeated",
    )
    parser.add_argument("--filter", metavar="WORDS", help="use only this traffic: 'net 10.77.0.0/24 and tcp'")
    parser.add_argument(
        "--average", type=int, metavar="N", help="bins of the moving average in the figure of the flows (30, or fewer)"
    )
    parser.add_argument("--no-cache", action="store_true", help="do not keep the scans of the captures beside them")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="write figures, tables and structure.json")
    add_force(parser)
    add_json(parser)
    parser.set_defaults(handler=_structure)


@shown_log()
def _structure(options: argparse.Namespace) -> int:
    bin_s = parse_duration_s(options.bin, "--bin")
    if not 1e-5 <= bin_s <= 1:
        raise UsageError(f"--bin {options.bin} is outside of 10us to 1s")
    if options.average is not None and options.average < 1:
        raise UsageError(f"--average {options.average} is not a number of bins: 1 or more")
    hosts = dict(_host(text) for text in options.host)
    if options.output is not None and options.output.is_dir() and any(options.output.iterdir()) and not options.force:
        raise UsageError(f"{options.output} is not empty: name another folder, or add --force to overwrite")
    from ringtap.analysis.pcap.progress import Bar
    from ringtap.analysis.structure.capture_streams import read_structure
    from ringtap.analysis.structure.structure_text import describe

    if options.output is not None:
        from ringtap.analysis.structure.plots import write
    with Bar() as bar:
        found = read_structure(
            options.paths, options.filter, bin_s=bin_s, hosts=hosts, cache=not options.no_cache, progress=bar
        )
    paths = write(found, options.output, options.average) if options.output is not None else []
    if options.json:
        print(json.dumps(found.to_json(), allow_nan=False))
        for path in paths:
            print(f"Wrote {path}", file=sys.stderr)
        return 0
    print("\n".join(describe(found)))
    print(f"\nFrom {', '.join(map(str, found.streams.places))}, in bins of {options.bin}.\n")
    for path in paths:
        print(f"Wrote {path}")
    if not paths:
        named = " ".join(map(shell_word, options.paths))
        print(f"Next, for figures and tables: ringtap structure {named} -o FOLDER")
    return 0


def _host(text: str) -> tuple[str, list[str]]:
    name, equals, addresses = text.partition("=")
    found = [address.strip() for address in addresses.split(",") if address.strip()]
    if not (name and equals and found):
        raise UsageError(f"--host {text!r} is not NAME=ADDRESS or NAME=ADDRESS,ADDRESS")
    return name, found
