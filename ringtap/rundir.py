"""The run directory: the one contract between what collects and what analyses (docs/run-directory.md)."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from pathlib import Path
from typing import Any, Literal

import ringtap
from ringtap.errors import UsageError

SCHEMA = 1
Status = Literal["running", "complete", "partial", "failed"]


def new_name(slug: str) -> str:
    """A run's folder name: ``<UTC>-<slug>-<6 hex>``."""
    clean = re.sub(r"[^a-z0-9]+", "-", slug.lower()).strip("-") or "run"
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{clean[:40]}-{secrets.token_hex(3)}"


def write_json(path: Path, item: object) -> None:
    """Write JSON to a temporary name and rename it, so a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(item, indent=1, allow_nan=False) + "\n")
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        UsageError: missing, unreadable or not JSON.
    """
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error


class RunDirectory:
    """A run directory on disk; ``info`` is its run.json."""

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        self.path = path
        self.info = info

    @classmethod
    def create(
        cls, path: Path, kind: Literal["job", "sweep"], argv: list[str], seed: int, **extra: Any
    ) -> RunDirectory:
        """Make the folder and its run.json with status ``running``.

        Raises:
            UsageError: the folder exists and is not empty, or cannot be written.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise UsageError(f"{path} is not empty: name another folder, or go on with --resume if it is a sweep")
            info = {"schema": SCHEMA, "kind": kind, "ringtap": ringtap.__version__, "argv": argv}
            info |= {"created_ns": time.time_ns(), "seed": seed, "status": "running", "why": "", "not_collected": []}
            run = cls(path, info | extra)
            run.save()
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open an existing run directory.

        Raises:
            UsageError: no run.json there, or one of a newer schema.
        """
        if not (path / "run.json").is_file():
            raise UsageError(f"{path} is no run directory: it has no run.json")
        info = read_json(path / "run.json")
        if not isinstance(info, dict) or not isinstance(info.get("schema"), int):
            raise UsageError(f"{path / 'run.json'} is not a ringtap run description")
        if info["schema"] > SCHEMA:
            raise UsageError(f"{path} has schema {info['schema']}; this ringtap reads up to {SCHEMA}: upgrade ringtap")
        return cls(path, info)

    def save(self) -> None:
        """Write run.json."""
        write_json(self.path / "run.json", self.info)

    def finish(self, status: Status, why: str = "") -> None:
        """Record how the run ended."""
        self.info |= {"status": status, "why": why}
        self.save()

    def node(self, host: str) -> Path:
        """The folder that host writes to; made if missing."""
        path = self.path / "nodes" / host
        path.mkdir(parents=True, exist_ok=True)
        return path
