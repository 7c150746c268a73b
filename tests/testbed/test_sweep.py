"""A small sweep on the real testbed, and everything that can end one early."""

import json
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

import ringtap
from ringtap.agents.testbed import registry
from ringtap.core.append_only_logs import open_records, read_json_lines
from tests.testbed.sweeps import SMALL, WORKERS, one_sentence, run, start, status, wait_for
from tests.unit.agent_processes import ended

pytestmark = [pytest.mark.shares, pytest.mark.together("sweeps"), pytest.mark.usefixtures("unchanged_machine")]
# a job of iterations alone: it starts in no time
MARKS = [sys.executable, "-c", "import ringtap, time\nwhile True: time.sleep(0.05); ringtap.step()"]
# likewise; it stands still while its sweep has so many points as the file "most points" beside the sweep's folder says
HELD = """
import os, pathlib, ringtap, time
out = pathlib.Path(os.environ["RINGTAP_RUN"]).parents[1]
def points():
    return (out / "points.jsonl").read_text().count("\\n") if (out / "points.jsonl").exists() else 0
while True:
    time.sleep(0.05)
    while points() >= int((out.parent / "most points").read_text()):
        time.sleep(0.02)
    ringtap.step()
"""
QUICK = f"""\
[sweep]
name = "quick"
scale = 500
loads = [0, 0.5, 0.5]
traffic = ["burst"]

[window]
warmup_iterations = 2
settle = "200ms"
min_time = "1s"
min_iterations = 5
max_time = "10s"

[[models]]
name = "marks"
parameters = 1
command = {json.dumps(MARKS)}
"""
ALONE = """
[cluster]
reach = "local"
workers = ["here"]
[[hosts]]
name = "here"
training = "127.0.0.1"
"""


def write_plan(tmp_path: Path, text: str = QUICK) -> Path:
    path = tmp_path / "quick plan.toml"
    path.write_text(text)
    return path


def alone(text: str) -> str:
    """A plan for this machine by itself, without cross traffic."""
    return text.replace("loads = [0, 0.5, 0.5]", 'loads = [0]\ncapacity = "25gbit"') + ALONE


def points(out: Path) -> list[dict[str, object]]:
    found, torn = read_json_lines(out / "points.jsonl")
    assert torn == 0
    return found


STOPS = """\
import ringtap, time
end_s = time.monotonic() + 1.3
while time.monotonic() < end_s: time.sleep(0.05); ringtap.step()
time.sleep(100)
"""


def test_a_job_that_stands_still_in_a_window_gives_no_point(tmp_path: Path) -> None:
    """Its last iteration does not end, and those before it are not a measure of what it takes."""
    own = f'name = "stops"\nparameters = 1\ncommand = {json.dumps([sys.executable, "-c", STOPS])}\n'
    window = 'settle = "100ms"\nmin_time = "4s"\nmax_time = "4s"\nmin_iterations = 5\n'
    text = '[sweep]\nname = "still"\ntraffic = ["iperf"]\nloads = [0, 0.5, 0.5]\n[window]\nwarmup_iterations = 2\n'
    plan = write_plan(tmp_path, alone(text + window + f"[[models]]\n{own}"))
    done = run("sweep", plan, "-o", tmp_path / "out", "--force")  # other tests send over loopback meanwhile
    assert done.returncode == 1, done.stderr
    said = one_sentence(done.stderr)
    assert re.search(r"stops ended no iteration for \d+ s, where the longest before took 0\.\d+ s: ", said), said
    assert points(tmp_path / "out") == []


# read by every Python that starts with its folder in PYTHONPATH
SLOW_START = """\
import sys, time
if "send" in sys.orig_argv:
    time.sleep(2)
"""


