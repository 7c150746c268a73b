"""Hosts over a real sshd in the namespaces of a testbed: each has an address and a folder of its own as its disk."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from ringtap.agents.hosts.ssh import SshHost, SshHosts
from ringtap.agents.testbed.start_testbed import RunningTestbed
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.run_directory import RunDirectory, read_json
from ringtap.core.testbed_options import SWITCH
from tests.testbed.sshd import SshServers
from tests.unit.agent_processes import ended, running

pytestmark = [pytest.mark.shares, pytest.mark.together]

# in the place of 12 s without a word, to have the answer sooner
SILENT_S = 5.0
WEIRD = 'a run\'s "folder"\nof two lines $HOME'
COUNT = (
    "import sys, time\nfor i in range(10**6):\n    print(i, file=open(sys.argv[1], 'a'), flush=True); time.sleep(0.01)"
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServers]:
    spec = TestbedSpec(name="sshhosts", hosts=("C0", "S0", "S1", "S2"), rate_bps=1_000_000_000)
    with RunningTestbed(spec, verify=False), SshServers(tmp_path_factory.mktemp("sshd") / "all", spec) as servers:
        yield servers


@pytest.fixture(autouse=True)
def path(servers: SshServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ssh that is found is that of the testbed's first host."""
    monkeypatch.setenv("PATH", servers.path)


@pytest.fixture
def soon_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SshHosts, "silent_s", SILENT_S)


@pytest.fixture
def hosts(servers: SshServers) -> Iterator[SshHosts]:
    hosts = SshHosts(servers.hosts(), config=servers.config)
    try:
        yield hosts
    finally:
        hosts.close()


@pytest.fixture
def run(tmp_path: Path, hosts: SshHosts) -> RunDirectory:
    run = RunDirectory.create(tmp_path / WEIRD, "job", [], 0)
    hosts.publish(run.path)
    return run


