"""Two jobs that share a link of a testbed: measured alone and together, kept at their shifts, and reported."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ringtap.analysis.runs.run import SweepRun, read_run
from ringtap.analysis.sweeps.sharing import FLUID, MEASURED, MLTCP_EQUATION, sharing_points
from ringtap.core.run_directory import open_log
from ringtap.workload.demand_of_recorded_job import recorded_job
from ringtap.workload.interleaving import MEASURED_ERROR
from tests.testbed.sweeps import run

pytestmark = [pytest.mark.shares, pytest.mark.together("sweeps"), pytest.mark.usefixtures("unchanged_machine")]
PLAN = """\
[sweep]
name = "sharing"
scale = 100
capacity = "20gbit"
offsets = [{offsets}]

[window]
warmup_iterations = 5
settle = "1s"
min_time = "2s"
min_iterations = 15
max_time = "10s"
retries = 0
"""
LEAVES = """
[testbed]
topology = "leaf-spine"
hosts = ["S0", "S1", "S2", "S3"]
spines = 2
"""
JOB = """
[[jobs]]
name = "{name}"
model = "own"
parameters = 1
command = ["{{python}}", "{script}"{words}]
workers = ["S0", "S1"]
"""


def plan(folder: Path, offsets: str, keys: str = "", words: str = "") -> Path:
    """Write a plan, whose last job has the keys, and whose jobs' commands have more words."""
    path, script = folder / "plan.toml", Path(__file__).with_name("sharing_rank.py")
    jobs = "".join(JOB.format(name=name, script=script, words=words) for name in "ab")
    path.write_text(PLAN.format(offsets=offsets) + jobs + keys)
    return path


def period_ns(run_path: Path, point: dict[str, Any]) -> int:
    """Return the period of a job alone, from which the sweep predicts."""
    job, window_ns = point["jobs"][0], (point["window_start_ns"], point["window_end_ns"])
    return recorded_job(run_path / job["directory"], job["name"], window_ns).period_ns


def test_jobs_are_kept_at_the_shift_that_their_recorded_circles_give(tmp_path: Path) -> None:
    path = tmp_path / "run"
    done = run("sweep", plan(tmp_path, '"cassini"'), "-o", path)
    assert done.returncode == 0, done.stderr
    assert "3 points" in done.stdout
    alone, _, kept = sharing_points(found) if isinstance(found := read_run(path), SweepRun) else ()
    # 40 ms of computation, and 500 kB at 200 Mbit/s, of which the token bucket lets 64 KiB pass at once; a busy machine
    # is slower
    assert 0.055 <= alone.jobs[0].mean_s <= 0.12
    assert kept.score is not None
    a, b = kept.jobs
    assert (a.shift_s, b.period_s) == (0.0, a.period_s)
    assert b.shift_s is not None
    assert 0.01 < b.shift_s < 0.08, "20 ms of communication each: apart from 20 to 40 ms"
    assert alone.utilisation is not None
    assert kept.utilisation is not None
    # each job sends its bytes; a grid leaves a few percent between iterations, a busy machine more
    assert 1.2 * alone.utilisation < kept.utilisation <= 1.05
    report = run("report", path)
    assert report.returncode == 0, report.stderr
    assert "cassini, score" in report.stdout

    # points are kept, and further offsets may be added; what was measured may not change
    more = run("sweep", plan(tmp_path, '"cassini", "free"'), "-o", path, "--resume")
    assert more.returncode == 0, more.stderr
    lines = [json.loads(line) for line in (path / "shared.jsonl").read_text().splitlines()]
    assert [line["offset"] for line in lines] == ["alone", "alone", "cassini", "free"]
    assert "complete: 4 of 4 points" in run("status", path).stdout
    changed = run("sweep", plan(tmp_path, '"free", "cassini"'), "-o", path, "--resume")
    assert changed.returncode == 2
    assert "measured with another plan (different: offsets)" in changed.stderr
    longer = run("sweep", plan(tmp_path, '"cassini", "free", "500ms"'), "-o", path, "--resume")
    assert longer.returncode == 2
    assert "offset 500 ms of b is not below its iteration time alone" in longer.stderr
    assert "Traceback" not in longer.stderr
    without = run("sweep", plan(tmp_path, '"cassini", "free"'), "-o", path, "--resume")
    assert without.returncode == 0, "what was not measured may change"


def test_a_job_alone_whose_window_does_not_tell_what_it_sends_is_no_point(tmp_path: Path) -> None:
    """Its iterations of 0.5 s are too few for the longest window, so that a resumed sweep measures it again."""
    path = plan(tmp_path, '"cassini"', words=', "1000", "0.5"')
    path.write_text(path.read_text().replace('"10s"', '"3s"').replace("min_iterations = 15", "min_iterations = 4"))
    done = run("sweep", path, "-o", tmp_path / "run")
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.search(r"a alone: .* has \d iterations that count: 10 are needed: .*raise window.max_time", last)
    assert (tmp_path / "run" / "shared.jsonl").read_text() == ""


