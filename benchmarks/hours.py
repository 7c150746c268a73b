"""Analysis and report of runs of an hour, from few nodes to many (docs/method/benchmarks.md).

python benchmarks/hours.py [--nodes N...] [--seconds S] [-o FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401 -- first: lets the others import ringtap
import psutil
from _context import Bench, Settings
from _figures import Samples, Target, median, select
from _guarded import guarded
from _machine import CpuTimes, describe
from _processes import BenchmarkError, Child, Ended, Processes
from _report import Table, number, targets_table, write
from _scale_run import JOB

_HERE = Path(__file__).resolve().parent
_ITERATIONS = 150  # recorded, and repeated
_NODE_BPS = 8 * 10_000  # of logs and tables
_MAX_S = 1500.0
_LOOK_S = 0.5
_SMALL_NODES, _SMALL_REPEATS = 10, 3  # an analysis of a few seconds says little
_IMPORTS = "import pyarrow.parquet, ringtap.analysis.runs.derived"  # of every analysis

TARGETS = (
    Target("total_s", "`analyze` and `report`, most nodes, s", "< 600", lambda x: x < 600),
    Target("peak_mb", "peak memory of all their processes together, MB", "< 2,000", lambda x: x < 2000),
    Target("cost_ratio", "CPU s per node-hour, most nodes / fewest", "0.9 to 1.1", lambda x: 0.9 <= x <= 1.1),
    Target("workers_speedup", "speed-up of two Dask workers over one", "≥ 1.7", lambda x: x >= 1.7),
    Target("resumed_share", "CPU of a resumed analysis / whole one", "< 0.75", lambda x: x < 0.75),
)


def main() -> int:
    """Measure, print the tables and, last, one JSON object; return 1 if a measure failed."""
    options = _options()
    before = CpuTimes.now()
    hours = options.seconds / 3600
    with tempfile.TemporaryDirectory(prefix="ringtap-benchmark-") as folder, Processes({}) as processes:
        bench = Bench(Settings(quick=False, repeats=1, streams=()), processes, [], [], Path(folder))
        recorded = bench.folder / "recorded"
        _program(bench, _HERE / "_scale_record.py", recorded, _ITERATIONS)
        with bench.sample("start") as figures:
            figures["cpu_s"] = _program(bench, "-c", _IMPORTS).cpu_s
        sizes = sorted(options.nodes)
        for nodes in sizes:
            sweep = bench.folder / f"sweep-{nodes}"
            with bench.sample("make", nodes=nodes, hours=hours) as figures:
                _make(bench, recorded, sweep, nodes, options.seconds)
                figures["megabytes"] = sum(path.stat().st_size for path in sweep.rglob("*") if path.is_file()) / 1e6
        for nodes in (*sizes, *sizes[-2::-1]):  # small runs before and after the large ones: a machine's speed changes
            for _ in range(_SMALL_REPEATS if nodes <= _SMALL_NODES else 1):
                _analyze(bench, bench.folder / f"sweep-{nodes}" / JOB, {"nodes": nodes, "hours": hours})
        if options.workers_nodes in sizes:
            run = bench.folder / f"sweep-{options.workers_nodes}" / JOB
            _workers(bench, run, {"nodes": options.workers_nodes, "hours": hours})
    machine = describe() | {"stolen_pct": before.stolen_pct_since(), "others_pct": before.others_pct_since()}
    write(bench, machine, options, last_line(bench.samples), tables(bench.samples))
    return 1 if bench.failures else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 1000], metavar="N", help="(10 100 1000)")
    parser.add_argument("--seconds", type=float, default=3600.0, metavar="S", help="length of the runs (3600)")
    parser.add_argument("--workers-nodes", type=int, default=100, metavar="N", help="for Dask, kill and resume (100)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write every sample as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown")
    options = parser.parse_args()
    if min(options.nodes) < 2 or options.seconds <= 0:
        parser.error("--nodes must be at least 2, and --seconds positive")
    return options


def _make(bench: Bench, recorded: Path, sweep: Path, nodes: int, seconds: float) -> None:
    """Make the run directory from the recording."""
    needed = nodes * seconds * _NODE_BPS / 8 + 1e8
    if shutil.disk_usage(bench.folder).free < needed:
        raise BenchmarkError(f"{bench.folder.parent} has no {needed / 1e9:.1f} GB free: set TMPDIR to a larger folder")
    _program(bench, _HERE / "_scale_run.py", recorded, sweep, nodes, seconds)


def _analyze(bench: Bench, run: Path, case: dict[str, Any]) -> None:
    """Analyze and report a run."""
    shutil.rmtree(run / "derived", ignore_errors=True)
    _leave_cache(run)
    with bench.sample("analyze", **case) as figures:
        figures.update(_watched(_ringtap(bench, "analyze", run)))
        figures.update(_found(run / "derived"))
    with bench.sample("report", **case) as figures:
        figures.update(_watched(_ringtap(bench, "report", run)))
        figures["page_mb"] = (run / "report" / "report.html").stat().st_size / 1e6


def _workers(bench: Bench, run: Path, case: dict[str, Any]) -> None:
    """Analyze a run with one and two workers of Dask, and with an analysis that is killed and resumed."""
    target = bench.folder / "out"
    for workers in (1, 2, 2, 1):  # a machine's speed changes
        _leave_cache(run)
        with bench.sample("workers", workers=workers, **case) as figures:
            figures.update(_watched(_ringtap(bench, "analyze", run, "-o", target, "--scheduler", f"local:{workers}")))
            _check_same(run / "derived", target)
        shutil.rmtree(target, ignore_errors=True)
    whole_s = median(select(bench.samples, "analyze", nodes=case["nodes"]), "seconds")
    if whole_s is None:
        return
    _leave_cache(run)
    with bench.sample("resume", **case) as figures:
        killed = _ringtap(bench, "analyze", run, "-o", target)
        if killed.is_over(whole_s / 2):
            raise BenchmarkError("the analysis ended before it could be killed")
        killed.end(signal.SIGKILL)
        _leave_cache(run)
        figures.update(_watched(_ringtap(bench, "analyze", run, "-o", target)))
        _check_same(run / "derived", target)
    shutil.rmtree(target, ignore_errors=True)


def _leave_cache(run: Path) -> None:
    """Have the logs read from the disk, as those of a thousand nodes are: they do not fit into the page cache."""
    os.sync()
    for path in (run / "nodes").rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _watched(child: Child) -> dict[str, float]:
    """Wait for a command; return its time, processor time and memory, and those of its first process alone.

    The memory of all processes together is the sum of their proportional set sizes, in which a page that several
    processes share counts once.
    """
    peak_bytes = client_bytes = 0
    client_s = 0.0
    first = psutil.Process(child.pid)
    while not child.is_over(_LOOK_S):
        sizes = []
        for process in (first, *_children(first)):
            try:
                sizes.append(process.memory_full_info().pss)
                client_s = max(client_s, sum(process.cpu_times()[:2])) if process is first else client_s
            except psutil.Error:  # it has just ended
                continue
        peak_bytes, client_bytes = max(peak_bytes, sum(sizes)), max(client_bytes, sizes[0] if sizes else 0)
    ended = child.result(_MAX_S)
    found = {"seconds": ended.wall_s, "cpu_s": ended.cpu_s, "client_cpu_s": client_s}
    return found | {"peak_mb": peak_bytes / 1e6, "client_peak_mb": client_bytes / 1e6}


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _found(folder: Path) -> dict[str, Any]:
    """Return the counts that the analysis found, for comparison with what was made."""
    item = json.loads((folder / "summary.json").read_text())
    return {"found_nodes": len(item["run"]["nodes"]), "found_iterations": item["iterations"]["count"]}


def _check_same(one: Path, other: Path) -> None:
    if (one / "summary.json").read_bytes() != (other / "summary.json").read_bytes():
        raise BenchmarkError("the two analyses of the same run differ")


def _ringtap(bench: Bench, *arguments: object) -> Child:
    return bench.processes.start([sys.executable, "-m", "ringtap.cli", *map(str, arguments)])


def _program(bench: Bench, *arguments: object) -> Ended:
    return bench.processes.start([sys.executable, *map(str, arguments)]).result(_MAX_S)


def last_line(samples: Samples) -> dict[str, float | None]:
    """Return the figures of the last line; None: not measured."""
    counts = sorted({sample["nodes"] for sample in samples.get("analyze", [])})
    start_s = median(samples.get("start", []), "cpu_s")
    costs = [(_cost(samples, nodes) or 0) for nodes in counts]
    most = counts[-1] if counts else 0
    both = [select(samples, verb, nodes=most) for verb in ("analyze", "report")]
    times = [median(taken, "seconds") for taken in both]
    one, two = (median(select(samples, "workers", workers=workers), "seconds") for workers in (1, 2))
    resumed = samples.get("resume", [])
    whole = median(select(samples, "analyze", nodes=resumed[0]["nodes"]), "cpu_s") if resumed else None
    memory = [sample["peak_mb"] for verb in ("analyze", "report") for sample in samples.get(verb, [])]
    figures = {
        "nodes": most or None,
        "total_s": None if None in times else sum(time for time in times if time is not None),
        "analyze_s": times[0],
        "report_s": times[1],
        "peak_mb": max(memory, default=None),
        "cpu_s_per_node_hour": costs[-1] if costs else None,
        "cost_ratio": costs[-1] / costs[0] if len(costs) > 1 and costs[0] else None,
        "start_cpu_s": start_s,
        "workers_speedup": one / two if one and two else None,
        "resumed_share": resumed[0]["cpu_s"] / whole if resumed and whole else None,
    }
    return {name: None if value is None else float(f"{value:.4g}") for name, value in figures.items()}


def _cost(samples: Samples, nodes: int) -> float | None:
    """Return processor time of the analysis per node and hour, less that of loading the libraries."""
    taken = select(samples, "analyze", nodes=nodes)
    cpu_s, start_s = median(taken, "cpu_s"), median(samples.get("start", []), "cpu_s")
    return None if cpu_s is None or start_s is None else (cpu_s - start_s) / (nodes * taken[0]["hours"])


def tables(samples: Samples) -> list[Table]:
    """Return every table with samples."""
    return [table for table in (targets_table(TARGETS, last_line(samples)), _runs(samples)) if table.rows]


_COMMANDS = {
    "analyze": "`ringtap analyze`",
    "report": "`ringtap report` after it",
    "workers": "`ringtap analyze --scheduler local:{workers}`",
    "resume": "`ringtap analyze` after one that was killed",
}


def _runs(samples: Samples) -> Table:
    rows = []
    for measure, text in _COMMANDS.items():
        taken = samples.get(measure, [])
        for nodes, workers in dict.fromkeys((sample["nodes"], sample.get("workers")) for sample in taken):
            some = [sample for sample in taken if (sample["nodes"], sample.get("workers")) == (nodes, workers)]
            cost = _cost(samples, nodes) if measure == "analyze" else None
            rows.append([text.format(workers=workers), f"{nodes:,}", number(some[0].get("found_iterations"))])
            rows[-1] += [number(median(some, name)) for name in ("seconds", "cpu_s", "client_cpu_s")]
            rows[-1] += [number(cost), *(number(median(some, name)) for name in ("peak_mb", "client_peak_mb"))]
            rows[-1].append(str(len(some)))
    head = ["command", "nodes", "iterations", "s", "CPU s", "of its first process", "CPU s per node-hour"]
    head += ["peak MB", "of its first process", "samples"]
    return Table("Runs of an hour", head, rows)


if __name__ == "__main__":
    sys.exit(guarded(main))
