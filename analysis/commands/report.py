"""``ringtap report``: report of a sweep, of a job, or of a table of iteration times."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtap.analysis.dask_workers import add_option, workers
from ringtap.errors import UsageError
from ringtap.options import add_json
from ringtap.schema import RUN_JSON
from ringtap.terminal import shell_word, show_log
from ringtap.units import counted, parse_rate_bps

if TYPE_CHECKING:
    from ringtap.analysis.report.page import Written

CAPACITY = "25gbit"


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument(
        "source", metavar="DIR|TABLE.csv", help="a sweep's or a job's run directory, or a table of iteration times"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FOLDER",
        help="folder of the report (DIR/report; TABLE-report here); must be empty or absent without --force",
    )
    parser.add_argument("--force", action="store_true", help="write into the folder of -o even if it is not empty")
    parser.add_argument("--capacity", metavar="RATE", help=f"for a table: capacity of the bottleneck ({CAPACITY})")
    parser.add_argument("--workers", metavar="N", type=int, help="for a table without such a column: number of workers")
    add_json(parser)
    add_option(parser)
    parser.set_defaults(handler=report)


def report(options: argparse.Namespace) -> int:
    """Write the report and print the paths of its files."""
    show_log()
    source = Path(options.source)
    if source.is_dir() and (options.capacity or options.workers is not None):
        option = "--capacity" if options.capacity else "--workers"
        raise UsageError(f"{option} is for a table: the run {source} has its own")
    capacity_gbps = parse_rate_bps(options.capacity or CAPACITY) / 1e9
    if capacity_gbps <= 0:
        raise UsageError(f"--capacity {options.capacity} is not a positive rate")
    if options.workers is not None and options.workers < 2:
        raise UsageError(f"--workers {options.workers}: a ring has two at least")
    folder = None if options.output is None else _checked(Path(options.output), options.force)
    written = _write(source, folder, capacity_gbps, options)
    if options.json:
        print(written.json_path.read_text(encoding="utf-8"), end="")
        return 0
    print(written.summary)
    for path in written.paths[:3]:
        print(f"Wrote {path}")
    if figures := len(written.paths) - 3:
        print(f"Wrote {counted(figures, 'file')} of figures in {written.paths[0].parent / 'figures'}")
    print(f"Next: open {shell_word(written.paths[0])}", file=sys.stderr)
    return 0


def _write(source: Path, folder: Path | None, capacity_gbps: float, options: argparse.Namespace) -> Written:
    """Write the report of a table, a sweep or a job."""
    from ringtap.analysis.job.run import Job
    from ringtap.analysis.job.summary import summarize
    from ringtap.analysis.report.inputs import of_sweep, of_table
    from ringtap.analysis.report.job_page import write_job_report
    from ringtap.analysis.report.sweep_page import write_report
    from ringtap.analysis.runs.run import SweepRun, read_run

    if source.is_file() and source.name != RUN_JSON:
        if options.scheduler is not None:
            raise UsageError("--scheduler is for run directories: a table is read at once")
        return write_report(of_table(source, capacity_gbps, options.workers), folder)
    run = read_run(source)
    with workers(options.scheduler) as executor:
        if isinstance(run, SweepRun):
            return write_report(of_sweep(run, executor), folder)
        job = Job(run, executor)
        return write_job_report(job, summarize(job), folder)


def _checked(folder: Path, force: bool) -> Path:
    if not force and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty: choose another folder, or give --force")
    return folder
