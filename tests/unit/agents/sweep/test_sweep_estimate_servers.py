"""Plans for real servers: the processes of a job, what a host is asked before a sweep, corrected plans, and doubts."""

import fcntl
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from ringtap.agents.hosts import LocalHosts
from ringtap.agents.hosts.worker import HostWorker, clean
from ringtap.agents.node import agent_control_socket
from ringtap.agents.sweep import host_roles as sweep_roles
from ringtap.agents.sweep.capture_packets_at_loads import capture_points, check_capture
from ringtap.agents.sweep.cluster_preflight import cluster_roles, local_job_problems
from ringtap.agents.sweep.host_facts import free_port, job_facts, room_problem
from ringtap.agents.sweep.job_failure_cause import failure_line, failure_messages
from ringtap.agents.sweep.job_launch_commands import processes
from ringtap.agents.sweep.resume_with_edited_plan import plan_changes
from ringtap.agents.sweep.step_watcher import stalled_s
from ringtap.agents.sweep.sweep_estimate import doubts, layout, resolved
from ringtap.cli import main
from ringtap.core.errors import UsageError
from ringtap.core.run_directory import RunDirectory
from ringtap.core.sweep_plans.sweep_plan import SweepPlan, load_plan
from ringtap.doctor import verdict
from tests.unit.agents.sweep.test_cluster_preflight_cluster import PLAN as TRUE_PLAN
from tests.unit.agents.sweep.test_cluster_preflight_cluster import plain

pytestmark = pytest.mark.shares

PLAN = TRUE_PLAN.replace('["true"]', '["train"]')

OWN = 'command = ["{python}", "-m", "train", "{unknown} {}", "--node={host_rank}/{hosts}", "{address}"]'


def plan_of(tmp_path: Path, text: str = PLAN) -> SweepPlan:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return load_plan(path)


def changed(text: str, *pairs: tuple[str, str]) -> str:
    for before, after in pairs:
        assert before in text
        text = text.replace(before, after, 1)
    return text


SERVERS = changed(
    PLAN,
    ('command = ["train"]', OWN + '\nenvironment = { A = "model", B = "model", C = 3 }\ndirectory = "/data/my job"'),
    ("i_may_load", 'environment = { A = "cluster", D = "cluster", NCCL_SOCKET_IFNAME = "ib0" }\ni_may_load'),
    ('training = "10.0.0.1"', 'training = "10.0.0.1"\ngpus = [0, 3]\njob_python = "/conda/python"'),
    ('training = "10.0.0.2"', 'training = "10.0.0.2"\nranks = 1\nenvironment = { B = "host" }'),
)


def test_ranks_gpus_variables_and_interpreters_are_each_hosts_own(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, SERVERS)
    hosts = LocalHosts(["a", "b", "c"])
    found = processes(plan, plan.models[0], cluster_roles(plan, plain()), hosts, 5000)
    hosts.close()
    assert [(one.host, one.log) for one in found] == [("a", "job.out"), ("a", "job-1.out"), ("b", "job.out")]
    places = [
        [one.environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] for one in found
    ]
    assert places == [["0", "0", "3", "2"], ["1", "1", "3", "2"], ["2", "0", "3", "1"]]
    first, last = found[0].environment, found[2].environment
    assert (first["A"], first["B"], first["C"], first["D"], last["B"]) == ("model", "model", "3", "cluster", "host")
    assert (first["CUDA_VISIBLE_DEVICES"], "CUDA_VISIBLE_DEVICES" in last) == ("0,3", False)
    assert (first["CUDA_DEVICE_ORDER"], "CUDA_DEVICE_ORDER" in last) == ("PCI_BUS_ID", False)
    assert (first["NCCL_SOCKET_IFNAME"], first["GLOO_SOCKET_IFNAME"]) == ("ib0", "ens1")
    assert (first["MASTER_ADDR"], first["MASTER_PORT"]) == ("10.0.0.1", "5000")
    train = ["-m", "train", "{unknown} {}"]
    assert found[0].command[3:] == ["sh", "/data/my job", "/conda/python", *train, "--node=0/2", "10.0.0.1"]
    assert found[2].command[5:] == [sys.executable, *train, "--node=1/2", "10.0.0.2"]


