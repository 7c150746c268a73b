"""What goes wrong beside a job stays there: the job ends as ever, and the run says what is missing and why."""

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from ringtap.agents.job.agent_client import AgentClient
from ringtap.agents.node import agent, agent_control_socket
from ringtap.agents.node.agent_control_socket import Connection
from ringtap.agents.node.recording_settings import RunSettings
from ringtap.core.append_only_logs import open_records
from ringtap.core.run_directory import RunDirectory
from tests.unit.agent_processes import (
    PLAIN,
    RINGTAP,
    ROOT,
    agent_of,
    agents_of,
    ended,
    gone,
    node_item,
    python,
    rows_of,
    run_item,
    wait_for,
    wrapped,
)
from tests.unit.agents.hook.test_sitecustomize import fake_torch

pytestmark = pytest.mark.shares

# ends on a line of its standard input
JOB = "import sys; print('up', flush=True); sys.stdin.readline(); print('result 42')"


def shell(command: list[str], **keywords: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **keywords)


def test_a_killed_agent_is_noted_at_once_and_at_the_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ended(wrapped(run, *python(JOB), stdin=subprocess.PIPE)) as process:
        agent = agent_of(run)
        agent.kill()
        wait_for(lambda: node_item(run)["status"] == "partial")
        assert process.poll() is None
        output, errors = process.communicate("\n", timeout=30)
    assert (output, process.returncode) == ("up\nresult 42\n", 0)
    assert "the agent was killed or crashed" in errors
    assert "Wrote" in errors
    item, info = node_item(run), run_item(run)
    assert info["status"] == item["status"] == "partial"
    assert info["why"] == item["why"]
    assert item["jobs"][0]["exit_code"] == 0
    assert rows_of(run)
    gone(run)


def test_a_job_that_a_killed_agent_had_not_read_of_is_on_record(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "job", [], 0)
    (run.node("here") / "node.json").write_text('{"status": "running", "why": "", "jobs": []}')
    link = AgentClient(run, "here", RunSettings((), (), 0.1))
    link._greeting = {"pid": 7, "command": ["train", "--token", "hidden"], "rank": None, "began_ns": 1}
    link._rendezvous = agent_control_socket.AgentSocket(run.path, "here")
    link.why = "the agent was killed"
    link._note({"exit_code": 3, "ended_ns": 9})
    item = node_item(run.path)
    assert (item["status"], item["why"]) == ("partial", "the agent was killed")
    (job,) = item["jobs"]
    assert (job["pid"], job["exit_code"], job["began_ns"], job["ended_ns"]) == (7, 3, 1, 9)
    assert "hidden" not in job["command"]


@pytest.mark.parametrize("is_done", [True, False])
def test_an_agent_that_is_killed_after_it_has_written_everything_has_answered(tmp_path: Path, is_done: bool) -> None:
    """Between DONE and its answer, an agent can be killed; its record is complete then."""
    run = RunDirectory.create(tmp_path / "run", "job", [], 0)
    node = run.node("here")
    (node / "node.json").write_text('{"status": "complete", "why": "", "jobs": []}')
    if is_done:
        (node / "DONE").touch()
    link = AgentClient(run, "here", RunSettings((), (), 0.1))
    link._rendezvous = agent_control_socket.AgentSocket(run.path, "here")
    ours, agents = socket.socketpair()
    with ours, agents:
        link._connection = Connection(ours)
        agents.close()
        answer = link.finish({"exit_code": 0}, 1.0, lambda: False)
    complete = {"last": True, "status": "complete", "why": ""}
    assert answer == (complete if is_done else {})
    assert link.why == ("" if is_done else "the agent was killed or crashed; what it had recorded until then is whole")
    assert node_item(run.path)["status"] == ("complete" if is_done else "partial")


