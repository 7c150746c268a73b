"""Implements ``ringtap report``: writes the report of a sweep, of a job, or of a table of iteration times."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtap.analysis.dask_workers import add_option, workers
from ringtap.core.command_options import add_json, add_training, training_facts
from ringtap.core.errors import UsageError
from ringtap.core.run_directory_schema import RUN_JSON
from ringtap.core.terminal_escaping import shell_word, shown_log
from ringtap.core.units import counted

if TYPE_CHECKING:
    from ringtap.analysis.job.run import Job
    from ringtap.analysis.sweeps.sweep import Sweep


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument(
        "source",
        metavar="DIR|TABLE.csv",
        nargs="+",
        help="run directory of a sweep or a job, or a table of iteration times; sweeps and tables also side by side",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FOLDER",
        help="folder of the report (DIR/report; TABLE-report or A-and-B-report here); without --force empty or absent",
    )
    parser.add_argument("--force", action="store_true", help="write into the folder of -o even if it is not empty")
    parser.add_argument("--capacity", metavar="RATE", help="for a table: capacity of the bottleneck, such as 25gbit")
    parser.add_argument("--workers", metavar="N", type=int, help="for a table without such a column: number of workers")
    parser.add_argument("--max-load", metavar="RATE", help="fit only the points at loads up to this one (17gbit)")
    add_training(parser)
    add_json(parser)
    add_option(parser)
    parser.set_defaults(handler=report)


@shown_log()
def report(options: argparse.Namespace) -> int:
    """Write the report and print the paths of its files."""
    from ringtap.analysis.job.run import Job, open_job
    from ringtap.analysis.report.write import write_report
    from ringtap.analysis.sweeps.sweep import open_run

    source, *beside = map(Path, options.source)
    is_table = source.is_file() and source.name != RUN_JSON
    if is_table and options.dask is not None:
        raise UsageError("--dask is for run directories: a table is read at once")
    facts = training_facts(options)
    if facts and (is_table or beside):
        raise UsageError("--batch, --job-output, --target-accuracy and --phase are for the run of a job")

    def opened(executor: Executor | None = None) -> Job | Sweep:
        return open_job(source, executor, **facts) if facts else open_run(source, executor)

    run = None if is_table else opened()
    with workers(options.dask, run.logs.batches.processes if isinstance(run, Job) else 1) as executor:
        written = write_report(
            opened(executor) if run else source,
            options.output,
            capacity=options.capacity,
            workers=options.workers,
            max_load=options.max_load,
            force=options.force,
            beside=beside,
        )
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
