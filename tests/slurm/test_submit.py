"""``ringtap submit`` of commands on a real Slurm: how jobs end, what is there then, and that any path will do."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ringtap.core.thesis_neural_networks import profile_named
from ringtap.slurm.status import NOT_BEGUN
from ringtap.slurm.submission_file_names import SubmitPaths
from ringtap.workload.lowering import Algorithms, lower
from ringtap.workload.model_workloads import model_workload
from ringtap.workload.scaling import Scaling, scale
from ringtap.workload.workload import write_workload
from tests.slurm.cluster import SlurmCluster

pytestmark = [pytest.mark.shares, pytest.mark.together("Slurm"), pytest.mark.usefixtures("unchanged_machine")]
RINGTAP = (sys.executable, "-m", "ringtap.cli")
WEIRD = 'it\'s "my" run\n$HOME `id` %j 50% \\n é'
NAME = 'it\'s "my" job #1 $x \\n é %j'
ACCOUNT = ("--account", "def-x")
QUICK = ("--collect", "nic,steps", "--every", "200ms")


class Job:
    """A submitted command."""

    def __init__(self, cluster: SlurmCluster, user: str, run: str, *options: str, command: tuple[str, ...]) -> None:
        self.cluster, self.user = cluster, user
        words = [*RINGTAP, "submit", "-o", run, *ACCOUNT, *QUICK, *options, "--json", "--", *command]
        self.said = cluster.run(words, user=user)
        assert self.said.returncode == 0, self.said.stderr
        self.id = json.loads(self.said.stdout)["job"]
        self.paths = SubmitPaths(Path(json.loads(self.said.stdout)["run"]))

    def wait(self, timeout: float = 90.0) -> dict[str, str]:
        return self.cluster.wait(self.id, timeout=timeout)

    def until(self, words: str, timeout: float = 40.0) -> None:
        """Wait for words in what the job prints."""
        deadline = time.monotonic() + timeout
        while words not in self.output:
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    @property
    def output(self) -> str:
        path = self.paths.output(self.id)
        return path.read_text() if path.is_file() else ""

    @property
    def state(self) -> list[str]:
        """The words of the job's own account, without times."""
        return [line.split(" ", 1)[1] for line in self.paths.state(self.id).read_text().splitlines()]

    @property
    def info(self) -> dict[str, Any]:
        return dict(json.loads((self.paths.run / "run.json").read_text()))

    def nodes(self) -> dict[str, str]:
        """How the recording of each node ended; each has told its end."""
        found = {}
        for folder in sorted((self.paths.run / "nodes").iterdir()):
            assert (folder / "DONE").is_file(), folder
            found[folder.name] = json.loads((folder / "node.json").read_text())["status"]
        return found

    def kept(self) -> dict[str, str]:
        found = [path for path in self.paths.results.glob("**/*") if path.is_file()]
        return {str(path.relative_to(self.paths.results)): path.read_text() for path in found}

    def analyzed(self) -> str:
        done = self.cluster.run([*RINGTAP, "analyze", self.paths.run], user=self.user)
        assert done.returncode == 0, done.stderr
        return done.stdout


