"""Derived tables on disk (Parquet), with fingerprints of their sources so that stale tables are rebuilt."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

import ringtap
from ringtap.analysis.job.run import Job
from ringtap.analysis.job.throughput import Given
from ringtap.errors import UsageError
from ringtap.installation import install_command
from ringtap.json_validation import ShapeError, load_json, open_regular
from ringtap.rundir import write_json
from ringtap.schema import JOB_OUTPUTS

SCHEMA = 6
TABLES = ("iterations", "rank_iterations", "ranks", "flows", "byte_accounts", "node_iterations", "collectors")
SOURCES, SUMMARY = "sources.json", "summary.json"
_NOT_SOURCES = ("derived", "report")
_SAMPLE_BYTES = 1 << 16


def fingerprint(path: Path, given: Given | None = None) -> dict[str, Any]:
    """Return size and hash of every file that the analysis reads; hashes cover the first and last 64 KiB.

    Args:
        path: the run directory.
        given: facts that the user gave beside it.
    """
    result: dict[str, Any] = {}
    if given is not None and given != Given():
        result["given"] = {"batch": given.batch, "target_accuracy": given.target_accuracy}
        if given.output is not None:
            with suppress(OSError):  # the analysis reports it
                result["given"] |= {"output": str(given.output)} | _fingerprint(given.output)
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not (Path(folder) == path and name in _NOT_SOURCES))
        for name in sorted(names):
            is_log = Path(folder).name == "log" and name.endswith((".log", ".out"))
            if name.startswith(".") or (is_log and not Path(folder, name).match(JOB_OUTPUTS[0])):
                continue
            file = Path(folder, name)
            try:
                result[str(file.relative_to(path))] = _fingerprint(file)
            except OSError:  # missing or unreadable: the analysis reports it
                continue
    return result


def _fingerprint(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    digest = hashlib.sha256()
    with open_regular(file) as stream:
        digest.update(stream.read(_SAMPLE_BYTES))
        if size > _SAMPLE_BYTES:
            stream.seek(max(size - _SAMPLE_BYTES, _SAMPLE_BYTES))
            digest.update(stream.read(_SAMPLE_BYTES))
    return {"bytes": size, "sha256_of_ends": digest.hexdigest()}


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
        digest = hashlib.sha256()
        with open_regular(folder / name) as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        found[name] = digest.hexdigest()
    return found


def write(job: Job, summary: dict[str, Any], folder: Path, sources: dict[str, Any]) -> list[Path]:
    """Write a run's tables, each to a temporary name and then renamed; the fingerprints are written last.

    Raises:
        UsageError: the folder cannot be written, or pyarrow is missing.
    """
    try:
        importlib.import_module("pyarrow")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"Parquet files need pyarrow, which is not installed here: {install_command('report')} (on Alliance "
            "clusters: module load gcc arrow)"
        ) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # without this file the tables count as stale until all are written
        (folder / SOURCES).unlink(missing_ok=True)
        paths = [_write_table(getattr(job, name), folder / f"{name}.parquet") for name in TABLES]
        write_json(folder / SUMMARY, summary)
        record = {"schema": SCHEMA, "ringtap": ringtap.__version__, "inputs": sources, "outputs": _outputs(folder)}
        write_json(folder / SOURCES, record)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}: name another folder with -o DIR") from error
    return paths


def _write_table(table: pd.DataFrame, path: Path) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    table.to_parquet(temporary, engine="pyarrow", index=False)
    temporary.replace(path)
    return path


def read_table(folder: Path, name: str) -> pd.DataFrame:
    """Read a derived table."""
    return pd.read_parquet(folder / f"{name}.parquet", engine="pyarrow")


def read_summary(folder: Path) -> dict[str, Any]:
    """Read the summary of the derived tables."""
    item: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
    return item
