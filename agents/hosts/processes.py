"""Processes that the controller has started on a host, and their end.

When a command has ended, the rest of its process group receives SIGTERM, and SIGKILL 3 s later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from ringtap.agents.hosts.frames import ANSWER_BYTES
from ringtap.agents.node.jobs import descendants
from ringtap.agents.testbed import namespaces
from ringtap.records import mend_last_line

_GRACE_S = 3.0  # from SIGTERM to SIGKILL


class Child:
    """Command that runs; its output goes to files.

    Args:
        command: the command and its arguments.
        environment: variables in addition to those of this process.
        output: file its standard output is appended to.
        log: file its standard error is appended to.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str], output: IO[bytes], log: IO[bytes]) -> None:
        self.output, self.log = output, log
        self.code: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                env=dict(os.environ) | dict(environment),
                start_new_session=True,
                # if this process is killed, its children receive SIGTERM
                preexec_fn=lambda: namespaces.die_with_parent(signal.SIGTERM),  # noqa: PLW1509
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self.code = 127 if isinstance(error, FileNotFoundError | NotADirectoryError) else 126
            words = getattr(error, "strerror", None) or str(error)
            with contextlib.suppress(OSError):
                log.write(f"ringtap: {command[0]} cannot be run: {words}\n".encode(errors="replace"))
                log.flush()

    def poll(self) -> int | None:
        """Exit code of the command; None while it runs."""
        if self.code is None and self._process is not None:
            self.code = self._process.poll()
        return self.code

    def signal(self, number: int) -> None:
        """Send a signal to the command itself."""
        if self._process is not None:
            self._process.send_signal(number)

    def signal_group(self, number: int) -> bool:
        """Send a signal to the command's process group, which may outlive it; return True if the group exists."""
        if self._process is None:
            return False
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        """Kill the command's process group and, if the command still runs, all its descendants."""
        below = descendants([self._process.pid]) if self._process and self.poll() is None else []
        self.signal_group(signal.SIGKILL)
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Close its files."""
        self.output.close()
        self.log.close()


class HostProcesses:
    """Commands of one controller, by the numbers that it gives them."""

    def __init__(self) -> None:
        self._running: dict[int, Child] = {}
        self._bereft: list[tuple[float, Child]] = []  # deadline and ended command whose process group still exists
        self._questions: set[int] = set()

    def start(self, item: dict[str, Any]) -> None:
        """Start a command whose output goes to files."""
        try:
            files = [_append(item["report"] or item["log"]), _append(item["log"])]
        except OSError:  # the command still runs; only its output is lost, not its records
            files = [_append(os.devnull), _append(os.devnull)]
        self._running[item["id"]] = Child(item["argv"], item["environment"], *files)

    def question(self, item: dict[str, Any]) -> None:
        """Start a command whose output is part of the answer when it has ended."""
        files = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115
        self._running[item["id"]] = Child(item["argv"], {}, *files)
        self._questions.add(item["id"])

    def get(self, number: int) -> Child | None:
        """Return a command that has not ended, or None."""
        return self._running.get(number)

    def ended(self) -> list[dict[str, Any]]:
        """Return a frame for each command that has ended; ``files`` are its output files."""
        found = []
        for number, child in list(self._running.items()):
            if (code := child.poll()) is None:
                continue
            del self._running[number]
            if child.signal_group(signal.SIGTERM):
                self._bereft.append((time.monotonic() + _GRACE_S, child))
            item: dict[str, Any] = {"op": "exit", "id": number, "code": code}
            if number in self._questions:
                self._questions.remove(number)
                item = {"op": "answer", "id": number, "code": code}
                item |= {"out": _text(child.output), "err": _text(child.log)}
            else:
                item["files"] = [child.output.name, child.log.name]
            child.close()
            found.append(item)
        while self._bereft and time.monotonic() > self._bereft[0][0]:
            self._bereft.pop(0)[1].kill()
        return found

    def end_all(self) -> None:
        """Send SIGTERM to all process groups, and SIGKILL 3 s later."""
        left = [*self._running.values(), *(child for _, child in self._bereft)]
        for child in left:
            child.signal_group(signal.SIGTERM)
        deadline_s = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline_s and any(child.poll() is None or child.signal_group(0) for child in left):
            time.sleep(0.02)
        for child in left:
            child.kill()


def _append(path: str) -> IO[bytes]:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    file = Path(path).open("a+b")  # noqa: SIM115
    mend_last_line(file.fileno(), lambda _: True)  # of an earlier process
    return file


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(ANSWER_BYTES).decode(errors="replace")