# saves what it has when it is told to stop; prints its rank when it is ready
SAVES = """\
import os, signal, sys, time
from pathlib import Path
folder = Path(os.environ["SLURM_TMPDIR"])
def stop(*_):
    time.sleep(0.3)
    (folder / "last one.pt").write_text("saved at the end")
    sys.exit(int(sys.argv[1]))
signal.signal(signal.SIGTERM, stop)
(folder / "logs" / "a").mkdir(parents=True)
(folder / "logs" / "a" / "x.log").write_text("log")
(folder / "scratch").write_text("not wanted")
print("ready", os.environ["RANK"], flush=True)
time.sleep(300)
"""
# loses its agents and goes on
LONELY = """\
import os, sys, time
from pathlib import Path
print("ready 0", flush=True)
while not Path("agents are gone").exists():
    time.sleep(0.1)
Path(os.environ["SLURM_TMPDIR"], "last one.pt").write_text("saved at the end")
sys.exit(5)
"""
BLIND = "import os, pathlib; pathlib.Path(os.environ['SLURM_TMPDIR'], 'a.pt').write_text('a'); print('done')"
FAILS = "import os, sys, time; time.sleep(0.5 if os.environ['RANK'] == '1' else 300); sys.exit(7)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready 0', flush=True); time.sleep(300)"
)
# as docs/commands/workload.md shows it
REPLAY = """\
export RINGTAP_TOKEN=secret
"$0" -m ringtap traffic plan --kind workload --from "$1" $(scontrol show hostnames | sed 's/.*/--node &:5101/') \\
    --iterations 30 -o "$SLURM_TMPDIR/replay.plan" &&
exec "$0" -m ringtap traffic send "$SLURM_TMPDIR/replay.plan" --as "$SLURMD_NODENAME" --receive
"""
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
SHOWS = f"""\
import json, os, sys, time
print(json.dumps([sys.argv[1:], os.getcwd(), [os.environ.get(name) for name in {NAMES}]]))
"""
WORDS = ("a b", "c'd\"e", "$HOME `id`", "new\nline", "*", "", "\\", "é", "--", "-x", "#SBATCH --no")
KEEP = ("--keep", "*.pt", "--keep", "logs/**", "--keep", "none*")
KEPT = {"last one.pt": "saved at the end", "logs/a/x.log": "log"}


def python(text: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text, *arguments)


@pytest.fixture(scope="module")
def jobs(cluster: SlurmCluster) -> dict[str, Job]:
    """Jobs of two users that ended in all ways, at once."""

    def submit(user: str, *options: str, command: tuple[str, ...], run: str = "") -> Job:
        elsewhere = () if "nodelist=n[2-3]" in options else ("--sbatch", "exclude=n3")  # which will die
        return Job(cluster, user, run or f"run{len(found)}", *options, *elsewhere, command=command)

    found: dict[str, Job] = {}
    limited = ("--time", "10", "--stop-before", "40s")
    found["limit"] = submit("alice", *limited, *KEEP, command=python(SAVES, "0"))
    found["cancelled"] = submit("bob", "--nodes", "2", *KEEP, command=python(SAVES, "3"))
    found["stubborn"] = submit("alice", "--stop-before", "2s", command=python(STUBBORN))
    found["fails"] = submit("alice", "--nodes", "2", command=python(FAILS))
    found["lonely"] = submit("bob", *KEEP, command=python(LONELY))
    site = cluster.home("alice") / "my site.toml"
    site.write_text('interface = "eth0"\n')
    tasks = (
        "--nodes",
        "2",
        "--tasks-per-node",
        "2",
        "--gpus-per-node",
        "h100:2",
        "--site",
        str(site),
        "--job-name",
        NAME,
        "--disk-limit",
        "1GB",
    )
    found["weird"] = submit("alice", *tasks, command=python(SHOWS, *WORDS), run=WEIRD)
    found["broken"] = submit("bob", "--nodes", "2", "--sbatch", "nodelist=n[2-3]", *KEEP, command=python(SAVES, "3"))
    messages = cluster.home("alice") / "messages"
    # a hundredth of ResNet-50, which computes for 30 ms
    small = scale(model_workload(profile_named("resnet50"), 2, 3.0), Scaling(parameters=0.01))
    write_workload(lower(small, Algorithms()), messages)
    found["replay"] = submit("alice", "--nodes", "2", command=("bash", "-c", REPLAY, sys.executable, str(messages)))
    (cluster.home("alice") / "ringtap-0-py3-none-any.whl").write_text("no wheel")
    found["hopeless"] = submit("alice", "--wheels", ".", command=("true",))
    found["blind"] = submit("alice", "--sbatch", "hold", *KEEP, command=python(BLIND), run="blind")
    (found["blind"].paths.run / "nodes").write_text("in the way of every recording")
    assert cluster.run(["scontrol", "release", found["blind"].id]).returncode == 0
    for name in ("limit", "cancelled", "stubborn", "lonely", "broken"):
        for rank in range(2 if name in ("cancelled", "broken") else 1):
            found[name].until(f"ready {rank}")
    # One minute less 40 s: told at the controller's next look at time limits, which it takes every 30 s. Where the jobs
    # above took long to begin, this one has a minute more.
    hours, minutes, seconds = map(int, cluster.job(found["limit"].id)["RunTime"].split(":"))
    limit = (hours * 3600 + minutes * 60 + seconds + 32) // 60 + 1
    assert cluster.run(["scontrol", "update", f"JobId={found['limit'].id}", f"TimeLimit={limit}"]).returncode == 0
    cluster.kill(3)
    assert cluster.run(["scancel", found["cancelled"].id]).returncode == 0
    # what Slurm does ahead of a time limit
    assert cluster.run(["scancel", "--batch", "--signal=USR1", found["stubborn"].id]).returncode == 0
    # both processes of the recording, whose command line is the same
    assert cluster.run(["pkill", "-KILL", "-f", f"[r]ecord --join {found['lonely'].paths.run}"]).returncode == 0
    found["lonely"].until("the recording of n")
    (cluster.home("bob") / "agents are gone").touch()
    for job in found.values():
        job.wait()
    return found


