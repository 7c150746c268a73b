"""The measured readers of captures, each in a cold process."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from _context import Bench
from _processes import BenchmarkError, Ended

RINGTAP, TCPDUMP, DPKT, SCAPY = "ringtap flows", "tcpdump -w", "dpkt", "scapy"
TSHARK_TABLE, TSHARK_FIELDS = "tshark -z conv,tcp", "tshark -T fields"
_HERE = Path(__file__).resolve().parent
_FIELDS = ("frame.time_epoch", "frame.len", "ip.src", "ip.dst", "tcp.srcport", "tcp.dstport", "tcp.len")
_MAX_S = 900.0


@dataclass(frozen=True)
class File:
    """A generated capture: its path, the number of packets, and their bytes on the wire."""

    path: Path
    packets: int
    bytes: int


def make_file(bench: Bench, name: str, packets: int, skipped: int = 0) -> File:
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
    argv = [sys.executable, str(_HERE / "_pcap_file.py"), str(path), str(packets), str(skipped)]
    made = json.loads(bench.processes.start(argv).result(_MAX_S).stdout.splitlines()[-1])
    return File(path, made["packets"], made["bytes"])


def run_ringtap(bench: Bench, files: Sequence[File], cpus: Iterable[int] | None) -> Ended:
    """Run ``ringtap flows FILE... --json`` without a cache, and check that it finds every packet and every byte.

    Raises:
        BenchmarkError: it failed, or its counts are not those of the files.
    """
    argv = [sys.executable, "-m", "ringtap.cli", "flows", *(str(file.path) for file in files), "--no-cache", "--json"]
    ended = bench.processes.start(argv, cpus=cpus).result(_MAX_S)
    found = json.loads(ended.stdout)
    for name in ("packets", "bytes"):
        expected = sum(getattr(file, name) for file in files)
        counted = sum(item[f"{name}_{direction}"] for item in found["conversations"] for direction in ("ab", "ba"))
        if counted != expected:
            raise BenchmarkError(f"ringtap flows found {counted} {name}, but the capture has {expected}")
    return ended


def run_tcpdump(bench: Bench, file: File, cpus: Iterable[int]) -> Ended:
    """Run ``tcpdump -r FILE -w /dev/null``, which reads and copies packets without decoding them.

    Raises:
        BenchmarkError: it is not installed, or failed.
    """
    argv = [_program("tcpdump"), "-r", str(file.path), "-w", "/dev/null"]
    return bench.processes.start(argv, cpus=cpus).result(_MAX_S)


def run_tshark(bench: Bench, tool: str, file: File, cpus: Iterable[int]) -> Ended:
    """Run tshark with its table of conversations or with the fields from which a script makes this table.

    Raises:
        BenchmarkError: it is not installed, or failed.
    """
    argv = [_program("tshark"), "-n", "-r", str(file.path)]
    if tool == TSHARK_TABLE:
        argv += ["-q", "-z", "conv,tcp"]
    else:
        argv += ["-T", "fields", *(argument for name in _FIELDS for argument in ("-e", name))]
    return bench.processes.start(argv, cpus=cpus).result(_MAX_S)


def run_loop(bench: Bench, library: str, file: File, cpus: Iterable[int]) -> float:
    """Return the time of a loop in Python, in seconds, without the interpreter's start.

    Raises:
        BenchmarkError: the library is not installed, or it failed.
    """
    if importlib.util.find_spec(library) is None:
        raise BenchmarkError(f"{library} is not installed here, so there is no ratio to it: pip install {library}")
    argv = [sys.executable, str(_HERE / "_pcap_loops.py"), library, str(file.path)]
    counted = json.loads(bench.processes.start(argv, cpus=cpus).result(_MAX_S).stdout.splitlines()[-1])
    if counted["packets"] != file.packets:
        raise BenchmarkError(f"the loop with {library} read {counted['packets']} packets of {file.packets}")
    return float(counted["loop_s"])


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise BenchmarkError(f"{name} is not installed here, so there is no ratio to it: apt-get install {name}")
    return path
