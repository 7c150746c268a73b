"""Analysis and report of runs of an hour, from few nodes to many (docs/method/benchmarks.md).

python benchmarks/hours.py [--nodes N...] [--seconds S] [-o FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

import _checkout  # noqa: F401 -- first: lets the others import ringtap
import psutil
from _bench import Bench, parser_of, run_benchmark
from _processes import BenchmarkError, Child
from _report import Samples, Table, Target, median, medians_table, rounded, select, targets_table

_ITERATION_MS = 100
_NODE_BPS = 8 * 10_000  # of logs and tables
_MAX_S = 1500.0
_LOOK_S = 0.5
_SMALL_NODES, _SMALL_REPEATS = 10, 3  # an analysis of a few seconds says little
_IMPORTS = "import pyarrow.parquet, ringtap.analysis.runs.derived_table_cache"  # of every analysis
_MAKE = """
import sys
from pathlib import Path
from tests.gold.job_run import Truth, write_ddp_job
nodes, iterations, iteration_ms = map(int, sys.argv[2:])
computed_ms = tuple(60 + number % 11 for number in range(nodes))
offsets_ns = tuple(1_000_003 * number for number in range(nodes))
truth = Truth(iterations, iteration_ms, computed_ms, every_ms=iteration_ms, offsets_ns=offsets_ns)
write_ddp_job(Path(sys.argv[1]), truth)
"""

TARGETS = (
    Target("total_s", "`analyze` and `report`, most nodes, s", "< 600", lambda x: x < 600),
    Target("peak_mb", "peak memory of all their processes together, MB", "< 2,000", lambda x: x < 2000),
    Target("cost_ratio", "CPU s per node-hour, most nodes / fewest", "0.9 to 1.1", lambda x: 0.9 <= x <= 1.1),
)


def main() -> int:
    """Measure, print the tables and, last, one JSON object; return 1 if a measure failed."""
    return run_benchmark(_options(), measure, last_line, tables)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, "a minute of 10 and 20 nodes")
    parser.add_argument("--nodes", type=int, nargs="+", metavar="N", help="(10 100 1000)")
    parser.add_argument("--seconds", type=float, metavar="S", help="length of the runs (3600)")
    options = parser.parse_args()
    options.nodes = options.nodes or ([10, 20] if options.quick else [10, 100, 1000])
    options.seconds = options.seconds or (60.0 if options.quick else 3600.0)
    if min(options.nodes) < 2 or options.seconds <= 0:
        parser.error("--nodes must be at least 2, and --seconds positive")
    return options


def measure(bench: Bench) -> None:
    """Make the runs, and analyze each; small runs before and after the large ones, as a machine's speed changes."""
    options = bench.options
    with bench.sample("start") as figures:
        figures["cpu_s"] = bench.processes.start([sys.executable, "-c", _IMPORTS]).result(_MAX_S).cpu_s
    sizes = sorted(options.nodes)
    for nodes in sizes:
        with bench.sample("make", nodes=nodes) as figures:
            run = _make(bench, nodes, options.seconds)
            figures["megabytes"] = sum(path.stat().st_size for path in run.rglob("*") if path.is_file()) / 1e6
    for nodes in (*sizes, *sizes[-2::-1]):
        for _ in range(_SMALL_REPEATS if nodes <= _SMALL_NODES else 1):
            _analyze(bench, bench.folder / f"run-{nodes}", nodes)


def _make(bench: Bench, nodes: int, seconds: float) -> Path:
    """Write the run of a job with a rank on each node, as a recording of it would be."""
    needed = nodes * seconds * _NODE_BPS / 8 + 1e8
    if shutil.disk_usage(bench.folder).free < needed:
        raise BenchmarkError(f"{bench.folder.parent} has no {needed / 1e9:.1f} GB free: set TMPDIR to a larger folder")
    run, iterations = bench.folder / f"run-{nodes}", round(1000 * seconds / _ITERATION_MS)
    bench.processes.start([sys.executable, "-c", _MAKE, run, nodes, iterations, _ITERATION_MS]).result(_MAX_S)
    return run


def _analyze(bench: Bench, run: Path, nodes: int) -> None:
    """Analyze and report a run."""
    shutil.rmtree(run / "derived", ignore_errors=True)
    _leave_cache(run)
    with bench.sample("analyze", command="`ringtap analyze`", nodes=nodes) as figures:
        figures.update(_watched(bench.processes.ringtap("analyze", run)))
        hours = bench.options.seconds / 3600
        start_s = median(bench.samples.get("start", []), "cpu_s") or 0
        figures["cpu_s_per_node_hour"] = (figures["cpu_s"] - start_s) / (nodes * hours)
        summary = json.loads((run / "derived" / "summary.json").read_text())
        figures |= {"found_nodes": len(summary["run"]["nodes"]), "found_iterations": summary["iterations"]["count"]}
    with bench.sample("report", command="`ringtap report` after it", nodes=nodes) as figures:
        figures.update(_watched(bench.processes.ringtap("report", run)))


def _leave_cache(run: Path) -> None:
    """Have the logs read from the disk, as those of a thousand nodes are: they do not fit into the page cache."""
    os.sync()
    for path in (run / "nodes").rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _watched(child: Child) -> dict[str, float]:
    """Wait for a command; return its time, processor time and memory.

    The memory of all processes together is the sum of their proportional set sizes, in which a page that several
    processes share counts once.
    """
    peak_bytes = 0
    while not child.is_over(_LOOK_S):
        with contextlib.suppress(psutil.Error):  # one may just have ended
            family = [top := psutil.Process(child.pid), *top.children(recursive=True)]
            peak_bytes = max(peak_bytes, sum(process.memory_full_info().pss for process in family))
    ended = child.result(_MAX_S)
    return {"seconds": ended.wall_s, "cpu_s": ended.cpu_s, "peak_mb": peak_bytes / 1e6}


def last_line(samples: Samples) -> dict[str, float | None]:
    """Return the figures of the last line; None: not measured."""
    counts: list[int] = sorted({sample["nodes"] for sample in samples.get("analyze", [])})
    most = counts[-1] if counts else None
    costs = [median(select(samples, "analyze", nodes=nodes), "cpu_s_per_node_hour") for nodes in counts]
    times = [median(select(samples, verb, nodes=most), "seconds") for verb in ("analyze", "report")]
    memory = [sample["peak_mb"] for verb in ("analyze", "report") for sample in samples.get(verb, [])]
    return rounded(
        {
            "nodes": most,
            "total_s": None if None in times else sum(time for time in times if time is not None),
            "analyze_s": times[0],
            "report_s": times[1],
            "peak_mb": max(memory, default=None),
            "cpu_s_per_node_hour": costs[-1] if costs else None,
            "cost_ratio": costs[-1] / costs[0] if len(costs) > 1 and costs[0] and costs[-1] else None,
            "start_cpu_s": median(samples.get("start", []), "cpu_s"),
        }
    )


def tables(bench: Bench) -> list[Table]:
    """Return the table of targets and that of commands."""
    taken = [*bench.samples.get("analyze", []), *bench.samples.get("report", [])]
    figures = {"found_iterations": "iterations", "seconds": "s", "cpu_s": "CPU s"}
    figures |= {"cpu_s_per_node_hour": "CPU s per node-hour", "peak_mb": "peak MB"}
    runs = medians_table("Runs of an hour", taken, {"command": "command", "nodes": "nodes"}, figures)
    return [targets_table(TARGETS, last_line(bench.samples)), runs]


if __name__ == "__main__":
    sys.exit(main())
