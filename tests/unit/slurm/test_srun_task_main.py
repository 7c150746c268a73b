"""The process of a batch script and the tasks of its steps, as far as they need no Slurm.

Real processes, with stand-ins for srun, scancel and scontrol. `tests.slurm` has a real Slurm, which ends jobs in all
other ways.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringtap.agents.job.exit_cause import SHELL_CAUSE, MemoryKills
from ringtap.core.errors import exit_words
from ringtap.core.run_directory import RunDirectory, write_json
from ringtap.slurm.job_state_file import read_report
from ringtap.slurm.run_job_steps import _end
from ringtap.slurm.srun_task_main import keep, matching
from ringtap.slurm.submission_file_names import SubmitPaths
from tests.unit.agent_processes import wait_for

pytestmark = pytest.mark.shares

NODE = os.uname().nodename
# the tasks of a step are a process group; their ids are kept under the step's number, and they begin when these are
SRUN = f"""\
#!{sys.executable}
import os, subprocess, sys, time
from pathlib import Path
cut = sys.argv.index(sys.executable)
options = dict(word[2:].partition("=")[::2] for word in sys.argv[1:cut])
count = int(options.get("ntasks", os.environ["SLURM_NTASKS"]))
steps = Path(__file__).parent / "steps"
steps.mkdir(exist_ok=True)
step = steps / str(len(list(steps.iterdir())))
parent = os.getppid()
while "kill-on-bad-exit" in options and os.path.exists(os.environ.get("HELD_BY", "")):  # the step of the job
    time.sleep(0.02)
    if os.getppid() != parent:
        sys.exit(1)
begin = ["sh", "-c", 'until [ -s "$0" ]; do sleep 0.01; done; exec "$@"', str(step)]
shape = {{"SLURM_STEP_ID": step.name, "SLURM_STEP_NUM_TASKS": count, "SLURM_STEP_TASKS_PER_NODE": count}}
tasks = []
for rank in range(count):
    place = shape | {{"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": 0}}
    environment = os.environ | {{name: str(value) for name, value in place.items()}}
    group = tasks[0].pid if tasks else 0
    tasks.append(subprocess.Popen(begin + sys.argv[cut:], env=environment, preexec_fn=lambda: os.setpgid(0, group)))
step.write_text(" ".join(str(task.pid) for task in tasks))
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCANCEL = f"""\
#!{sys.executable}
import os, signal, sys
from pathlib import Path
name, step = sys.argv[-2].partition("=")[2], sys.argv[-1].partition(".")[2]
tasks = [*map(int, (Path(__file__).parent / "steps" / step).read_text().split())]
if os.environ["TRACKED_BY"] == "cgroup":  # as proctrack/cgroup, but for SIGKILL
    for task in tasks:
        os.kill(task, signal.Signals["SIG" + name])
else:
    os.killpg(tasks[0], signal.Signals["SIG" + name])
"""
SCONTROL = f"#!/bin/sh\necho {NODE}\n"


