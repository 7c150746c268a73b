"""Implements ``ringtap analyze``: analyzes a job and its network, and writes text, JSON and Parquet."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ringtap.analysis.dask_workers import add_option, workers
from ringtap.core.command_options import add_json, add_training, print_result, training_facts
from ringtap.core.errors import UsageError
from ringtap.core.terminal_escaping import one_line, shown_log
from ringtap.core.untrusted_files import RUN_JSON

# a table of more iterations than this is only in the Parquet file
_MAX_IN_JSON = 20_000
_OF_RUNS = ("output", "batch", "job_output", "target_accuracy", "phase", "dask")  # options


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    run = "a job's run directory, one of a sweep's series, or a .parquet table of the operations of a pipeline"
    parser.add_argument("run", type=Path, metavar="RUN", help=run)
    add_json(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="folder for the tables (default: RUN/derived)")
    add_training(parser)
    add_option(parser)
    parser.set_defaults(handler=_analyze)


@shown_log()
def _analyze(options: argparse.Namespace) -> int:
    if _is_table(options.run):
        return _stragglers(options)
    from ringtap.analysis.job.run import open_job
    from ringtap.analysis.job.summary import summarize
    from ringtap.analysis.job.summary_text import describe
    from ringtap.analysis.runs import derived_table_cache

    facts = training_facts(options)
    job = open_job(options.run, **facts)
    folder = options.output or job.path / "derived"
    sources = derived_table_cache.sources_of(job.path, job.logs.given)
    fresh = derived_table_cache.is_fresh(folder, sources)
    written: list[Path] = []
    with workers(None) if fresh else workers(options.dask, job.logs.batches.processes) as executor:
        job = open_job(options.run, executor, **facts, derived=options.output)
        data = derived_table_cache.read_summary(job.logs, folder) if fresh else summarize(job)
        if not fresh:
            try:
                written = derived_table_cache.write(job, data, folder, sources)
            except UsageError as error:
                if options.output is not None:
                    raise
                print(f"ringtap: no tables are kept: {error}", file=sys.stderr)
    if options.json:
        tables = {
            name: derived_table_cache.read_table(folder, name) if fresh else getattr(job, name)
            for name in ("iterations", "ranks", "flows")
        }
        many = len(tables["iterations"]) > _MAX_IN_JSON
        data = data | {"iterations_table": None if many else _rows(tables["iterations"])}
        data |= {"ranks_table": _rows(tables["ranks"]), "flows_table": _rows(tables["flows"]), "tables": str(folder)}
        print(json.dumps(data, allow_nan=False))
        return 0
    if job.logs.averages:
        print(f"{one_line(job.logs.averages)}.\n")
    print("\n".join(describe(data)))
    print()
    print(f"{'Wrote' if written else 'Tables are in'} {folder}" if written or fresh else "No tables were written")
    return 0


def _is_table(path: Path) -> bool:
    """Return True for a Parquet file that is not of a run."""
    try:
        if path.suffix != ".parquet" or not path.is_file():
            return False
        return not any((folder / RUN_JSON).is_file() for folder in path.parents)
    except PermissionError:
        return False


def _stragglers(options: argparse.Namespace) -> int:
    """Print what stragglers cost a job of which there is a table of operations."""
    from ringtap.analysis.job.pipeline_stragglers import describe, read_pipeline, stragglers

    if given := [name for name in _OF_RUNS if getattr(options, name) is not None]:
        raise UsageError(f"--{given[0].replace('_', '-')} is of runs, and {options.run} is a table of operations")
    found = stragglers(read_pipeline(options.run))
    return print_result(options, found, describe(found))


def _rows(table: Any) -> list[dict[str, Any]]:
    """Return the rows of a table as plain values, None for missing ones."""
    from ringtap.analysis.runs.samples_to_iterations import plain

    names = [str(name) for name in table.columns]
    columns = [[plain(value) for value in table[name].tolist()] for name in names]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
