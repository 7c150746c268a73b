"""Runs the checks of collectors, node and installed software for ``ringtap doctor``, each task in its own process.

A check that raises, hangs or crashes its process affects only its own lines of the result. Nothing is written to disk.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import platform
import resource
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ringtap
from ringtap.agents.doctor import job_interpreter as doctor_job
from ringtap.agents.doctor import node_checks as doctor_node
from ringtap.agents.doctor.node_checks import on_alliance
from ringtap.collectors.collector_interface import Check, Context
from ringtap.collectors.process_facts import user_name
from ringtap.collectors.registry import ORDER, collector_class
from ringtap.core.errors import RingtapError, UsageError
from ringtap.core.installation import install_command
from ringtap.core.parent_death import die_with_parent
from ringtap.core.run_directory_schema import CROSS_PORTS


def _missing(packages: tuple[str, ...]) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


def live(_runs: Path) -> Check:
    """Check that the packages of the live view are installed."""
    missing = _missing(("textual", "rich"))
    if missing:
        remedy = "pip install --no-index textual rich" if on_alliance() else install_command("tui")
        return Check("degraded", f"no {', '.join(missing)}: ringtap live --plain alone", remedy)
    return Check("ok", "ringtap live")


def analysis(_runs: Path) -> Check:
    """Check that the packages of the analysis are installed."""
    missing = _missing(("numpy", "pandas", "pyarrow", "scipy"))
    if missing:
        remedy = (
            "module load gcc arrow for pyarrow, pip install --no-index numpy pandas scipy"
            if on_alliance()
            else f"{install_command('report')}, here or where the run directory is copied to"
        )
        return Check("unavailable", f"no {', '.join(missing)}: runs are recorded, not analyzed here", remedy)
    return Check("ok", "ringtap analyze, report, fit")


def testbed(_runs: Path) -> Check:
    """Check that a testbed's namespaces and links can be created; they are removed when the calling process ends."""
    from ringtap.agents.testbed import namespaces

    try:
        namespaces.isolate(namespaces.NEWNET | namespaces.NEWNS | namespaces.NEWPID | namespaces.NEWUTS)
    except RingtapError as error:
        return Check("unavailable", str(error).partition(": ")[0], str(error).partition(": ")[2])
    try:
        from pyroute2 import IPRoute, NetlinkError
    except ImportError:
        return Check("unavailable", "no pyroute2", install_command())
    with IPRoute() as netlink:
        for kind, module, action in (
            ("veth", "veth", lambda: netlink.link("add", ifname="doctor0", kind="veth", peer={"ifname": "doctor1"})),
            ("bridge", "bridge", lambda: netlink.link("add", ifname="doctor2", kind="bridge")),
            ("tbf", "sch_tbf", lambda: _limit(netlink)),
        ):
            try:
                action()
            except NetlinkError as error:
                remedy = f"modprobe {module}, or another kernel"
                return Check("unavailable", f"this kernel makes no {kind}: {error}", remedy)
    return Check("ok", "network namespaces, links and rate limits can be made")


def _limit(netlink: object) -> None:
    index = netlink.link_lookup(ifname="doctor0")[0]  # type: ignore[attr-defined]
    netlink.tc("add", "tbf", index, rate=1_000_000, burst=65_536, limit=400_000)  # type: ignore[attr-defined]


def traffic(_runs: Path) -> Check:
    """Check that the usual ports of the traffic generators are free."""
    return traffic_on(CROSS_PORTS)