class Batch:
    """A job of one node and two tasks."""

    def __init__(self, folder: Path) -> None:
        self.paths = SubmitPaths(folder / 'it\'s a "run"')
        tools = {"srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL}
        (folder / "bin").mkdir()
        for name, text in tools.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        self.environment = dict(os.environ) | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        self.environment |= {"SLURM_JOB_ID": "20007", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "2"}
        self.environment |= {"SLURM_JOB_NODELIST": NODE, "SLURM_TMPDIR": str(folder / "own disk")}
        self.environment["TRACKED_BY"] = "group"
        (folder / "own disk").mkdir()
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None

    def begin(self, *words: str, command: tuple[str, ...] = (), **variables: str) -> None:
        """Start the batch script's last line."""
        recorded = ["--collect=nic", "--every=100ms", "--grace=1"] if command else []
        line = [sys.executable, "-m", "ringtap.slurm.run_job_steps", str(self.paths.run), *recorded, *words]
        self.process = subprocess.Popen(
            [*line, *(["--", *command] if command else [])],
            cwd=self.folder,
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, command: tuple[str, ...] = (), **variables: str) -> tuple[int, str, str]:
        """The same to its end: exit code, output, errors."""
        self.begin(*words, command=command, **variables)
        return self.end()

    def end(self) -> tuple[int, str, str]:
        assert self.process
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def until_written(self, path: Path, text: str = "") -> None:
        wait_for(lambda: path.exists() and text in path.read_text(), 60)

    def until_told(self, count: int) -> None:
        """Wait until it has noted so many SIGTERMs."""
        wait_for(lambda: self.events().count("stopped TERM") == count, 60)

    def events(self, job: str = "20007") -> list[str]:
        return [line.partition(" ")[2] for line in self.paths.state(job).read_text().splitlines()]

    @property
    def info(self) -> dict[str, Any]:
        return dict(json.loads((self.paths.run / "run.json").read_text()))


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[Batch]:
    """A job that has not begun; it ends with the test."""
    batch = Batch(tmp_path)
    yield batch
    if batch.process and batch.process.poll() is None:
        batch.process.kill()
        batch.process.wait()
    for step in (tmp_path / "bin" / "steps").glob("*"):
        try:
            os.killpg(int(step.read_text().split()[0]), signal.SIGKILL)
        except (ProcessLookupError, IndexError):
            continue


def python(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


RANKS = """\
import json, os
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
print(json.dumps([os.environ[name] for name in names]) + "\\n", end="")  # one write: ranks share the output
"""


def test_a_script_that_is_submitted_by_hand_makes_its_run(batch: Batch) -> None:
    code, out, err = batch.run(command=python(RANKS))
    assert (code, err) == (0, "")
    assert sorted(map(json.loads, out.splitlines())) == [
        [str(rank), "2", str(rank), "2", NODE, "10014"] for rank in (0, 1)
    ]
    assert batch.events() == [f"begun on {NODE}", "recording 1 of 1 nodes", "ended 0"]
    assert (batch.info["status"], batch.info["reference"]) == ("complete", NODE)
    assert (batch.paths.run / "nodes" / NODE / "DONE").is_file()
    told = subprocess.run(
        [sys.executable, "-m", "ringtap.cli", "status", batch.paths.run], capture_output=True, text=True, check=True
    )
    assert "job 20007: ended: exit code 0" in told.stdout


# iteration 140 takes longer than each before it, also on a busy machine
STEPS = """\
import time, ringtap
longest_s, ended_s = 0.0, time.monotonic()
for number in range(150):
    time.sleep(0.5 + longest_s if number == 140 else 0.005)
    ringtap.step()
    now_s = time.monotonic()
    longest_s, ended_s = max(longest_s, now_s - ended_s), now_s
"""


@pytest.mark.needs_root("capture packets here")
def test_packets_around_slow_iterations_and_the_disk_limit_reach_the_recorder(batch: Batch) -> None:
    options = ("--collect=steps,packets", "--packets-around-slow=p99:100ms", "--disk-limit=1GB")
    code, _, err = batch.run(*options, command=python(STEPS), SLURM_NTASKS="1", GLOO_SOCKET_IFNAME="lo")
    assert (code, err) == (0, "")
    folder = batch.paths.run / "nodes" / NODE
    assert json.loads((folder / "node.json").read_text())["disk"]["limit_bytes"] == 1_000_000_000
    windows = [json.loads(line) for line in (folder / "packets" / "lo-windows.jsonl").read_text().splitlines()]
    assert 140 in [slow["step"] for window in windows for slow in window["iterations"]]


def test_a_limit_that_a_node_exceeds_at_once_does_not_concern_the_job(batch: Batch) -> None:
    code, out, err = batch.run("--disk-limit=1kB", command=("echo", "done"))
    assert (code, out, err) == (0, "done\ndone\n", "")


def test_a_recording_is_complete_if_signals_reach_its_task_alone(batch: Batch) -> None:
    assert batch.run(command=("true",), TRACKED_BY="cgroup") == (0, "", "")
    assert batch.info["status"] == "complete"
    assert (batch.paths.run / "nodes" / NODE / "DONE").is_file()


def test_a_job_that_begins_again_forgets_its_former_steps(batch: Batch) -> None:
    code, _, err = batch.run("--keep=*", command=("true",), SLURM_TMPDIR="")
    assert (code, err) == (0, f"ringtap: $SLURM_TMPDIR is not set on {NODE}: nothing can be kept\n")
    stale = [batch.paths.step("20007", step) for step in ("agents", "job")]
    assert [path.read_text() for path in stale] == ["0", "1"]
    # a step that begins late is not taken for its predecessor
    held_by = batch.folder / "held"
    held_by.touch()
    batch.begin(command=("true",), HELD_BY=str(held_by))
    batch.until_written(batch.paths.state("20007"), "ended 0")
    batch.until_written(batch.paths.step("20007", "agents"), "2")
    assert not stale[1].exists()
    held_by.unlink()
    assert batch.end()[0] == 0
    assert read_report(batch.paths, "20007").exit_code == 0
    assert batch.events().count("ended 0") == 2


def test_each_start_of_a_requeued_job_is_recorded_in_full(batch: Batch) -> None:
    """Beside what its first start recorded, which is not touched."""
    former = RunDirectory.create(batch.paths.run, "job", [], 0, access="group")
    (former.node(NODE) / "node.json").write_text("{}")
    former.finish("partial", "the job ended with exit code 143 after SIGTERM")
    assert batch.run(command=python(RANKS), SLURM_RESTART_COUNT="1")[::2] == (0, "")
    first = batch.info
    assert (first["status"], first["next_start"]) == ("partial", 'it\'s a "run"-restart1')
    assert first["why"] == 'Slurm started the job again: it\'s a "run"-restart1 has its next start'
    assert {path.name for path in batch.paths.run.rglob("*")} == {"run.json", "nodes", NODE, "node.json"}
    again = SubmitPaths(batch.paths.run.with_name(first["next_start"]))
    assert again.run.stat().st_mode & 0o777 == 0o750
    info = json.loads((again.run / "run.json").read_text())
    item = json.loads((again.run / "nodes" / NODE / "node.json").read_text())
    assert (info["status"], item["status"], len(item["jobs"])) == ("complete", "complete", 2)
    assert read_report(again, "20007").exit_code == 0


# rank 0 fails when the supervisor of rank 1 has told its end: srun's stand-in still waits for the task of rank 0
FAILS = """\
import os, sys, time
from pathlib import Path
first = Path("first")
if os.environ["RANK"] == "1":
    first.write_text(str(os.getppid()))
    sys.exit(3)
while not (first.exists() and first.read_text()):
    time.sleep(0.02)
while ") Z " not in Path(f"/proc/{first.read_text()}/stat").read_text():
    time.sleep(0.02)
sys.exit(9)
"""


def test_the_exit_code_is_that_of_the_rank_that_failed_first(batch: Batch) -> None:
    assert batch.run(command=python(FAILS))[0] == 3
    assert batch.events()[-1] == "ended 3"
    assert (batch.info["status"], batch.info["why"]) == ("failed", "the job ended with exit code 3")


@pytest.mark.parametrize(
    ("code", "entry", "output", "why"),
    [
        (137, {}, "slurmstepd: error: exceeded memory limit\n", ": Slurm's daemon says: exceeded memory limit"),
        (137, {"cause": "out of memory is one possible cause"}, "", ": out of memory is one possible cause"),
        (137, {"cause": "the kernel killed 1 process"}, "slurmstepd: oom_kill\n", ": the kernel killed 1 process"),
        (127, {"cause": "x was not found"}, "", ": x was not found"),
        (127, {"cause": SHELL_CAUSE}, "sh: 1: x: not found\n", ": its output says: sh: 1: x: not found"),
        (127, {"cause": SHELL_CAUSE}, "", f": {SHELL_CAUSE}"),
        (3, {}, "sh: 1: x: not found\n", ""),
    ],
)
def test_the_end_of_a_run_has_the_cause_with_the_best_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, entry: dict[str, str], output: str, why: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    run, paths = RunDirectory.create(tmp_path / "run", "job", [], 0), SubmitPaths(tmp_path / "run")
    jobs = [{"pid": 2, "exit_code": code, "ended_ns": 5} | entry, {"pid": 3, "exit_code": 143, "ended_ns": 6}]
    write_json(run.node("n0") / "node.json", {"status": "complete", "why": "", "jobs": jobs})
    paths.folder.mkdir()
    paths.output("7").write_text(output)
    assert _end(paths, 143, "", MemoryKills(tmp_path, tmp_path)) == code
    assert RunDirectory.open(run.path).info["why"] == f"the job ended with {exit_words(code)}{why}"


STUBBORN = """\
import signal, time
from pathlib import Path
def told(*_):
    Path("told").touch()
signal.signal(signal.SIGTERM, told)
Path("ready").touch()
while True:
    time.sleep(0.1)
"""


def test_a_stop_that_comes_before_the_job_reaches_it(batch: Batch) -> None:
    held_by = batch.folder / "held"
    held_by.touch()
    batch.begin("--keep=*.pt", command=python(STUBBORN), HELD_BY=str(held_by))
    batch.until_written(batch.paths.state("20007"), "recording")
    assert batch.process
    (batch.folder / "own disk" / "a.pt").write_text("a")
    batch.process.send_signal(signal.SIGUSR1)
    batch.until_written(batch.paths.state("20007"), "stopped USR1")
    held_by.unlink()
    code, _, err = batch.end()
    assert code in (137, 143), err  # it ignores SIGTERM, if that finds it already running
    assert batch.events()[1:] == ["recording 1 of 1 nodes", "stopped USR1", f"ended {code}"]
    assert batch.info["status"] == "partial"
    assert "ahead of the time limit" in batch.info["why"]
    assert (batch.paths.results / NODE / "a.pt").read_text() == "a"


def test_signals_that_are_no_stop_of_the_job_lose_nothing(batch: Batch) -> None:
    """As of scancel: what it sends to the job itself is not this process's part."""
    batch.begin(
        command=python(STUBBORN.replace("while True:", "while not Path('go').exists():") + "raise SystemExit(4)")
    )
    batch.until_written(batch.folder / "ready")
    assert batch.process
    for count in range(1, 4):  # the kernel joins signals that nobody has taken yet
        batch.process.send_signal(signal.SIGTERM)
        batch.until_told(count)
    (batch.folder / "go").touch()
    assert batch.end()[0] == 4
    assert batch.events()[2:] == [*["stopped TERM"] * 3, "ended 4"]
    assert not (batch.folder / "told").exists()
    assert "exit code 4 after SIGTERM; it was cancelled" in batch.info["why"]


def test_damaged_files_of_the_run_do_not_change_the_exit_code(batch: Batch) -> None:
    damage = "import sys; from pathlib import Path; Path(sys.argv[1]).write_text('{'); sys.exit(6)"
    code, _, err = batch.run(command=(*python(damage), str(batch.paths.run / "run.json")), SLURM_NTASKS="1")
    assert code == 6
    assert f"the end of the job is not recorded ({batch.paths.run / 'run.json'} cannot be used: it is not JSON" in err
    assert batch.events()[-1] == "ended 6"


def test_a_run_that_cannot_be_opened_ends_the_job_in_one_sentence(batch: Batch) -> None:
    batch.paths.states.mkdir(parents=True)
    (batch.paths.run / "run.json").write_text("{")
    code, _, err = batch.run(command=("true",))
    assert (code, len(err.splitlines())) == (2, 1)
    assert batch.events() == [f"begun on {NODE}", "ended 2"]


def test_outside_of_a_job_it_says_so(batch: Batch) -> None:
    code, _, err = batch.run(command=("true",), SLURM_JOB_ID="")
    assert (code, err) == (2, "ringtap: $SLURM_JOB_ID is not set: this runs in a job of Slurm, as sbatch starts it\n")
    assert not batch.paths.run.exists()


def test_a_task_of_an_array_measures_a_series_that_there_is(batch: Batch) -> None:
    plan = {"models": [{"name": "a"}], "traffic": ["iperf"], "loads": [0]}
    RunDirectory.create(batch.paths.run, "sweep", [], 0, plan=plan)
    batch.paths.states.mkdir(parents=True)
    batch.paths.request.write_text('{"jobs": [{"id": "5"}], "tasks": [[0, 1]]}')
    task = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1"}
    code, _, err = batch.run(**task)
    assert (code, err) == (2, f"ringtap: the plan of {batch.paths.run} has no series 1\n")
    assert batch.events("5_1") == [f"begun on {NODE}", "ended 2"]
    batch.paths.plan.write_text("no plan")
    code, _, err = batch.run(**(task | {"SLURM_ARRAY_TASK_ID": "0"}))
    assert code == 2
    assert str(batch.paths.plan) in err
    assert batch.events("5_0")[-1] == "ended 2"


CANCELLED = """\
import os, signal, sys, time
from pathlib import Path
from ringtap.slurm.run_job_steps import Stops
from ringtap.slurm.submission_file_names import SubmitPaths
stops = Stops(SubmitPaths(Path(sys.argv[1])))
stops.on_cancel(lambda: os.write(1, b"passed on\\n"))  # print fails if it is interrupted by itself
print("ready", flush=True)
while not stops.cause:  # signal.pause would wait for another signal if this one came before it
    time.sleep(0.02)
"""


@pytest.mark.parametrize(("send", "heard"), [(os.kill, "passed on\n"), (os.killpg, "")])
def test_sigterm_is_passed_on_once(tmp_path: Path, send: Callable[[int, int], None], heard: str) -> None:
    paths = SubmitPaths(tmp_path)
    paths.states.mkdir(parents=True)
    with subprocess.Popen(
        [*python(CANCELLED), str(tmp_path)],
        env=dict(os.environ) | {"SLURM_JOB_ID": "7"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        send(job.pid, signal.SIGTERM)
        assert job.stdout.read() == heard
    assert paths.state("7").read_text().endswith(" stopped TERM\n")


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A node's own disk."""
    disk = tmp_path / "disk"
    for name in ("a.pt", "b c.pt", ".h.pt", "[x].pt", "logs/x.log", "logs/a/y.log", "logs/.hid/z.log", "o/logs/q.log"):
        (disk / name).parent.mkdir(parents=True, exist_ok=True)
        (disk / name).write_text(name)
        os.utime(disk / name, ns=(1_000_000_007, 2_000_000_009))
    (disk / "link").symlink_to("logs")
    (disk / "o" / "up").symlink_to("..")
    return disk


PATTERNS = [*("*.pt", "**", "**/*.log", "**/logs/*", "link/*", "[!a]*.pt", "[^a]*.pt", ".*.pt", "none*", "lo*/a/*")]
PATTERNS += [*("logs/**", "link/**", "*/**", "**/**", "**/a/**", "**/up", "a.pt", "o", "l*/")]
# bash's own, and the copies that cp makes of them
BASH = """\
shopt -s nullglob globstar
IFS=
for path in $1; do
    printf '%s\\0' "$path"
    cp --recursive --parents --preserve=timestamps "$path" "$2"
done
"""


def files(folder: Path) -> dict[str, tuple[str, int]]:
    """Files and links, with what they hold and when they were changed."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = (str(path.readlink()), 0)
        elif path.is_file():
            found[str(path.relative_to(folder))] = (path.read_text(), path.stat().st_mtime_ns)
    return found


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_are_those_of_bash(pattern: str, disk: Path, tmp_path: Path) -> None:
    to = tmp_path / "by bash"
    to.mkdir()
    done = subprocess.run(
        ["bash", "-c", BASH, "bash", pattern, to], cwd=disk, capture_output=True, text=True, check=True
    )
    keep(disk, [pattern], tmp_path / "kept")
    assert files(tmp_path / "kept") == files(to)
    # folders are copied whole, so what is in them may be left out
    assert set(matching(disk, pattern)) <= {*done.stdout.split("\0"), *(f"{one}/" for one in done.stdout.split("\0"))}


def test_what_is_not_there_is_told_and_all_else_kept(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(disk, ["best.pt", "none*", "*.pt", "a.pt"], tmp_path / "kept")
    assert capsys.readouterr().err == f"ringtap: there is no {disk / 'best.pt'} to keep\n"
    assert set(files(tmp_path / "kept")) == {"a.pt", "b c.pt", "[x].pt"}
    (tmp_path / "full").touch()
    keep(disk, ["*.pt"], tmp_path / "full")
    assert capsys.readouterr().err == f"ringtap: {tmp_path / 'full'} cannot be written: File exists\n"
