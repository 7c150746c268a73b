"""The doctor: every check apart, as whoever asks, in whatever environment, within 3 s and without a trace."""

import ctypes
import faulthandler
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ringtap import doctor as doctor_command
from ringtap.agents import hook
from ringtap.agents.clock import local_clock as clock_source
from ringtap.agents.doctor import job_interpreter as doctor_job
from ringtap.agents.doctor import node_checks as doctor_node
from ringtap.agents.doctor import run_checks as doctor
from ringtap.agents.doctor import run_checks as doctor_software
from ringtap.agents.doctor.run_checks import Question, Task, diagnose, run_apart, tasks
from ringtap.collectors import registry
from ringtap.collectors.collector_interface import Check
from ringtap.core.errors import UsageError
from ringtap.core.installation import pip

pytestmark = pytest.mark.shares

SITE = str(Path(psutil.__file__).parents[1])
HOOK = Path(str(hook.__file__)).parent
ROOT = Path(__file__).resolve().parents[4]
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all", "--no-new-privs"]
NO_CAPABILITIES = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]


def ringtap(
    *arguments: str, prefix: tuple[str, ...] = (), interpreter: str = sys.executable, **kept: Any
) -> subprocess.CompletedProcess[str]:
    command = [*prefix, interpreter, "-m", "ringtap.cli", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **kept)


def states(report: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["state"] for check in report["checks"]}


def of(report: dict[str, Any], name: str) -> dict[str, str]:
    return next(check for check in report["checks"] if check["name"] == name)


# ---- the registry


def test_every_collector_is_found_by_name_and_unknown_ones_are_refused() -> None:
    assert tuple(name for name in registry.ORDER if name != "packets") == registry.DEFAULT
    for name in registry.ORDER:
        assert registry.collector_class(name).name == name
    with pytest.raises(UsageError, match="did you mean 'sockets'"):
        registry.collector_class("socket")
    with pytest.raises(UsageError, match="the collectors are nic, "):
        registry.collector_class("zzz")


# ---- the whole


