"""Writes the report of a sweep, of a job, or of a table of iteration times into a folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ringtap.analysis.job.run import Job
from ringtap.analysis.report.inputs import ReportInputs, of_sweep, of_table, together
from ringtap.analysis.report.job_page import write_job_report
from ringtap.analysis.report.page import Written
from ringtap.analysis.report.sharing_page import write_sharing_report
from ringtap.analysis.report.sweep_page import write_sweep_report
from ringtap.analysis.runs.derived_table_cache import stored
from ringtap.analysis.sweeps.sharing import is_sharing
from ringtap.analysis.sweeps.sweep import Sweep, open_run
from ringtap.core.check_api_arguments import path_of
from ringtap.core.errors import UsageError
from ringtap.core.run_directory_schema import RUN_JSON
from ringtap.core.units import rate_gbps


def write_report(
    source: Sweep | Job | str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    capacity: float | str | None = None,
    workers: int | None = None,
    max_load: float | str | None = None,
    force: bool = False,
    beside: Sequence[Sweep | str | os.PathLike[str]] = (),
) -> Written:
    """Write the report that ``ringtap report`` writes: a page, its data, a table and the figures.

    Args:
        source: a sweep or a job, its run directory, or a CSV file of iteration times.
        output: folder of the report, which is made if it is missing (default: ``report`` in the run directory, whose
            files are replaced; ``<table>-report`` here for a table, and ``<a>-and-<b>-report`` for two sources).
        capacity: capacity of the bottleneck of a table, in Gbit/s or as text; None: that of the sweep beside it.
        workers: for a table without such a column: number of workers.
        max_load: fits use only points at loads up to this one, in Gbit/s or as text; None: all.
        force: write into the folder ``output`` even if it is not empty.
        beside: further sweeps and tables, such as simulated ones, whose series stand beside those of the source.

    Raises:
        UsageError: the source cannot be read, an argument is not for it, or the folder is in use or cannot be written.
    """
    if workers is not None and workers < 2:
        raise UsageError(f"{workers} workers are too few: a ring has two at least")
    sources = [_opened(one) for one in (source, *beside)]
    known = _capacity(capacity, sources)
    runs = [one.path for one in sources if not isinstance(one, Path)]
    if len(runs) == len(sources) and (capacity is not None or workers is not None):
        name = "workers" if capacity is None else "capacity"
        raise UsageError(f"{name} is for a table: the run {runs[0]} has its own")
    folder = None if output is None else path_of(output, "the folder")
    if folder is not None and not force and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty: choose another folder, or add --force (force=True)")
    inputs: list[ReportInputs] = []
    for one in sources:
        if isinstance(one, Path):
            inputs.append(of_table(one, known, workers, max_load))
        elif isinstance(one, Sweep) and is_sharing(one.run):
            if beside or max_load is not None:
                raise UsageError(f"{one.path} is of jobs that share links: its report stands alone, without --max-load")
            return write_sharing_report(one.run, folder)
        elif isinstance(one, Sweep):
            inputs.append(of_sweep(one.run, one.workers, max_load))
        elif beside:
            raise UsageError(f"{one.path} is a job: only sweeps and tables go side by side")
        elif max_load is not None:
            raise UsageError(f"max_load is for a sweep or a table, which have fits: {one.path} is a job")
        else:
            job = stored(one)
            return write_job_report(job, job.summary(), folder)
    return write_sweep_report(together(inputs) if beside else inputs[0], folder)


def _capacity(given: float | str | None, sources: Sequence[Sweep | Job | Path]) -> float | None:
    """Return the capacity of the tables in Gbit/s, as given, or that of a sweep beside them; None: not known."""
    if given is not None:
        return rate_gbps(given, "capacity")
    return next((one.capacity_gbps for one in sources if isinstance(one, Sweep)), None)


def _opened(source: Sweep | Job | str | os.PathLike[str]) -> Sweep | Job | Path:
    """Return the run of a directory, or the path of a table."""
    if isinstance(source, (Sweep, Job)):
        return source
    path = path_of(source, "the source of a report")
    return path if path.is_file() and path.name != RUN_JSON else open_run(path)
