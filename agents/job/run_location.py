"""Chooses the run directory that a command records into: a new one, or one that other processes may have made."""

from __future__ import annotations

import contextlib
import os
import sys
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from ringtap.agents.job.environment import batch_job, machine, of_this_start, run_key
from ringtap.agents.node.recording_settings import RunSettings
from ringtap.collectors.process_facts import rank_in
from ringtap.core.errors import UsageError
from ringtap.core.run_directory import RunDirectory, TakenError, new_name, shared_name

_MAX_NAME_LENGTH = 200


class RunLocation(NamedTuple):
    """The destination of a recording.

    Attributes:
        run: the run directory.
        node: this node's name in it.
        created: whether this process made the run directory, and so writes the run's end.
    """

    run: RunDirectory
    node: str
    created: bool

    @property
    def label(self) -> str:
        """The run directory's path, relative to the working directory if it is below it."""
        with contextlib.suppress(ValueError, OSError):
            return str(self.run.path.relative_to(Path.cwd()))
        return str(self.run.path)


def node_name(given: str | None) -> str:
    """The node's name: the given one, else its host name.

    Raises:
        UsageError: it is not usable as a folder's name.
    """
    name = given or os.uname().nodename
    if not name or len(name) > _MAX_NAME_LENGTH or name.startswith(".") or "/" in name or "\0" in name:
        raise UsageError(f"--node {name!r} cannot be the name of a folder")
    return name


def find_location(
    slug: str, output: Path | None, join: Path | None, node: str, settings: RunSettings, access: str = "private"
) -> RunLocation:
    """Make or join the run directory.

    A job that a batch system starts again records into another folder: what the first start left is another run.

    Args:
        slug: a word for the name of a new run directory.
        output: the new folder asked for; None for one below ``runs``.
        join: the folder that processes share without having a launcher's key in common; None for none.
        node: this node's name, unless another machine has it.
        settings: what will be recorded.
        access: the access to a folder that is made.

    Raises:
        UsageError: the folder is in use, or cannot be joined.
        UnwritableError: the folder cannot be written.
    """
    if join is not None and output is not None:
        raise UsageError("-o makes a run directory, and --join makes or joins one: give one of them")
    run, created = _make_or_join(slug, join or output, join is not None, node, settings, access)
    return RunLocation(run, run.claim_node(node, machine()), created)


def _of_this_start(given: Path) -> Path:
    """Return the folder for this start of the job; a run that a sweep has made for its agents is that of this start."""
    with contextlib.suppress(UsageError):
        if "job" not in RunDirectory.open(given).info:
            return given
    return of_this_start(given, os.environ)


def _make_or_join(
    slug: str, given: Path | None, is_named: bool, node: str, settings: RunSettings, access: str
) -> tuple[RunDirectory, bool]:
    """Return the run, and whether this process made it; ``is_named``: the user names a folder to share."""
    key, rank = run_key(os.environ), rank_in(os.environ)
    extra: dict[str, Any] = {"settings": settings.to_json(), "reference": node, "access": access}
    extra["job"] = batch_job(os.environ)
    given = None if given is None else _of_this_start(given)
    if not key and not is_named:
        path = (given or Path("runs") / new_name(slug)).absolute()
        return RunDirectory.create(path, "job", sys.argv, 0, **extra), True
    for number in count(1):
        suffix = f"-{number}" if number > 1 else ""
        path = (given or Path("runs") / f"{shared_name(slug, key)}{suffix}").absolute()
        joined = RunDirectory.create_or_join(path, sys.argv, key=key, rank=str(rank or 0), is_named=is_named, **extra)
        if joined:
            return joined
        if given is not None:
            raise TakenError(f"{given} holds a run of this rank already: name another folder")
    raise AssertionError
