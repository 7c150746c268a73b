"""Whatever ends a process of ringtap, none of its helpers goes on."""

import ast
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import ringtap

pytestmark = pytest.mark.shares

PARENT = """
import subprocess, time
from ringtap.core.parent_death import die_with_parent
child = subprocess.Popen(["sleep", "60"], preexec_fn=die_with_parent())
print(child.pid, flush=True)
time.sleep(60)
"""
# the child prepares only after its parent has ended
LATE = """
import os, signal, time
from ringtap.core.parent_death import die_with_parent
parent, prepare = os.getpid(), die_with_parent(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *_: (print("ended", flush=True), os._exit(0)))
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.01)
prepare()
print("goes on")
"""
ROOT = Path(ringtap.__file__).parent.parent
FOLDERS = ("agents", "analysis", "collectors", "slurm", "trafficgen", "workload")
STARTS = {"subprocess.run", "subprocess.Popen", "os.fork", "os.posix_spawn", "spawn", "foreground_command.spawn"}
STARTS |= {"ProcessPoolExecutor", "LocalCluster", "context.Process"}
# Functions that start a process, and what ends it with its parent, if not die_with_parent
OTHERWISE = {
    "agents/hook/ringtap_hook/agent_start.py _start": "the shell ends at once; the agent ends with the job",
    "agents/hosts/remote.py WorkerConnection.__init__": "its standard input ends",
    "agents/job/agent_client.py start_agent": "forks the agent and ends",
    "agents/job/agent_client.py _fork_agent": "the agent ends with the job, also after the supervisor",
    "agents/job/supervisor.py MetricsProcess.__init__": "looks at its parent",
    "agents/job/foreground_command.py GroupWatch._start": "its pipe ends",
    "agents/job/foreground_command.py _start_waker": "looks at its parent",
    "agents/job/foreground_command.py spawn": "the caller says",
    "agents/job/supervisor.py run_job": "the job, which goes on",
    "agents/sweep/request_next_load.py LoadChoice.__enter__": "its standard input ends",
    "agents/testbed/init_process.py main": "its standard input ends, unless the testbed stays",
    "agents/testbed/start_testbed.py RunningTestbed._start": "its standard input ends, unless the testbed stays",
    "analysis/dask_workers.py _local": "Dask ends its workers",
    "collectors/capture_program.py Tool.start": "its standard input ends",
    "slurm/run_job_steps.py run_command": "Slurm ends the steps of a batch script",
    "slurm/run_job_steps.py main": "collects what was measured, and ends",
    "slurm/job_state_file.py signal_step": "scancel, which ends the job's step",
    "slurm/srun_task_main.py keep": "copies results, and ends",
    "trafficgen/helper_process.py Helper.__enter__": "its pipe ends",
    "trafficgen/worker_processes.py WorkerProcesses.start": "its pipe ends",
}


def functions(node: ast.AST, names: tuple[str, ...] = ()) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods of a module, with their names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield ".".join((*names, child.name)), child
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, (*names, child.name))


def test_every_helper_ends_with_what_started_it() -> None:
    """A new helper gets die_with_parent, or a line that says what ends it."""
    found = set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        if not any(word in (text := path.read_text()) for word in ("subprocess", "fork", "spawn", "Process")):
            continue
        for name, function in functions(ast.parse(text)):
            calls = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
            if calls & STARTS and "die_with_parent" not in calls:
                found.add(f"{path.relative_to(ROOT)} {name}")
    assert found == set(OTHERWISE)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_parent(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(number)
        parent.wait(10)
    child.wait(10)
    assert not child.is_running()


def test_a_child_whose_parent_has_ended_already_ends_too() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "ended\n"
