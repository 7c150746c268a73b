"""The interface to the hosts of a measurement, however they are reached."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from ringtap.errors import MeasurementError

_NOT_AS_ASKED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


@contextmanager
def understood(host: str) -> Iterator[None]:
    """Take a host's answer apart within the block: a host may answer anything.

    Raises:
        MeasurementError: it is not what was asked for.
    """
    try:
        yield
    except _NOT_AS_ASKED as error:
        raise MeasurementError(
            f"host {host} gives an answer that cannot be understood ({type(error).__name__}): "
            "does its login or its python print something of its own?"
        ) from error


class HostProcess(Protocol):
    """A process on a host.

    Attributes:
        name: what it is and where, for messages.
        log: file on this machine that what it says on standard error (and on standard output, unless that has a file
            of its own) is in while it runs.
    """

    name: str
    log: Path

    def exit_code(self) -> int | None:
        """Exit code, None while it runs; below 0 the signal that ended it. Its output is complete once there is one."""

    def ask_to_stop(self, number: int = signal.SIGTERM) -> None:
        """Send a signal without waiting."""

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask it to end, if that was not done before, and make it end after 10 s; returns its exit code."""

    def last_words(self, lines: int = 3) -> str:
        """The end of its output, on one line."""


class Hosts(Protocol):
    """The hosts of a measurement as places to run things.

    Attributes:
        names: the hosts.
    """

    names: tuple[str, ...]

    def ringtap(self, host: str) -> list[str]:
        """The command that is ringtap on a host."""

    def python(self, host: str) -> str:
        """The Python interpreter on a host that has ringtap."""

    def path(self, host: str, path: Path) -> str:
        """Location of a path below a published run directory on a host: the same path where files are shared."""

    def publish(self, run: Path) -> None:
        """Make a freshly made run directory known on every host; nothing to do where files are shared.

        Raises:
            MeasurementError: a host does not take it.
        """

    def start(
        self,
        host: str,
        name: str,
        command: list[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        report: Path | None = None,
    ) -> HostProcess:
        """Start a command on a host; what it says is appended to log, its standard output to report where given.

        Args:
            host: where.
            name: what it is, for messages.
            command: the command and its arguments.
            log: file on this machine for its standard error.
            environment: variables beside those that the host has.
            report: file on this machine for its standard output; None: the log.

        Raises:
            MeasurementError: the host is lost.
        """

    def ask(self, host: str, command: list[str], timeout_s: float = 20.0) -> subprocess.CompletedProcess[str]:
        """A short command's answer.

        Raises:
            MeasurementError: the host gives none in time.
        """

    def put(self, host: str, local: Path) -> None:
        """Copy a file below a published run directory to where `path` says.

        Raises:
            MeasurementError: the host does not take it.
        """

    def gather(self, run: Path) -> None:
        """See that all the hosts have written below a published run directory is here; lost hosts are left out."""

    def lease(self, host: str, holder: Mapping[str, Any]) -> dict[str, Any]:
        """Take a host's lease for as long as it is being reached (`ringtap.agents.hosts.lease`).

        Returns:
            Empty where it is taken; else facts of the sweep that holds it.

        Raises:
            MeasurementError: the host gives no answer, or has no leases.
        """

    def lost(self) -> dict[str, str]:
        """The hosts known to be lost, and why."""

    def wait_for_port(self, host: str, port: int, process: HostProcess, seconds: float = 10.0) -> bool:
        """True if a server process comes to listen on a TCP port of a host within so many seconds."""

    def stop_all(self) -> None:
        """End everything started here, the newest first; a lost host is no error."""

    def close(self) -> None:
        """End everything, leave the hosts, and remove what was put on them. A lost host is no error."""
