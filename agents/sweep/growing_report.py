"""Writes the report of a running sweep anew after each point, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO

from ringtap.core.errors import failure_message
from ringtap.core.isolated_python import python_command
from ringtap.core.parent_death import die_with_parent
from ringtap.core.run_directory_schema import REPORT_HTML
from ringtap.core.terminal_escaping import shell_word

PACKAGES = ("jinja2", "matplotlib", "numpy", "pandas", "scipy")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_END_S = 120.0  # a report of a large sweep takes 10 s


class GrowingReport:
    """Report of a sweep that is measured; a context manager around the measurement.

    After each point, ``ringtap report`` runs in a process that the kernel gives only the time that nothing else wants
    (SCHED_IDLE). One such process runs at a time, and the next one reads the newest points. Its failure is a warning.

    Args:
        run: the sweep's run directory.
        say: receives a message.
    """

    def __init__(self, run: Path, say: Callable[[str], None]) -> None:
        self._run, self._say, self._page = run, say, run / REPORT_HTML
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._is_behind, self._has_warned = False, False

    def __enter__(self) -> GrowingReport:
        """Name the page, and write it while it has no points."""
        self._say(f"report: {self._page}, grows with each point")
        self.poll(True)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Write the report of all that was measured."""
        # after a failure, the caller's function for messages may be what failed
        with nullcontext() if error is None else suppress(Exception):
            self._schedule(os.SCHED_OTHER)  # nothing is measured any more
            self._wait()  # Ctrl-C may have ended it, too
            self._start(is_idle=False)
            why = self._wait()
            if why:
                self._warn(why)
            elif why is not None and error is not None:
                self._say(f"report of what was measured: {self._page}")

    def poll(self, has_new_point: bool) -> None:
        """Start the next report if there are points that no report has, and none is being written."""
        self._is_behind |= has_new_point
        if self._process is not None and self._process.poll() is not None and (why := self._wait()):
            self._warn(why)
        if self._is_behind and self._process is None:
            self._start()

    def _start(self, *, is_idle: bool = True) -> None:
        self._is_behind = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                python_command(sys.executable, "ringtap", "report", str(self._run)),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors,
                env=os.environ | _ONE_THREAD, preexec_fn=die_with_parent(),  # noqa: PLW1509
            )  # fmt: skip
        except OSError as error:
            self._warn(failure_message(error))
            return
        if is_idle:
            self._schedule(os.SCHED_IDLE)

    def _schedule(self, policy: int) -> None:
        if self._process is not None:
            with suppress(OSError):  # it may have ended already
                os.sched_setscheduler(self._process.pid, policy, os.sched_param(0))

    def _wait(self) -> str | None:
        """Wait for the process; return the reason why it wrote no report, empty if it did, None without a process."""
        process, errors = self._process, self._errors
        if process is None or errors is None:
            return None
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._process = None
        errors.seek(0)
        lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
        errors.close()
        if process.returncode == 0:
            return ""
        return lines[-1].removeprefix("ringtap: ") if lines else f"exit code {process.returncode}"

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            command = f"ringtap report {shell_word(self._run)}"
            self._say(f"warning: the report could not be written: {why}; to write it at the end: {command}")