@pytest.mark.alone(2)
def test_a_window_does_not_begin_before_a_sender_that_starts_slowly(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_START)
    text = QUICK.replace("[0, 0.5, 0.5]", "[0, 0.5]").replace("burst", "consistent")
    done = run("sweep", write_plan(tmp_path, text), "-o", tmp_path / "out", environment={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    free, loaded = ringtap.open_sweep(tmp_path / "out").points.to_dict("records")
    assert free["unscaled_cross_bps"] < 1e6
    # 1 s of traffic: its bytes are counted to a sample of 100 ms at either end
    assert loaded["unscaled_cross_bps"] == pytest.approx(loaded["unscaled_requested_bps"], rel=0.2)


@pytest.mark.alone(2)
def test_the_generator_loads_a_link_of_its_own_rate_on_which_full_size_flows_are_few(tmp_path: Path) -> None:
    text = QUICK.replace("scale = 500", 'scale = 1\ncapacity = "50mbit"').replace("[0, 0.5, 0.5]", "[0.5]")
    out = tmp_path / "out"
    done = run("sweep", write_plan(tmp_path, text.replace('["burst"]', '["consistent", "burst"]')), "-o", out)
    assert done.returncode == 0, done.stderr
    checks = {item["kind"]: item for item in json.loads((out / "run.json").read_text())["precheck"]}
    assert checks.keys() == {"consistent", "burst"}
    assert all(item["share_of_capacity"] == pytest.approx(1, abs=0.1) for item in checks.values())


@pytest.mark.alone(2)
def test_from_a_plan_to_a_report(testbed_sweep: Path) -> None:
    assert status(testbed_sweep) == ("complete", "")
    found, torn = read_json_lines(testbed_sweep / "points.jsonl")
    assert torn == 0
    assert [point["step"] for point in found] == [0, 1]
    for point in found:
        seconds = (point["window_end_ns"] - point["window_start_ns"]) / 1e9
        assert point["ended"] == "enough"
        assert point["iterations"] >= 5
        assert seconds >= 2.5
        # never below the compute time, and far from the longest window
        assert 0.05 < seconds / point["iterations"] < 0.5
        run_folder = testbed_sweep / point["directory"]
        assert {path.name for path in (run_folder / "nodes").iterdir()} == {"S0", "S1", "S2", "S3", "switch"}
        for node in (run_folder / "nodes").iterdir():
            assert (node / "DONE").exists()
            assert open_records(node / "nic" / "nic.rec").count > 100
    info = json.loads((testbed_sweep / "run.json").read_text())
    assert [item["ok"] for item in info["precheck"]] == [True]
    assert info["precheck"][0]["share_of_capacity"] >= 0.88
    assert len(info["lab"]["links"]) == 8
    assert info["plan"]["topology"]["workers"] == list(WORKERS)
    report = run("report", testbed_sweep)
    assert report.returncode == 0, report.stderr
    assert (testbed_sweep / "report" / "report.html").stat().st_size > 10_000


def test_whatever_ends_a_sweep_early_the_next_goes_on(tmp_path: Path) -> None:
    """In one go, as each part goes on with what the one before has left."""
    plan, out = write_plan(tmp_path, held(QUICK)), tmp_path / "out"
    interrupted(plan, out, signal.SIGTERM)
    report = run("report", out)
    assert report.returncode in (0, 1)
    assert "Traceback" not in report.stderr
    first = points(out)
    killed(plan, out)
    (tmp_path / "most points").write_text("9")
    resumed = run("sweep", plan, "-o", out, "--resume", "--series", "marks-burst")
    assert resumed.returncode == 0, resumed.stderr
    found = points(out)
    assert found[0] == first[0]
    assert [point["step"] for point in found] == [0, 1, 2]
    assert [point["directory"] for point in found] == [f"series/marks-burst-{number}" for number in (1, 2, 3)]
    assert status(out) == ("complete", "")
    again = run("sweep", plan, "-o", out, "--resume", "--json")
    assert json.loads(again.stdout)["points"] == 3
    assert not list(out.glob("series/*-5")), "nothing was left to measure"
    other = run("sweep", write_plan(tmp_path, held(QUICK).replace("0.5, 0.5", "0.6, 0.6")), "-o", out, "--resume")
    assert other.returncode == 2
    assert "another plan" in one_sentence(other.stderr)


def held(text: str) -> str:
    """A plan whose job a test can hold."""
    return text.replace(json.dumps(MARKS), json.dumps([sys.executable, "-c", HELD]))


def interrupted(plan: Path, out: Path, number: signal.Signals, *options: str) -> None:
    (out.parent / "most points").write_text("1")
    # nothing is there yet: it begins
    with ended(start("sweep", plan, "-o", out, "--resume", *options)) as process:
        wait_for(lambda: points(out), process)
        process.send_signal(number)
        errors = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "--resume" in errors
    assert status(out) == ("partial", "interrupted")
    assert len(points(out)) == 1


def killed(plan: Path, out: Path) -> None:
    (out.parent / "most points").write_text("2")
    with ended(start("sweep", plan, "-o", out, "--resume")) as process:
        wait_for(lambda: len(points(out)) == 2, process)
        process.send_signal(signal.SIGKILL)
    (lab,) = [lab for lab in registry.all_testbeds() if lab.owner_pid == process.pid]
    deadline_s = time.monotonic() + 20  # the kernel ends what the keeper held
    while lab.alive() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not registry.remove(lab), "it was gone, and its record is cleared"
    for log in out.rglob("*.rec"):  # the sender had only just begun: its log may hold no flow yet, but must read
        assert open_records(log).count > 0 or log.parent.name in ("sent", "received")


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "data").write_text("mine")
    done = run("sweep", write_plan(tmp_path), "-o", tmp_path / "out")
    assert done.returncode == 2
    assert "not empty" in one_sentence(done.stderr)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["data"]


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    done = run("sweep", write_plan(tmp_path), "-o", "/proc/sweep")
    assert done.returncode == 2
    assert "/proc/sweep cannot be written" in one_sentence(done.stderr)


def test_a_dry_run_measures_nothing(tmp_path: Path) -> None:
    done = run("sweep", write_plan(tmp_path), "-o", tmp_path / "out", "--dry-run", "--json")
    assert [point["load"] for point in json.loads(done.stdout)["points"]] == [0, 0.5, 0.5]
    assert not (tmp_path / "out").exists()


def test_a_series_that_the_plan_has_not_is_refused(tmp_path: Path) -> None:
    done = run("sweep", write_plan(tmp_path), "-o", tmp_path / "out", "--series", "marks-brust")
    assert done.returncode == 2
    assert "did you mean marks-burst?" in one_sentence(done.stderr)
    assert not (tmp_path / "out").exists()


def test_a_machine_by_itself_without_cross_traffic(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, alone(held(QUICK)).replace("loads = [0]", "loads = [0, 0]"))
    # other tests send over loopback meanwhile
    interrupted(plan, tmp_path / "out", signal.SIGINT, "--force")
    (tmp_path / "most points").write_text("9")
    done = run("sweep", plan, "-o", tmp_path / "out", "--resume", "--json", "--force")
    assert done.returncode == 0, done.stderr
    assert [(point["requested_bps"], point["step"]) for point in points(tmp_path / "out")] == [(0, 0), (0, 1)]
    info = json.loads((tmp_path / "out" / "run.json").read_text())
    assert info["bottleneck"]["cross"] == []
    assert "precheck" not in info


@pytest.mark.alone(2)  # the report is written with the time that nothing else wants
def test_the_report_grows_with_the_sweep_and_never_ends_it(tmp_path: Path) -> None:
    def plan_of(count: int) -> Path:
        return write_plan(tmp_path, QUICK.replace("loads = [0, 0.5, 0.5]", f"loads = {[0] * count}"))

    out = tmp_path / "out"
    page = out / "report" / "report.html"
    with ended(start("sweep", plan_of(100), "-o", out, "--report")) as process:
        wait_for(lambda: page.exists() and re.search("[1-9][0-9]* points? so far", page.read_text()), process)
        assert "location.reload()" in page.read_text()
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130, errors
    assert errors.count(f"report: {page}, grows with each point") == 1
    assert f"report of what was measured: {page}" in errors
    assert "This sweep is partial." in page.read_text()
    assert "location.reload()" not in page.read_text()
    measured = len(points(out))
    shutil.rmtree(out / "report")
    (out / "report").write_text("in the way")
    done = run("sweep", plan_of(measured + 1), "-o", out, "--resume", "--report")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: the report could not be written") == 1
    assert done.stdout == f"Wrote {out}: {measured + 1} points. Next: ringtap report {out}\n"
    (out / "report").unlink()
    done = run("sweep", plan_of(measured + 1), "-o", out, "--resume", "--report")
    answer = json.loads((out / "report" / "report.json").read_text())["answer"]
    assert done.stdout == f"{answer}\nWrote {out}: {measured + 1} points\nWrote {page}\nNext: open {page}\n"
    assert "location.reload()" not in page.read_text()
    assert "This sweep is" not in page.read_text()


@pytest.mark.parametrize(
    ("command", "timeout", "words"),
    [
        (["sh", "-c", "echo the data set is missing; exit 3"], "60s", "exit code 3.*the data set is missing"),
        (["sleep", "1000"], "2s", "too few to warm up: does it step an optimizer"),
    ],
)
def test_a_job_that_fails_or_never_steps_ends_the_sweep(
    tmp_path: Path, command: list[str], timeout: str, words: str
) -> None:
    text = alone(QUICK).replace(json.dumps(MARKS), json.dumps(command))
    text = text.replace("[window]", f'[window]\nstart_timeout = "{timeout}"')
    done = run("sweep", write_plan(tmp_path, text), "-o", tmp_path / "out", "--force")
    assert done.returncode == 1
    assert re.search(words, one_sentence(done.stderr)), done.stderr
    assert status(tmp_path / "out")[0] == "failed"
    assert points(tmp_path / "out") == []


REAL = """\
[sweep]
name = "real"
loads = [0]
capacity = "25gbit"
traffic = ["iperf"]

[window]
warmup_iterations = 1
settle = "100ms"
min_time = "1s"
min_iterations = 2
max_time = "60s"

[[models]]
name = "resnet50"
job = "real"
batch = 1
"""


def test_a_plan_trains_the_model_itself(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, f"{REAL}{ALONE}ranks = 2\n")
    done = run("sweep", plan, "-o", tmp_path / "out", "--force", environment={"PYTHONPATH": ""})
    assert done.returncode == 2
    said = one_sentence(done.stderr)
    assert "host here has no torchvision for the real model: install ringtap[models] there" in said
    assert not (tmp_path / "out").exists()
    # scripts/prepare.sh installs it there
    paths = {"PYTHONPATH": str(Path(sys.prefix) / "torchvision")}
    done = run("sweep", plan, "-o", tmp_path / "out", "--force", environment=paths)
    assert done.returncode == 0, done.stderr
    sweep = ringtap.open_sweep(tmp_path / "out")
    (point,) = sweep.points.to_dict("records")
    assert point["samples_per_s"] == pytest.approx(2 * 1 / point["mean_s"])
    job = sweep.job("resnet50-iperf").summary()
    assert (job["throughput"]["batch"], job["throughput"]["batch_from"]) == (1, "plan")
    (log,) = (tmp_path / "out" / point["directory"]).glob("nodes/here/log/job.out")
    assert log.read_text().startswith("Model: resnet50, 25557032 parameters, 2 ranks on cpu\nBatch per rank = 1\n")


def test_a_job_that_is_no_program_is_named_before_anything_starts(tmp_path: Path) -> None:
    text = alone(QUICK).replace(json.dumps(MARKS), json.dumps(["no-such-trainer"]))
    done = run("sweep", write_plan(tmp_path, text), "-o", tmp_path / "out")
    assert done.returncode == 2
    assert "model marks: the job's command begins with no-such-trainer, which is not a program" in one_sentence(
        done.stderr
    )
    assert not (tmp_path / "out").exists()


def test_a_missing_tool_is_named_before_anything_starts(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, SMALL.format(capacity="25gbit"))
    done = run("sweep", plan, "-o", tmp_path / "out", environment={"PATH": "/nowhere"})
    assert done.returncode == 2
    assert "iperf3" in one_sentence(done.stderr)
    assert not (tmp_path / "out").exists()


@pytest.mark.alone(2)
def test_iperf_takes_the_streams_that_a_load_needs(tmp_path: Path) -> None:
    text = SMALL.format(capacity="25gbit").replace("loads = [0, 0.7]", 'loads = [0, 0.2, 0.85]\niperf_streams = "auto"')
    done = run("sweep", write_plan(tmp_path, text), "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    empty, light, heavy = points(tmp_path / "out")
    assert "iperf_streams" not in empty
    # the link has room for the light load; beside the heavy one, a single stream gets no more than about half of it
    assert light["iperf_streams"] == 1
    assert 1 < heavy["iperf_streams"] <= 10
    found = ringtap.open_sweep(tmp_path / "out").points
    assert found["iperf_streams"].isna().tolist() == [True, False, False]
    assert found["cross_gbps"][1] == pytest.approx(0.2 * 25 * 1.045, rel=0.05)
    # four fifths of what was asked for are more than one stream would get, 85 % to 100 % is what several get
    assert found["cross_gbps"][2] > 0.8 * 0.85 * 25