def test_a_machine_that_records_says_so_collector_by_collector() -> None:
    done = ringtap("--json", "--python", sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["recordable"] is True
    found = states(report)
    assert [name for name in found if name in registry.ORDER] == list(registry.ORDER)
    assert set(found) >= {
        "steps",
        "ddp",
        "horovod",
        "nccl",
        "clock",
        "run directory",
        "scheduler",
        "testbed",
        "traffic",
    }
    assert "failed" not in found.values(), [check for check in report["checks"] if check["state"] == "failed"]
    assert found["steps"] == "ok"
    for name in ("nic", "sockets", "host"):
        assert found[name] == "ok"
    for check in report["checks"]:
        assert check["reason"], check
        assert "\n" not in check["reason"] + check["remedy"]
        assert check["remedy"] or check["state"] == "ok" or check["name"] in ("qdisc", "ethtool"), check


def test_the_table_fits_a_terminal_and_is_plain_text() -> None:
    done = ringtap("-v")
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert "\033" not in done.stdout
    for title in ("Collectors", "Run", "Node", "Other verbs"):
        assert f"\n{title}\n" in done.stdout
    assert done.stdout.startswith("A job can be recorded here")
    assert done.stdout.endswith("\nNext: ringtap run -- YOUR COMMAND\n")
    assert done.stderr == ""


def test_the_verdict_comes_first_then_what_is_lacking_and_what_is_fine_in_a_line() -> None:
    about = {"ringtap": "1", "host": "n0", "user": "u", "uid": 0, "kernel": "6", "python": "3", "recordable": True}
    rows = [
        ("collectors", "steps", "degraded", "python has no torch", "pip install torch"),
        ("collectors", "ddp", "unavailable", "no torch", "pip install torch"),
        ("collectors", "nic", "ok", "eth0", ""),
        ("collectors", "gpu", "unavailable", "no driver", "nothing, where the node has no NVIDIA GPU; else ask"),
        ("run", "clock", "degraded", "not synchronised", "ask for chrony"),
        ("node", "cores", "ok", "2", ""),
    ]
    names = ("group", "name", "state", "reason", "remedy")
    report = about | {"checks": [dict(zip(names, row, strict=True)) for row in rows]}
    assert doctor_command.table(report, colour=False) == [
        "A job can be recorded here, but python has no torch.",
        "",
        "  degraded    steps          python has no torch (also: ddp)",
        "                             -> pip install torch",
        "",
        "  degraded    clock          not synchronised",
        "                             -> ask for chrony",
        "",
        "Fine: nic, cores.",
        "Only where there is such a device or job: gpu.",
    ]
    assert doctor_command.table(report | {"checks": report["checks"][2:4]}, colour=False) == [
        "A job can be recorded here.",
        "",
        "Fine: nic.",
        "Only where there is such a device or job: gpu.",
    ]


def test_it_takes_as_long_as_25_starts_of_ringtap() -> None:
    """By processor time, which another program stretches less than the wait: 2 s of it where a start takes 0.08 s."""

    def spent_s() -> float:
        times = os.times()
        return times.children_user + times.children_system

    begin_s = spent_s()
    for _ in range(5):
        subprocess.run([sys.executable, "-m", "ringtap.cli", "--version"], capture_output=True, check=True)
    start_s = (spent_s() - begin_s) / 5
    begin_s = spent_s()
    assert ringtap("--json").returncode == 0
    assert spent_s() - begin_s < 25 * start_s


def test_it_leaves_nothing_behind(tmp_path: Path) -> None:
    def tree() -> set[Path]:
        hook = HOOK
        return {path for folder in (tmp_path, hook) for path in folder.rglob("*") if "__pycache__" not in path.parts}

    hook_caches = set(HOOK.rglob("__pycache__"))
    before = tree()
    processes = {process.pid for process in psutil.Process().children(recursive=True)}
    assert ringtap("-o", "runs", cwd=tmp_path).returncode == 0
    assert tree() == before
    assert set(HOOK.rglob("__pycache__")) == hook_caches
    assert {process.pid for process in psutil.Process().children(recursive=True)} == processes


def ordinary_user() -> tuple[list[str], str]:
    """How to become one, and an interpreter of this version that it may run.

    Where every such interpreter lies in a folder closed to others, root without any capability takes its place.
    """
    if os.getuid() != 0:
        return [], sys.executable
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for interpreter in filter(None, [os.path.realpath(sys.executable), shutil.which(version, path="/usr/bin")]):
        code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {SITE!r}]; import psutil, ringtap.agents.doctor.run_checks"
        tried = subprocess.run([*NOBODY, "sh", "-c", 'exec "$@"', "sh", interpreter, "-c", code], check=False)
        if tried.returncode == 0:
            return NOBODY, interpreter
    return NO_CAPABILITIES, sys.executable


def test_an_ordinary_user_in_a_bare_environment() -> None:
    prefix, interpreter = ordinary_user()
    bare = ("env", "-i", f"PYTHONPATH={ROOT}:{SITE}")
    done = ringtap("--json", "--python", interpreter, prefix=(*prefix, *bare), interpreter=interpreter, cwd="/tmp")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    found = states(report)
    assert "failed" not in found.values(), [check for check in report["checks"] if check["state"] == "failed"]
    assert (found["steps"], found["nic"], found["sockets"]) == ("ok", "ok", "ok")
    assert found["packets"] == "unavailable", "what needs a privilege is told as such"
    assert "CAP_NET_RAW" in of(report, "packets")["remedy"]
    assert report["uid"] == (65534 if prefix == NOBODY else os.getuid())