def test_rules_give_jobs_of_a_leaf_spine_their_shares_and_paths_and_are_predicted(tmp_path: Path) -> None:
    path, keys = tmp_path / "run", 'congestion_control = "reno"\nflop = 1e12\n'
    file = plan(tmp_path, '"mltcp", "congestion-control", "crux"', keys + LEAVES)
    text = file.read_text().replace('"S0", "S1"]\n\n[[', '"S0", "S2"]\nflop = 2e12\n\n[[')
    # with this seed, both jobs have the same spine
    file.write_text(text.replace('"S0", "S1"]\ncong', '"S1", "S3"]\ncong').replace("[sweep]", "[sweep]\nseed = 2"))
    done = run("sweep", file, "-o", path)
    assert done.returncode == 0, done.stderr
    alone, alone_b, mltcp, control, crux = [
        json.loads(line) for line in (path / "shared.jsonl").read_text().splitlines()
    ]
    assert {port["jobs"][0] for port in alone["ports"]} == {"a"}
    assert len(alone["ports"]) == 8, "up and down of four links"
    assert [job["path"] for job in mltcp["jobs"]] == [0, 0]
    between = {"leaf0 to spine0", "leaf1 to spine0", "spine0 to leaf0", "spine0 to leaf1"}
    assert {port["link"] for port in mltcp["ports"]} == between
    assert mltcp["share_changes"]["ticks"] > 50
    # held until the rule began, where their circles meet most, and not after the pause that it may have met
    assert mltcp["jobs"][0]["begin_shift_s"] == 0.0
    assert 0 <= mltcp["jobs"][1]["begin_shift_s"] < 0.12
    for job in mltcp["jobs"]:
        (steps,) = (path / job["directory"] / "nodes").glob("*/steps/rank0-*.rec")
        log = open_log(steps)
        at = [field.name for field in log.fields].index
        # the rule may begin less than a second after the first iteration of the job that started last
        held = [row[at("pause_ns")] for row in log.walk() if row[at("end_ns")] < mltcp["rule_ns"]]
        free = [row[at("pause_ns")] for row in log.walk() if row[at("end_ns")] > mltcp["rule_ns"] + 10**8]
        assert max(held) > 0
        assert max(free) == 0
    # 500 kB and their headers, which the recorder counts in intervals of 10 ms
    assert mltcp["jobs"][0]["share"]["iteration_bytes"] == pytest.approx(525_000, rel=0.1)
    assert [job["share"]["congestion_control"] for job in control["jobs"]] == ["", "reno"]
    assert "knows no congestion control" in control["predicted_why"]
    assert sorted(job["path"] for job in crux["jobs"]) == [0, 1], "a spine for each"
    assert [job["share"]["priority"] for job in crux["jobs"]] == [1, 0]
    found = read_run(path)
    assert isinstance(found, SweepRun)
    first, _, point, _, last = sharing_points(found)
    most_bps = max(link.rate_bps or 0.0 for link in first.links)
    assert most_bps == pytest.approx(525_000 * 8 / first.mean_s, rel=0.1)
    assert last.computation is not None
    assert last.computation.predicted_flop_per_s is not None
    # the equation is for equal jobs, which a busy machine may make unequal
    a_ns, b_ns = [period_ns(path, one) for one in (alone, alone_b)]
    equation = {MLTCP_EQUATION} if abs(b_ns / a_ns - 1) <= MEASURED_ERROR else set()
    assert {slide.source for slide in point.slides} == {MEASURED, FLUID} | equation
    assert ("differ by" in point.predicted_why) == (not equation)
    for job in point.jobs:
        assert job.predicted_s is not None
        # both together need 70 % of the link: apart, they are as fast as alone; a busy machine is slower
        assert 0.05 <= job.predicted_s <= 0.12


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ', "1"',
            " ended with exit code 0 before its measurement did (give it a command that runs until it is ended)",
        ),
        (', "9", "2.5"', "a ended no two iterations in 2 s: raise window.max_time"),
    ],
)
def test_jobs_that_do_not_run_together_are_one_sentence(tmp_path: Path, words: str, said: str) -> None:
    path = plan(tmp_path, '"free"', words=words)
    text = path.read_text().replace("warmup_iterations = 5", "warmup_iterations = 0")
    path.write_text(text.replace('min_time = "2s"', 'min_time = "1s"').replace('"10s"', '"1s"'))
    done = run("sweep", path, "-o", tmp_path / "run")
    assert done.returncode == 1, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
