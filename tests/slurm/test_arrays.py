"""A plan as an array of jobs, as its page shows it: cancelled in the middle, submitted again, collected, reported."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringtap.core.append_only_logs import read_json_lines
from tests.slurm.cluster import PATH, ROOT, SlurmCluster
from tests.slurm.there import ODD, RINGTAP, status, until

PAGE = (ROOT / "docs" / "commands" / "submit-plans.md").read_text()
PLAN = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
# by their verbs and what is special of them, in the order of the page
JOB = '[[jobs]]\nname = "{}"\nmodel = "vgg16"\nworkers = ["S0", "S1"]\n'
HOST = '[[hosts]]\nname = "{}"\ninterface = "eth0"\n'
JOBS = '[sweep]\ncapacity = "1gbit"\n[cluster]\nreach = "slurm"\n'
JOBS += "".join((HOST.format("S0"), HOST.format("S1"), JOB.format("a"), JOB.format("b")))
COMMANDS = re.findall(r"^ringtap .*$", PAGE, re.MULTILINE)
pytestmark = [pytest.mark.shares, pytest.mark.together("Slurm"), pytest.mark.usefixtures("unchanged_machine")]


@pytest.fixture
def place(cluster: SlurmCluster) -> Iterator[Path]:
    """A user's folder whose name is hard to quote, with the page's plan in it, and links as slow as the plan's."""
    cluster.limit("200mbit")
    place = cluster.home("alice") / ODD
    assert cluster.run(["mkdir", place], user="alice").returncode == 0
    (place / "plan.toml").write_text(PLAN)
    yield place
    cluster.run(["rm", "-rf", place])


def type_in(cluster: SlurmCluster, place: Path, line: str) -> str:
    """A line of the page, as the user types it; returns what it prints."""
    done = cluster.run(["bash", "-c", line], user="alice", cwd=place, timeout=100)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stdout


def asked(cluster: SlurmCluster, place: Path, line: str) -> int:
    """How often a line of the page asks the controller."""
    folder, calls = place / "bin", place / "calls"
    folder.mkdir(exist_ok=True)
    for tool in ("squeue", "scontrol", "sacct", "sinfo"):
        (folder / tool).write_text(f'#!/bin/sh\necho {tool} >>calls\nexec {shutil.which(tool, path=PATH)} "$@"\n')
        (folder / tool).chmod(0o755)
    calls.write_text("")
    calls.chmod(0o666)
    type_in(cluster, place, f"PATH=$PWD/bin:$PATH; {line}")
    return len(calls.read_text().splitlines())


def test_the_script_is_one_that_slurm_and_shellcheck_take(cluster: SlurmCluster, place: Path) -> None:
    script = type_in(cluster, place, next(line for line in COMMANDS if line.endswith("--print")))
    assert not (place / "runs").exists()
    assert "#SBATCH --array=0,1%1\n" in script
    (place / "job.sh").write_text(script)
    done = cluster.run(["sbatch", "--test-only", "job.sh"], user="alice", cwd=place)
    assert done.returncode == 0, done.stderr
    checked = subprocess.run(["shellcheck", "-"], input=script, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("plan", "options", "words"),
    [
        ('[sweep]\nloads = [0]\n[[models]]\nname = "vgg16"\n', [], 'needs reach = "slurm"'),
        (JOBS, [], "has [[jobs]], which are no series for the tasks of an array: run ringtap sweep plan.toml"),
        (PLAN.replace("i_may_load_these_links = true", ""), [], "i_may_load_these_links is not true"),
        (PLAN, ["--nodes", "5"], "the plan has 3 hosts, a node each"),
        (PLAN, ["--keep", "*.pt"], "--keep is for a command"),
        (PLAN, ["--sbatch", "partition=none"], "invalid partition specified: none"),
    ],
    ids=[
        "a testbed's plan",
        "jobs",
        "cross traffic that nobody allows",
        "nodes",
        "an option of commands",
        "sbatch refuses",
    ],
)
def test_what_cannot_be_submitted_leaves_nothing(
    cluster: SlurmCluster, place: Path, plan: str, options: list[str], words: str
) -> None:
    (place / "plan.toml").write_text(plan)
    size = ["--account=def-x", "--time=30"]
    done = cluster.run([*RINGTAP, "submit", "plan.toml", "-o", "out", *size, *options], user="alice", cwd=place)
    assert done.returncode == 2
    assert [words in line for line in done.stderr.splitlines() if line.startswith("ringtap: ")][-1]
    assert not (place / "out").exists()


# steps until the file of points has as many lines as the other file has bytes
MARKS = """\
import sys, time
from pathlib import Path
import ringtap
points, wanted = map(Path, sys.argv[1:])
while True:
    time.sleep(0.05)
    if not points.exists() or points.read_text().count("\\n") < wanted.stat().st_size:
        ringtap.step()
"""
# no cross traffic, and a job that only steps: what is tested is who goes on with what
QUICK = """\
[sweep]
capacity = "1gbit"
loads = [0, 0, 0]
traffic = ["iperf"]
[window]
warmup_iterations = 1
settle = "100ms"
min_time = "1s"
min_iterations = 5
[cluster]
reach = "slurm"
workers = ["S0", "S1"]
[[hosts]]
name = "S0"
interface = "eth0"
[[hosts]]
name = "S1"
interface = "eth0"
[[models]]
name = "marks"
parameters = 1000
command = %s
"""