def test_a_job_near_its_time_limit_is_told_to_save(jobs: dict[str, Job]) -> None:
    job = jobs["limit"]
    assert job.wait()["ExitCode"] == "0:0", job.output
    assert job.state == ["begun on n0", "recording 1 of 1 nodes", "stopped USR1", "ended 0"]
    assert (job.info["status"], job.info["why"]) == ("partial", "it was stopped ahead of the time limit")
    assert job.nodes() == {"n0": "complete"}
    assert job.kept() == {f"n0/{name}": text for name, text in KEPT.items()}
    assert "partial" in job.analyzed()


def test_a_cancelled_job_saves_on_every_node(jobs: dict[str, Job]) -> None:
    job = jobs["cancelled"]
    assert job.wait()["JobState"] == "CANCELLED"
    assert job.state[1:] == ["recording 2 of 2 nodes", "stopped TERM", "ended 3"]
    assert job.info["status"] == "partial"
    assert "exit code 3 after SIGTERM; it was cancelled" in job.info["why"]
    names = job.nodes()
    assert list(names.values()) == ["complete"] * 2
    assert job.kept() == {f"{node}/{name}": text for node in names for name, text in KEPT.items()}
    job.analyzed()


def test_a_job_that_does_not_listen_is_ended(jobs: dict[str, Job]) -> None:
    job = jobs["stubborn"]
    assert job.wait()["ExitCode"] == "137:0", job.output
    assert job.state[2:] == ["stopped USR1", "ended 137"]
    assert job.info["status"] == "partial"
    job.nodes()
    job.analyzed()


def test_a_failing_rank_ends_the_job_with_its_exit_code(jobs: dict[str, Job]) -> None:
    job = jobs["fails"]
    assert job.wait()["ExitCode"] == "7:0", job.output
    assert job.info["status"] == "failed"
    assert job.info["why"] == "the job ended with exit code 7"
    assert len(job.nodes()) == 2
    job.analyzed()


def test_a_job_outlives_its_recording_and_its_results_are_kept(jobs: dict[str, Job]) -> None:
    job = jobs["lonely"]
    assert job.wait()["ExitCode"] == "5:0", job.output
    assert "the recording of n" in job.output
    assert job.info["why"].startswith("the job ended with exit code 5")
    assert {name.partition("/")[2] for name in job.kept()} == {"last one.pt"}
    job.analyzed()


def test_a_recording_that_cannot_begin_is_no_matter_to_the_job(jobs: dict[str, Job]) -> None:
    job = jobs["blind"]
    assert job.wait()["ExitCode"] == "0:0", job.output
    assert "done" in job.output.splitlines()
    assert job.state[1:] == ["recording 0 of 1 nodes", "ended 0"]
    assert (job.info["status"], job.info["why"]) == ("partial", "1 of 1 node not recorded")
    assert list(job.kept().values()) == ["a"]


