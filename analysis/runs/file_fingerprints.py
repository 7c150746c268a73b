"""Takes fingerprints of files that an analysis reads: their sizes, and hashes of their first and last 64 KiB."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from ringtap.core.run_directory_schema import JOB_OUTPUTS
from ringtap.core.untrusted_files import open_regular

_NOT_SOURCES = ("derived", "report")
_SAMPLE_BYTES = 1 << 16


def fingerprint(path: Path) -> dict[str, Any]:
    """Return size and hash of every file in a folder that the analysis reads, by path relative to it."""
    result: dict[str, Any] = {}
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not (Path(folder) == path and name in _NOT_SOURCES))
        for name in sorted(names):
            is_log = Path(folder).name == "log" and name.endswith((".log", ".out"))
            if name.startswith(".") or (is_log and not Path(folder, name).match(JOB_OUTPUTS[0])):
                continue
            file = Path(folder, name)
            try:
                result[str(file.relative_to(path))] = file_fingerprint(file)
            except OSError:  # missing or unreadable: the analysis reports it
                continue
    return result


def file_fingerprint(file: Path) -> dict[str, Any]:
    """Return size and hash of a file.

    Raises:
        OSError: the file cannot be read.
    """
    size = file.stat().st_size
    digest = hashlib.sha256()
    with open_regular(file) as stream:
        digest.update(stream.read(_SAMPLE_BYTES))
        if size > _SAMPLE_BYTES:
            stream.seek(max(size - _SAMPLE_BYTES, _SAMPLE_BYTES))
            digest.update(stream.read(_SAMPLE_BYTES))
    return {"bytes": size, "sha256_of_ends": digest.hexdigest()}