def test_a_python_without_torch_records_marks_alone(tmp_path: Path) -> None:
    bare = subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    assert bare.returncode == 0
    report = json.loads(ringtap("--json", "--python", str(tmp_path / "bare" / "bin" / "python")).stdout)
    assert of(report, "steps")["state"] == "degraded"
    assert "ringtap.step()" in of(report, "steps")["reason"]
    assert of(report, "horovod")["state"] == "unavailable"
    assert report["recordable"] is True


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("#!/bin/sh\nexit 3\n", "cannot be asked"),
        ("#!/bin/sh\nexec sleep 60\n", "did not answer within 8 s"),
        (f'#!/bin/sh\nexec "{sys.executable}" -I "$@"\n', "does not read PYTHONPATH"),
        ('#!/bin/sh\necho \'{"version": [2, 7, 18], "executable": "/usr/bin/python2"}\'\n', "older than 3.8"),
    ],
    ids=["broken", "hangs", "isolated", "old"],
)
def test_an_interpreter_that_cannot_record_is_told_and_the_exit_code_says_it(
    tmp_path: Path, script: str, says: str
) -> None:
    program = tmp_path / "python"
    program.write_text(script)
    program.chmod(0o755)
    done = ringtap("--json", "--python", str(program))
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["recordable"] is False
    assert report["duration_s"] < 10
    steps = of(report, "steps")
    assert steps["state"] == ("failed" if "did not answer" in says else "unavailable")
    assert re.search(says, steps["reason"])
    verdict = doctor_command.table(report, colour=False)[0]
    assert verdict.startswith("Cannot tell whether" if "did not answer" in says else "A job cannot be recorded here")
    assert of(report, "nic")["state"] == "ok", "the others are as they were"


def test_no_such_interpreter() -> None:
    done = ringtap("--python", "no-such-python")
    assert done.returncode == 1
    assert "there is no no-such-python on the PATH" in " ".join(done.stdout.split())
    assert "A job cannot be recorded here" in done.stdout


def test_a_folder_that_is_gone_is_one_sentence(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os, shutil, sys; os.chdir({str(gone)!r}); shutil.rmtree({str(gone)!r}); "
    code += "from ringtap.cli import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("ringtap: ")
    assert len(done.stderr.splitlines()) == 1


# ---- each check apart


def check_ok() -> dict[str, Check]:
    return {"one": Check("ok", "fine")}


def raises() -> dict[str, Check]:
    raise RuntimeError("first line\nsecond line")


def crashes() -> dict[str, Check]:
    faulthandler.disable()  # pytest's own words would fill its log
    ctypes.string_at(0)
    raise AssertionError


def hangs() -> dict[str, Check]:
    time.sleep(60)
    raise AssertionError


def starts_others() -> dict[str, Check]:
    subprocess.Popen(["sleep", "61.25"])
    return check_ok()


def talks() -> dict[str, Check]:
    os.write(1, b"noise on standard output\n")
    os.write(2, b"noise on standard error\n")
    return check_ok()


def exits() -> dict[str, Check]:
    os._exit(7)


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (raises, "broke down: RuntimeError: first line second line"),
        (crashes, "broke down: SIGSEGV"),
        (exits, "broke down: no answer"),
        (hangs, "did not answer"),
    ],
    ids=["raises", "crashes", "exits", "hangs"],
)
def test_a_check_that_fails_badly_costs_one_line(work: Callable[[], dict[str, Check]], says: str) -> None:
    chosen = [Task("a", ("one",), check_ok), Task("b", ("bad", "worse"), work), Task("c", ("one",), check_ok)]
    first, bad, worse, last = run_apart(chosen, 1.0)
    assert (first.state, last.state) == ("ok", "ok")
    assert (bad.name, bad.state, worse.name, worse.state) == ("bad", "failed", "worse", "failed")
    assert says in bad.reason
    assert "\n" not in bad.reason


def test_what_a_check_starts_ends_with_it() -> None:
    assert [finding.state for finding in run_apart([Task("a", ("one",), starts_others)], 1.0)] == ["ok"]
    # killed by then; the kernel may need a moment to take it away
    deadline_s = time.monotonic() + 10
    while [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "61.25"]]:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_what_a_check_prints_does_not_reach_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_apart([Task("a", ("one",), talks)], 1.0)[0].state == "ok"
    assert capfd.readouterr() == ("", "")


