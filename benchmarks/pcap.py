"""Speed of `ringtap flows` beside other readers of captures, in one run on one machine (docs/method/benchmarks.md).

python benchmarks/pcap.py [--quick | --large] [-o FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import _checkout  # noqa: F401 -- first: lets the others import ringtap
from _context import Bench, Settings
from _guarded import guarded
from _machine import CpuTimes, cores, describe
from _pcap_report import last_line, tables
from _pcap_tools import (
    DPKT,
    RINGTAP,
    SCAPY,
    TCPDUMP,
    TSHARK_FIELDS,
    TSHARK_TABLE,
    File,
    make_file,
    run_loop,
    run_ringtap,
    run_tcpdump,
    run_tshark,
)
from _processes import Ended, Processes
from _report import write

_QUICK_LIMIT_S = 50.0
_CAUTION = 1.2  # a round may take longer than the longest one so far
_LARGE_PACKETS = 98_000_000  # more than 10 GB


@dataclass(frozen=True)
class Sizes:
    """Packets of the captures: the main one, and the smaller ones for slow readers."""

    whole: int
    tshark: int
    dpkt: int
    scapy: int


_FULL = Sizes(10_000_000, 500_000, 500_000, 50_000)
_QUICK = Sizes(8_000_000, 50_000, 100_000, 10_000)


def main() -> int:
    """Measure, print the tables and, last, one JSON object; return 1 if a measure failed."""
    options = _options()
    before = CpuTimes.now()
    with tempfile.TemporaryDirectory(prefix="ringtap-benchmark-") as folder, Processes({}) as processes:
        settings = Settings(options.quick, options.repeats, (), limit_s=_QUICK_LIMIT_S if options.quick else None)
        bench = Bench(settings, processes, [], [], Path(folder))
        sizes = _QUICK if options.quick else _FULL
        if options.large:
            _large(bench, make_file(bench, "large.pcap", options.packets or _LARGE_PACKETS), cores()[-1:])
        else:
            _measure(bench, replace(sizes, whole=options.packets or sizes.whole))
    machine = describe() | {"stolen_pct": before.stolen_pct_since(), "others_pct": before.others_pct_since()}
    write(bench, machine, options, last_line(bench.samples), tables(bench.samples))
    return 1 if bench.failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="smaller captures; ends within 60 s")
    extent.add_argument("--large", action="store_true", help="only a capture of 10 GB, on one core and on all")
    parser.add_argument(
        "--repeats", type=int, default=7, help="of the fast readers (default 7; --quick: as time allows)"
    )
    parser.add_argument("--packets", type=int, metavar="N", help="of a capture (10 million; --quick: 8; --large: 98)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write every sample as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown")
    options = parser.parse_args()
    if options.repeats < 1 or (options.packets or 1) < 1:
        parser.error("--repeats and --packets must be 1 or more")
    return options


def _measure(bench: Bench, sizes: Sizes) -> None:
    """Measure the slow readers, then the fast ones in turn, then several cores and, in a full run, a large capture."""
    one = cores()[-1:]
    parts = {name: make_file(bench, name, getattr(sizes, name)) for name in ("tshark", "dpkt", "scapy")}
    single = make_file(bench, "one", 1)
    run_ringtap(bench, [parts["scapy"]], None)  # compiles the kernels if they are not compiled yet
    for tool in (TSHARK_TABLE, TSHARK_FIELDS):
        _slow(bench, tool, parts["tshark"], _beyond_start(bench, tool, parts["tshark"], single, one))
    for tool in (DPKT, SCAPY):
        _slow(bench, tool, parts[tool], lambda tool=tool: run_loop(bench, tool, parts[tool], one))
    whole = make_file(bench, "whole.pcap", sizes.whole)
    _by_turns(bench, whole, one)
    other = make_file(bench, "other.pcap", sizes.whole, sizes.whole)
    for turn in range(1 if bench.settings.quick else 3):
        _sample(bench, RINGTAP, [whole], "all", turn, lambda: run_ringtap(bench, [whole], None))
        _sample(bench, RINGTAP, [whole, other], "all", turn, lambda: run_ringtap(bench, [whole, other], None))
    if bench.settings.quick:
        _large(bench, whole, one)
        return
    for file in (whole, other):
        file.path.unlink()
    _large(bench, make_file(bench, "large.pcap", _LARGE_PACKETS), one)


def _large(bench: Bench, large: File, one: list[int]) -> None:
    """Measure one core and all of them in turn, on one capture."""
    for turn in range(1 if bench.settings.quick else min(bench.settings.repeats, 5)):
        runs = {"one": lambda: run_ringtap(bench, [large], one), "all": lambda: run_ringtap(bench, [large], None)}
        for on in ("one", "all") if turn % 2 else ("all", "one"):
            _sample(bench, RINGTAP, [large], on, turn, runs[on], "large")


def _beyond_start(bench: Bench, tool: str, part: File, single: File, cpus: list[int]) -> Callable[[], float]:
    """Return a measurement of tshark's time without that of its start, which is as long as that of many packets."""
    return lambda: run_tshark(bench, tool, part, cpus).wall_s - run_tshark(bench, tool, single, cpus).wall_s


def _slow(bench: Bench, tool: str, part: File, seconds: Callable[[], float]) -> None:
    for turn in range(1 if bench.settings.quick else 3):
        with bench.sample("read", tool=tool, cores="one", files=1, round=turn, packets=part.packets) as figures:
            figures["seconds"] = seconds()
            figures["packets_per_s"] = part.packets / figures["seconds"]


def _by_turns(bench: Bench, whole: File, one: list[int]) -> None:
    """Measure ringtap and tcpdump in turn; every second round has the reverse order."""
    longest_s = 0.0
    runs: list[tuple[str, Callable[[], Ended]]] = [
        (RINGTAP, lambda: run_ringtap(bench, [whole], one)),
        (TCPDUMP, lambda: run_tcpdump(bench, whole, one)),
    ]
    for turn in range(bench.settings.repeats):
        left_s = bench.left_s()
        if longest_s * _CAUTION * 4 > left_s:  # the later measures take some rounds too
            bench.notes.append(f"The time of --quick allowed {turn} rounds of the fast readers.")
            return
        for tool, run in runs if turn % 2 else runs[::-1]:
            _sample(bench, tool, [whole], "one", turn, run)
        longest_s = max(longest_s, left_s - bench.left_s()) if left_s < float("inf") else 0.0


def _sample(
    bench: Bench, tool: str, files: Sequence[File], on: str, turn: int, run: Callable[[], Ended], measure: str = "read"
) -> None:
    packets = sum(file.packets for file in files)
    with bench.sample(measure, tool=tool, cores=on, files=len(files), round=turn, packets=packets) as figures:
        ended = run()
        figures["seconds"] = ended.wall_s
        figures["cpu_s"] = ended.cpu_s
        figures["packets_per_s"] = packets / ended.wall_s
        figures["peak_rss_mb"] = ended.peak_rss_bytes / 1e6


if __name__ == "__main__":
    sys.exit(guarded(main))