def test_a_launch_line_of_ones_own_is_started_once_per_host(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, changed(SERVERS, ('directory = "/data/my job"', 'launch = "host"')))
    hosts = LocalHosts(["a", "b", "c"])
    found = processes(plan, plan.models[0], cluster_roles(plan, plain()), hosts, 5000)
    hosts.close()
    assert [one.host for one in found] == ["a", "b"]
    assert not {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} & set(found[0].environment)
    assert found[0].command[0] == "/conda/python"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ('most_load = "5gbit"', 'most_load = "5gbit"\nports = "80-90"'),
            "cluster.ports = '80-90' is not a range of 4",
        ),
        (('most_load = "5gbit"', 'most_load = "5gbit"\nports = "20000-20002"'), "is not a range of 4 ports at least"),
        (
            ('most_load = "5gbit"', 'most_load = "5gbit"\nenvironment = { RANK = "1" }'),
            "gives RANK, which ringtap sets",
        ),
        (('most_load = "5gbit"', 'most_load = "5gbit"\nenvironment = { A = [1] }'), r"gives A the value \[1\]"),
        (
            ('most_load = "5gbit"', 'most_load = "5gbit"\nenvironment = { "A B" = "1" }'),
            "not the name of an environment",
        ),
        (('training = "10.0.0.1"', 'training = "10.0.0.1"\ngpus = [-1]'), "hosts.gpus = .* a list of GPUs"),
        (('command = ["train"]', 'command = ["train", "{pyton}"]'), r"holds \{pyton\}; did you mean \{python\}"),
        (
            ('command = ["train"]', 'compute = "1s"\nlayers = 1\nlaunch = "host"'),
            "models.launch is for a command of your own",
        ),
        (
            ('command = ["train"]', 'command = ["train"]\nlaunch = "host"\nframework = "horovod"'),
            "models.launch = .host. does not work with",
        ),
        (('workers = ["a", "b"]', 'workers = ["a", "a"]'), "ranks = 2 under"),
    ],
)
def test_wrong_keys_of_servers_are_refused(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan_of(tmp_path, changed(PLAN, change))


def test_what_a_job_would_miss_on_a_host(tmp_path: Path) -> None:
    def problems(*command: str, directory: str = str(tmp_path), **environment: str) -> list[str]:
        return list(job_facts(list(command), directory, environment)["problems"])

    (tmp_path / "train.py").touch()
    here = Path.cwd()
    assert problems(sys.executable, "train.py") == []
    assert problems("train", PATH="/nowhere") == [
        "the job's command begins with train, which is not a program on the PATH there"
    ]
    assert problems("./train.py")[0].endswith("which is not a program there")
    assert problems(sys.executable, "-u", "other.py", "out.py") == [
        f"the job's script other.py is not there (looked for from {tmp_path})"
    ]
    assert problems("sh", "-c", "python gone.py") == []
    assert "so its steps are not recorded" in problems(sys.executable, "-I", "train.py")[0]
    assert problems("true", directory="/no/folder") == [
        "the job's folder /no/folder cannot be entered: No such file or directory"
    ]
    assert Path.cwd() == here


class Ended:
    """A job's process that has ended."""

    name = "My model"

    def __init__(self, log: Path, words: str) -> None:
        self.log = log
        log.write_text(words)

    def exit_code(self) -> int:
        return 1


def test_a_known_cause_is_told_once_and_without_what_it_led_to(tmp_path: Path) -> None:
    run, hosts = RunDirectory.create(tmp_path / "run", "sweep", [], 1), LocalHosts(["a", "b", "c"])

    def words(**said: str) -> tuple[bool, str]:
        processes = {name: [Ended(tmp_path / name, text)] for name, text in said.items()}
        return failure_messages(plan_of(tmp_path), hosts, run, processes)

    gone, missing = "RuntimeError: Connection closed by peer", "ModuleNotFoundError: No module named 'torch'"
    try:
        assert words(a=missing, b=missing, c="") == (True, f"a, b: {missing} ({tmp_path / 'a'})")
        assert words(a=gone, b=missing, c=gone) == (True, f"b: {missing} ({tmp_path / 'b'})")
        assert words(a=gone, b="step 1", c="") == (
            False,
            f"a: {gone} ({tmp_path / 'a'}); b: step 1 ({tmp_path / 'b'}); no output from c",
        )
    finally:
        hosts.close()


def test_room_on_a_disk_is_asked_for_where_the_folder_will_be(tmp_path: Path) -> None:
    assert room_problem(str(tmp_path / "not" / "there"), 1000) == ""
    assert "left, and the sweep may write" in room_problem(str(tmp_path / "not" / "there"), 10**18)
    assert "/proc cannot be written" in room_problem("/proc/none", 0) or "/proc has" in room_problem("/proc/none", 1)


def test_a_sweep_that_this_machines_disk_cannot_hold_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    window = '[window]\nmin_time = "9999999999s"\nmax_time = "9999999999s"\n'
    long = f'[sweep]\nloads = [0]\n{window}[[models]]\nname = "vgg16"\n'
    plan_of(tmp_path, long)
    assert main(["sweep", str(tmp_path / "plan.toml"), "-o", str(tmp_path / "not" / "there")]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(rf"ringtap: {tmp_path} has .* left, and the sweep may write .*: free some, or name .*\n", said)
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ('command = ["{python}", "train.py"]', "the job's script train.py is not there (looked for from "),
        ('command = ["no-such-program"]', "the job's command begins with no-such-program, which is not a program on "),
        ('command = ["true"]\ndirectory = "/no/folder"', "the job's folder /no/folder cannot be entered: No such file"),
        ('command = ["true"]', ""),
    ],
)
def test_what_a_job_would_miss_on_a_testbed_is_said_before_it_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_of(tmp_path, f'[sweep]\nloads = [0]\n[[models]]\nname = "mine"\nparameters = 1\n{model}\n')
    problems = local_job_problems(plan)
    assert len(problems) == bool(why)
    if why:
        assert problems[0].startswith(f"model mine: {why}")
        assert main(["sweep", "plan.toml", "-o", "run"]) == 2
        assert problems[0] in capsys.readouterr().err
        assert not Path("run").exists()


