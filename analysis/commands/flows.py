"""Implements ``ringtap flows``: shows conversations, rates and the traffic matrix of packet captures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtap.analysis.dask_workers import add_option, workers
from ringtap.core.command_options import add_force, add_json
from ringtap.core.terminal_escaping import shell_word, shown_log
from ringtap.core.units import format_duration, parse_duration_s

if TYPE_CHECKING:
    from ringtap.analysis.pcap.captured_traffic import Traffic

_SCAN_NS = 1_000_000
_UNTIMED = {"start_ns": None, "duration_s": None}
_FEW_FILES = 3
_SORTS = ("payload", "bytes", "packets", "start", "duration", "resent")
_AMOUNTS = ("bytes", "payload", "data_bytes", "packets", "data_packets")


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="pcap or pcapng, plain or packed; several or a directory: parts of one capture; '-': a pipe",
    )
    parser.add_argument("--filter", metavar="WORDS", help="in tcpdump's language, e.g. 'src host 10.0.0.1 and tcp'")
    parser.add_argument(
        "--outbound",
        metavar="HOST",
        help="traffic from HOST; rates count packets with payload (short for --filter 'src host HOST' --of data_bytes)",
    )
    parser.add_argument("--sort", choices=_SORTS, default="payload", help="order of the conversations shown (payload)")
    add_json(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="TABLE", help="conversations to TABLE.parquet or .csv")
    parser.add_argument("--rates", type=Path, metavar="TABLE", help="rates over time to TABLE.parquet or .csv")
    parser.add_argument(
        "--by", choices=("conversation", "flow", "hosts", "total"), default="flow", help="grouping of the rates (flow)"
    )
    parser.add_argument("--of", choices=_AMOUNTS, help="amount of the rates (bytes)")
    parser.add_argument("--bin", default="1ms", metavar="TIME", help="width of the rates' bins (1ms)")
    parser.add_argument("--matrix", action="store_true", help="payload from each host to each host")
    parser.add_argument("--no-cache", action="store_true", help="neither read nor write the cache of a capture's scan")
    add_force(parser)
    add_option(parser)
    parser.set_defaults(handler=_flows)


@shown_log()
def _flows(options: argparse.Namespace) -> int:
    bin_ns = round(parse_duration_s(options.bin, "--bin") * 1e9)
    from ringtap.analysis.pcap import export_scan_tables
    from ringtap.analysis.pcap.progress import Bar
    from ringtap.analysis.pcap.scan_captures import read_captures

    for path in (options.output, options.rates):
        if path is not None:
            export_scan_tables.check_table(path, options.force)
    expression = _filter(options)
    files = options.files
    # bins that are multiples of the usual width are summed later, so that one cache serves all of them
    scan_ns = bin_ns if not bin_ns or bin_ns % _SCAN_NS else _SCAN_NS
    with workers(options.dask) as executor, Bar() as bar:
        traffic = read_captures(
            files, expression, bin_s=scan_ns / 1e9, progress=bar, cache=not options.no_cache, workers=executor
        )
    if options.json:
        _print_json(traffic, expression, options.matrix)
    else:
        from ringtap.analysis.pcap.capture_text import describe

        print("\n".join(describe(traffic, expression, options.matrix, options.sort)))
    _write(traffic, options, bin_ns)
    if not options.json and "-" not in files:
        names = " ".join(map(shell_word, files)) if len(files) <= _FEW_FILES else "FILE…"
        if options.rates is None and traffic.bins:
            print(f"\nNext: ringtap flows {names} --rates rates.csv")
        elif _may_hold_training(traffic):
            print(f"\nNext: ringtap structure {names}")
        if expression is not None:
            words = shell_word(expression)
            print(f"Next, for these packets alone: ringtap packets {names} --filter {words} -o slice.pcapng")
    return 0


def _may_hold_training(traffic: Traffic) -> bool:
    """True if ``ringtap structure`` could analyze these captures."""
    from ringtap.analysis.pcap.captured_traffic import MAX_TRAINING_BINS

    has_payload = traffic.scanned.conversations["payload"][traffic.rows].any()
    return bool(has_payload) and 0 < traffic.bins * traffic.bin_ns <= MAX_TRAINING_BINS * _SCAN_NS


def _filter(options: argparse.Namespace) -> str | None:
    outbound = None if options.outbound is None else f"src host {options.outbound}"
    if outbound is None or options.filter is None:
        return outbound or options.filter
    return f"{outbound} and ({options.filter})"


def _write(traffic: Traffic, options: argparse.Namespace, bin_ns: int) -> None:
    from ringtap.analysis.pcap.export_scan_tables import TableFile

    amount = options.of or ("bytes" if options.outbound is None else "data_bytes")
    written = []
    if options.output is not None:
        with TableFile(options.output, options.force) as table:
            for columns in traffic.conversation_batches():
                table.add(columns)
        written.append(f"Wrote {options.output}")
    if options.rates is not None:
        with TableFile(options.rates, options.force) as table:
            for columns in traffic.rate_batches(options.by, amount, bin_ns / 1e9):
                table.add(columns)
        rates = f"{amount} by {options.by}" if options.by != "total" else amount
        written.append(f"Wrote {options.rates}: {rates}, bins of {format_duration(bin_ns / 1e9)}")
    if written:
        # with --json, standard output contains only the JSON object
        print("\n".join(written if options.json else ["", *written]), file=sys.stderr if options.json else sys.stdout)


def _print_json(traffic: Traffic, expression: str | None, with_matrix: bool) -> None:
    """Write one JSON object, with the conversations one by one, because there may be millions."""
    from ringtap.analysis.pcap import export_scan_tables
    from ringtap.analysis.pcap.capture_text import notes

    item: dict[str, Any] = {"files": list(traffic.files), "filter": expression, "counts": traffic.counts}
    item |= {"left_out": list(traffic.left_out)}
    item |= {"notes": notes(traffic), "bin_s": traffic.bin_ns / 1e9}
    item |= {"start_ns": traffic.start_ns, "duration_s": traffic.duration_s} if traffic.bins else _UNTIMED
    item |= {"interfaces": traffic.scanned.interfaces}
    if with_matrix:
        pairs = traffic.host_pairs()
        item["matrix"] = [{"source": a, "destination": b, "payload": amount} for (a, b), amount in pairs.items()]
    out = sys.stdout
    out.write(json.dumps(item, allow_nan=False)[:-1])
    pairs_table = export_scan_tables.queue_pair_columns(traffic.scanned.queue_pairs)
    batches = traffic.conversation_batches()
    _print_rows("conversations", (row for columns in batches for row in export_scan_tables.rows_of(columns)))
    _print_rows("queue_pairs", export_scan_tables.rows_of(pairs_table))
    out.write("}\n")
    out.flush()


def _print_rows(name: str, rows: Iterable[dict[str, Any]]) -> None:
    sys.stdout.write(f', "{name}": [')
    separator = "\n"
    for row in rows:
        sys.stdout.write(separator + json.dumps(row))
        separator = ",\n"
    sys.stdout.write("]")
