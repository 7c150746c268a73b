"""Records which testbeds this machine has: one small file per testbed, with the pid of its init process.

A testbed lives in the namespaces of its init process. When that process ends, even if it is killed, the kernel removes
the namespaces, the links and every process in them. Its pid and start time suffice to find and remove a testbed whose
owner has crashed.
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

from ringtap.agents.node import agent_control_socket
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.collectors.kernel_files import stat_of
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.json_validation import BPS, Shape, ShapeError, check
from ringtap.core.run_directory import read_json, write_json

_LINKS: Shape = [{"host": str, "direction": str, "asked_bps": BPS, "measured_bps": BPS, "congestion_control": str}]
_MAX_RECORD_BYTES = 1 << 20  # bytes; the record of 200 hosts has 60 kB


def _places() -> list[Path]:
    """Return the folders that may hold state files, in the order in which they are tried.

    They are ``/run/ringtap`` for root, or else the user's runtime folder; names below /tmp; and the home, where no
    other user can take a name. Machines may share homes, so the name there contains the machine.
    """
    uid = os.geteuid()
    runtime = Path("/run" if uid == 0 else f"/run/user/{uid}") / "ringtap"
    folders = [runtime, *agent_control_socket.local_names(f"ringtap-{uid}")]
    with contextlib.suppress(RuntimeError):  # a user without a home
        folders.append(Path.home() / f".ringtap-{os.uname().nodename}")
    return folders


def state_folder() -> Path:
    """Return the folder for new state files, which is private to this user.

    Raises:
        UsageError: there is no such folder, and none can be created.
    """
    folders = _places()
    try:
        return agent_control_socket.first_private(folders)
    except OSError as error:
        raise UsageError(
            f"no folder for the records of testbeds: {folders[0]}, {folders[1]} and {folders[-1]} are neither private "
            f"to you nor can they be created ({error.strerror}): give one that is yours the mode 0700, or remove it"
        ) from error


@dataclass(frozen=True)
class TestbedState:
    """Recorded testbed.

    Attributes:
        spec: the testbed as it was built.
        pid: pid of the init process.
        start_ticks: its start time in clock ticks since boot; with the pid, it identifies one process.
        owner_pid: pid of the process with which the testbed ends; 0 if it stays.
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
        """State file of the testbed."""
        return self.folder / f"{self.spec.name}.json"

    def save(self) -> None:
        """Write the state file.

        Raises:
            UsageError: the file cannot be written.
        """
        item = {"spec": self.spec.to_json(), "pid": self.pid, "start_ticks": self.start_ticks}
        try:
            write_json(self.path, item | {"owner_pid": self.owner_pid, "links": self.links})
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written: {error.strerror}; is something in its way?") from error

    def alive(self) -> bool:
        """Return True if the init process still runs."""
        return start_ticks(self.pid) == self.start_ticks


_PF_EXITING = 0x4  # include/linux/sched.h


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it is gone, a zombie, or ending.

    The first process of a PID namespace ends only after the others there have been reaped. Those whose parents were
    outside and were killed are for the first process of the machine to reap, which in a container may never happen.
    """
    fields = stat_of(pid)
    return None if not fields or fields[0] in "ZX" or int(fields[6]) & _PF_EXITING else int(fields[19])


@contextmanager
def locked() -> Iterator[None]:
    """Hold the lock for recording and removing testbeds within the block.

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
    """Return every recorded testbed, sorted by name."""
    return read_records()[0]


def read_records() -> tuple[list[TestbedState], list[str]]:
    """Return every recorded testbed, sorted by name, and a sentence for each file that is not a valid record."""
    testbeds, problems = [], []
    for folder in _places():
        with contextlib.suppress(OSError):
            if not agent_control_socket.is_private(folder):
                continue
            for path in sorted(folder.glob("*.json")):
                try:
                    testbeds.append(_read_record(path))
                except _NoRecordError as error:
                    problems.append(f"{path} is not a record of a testbed ({error}): remove it if you do not need it")
    return sorted(testbeds, key=lambda testbed: testbed.spec.name), problems


class _NoRecordError(Exception):
    """File that is not a record of a testbed, with the reason."""


def _read_record(path: Path) -> TestbedState:
    """Read a state file and validate it.

    Raises:
        _NoRecordError: the file is not a record of a testbed.
    """
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_RECORD_BYTES:
            raise _NoRecordError("it is not a small file")
        item = read_json(path)
        spec = TestbedSpec.from_json(item["spec"])
        numbers = (item["pid"], item["start_ticks"], item.get("owner_pid", 0))
        links = item.get("links", [])
        check(links, _LINKS)
    except ShapeError as error:
        raise _NoRecordError(f"of its links, {error}") from None
    except UsageError as error:
        raise _NoRecordError(str(error).removeprefix(f"{path} ")) from None
    except OSError as error:
        raise _NoRecordError(error.strerror) from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise _NoRecordError("it does not describe a testbed") from None
    if any(type(number) is not int or number < 0 for number in numbers) or numbers[0] < 2:
        raise _NoRecordError("it does not name a process")
    if spec.name != path.stem:
        raise _NoRecordError("it describes another testbed")
    return TestbedState(spec, *numbers, links, path.parent)


def find(name: str | None) -> TestbedState:
    """Return the named testbed, or the only one that is up.

    Raises:
        UsageError: there is no such testbed, or several are up and no name was given.
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
    which = f"there is no testbed {name}" if name else "no testbed is up"
    raise UsageError(f"{which}: build one with ringtap testbed up")


def remove(testbed: TestbedState) -> bool:
    """End a testbed by killing its init process, and delete its record; return True if it was still running.

    Raises:
        MeasurementError: the init process is another user's, or did not end within 10 s.
    """
    was_alive = testbed.alive()
    if was_alive:
        try:
            os.kill(testbed.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has just ended
            pass
        except PermissionError as error:
            raise MeasurementError(
                f"the init process of testbed {testbed.spec.name} (pid {testbed.pid}) is not yours"
            ) from error
    deadline_s = time.monotonic() + 10
    while testbed.alive():
        if time.monotonic() > deadline_s:
            raise MeasurementError(f"the init process of testbed {testbed.spec.name} (pid {testbed.pid}) does not end")
        time.sleep(0.01)
    testbed.path.unlink(missing_ok=True)
    return was_alive