@pytest.mark.parametrize("resume", [[], ["--resume"]])
@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("other", "other is not empty, and no run directory: name another folder"),
        ("file", "file is a file: name a folder"),
        ("file/below", "file is a file: name a folder"),
        ("job", "job is no sweep: name another folder"),
    ],
)
def test_a_folder_that_is_no_sweep_is_not_measured_into(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    resume: list[str],
    output: str,
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    plan_of(tmp_path, '[sweep]\nloads = [0]\n[[models]]\nname = "mine"\nparameters = 1\ncommand = ["true"]\n')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").touch()
    (tmp_path / "file").touch()
    RunDirectory.create(tmp_path / "job", "job", [], 0)
    assert main(["sweep", "plan.toml", "-o", output, *resume]) == 2
    if output == "job" and not resume:
        why = "job is not empty: name another folder, or resume with --resume if it is a sweep"
    assert capsys.readouterr().err.splitlines()[-1] == f"ringtap: {why}"


def test_ports_are_those_of_the_plan(tmp_path: Path) -> None:
    first = free_port("127.0.0.1", 4)
    assert first <= free_port("127.0.0.1", 2, (first, first + 3)) <= first + 2
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.7", 1, (first, first + 3))
    assert plan_of(tmp_path, changed(PLAN, ("i_may_load", 'ports = "20000-20100"\ni_may_load'))).topology.ports == (  # type: ignore[union-attr]
        20000,
        20100,
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", (0, "no output")),
        ("Welcome\nepoch 1\n", (1, "epoch 1")),
        (
            "Traceback\nFileNotFoundError: data\nroot: ChildFailedError: rank 0\nelastic failed\n",
            (3, "FileNotFoundError: data"),
        ),
        (
            "RuntimeError: Connection closed by peer [10.0.0.1]\n",
            (2, "RuntimeError: Connection closed by peer [10.0.0.1]"),
        ),
        ("agent: steps: No space left on device\nloaded\n", (3, "agent: steps: No space left on device")),
        ("[W1122 04:10:27.9 socket.cpp:207] [c10d] The hostname cannot be retrieved.\nstep 3\n", (1, "step 3")),
        ("[W1122 04:10:27.9] a name cannot be found\nError: reset by peer\n", (2, "Error: reset by peer")),
        ("a.py:3: UserWarning: a default cannot be found\nbye\n", (1, "bye")),
        ("a\x1b[31mError: red\x1b[0m", (3, "[31mError: red")),
    ],
)
def test_the_line_that_says_most_is_found(text: str, found: tuple[int, str]) -> None:
    assert failure_line(text) == found


