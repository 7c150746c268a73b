"""Finds the Python processes of a job that did not load the recorder of steps, and why they did not.

The recorder notes the processes that import torch or Horovod in a file of the node's folder. A process that runs torch
and is not noted has missed it. Why is read from its command line and environment.

A look costs a read of ``/proc/PID/stat`` per process, about 15 µs. ``/proc/PID/maps`` takes about 1 ms, and is read
only for Python processes that are not noted, each time that their CPU time has doubled. Of other users' processes
nothing but ``stat`` is read.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ringtap.collectors.kernel_files import PROC
from ringtap.collectors.process_facts import command_of
from ringtap.core.run_directory_schema import HOOK_LOADED, INNER_RUNS
from ringtap.core.units import counted
from ringtap.core.untrusted_files import open_file, read_whole

_PYTHON = re.compile(r"(?:python|pypy)([0-9.]*)t?d?")
_SHORT_OPTIONS = re.compile(r"-[A-Za-z?]\S*")
_FLAGS = re.compile(r"([^cmWX]*)(.*)", re.DOTALL)  # flags, then an option that takes the rest or the next word
_HOOKLESS = {"I", "E", "S"}
_LIBRARIES = (b"/libtorch", b"/horovod/")  # in the paths of mapped files
_LIBRARY_FOLDER = re.compile(rb"/python(\d)\.(\d+)/")
_OLDEST = (3, 7)  # that can load the recorder
_SUPPORTED = "3.8"
_MIN_CPU_S = 0.5  # importing torch takes more
_UNCERTAIN_S = 10.0  # a process that imports torch is noted within this time, unless it has missed the recorder
_FIRST_LOOKS_S, _EARLY_S, _LATE_S = 60.0, 1.0, 10.0  # at first, and later, the time between two looks
_MAX_KEPT = 1000
_MAX_PATH_CHARACTERS = 300  # of a PYTHONPATH that a remedy repeats
_MAX_SHOWN = 3
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_WITHOUT_FLAGS = "start Python without -I, -E and -S"
_UNCERTAIN = "did not load ringtap's recorder, and why is not certain"
_CHECK_PATH = "make sure that no other sitecustomize.py comes before that of ringtap on its PYTHONPATH"
_KEEP_VARIABLES = "leave PYTHONPATH and the variables that begin with RINGTAP_ in its environment"


class Obstacle(NamedTuple):
    """A reason why a process is not recorded, as a predicate of the process, and a remedy.

    Attributes:
        why: the reason, such as ``was started with -I``.
        remedy: what to do.
        other_run: the run directory that the process is recorded in; empty for none.
    """

    why: str
    remedy: str
    other_run: str = ""


def command_obstacle(command: Sequence[str]) -> Obstacle | None:
    """The part of a command line that keeps Python from loading the recorder; None if none does."""
    for number, word in enumerate(command):
        name, options = Path(word).name, command[number + 1 :]
        if name == "env" and any(option in ("-", "-i", "--ignore-environment") for option in options[:1]):
            return Obstacle(f"was started by env {options[0]}, which empties its environment", _KEEP_VARIABLES)
        if not _PYTHON.fullmatch(name):
            continue
        is_argument = False  # True if the word belongs to the option before it
        for option in options:
            if not is_argument and not _SHORT_OPTIONS.fullmatch(option):
                break
            flags, rest = ("", "") if is_argument else _FLAGS.fullmatch(option[1:]).groups()  # type: ignore[union-attr]
            is_argument = rest in ("W", "X")
            if found := set(flags) & _HOOKLESS:
                why = f"was started with -{min(found)}, which keeps it from loading ringtap's recorder"
                return Obstacle(why, _WITHOUT_FLAGS)
            if rest[:1] in ("c", "m"):
                break
    return None


def environment_obstacle(environment: Mapping[str, str], hook: str, run: str) -> Obstacle | None:
    """Find what keeps a process from loading the recorder, by its environment; None if nothing does.

    Args:
        environment: of the process, when it was started.
        hook: the recorder's folder.
        run: the run directory.
    """
    if "RINGTAP_RUN" not in environment:
        return Obstacle("was started in another environment, without RINGTAP_RUN (env -i, sudo)", _KEEP_VARIABLES)
    other = environment["RINGTAP_RUN"]
    if other.rstrip("/") != run:
        return Obstacle(f"is recorded in another run, {other}", f"analyze that run: {other}", other)
    paths = environment.get("PYTHONPATH", "")
    if hook in (path.rstrip("/") for path in paths.split(os.pathsep)):
        return None
    if not paths:
        return Obstacle("has no PYTHONPATH, through which it would load ringtap's recorder", _KEEP_VARIABLES)
    shown = paths if len(paths) <= _MAX_PATH_CHARACTERS else "FOLDERS"
    why = f"has a PYTHONPATH without the folder of ringtap's recorder: {shown}"
    return Obstacle(why, f"extend PYTHONPATH instead of replacing it: export PYTHONPATH={shown}:$PYTHONPATH")


def version_obstacle(version: tuple[int, ...]) -> Obstacle | None:
    """The version of an interpreter, if it is too old for the recorder."""
    if not version or version >= _OLDEST[: len(version)]:
        return None
    shown = ".".join(map(str, version[:2]))
    return Obstacle(f"is Python {shown}, which is too old for ringtap's recorder", f"use Python {_SUPPORTED} or later")


@dataclass
class Missed:
    """A process that did not load the recorder, or that is not known to have loaded it.

    Attributes:
        pid: its pid.
        command: its command line, shortened; for another user's process, its name.
        obstacle: why it did not; None if that is not known.
        cpu_s: CPU time that it was last seen to have used.
        has_torch: whether it loaded torch or Horovod.
        user: the other user that it belongs to; empty for this one.
    """

    pid: int
    command: str
    obstacle: Obstacle | None = None
    cpu_s: float = 0.0
    has_torch: bool = False
    user: str = ""


@dataclass
class _Row:
    """Facts about one process."""

    started: bytes
    name: bytes = b""
    looks: int = 0  # with this name
    missed: Missed | None = None
    is_hooked: bool = False
    next_cpu_s: float = _MIN_CPU_S
    torch_since_s: float = 0.0


class UnrecordedProcesses:
    """The processes of a job that did not load the recorder; `look` finds them, `report` describes them.

    Args:
        folder: the node's folder, where the recorder notes processes.
        run: the run directory.
        hook: the recorder's folder.
    """

    def __init__(self, folder: Path, run: Path, hook: Path) -> None:
        self._folder, self._run, self._hook = folder, str(run), str(hook)
        self._rows: dict[int, _Row] = {}
        self._kept: list[Missed] = []
        self._most_cpu_s = 0.0  # of a Python process without an obstacle
        self._began_s = time.monotonic()
        self._due_s = 0.0

    def is_due(self) -> bool:
        """True if it is time for another look."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + (_EARLY_S if now_s - self._began_s < _FIRST_LOOKS_S else _LATE_S)
        return True

    def look(self, pids: Iterable[int], proc: Path = PROC) -> list[Missed]:
        """Look at the job's processes; returns those that were now found to have an obstacle."""
        rows, found = {}, []
        hooked: set[int] | None = None
        for pid in pids:
            try:
                name, started, parent, cpu_s = _stat(pid, proc)
            except (OSError, ValueError, IndexError):
                continue
            row = self._rows.get(pid)
            if row is None or row.started != started:
                row = _Row(started)
            rows[pid] = row
            if row.is_hooked and row.missed:
                row.missed.cpu_s = cpu_s
                continue
            if row.name != name:  # it is new, or has executed another program
                row.name, row.looks, row.next_cpu_s = name, 0, _MIN_CPU_S
            if row.looks < 2:  # at the first look it may not have executed its program yet
                row.looks += 1
                before = row.missed
                row.missed = self._examine(pid, name, proc)
                if row.missed and before and row.missed.command == before.command:
                    row.missed.has_torch = before.has_torch
                elif row.missed and row.missed.obstacle:
                    found.append(row.missed)
            if row.missed is None:
                continue
            row.missed.cpu_s = cpu_s
            if row.missed.user:
                continue
            hooked = self._noted() if hooked is None else hooked
            is_fork = parent in rows and rows[parent].is_hooked and row.missed.obstacle is None
            row.is_hooked = is_fork or not hooked.isdisjoint(_numbers(pid, proc))
            if not row.is_hooked and not row.missed.has_torch and cpu_s >= row.next_cpu_s:
                row.next_cpu_s = 2 * cpu_s
                self._look_at_maps(pid, row, proc)
        self._keep(row for pid, row in self._rows.items() if rows.get(pid) is not row)
        self._rows = rows
        return found

    def report(self, recorded: Iterable[int]) -> list[Missed]:
        """Return the processes to report at the end; those that loaded torch first, then those that used more CPU time.

        Without torch, those that used less than another Python process without an obstacle are left out.

        Args:
            recorded: processes that recorded steps.
        """
        self._keep(self._rows.values())
        self._rows = {}
        noted = self._noted() | set(recorded)
        kept = [
            each for each in self._kept if each.pid not in noted and (each.has_torch or each.cpu_s >= self._most_cpu_s)
        ]
        return sorted(kept, key=lambda each: (each.has_torch, each.obstacle is not None, each.cpu_s), reverse=True)

    def _keep(self, rows: Iterable[_Row]) -> None:
        now_s = time.monotonic()
        for row in rows:
            missed = row.missed
            if missed and (row.is_hooked or not (missed.obstacle or missed.user or missed.has_torch)):
                self._most_cpu_s = max(self._most_cpu_s, missed.cpu_s)
            if missed is None or row.is_hooked:
                continue
            is_uncertain = missed.has_torch and now_s - row.torch_since_s >= _UNCERTAIN_S
            if missed.obstacle or is_uncertain or (missed.user and missed.cpu_s >= _MIN_CPU_S):
                self._kept.append(missed)
        if len(self._kept) > _MAX_KEPT:
            self._kept.sort(key=lambda each: (each.has_torch, each.cpu_s), reverse=True)
            del self._kept[_MAX_KEPT // 2 :]

    def _noted(self) -> set[int]:
        """Processes that the recorder has noted, by the numbers that they have themselves."""
        try:
            words = read_whole(self._folder / HOOK_LOADED).split()
        except OSError:
            return set()
        return {int(word) for word in words if word.isdigit()}

    def _examine(self, pid: int, name: bytes, proc: Path) -> Missed | None:
        """Read why a process of Python cannot load the recorder; None if it is not Python."""
        folder = proc / str(pid)
        try:
            if (owner := folder.stat().st_uid) != os.geteuid():
                shown = name.decode(errors="replace")
                return Missed(pid, shown, user=_user(owner)) if _PYTHON.fullmatch(shown) else None
            program = _PYTHON.fullmatch((folder / "exe").readlink().name)
            if not program:
                return None
            words = [os.fsdecode(word) for word in (folder / "cmdline").read_bytes().split(b"\0")]
            if words == [""]:  # the kernel still loads the program, or the process has ended
                return None
            variables = [os.fsdecode(text) for text in (folder / "environ").read_bytes().split(b"\0")]
        except OSError:
            return None
        environment = dict(variable.partition("=")[::2] for variable in variables)
        version = tuple(int(word) for word in program[1].split(".") if word)
        obstacle = (
            command_obstacle(words)
            or environment_obstacle(environment, self._hook, self._run)
            or version_obstacle(version)
        )
        return Missed(pid, command_of(pid, proc), obstacle)

    def _look_at_maps(self, pid: int, row: _Row, proc: Path) -> None:
        """Note whether a process has loaded torch, and what else may keep it from loading the recorder."""
        assert row.missed
        try:
            maps = (proc / str(pid) / "maps").read_bytes()
        except OSError:
            return
        if not any(library in maps for library in _LIBRARIES):
            return
        row.missed.has_torch, row.torch_since_s = True, time.monotonic()
        if row.missed.obstacle is None:
            folder = _LIBRARY_FOLDER.search(maps)
            version = (int(folder[1]), int(folder[2])) if folder else ()
            row.missed.obstacle = version_obstacle(version)
        if row.missed.obstacle is None and not (proc / str(pid) / "root" / self._hook[1:]).exists():
            why = f"does not see the folder of ringtap's recorder, {self._hook} (a container)"
            row.missed.obstacle = Obstacle(why, "make this folder and the run directory visible in the container")


def _stat(pid: int, proc: Path) -> tuple[bytes, bytes, int, float]:
    """Name, start time, parent and CPU seconds of a process.

    Raises:
        OSError: there is none.
        ValueError, IndexError: the file is not as expected.
    """
    text = (proc / str(pid) / "stat").read_bytes()
    begin, end = text.index(b"(") + 1, text.rindex(b")")
    words = text[end + 1 :].split()
    return text[begin:end], words[19], int(words[1]), (int(words[11]) + int(words[12])) / _TICKS_PER_S


def _numbers(pid: int, proc: Path) -> set[int]:
    """The pids of a process in all PID namespaces that it is in; a container's processes know only their own."""
    found = {pid}
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / str(pid) / "status").read_text(errors="replace").splitlines():
            if line.startswith("NSpid:"):
                found |= set(map(int, line.split()[1:]))
    return found