def test_a_job_whose_supervisor_connected_as_the_agent_ended_is_on_record(tmp_path: Path) -> None:
    """The agent never read of it: it had looked for the last time."""
    run = RunDirectory.create(tmp_path / "run", "job", [], 0)
    node = run.node("here")
    job = {"pid": 6, "command": ["train"], "rank": 0, "began_ns": 1, "exit_code": 0, "ended_ns": 2}
    (node / "node.json").write_text(json.dumps({"status": "complete", "why": "", "jobs": [job]}))
    (node / "DONE").touch()
    link = AgentClient(run, "here", RunSettings((), (), 0.1))
    link._greeting = {"pid": 7, "command": ["train"], "rank": 1, "began_ns": 1}
    link._rendezvous = agent_control_socket.AgentSocket(run.path, "here")
    ours, agents = socket.socketpair()
    with ours:
        link._connection = Connection(ours)
        agents.close()
        assert link.finish({"exit_code": 3}, 1.0, lambda: False) == {}
    assert "has been recorded already by an agent that has ended" in link.why
    item = node_item(run.path)
    assert (item["status"], item["why"]) == (
        "partial",
        "a job began after the recording had ended: at most its steps are here",
    )
    assert [(one["pid"], one["exit_code"]) for one in item["jobs"]] == [(6, 0), (7, 3)]


def test_a_job_that_fails_beside_a_killed_agent(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ended(wrapped(run, *python(JOB + "; exit(9)"), stdin=subprocess.PIPE)) as process:
        agent_of(run).kill()
        process.communicate("\n", timeout=30)
    assert process.returncode == 9
    assert run_item(run)["status"] == "failed"
    assert run_item(run)["why"].startswith("the job ended with exit code 9; the agent was killed")


def test_a_first_sigterm_does_not_end_the_recording_a_second_does(tmp_path: Path) -> None:
    """A batch system's time limit sends one to every process of the job, and leaves the job a while."""
    run = tmp_path / "run"
    with ended(wrapped(run, *python(JOB), stdin=subprocess.PIPE)) as process:
        agent = agent_of(run)
        agent.terminate()
        log, words = (run / "nodes" / "here" / name for name in ("nic/nic.rec", "log/agent.log"))
        size = log.stat().st_size
        time.sleep(1.2)
        wait_for(lambda: log.stat().st_size > size and "until the job ends" in words.read_text())
        assert agent.is_running()
        agent.terminate()
        wait_for(lambda: not agents_of(run))
        process.communicate("\n", timeout=30)
    assert process.returncode == 0
    assert node_item(run)["why"] == "the agent was ended by SIGTERM"
    assert run_item(run)["status"] == "partial"


def test_last_words_are_read_though_an_answer_cannot_be_sent() -> None:
    """An agent may end in order at the moment at which its supervisor tells it of the job's end."""
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    other = Connection(theirs)
    other.send({"last": True})
    other.close()
    connection.send({"end": {}})
    assert connection.receive() == [{"last": True}]
    assert not connection.is_open
    connection.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_time_limit(tmp_path: Path, number: signal.Signals) -> None:
    """As a shell's: the signal goes to the wrapper. After SIGKILL the job itself is not reached, as of any parent."""
    run, is_term = tmp_path / "run", number == signal.SIGTERM
    command = [*RINGTAP, "run", "-o", str(run), "--node", "here", *PLAIN, "--", "cat"]
    with ended(subprocess.Popen(command, stdin=subprocess.PIPE)) as process:  # the pipe's end ends a job that is left
        agent_of(run)
        process.send_signal(number)
        assert process.wait(30) == -number
    gone(run)
    assert run_item(run)["status"] == "partial"
    expected = "the job was ended by SIGTERM" if is_term else "was killed: its exit code is not known"
    assert expected in run_item(run)["why"]
    assert rows_of(run)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.abort()",
        "import ctypes; ctypes.string_at(0)",
        "import os, sys\nfor _ in range(3): os.fork()\nsys.exit(3)",
        "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(1); os._exit(0)",
        "import os; os.closerange(0, 256)",
        "raise RuntimeError('training diverged')",
    ],
    ids=["aborts", "segfaults", "forks", "leaves a daemon", "closes every file", "raises"],
)
def test_jobs_that_misbehave_end_as_without_a_wrapper(tmp_path: Path, code: str) -> None:
    run = tmp_path / "run"
    alone = shell(python(code))
    with ended(wrapped(run, *python(code))) as process:
        output, errors = process.communicate(timeout=30)
    assert (output, process.returncode) == (alone.stdout, alone.returncode)
    assert [line for line in errors.splitlines() if not line.startswith(("ringtap: ", "Wrote "))] == (
        alone.stderr.splitlines()
    )
    gone(run)
    assert node_item(run)["status"] == "complete"
    assert run_item(run)["status"] == {0: "complete"}.get(
        alone.returncode, "failed" if alone.returncode > 0 else "partial"
    )