S = 1_000_000_000


@pytest.mark.parametrize(
    ("ends", "now", "seconds"),
    [
        ((0, 1, 2), 3, 0),
        ((0, 1, 2), 6.9, 0),
        ((0, 1, 2), 7.5, 5.5),
        ((0, 5, 6), 20, 0),
        ((0, 0.1), 2.3, 0),
        ((0, 0.1), 9, 8.9),
    ],
)
def test_a_job_stands_still_that_takes_far_longer_than_ever_before(
    ends: tuple[float, ...], now: float, seconds: float
) -> None:
    assert stalled_s([round(end * S) for end in ends], round(now * S)) == pytest.approx(seconds)


def point(step: int = 0, traffic: str = "iperf", requested_bps: int = 0) -> dict[str, Any]:
    return {
        "series": f"mine-{traffic}",
        "model": "mine",
        "traffic": traffic,
        "step": step,
        "requested_bps": requested_bps,
        "directory": f"series/mine-{traffic}-1",
        "window_start_ns": 1,
        "window_end_ns": 2,
    }


@pytest.mark.parametrize(
    ("change", "key", "touches"),
    [
        (("loads = [0, 0.4]", "loads = [0, 0.4, 0.5]"), "loads", False),
        (("loads = [0, 0.4]", "loads = [0.1, 0.4]"), "loads", True),
        (('"10gbit"', '"9gbit"'), "capacity_bps", True),
        (('["train"]', '["train", "more"]'), "models.mine.command", True),
        (("parameters = 1\n", "parameters = 2\n"), "models.mine.parameters", False),
        (("parameters = 1\n", "parameters = 1\nbatch = 2\n"), "models.mine.batch", False),
        (('name = "mine"', 'name = "mine"\ntitle = "My model"'), "models.mine.title", False),
        (('"5gbit"', '"6gbit"'), "topology.most_load_bps", False),
        (('["iperf"]', '["iperf", "consistent"]'), "traffic", False),
        (('["iperf"]', '["consistent"]'), "traffic", True),
        (('"10.0.0.3"', '"10.0.0.3"\nworkdir = "/data"'), "topology.machines.c.workdir", False),
        (('"10.0.0.3"', '"10.0.0.4"'), "topology.machines.c.training", True),
        (('"10.0.0.1"', '"10.0.0.1"\ngpus = ["1"]'), "topology.machines.a.gpus", True),
        (('"10gbit"', '"10gbit"\nseed = 7'), "seed", True),
        (("[cluster]", '[window]\nstart_timeout = "10s"\n[cluster]'), "window.start_timeout_s", False),
        (("[cluster]", '[window]\nmin_time = "11s"\n[cluster]'), "window.min_s", True),
    ],
)
def test_a_plan_may_change_in_what_no_measured_point_depends_on(
    tmp_path: Path, change: tuple[str, str], key: str, touches: bool
) -> None:
    before = resolved(plan_of(tmp_path))
    now = resolved(plan_of(tmp_path, changed(PLAN, change)))
    found = plan_changes(before, now, [point()])
    assert key in (found.touching if touches else found.free)
    assert key not in (found.free if touches else found.touching)
    assert plan_changes(before, now, []).touching == [], "nothing has been measured"
    assert plan_changes(before, before, [point()]) == ([], [])


def test_an_interpreter_that_no_command_asks_for_is_refused(tmp_path: Path) -> None:
    text = changed(PLAN, ('"10.0.0.2"', '"10.0.0.2"\njob_python = "/p"'))
    words = r"plan.toml line 22: hosts.job_python is for .python. in the command of a model, and none has it"
    with pytest.raises(UsageError, match=words):
        plan_of(tmp_path, text)
    plan_of(tmp_path, changed(text, ('["train"]', '["sh", "-c", "exec {python} train.py"]')))


def test_the_interpreter_of_a_job_that_was_measured_may_not_change(tmp_path: Path) -> None:
    text = changed(PLAN, ('["train"]', '["{python}", "train.py"]'))
    before = resolved(plan_of(tmp_path, text))
    now = resolved(plan_of(tmp_path, changed(text, ('"10.0.0.1"', '"10.0.0.1"\njob_python = "/p"'))))
    assert plan_changes(before, now, [point()]).touching == ["topology.machines.a.job_python"]
    assert plan_changes(before, now, [point() | {"model": "another"}]).touching == []