def test_a_replay_finds_the_nodes_that_it_is_given(jobs: dict[str, Job]) -> None:
    job = jobs["replay"]
    assert job.wait()["ExitCode"] == "0:0", job.output
    assert job.info["status"] == "complete", job.info["why"]
    # nothing marks the beginning of the first of 30
    assert "2 ranks on 2 nodes, 29 iterations" in job.analyzed()


def test_a_job_that_cannot_begin_says_so(jobs: dict[str, Job]) -> None:
    job = jobs["hopeless"]
    assert job.wait()["ExitCode"] == "1:0", job.output
    assert "ringtap-0-py3-none-any.whl is invalid" in job.output
    assert not job.paths.state(job.id).exists()
    told = job.cluster.run([*RINGTAP, "status", job.paths.run], user=job.user)
    why = f"its script ended before ringtap began: see submit/slurm-{job.id}.out"
    assert f"Slurm says FAILED (NonZeroExitCode): it failed; {why}" in told.stdout


def test_any_path_and_any_argument_will_do(jobs: dict[str, Job]) -> None:
    job = jobs["weird"]
    assert job.wait()["ExitCode"] == "0:0", job.output
    assert job.paths.run.name == WEIRD
    name = job.cluster.run(["squeue", "--noheader", "--states=all", f"--jobs={job.id}", "--format=%j"])
    assert name.stdout == NAME + "\n"
    shown = [json.loads(line) for line in job.output.splitlines() if line.startswith("[[")]
    assert [line[:2] for line in shown] == [[list(WORDS), str(job.cluster.home("alice"))]] * 4
    first = job.info["reference"]
    places = [[str(rank), "4", str(rank % 2), "2", first, "eth0"] for rank in range(4)]
    assert sorted(line[2] for line in shown) == places
    assert job.info["status"] == "complete", job.info["why"]
    assert len(job.nodes()) == 2
    items = [json.loads(path.read_text()) for path in job.paths.run.glob("nodes/*/node.json")]
    assert [item["disk"]["limit_bytes"] for item in items] == [1_000_000_000] * 2
    job.analyzed()


def test_what_a_dead_node_leaves_is_kept(jobs: dict[str, Job]) -> None:
    job = jobs["broken"]
    assert job.wait()["JobState"] == "NODE_FAIL"
    # the node that is left copies its files after the controller has given the job up
    expected = {f"n2/{name}": text for name, text in KEPT.items()}
    deadline = time.monotonic() + 90
    while job.kept() != expected or job.info["status"] == "running":
        assert time.monotonic() < deadline, f"{job.kept()} {job.info}\n{job.output}"
        time.sleep(0.1)
    assert job.info["status"] == "partial"
    assert "or a node failed" in job.info["why"]
    assert (job.paths.run / "nodes" / "n2" / "DONE").is_file()
    assert not (job.paths.run / "nodes" / "n3" / "DONE").exists()
    assert "partial" in job.analyzed()


def test_an_environment_is_made_on_every_node_from_a_bundle(cluster: SlurmCluster, tmp_path: Path) -> None:
    home = cluster.home("alice")
    bundle = subprocess.run([*RINGTAP, "bundle", "-o", tmp_path / "b"], capture_output=True, text=True, check=False)
    assert bundle.returncode == 0, bundle.stderr
    shutil.copytree(tmp_path / "b", home / "the bundle")
    (home / "my needs.txt").write_text("psutil >= 5\n")
    job = Job(
        cluster,
        "alice",
        "offline",
        *("--nodes", "2", "--mem", "1500M", "--wheels", "the bundle", "--requirement", "my needs.txt"),
        command=("python", "-c", "import sys, ringtap; print(sys.prefix, ringtap.__file__)"),
    )
    assert job.wait()["ExitCode"] == "0:0", job.output
    made = sorted(line.split() for line in job.output.splitlines() if line.startswith("/tmp/localscratch"))
    assert len(made) == 2, job.output
    assert all(path.startswith(prefix) for prefix, path in made)
    assert job.info["status"] == "complete", job.info["why"]
    assert len(job.nodes()) == 2


