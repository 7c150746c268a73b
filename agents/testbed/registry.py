"""The registry of testbeds: one small file per testbed that names its init process.

A testbed lives in the namespaces of its init process. When that process ends, however it ends, the kernel removes the
namespaces, the links and every process in them. Its pid and start time are enough to find and remove what a crash left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringtap.agents.node import agent_socket
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.errors import MeasurementError, UsageError
from ringtap.rundir import read_json, write_json

_LONGEST_RECORD = 1 << 20  # bytes; one of 200 hosts has 60 kB


def _places() -> list[Path]:
    """Folders that may hold state files, in the order in which they are tried.

    First comes ``/run/ringtap`` for root, else the user's runtime folder; then names below /tmp; then the home, where
    no other user can take a name. Machines may share homes, so the name there contains the machine.
    """
    uid = os.geteuid()
    runtime = Path("/run" if uid == 0 else f"/run/user/{uid}") / "ringtap"
    places = [runtime, *agent_socket.local_names(f"ringtap-{uid}")]
    with contextlib.suppress(RuntimeError):  # a user without a home
        places.append(Path.home() / f".ringtap-{os.uname().nodename}")
    return places


def state_folder() -> Path:
    """The folder for new state files, private to this user.

    Raises:
        UsageError: there is none and none can be made.
    """
    places = _places()
    try:
        return agent_socket.first_private(places)
    except OSError as error:
        raise UsageError(
            f"no folder for the records of testbeds: {places[0]}, {places[1]} and {places[-1]} are neither yours alone "
            f"nor can they be made ({error.strerror}): give one that is yours the mode 0700, or remove it"
        ) from error


@dataclass(frozen=True)
class TestbedState:
    """A testbed on record.

    Attributes:
        spec: what was built.
        pid: the init process.
        start_ticks: its start time in clock ticks since boot; with the pid, it identifies one process.
        owner_pid: the process that the testbed ends with, 0 if it stays.
        links: measured rates of the links.
        folder: the folder of its state file.
    """

    spec: TestbedSpec
    pid: int
    start_ticks: int
    owner_pid: int
    links: list[dict[str, Any]]
    folder: Path = field(default_factory=state_folder)

    @property
    def path(self) -> Path:
        """Its state file."""
        return self.folder / f"{self.spec.name}.json"

    def save(self) -> None:
        """Write the state file.

        Raises:
            UsageError: it cannot be written.
        """
        item = {"spec": self.spec.to_json(), "pid": self.pid, "start_ticks": self.start_ticks}
        try:
            write_json(self.path, item | {"owner_pid": self.owner_pid, "links": self.links})
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written: {error.strerror}; is something in its way?") from error

    def alive(self) -> bool:
        """True if the init process still runs."""
        return start_ticks(self.pid) == self.start_ticks


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@contextmanager
def locked() -> Iterator[None]:
    """Hold the lock under which testbeds are recorded and removed.

    Raises:
        UsageError: the lock's file cannot be opened.
    """
    path = state_folder() / ".lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise UsageError(f"{path} cannot be opened: {error.strerror}; remove what is in its place") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def all_testbeds() -> list[TestbedState]:
    """Every testbed on record, by name."""
    return read_records()[0]


def read_records() -> tuple[list[TestbedState], list[str]]:
    """Every testbed on record, by name, and a sentence for each file that is not a valid record."""
    testbeds, problems = [], []
    for folder in _places():
        with contextlib.suppress(OSError):
            if not agent_socket.is_private(folder):
                continue
            for path in sorted(folder.glob("*.json")):
                try:
                    testbeds.append(_read_record(path))
                except _NoRecordError as error:
                    problems.append(f"{path} is not a record of a testbed ({error}): remove it if you do not need it")
    return sorted(testbeds, key=lambda testbed: testbed.spec.name), problems


class _NoRecordError(Exception):
    """A file that is not a record of a testbed, with the reason."""


def _read_record(path: Path) -> TestbedState:
    """Read a state file and validate it.

    Raises:
        _NoRecordError: it is not a record of a testbed.
    """
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LONGEST_RECORD:
            raise _NoRecordError("it is no small file")
        item = read_json(path)
        spec = TestbedSpec.from_json(item["spec"])
        numbers = (item["pid"], item["start_ticks"], item.get("owner_pid", 0))
        links = item.get("links", [])
    except UsageError as error:
        raise _NoRecordError(str(error).removeprefix(f"{path} ")) from None
    except OSError as error:
        raise _NoRecordError(error.strerror) from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise _NoRecordError("it describes no testbed") from None
    if any(type(number) is not int or number < 0 for number in numbers) or numbers[0] < 2:
        raise _NoRecordError("it names no process")
    if spec.name != path.stem or not isinstance(links, list):
        raise _NoRecordError("it describes another testbed" if isinstance(links, list) else "its links are no list")
    return TestbedState(spec, *numbers, links, path.parent)


def find(name: str | None) -> TestbedState:
    """The named testbed, or the only one that is up.

    Raises:
        UsageError: there is none, or several and no name was given.
    """
    testbeds = [
        testbed for testbed in all_testbeds() if (name is None or testbed.spec.name == name) and testbed.alive()
    ]
    if len(testbeds) == 1:
        return testbeds[0]
    if testbeds:
        raise UsageError(
            f"there are several testbeds: name one of them ({', '.join(testbed.spec.name for testbed in testbeds)})"
        )
    raise UsageError(f"there is no testbed {name or ''}: build one with ringtap testbed up".replace("  ", " "))


def remove(testbed: TestbedState) -> bool:
    """End a testbed by its init process and delete its record; returns True if it was still running.

    Raises:
        MeasurementError: the init process is another user's, or did not end within 10 s.
    """
    standing = testbed.alive()
    if standing:
        try:
            os.kill(testbed.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has just ended
            pass
        except PermissionError as error:
            raise MeasurementError(
                f"the init process of testbed {testbed.spec.name} (pid {testbed.pid}) is not yours"
            ) from error
    deadline = time.monotonic() + 10
    while testbed.alive():
        if time.monotonic() > deadline:
            raise MeasurementError(f"the init process of testbed {testbed.spec.name} (pid {testbed.pid}) does not end")
        time.sleep(0.01)
    testbed.path.unlink(missing_ok=True)
    return standing