def test_without_a_single_process_more_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    (finding,) = run_apart([Task("a", ("one",), check_ok)], 1.0)
    assert finding.state == "failed"
    assert "Resource temporarily unavailable" in finding.reason


def test_a_collector_that_is_broken_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def collector_class(name: str) -> Any:
        if name == "sockets":
            raise ImportError("No module named 'pyroute2'", name="pyroute2")
        if name == "gpu":
            raise RuntimeError("a driver gone mad")
        return registry.collector_class(name)

    monkeypatch.setattr(doctor, "collector_class", collector_class)
    chosen = [task for task in tasks(Question()) if task.group == "collectors" and task.names != doctor_job.NAMES]
    report = diagnose(Question(), chosen)
    found = states(report)
    assert found["sockets"] == "unavailable"
    assert of(report, "sockets")["remedy"] == f"{pip()} install pyroute2"
    assert found["gpu"] == "failed"
    assert (found["nic"], found["host"]) == ("ok", "ok")
    monkeypatch.setenv("CC_CLUSTER", "fir")
    assert "pip download pyroute2 on a login node" in of(diagnose(Question(), chosen), "sockets")["remedy"]


def test_the_exit_code_is_that_of_steps_and_nic() -> None:
    def having(**found: str) -> bool:
        def work(name: str, state: Any) -> Callable[[], dict[str, Check]]:
            return lambda: {name: Check(state, "so")}

        chosen = [Task("collectors", (name,), work(name, state)) for name, state in found.items()]
        return bool(diagnose(Question(), chosen)["recordable"])

    assert having(steps="ok", nic="ok", sockets="unavailable")
    assert not having(steps="failed", nic="ok")
    assert having(steps="degraded", nic="degraded")
    assert not having(steps="unavailable", nic="ok")
    assert not having(steps="ok", nic="unavailable")
    assert not having(steps="ok")


# ---- single checks


def test_where_a_run_directory_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_node.run_directory(tmp_path / "not" / "yet").state == "ok"
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "file"
    file.touch()
    assert doctor_node.run_directory(file).state == "unavailable"
    assert "cannot be written" in doctor_node.run_directory(Path("/proc/runs")).reason
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    assert "-o /scratch/me/runs" in doctor_node.run_directory(Path("/proc/runs")).remedy
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
    found = doctor_node.run_directory(Path("/dev/shm"))
    assert found.state == "degraded"
    assert "4 nodes do not share" in found.reason


def test_in_a_job_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PBS_", "CC_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert doctor_node.scheduler(Path()).state == "ok"
    monkeypatch.setenv("CC_CLUSTER", "narval")
    login = doctor_node.scheduler(Path())
    assert login.state == "degraded"
    assert "salloc --account=def-NAME" in login.remedy
    for name, value in {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NNODES": "2", "SLURM_NTASKS": "8"}.items():
        monkeypatch.setenv(name, value)
    assert doctor_node.scheduler(Path()).reason == "Slurm job 77 step 0 on narval: 2 nodes, 8 tasks"


def test_few_open_files_are_told_with_the_remedy() -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096)); "
    code += "from pathlib import Path; from ringtap.agents.doctor import node_checks as d; print(d.limits(Path()))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "degraded" in said
    assert "ulimit -n 4096" in said


def test_one_core_is_told() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    code += "from pathlib import Path; from ringtap.agents.doctor import node_checks as d; print(d.cores(Path()))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "job and agent share one" in said