def eventually(what: Callable[[], Any], seconds: float = 10.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return found


def alive(*pids: int) -> list[int]:
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found += [pid] if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else []
    return found


def sh(words: str, *arguments: str) -> list[str]:
    return ["sh", "-c", words, "sh", *arguments]


def test_commands_run_and_say_what_they_say(hosts: SshHosts, servers: SshServers, tmp_path: Path) -> None:
    words = ["two words", "a'b\"c", "line\nline", "$HOME `id` \\ *", "", "é"]
    done = hosts.ask("S1", ["printf", "%s|", *words])
    assert (done.returncode, done.stdout) == (0, "|".join(words) + "|")
    done = hosts.ask("S0", sh("hostname; pwd; echo $HOME; echo err >&2; exit 3"))
    home = str(servers.home("S0"))
    assert (done.returncode, done.stdout, done.stderr) == (3, f"S0\n{home}\n{home}\n", "err\n")
    with pytest.raises(MeasurementError, match=r"S0 has not answered sleep within 0\.3 s"):
        hosts.ask("S0", ["sleep", "987"], timeout_s=0.3)
    eventually(lambda: not running("sleep 987"))

    log, report = tmp_path / "log" / "out.log", tmp_path / "report"
    report.write_text("from before\n")
    talker = sh("echo one; echo two >&2; while [ ! -e go ]; do sleep 0.02; done; rm go; echo three; exit 7")
    process = hosts.start("S2", "talker", talker, log, report=report, environment={"A B": "x\ny"})
    eventually(lambda: log.exists() and log.read_text() == "two\n" and report.read_text() == "from before\none\n")
    assert process.exit_code() is None
    (servers.home("S2") / "go").touch()
    assert eventually(process.exit_code) == 7
    # the words are here with the code, not some time later
    assert report.read_text() == "from before\none\nthree\n"
    assert (process.name, process.last_words()) == ("talker on S2", "two")

    many = hosts.start("S2", "many", ["head", "-c", "30000000", "/dev/zero"], log, report=tmp_path / "many")
    assert eventually(lambda: many.exit_code() == 0)
    assert (tmp_path / "many").stat().st_size == 30_000_000

    failed = hosts.start("S2", "nothing", ["/no/such command"], log)
    assert eventually(failed.exit_code) == 127
    assert failed.last_words() == "two | ringtap: /no/such command cannot be run: No such file or directory"
    assert hosts.lost() == {}


def test_a_checkout_in_the_home_is_not_taken_for_the_package(servers: SshServers) -> None:
    (servers.home("S0") / "ringtap").mkdir()
    hosts = SshHosts(servers.hosts()[:1], config=servers.config)
    try:
        assert hosts.ask("S0", ["pwd"]).stdout == "/\n"
        assert hosts.ask("S0", [*hosts.ringtap("S0"), "--version"]).returncode == 0
    finally:
        hosts.close()
        (servers.home("S0") / "ringtap").rmdir()


def test_signals_reach_the_command_and_nothing_survives_the_last_one(hosts: SshHosts, tmp_path: Path) -> None:
    polite = "trap 'echo bye; exit 5' USR1; trap 'echo again' INT; echo up; while :; do sleep 0.05; done"
    process = hosts.start("S0", "polite", sh(polite), tmp_path / "polite.log")
    eventually(lambda: process.last_words() == "up")
    process.ask_to_stop(signal.SIGINT)
    eventually(lambda: process.last_words() == "up | again")
    assert process.stop(signal.SIGUSR1) == 5
    assert process.last_words() == "up | again | bye"
    plain = hosts.start("S0", "plain", ["sleep", "986"], tmp_path / "plain.log")
    eventually(lambda: running("sleep 986"))
    hosts.stop_all()
    assert plain.exit_code() == -signal.SIGTERM


def test_a_server_is_known_to_listen_without_being_spoken_to(hosts: SshHosts, tmp_path: Path) -> None:
    code = (
        "import socket\ns = socket.create_server(('127.0.0.1', 7100))\ns.settimeout(60)\ns.accept()\nprint('somebody')"
    )
    server = hosts.start("S1", "server", [hosts.python("S1"), "-c", code], tmp_path / "server.log")
    assert hosts.wait_for_port("S1", 7100, server)
    assert not hosts.wait_for_port("S0", 7100, server, 0.2), "hosts have their own ports"
    server.stop()
    assert server.last_words() == "no output"
    assert not hosts.wait_for_port("S1", 7100, server, 5), "it gives up at once where the process has ended"


def test_files_of_a_run_come_here_while_they_are_written(
    hosts: SshHosts, run: RunDirectory, servers: SshServers
) -> None:
    here = run.path / "nodes" / "S0"
    there = hosts.path("S0", here)
    assert there.startswith(f"{servers.folder}/disk of 'S0'/")
    assert read_json(Path(hosts.path("S1", run.path / "run.json"))) == run.info
    assert Path(hosts.path("S0", run.path)).stat().st_mode & 0o777 == 0o700
    plan = here / "sent" / "plan 'x'"
    plan.parent.mkdir(parents=True)
    plan.write_bytes(os.urandom(700_000))
    hosts.put("S0", plan)
    assert Path(hosts.path("S0", plan)).read_bytes() == plan.read_bytes()

    words = (
        'cd "$1"; mkdir "x y"; echo a > log; echo old > s.json; echo secret > k; chmod 600 k; echo no > .hidden; '
        'while [ ! -e "$1/../../go" ]; do sleep 0.02; done; echo b >> log; head -c 3000000 /dev/zero > "x y/big"; '
        "echo new > t; mv t s.json; rm k; echo end; head -c 60000000 /dev/zero > big2; echo c >> log"
    )
    job = hosts.start("S0", "job", sh(words, there), here / "log.out")
    written = [(here / "log", "a\n"), (here / "s.json", "old\n"), (here / "k", "secret\n")]
    eventually(lambda: all(path.exists() and path.read_text() == text for path, text in written))
    assert (here / "k").stat().st_mode & 0o777 == 0o600
    Path(hosts.path("S0", run.path), "go").touch()
    eventually(lambda: job.exit_code() == 0)
    assert job.last_words() == "end"
    hosts.gather(run.path)
    assert ((here / "log").read_text(), (here / "s.json").read_text()) == ("a\nb\nc\n", "new\n")
    assert (here / "big2").stat().st_size == 60_000_000
    with Path(there, "log").open("a") as file:
        file.write("soon\n")
    eventually(lambda: (here / "log").read_text().endswith("soon\n"), 2)
    assert (here / "x y" / "big").read_bytes() == bytes(3_000_000)
    assert (here / "k").exists(), "what the host deletes stays here"
    assert sorted(p.name for p in here.rglob("*") if p.name.startswith(".")) == []


def test_one_connection_a_host_and_the_users_own_configuration(hosts: SshHosts, servers: SshServers) -> None:
    for _ in range(3):
        hosts.ask("S0", ["true"])
    table = servers.run("C0", "cat", "/proc/net/tcp")
    # address and port in hex, 01: established
    to = [row.split()[2] for row in table.splitlines()[1:] if row.split()[3] == "01"]
    assert sorted(to) == [f"0{n}004D0A:0016" for n in (2, 3, 4)]
    assert "StrictHostKeyChecking" not in " ".join(hosts.command("S0")), "left as it is configured"


def test_a_connection_that_the_user_holds_open_is_used(servers: SshServers, tmp_path: Path) -> None:
    shared = f"Host *\n  ControlMaster auto\n  ControlPath {tmp_path}/%n\n  ControlPersist 60\n"
    (tmp_path / "config").write_text(servers.config.read_text() + shared)
    ssh = ["ssh", "-F", str(tmp_path / "config"), "-o", "LogLevel=ERROR"]
    subprocess.run([*ssh, "S0.lab", "true"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    hosts = SshHosts(servers.hosts()[:1], config=tmp_path / "config")
    try:
        assert hosts.ask("S0", ["hostname"]).stdout == "S0\n"
        to = [row for row in servers.run("C0", "cat", "/proc/net/tcp").splitlines() if "02004D0A:0016 01" in row]
        assert len(to) == 1
        begin_s = time.monotonic()
        hosts.close()
        assert time.monotonic() - begin_s < 5, "it does not wait for the shared connection's end"
    finally:
        hosts.close()
        subprocess.run([*ssh, "-O", "exit", "S0.lab"], stderr=subprocess.DEVNULL, check=False)


def test_a_host_that_cannot_be_reached_is_refused_in_one_sentence(servers: SshServers, tmp_path: Path) -> None:
    other = (servers.folder / "host.S1.pub").read_text()
    known = (servers.folder / "known_hosts").read_text()
    (tmp_path / "known").write_text(known.replace((servers.folder / "host.S0.pub").read_text(), other))
    config = tmp_path / "config"
    config.write_text(servers.config.read_text().replace(str(servers.folder / "known_hosts"), str(tmp_path / "known")))
    good = SshHost("S1", "S1.lab")

    def refusal(host: SshHost) -> str:
        with pytest.raises(UsageError) as caught:
            SshHosts([host, good], config=config)
        return str(caught.value)

    assert refusal(SshHost("S0", "S0.lab")) == (
        "S0 cannot be used over ssh: its connection ended - Host key for "
        f"{servers.address('S0')} has changed and you have requested strict checking. (try: ssh S0.lab true)"
    )
    config.write_text(servers.config.read_text())
    assert refusal(SshHost("S0", "S0.lab", python="/no/python")) == (
        "S0 cannot be used over ssh: it has no program /no/python that this user may run: "
        "name the interpreter that has ringtap as python in [[hosts]]"
    )
    assert "its /usr/bin/python3 has no ringtap: install ringtap" in refusal(
        SshHost("S0", "S0.lab", python="/usr/bin/python3")
    )
    assert "its /bin/false cannot start ringtap: exit code 1" in refusal(SshHost("S0", "S0.lab", python="/bin/false"))
    assert "Could not resolve hostname s9.invalid" in refusal(SshHost("S0", "s9.invalid"))
    assert "not an absolute path" in refusal(SshHost("S0", "S0.lab", workdir="here"))
    eventually(lambda: not servers.sessions("S0") and not servers.sessions("S1"))


def test_a_login_that_ends_early_is_told_from_a_connection_that_failed(servers: SshServers) -> None:
    rc = servers.home("S0") / ".bashrc"
    before = rc.read_text()
    rc.write_text(before + "echo 'conda: no such env' >&2\nexit 3\n")
    try:
        with pytest.raises(UsageError) as caught:
            SshHosts(servers.hosts()[:1], config=servers.config)
    finally:
        rc.write_text(before)
    assert str(caught.value) == (
        "S0 cannot be used over ssh: its login ended with exit code 3 before ringtap was started, and said at last: "
        "conda: no such env (try: ssh S0.lab true)"
    )


def test_the_last_line_of_a_login_is_no_reason_for_a_loss(hosts: SshHosts, servers: SshServers) -> None:
    workers = running("ringtap.agents.hosts.worker")
    (pid,) = [pid for pid in servers.sessions("S1") if pid in workers and "python" in psutil.Process(pid).name()]
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: hosts.lost().get("S1")) == "its connection ended"


@pytest.mark.needs_root("give a folder away")
def test_a_working_folder_of_somebody_else_is_refused(servers: SshServers, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, 12345)
    hosts = SshHosts([SshHost("S0", "S0.lab", workdir=str(tmp_path / "theirs"))], config=servers.config)
    try:
        with pytest.raises(
            MeasurementError, match=r"S0 does not take the run's files: .*/theirs: it is another user's"
        ):
            hosts.publish(RunDirectory.create(tmp_path / "run", "job", [], 0).path)
    finally:
        hosts.close()


@pytest.mark.alone(1)
@pytest.mark.usefixtures("soon_lost")
@pytest.mark.parametrize("how", ["killed", "link"])
def test_a_host_lost_in_mid_run_is_named_and_the_others_go_on(
    how: str, hosts: SshHosts, run: RunDirectory, servers: SshServers
) -> None:
    processes = {}
    for host in hosts.names:
        path = hosts.path(host, run.node(host) / "count")
        command = [hosts.python(host), "-c", COUNT, path]
        processes[host] = hosts.start(host, "job", command, run.node(host) / "log" / "job.out")
    for host in hosts.names:
        eventually(lambda host=host: (run.node(host) / "count").exists())
    remote = Path(hosts.path("S1", run.node("S1") / "count"))
    try:
        if how == "killed":
            servers.kill("S1")
        else:
            servers.run(SWITCH, "ip", "link", "set", "to-S1", "down")
        begin_s, number = time.monotonic(), int(remote.read_text().split()[-1])
        eventually(hosts.lost)
        assert time.monotonic() - begin_s < (2 if how == "killed" else SILENT_S + 3)
        assert list(hosts.lost()) == ["S1"]
        assert ("ended" if how == "killed" else "not a word for 5 s") in hosts.lost()["S1"]
        assert eventually(processes["S1"].exit_code) == 255
        assert "S1 is lost" in processes["S1"].last_words()
        with pytest.raises(MeasurementError, match="S1 is lost"):
            hosts.ask("S1", ["true"])
        with pytest.raises(MeasurementError, match="S1 is lost"):
            hosts.start("S1", "more", ["true"], run.node("S1") / "log" / "more.out")
        # a line every 10 ms: what is missing is the last second at most
        here = int((run.node("S1") / "count").read_text().split()[-1])
        assert here > number - 100
        assert hosts.ask("S0", ["true"]).returncode == 0
        before = (run.node("S2") / "count").read_text()
        eventually(lambda: len((run.node("S2") / "count").read_text()) > len(before))
        hosts.gather(run.path)
        hosts.close()
        assert (processes["S0"].exit_code(), processes["S2"].exit_code()) == (-signal.SIGTERM, -signal.SIGTERM)
        assert list(hosts.lost()) == ["S1"]
        assert not Path(hosts.path("S0", run.path)).exists(), "what was put on hosts is removed"
        assert remote.exists(), "but what may not have come here"
    finally:
        if how == "killed":
            servers.start("S1")
        else:
            servers.run(SWITCH, "ip", "link", "set", "to-S1", "up")
            servers.kill("S1")  # nobody tells it that the connection is gone
            servers.start("S1")


CONTROLLER = """\
import sys, time
from pathlib import Path
from ringtap.agents.hosts.ssh import SshHost, SshHosts
from ringtap.agents.job.foreground_command import termination_as_interrupt
folder, config, *names = sys.argv[1:]
with termination_as_interrupt():
    hosts = SshHosts([SshHost(name, f"{name}.lab", workdir=f"{folder}/{name}") for name in names], config=Path(config))
    try:
        for name in names:
            stubborn = "trap '' TERM INT HUP; (trap '' TERM; sleep 985) & sleep 985; sleep 985"
            for number, words in enumerate(["sleep 985", *([stubborn] if len(sys.argv) > 4 else [])]):
                hosts.start(name, "job", ["sh", "-c", words], Path(folder) / f"{name}.{number}.log")
        print("up", flush=True)
        time.sleep(60)
    finally:
        hosts.close()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_its_controller(number: signal.Signals, servers: SshServers, tmp_path: Path) -> None:
    # ending in order waits 10 s for those that do not want to: they are there where the controller is killed
    names = ("S0", "S1") if number == signal.SIGKILL else ("S0",)
    command = [sys.executable, "-c", CONTROLLER, str(tmp_path), str(servers.config), *names]
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == "up\n"
        eventually(lambda: len(running("sleep 985")) >= len(names))
        controller.send_signal(number)
        controller.wait(10)
    eventually(lambda: not running("sleep 985") and not [pid for name in names for pid in servers.sessions(name)], 6)


def test_clocks_of_hosts_without_a_shared_folder_are_compared(hosts: SshHosts, run: RunDirectory) -> None:
    agents = []
    for host in hosts.names:
        command = [*hosts.ringtap(host), "record", "--collect", "nic", "--join", hosts.path(host, run.path)]
        agents.append(hosts.start(host, "agent", [*command, "--node", host], run.node(host) / "log" / "job.out"))
    clocks = {host: run.path / "nodes" / host / "clock" for host in hosts.names}
    eventually(lambda: all((clocks[host] / "pings.rec").exists() for host in ("S1", "S2")), 20)
    eventually(lambda: all((clocks[host] / "pings.rec").stat().st_size > 40 * 53 for host in ("S1", "S2")), 20)
    server = clocks["S0"] / "server.json"
    assert server.stat().st_mode & 0o777 == 0o600, "it has the token"
    for agent in agents:
        agent.ask_to_stop()
    assert [agent.stop() for agent in agents] == [0, 0, 0], [agent.last_words() for agent in agents]
    hosts.gather(run.path)
    for host in ("S1", "S2"):
        item = json.loads((clocks[host] / "clock.json").read_text())
        assert item["reference"] == "S0"
        assert len(item["measurements"]) >= 2, item["reason"]
        # in truth these hosts are namespaces of one kernel, with one clock
        for one in item["measurements"]:
            assert abs(one["offset_ns"]) <= one["error_ns"]
        node = read_json(run.path / "nodes" / host / "node.json")
        assert (node["status"], node["collectors"]["clock"]["state"]) == ("complete", "ok")
        assert (run.path / "nodes" / host / "nic" / "nic.rec").stat().st_size > 1000


def test_the_host_workers_word_is_all_that_counts(servers: SshServers) -> None:
    """What the .bashrc of a session says, with a half marker in it, is heard by ssh and by nobody else."""
    config = ["-F", str(servers.config), "S0.lab", "true"]
    said = subprocess.run(["ssh", *config], capture_output=True, check=True)
    assert said.stdout == b"Welcome to a busy server; {\n"
    assert b"Nobody may come in here" in said.stderr