def traffic_on(ports: tuple[int, ...]) -> Check:
    """Check that TCP ports are free."""
    taken = []
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            try:
                sock.bind(("0.0.0.0", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    return Check("unavailable", f"no TCP socket can be bound: {error.strerror}", "leave the sandbox")
                taken.append(str(port))
    if taken:
        remedy = "ss -ltnp shows who listens; or ringtap traffic serve --bind HOST:PORT with another"
        return Check("degraded", f"TCP port {', '.join(taken)} is in use", remedy)
    return Check("ok", f"ringtap traffic; TCP ports {' and '.join(str(port) for port in ports)} are free")


def iperf3(_runs: Path) -> Check:
    """Check that iperf3 is installed."""
    program = shutil.which("iperf3")
    if program is None:
        remedy = "module load iperf3 if the site has it, or" if on_alliance() else "install iperf3, or"
        return Check("unavailable", "iperf3 is not on the PATH", f"{remedy} plan no traffic of the kind iperf")
    return Check("ok", program)


CHECKS: tuple[tuple[str, Callable[[Path], Check]], ...] = (
    ("live", live),
    ("analysis", analysis),
    ("testbed", testbed),
    ("traffic", traffic),
    ("iperf3", iperf3),
)


# All checks run at once, mostly within 2 s, but a busy node or a cold network file system takes longer.
TIMEOUT_S = 9.0  # a check without an answer by then tells nothing
# a job can be recorded if these checks are ok or degraded
NEEDED = ("steps", "nic")


@dataclass(frozen=True)
class Task:
    """Checks that run in one process.

    Attributes:
        group: heading under which they are shown.
        names: names of the checks, in the order of the result.
        work: runs the checks and returns them by name.
    """

    group: str
    names: tuple[str, ...]
    work: Callable[[], dict[str, Check]]


@dataclass(frozen=True)
class CheckResult:
    """Result of one check.

    Attributes:
        group: heading under which it is shown.
        name: name of the collector, or of another check.
        state: ``ok``, ``degraded``, ``unavailable``, or ``failed`` if the check itself failed.
        reason: what was found, or what is missing.
        remedy: what to do about it; empty if nothing is missing.
    """

    group: str
    name: str
    state: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class Question:
    """Parameters of the checks.

    Attributes:
        runs: folder in which run directories would be made.
        python: the job's interpreter; empty: the one on the PATH.
        collectors: plug-ins to check, by name or as ``module:Class``.
    """

    runs: Path = Path("runs")
    python: str = ""
    collectors: tuple[str, ...] = ()


def tasks(question: Question) -> list[Task]:
    """Return all tasks, in the order of the result."""
    probe = Task("collectors", doctor_job.NAMES, lambda: doctor_job.check(question.python))
    collectors = [
        Task("collectors", (name,), _collector_check(name, question.runs)) for name in (*ORDER, *question.collectors)
    ]
    node = [Task(group, (name,), _single(name, work, question.runs)) for group, name, work in doctor_node.CHECKS]
    software = [Task("software", (name,), _single(name, work, question.runs)) for name, work in CHECKS]
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
        except UsageError as error:
            return {name: Check("failed", str(error))}
        return {name: collector.check()}

    return work


def diagnose(question: Question, chosen: Sequence[Task] | None = None) -> dict[str, Any]:
    """Run all checks, or the given tasks.

    Returns:
        ``ringtap``, ``host``, ``user``, ``uid``, ``kernel``, ``python``, ``t_ns``, ``duration_s``, ``recordable``
        (steps and interface counters can be recorded) and ``checks``, a list of `CheckResult` as plain data.
    """
    began_s = time.monotonic()
    findings = run_apart(tasks(question) if chosen is None else chosen, TIMEOUT_S)
    states = {finding.name: finding.state for finding in findings}
    return {
        "ringtap": ringtap.__version__,
        "host": platform.node(),
        "user": user_name(),
        "uid": os.geteuid(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "t_ns": time.time_ns(),
        "duration_s": round(time.monotonic() - began_s, 3),
        "recordable": all(states.get(name) in ("ok", "degraded") for name in NEEDED),
        "checks": [asdict(finding) for finding in findings],
    }


class _TaskProcess:
    """A task in its own process, which returns its result through a pipe."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.answer = b""
        self.reader, writer = os.pipe()
        end_with_doctor = die_with_parent()
        # Python prints and ignores a KeyboardInterrupt in what it calls around a fork
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.pid = os.fork()
        except OSError:
            os.close(self.reader)
            os.close(writer)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self.pid == 0:
            end_with_doctor()
            self._run_child(writer)
        os.close(writer)

    def _run_child(self, writer: int) -> None:
        """Run the checks, send their result and exit; runs in the child. What the checks print is discarded."""
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
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

    def end(self, late_s: float | None = None) -> list[CheckResult]:
        """Kill the process group of the task and return its findings; it has not answered in so much time if given."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.reader)
        if late_s is not None:
            return broken(self.task, f"the check did not answer within {late_s:g} s")
        try:
            answer = json.loads(self.answer)
        except ValueError:
            how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "no answer"
            return broken(self.task, f"the check broke down: {how}")
        if "broken" in answer:
            return broken(self.task, f"the check broke down: {answer['broken']}")
        return [CheckResult(self.task.group, name, **check) for name, check in answer.items()]


def broken(task: Task, reason: str) -> list[CheckResult]:
    """Return the findings of a task whose checks gave no result."""
    return [CheckResult(task.group, name, "failed", reason, "") for name in task.names]


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def run_apart(chosen: Sequence[Task], timeout_s: float) -> list[CheckResult]:
    """Run tasks in parallel, each in its own process, for at most the given number of seconds."""
    running: list[_TaskProcess] = []
    results: dict[int, list[CheckResult]] = {}
    with selectors.DefaultSelector() as selector:
        for number, task in enumerate(chosen):
            try:
                running.append(_TaskProcess(task))
            except OSError as error:
                results[number] = broken(task, f"no process for the check: {error.strerror}")
                continue
            selector.register(running[-1].reader, selectors.EVENT_READ, (number, running[-1]))
        end_s = time.monotonic() + timeout_s
        while selector.get_map() and (left_s := end_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                number, process = key.data
                data = os.read(process.reader, 65536)
                process.answer += data
                if not data:
                    selector.unregister(process.reader)
                    results[number] = process.end()
        for key in list(selector.get_map().values()):
            number, process = key.data
            results[number] = process.end(late_s=timeout_s)
    return [finding for number in range(len(chosen)) for finding in results[number]]
