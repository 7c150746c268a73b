"""Hosts on this machine: the same worker, without anything between."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import ringtap
from ringtap.agents.hosts import message_frames, worker
from ringtap.agents.hosts.remote import WORKER_COMMAND, LocalHosts
from ringtap.agents.node import agent_control_socket
from ringtap.collectors.process_facts import user_name
from ringtap.core.errors import MeasurementError

pytestmark = pytest.mark.shares


@pytest.fixture
def hosts() -> Iterator[LocalHosts]:
    hosts = LocalHosts(["a", "b"])
    try:
        yield hosts
    finally:
        hosts.close()


def eventually(what: Callable[[], Any], seconds: float = 10.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def sh(words: str) -> list[str]:
    return ["sh", "-c", words]


def test_commands_words_codes_and_environment(hosts: LocalHosts, tmp_path: Path) -> None:
    os.environ["RINGTAP_TEST_OUTER"] = "outer"
    try:
        process = hosts.start(
            "a", "job", sh('echo "$RINGTAP_TEST_OUTER $INNER"; echo err >&2; exit 9'), tmp_path / "new" / "log",
            environment={"INNER": "in ner"}, report=tmp_path / "report",
        )  # fmt: skip
    finally:
        del os.environ["RINGTAP_TEST_OUTER"]
    assert eventually(process.exit_code) == 9
    assert ((tmp_path / "report").read_text(), process.last_words()) == ("outer in ner\n", "err")
    assert hosts.path("a", tmp_path) == str(tmp_path)
    assert hosts.ask("b", sh("head -c 200000 /dev/zero | tr '\\0' x; exit 4")).stdout == "x" * 200_000
    assert hosts.ask("b", ["cat"]).stdout == "", "nobody waits for what is typed here"
    folder = hosts.start("a", "folder", ["/tmp"], tmp_path / "folder.log")
    assert eventually(folder.exit_code) == 126
    assert folder.last_words() == "ringtap: /tmp cannot be run: Permission denied"
    null = hosts.start("a", "null", ["echo", "a\0b"], tmp_path / "null.log")
    assert eventually(null.exit_code) == 126


def test_all_are_asked_to_end_and_who_does_not_listen_is_made_to(
    hosts: LocalHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringtap.agents.hosts.remote._STOP_TIMEOUT_S", 2.0)
    log = tmp_path / "order"
    for name in ("old", "new"):
        hosts.start("a", name, sh(f"trap 'echo {name}; exit' TERM; sleep 60 & echo up; wait"), log)
    deaf = hosts.start(
        "a", "deaf", sh("trap '' TERM; echo up; setsid sleep 60 & echo $!; wait; sleep 60"), tmp_path / "deaf"
    )
    eventually(lambda: log.exists() and log.read_text() == "up\nup\n" and deaf.last_words().startswith("up | "))
    sleeper = int(deaf.last_words().split()[-1])
    hosts.stop_all()
    assert sorted(log.read_text().split()) == ["new", "old", "up", "up"]
    assert deaf.exit_code() == -signal.SIGKILL
    eventually(lambda: gone(sleeper))  # though in a session of its own


def test_who_is_asked_already_is_not_asked_again(hosts: LocalHosts, tmp_path: Path) -> None:
    """A second SIGTERM means impatience to ringtap: it would not wait for its agent to write everything."""
    words = "trap 'echo asked; n=15' TERM; n=9999; echo up; while [ $n -gt 0 ]; do sleep 0.02; n=$((n-1)); done"
    process = hosts.start("a", "slow", sh(words), tmp_path / "log")
    eventually(lambda: process.last_words() == "up")
    process.ask_to_stop()
    eventually(lambda: process.last_words() == "up | asked")
    assert process.stop() == 0
    assert process.last_words() == "up | asked"


def test_what_a_command_leaves_behind_in_its_group_ends_with_it(hosts: LocalHosts, tmp_path: Path) -> None:
    process = hosts.start("a", "parent", sh("sleep 60 & echo $!"), tmp_path / "log")
    assert eventually(lambda: process.exit_code() == 0)
    eventually(lambda: gone(int((tmp_path / "log").read_text())))


CONNECTS_LATE = """\
import os, socket, sys, time
while not os.path.exists(sys.argv[3]):
    time.sleep(0.05)
with socket.create_connection((sys.argv[1], int(sys.argv[2]))):
    time.sleep(60)