def test_tasks_that_are_told_to_stop_or_begin_anew_go_on(cluster: SlurmCluster, place: Path) -> None:
    submit = "ringtap submit plan.toml -o out --account def-x --time 30"
    run, wanted = place / "out", place / "wanted points"
    points = run / "parts" / "000-marks-iperf" / "points.jsonl"
    (place / "plan.toml").write_text(QUICK % json.dumps([sys.executable, "-c", MARKS, str(points), str(wanted)]))
    wanted.write_text("x")
    first = type_in(cluster, place, submit).split()[2].rstrip(":")
    until(lambda: len(read_json_lines(points)[0]) == 1, "the first point")
    # what Slurm sends ahead of the time limit
    cluster.run(["scancel", "--batch", "--signal=USR1", f"{first}_0"], user="alice")
    until(lambda: status(cluster, run)["series"][0]["status"] == "stopped", "the end of the task")
    kept = read_json_lines(points)[0]
    told = status(cluster, run)
    assert told["jobs"][0]["why"].startswith("exit code 130 after USR1")
    assert told["series"][0]["why"] == "interrupted"

    wanted.write_text("x" * (len(kept) + 1))
    second = type_in(cluster, place, submit).split()[2].rstrip(":")
    until(lambda: len(read_json_lines(points)[0]) > len(kept), "a further point")
    assert cluster.run(["scontrol", "requeue", f"{second}_0"], user="alice").returncode == 0
    until(
        lambda: status(cluster, run)["series"][0]["why"].startswith("Slurm says PENDING (BeginTime)"),
        "the task to wait again",
    )
    # it has said that it ended, and yet it will go on
    assert type_in(cluster, place, submit).startswith("Nothing is left to submit")
    wanted.write_text("x" * 3)
    # Slurm would let it wait for two minutes
    assert cluster.run(["scontrol", "update", f"JobId={second}_0", "StartTime=now"], user="alice").returncode == 0
    cluster.wait(f"{second}_0", "COMPLETED")
    assert status(cluster, run)["status"] == "complete"
    assert [point["step"] for point in read_json_lines(points)[0]] == [0, 1, 2]
    assert read_json_lines(points)[0][: len(kept)] == kept


def test_what_was_cancelled_goes_on_and_all_of_it_is_read(cluster: SlurmCluster, place: Path) -> None:
    _, submit, *look, again, collect, report = COMMANDS
    assert submit == again
    run = place / "runs" / "two-models"
    part = run / "parts" / "000-resnet50-iperf"
    first = re.match(r"Submitted job (\d+): 2 of 2 series", type_in(cluster, place, submit))
    assert first

    def states() -> dict[str, str]:
        return {one["series"]: one["status"] for one in status(cluster, run)["series"]}

    until(lambda: states() == {"resnet50-iperf": "running", "vgg16-iperf": "waiting"}, "the first task")
    until(lambda: bool(read_json_lines(part / "points.jsonl")[0]), "the first point")
    # the other points last until they are cancelled, also where the lines below take long
    cluster.limit("5mbit")
    # a part that is being written is no trouble
    assert re.search(r"missing: resnet50-iperf at .*50%: running", type_in(cluster, place, collect))
    assert read_json_lines(run / "points.jsonl")[0]

    cluster.run(["scancel", f"{first[1]}_0"], user="alice")
    # before the other series begins, whose traffic is checked first
    cluster.wait(f"{first[1]}_0", "COMPLETING", "CANCELLED")
    cluster.limit("200mbit")

    def is_stopped() -> bool:
        found = states()["resnet50-iperf"]
        assert found != "complete", "the task ended before it was cancelled"
        return found == "stopped"

    until(is_stopped, "the cancelled task's end")
    kept = read_json_lines(part / "points.jsonl")[0]
    assert len(kept) in (1, 2)
    second = re.match(r"Submitted job (\d+): 1 of 2 series", type_in(cluster, place, again))
    assert second
    script = (run / "submit" / "job.sh").read_text()
    assert "#SBATCH --array=0%1\n" in script
    # not beside what is still being measured
    assert f"#SBATCH --dependency=afterany:{first[1]}\n" in script
    (place / "plan.toml").write_text(PLAN.replace("0.25", "0.3"))
    changed = cluster.run(["bash", "-c", submit], user="alice", cwd=place)
    assert changed.returncode == 2
    assert "another plan (different: loads)" in changed.stderr
    (place / "plan.toml").write_text(PLAN)
    # nothing twice: now both have a task
    assert type_in(cluster, place, again).startswith("Nothing is left to submit")
    for line in look:
        assert "resnet50-iperf" in type_in(cluster, place, line)
    assert asked(cluster, place, look[0]) == 1
    cluster.wait(f"{second[1]}_0", "COMPLETED", timeout=150)
    assert status(cluster, run)["status"] == "complete"
    points = read_json_lines(part / "points.jsonl")[0]
    assert points[: len(kept)] == kept
    assert [point["step"] for point in points] == [0, 1, 2]

    assert asked(cluster, place, look[0]) == 0
    # the last task has put it together; to do so again changes nothing
    assert json.loads((run / "run.json").read_text())["status"] == "complete"
    before = (run / "points.jsonl").read_bytes()
    assert "complete" in type_in(cluster, place, collect)
    assert (run / "points.jsonl").read_bytes() == before
    told = type_in(cluster, place, report)
    assert "6 points" in told
    info = json.loads((run / "report" / "report.json").read_text())
    assert [(one["series"], len(one["points"])) for one in info["series"]] == [
        ("resnet50-iperf", 3),
        ("vgg16-iperf", 3),
    ]
    for one in info["series"]:
        alone, _, loaded = (point["cross_gbps"] for point in one["points"])
        # full size; half of 20 Gbit/s was asked for, of which a busy machine may send less
        assert alone < 0.1
        assert 5 < loaded < 11
