"""Sends signals to each process of ringtap and checks what they leave: SIGKILL, SIGTERM, SIGHUP, SIGINT, a stop of 2 s.

python -m tests.testbed.signal_cases [-o FILE]                                       175 cases; an hour
python -m tests.testbed.signal_cases --only run --target agent --signal KILL         one case

In each case, a scenario is started afresh, and one of its processes gets one signal. Then the job must have ended as
without ringtap and have heard no other signal than its own, the run must be readable and say truly how it ended, and no
process, socket or testbed may be left. The table counts the cases and lists what fell short; the exit code is 1 if
something did. Nothing is timed, so other programs may use the machine meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from ringtap.agents.testbed import registry
from ringtap.core.append_only_logs import open_records
from ringtap.core.errors import MeasurementError
from ringtap.core.run_directory import read_json
from ringtap.core.run_directory_schema import NODE, NODE_JSON, RUN_JSON
from ringtap.core.terminal_escaping import as_command
from tests.unit.agent_processes import ROOT

RINGTAP = [sys.executable, "-m", "ringtap.cli"]
SIGNALS = ("KILL", "TERM", "HUP", "INT", "STOP")
CODE, STEPS, STEP_S = 7, 80, 0.05
_STOP_S, _END_S, _LEFT_S = 2.0, 240.0, 15.0
_GAP_S = 1.0  # longest time between the last sample and the end of the job in a recording that is complete
_BASIC = ("--collect", "nic,steps")
_TOKEN = "RINGTAP_KILLS"  # environment variable by which processes are found

JOB = f"""
import collections, json, os, signal, sys, time, ringtap
heard = collections.Counter()
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCONT):
    signal.signal(number, lambda number, _: heard.update([signal.Signals(number).name[3:]]))
for step in range({STEPS}):
    until = time.monotonic() + {STEP_S}
    while (left := until - time.monotonic()) > 0:
        time.sleep(left)
    ringtap.step()
with open(sys.argv[1] + ".new", "w") as file:
    json.dump(dict(heard), file)
