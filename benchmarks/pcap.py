"""Speed of `ringtap flows` beside other readers of captures, in one run on one machine (docs/method/benchmarks.md).

python benchmarks/pcap.py [--quick | --large] [-o FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import _checkout  # noqa: F401 -- first: lets the others import ringtap
from _bench import Bench, parser_of, run_benchmark
from _machine import cores
from _processes import BenchmarkError, Ended
from _report import Samples, Table, Target, median, medians_table, paired_ratio, rounded, select, targets_table

RINGTAP, TCPDUMP, TSHARK = "ringtap flows", "tcpdump -w", "tshark -z conv,tcp"
_GENERATOR = Path(__file__).with_name("_pcap_file.py")
_MAX_S = 900.0
_QUICK_LIMIT_S = 50.0
_PACKETS, _QUICK_PACKETS, _LARGE_PACKETS = 10_000_000, 8_000_000, 98_000_000  # the last is more than 10 GB
_TSHARK_PACKETS, _QUICK_TSHARK_PACKETS = 500_000, 50_000
_LARGE_ROUNDS, _TSHARK_ROUNDS = 5, 3

TARGETS = (
    Target("vs_tcpdump", "packets per second, ringtap / `tcpdump -r FILE -w /dev/null`", "≥ 1", lambda x: x >= 1),
    Target("vs_tshark", "packets per second, ringtap / `tshark -q -z conv,tcp`", "≥ 100", lambda x: x >= 100),
    Target("speedup_all_cores", "seconds for one large capture, one core / two", "≥ 1.7", lambda x: x >= 1.7),
    Target("peak_rss_mb", "peak memory, largest value of the run, MB", "≤ 500", lambda x: x <= 500),
)


@dataclass(frozen=True)
class File:
    """A generated capture: its path, the number of packets, and their bytes on the wire."""

    path: Path
    packets: int
    bytes: int


def main() -> int:
    """Measure, print the tables and, last, one JSON object; return 1 if a measure failed."""
    options = _options()
    return run_benchmark(options, measure, last_line, tables, _QUICK_LIMIT_S if options.quick else None)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, "smaller captures; ends within 60 s")
    parser.add_argument("--large", action="store_true", help="only a capture of 10 GB, on one core and on all")
    parser.add_argument("--repeats", type=int, default=7, help="samples (default 7; --quick: as time allows)")
    parser.add_argument("--packets", type=int, metavar="N", help="of a capture (10 million; --quick: 8; --large: 98)")
    options = parser.parse_args()
    if options.repeats < 1 or (options.packets or 1) < 1:
        parser.error("--repeats and --packets must be 1 or more")
    return options


def measure(bench: Bench) -> None:
    """Measure tshark on a part, then ringtap and tcpdump in turn, then one core and all on a large capture."""
    quick, one, packets = bench.options.quick, cores()[-1:], bench.options.packets
    if not bench.options.large:
        part = _make_file(bench, "part.pcap", _QUICK_TSHARK_PACKETS if quick else _TSHARK_PACKETS)
        single = _make_file(bench, "single.pcap", 1)
        _run_ringtap(bench, part, None)  # compiles the kernels if they are not compiled yet
        for turn in range(1 if quick else _TSHARK_ROUNDS):
            with bench.sample("read", tool=TSHARK, cores="one", round=turn, packets=part.packets) as figures:
                # without its start, which takes as long as many packets
                figures["seconds"] = _run_tshark(bench, part, one).wall_s - _run_tshark(bench, single, one).wall_s
                figures["m_packets_per_s"] = part.packets / figures["seconds"] / 1e6
        whole = _make_file(bench, "whole.pcap", packets or (_QUICK_PACKETS if quick else _PACKETS))
        runs = {
            TCPDUMP: partial(_sample, bench, "read", TCPDUMP, "one", whole, lambda: _run_tcpdump(bench, whole, one)),
            RINGTAP: _reading(bench, "read", whole, "one", one),
        }
        bench.rounds(runs, bench.options.repeats, 4.0)  # the later measures take some rounds too
    large = whole if quick else _make_file(bench, "large.pcap", packets or _LARGE_PACKETS)
    both = {name: _reading(bench, "large", large, name, cpus) for name, cpus in (("one", one), ("all", None))}
    bench.rounds(both, 1 if quick else min(bench.options.repeats, _LARGE_ROUNDS))


def _make_file(bench: Bench, name: str, packets: int) -> File:
    """Generate a capture in the benchmark's folder.

    Raises:
        BenchmarkError: the disk has no room for it, or it could not be written.
    """
    needed = packets * 112  # at most: the header of a record and 96 bytes of the packet
    free = shutil.disk_usage(bench.folder).free
    if free < needed * 1.1:
        raise BenchmarkError(
            f"{bench.folder.parent} has {free / 1e9:.1f} GB free, and the capture takes up to {needed / 1e9:.1f} GB: "
            "set TMPDIR to a folder with more"
        )
    path = bench.path(name)
    made = json.loads(bench.processes.start([sys.executable, _GENERATOR, path, packets]).result(_MAX_S).stdout)
    return File(path, made["packets"], made["bytes"])


def _reading(bench: Bench, measure: str, file: File, on: str, cpus: Iterable[int] | None) -> Callable[[int], None]:
    return partial(_sample, bench, measure, RINGTAP, on, file, lambda: _run_ringtap(bench, file, cpus))


def _sample(bench: Bench, measure: str, tool: str, on: str, file: File, run: Callable[[], Ended], turn: int) -> None:
    with bench.sample(measure, tool=tool, cores=on, round=turn, packets=file.packets) as figures:
        ended = run()
        figures |= {"seconds": ended.wall_s, "cpu_s": ended.cpu_s, "peak_rss_mb": ended.peak_rss_bytes / 1e6}
        figures["m_packets_per_s"] = file.packets / ended.wall_s / 1e6


def _run_ringtap(bench: Bench, file: File, cpus: Iterable[int] | None) -> Ended:
    """Run ``ringtap flows FILE --json`` without a cache, and check that it finds every packet and every byte.

    Raises:
        BenchmarkError: it failed, or its counts are not those of the file.
    """
    ended = bench.processes.ringtap("flows", file.path, "--no-cache", "--json", cpus=cpus).result(_MAX_S)
    found = json.loads(ended.stdout)
    for name in ("packets", "bytes"):
        expected = getattr(file, name)
        counted = sum(item[f"{name}_{direction}"] for item in found["conversations"] for direction in ("ab", "ba"))
        if counted != expected:
            raise BenchmarkError(f"ringtap flows found {counted} {name}, but the capture has {expected}")
    return ended


def _run_tcpdump(bench: Bench, file: File, cpus: Iterable[int]) -> Ended:
    """Run ``tcpdump -r FILE -w /dev/null``, which reads and copies packets without decoding them.

    Raises:
        BenchmarkError: it is not installed, or failed.
    """
    return bench.processes.start([_program("tcpdump"), "-r", file.path, "-w", "/dev/null"], cpus).result(_MAX_S)


def _run_tshark(bench: Bench, file: File, cpus: Iterable[int]) -> Ended:
    """Run tshark with its table of conversations.

    Raises:
        BenchmarkError: it is not installed, or failed.
    """
    argv = [_program("tshark"), "-n", "-r", file.path, "-q", "-z", "conv,tcp"]
    return bench.processes.start(argv, cpus).result(_MAX_S)


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise BenchmarkError(f"{name} is not installed here, so there is no ratio to it: apt-get install {name}")
    return path


def last_line(samples: Samples) -> dict[str, float | None]:
    """Return the figures of the last line; None: not measured."""
    ours, theirs = (select(samples, "read", tool=tool) for tool in (RINGTAP, TCPDUMP))
    rate, tshark = (median(select(samples, "read", tool=tool), "m_packets_per_s") for tool in (RINGTAP, TSHARK))
    one, every = (select(samples, "large", cores=on) for on in ("one", "all"))
    memory = [sample["peak_rss_mb"] for sample in (*ours, *one, *every)]
    return rounded(
        {
            "packets_per_s": rate and 1e6 * rate,
            "vs_tcpdump": paired_ratio(ours, theirs, "m_packets_per_s"),
            "vs_tshark": rate / tshark if rate and tshark else None,
            "peak_rss_mb": max(memory, default=None),
            "speedup_all_cores": paired_ratio(one, every, "seconds"),
        }
    )


def tables(bench: Bench) -> list[Table]:
    """Return every table."""
    cases = {"tool": "tool", "cores": "cores", "packets": "packets"}
    figures = {"m_packets_per_s": "M packets/s", "seconds": "s", "cpu_s": "CPU s", "peak_rss_mb": "peak MB"}
    return [
        targets_table(TARGETS, last_line(bench.samples)),
        medians_table("Readers of captures, cold processes", bench.samples.get("read", []), cases, figures),
        medians_table("One large capture", bench.samples.get("large", []), cases, figures),
    ]


if __name__ == "__main__":
    sys.exit(main())
