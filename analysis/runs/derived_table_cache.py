"""Keeps derived tables on disk (Parquet), with fingerprints of their sources so that stale tables are rebuilt."""

from __future__ import annotations

import hashlib
import shutil
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import ringtap
from ringtap.analysis.job.collection_status import status
from ringtap.analysis.job.iterations_of_ranks import computation_by
from ringtap.analysis.job.join_rank_and_node_logs import JobLogs, after_warm_up
from ringtap.analysis.job.run import Job
from ringtap.analysis.job.throughput_and_epochs import Given
from ringtap.analysis.notebook_formatting import described_table
from ringtap.analysis.runs import node_batches
from ringtap.analysis.runs.file_fingerprints import file_fingerprint, fingerprint
from ringtap.core.errors import file_errors
from ringtap.core.json_validation import ShapeError, load_json
from ringtap.core.run_directory import write_json
from ringtap.core.untrusted_files import make_folder, open_regular, refuse_links

SCHEMA = 16
TABLES = ("phases", "iterations", "rank_iterations", "ranks", "flows", "byte_accounts", "node_iterations", "collectors")
SOURCES, SUMMARY = "sources.json", "summary.json"


class StoredLogs(JobLogs):
    """The logs of a job whose tables are read from files that are up to date."""

    @cached_property
    def measured(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Rows of the iterations that means are taken over."""
        return after_warm_up(read_table(self.derived, "iterations"))

    @property
    def computation(self) -> str:
        """Name of ``compute_s``."""
        return computation_by(read_summary(self)["phases"]["source"])


class StoredJob(Job):
    """A job whose summary and tables of iterations, ranks and flows are read from files that are up to date."""

    def __init__(self, logs: JobLogs) -> None:
        self.path = logs.run.path
        self.logs = StoredLogs(logs.run, None, logs.given, logs.derived)
        self.nodes = list(self.logs.nodes)

    @property
    @described_table({})
    def iterations(self) -> pd.DataFrame:
        """The table of `Job.iterations`."""
        return read_table(self.logs.derived, "iterations")

    @property
    @described_table({})
    def ranks(self) -> pd.DataFrame:
        """The table of `Job.ranks`."""
        return read_table(self.logs.derived, "ranks")

    @property
    @described_table({})
    def flows(self) -> pd.DataFrame:
        """The table of `Job.flows`."""
        return read_table(self.logs.derived, "flows")

    @cached_property
    def diagnosed(self) -> dict[str, Any]:
        """The diagnosis that was written."""
        found: dict[str, Any] = self.summary()["diagnosis"]
        return found

    def summary(self) -> dict[str, Any]:
        """Return the summary that was written."""
        return read_summary(self.logs)


def stored(job: Job) -> Job:
    """Return a long run that was analyzed before as a `StoredJob`, and every other one as it is."""
    if not job.logs.batches.is_long or not (job.logs.derived / SOURCES).is_file():
        return job
    is_current = is_fresh(job.logs.derived, sources_of(job.path, job.logs.given))
    return StoredJob(job.logs) if is_current else job


def sources_of(path: Path, given: Given | None = None) -> dict[str, Any]:
    """Return the fingerprints of everything that the analysis reads.

    Args:
        path: the run directory.
        given: facts that the user gave beside it.
    """
    result: dict[str, Any] = {}
    if given is not None and given != Given():
        result["given"] = {"batch": given.batch, "target_accuracy": given.target_accuracy, "phase": given.phase}
        if given.output is not None:
            with suppress(OSError):  # the analysis reports it
                result["given"] |= {"output": str(given.output)} | file_fingerprint(given.output)
    return result | fingerprint(path)


def is_fresh(folder: Path, sources: dict[str, Any]) -> bool:
    """True if a folder's tables were made from exactly these sources, by this version."""
    try:
        recorded = load_json(folder / SOURCES)
        expected = {"schema": SCHEMA, "ringtap": ringtap.__version__, "inputs": sources, "outputs": _outputs(folder)}
    except (OSError, ShapeError):
        return False
    return bool(recorded == expected)


def _outputs(folder: Path) -> dict[str, str]:
    """Return the hash of each file of derived tables."""
    found = {}
    for name in (*(f"{name}.parquet" for name in TABLES), SUMMARY):
        for path in sorted((folder / name).glob("*.parquet")) if (folder / name).is_dir() else [folder / name]:
            digest = hashlib.sha256()
            with open_regular(path) as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
            found[str(path.relative_to(folder))] = digest.hexdigest()
    return found


def write(job: Job, summary: dict[str, Any], folder: Path, sources: dict[str, Any]) -> list[Path]:
    """Write a run's tables, each to a temporary name and then renamed; the fingerprints are written last.

    Of a long run, the tables of `ringtap.analysis.runs.node_batches.TABLES` are folders with a file per batch of nodes.

    Raises:
        UsageError: the folder cannot be written, or pyarrow is missing.
    """
    with file_errors(folder, "cannot be written", remedy=": name another folder with -o DIR"):
        make_folder(folder)
        # without this file the tables count as stale until all are written
        (folder / SOURCES).unlink(missing_ok=True)
        paths = [_write(job, name, folder / f"{name}.parquet") for name in TABLES]
        write_json(folder / SUMMARY, summary)
        record = {"schema": SCHEMA, "ringtap": ringtap.__version__, "inputs": sources, "outputs": _outputs(folder)}
        write_json(folder / SOURCES, record)
    return paths


def _write(job: Job, name: str, path: Path) -> Path:
    if name not in node_batches.TABLES or not job.logs.batches.is_long:
        if path.is_dir():
            shutil.rmtree(path)  # the run was longer
        return node_batches.write_table(getattr(job, name), path)
    made = [part[name].path for part in job.logs.parts]
    for old in set(path.glob("*.parquet")) - set(made):
        old.unlink()
    return path


def read_table(folder: Path, name: str) -> pd.DataFrame:
    """Read a derived table."""
    path = folder / f"{name}.parquet"
    for part in (path, *path.glob("*.parquet")):
        refuse_links(part)
    return pd.read_parquet(path, engine="pyarrow")


def read_summary(logs: JobLogs, folder: Path | None = None) -> dict[str, Any]:
    """Read the summary of the derived tables; a run that ran when it was written may have ended since."""
    item: dict[str, Any] = load_json((folder or logs.derived) / SUMMARY)
    item["run"]["status"], item["run"]["why"] = status(logs.run.info, logs.nodes, item["run"]["missing_ranks"])
    return item