@pytest.mark.parametrize("limit", [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 24])
def test_out_of_file_descriptors(tmp_path: Path, limit: int) -> None:
    """Whatever can still be recorded is; the job runs with any limit that Python itself starts with."""
    run = tmp_path / "run"
    command = [*RINGTAP, "run", "-o", str(run), "--node", "here", "--", "sh", "-c", "sleep 0.5; echo ran; ulimit -n"]
    done = shell(["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *command])
    assert (done.stdout, done.returncode) == (f"ran\n{limit}\n", 0), done.stderr
    assert "Traceback" not in done.stderr
    assert "killed or crashed" not in done.stderr
    gone(run)
    if (run / "nodes" / "here" / "node.json").exists() and (item := node_item(run))["status"] == "partial":
        assert item["why"]
        assert run_item(run)["status"] == "partial"


@pytest.mark.parametrize("where", ["before its socket", "later"])
def test_an_agent_that_fails_gives_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(
        *((agent.Agent, "__init__") if where == "before its socket" else (agent.Recorders, "start")), fail
    )
    run = RunDirectory.create(tmp_path / "run", "job", [], 0)
    client = AgentClient(run, "here", RunSettings(("nic",), (), 0.1))
    client.start({"pid": os.getpid(), "command": ["train"], "rank": None, "began_ns": 1, "creator": True})
    answer = client.finish({"exit_code": 0, "ended_ns": 2}, 10.0, lambda: False)
    what = "could not run" if where == "before its socket" else "ended early"
    if client._connection:
        client._connection.close()
    # an agent that ends before its supervisor connects leaves the answer in node.json
    assert (answer.get("why") or client.why) == f"the agent {what}: Too many open files (ulimit -n)"
    assert node_item(run.path)["status"] == "partial"


def test_file_descriptors_that_run_out_later_take_only_what_needs_them(tmp_path: Path) -> None:
    """Connections are held open to the agent until it has no descriptor left; then they go, and a rank joins."""
    run = tmp_path / "run"
    command = [*RINGTAP, "run", "-o", str(run), "--node", "here", *PLAIN, "--", "cat"]
    few_files = ["sh", "-c", 'ulimit -n 40; exec "$@"', "sh", *command]
    with ended(subprocess.Popen(few_files, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)) as process:
        agent = agent_of(run)
        with contextlib.ExitStack() as held:
            for _ in range(60):
                found = agent_control_socket.AgentSocket(run, "here").connect()
                assert found
                held.enter_context(found[0])
            wait_for(lambda: agent.num_fds() == 40)
            cpu_s = sum(agent.cpu_times()[:2])
            time.sleep(0.5)
            assert sum(agent.cpu_times()[:2]) - cpu_s < 0.2  # it does not spin
        arguments = [*RINGTAP, "run", "--join", str(run), "--node", "here", *PLAIN, "--", "echo", "ran"]
        done = shell(arguments)
        assert (done.stdout, done.returncode) == ("ran\n", 0)
        assert process.communicate("result 42\n", timeout=30)[0] == "result 42\n"
        assert process.returncode == 0
    assert len(node_item(run)["jobs"]) == 2
    assert node_item(run)["status"] == "complete"


def test_a_folder_that_cannot_be_written_costs_the_recording_not_the_job() -> None:
    command = [*RINGTAP, "run", "-o", "/proc/ringtap", "--", "sh", "-c", "echo ran; exit 5"]
    done = shell(command)
    assert (done.stdout, done.returncode) == ("ran\n", 5)
    (line,) = done.stderr.splitlines()
    assert "/proc/ringtap cannot be written" in line
    assert "runs without being recorded" in line


def test_a_run_without_room_for_its_first_file_leaves_no_folder(tmp_path: Path) -> None:
    command = [*RINGTAP, "run", "-o", str(tmp_path / "runs" / "run"), "--", "sh", "-c", "echo ran; exit 5"]
    done = shell(["sh", "-c", 'trap "" XFSZ; ulimit -f 0; exec "$@"', "sh", *command])
    assert (done.stdout, done.returncode) == ("ran\n", 5)
    assert "File too large: the job runs without being recorded" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_removed_under_the_job(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ended(wrapped(run, *python(JOB), stdin=subprocess.PIPE)) as process:
        agent_of(run)
        while run.exists():  # what is written meanwhile comes and goes
            shutil.rmtree(run, ignore_errors=True)
        output, errors = process.communicate("\n", timeout=30)
    assert (output, process.returncode) == ("up\nresult 42\n", 0)
    assert "Traceback" not in errors
    gone(run)
    why = f"{run} was deleted or moved while it was written, and what was in it is not here"
    for item in (run_item(run), node_item(run)):
        assert (item["status"], item["why"]) == ("partial", why)


@pytest.mark.parametrize("name", ["nodes", "nodes/here"])
def test_a_part_of_the_run_folder_removed_under_the_job(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ended(wrapped(run, *python(JOB), stdin=subprocess.PIPE)) as process:
        agent_of(run)
        shutil.move(run / name, tmp_path / "elsewhere")
        process.communicate("\n", timeout=30)
    assert process.returncode == 0
    gone(run)
    why = f"{run / name} was deleted or moved while it was written, and what was in it is not here"
    assert run_item(run)["why"] == node_item(run)["why"] == why


def test_a_run_folder_moved_under_the_job(tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    with ended(wrapped(run, *python(JOB), stdin=subprocess.PIPE)) as process:
        agent_of(run)
        run.rename(moved)
        process.communicate("\n", timeout=30)
    assert process.returncode == 0
    gone(run)
    assert run_item(run)["status"] == "partial"
    assert "was deleted or moved while it was written" in run_item(run)["why"]
    assert rows_of(moved)


def test_logs_deleted_under_the_job_make_the_run_partial(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ended(wrapped(run, *python(JOB), stdin=subprocess.PIPE)) as process:
        agent_of(run)
        (run / "nodes" / "here" / "nic" / "nic.rec").unlink()
        process.communicate("\n", timeout=30)
    assert process.returncode == 0
    gone(run)
    for item in (run_item(run), node_item(run)):
        assert (item["status"], item["why"]) == ("partial", "nic/nic.rec deleted while being written")


# steps for 2 s, and on until this process's recorder and a collector have stopped
STEPS_UNTIL_FULL = """
import os, pathlib, time
import torch
optimizer = torch.optim.Optimizer()
node = pathlib.Path(os.environ["RINGTAP_RUN"], "nodes", "here")
log = node / "log" / "agent.log"

def have_stopped():
    return log.exists() and "stopped early" in log.read_text() and any((node / "steps").glob("hook-*.log"))

begin_s = time.monotonic()
while time.monotonic() < begin_s + 2 or (time.monotonic() < begin_s + 40 and not have_stopped()):
    optimizer.step()
    time.sleep(0.001)
print("result 42")
"""
# ends when a collector has stopped
UNTIL_STOPPED = """
import pathlib, sys, time
print("up", flush=True)
log, end_s = pathlib.Path(sys.argv[1]), time.monotonic() + 40
while time.monotonic() < end_s and not (log.exists() and "stopped early" in log.read_text()):
    time.sleep(0.05)
print("result 42")
"""
UNTIL_SEEN = (
    ' & for _ in $(seq 200); do grep -q "not recorded" "$RINGTAP_RUN/nodes/here/log/agent.log" && break; sleep 0.1; '
    "done; kill $!"
)
FLAGS, VARIABLES = "start Python without -I, -E and -S", "leave PYTHONPATH and the variables that begin with RINGTAP_"


def not_collected(run: Path) -> str:
    (why,) = (item["why"] for item in run_item(run)["not_collected"] if item["what"] == "steps")
    return str(why)


@pytest.mark.parametrize(
    ("command", "why", "remedy"),
    [
        ([sys.executable, "-I", "-c", "pass"], "was started with -I, which keeps it from loading", FLAGS),
        ([sys.executable, "-uE", "-c", "pass"], "was started with -E, which keeps it from loading", FLAGS),
        ([sys.executable, "-W", "error", "-S", "-c", "pass"], "was started with -S, which keeps it from", FLAGS),
        # without an interpreter: the agent may see one before it ends, and then names its environment
        (["env", "-i", "sh", "-c", ":"], "by env -i, which empties its environment", VARIABLES),
        # not on the job's own command line: seen while it runs
        (
            ["sh", "-c", '"$0" -Ic "import time; time.sleep(60)"' + UNTIL_SEEN, sys.executable],
            "was started with -I",
            FLAGS,
        ),
        (
            ["sh", "-c", 'env - "$0" -c "import time; time.sleep(60)"' + UNTIL_SEEN, sys.executable],
            "another environment",
            VARIABLES,
        ),
    ],
    ids=["-I", "-E", "-S", "env -i", "-I below a shell", "env - below a shell"],
)
def test_an_interpreter_that_never_loads_the_hook_is_named_with_what_to_do(
    tmp_path: Path, command: list[str], why: str, remedy: str
) -> None:
    run = tmp_path / "run"
    with ended(wrapped(run, *command)) as process:
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert why in not_collected(run)
    assert remedy in not_collected(run)
    assert "ringtap: no steps were recorded: " in errors
    assert run_item(run)["status"] == "complete"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["true"], "no Python process of the job loaded ringtap's recorder"),
        (
            [sys.executable, "-c", "pass", "-I"],
            "no process of the job stepped an optimizer of torch (call ringtap.step()",
        ),
        ([sys.executable, "-X", "dev", "-W", "ignore", "-c", "pass"], "no process of the job stepped an optimizer"),
    ],
    ids=["no Python", "no optimizer", "options"],
)
def test_a_job_that_records_no_step_says_why(tmp_path: Path, command: list[str], why: str) -> None:
    run = tmp_path / "run"
    with ended(wrapped(run, *command)) as process:
        _, errors = process.communicate(timeout=30)
    assert why in not_collected(run)
    assert "no steps were recorded" not in errors


FILL_UP = """
import os, time, torch
optimizer = torch.optim.Optimizer()
optimizer.step()
while not os.path.exists(os.path.join(os.environ["RINGTAP_RUN"], "nodes", "here", "node.json")):
    time.sleep(0.02)
with open(os.path.join(os.environ["RINGTAP_RUN"], "filler"), "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
for _ in range(1000):  # more than what the agent may set free as it replaces a file
    optimizer.step()
print("result 42")
"""


@pytest.mark.skipif(shell(["unshare", "--mount", "true"]).returncode != 0, reason="only root can mount a small disk")
def test_steps_lost_on_a_full_disk_are_named_in_why(tmp_path: Path) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    run = [*RINGTAP, "run", "-o", str(disk / "run"), "--node", "here", "--collect", "steps", "--"]
    script = 'mount -t tmpfs -o size=400k none "$0" && shift 1 && "$@"; code=$?; cp -r "$0/run" "$OUT"; exit $code'
    environment = dict(os.environ) | {"OUT": str(kept), "PYTHONPATH": f"{fake_torch(tmp_path)}:{ROOT}"}
    command = ["unshare", "--mount", "sh", "-c", script, str(disk), "-", *run, *python(FILL_UP)]
    done = shell(command, env=environment)
    assert (done.stdout, done.returncode) == ("result 42\n", 0), done.stderr
    for item in (run_item(kept), node_item(kept)):
        assert item["status"] == "partial"
        assert item["why"] == "steps: 1 process stopped recording: rank 0: No space left on device"
    (steps,) = (kept / "nodes" / "here" / "steps").glob("rank0-*.rec")
    assert open_records(steps).count >= 1
    assert open_records(steps).torn_bytes == 0


def test_the_meeting_point_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What someone else has put in its place is passed over; where there is nothing but that, nothing is recorded."""
    monkeypatch.setattr(agent_control_socket, "LOCAL", tmp_path)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    own = os.geteuid()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"ringtap-{own}").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f"ringtap-{own}-1").mkdir(mode=0o755)
    found = agent_control_socket.private_folder()
    assert found == tmp_path / f"ringtap-{own}-2"
    assert found.stat().st_mode & 0o777 == 0o700
    assert agent_control_socket.private_folder() == found
    with open_folder("runtime") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        assert agent_control_socket.private_folder() == runtime / "ringtap"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/not/there")
    found.rmdir()
    for number in range(2, 8):
        (tmp_path / f"ringtap-{own}-{number}").touch()
    link = AgentClient(RunDirectory.create(tmp_path / "run", "job", [], 0), "here", RunSettings((), (), 0.1))
    link.start({"pid": os.getpid()})
    assert link.why == "the agent could not be started: Permission denied"
    assert link.finish({}, 1.0, lambda: False) == {}


@contextlib.contextmanager
def open_folder(name: str) -> Iterator[Path]:
    """A folder that everybody may enter; the way to pytest's is its user's alone."""
    folder = Path("/tmp") / f"ringtap-{name}-{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def ordinary_user() -> tuple[list[str], dict[str, str]]:
    """How to run ringtap as an ordinary user: the command's beginning, and the environment.

    Where every interpreter of this version lies in a folder closed to others, root without any capability takes its
    place.
    """
    environment = dict(os.environ) | {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path(psutil.__file__).parents[1]}"}
    environment.pop("XDG_RUNTIME_DIR", None)
    if os.geteuid() != 0:
        return RINGTAP, environment
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for interpreter in filter(None, [sys.executable, shutil.which(version, path="/usr/bin")]):
        tried = [*nobody, "sh", "-c", 'exec "$@"', "sh", interpreter, "-c", "import ringtap.cli, psutil"]
        if shell(tried, cwd="/", env=environment).returncode == 0:
            return [*nobody, interpreter, "-m", "ringtap.cli"], environment
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *RINGTAP], environment


USER, USERS = ordinary_user()
IS_NOBODY = "--reuid=65534" in USER
# ends when the facts about the node are on record
UNTIL_KNOWN = (
    'for _ in $(seq 300); do grep -qs \'"kernel"\' "$RINGTAP_RUN/nodes/here/node.json" && break; sleep 0.1; done; '
    "echo result 42; id -u"
)


def test_as_an_ordinary_user() -> None:
    with open_folder("user") as folder:
        run = folder / "run"
        command = [*USER, "run", "-o", str(run), "--node", "here", "--", "sh", "-c", UNTIL_KNOWN]
        done = shell(command, cwd=folder, env=USERS)
        uid = 65534 if IS_NOBODY else os.geteuid()
        assert (done.stdout, done.returncode) == (f"result 42\n{uid}\n", 0), done.stderr
        item = node_item(run)
        assert item["status"] == "complete", item["why"]
        assert item["collectors"]["nic"]["state"] == "ok"
        assert item["before"]["kernel"] == os.uname().release
        assert {path.stat().st_uid for path in run.rglob("*")} == {uid}
        gone(run)


def test_an_ordinary_user_in_a_closed_folder() -> None:
    with open_folder("closed") as folder:
        folder.chmod(0o555)
        done = shell([*USER, "run", "--", "echo", "ran"], cwd=folder, env=USERS)
        assert (done.stdout, done.returncode) == ("ran\n", 0)
        assert "runs without being recorded" in done.stderr
        assert list(folder.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0 and not IS_NOBODY, reason="root has no limit of processes")
def test_no_further_process() -> None:
    """With a process limit that is reached, the wrapper becomes the job."""
    with open_folder("limit") as folder:
        prefix, ringtap = USER[:-3], USER[-3:]
        command = [*prefix, "bash", "-c", 'ulimit -u 1; exec "$@"', "bash", *ringtap, "run", "-o", str(folder / "run")]
        done = shell([*command, "--", "bash", "-c", "echo ran; exit 4"], cwd=folder, env=USERS)
        assert (done.stdout, done.returncode) == ("ran\n", 4), done.stderr
        assert "runs without being recorded" in done.stderr


SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
static int (*real)(clockid_t, struct timespec *);
int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME && access(getenv("SHIM_STEP"), F_OK) == 0) now->tv_sec -= 3600;
    return result;
}
"""


@pytest.mark.alone(2)
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build a clock that steps")
def test_a_clock_that_is_set_back_an_hour(tmp_path: Path) -> None:
    """Every process of the run sees CLOCK_REALTIME stepped; CLOCK_MONOTONIC goes on."""
    library, step, run = tmp_path / "shim.so", tmp_path / "step", tmp_path / "run"
    (tmp_path / "shim.c").write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "shim.c", "-ldl"], check=True, timeout=60)
    environment = dict(os.environ) | {"LD_PRELOAD": str(library), "SHIM_STEP": str(step), "PYTHONPATH": str(ROOT)}
    with ended(wrapped(run, *python(JOB), env=environment, stdin=subprocess.PIPE)) as process:
        agent_of(run)
        time.sleep(1)
        step.touch()
        time.sleep(2.6)
        output, _ = process.communicate("\n", timeout=30)
    assert (output, process.returncode) == ("up\nresult 42\n", 0)
    item = node_item(run)
    (noted,) = item["clock_steps"]
    assert noted["step_ns"] == pytest.approx(-3600e9, abs=1e6)
    assert item["status"] == "complete"
    rows = rows_of(run)
    monotonic = [row[1] for row in rows]
    assert monotonic == sorted(monotonic)
    assert 3.5e9 < monotonic[-1] - monotonic[0] < 10e9
    assert len(rows) + item["collectors"]["nic"]["missed_samples"] == pytest.approx(
        (monotonic[-1] - monotonic[0]) / 10e6, rel=0.1
    )
    assert sum(after[0] < before[0] for before, after in pairwise(rows)) == 1


def test_what_stops_recorders_is_said_once_with_their_names(tmp_path: Path) -> None:
    """The records of a rank and of several collectors reach the largest size of a file."""
    run = tmp_path / "run"
    command = [*RINGTAP, "run", "-o", str(run), "--node", "here", "--every", "5ms", "--", *python(STEPS_UNTIL_FULL)]
    environment = dict(os.environ) | {"PYTHONPATH": f"{fake_torch(tmp_path)}:{ROOT}"}
    done = shell(["sh", "-c", 'trap "" XFSZ; ulimit -f 16; exec "$@"', "sh", *command], env=environment)
    assert (done.stdout, done.returncode) == ("result 42\n", 0), done.stderr
    why = run_item(run)["why"]
    assert why.startswith("steps: 1 process stopped recording: rank 0: File too large: a log has reached"), why
    assert why.count("ulimit -f") == 1
    assert why.count("stopped early: File too large") == 1
    assert "[Errno" not in why
    assert "hook-" not in why


def test_files_that_reach_their_largest_size(tmp_path: Path) -> None:
    """Files end at 16 kB (RLIMIT_FSIZE): what is written until then stays, what is missing is said."""
    run = tmp_path / "run"
    options = ("--collect", "nic", "--every", "1ms")
    words = [*python(UNTIL_STOPPED), str(run / "nodes" / "here" / "log" / "agent.log")]
    command = [*RINGTAP, "run", "-o", str(run), "--node", "here", *options, "--", *words]
    script = 'trap "" XFSZ; ulimit -f 32; exec "$@"'
    done = shell(["sh", "-c", script, "sh", *command])
    assert (done.stdout, done.returncode) == ("up\nresult 42\n", 0)
    item = node_item(run)
    assert item["collectors"]["nic"]["state"] == "failed"
    assert item["status"] == run_item(run)["status"] == "partial"
    reason = (
        "stopped early: File too large: a log has reached the largest size that this user's files may have (ulimit -f)"
    )
    assert run_item(run)["why"] == f"nic {reason}"
    assert open_records(run / "nodes" / "here" / "nic" / "nic.rec").count > 10
    assert run_item(run)["not_collected"] == [{"what": "nic", "why": reason}]
    assert json.loads((run / "run.json").read_text())["settings"]["every_s"] == 0.001
    gone(run)