os.rename(sys.argv[1] + ".new", sys.argv[1])
sys.exit({CODE})
"""
RANKS = """
import torch, torch.distributed as dist, time
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(60):
    model(torch.randn(8, 100)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
"""
MARKS = "import ringtap, time\nwhile True: time.sleep(0.05); ringtap.step()"
PLAN = f"""
[sweep]
name = "kills"
scale = 500
loads = [0, 0.5]
traffic = ["burst"]
[window]
warmup_iterations = 2
settle = "200ms"
min_time = "2s"
min_iterations = 5
max_time = "10s"
[[models]]
name = "marks"
parameters = 1
command = {json.dumps([sys.executable, "-c", MARKS])}
"""
TESTBED = """
import sys
from contextlib import suppress
from ringtap.agents.testbed.start_testbed import testbed
with testbed("A,B", "100mbit", name=sys.argv[1]) as built, suppress(KeyboardInterrupt):
    print("up", flush=True)
    sys.stdin.read()
"""


class KillsError(MeasurementError):
    """A scenario that did not begin; one sentence."""


@dataclass
class Box:
    """One case: a folder, and the processes that were started in it.

    Attributes:
        folder: folder of its files.
        token: value of the variable that all its processes have.
        roots: processes that end by themselves.
        servers: processes that are asked to end after the others.
        has_begun: the scenario has begun: its processes may end.
    """

    folder: Path
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    roots: list[subprocess.Popen[str]] = field(default_factory=list)
    servers: list[subprocess.Popen[str]] = field(default_factory=list)
    has_begun: bool = False

    @property
    def run(self) -> Path:
        """The run directory, if the scenario has one."""
        return self.folder / "run"

    @property
    def testbed(self) -> str:
        """The name of its testbed, if it has one."""
        return f"k{self.token[:6]}"

    @property
    def runtime(self) -> Path:
        """The folder for locks and sockets."""
        return self.folder / "runtime"

    def start(self, *words: object, is_server: bool = False, **options: Any) -> subprocess.Popen[str]:
        """Start a process in a group of its own, as a shell does, with its output in files."""
        number = len(self.roots) + len(self.servers)
        options = {"stdin": subprocess.DEVNULL} | options
        self.runtime.mkdir(mode=0o700, exist_ok=True)
        environment = os.environ | {_TOKEN: self.token, "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(self.runtime)}
        environment |= options.pop("env", {})
        with (self.folder / f"{number}.out").open("wb") as out, (self.folder / f"{number}.err").open("wb") as err:
            process = subprocess.Popen(
                list(map(str, words)), stdout=out, stderr=err, text=True, process_group=0, env=environment, **options
            )
        (self.servers if is_server else self.roots).append(process)
        return process

    def errors(self) -> str:
        """Return what its processes have printed as errors."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.err")))

    def processes(self) -> list[psutil.Process]:
        """Return all its processes that live."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                mark = f"{_TOKEN}={self.token}".encode()
                if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    found.append(process)
        return found

    def find(self, *words: str, name: str = "", above: int = 0) -> psutil.Process | None:
        """Return its oldest process with these words in its command line, this name and this parent."""
        for process in sorted(self.processes(), key=lambda process: process.pid):
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                is_found = all(word in line for word in words) and name in process.name()
                if is_found and above in (0, process.ppid()):
                    return process
        return None

    def await_it(self, what: Callable[[], Any]) -> Any:
        """Wait until something is true, and return it."""
        due_s = time.monotonic() + _END_S
        while not (found := what()):
            has_ended = any(process.poll() is not None for process in (*self.roots, *self.servers))
            if time.monotonic() > due_s or (has_ended and not self.has_begun):
                raise KillsError(f"a scenario did not begin: {self.errors()[-400:]}")
            time.sleep(0.02)
        return found


def _records(box: Box) -> bool:
    for log in box.run.glob("nodes/*/nic/nic.rec"):
        with contextlib.suppress(Exception):  # it is being created
            return open_records(log).count > 1
    return False


def _wrap(box: Box, *options: str, command: list[str] | None = None) -> dict[str, Callable[[], Any]]:
    """Start a job under ``ringtap run``; return how its processes are found."""
    command = command or [sys.executable, "-c", JOB, str(box.folder / "result")]
    supervisor = box.start(*RINGTAP, "run", "-o", box.run, "--node", "here", *options, "--", *command)
    box.await_it(lambda: _records(box) and any(box.run.glob("nodes/here/steps/rank*.rec")))
    return {
        "supervisor": lambda: psutil.Process(supervisor.pid),
        "agent": lambda: box.find(name="ringtap-agent"),
        "group watch": lambda: box.find(name="ringtap-group"),
        "job": lambda: box.find("heard.update", str(box.folder / "result"), above=supervisor.pid),
        "torchrun": lambda: box.find("torch.distributed.run", above=supervisor.pid),
        "metrics server": lambda: box.find("ringtap.analysis.live.metrics"),
        "view": lambda: box.find("ringtap.cli live", above=supervisor.pid),
    }


def _run_packets(box: Box) -> dict[str, Callable[[], Any]]:
    found = _wrap(box, "--collect", "nic,steps,packets", "--interface", "lo")
    tcpdump = lambda: box.find("-w", name="tcpdump")  # noqa: E731 - others only ask it for its version
    shell = psutil.Process(box.await_it(tcpdump).ppid())
    return found | {"tcpdump": tcpdump, "its shell": lambda: shell}


def _run_ranks(box: Box) -> dict[str, Callable[[], Any]]:
    (box.folder / "ranks.py").write_text(RANKS)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = _wrap(box, "--collect", "nic,steps,ddp", command=[*launcher, str(box.folder / "ranks.py")])
    box.await_it(lambda: any(path.stat().st_size > 200 for path in box.run.glob("nodes/*/steps/rank1*.rec")))
    torchrun = found["torchrun"]
    return found | {"rank": lambda: box.find("ranks.py", above=torchrun().pid)}


def _viewer(box: Box, *options: str) -> dict[str, Callable[[], Any]]:
    found = _wrap(box, *_BASIC)
    viewer = box.start(*RINGTAP, "live", *options, box.run, is_server="--web" in options)
    box.await_it(lambda: any(path.stat().st_size for path in box.folder.glob("1.*")))
    return found | {"viewer": lambda: psutil.Process(viewer.pid)}


def _record(box: Box) -> dict[str, Callable[[], Any]]:
    words = ["record", "-o", box.run, "--node", "here", "--collect", "nic", "--duration", "5s"]
    recorder = box.start(*RINGTAP, *words)
    box.await_it(lambda: _records(box))
    return {
        "record": lambda: psutil.Process(recorder.pid),
        "agent": lambda: box.find(name="ringtap-agent"),
    }


def _traffic(box: Box) -> dict[str, Callable[[], Any]]:
    receiver = box.start(*RINGTAP, "traffic", "serve", "--bind", "127.0.0.1:0", "--log", box.folder / "received.rec",
                         is_server=True)  # fmt: skip
    listens = lambda: [line for line in box.errors().splitlines() if "listening on" in line]  # noqa: E731
    address = box.await_it(listens)[0].split("listening on ")[1].split()[0].rstrip(",")
    plan = box.folder / "plan"
    words = ["traffic", "plan", "--kind", "consistent", "--load", "20mbit", "--duration", "5s", "--to", address]
    subprocess.run([*RINGTAP, *words, "-o", str(plan)], check=True, stdout=subprocess.DEVNULL, timeout=_END_S)
    sender = box.start(*RINGTAP, "traffic", "send", plan, "--log", box.folder / "sent.rec")
    box.await_it(lambda: box.find(above=sender.pid))
    time.sleep(1)  # it sends
    return {
        "receiver": lambda: psutil.Process(receiver.pid),
        "its worker": lambda: box.find(above=receiver.pid),
        "sender": lambda: psutil.Process(sender.pid),
        "the sender's worker": lambda: box.find(above=sender.pid),
    }


def _testbed(box: Box) -> dict[str, Callable[[], Any]]:
    name = box.testbed
    owner = box.start(sys.executable, "-c", TESTBED, name, stdin=subprocess.PIPE, is_server=True)
    box.await_it((box.folder / "0.out").read_text)
    state = registry.find(name)
    inside = box.start(*RINGTAP, "testbed", "exec", "--testbed", name, "A", "--", "sleep", "5")
    box.await_it(lambda: box.find("sleep 5", name="sleep"))
    return {
        "owner": lambda: psutil.Process(owner.pid),
        "first process": lambda: psutil.Process(state.pid),
        "exec": lambda: psutil.Process(inside.pid),
        "command": lambda: box.find("sleep 5", name="sleep"),
    }


def _sweep(box: Box) -> dict[str, Callable[[], Any]]:
    (box.folder / "plan.toml").write_text(PLAN)
    conductor = box.start(*RINGTAP, "sweep", box.folder / "plan.toml", "-o", box.run, "--force")
    box.await_it(lambda: (box.run / "points.jsonl").exists() and box.find("ringtap.cli traffic send"))
    return {
        "conductor": lambda: psutil.Process(conductor.pid),
        "host worker": lambda: box.find("ringtap.agents.hosts.worker"),
        "supervisor": lambda: box.find("ringtap.cli run"),
        "agent": lambda: box.find(name="ringtap-agent"),
        "rank": lambda: box.find("while True", name="python"),
        "receiver": lambda: box.find("ringtap.cli traffic serve"),
        "sender": lambda: box.find("ringtap.cli traffic send"),
    }


def _dask(box: Box) -> dict[str, Callable[[], Any]]:
    words = ["run", "-o", str(box.run), "--collect", "nic,steps", "--", sys.executable, "-c", JOB]
    subprocess.run([*RINGTAP, *words, str(box.folder / "result")], capture_output=True, check=False, timeout=_END_S)
    analysis = box.start(*RINGTAP, "analyze", box.run, "--dask", "local:1")
    worker = lambda: box.find("multiprocessing", "spawn_main")  # noqa: E731
    box.await_it(lambda: worker() or analysis.poll() is not None)
    return {"analyze": lambda: psutil.Process(analysis.pid), "worker of Dask": worker}


def _check_job(box: Box, target: str, number: str) -> Iterator[str]:
    """Compare what the job did and heard, and what the run says of it, with what is true."""
    is_killed = number == "KILL" and target == "job"
    wanted: dict[str, int] = {}
    if target in ("supervisor", "job") and number != "KILL":
        wanted = {"CONT" if number == "STOP" else number: 1}
    result = box.folder / "result"
    if is_killed == result.exists():
        yield "the job did not end as it had to"
    elif not is_killed and (heard := json.loads(result.read_text())) != wanted:
        yield f"the job heard {heard} instead of {wanted}"
    code = box.roots[0].returncode
    killed = -signal.SIGKILL
    if code != (killed if number == "KILL" and target in ("job", "supervisor") else CODE):
        yield f"ringtap run ended with {code}"
    info, node = read_json(box.run / RUN_JSON), read_json(box.run / "nodes" / "here" / NODE_JSON, NODE)
    known = {job.get("exit_code") for job in node["jobs"]}
    if not known <= {128 - killed if is_killed else CODE, None}:
        yield f"the exit code of the job is recorded as {known}"
    for item in (info, node):
        if item["status"] == "complete" and node["status"] == "complete":
            yield from _check_complete(box)
    if info["status"] == "complete" or (None in known and "partial" not in (info["status"], node["status"])):
        yield f"status {info['status']} and {node['status']} with exit code {known}"


def _check_complete(box: Box) -> Iterator[str]:
    folder = box.run / "nodes" / "here"
    steps = [open_records(path) for path in folder.glob("steps/rank*.rec")]
    if sum(log.count for log in steps) != STEPS and (box.folder / "result").exists():
        yield "complete without all steps"
    rows = open_records(folder / "nic" / "nic.rec").tail()
    times = sorted({row[0] / 1e9 for row in rows})
    gaps = [after - before for before, after in pairwise(times)]
    facts = read_json(folder / NODE_JSON, NODE)["collectors"]["nic"]
    if (gap_s := max(gaps, default=0)) > _GAP_S and facts["missed_samples"] * facts["every_s"] < gap_s - _GAP_S:
        yield f"complete with a gap of {gap_s:.1f} s that is not noted as missed samples"


def _check_run(box: Box, *, may_run: bool) -> Iterator[str]:
    """Check that a run says how it ended, unless nobody was left to say it, and that it can be read."""
    info = read_json(box.run / RUN_JSON)
    nodes = [read_json(path, NODE) for path in box.run.glob(f"nodes/*/{NODE_JSON}")]
    for item in (info, *nodes):
        if item["status"] == "running" and not may_run:
            yield "it is still running, it says"
        elif item["status"] == "partial" and not item["why"]:
            yield "partial without a reason"
    verb = "report" if info["kind"] == "sweep" else "analyze"
    more = ["-o", str(box.folder / "report")] if verb == "report" else []
    done = subprocess.run([*RINGTAP, verb, str(box.run), *more], capture_output=True, text=True, check=False,
                          timeout=2 * _END_S)  # fmt: skip
    sentence = [line for line in done.stderr.splitlines() if line.startswith("ringtap: ")]
    if "Traceback" in done.stderr or done.returncode not in (0, 1, 2) or (done.returncode and len(sentence) != 1):
        yield f"{verb} ends with {done.returncode}: {done.stderr.strip()[-200:]}"


@dataclass(frozen=True)
class Scenario:
    """A situation, the processes of it that get signals, and whether it has a job that is checked and a run."""

    begin: Callable[[Box], dict[str, Callable[[], Any]]]
    targets: tuple[str, ...]
    has_job: bool = False
    has_run: bool = False


SCENARIOS = {
    "run": Scenario(lambda box: _wrap(box, *_BASIC), ("supervisor", "agent", "group watch", "job"), True, True),
    "run with packets": Scenario(_run_packets, ("tcpdump", "its shell", "agent"), True, True),
    "run --metrics": Scenario(
        lambda box: _wrap(box, *_BASIC, "--metrics", ":0"), ("metrics server", "supervisor"), True, True
    ),
    "run --live": Scenario(lambda box: _wrap(box, *_BASIC, "--live"), ("view", "supervisor"), True, True),
    "torchrun": Scenario(_run_ranks, ("supervisor", "torchrun", "rank"), False, True),
    "live --plain": Scenario(lambda box: _viewer(box, "--plain"), ("viewer",), True, True),
    "live --web": Scenario(lambda box: _viewer(box, "--web", ":0"), ("viewer",), True, True),
    "record": Scenario(_record, ("record", "agent"), False, True),
    "traffic": Scenario(_traffic, ("receiver", "its worker", "sender", "the sender's worker")),
    "testbed": Scenario(_testbed, ("owner", "first process", "exec", "command")),
    "sweep": Scenario(
        _sweep, ("conductor", "host worker", "supervisor", "agent", "rank", "receiver", "sender"), False, True
    ),
    "analyze": Scenario(_dask, ("analyze", "worker of Dask"), False, True),
}


def _is_free(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return path.suffix == ".lock"
    return False


def _left(box: Box, number: str) -> Iterator[str]:
    """Name what a case left, after some seconds; end it."""
    due_s = time.monotonic() + _LEFT_S
    while (processes := box.processes()) and time.monotonic() < due_s:
        time.sleep(0.1)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            yield f"left: {process.name()} {' '.join(process.cmdline())[-120:]}"
        with contextlib.suppress(psutil.Error):
            process.kill()
    for path in box.runtime.rglob("*"):
        # after SIGKILL, a lock that nobody holds may be left: the next agent removes it
        if not path.is_dir() and not (number == "KILL" and _is_free(path)):
            yield f"left: {path.name}"
    for state in registry.all_testbeds():
        if state.alive() and state.spec.name == box.testbed:
            yield "left: the testbed"
            registry.remove(state)


def measure(scenario: Scenario, target: str, number: str) -> list[str]:
    """Carry out one case; return what fell short."""
    box = Box(Path(tempfile.mkdtemp(prefix="kills-")))
    try:
        process = box.await_it(scenario.begin(box)[target])
        box.has_begun = True
        process.send_signal(signal.Signals[f"SIG{number}"])
        if number == "STOP":
            time.sleep(_STOP_S)
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        found = list(_await_end(box, number))
        if scenario.has_job:
            found += _check_job(box, target, number)
        if scenario.has_run:
            found += _check_run(box, may_run=(target, number) == ("conductor", "KILL"))
        if "Traceback" in box.errors() and "torch.distributed" not in box.errors():
            found.append(f"a traceback: {box.errors()[-300:]}")
        return found
    except (KillsError, OSError, ValueError, KeyError) as error:
        return [f"{type(error).__name__}: {error}"]
    finally:
        for process in box.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for started in (*box.roots, *box.servers):
            started.wait()
            if started.stdin:
                started.stdin.close()
        shutil.rmtree(box.folder, ignore_errors=True)


def _await_end(box: Box, number: str) -> Iterator[str]:
    """Wait for the end of all processes, of which servers are asked to end; name what hangs or is left."""
    for root in box.roots:
        with contextlib.suppress(subprocess.TimeoutExpired):
            root.wait(_END_S)
        if root.poll() is None:
            yield f"hangs: {root.args[3:5]}"  # type: ignore[index]
    with contextlib.suppress(KillsError):  # a job goes on after its supervisor
        box.await_it(lambda: not box.find("heard.update"))
    for server in box.servers:
        if server.stdin:
            server.stdin.close()
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_LEFT_S)
    yield from _left(box, number)


def main() -> int:
    """Carry out the cases that are asked for; return 1 if something fell short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SCENARIOS, action="append", help="a scenario; may be repeated")
    parser.add_argument("--target", help="one process of it")
    parser.add_argument("--signal", choices=SIGNALS, action="append", help="a signal; may be repeated")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the result as JSON")
    options = parser.parse_args()
    cases = []
    print(f"| scenario | process | {' | '.join(options.signal or SIGNALS)} |")
    print("|---|---|" + "---|" * len(options.signal or SIGNALS))
    for name in options.only or SCENARIOS:
        for target in SCENARIOS[name].targets:
            if options.target not in (None, target):
                continue
            row = []
            for number in options.signal or SIGNALS:
                short = measure(SCENARIOS[name], target, number)
                cases.append({"scenario": name, "process": target, "signal": number, "short": short})
                row.append("; ".join(short).replace("\n", " ") or "held")
            print(f"| {name} | {target} | {' | '.join(row)} |", flush=True)
    failed = sum(bool(case["short"]) for case in cases)
    if options.output:
        options.output.write_text(json.dumps({"cases": len(cases), "short": failed, "all": cases}))
    print(f"{len(cases)} cases, {failed} fell short")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(as_command(main))
