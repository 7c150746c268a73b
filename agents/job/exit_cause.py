"""Finds out why a job ended: its command was not found, or the kernel killed it because memory ran out."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from ringtap.collectors.kernel_files import CGROUP_ROOT, PROC, memory_groups, text_of
from ringtap.core.terminal_escaping import one_line
from ringtap.core.units import counted, format_size

CANNOT_RUN = (126, 127)  # exit codes of shells, and of ringtap: a command is not executable, or was not found
KILLED = 128 + signal.SIGKILL
POSSIBLE_CAUSE = "out of memory is one possible cause"
SHELL_CAUSE = "a shell's exit code for a command that it cannot run"


class MemoryKills:
    """The processes that the kernel kills because memory ran out, in this control group and on the machine.

    It counts from now on.

    Args:
        proc: where the kernel describes this process and the machine.
        cgroups: where it shows the control groups, of version 2 or 1.
    """

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUP_ROOT) -> None:
        self._groups = memory_groups(proc / "self" / "cgroup", cgroups)
        self._files = [*(folder / events for folder, events, _ in self._groups), proc / "vmstat"]
        self._before = [_oom_kills(file) for file in self._files]

    def words(self) -> str:
        """Return a clause about the processes killed so far; empty if there are none."""
        pairs = zip(self._before, map(_oom_kills, self._files), strict=True)
        grown = [0 if before is None or now is None else now - before for before, now in pairs]
        for (folder, _, limit), count in zip(self._groups, grown, strict=False):
            if count > 0:
                text = text_of(folder / limit)
                size = f", which may use {format_size(int(text))}," if text.isdigit() and int(text) < 1 << 60 else ""
                return f"the kernel killed {_processes(count)} of its control group{size} because memory ran out"
        if grown[-1] > 0:
            return f"while it ran, the kernel killed {_processes(grown[-1])} on this machine because memory ran out"
        return ""


def _processes(count: int) -> str:
    return counted(count, "process", "processes")


def _oom_kills(file: Path) -> int | None:
    """Return the number of processes that were killed, by one of the kernel's files; None if it does not say so."""
    lines = [line.split() for line in text_of(file).splitlines() if line.startswith("oom_kill ")]
    return int(lines[0][1]) if lines and lines[0][1:] and lines[0][1].isdigit() else None


class ExitCause:
    """Cause of a command's end, as far as its exit code and the kernel's counters say it.

    Args:
        command: the command, which has just begun, and its arguments.
        environment: its environment.
        kills: the processes that the kernel kills from now on.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], kills: MemoryKills) -> None:
        self._command, self._path, self._kills = command, environment.get("PATH"), kills

    def words(self, code: int) -> str:
        """Return the cause in a clause; empty if nothing but the exit code is known.

        Args:
            code: the exit code; below 0, the negative number of the signal that ended the command.
        """
        if code in (KILLED, -signal.SIGKILL):
            return self._kills.words() or POSSIBLE_CAUSE
        return self.obstacle(code) or (SHELL_CAUSE if code in CANNOT_RUN else "")

    def obstacle(self, code: int) -> str:
        """Return why the command could not be started; empty if it was."""
        if code not in CANNOT_RUN:
            return ""
        name = one_line(self._command[0])
        if shutil.which(self._command[0], os.F_OK, self._path) is None:
            return f"{name} was not found"
        program = shutil.which(self._command[0], os.X_OK, self._path)
        if program is None:
            return f"{name} is not executable (chmod +x)"
        return f"{name} is neither a program nor a script that begins with #!" if _is_text(Path(program)) else ""


def _is_text(program: Path) -> bool:
    """Return True if the kernel knows no way to run a file: it has no interpreter and is no ELF program."""
    try:
        with program.open("rb") as file:
            return not file.read(4).startswith((b"#!", b"\x7fELF"))
    except OSError:
        return False