def _user(number: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return str(number)


def describe(found: Sequence[Missed]) -> tuple[str, str]:
    """Reason and remedy for processes that were not recorded: a sentence for each obstacle, with its first process."""
    groups: dict[tuple[Obstacle | None, str], list[Missed]] = {}
    for each in found:
        groups.setdefault((each.obstacle, each.user), []).append(each)
    reasons, remedies = [], []
    for (obstacle, user), members in list(groups.items())[:_MAX_SHOWN]:
        first, others = members[0], len(members) - 1
        like = f", like {counted(others, 'other')}," if others else ""
        who = f"process {first.pid} ({first.command}){like}"
        if user:
            reasons.append(f"{who} belongs to user {user}, and ringtap does not look into it")
            remedies.append("if sudo starts it, put ringtap run behind sudo: sudo ringtap run -- …")
            continue
        torch = "loaded torch and " if first.has_torch else ""
        reasons.append(f"{who} {torch}{obstacle.why if obstacle else _UNCERTAIN}")
        remedies.append(obstacle.remedy if obstacle else _CHECK_PATH)
    more = "; …" if len(groups) > _MAX_SHOWN else ""
    return "; ".join(reasons) + more, "; ".join(dict.fromkeys(remedies))


def inner_runs(folder: Path) -> list[str]:
    """Run directories of ``ringtap run`` commands within the job, as they noted them in the node's folder."""
    try:
        lines = read_whole(folder / INNER_RUNS).splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(os.fsdecode(line) for line in lines if line))


def note_inner_run(environment: Mapping[str, str], run: Path) -> None:
    """Note a run for the run around it, whose steps it takes over; errors are ignored.

    Args:
        environment: of the command that makes the inner run; it names the outer run.
        run: the inner run directory.
    """
    outer, host = environment.get("RINGTAP_RUN", ""), os.uname().nodename
    is_supervised = environment.get("RINGTAP_HOST", host) == host
    folder = Path(outer, "nodes", environment.get("RINGTAP_NODE", host) if is_supervised else host)
    if not outer or outer.rstrip("/") == str(run) or not folder.is_dir():
        return
    with contextlib.suppress(OSError):
        fd = open_file(folder / INNER_RUNS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(fd, os.fsencode(str(run)) + b"\n")
        finally:
            os.close(fd)
