"""What can be recorded here: checks of a node, a user and a job environment, each in a process of its own.

A check that raises, hangs or takes its process down costs one line of the result. Nothing is written to disk.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import platform
import resource
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ringtap
from ringtap.agents.doctor import job as doctor_job
from ringtap.agents.doctor import node as doctor_node
from ringtap.agents.doctor import software as doctor_software
from ringtap.collectors.base import Check, Context
from ringtap.collectors.registry import ORDER, collector_class

LONGEST_S = 2.2  # all checks run at once; whoever needs longer is not waited for
# without these a recording says nothing of a job
NEEDED = ("steps", "nic")


@dataclass(frozen=True)
class Task:
    """Checks that one process makes.

    Attributes:
        group: heading they are shown under.
        names: what they are of, in the order of the result.
        work: makes them.
    """

    group: str
    names: tuple[str, ...]
    work: Callable[[], dict[str, Check]]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        group: heading it is shown under.
        name: collector, or what else was looked at.
        state: ``ok``, ``degraded``, ``unavailable``, or ``failed`` where the check itself broke.
        reason: what was found, or what is missing.
        remedy: what to do about it; empty where nothing is missing.
    """

    group: str
    name: str
    state: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class Question:
    """What the doctor is asked about.

    Attributes:
        runs: folder that run directories would be made in.
        python: the job's interpreter; empty: the one on the PATH.
    """

    runs: Path = Path("runs")
    python: str = ""


def tasks(question: Question) -> list[Task]:
    """Every check there is, in the order of the result."""
    probe = Task("collectors", doctor_job.NAMES, lambda: doctor_job.check(question.python))
    collectors = [Task("collectors", (name,), _collector_check(name, question.runs)) for name in ORDER]
    node = [Task(group, (name,), _single(name, work, question.runs)) for group, name, work in doctor_node.CHECKS]
    software = [Task("software", (name,), _single(name, work, question.runs)) for name, work in doctor_software.CHECKS]
    return [probe, *collectors, *node, *software]


def _single(name: str, work: Callable[[Path], Check], runs: Path) -> Callable[[], dict[str, Check]]:
    return lambda: {name: work(runs)}


def _collector_check(name: str, runs: Path) -> Callable[[], dict[str, Check]]:
    def work() -> dict[str, Check]:
        try:
            collector = collector_class(name)(Context(runs / "node", 0.1))
        except ImportError as error:
            package = (error.name or "").partition(".")[0]
            if package == "ringtap":
                return {
                    name: Check("unavailable", f"this version of ringtap has no {name} collector", "upgrade ringtap")
                }
            return {name: Check("unavailable", f"a package is missing: {error}", doctor_node.install_hint(package))}
        return {name: collector.check()}

    return work


def diagnose(question: Question, chosen: Sequence[Task] | None = None) -> dict[str, Any]:
    """Make every check.

    Returns:
        ``ringtap``, ``host``, ``user``, ``uid``, ``kernel``, ``python``, ``t_ns``, ``duration_s``, ``recordable``
        (steps and interface counters can be had) and ``checks``, a list of `Finding` as plain data.
    """
    began_s = time.monotonic()
    findings = run_apart(tasks(question) if chosen is None else chosen, LONGEST_S)
    states = {finding.name: finding.state for finding in findings}
    return {
        "ringtap": ringtap.__version__,
        "host": platform.node(),
        "user": _user(),
        "uid": os.geteuid(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "t_ns": time.time_ns(),
        "duration_s": round(time.monotonic() - began_s, 3),
        "recordable": all(states.get(name) in ("ok", "degraded") for name in NEEDED),
        "checks": [asdict(finding) for finding in findings],
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without an entry, in a bare environment
        return str(os.geteuid())


class _Apart:
    """A task in a process of its own, which answers through a pipe."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.answer = b""
        self.reader, writer = os.pipe()
        try:
            self.pid = os.fork()
        except OSError:
            os.close(self.reader)
            os.close(writer)
            raise
        if self.pid == 0:
            self._be_the_child(writer)
        os.close(writer)

    def _be_the_child(self, writer: int) -> None:
        """Make the checks and end without a trace, whatever they do."""
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            quiet = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):  # libraries that talk
                os.dup2(quiet, fd)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            answer = json.dumps({name: asdict(check) for name, check in self.task.work().items()})
        except BaseException as error:
            answer = json.dumps({"broken": _one_line(error)})
        with contextlib.suppress(OSError):
            data = answer.encode()
            while data:
                data = data[os.write(writer, data) :]
        os._exit(0)

    def end(self, late: bool) -> list[Finding]:
        """Take the process away, with what it started; returns its findings."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.reader)
        if late:
            return self._failed(f"the check did not answer within {LONGEST_S:g} s")
        try:
            answer = json.loads(self.answer)
        except ValueError:
            how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "no answer"
            return self._failed(f"the check broke down: {how}")
        if "broken" in answer:
            return self._failed(f"the check broke down: {answer['broken']}")
        return [Finding(self.task.group, name, **check) for name, check in answer.items()]

    def _failed(self, reason: str) -> list[Finding]:
        return broken(self.task, reason)


def broken(task: Task, reason: str) -> list[Finding]:
    """The findings of a task whose checks gave no answer."""
    return [Finding(task.group, name, "failed", reason, "") for name in task.names]


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def run_apart(chosen: Sequence[Task], longest_s: float) -> list[Finding]:
    """Run tasks at once, each in a process of its own, for so long at most."""
    running: list[_Apart] = []
    results: dict[int, list[Finding]] = {}
    with selectors.DefaultSelector() as selector:
        for number, task in enumerate(chosen):
            try:
                running.append(_Apart(task))
            except OSError as error:
                results[number] = broken(task, f"no process for the check: {error.strerror}")
                continue
            selector.register(running[-1].reader, selectors.EVENT_READ, (number, running[-1]))
        end_s = time.monotonic() + longest_s
        while selector.get_map() and (left_s := end_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                number, apart = key.data
                data = os.read(apart.reader, 65536)
                apart.answer += data
                if not data:
                    selector.unregister(apart.reader)
                    results[number] = apart.end(late=False)
        for key in list(selector.get_map().values()):
            number, apart = key.data
            results[number] = apart.end(late=True)
    return [finding for number in range(len(chosen)) for finding in results[number]]