def test_a_plan_of_an_older_version_has_not_changed(tmp_path: Path) -> None:
    now = resolved(plan_of(tmp_path))
    before = json.loads(json.dumps(now))
    for name in ("ports", "environment"):
        del before["topology"][name]
    for machine in before["topology"]["machines"]:
        for name in ("job_python", "ranks", "gpus", "environment"):
            del machine[name]
    for name in ("launch", "directory", "environment", "job", "batch"):
        del before["models"][0][name]
    assert plan_changes(before, now, [point()]) == ([], [])


@pytest.mark.parametrize(
    "change",
    [
        {"loads": None},
        {"loads": ["0"]},
        {"topology": {}},
        {"models": [{"title": "x"}]},
        {"topology": {"workers": [1], "cross_from": "", "cross_to": ""}},
        {"topology": {"workers": [], "cross_from": "", "cross_to": "", "machines": [3]}},
    ],
)
def test_a_run_whose_plan_is_damaged_is_not_gone_on_with(tmp_path: Path, change: dict[str, Any]) -> None:
    now = resolved(plan_of(tmp_path))
    with pytest.raises(UsageError, match=r"run\.json does not say what was measured \(.*\): use a new folder"):
        plan_changes(now | change, now, [point()])
    with pytest.raises(UsageError, match="does not say what was measured"):
        plan_changes({}, now, [point()])


def test_lists_of_any_kind_in_a_run_s_plan_are_compared(tmp_path: Path) -> None:
    now = resolved(plan_of(tmp_path))
    assert plan_changes(now | {"burst": {"models": 3, "machines": [[]]}}, now, [point()]).touching == []


def test_loads_of_a_point_whose_step_is_not_known_may_not_change(tmp_path: Path) -> None:
    before = resolved(plan_of(tmp_path))
    now = resolved(plan_of(tmp_path, changed(PLAN, ("loads = [0, 0.4]", "loads = [0, 0.4, 0.5]"))))
    stepless = {key: value for key, value in point().items() if key != "step"}
    for one in (stepless, point(step=7)):
        assert plan_changes(before, now, [one]).touching == ["loads"]