"""


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_client_is_awaited_until_it_has_connected(hosts: LocalHosts, tmp_path: Path, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        port, late = server.getsockname()[1], tmp_path / "late"
        words = [sys.executable, "-c", CONNECTS_LATE, address, str(port), str(late)]
        client = hosts.start("a", "client", words, tmp_path / "log")
        assert not hosts.wait_for_connection("a", port, client, 0.2)
        late.touch()
        assert hosts.wait_for_connection("a", port, client, 30)
        client.stop()
        assert not hosts.wait_for_connection("a", port, client, 30), "it gives up at once where the process has ended"


def test_children_of_a_host_worker_that_is_killed_are_asked_to_end(hosts: LocalHosts, tmp_path: Path) -> None:
    process = hosts.start("a", "child", sh("echo $$ $PPID; exec sleep 60"), tmp_path / "log")
    pid, worker = map(int, eventually(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text()).split())
    os.kill(worker, signal.SIGKILL)
    eventually(lambda: gone(pid))
    assert eventually(process.exit_code) == 255
    assert process.last_words() == "a is lost: its host worker ended"
    assert hosts.lost() == {"a": "its host worker ended"}
    with pytest.raises(MeasurementError, match="more cannot be started: a is lost: its host worker ended"):
        hosts.start("a", "more", ["true"], tmp_path / "log")
    assert not hosts.wait_for_port("a", 1, process)
    assert hosts.ask("b", ["true"]).returncode == 0
    hosts.close()
    assert hosts.lost() == {"a": "its host worker ended"}
    with pytest.raises(MeasurementError, match="b has been left"):
        hosts.ask("b", ["true"])


# gives up after half a second, once its command has begun
IMPATIENT = """\
from pathlib import Path
from ringtap.agents.hosts import message_frames, worker
class Patience:
    def __lt__(self, silent_s):
        log = Path({log!r})
        return silent_s > 0.5 and log.exists() and log.read_text() != ""
message_frames.ORPHAN_S = Patience()
worker.main()
"""


def test_a_host_worker_without_a_controller_ends_what_it_started(tmp_path: Path) -> None:
    """The connection stands, and nobody speaks: the controller's machine is cut off, or its process is stopped."""
    start = {"op": "start", "id": 1, "argv": sh("echo $$; exec sleep 60"), "environment": {}}
    log = tmp_path / "log"
    with subprocess.Popen(
        [sys.executable, "-c", IMPATIENT.format(log=str(log))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdin is not None
        worker.stdin.write(message_frames.pack(start | {"log": str(log), "report": ""}))
        worker.stdin.flush()
        pid = int(eventually(lambda: log.exists() and log.read_text()))
        assert worker.wait(10) == 0
    eventually(lambda: gone(pid))


def test_another_version_is_refused_in_a_sentence(hosts: LocalHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ringtap, "__version__", "9.9")
    with pytest.raises(MeasurementError, match=r"a is lost: it has ringtap \S+, this machine 9\.9: install the same"):
        hosts.ask("a", ["true"])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("echo noise; exec sleep 60", "ringtap was not started there within 1 s"),
        ("head -c 2000000 /dev/zero; exec sleep 60", "its login prints more than 1 MiB before ringtap is started"),
        ("exec yes '' 3>&1 >&2", "its login prints more than 1 MiB before ringtap is started"),
        ("echo noise; echo 'no such thing' >&2; exit 3", "its host worker ended - no such thing"),
        (f"printf 'noise '; {shlex.join([sys.executable, *WORKER_COMMAND])}; echo junk", ""),
    ],
    ids=["silent", "endless", "endless errors", "ends", "noisy"],
)
def test_noise_is_passed_over_and_silence_has_an_end(words: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalHosts, "command", lambda _self, _host: sh(words))
    hosts = LocalHosts(["a"])
    hosts.connect_s = 1.0 if why.startswith("ringtap was") else 30.0
    try:
        if why:
            with pytest.raises(MeasurementError, match=f"^a is lost: {re.escape(why)}$"):
                hosts.ask("a", ["true"])
        else:
            assert hosts.ask("a", ["echo", "heard"]).stdout == "heard\n"
    finally:
        hosts.close()


def test_a_host_worker_rests_where_there_is_nothing_to_do(hosts: LocalHosts) -> None:
    parent = int(hosts.ask("a", sh("echo $PPID")).stdout)
    worker = psutil.Process(parent)
    before = worker.cpu_times()
    time.sleep(1)
    after = worker.cpu_times()
    # measured: 1 ms a second; the clock of processes ticks 10 ms
    assert after.user + after.system - before.user - before.system <= 0.02


def test_the_usual_folder_for_runs_is_one_that_nobody_else_has_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_control_socket, "LOCAL", tmp_path)
    first, second, third, *_ = map(str, agent_control_socket.local_names(f"ringtap-{user_name()}"))
    assert worker._usual_workdir() == first
    Path(first).symlink_to("/")
    Path(second).mkdir()
    Path(second).chmod(0o777)
    assert worker._usual_workdir() == third
    Path(third).mkdir(mode=0o700)
    assert worker._usual_workdir() == third
    for taken in agent_control_socket.local_names(f"ringtap-{user_name()}")[2:]:
        taken.mkdir(exist_ok=True)
        taken.chmod(0o777)
    assert worker._usual_workdir() == str(Path.home() / f".ringtap-{os.uname().nodename}")  # which is this user's


def test_a_run_goes_into_no_folder_that_others_can_enter(hosts: LocalHosts, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    place = {"workdir": str(tmp_path), "path": str(tmp_path / "run"), "key": "run"}
    answer = hosts.channel("a").request({"op": "make", **place}).answer.result(20)
    assert answer["why"] == f"{tmp_path / 'run'}: it is not this user's alone"
