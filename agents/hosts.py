"""Starting processes on the hosts of a testbed, and ending exactly those again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ringtap.agents.lab.topology import LabSpec

_STOP_TIMEOUT_S = 10.0
RINGTAP = (sys.executable, "-m", "ringtap.cli")


class HostProcess:
    """A process on a host: its handle, its name, the file its words go to and, where it has one, that of its report."""

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


class LabHosts:
    """The hosts of a testbed as places to run things."""

    def __init__(self, spec: LabSpec) -> None:
        self.spec = spec
        self._processes: list[HostProcess] = []

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
        """Start a command on a host; what it says is appended to log, its standard output to report where given."""
        enter = [sys.executable, "-m", "ringtap.agents.lab.enter", self.spec.name, host]
        process = HostProcess(
            f"{name} on {host}", enter + command, log, dict(os.environ) | dict(environment or {}), report
        )
        self._processes.append(process)
        return process

    def stop_all(self) -> None:
        """End everything started here, the newest first."""
        running = [process for process in reversed(self._processes) if process.exit_code() is None]
        for process in running:
            process.ask_to_stop()
        for process in running:
            process.stop()
        self._processes.clear()

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
        enter = [sys.executable, "-m", "ringtap.agents.lab.enter", self.spec.name, host]
        tables = ["cat", "/proc/net/tcp", "/proc/net/tcp6"]
        done = subprocess.run([*enter, *tables], capture_output=True, text=True, check=False)
        rows = (line.split() for line in done.stdout.splitlines())
        return any(len(row) > 3 and row[3] == "0A" and row[1].endswith(f":{port:04X}") for row in rows)
