"""Analysis of a run directory of many nodes, and of captures by Dask workers (docs/method/benchmarks.md).

python benchmarks/scale.py [--quick] [--captures] [-o FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401 -- first: lets the others import ringtap
import psutil
from _context import Bench, Settings
from _guarded import guarded
from _machine import CpuTimes, describe
from _pcap_tools import File, make_file
from _processes import BenchmarkError, Ended, Processes
from _report import write
from _scale_report import last_line, tables
from _scale_run import JOB

_HERE = Path(__file__).resolve().parent
_QUICK_LIMIT_S = 55.0
_MAX_S = 900.0
_NEEDED_BYTES = 4e9  # of memory: twice the measured peak
_RECORD_BYTES = 400_000  # per node of a short run, at most
_PACKETS_PER_GB = 9_680_000


@dataclass(frozen=True)
class Sizes:
    """Amount of data to analyze.

    Attributes:
        nodes: nodes of the run directory.
        iterations: iterations of its job.
        gigabytes: size of all captures together.
        counts: numbers of captures read at a time, until all have been read; the largest is the number of captures.
    """

    nodes: int
    iterations: int
    gigabytes: float
    counts: tuple[int, ...] = (1, 2, 5, 10)


def main() -> int:
    """Measure, print the tables and, last, one JSON object; return 1 if a measure failed."""
    options = _options()
    before = CpuTimes.now()
    if psutil.virtual_memory().available < _NEEDED_BYTES:
        raise BenchmarkError(f"less than {_NEEDED_BYTES / 1e9:g} GB of memory are free: end other programs")
    sizes = Sizes(options.nodes or (200 if options.quick else 1000), options.iterations, options.gigabytes)
    with tempfile.TemporaryDirectory(prefix="ringtap-benchmark-") as folder, Processes({}) as processes:
        settings = Settings(options.quick, options.repeats, (), limit_s=_QUICK_LIMIT_S if options.quick else None)
        bench = Bench(settings, processes, [], [], Path(folder))
        if not options.captures:
            _nodes(bench, sizes)
        _captures(bench, sizes)
    machine = describe() | {"stolen_pct": before.stolen_pct_since(), "others_pct": before.others_pct_since()}
    write(bench, machine, options, last_line(bench.samples), tables(bench.samples))
    return 1 if bench.failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="200 nodes and 1 GB of captures; ends within 60 s")
    parser.add_argument("--captures", action="store_true", help="only the captures")
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes of the run directory (1000)")
    parser.add_argument("--iterations", type=int, default=60, metavar="N", help="of its job (60)")
    parser.add_argument("--gigabytes", type=float, metavar="GB", help="of all captures together (10)")
    parser.add_argument("--repeats", type=int, metavar="N", help="of every measure (5; --quick: 1)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write every sample as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown")
    options = parser.parse_args()
    options.repeats = options.repeats or (1 if options.quick else 5)
    options.gigabytes = options.gigabytes or (1.0 if options.quick else 10.0)
    if min(options.repeats, options.gigabytes, options.iterations - 1) <= 0 or (options.nodes or 2) < 2:
        parser.error("--repeats, --gigabytes must be positive, --iterations and --nodes at least 2")
    return options


def _nodes(bench: Bench, sizes: Sizes) -> None:
    """Record a small run, multiply, analyze and report it."""
    sweep = bench.folder / "sweep"
    with bench.sample("make", nodes=sizes.nodes, iterations=sizes.iterations) as figures:
        figures.update(_make(bench, sweep, sizes.nodes, sizes.iterations))
    if not sweep.exists():
        return
    for turn in range(bench.settings.repeats):
        case = {"nodes": sizes.nodes, "iterations": sizes.iterations, "round": turn}
        for verb, source in (("analyze", sweep / JOB), ("report", sweep / JOB), ("report", sweep)):
            of = "sweep" if source == sweep else "job"
            with bench.sample("nodes", verb=verb, of=of, **case) as figures:
                target = bench.folder / "out"
                figures.update(_usage(_ringtap(bench, verb, source, "-o", target, "--json")))
                figures.update(_found(target / "report.json" if verb == "report" else target / "summary.json", of))
                shutil.rmtree(target)
    shutil.rmtree(sweep)


def _make(bench: Bench, sweep: Path, nodes: int, iterations: int) -> dict[str, Any]:
    """Make the run directory; return its number of files and its size."""
    needed = nodes * _RECORD_BYTES * max(1, iterations // 60)
    if shutil.disk_usage(bench.folder).free < needed * 1.1:
        raise BenchmarkError(f"{bench.folder.parent} has no {needed / 1e9:.1f} GB free: set TMPDIR to a larger folder")
    recorded = bench.folder / "recorded"
    _program(bench, "_scale_record.py", recorded, iterations)
    _program(bench, "_scale_run.py", recorded, sweep, nodes)
    shutil.rmtree(recorded)
    sizes = [path.stat().st_size for path in sweep.rglob("*") if path.is_file()]
    return {"files": len(sizes), "megabytes": sum(sizes) / 1e6}


def _found(path: Path, of: str) -> dict[str, Any]:
    """Return the counts that the analysis found, for comparison with what was made."""
    item = json.loads(path.read_text())
    if of == "sweep":
        return {"found_iterations": item["series"][0]["points"][0]["iterations"]}
    return {
        "found_nodes": len(item["run"]["nodes"]),
        "found_ranks": item["run"]["ranks"],
        "found_iterations": item["iterations"]["count"],
        "sent_bytes": item["demand"]["sent_bytes"],
        "gradient_bytes": item["demand"]["gradient_bytes"],
    }


def _captures(bench: Bench, sizes: Sizes) -> None:
    """Measure the reading of the captures by one process, by one worker and by two, in turn."""
    most = max(sizes.counts)
    packets = max(1000, round(sizes.gigabytes * _PACKETS_PER_GB / most))
    files = [make_file(bench, f"part{number}.pcap", packets, number * packets) for number in range(most)]
    size_gb = sum(file.path.stat().st_size for file in files) / 1e9
    for turn in range(bench.settings.repeats):
        with bench.sample("command", workers=0, round=turn, gigabytes=size_gb) as figures:
            figures.update(_usage(_flows(bench, files)))
        for count in (1, 2) if turn % 2 else (2, 1):
            with bench.sample("command", workers=count, round=turn, gigabytes=size_gb) as figures:
                figures.update(_usage(_flows(bench, files, "--scheduler", f"local:{count}")))
            with bench.sample("read", workers=count, round=turn, gigabytes=size_gb) as figures:
                counts = sizes.counts[:: -1 if turn % 2 else 1] if count == 1 else sizes.counts[-1:]
                listed = ",".join(map(str, counts))
                ended = _program(bench, "_scale_read.py", f"local:{count}", listed, *(file.path for file in files))
                times = json.loads(ended.stdout.splitlines()[-1])
                for item in times["sets"]:
                    _check(item, files)
                    item["gigabytes"] = size_gb / item["groups"]
                figures.update(times | _usage(ended))


def _flows(bench: Bench, files: list[File], *options: str) -> Ended:
    """Run ``ringtap flows`` on all files without a cache, and check that it finds every packet."""
    ended = _ringtap(bench, "flows", *(file.path for file in files), "--no-cache", "--json", *options)
    _check(json.loads(ended.stdout)["counts"], files)
    return ended


def _check(found: dict[str, Any], files: list[File]) -> None:
    for name in ("packets", "bytes"):
        expected = sum(getattr(file, name) for file in files)
        if found[name] != expected:
            raise BenchmarkError(f"{found[name]} {name} were found, but the captures have {expected}")


def _usage(ended: Ended) -> dict[str, float]:
    return {"seconds": ended.wall_s, "cpu_s": ended.cpu_s, "peak_rss_mb": ended.peak_rss_bytes / 1e6}


def _ringtap(bench: Bench, *arguments: object) -> Ended:
    return bench.processes.start([sys.executable, "-m", "ringtap.cli", *map(str, arguments)]).result(_MAX_S)


def _program(bench: Bench, name: str, *arguments: object) -> Ended:
    return bench.processes.start([sys.executable, str(_HERE / name), *map(str, arguments)]).result(_MAX_S)


if __name__ == "__main__":
    sys.exit(guarded(main))