@pytest.mark.parametrize(
    ("cgroup", "files", "share", "limit"),
    [
        ("0::/job\n", {"job/cpu.max": "150000 100000", "job/memory.max": "4294967296"}, 1.5, 4294967296),
        ("0::/job/step\n", {"job/cpu.max": "400000 100000", "job/step/cpu.max": "max 100000"}, 4.0, 0),
        (
            "4:memory:/job\n1:cpu,cpuacct:/job\n0::/\n",
            {
                "cpu,cpuacct/job/cpu.cfs_quota_us": "200000",
                "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
                "memory/job/memory.limit_in_bytes": "1000000",
                "memory/memory.limit_in_bytes": "9223372036854771712",
            },
            2.0,
            1000000,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 0.0, 0),
        ("", {}, 0.0, 0),
    ],
    ids=["version 2", "a step within a job", "version 1", "no quota", "none"],
)
def test_limits_of_control_groups(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cgroup: str,
    files: dict[str, str],
    share: float,
    limit: int,
) -> None:
    (tmp_path / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    monkeypatch.setattr(doctor_node, "CGROUP_FILE", tmp_path / "cgroup")
    monkeypatch.setattr(doctor_node, "CGROUP_ROOT", tmp_path / "fs")
    assert doctor_node.cpu_share() == share
    assert doctor_node.memory_limit_bytes() == limit


def test_a_taken_port_is_named() -> None:
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        found = doctor_software.traffic_on((port,))
    assert found.state == "degraded"
    assert str(port) in found.reason
    assert doctor_software.traffic_on((port,)).state == "ok"


def test_the_clock_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def says(**state: Any) -> Check:
        monkeypatch.setattr(clock_source, "adjtimex", lambda: state)
        return doctor_node.clock(Path())

    good = says(synchronised=True, max_error_us=2500)
    assert good.state == "ok"
    assert "off by 2.5 ms at most; kernel receive stamps" in good.reason
    assert says(synchronised=False, max_error_us=16000000).state == "degraded"
    assert "adjtimex: Operation not permitted" in says(missing="adjtimex: Operation not permitted").reason
    monkeypatch.setattr(doctor_node, "_kernel_stamps", lambda: False)
    assert "stamps no datagrams" in says(synchronised=True, max_error_us=1).reason


def test_a_report_with_anything_in_it_is_printed_in_80_columns() -> None:
    wild = "\033[31mred\tand " + "x" * 200 + "\nend"
    check = {"group": "collectors", "name": "gpu", "state": "failed", "reason": wild, "remedy": wild}
    report = {"ringtap": "1", "host": "h" * 60, "user": "u", "uid": 0, "kernel": "k" * 30, "python": "3"}
    lines = doctor_command.table(report | {"checks": [check], "recordable": False}, colour=False)
    assert max(len(line) for line in lines) <= 80
    assert not [line for line in lines if "\033" in line or "\n" in line or "\t" in line]
    coloured = doctor_command.table(report | {"checks": [check], "recordable": False}, colour=True)
    assert any("\033[35mfailed" in line for line in coloured)


@pytest.mark.parametrize(
    ("address", "environment", "words"),
    [
        ("127.0.1.1", {}, "lab3 resolves to 127.0.1.1, where Gloo would listen and no other host can connect"),
        ("::1", {}, "lab3 resolves to ::1, where Gloo would listen and no other host can connect"),
        ("127.0.1.1", {"GLOO_SOCKET_IFNAME": "eth0"}, ""),
        ("10.0.0.3", {}, ""),
        ("fe80::1%eth0", {}, ""),
        ("", {}, ""),
    ],
)
def test_a_host_name_that_resolves_to_loopback_is_told_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, address: str, environment: dict[str, str], words: str
) -> None:
    def resolve(host: str, *_: object, **__: object) -> list[Any]:
        if not address:
            raise OSError(-2, "Name or service not known")
        return [(2, 1, 6, "", (address, 0))]

    monkeypatch.setattr(doctor_node.socket, "gethostname", lambda: "lab3")
    monkeypatch.setattr(doctor_node.socket, "getaddrinfo", resolve)
    assert doctor_node.gloo_on_loopback(environment) == words
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor_node.psutil, "net_if_stats", lambda: {"ens1": SimpleNamespace(isup=True, speed=0)})
    found = doctor_node.network(Path())
    remedy = "for a job of several hosts: export GLOO_SOCKET_IFNAME=ens1"
    assert (found.state, found.remedy) == (("degraded", remedy) if words else ("ok", ""))
