"""This machine as the host of a measurement, and what hosts that share its files and processes have in common."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ringtap.agents.hosts.base import HostProcess
from ringtap.errors import MeasurementError

_STOP_TIMEOUT_S = 10.0


class LocalProcess:
    """A process that this one has started: its handle, its name and the files its words go to."""

    def __init__(
        self, name: str, command: list[str], log: Path, environment: Mapping[str, str], report: Path | None = None
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.name, self.log = name, log
        with log.open("ab") as file, (report or log).open("ab") as output:
            # A session of its own: a Ctrl-C at the terminal is for the conductor, which ends things in order.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=file,
                env=environment,
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        """Exit code, None while it runs."""
        return self._process.poll()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask it to end, make it end after 10 s; returns its exit code."""
        self.ask_to_stop(number)
        try:
            return self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def ask_to_stop(self, number: int = signal.SIGTERM) -> None:
        """Send a signal without waiting."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def last_words(self, lines: int = 3) -> str:
        """The end of its output, on one line."""
        text = self.log.read_text(errors="replace").strip().splitlines()
        return " | ".join(line.strip() for line in text[-lines:] if line.strip()) or "no output"


class LocalHosts:
    """This machine, under one name or several.

    Args:
        names: the hosts.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._processes: list[LocalProcess] = []

    def _enter(self, host: str) -> list[str]:  # noqa: ARG002
        """What a command is put behind to run on a host."""
        return []

    def ringtap(self, host: str) -> list[str]:
        """The command that is ringtap on a host."""
        return [self.python(host), "-m", "ringtap.cli"]

    def python(self, host: str) -> str:  # noqa: ARG002
        """The Python interpreter on a host that has ringtap."""
        return sys.executable

    def path(self, host: str, path: Path) -> str:  # noqa: ARG002
        """The same path: files are shared."""
        return str(path)

    def publish(self, run: Path) -> None:
        """Nothing to do: files are shared."""

    def start(
        self,
        host: str,
        name: str,
        command: list[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        report: Path | None = None,
    ) -> LocalProcess:
        """Start a command on a host; what it says is appended to log, its standard output to report where given."""
        variables = dict(os.environ) | dict(environment or {})
        process = LocalProcess(f"{name} on {host}", self._enter(host) + command, log, variables, report)
        self._processes.append(process)
        return process

    def ask(self, host: str, command: list[str], timeout_s: float = 20.0) -> subprocess.CompletedProcess[str]:
        """A short command's answer.

        Raises:
            MeasurementError: there is none in time.
        """
        try:
            return subprocess.run(
                self._enter(host) + command, capture_output=True, text=True, check=False, timeout=timeout_s
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MeasurementError(f"{host} gives no answer to {command[0]}: {error}") from error

    def put(self, host: str, local: Path) -> None:
        """Nothing to do: files are shared."""

    def gather(self, run: Path) -> None:
        """Nothing to do: files are shared."""

    def lost(self) -> dict[str, str]:
        """None: this machine lives as long as whoever asks."""
        return {}

    def stop_all(self) -> None:
        """End everything started here, the newest first."""
        running = [process for process in reversed(self._processes) if process.exit_code() is None]
        for process in running:
            process.ask_to_stop()
        for process in running:
            process.stop()
        self._processes.clear()

    def close(self) -> None:
        """End everything."""
        self.stop_all()

    def wait_for_port(self, host: str, port: int, process: HostProcess, seconds: float = 10.0) -> bool:
        """Whether a server process comes to listen on a TCP port of a host within so many seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and process.exit_code() is None:
            if self._listens(host, port):
                return True
            time.sleep(0.05)
        return False

    def _listens(self, host: str, port: int) -> bool:
        """Look the listening sockets up in /proc: asking by a connection would reach the server as a client."""
        tables = self.ask(host, ["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout
        rows = (line.split() for line in tables.splitlines())
        return any(len(row) > 3 and row[3] == "0A" and row[1].endswith(f":{port:04X}") for row in rows)