def test_a_dry_run_says_when_loads_are_too_few_for_a_congestion_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = '[sweep]\nloads = {}\n[[models]]\nname = "vgg16"\n'
    words = "3 different loads, too few for a congestion point (4): add loads"
    assert doubts(plan_of(tmp_path, text.format("[0, 0.3, 0.3, 0.305, 0.6]"))) == [words]
    assert doubts(plan_of(tmp_path, text.format("[0.3, 0.3]"))) == [
        "1 different load, too few for a fit (3) and a congestion point (4): add loads"
    ]
    assert (
        "hardly slower at the heaviest load (4%)" in doubts(plan_of(tmp_path, text.format("[0, 0.01, 0.02, 0.04]")))[0]
    )
    assert doubts(plan_of(tmp_path, text.format("[0, 0.3, 0.6, 0.8]"))) == []
    plan_of(tmp_path, text.format("[0, 0.3, 0.6]"))
    assert main(["sweep", str(tmp_path / "plan.toml"), "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"warning: {words}"
    assert main(["sweep", str(tmp_path / "plan.toml"), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == [words]


def test_only_marked_folders_that_nobody_uses_are_cleaned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_control_socket, "private_folder", lambda: tmp_path / "sockets")
    locks = {name: tmp_path / "sockets" / f"{name}.lock" for name in ("killed", "alive", "new")}
    (tmp_path / "sockets").mkdir()
    for name, lock in locks.items():
        lock.touch()
        lock.with_suffix(".sock").touch()
        os.utime(lock, None if name == "new" else (1, 1))
    holder = locks["alive"].open("r+")
    fcntl.flock(holder, fcntl.LOCK_EX)
    worker = HostWorker()
    workdir = tmp_path / "work"
    for name in ("used", "left", "other"):
        worker._make_private(str(workdir), str(workdir / name), f"desk:/runs/{name}")
        (workdir / name / "file").write_bytes(bytes(100))
    (workdir / "mine").mkdir()
    for name in ("left", "other"):
        os.close(worker._owned.pop(str(workdir / name)))
    assert clean(workdir, "desk:/runs/lef") == []
    (removed,) = clean(workdir, "desk:/runs/left")
    assert (removed["path"], removed["run"]) == (str(workdir / "left"), "desk:/runs/left")
    assert removed["bytes"] >= 100
    assert len(list((tmp_path / "sockets").iterdir())) == 6, "they may be of another run"
    assert [one["path"] for one in clean(workdir, "")] == [str(workdir / "other"), str(locks["killed"])]
    assert sorted(path.name for path in workdir.iterdir()) == ["mine", "used"]
    left = ["alive.lock", "alive.sock", "new.lock", "new.sock"]
    assert sorted(path.name for path in (tmp_path / "sockets").iterdir()) == left
    holder.close()
    worker._remove(str(workdir / "used"))
    for fd in (worker._wake, worker._waker):
        os.close(fd)


def measured(step: int) -> str:
    """A line of points.jsonl."""
    window = {"window_start_ns": 1, "window_end_ns": 2 * 10**9, "iterations": 20, "ended": "enough", "late_share": 0.0}
    return json.dumps(point(step) | window | {"directory": "series/mine-iperf-1"}) + "\n"


def test_the_status_of_a_sweep_that_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["ringtap", "sweep", "my plan.toml", "-o", "run"]
    run = RunDirectory.create(tmp_path / "run", "sweep", argv, 0, plan=resolved(plan_of(tmp_path)))
    (run.path / "points.jsonl").write_text(measured(0))
    RunDirectory.create(run.path / "series" / "mine-iperf-1", "job", [], 0)
    with (run.path / "sweep.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["status", str(run.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{run.path}: running: 1 of 2 points", "    0 mine-iperf  1 of 2 points, running"]
    assert main(["status", str(run.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run.path}: partial: 1 of 2 points; it was ended before it could say so"
    assert lines[1] == "    0 mine-iperf  1 of 2 points, stopped"
    assert lines[2] == f"To measure what is missing: ringtap sweep 'my plan.toml' -o {run.path} --resume"
    run.finish("complete")  # as after --series of another series
    assert main(["status", str(run.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run.path}: partial: 1 of 2 points; the last sweep into it was of one series alone"
    assert lines[2] == f"To measure what is missing: ringtap sweep 'my plan.toml' -o {run.path} --resume"
    (run.path / "points.jsonl").write_text(measured(0) + measured(1))
    assert main(["status", str(run.path), "--json"]) == 0
    item = json.loads(capsys.readouterr().out)
    assert (item["status"], item["why"], item["series"][0]["status"]) == ("complete", "2 of 2 points", "complete")


def test_the_doctors_first_line_says_that_a_plan_can_run_or_what_prevents_it() -> None:
    plan = Path("my plan.toml")
    assert verdict(plan, []) == ["The plan can run. Next: ringtap sweep 'my plan.toml'"]
    assert verdict(plan, ["S1 is\x1b[31m ill"]) == ["The plan cannot run: S1 is\\x1b[31m ill."]
    first, *listed = verdict(plan, ["S1 is ill", "S2 is full"])
    assert first == "The plan cannot run: 2 things prevent it."
    assert listed == ["  1. S1 is ill", "  2. S2 is full"]


def test_hosts_that_cannot_record_packets_are_named_before_anything_is_measured() -> None:
    plan = load_plan({"sweep": {"loads": [0.3], "capture": [0.3]}, "models": [{"name": "vgg16"}]})
    spec, roles = layout(plan)
    network = sweep_roles.testbed_roles(spec, roles, "")
    assert capture_points(network) == {"switch": ("to-S0",), "S3": ("eth0",), "S0": ("eth0",), "S2": ("eth0",)}
    hosts = LocalHosts(["switch", *spec.hosts])
    try:
        with pytest.raises(UsageError) as refused:
            check_capture(plan, hosts, network)
    finally:
        hosts.close()
    said = str(refused.value)
    assert said.startswith("no packets can be recorded, which sweep.capture asks for: switch: there is no interface")


def test_in_configuration_a_the_sender_is_the_host_of_the_bottleneck() -> None:
    tables = {"sweep": {"loads": [0.3]}, "models": [{"name": "vgg16"}], "testbed": {"configuration": "A"}}
    spec, roles = layout(load_plan(tables))
    points = capture_points(sweep_roles.testbed_roles(spec, roles, ""))
    assert points == {"switch": ("to-S0",), "S2": ("eth0",), "S0": ("eth0",)}
