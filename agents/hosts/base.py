"""Interface to the hosts of a measurement, independent of how they are reached."""

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
    """Parse a host's answer within the block, and report an unexpected answer as an error.

    Raises:
        MeasurementError: the answer does not have the expected form.
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
        name: its name and host, for messages.
        log: file on this machine that receives its standard error while it runs, and its standard output unless that
            has a file of its own.
    """

    name: str
    log: Path

    def exit_code(self) -> int | None:
        """Exit code; None while it runs, negative if a signal ended it. Once it is known, the output is complete."""

    def ask_to_stop(self, number: int = signal.SIGTERM) -> None:
        """Send a signal without waiting."""

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal unless it was sent before, kill the process after 10 s, and return its exit code."""

    def last_words(self, lines: int = 3) -> str:
        """Last lines of its output, joined into one line."""


class Hosts(Protocol):
    """Hosts of a measurement, on which commands are run.

    Attributes:
        names: names of the hosts.
    """

    names: tuple[str, ...]

    def ringtap(self, host: str) -> list[str]:
        """Command that runs ringtap on a host."""

    def python(self, host: str) -> str:
        """Python interpreter on a host that has ringtap."""

    def path(self, host: str, path: Path) -> str:
        """Location of a path below a published run directory on a host: the same path where files are shared."""

    def publish(self, run: Path) -> None:
        """Announce a new run directory to every host; does nothing where files are shared.

        Raises:
            MeasurementError: a host does not accept it.
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
        """Start a command on a host; its output is appended to ``log``, its standard output to ``report`` if given.

        Args:
            host: name of the host.
            name: name of the process, for messages.
            command: the command and its arguments.
            log: file on this machine for its standard error.
            environment: variables in addition to those of the host.
            report: file on this machine for its standard output; None: the log.

        Raises:
            MeasurementError: the host is lost.
        """

    def ask(self, host: str, command: list[str], timeout_s: float = 20.0) -> subprocess.CompletedProcess[str]:
        """Run a short command on a host and return its result.

        Raises:
            MeasurementError: the host does not answer in time.
        """

    def put(self, host: str, local: Path) -> None:
        """Copy a file below a published run directory to its `path` on a host.

        Raises:
            MeasurementError: the host does not accept it.
        """

    def gather(self, run: Path) -> None:
        """Wait until all files that hosts wrote below a published run directory are here; lost hosts are skipped."""

    def lease(self, host: str, holder: Mapping[str, Any]) -> dict[str, Any]:
        """Take a host's lease (`ringtap.agents.hosts.lease`), which lasts as long as the connection to the host.

        Returns:
            Empty if the lease was taken; otherwise facts about the sweep that holds it.

        Raises:
            MeasurementError: the host does not answer, or does not support leases.
        """

    def lost(self) -> dict[str, str]:
        """Hosts known to be lost, with the reason."""

    def wait_for_port(self, host: str, port: int, process: HostProcess, seconds: float = 10.0) -> bool:
        """Return True if a server process listens on a TCP port of a host within the given number of seconds."""

    def stop_all(self) -> None:
        """End all processes started here, the newest first; a lost host is not an error."""

    def close(self) -> None:
        """End all processes, disconnect, and remove the files put on the hosts. A lost host is not an error."""
