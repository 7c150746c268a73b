"""Which testbeds stand: one small file each, naming the process that holds it.

A testbed lives in the namespaces of one process, its keeper. When that process ends, by whatever means, the kernel
takes the namespaces, links and every process in them away. So the keeper's pid and start time are all that is needed
to find and remove what a crash left.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringtap.agents.lab.topology import LabSpec
from ringtap.errors import MeasurementError, UsageError
from ringtap.rundir import read_json, write_json


def state_folder() -> Path:
    """Folder of the state files: ``/run/ringtap`` for root, else the user's runtime folder, else one below /tmp.

    Raises:
        UsageError: the folder belongs to somebody else or cannot be made.
    """
    uid = os.geteuid()
    runtime = Path(f"/run/user/{uid}")
    base = (
        Path("/run/ringtap") if uid == 0 else runtime / "ringtap" if runtime.is_dir() else Path(f"/tmp/ringtap-{uid}")
    )
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        if base.stat().st_uid != uid or base.is_symlink():
            raise UsageError(f"{base} belongs to another user: remove it")
    except OSError as error:
        raise UsageError(f"{base} cannot be made: {error.strerror}") from error
    return base


@dataclass(frozen=True)
class LabState:
    """A testbed on record.

    Attributes:
        spec: what was built.
        pid: the keeper.
        start_ticks: the keeper's start time in clock ticks since boot: with the pid it names one process for good.
        owner_pid: the process the testbed ends with, 0 for one that stays.
        links: rates that the links were seen to give.
    """

    spec: LabSpec
    pid: int
    start_ticks: int
    owner_pid: int
    links: list[dict[str, Any]]

    @property
    def path(self) -> Path:
        """Its state file."""
        return state_folder() / f"{self.spec.name}.json"

    def save(self) -> None:
        """Write the state file."""
        item = {"spec": self.spec.to_json(), "pid": self.pid, "start_ticks": self.start_ticks}
        write_json(self.path, item | {"owner_pid": self.owner_pid, "links": self.links})

    def alive(self) -> bool:
        """Whether the keeper still runs."""
        return start_ticks(self.pid) == self.start_ticks


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@contextmanager
def locked() -> Iterator[None]:
    """Hold the lock under which testbeds are recorded and removed."""
    with (state_folder() / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def all_labs() -> list[LabState]:
    """Every testbed on record, by name."""
    labs = []
    for path in sorted(state_folder().glob("*.json")):
        item = read_json(path)
        labs.append(LabState(**(item | {"spec": LabSpec.from_json(item["spec"])})))
    return labs


def find(name: str | None) -> LabState:
    """The named testbed, or the only one that stands.

    Raises:
        UsageError: there is none, or several and no name was given.
    """
    labs = [lab for lab in all_labs() if (name is None or lab.spec.name == name) and lab.alive()]
    if len(labs) == 1:
        return labs[0]
    if labs:
        raise UsageError(f"several testbeds stand: name one with --lab ({', '.join(lab.spec.name for lab in labs)})")
    raise UsageError(f"no testbed {name or ''} stands: build one with ringtap lab up".replace("  ", " "))


def remove(lab: LabState) -> bool:
    """End a testbed's keeper, and so all of it; returns whether it was still standing.

    Raises:
        MeasurementError: the keeper did not end within 10 s.
    """
    standing = lab.alive()
    if standing:
        os.kill(lab.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while lab.alive():
        if time.monotonic() > deadline:
            raise MeasurementError(f"the keeper of testbed {lab.spec.name} (pid {lab.pid}) does not end")
        time.sleep(0.01)
    lab.path.unlink(missing_ok=True)
    return standing