@pytest.mark.parametrize("site", ["fir", "generic"])
def test_slurm_takes_the_script_as_it_is_printed(site: str, cluster: SlurmCluster) -> None:
    """What Fir gives a job, this cluster does too; the script is asked for in a folder whose name needs quoting."""
    folder = cluster.home("alice") / 'it\'s "here" $HOME'
    folder.mkdir(exist_ok=True)
    sizes = ("--nodes", "2", "--tasks-per-node", "4", "--cpus-per-task", "2", "--gpus-per-node", "4", "--mem", "2G")
    options = ("--site", site, "--time", "3:00:00", "--job-name", 'a "job"', "--keep", "*.pt", "--horovod")
    command = ("--", "python", "train.py", "new\nline")
    words = [*RINGTAP, "submit", "--print", *ACCOUNT, *sizes, *options, *command]
    printed = cluster.run(words, user="alice", cwd=folder)
    assert printed.returncode == 0, printed.stderr
    assert ("--gpus-per-node=h100:4" if site == "fir" else "--gpus-per-node=4") in printed.stdout
    (folder / "job.sh").write_text(printed.stdout)
    done = cluster.run(["sbatch", "--test-only", "job.sh"], user="alice", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stderr
    subprocess.run(["shellcheck", folder / "job.sh"], check=True)
    assert not (folder / "runs").exists()


def test_a_script_is_changed_and_submitted_by_hand(cluster: SlurmCluster) -> None:
    home = cluster.home("alice")
    words = [*RINGTAP, "submit", "--print", *ACCOUNT, *QUICK, "-o", "by hand", "--", *python(SHOWS, *WORDS)]
    printed = cluster.run(words, user="alice").stdout
    (home / "mine.sh").write_text(printed.replace("--ntasks-per-node=1", "--ntasks-per-node=2"))
    done = cluster.run(["sbatch", "--parsable", "mine.sh"], user="alice")
    assert done.returncode == 0, done.stderr
    number = done.stdout.strip()
    ended = cluster.wait(number)
    output = (home / f"slurm-{number}.out").read_text()
    assert ended["ExitCode"] == "0:0", output
    shown = [json.loads(line) for line in output.splitlines() if line.startswith("[[")]
    assert [(line[0], line[2][1]) for line in shown] == [(list(WORDS), "2")] * 2
    run = home / "by hand"
    assert json.loads((run / "run.json").read_text())["status"] == "complete"
    told = cluster.run([*RINGTAP, "status", run], user="alice")
    assert f"job {number}: ended: exit code 0" in told.stdout


def test_the_run_of_a_job_that_has_not_begun_says_so(cluster: SlurmCluster) -> None:
    words = [*RINGTAP, "submit", "--json", *ACCOUNT, *QUICK, "--sbatch", "hold", "-o", "held", "--", "true"]
    submitted = cluster.run(words, user="alice")
    assert submitted.returncode == 0, submitted.stderr
    info = json.loads((cluster.home("alice") / "held" / "run.json").read_text())
    assert (info["status"], info["why"]) == ("running", NOT_BEGUN)
    assert cluster.run(["scancel", json.loads(submitted.stdout)["job"]], user="alice").returncode == 0


def test_what_sbatch_says_against_it_is_passed_on(cluster: SlurmCluster) -> None:
    for options, words in (
        ((), "--account"),
        ((*ACCOUNT, "--nodes", "9"), "Node count specification invalid"),
        ((*ACCOUNT, "--sbatch", "partition=none"), "invalid partition specified: none"),
        ((*ACCOUNT, "--sbatch=--wrong"), "unrecognized option '--wrong'"),
    ):
        done = cluster.run([*RINGTAP, "submit", "-o", "refused", *options, "--", "true"], user="alice")
        assert done.returncode == 2, done.stderr
        (said,) = [line for line in done.stderr.splitlines() if "sbatch refuses" in line]
        assert words in said
        assert not (cluster.home("alice") / "refused").exists()


def test_a_folder_in_use_is_refused(jobs: dict[str, Job]) -> None:
    job = jobs["fails"]
    done = job.cluster.run([*RINGTAP, "submit", "-o", job.paths.run, *ACCOUNT, "--", "true"], user="alice")
    assert done.returncode == 2
    assert "is not empty" in done.stderr
    assert job.info["status"] == "failed"
