"""Processes of a job that do not descend from its command: a daemon started them, as slurmstepd and raylet do."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringtap.agents.node.job_processes import StartedByDaemons, descendants
from ringtap.core.run_directory_schema import OWNERS_JSONL

pytestmark = pytest.mark.shares

# sends to itself until a file is there, in a process of its own whose parent has ended
STRAY = """
import pathlib, socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
accepted, _ = server.accept()
while not pathlib.Path(sys.argv[1]).exists():
    client.sendall(bytes(1000))
    accepted.recv(1000)
    time.sleep(0.01)
"""


def started(run: Path, node: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "30"], env=os.environ | {"RINGTAP_RUN": str(run), "RINGTAP_NODE": node})


def found(seen: StartedByDaemons) -> list[int]:
    seen._due_s = 0.0
    return seen.pids()


def test_processes_are_told_by_their_environment(tmp_path: Path) -> None:
    seen = StartedByDaemons(tmp_path, "here")
    # the shell executes another program, with the environment of the job
    late = "read line; exec env RINGTAP_RUN=$1 RINGTAP_NODE=here sleep 30"
    with (
        started(tmp_path, "here") as own,
        started(tmp_path, "there") as of_other_node,
        started(tmp_path / "other", "here") as of_other_run,
        subprocess.Popen(["sh", "-c", late, "sh", str(tmp_path)], stdin=subprocess.PIPE, text=True) as later,
    ):
        try:
            assert found(seen) == [own.pid]
            assert later.stdin
            later.stdin.write("\n")
            later.stdin.flush()
            deadline_s = time.monotonic() + 20
            while sorted(found(seen)) != sorted([own.pid, later.pid]) and time.monotonic() < deadline_s:
                time.sleep(0.05)
            assert sorted(found(seen)) == sorted([own.pid, later.pid])
        finally:
            for process in (own, of_other_node, of_other_run, later):
                process.kill()
    assert found(seen) == []


def test_a_process_is_looked_at_again_whose_program_is_still_loaded(tmp_path: Path) -> None:
    # execve links the program first: until it has set the environment, that is empty
    proc = tmp_path / "proc"
    for pid in ("self", "10"):
        (proc / pid / "ns").mkdir(parents=True)
        (proc / pid / "ns" / "net").symlink_to("net:[1]")
    (proc / "10" / "exe").symlink_to("/usr/bin/sleep")
    (proc / "10" / "environ").write_bytes(b"")
    seen = StartedByDaemons(Path("/run1"), "here", proc)
    assert found(seen) == []
    (proc / "10" / "environ").write_bytes(b"RINGTAP_RUN=/run1\0RINGTAP_NODE=here\0")
    assert found(seen) == [10]


def test_a_process_and_its_child_count_once() -> None:
    child = subprocess.Popen(["sleep", "30"])
    try:
        pids = descendants([child.pid, os.getpid(), child.pid])
        assert pids.count(child.pid) == pids.count(os.getpid()) == 1
    finally:
        child.kill()
        child.wait()


def test_sockets_of_processes_that_a_daemon_started_are_of_the_job(tmp_path: Path) -> None:
    run, owners = tmp_path / "run", tmp_path / "run" / "nodes" / "here" / OWNERS_JSONL
    script = f"""setsid -f "$1" -c '{STRAY}' "$2/done"; while [ ! -e "$2/done" ]; do sleep 0.05; done"""
    command = [sys.executable, "-m", "ringtap", "run", "--node", "here", "-o", str(run), "--"]
    with subprocess.Popen([*command, "sh", "-c", script, "sh", sys.executable, str(tmp_path)]) as job:
        deadline_s = time.monotonic() + 30
        while not (owners.exists() and owners.read_text()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        (tmp_path / "done").touch()
        assert job.wait(60) == 0
    lines = [json.loads(line) for line in owners.read_text().splitlines()]
    assert any("server = socket.create_server" in line["command"] for line in lines)
