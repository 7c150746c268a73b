"""Choice of the run directory that a command records into: a new one, the other ranks', or that of ``--join``."""

from __future__ import annotations

import contextlib
import os
import sys
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from ringtap.agents.job.environment import run_key
from ringtap.agents.node.settings import RunSettings
from ringtap.collectors.processes import rank_in
from ringtap.errors import UsageError
from ringtap.rundir import RunDirectory, new_name, shared_name

_JOIN_S = 60.0
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

    Args:
        slug: a word for the name of a new run directory.
        output: the folder asked for; None for one below ``runs``.
        join: the run directory to join; None for none.
        node: this node's name.
        settings: what will be recorded.
        access: the access to a folder that is made.

    Raises:
        UsageError: the folder is in use, or there is nothing to join.
        UnwritableError: the folder cannot be written.
    """
    if join is not None:
        if output is not None:
            raise UsageError("-o makes a run directory and --join joins one: give one of them")
        return RunLocation(RunDirectory.wait_for(join.absolute(), _JOIN_S), node, created=False)
    key = run_key(os.environ)
    extra: dict[str, Any] = {"settings": settings.to_json(), "reference": node, "access": access}
    if not key:
        path = (output or Path("runs") / new_name(slug)).absolute()
        return RunLocation(RunDirectory.create(path, "job", sys.argv, 0, **extra), node, created=True)
    rank = rank_in(os.environ)
    for number in count(1):
        suffix = f"-{number}" if number > 1 else ""
        path = (output or Path("runs") / f"{shared_name(slug, key)}{suffix}").absolute()
        joined = RunDirectory.create_or_join(path, sys.argv, key=key, rank=str(rank or 0), **extra)
        if joined:
            return RunLocation(joined[0], node, created=joined[1])
        if output is not None:
            raise UsageError(f"{output} holds a run of this rank already: name another folder with -o")
    raise AssertionError
