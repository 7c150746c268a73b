"""A small sweep on the real testbed, and everything that can end one early."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringtap.records import open_records, read_json_lines

pytestmark = pytest.mark.usefixtures("unchanged_machine")
RINGTAP = [sys.executable, "-m", "ringtap.cli"]
PLAN = """\
[sweep]
name = "small"
scale = 500
loads = [0, 0.5]
traffic = ["consistent"]

[window]
warmup_iterations = 2
settle = "500ms"
min_time = "1500ms"
min_iterations = 5
max_time = "10s"

[[models]]
name = "resnet50"
layers = 8
"""


def write_plan(tmp_path: Path, text: str = PLAN) -> Path:
    path = tmp_path / "small plan.toml"
    path.write_text(text)
    return path


def run(*arguments: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [*RINGTAP, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)


def status(folder: Path) -> tuple[str, str]:
    info = json.loads((folder / "run.json").read_text())
    return info["status"], info["why"]


def one_sentence(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("ringtap:")]
    assert len(said) == 1, done.stderr
    return said[0]


def test_from_a_plan_to_a_report(tmp_path: Path) -> None:
    plan, out = (
        write_plan(tmp_path, PLAN.replace('["consistent"]', '["consistent", "burst", "iperf"]')),
        tmp_path / "out dir",
    )
    done = run("sweep", plan, "-o", out, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["points"] == 6
    assert status(out) == ("complete", "")
    points, torn = read_json_lines(out / "points.jsonl")
    assert torn == 0
    for point in points:
        seconds = (point["window_end_ns"] - point["window_start_ns"]) / 1e9
        assert point["ended"] == "enough"
        assert point["iterations"] >= 5
        assert seconds >= 1.5
        # at no load never below the compute time, and with half the link left far from the longest window
        assert 0.14 < seconds / point["iterations"] < 1.0
        run_folder = out / point["directory"]
        assert {path.name for path in (run_folder / "nodes").iterdir()} == {"S0", "S1", "S2", "S3", "switch"}
        for node in (run_folder / "nodes").iterdir():
            assert (node / "DONE").exists()
            assert open_records(node / "nic" / "nic.rec").count > 100
    info = json.loads((out / "run.json").read_text())
    assert [item["ok"] for item in info["precheck"]] == [True] * 3
    assert len(info["lab"]["links"]) == 8
    report = run("report", out)
    assert report.returncode == 0, report.stderr
    assert (out / "report" / "report.html").stat().st_size > 10_000


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "data").write_text("mine")
    done = run("sweep", write_plan(tmp_path), "-o", tmp_path / "out")
    assert done.returncode == 2
    assert "not empty" in one_sentence(done)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["data"]


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    done = run("sweep", write_plan(tmp_path), "-o", "/proc/sweep")
    assert done.returncode == 2
    assert "/proc/sweep cannot be written" in one_sentence(done)


def test_a_dry_run_measures_nothing(tmp_path: Path) -> None:
    done = run("sweep", write_plan(tmp_path), "-o", tmp_path / "out", "--dry-run", "--json")
    assert [point["load"] for point in json.loads(done.stdout)["points"]] == [0, 0.5]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_is_partial_and_resumes(tmp_path: Path, number: signal.Signals) -> None:
    plan, out = write_plan(tmp_path), tmp_path / "out"
    process = subprocess.Popen([*RINGTAP, "sweep", str(plan), "-o", str(out)], stderr=subprocess.PIPE, text=True)
    wait_for_points(out, 1, process)
    process.send_signal(number)
    stderr = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert "--resume" in stderr
    assert status(out) == ("partial", "interrupted")
    first = read_json_lines(out / "points.jsonl")[0]
    assert len(first) == 1
    report = run("report", out)
    assert report.returncode in (0, 1)
    assert "Traceback" not in report.stderr
    resumed = run("sweep", plan, "-o", out, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    points = read_json_lines(out / "points.jsonl")[0]
    assert points[0] == first[0]
    assert [point["step"] for point in points] == [0, 1]
    assert points[0]["directory"] != points[1]["directory"]
    assert status(out) == ("complete", "")


def wait_for_points(out: Path, count: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 90
    while len(read_json_lines(out / "points.jsonl")[0]) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_killed_sweep_leaves_a_readable_run_and_nothing_else(tmp_path: Path) -> None:
    plan, out = write_plan(tmp_path), tmp_path / "out"
    process = subprocess.Popen([*RINGTAP, "sweep", str(plan), "-o", str(out)], stderr=subprocess.DEVNULL, text=True)
    wait_for_points(out, 1, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(2)  # the kernel ends what the keeper held
    assert "record cleared" in run("lab", "down", "--all").stdout
    for log in out.rglob("*.rec"):  # the sender had only just begun: its log may hold no flow yet, but must read
        assert open_records(log).count > 0 or log.parent.name in ("sent", "received")
    resumed = run("sweep", plan, "-o", out, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert len(read_json_lines(out / "points.jsonl")[0]) == 2


def test_another_plan_does_not_resume(tmp_path: Path) -> None:
    plan, out = write_plan(tmp_path), tmp_path / "out"
    done = run("sweep", write_plan(tmp_path, PLAN.replace('"resnet50"', '"resnet50"\ncommand = ["false"]')), "-o", out)
    assert done.returncode == 1
    resumed = run("sweep", write_plan(tmp_path, PLAN.replace("[0, 0.5]", "[0, 0.6]")), "-o", out, "--resume")
    assert resumed.returncode == 2
    assert "another plan" in one_sentence(resumed)
    assert plan.exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["sh", "-c", "echo the data set is missing; exit 3"], "exit code 3.*the data set is missing"),
        (["no-such-trainer"], "exit code 127.*no-such-trainer cannot be run"),
        (["sleep", "1000"], "too few to warm up: does it step an optimizer"),
    ],
)
def test_a_job_that_fails_or_never_steps_ends_the_sweep(tmp_path: Path, command: list[str], words: str) -> None:
    import re

    text = PLAN.replace("layers = 8", f"command = {json.dumps(command)}")
    text = text.replace("[window]", '[window]\nstart_timeout = "4s"')
    done = run("sweep", write_plan(tmp_path, text), "-o", tmp_path / "out")
    assert done.returncode == 1
    assert re.search(words, one_sentence(done)), done.stderr
    assert status(tmp_path / "out")[0] == "failed"
    assert read_json_lines(tmp_path / "out" / "points.jsonl")[0] == []


def test_a_missing_tool_is_named_before_anything_starts(tmp_path: Path) -> None:
    text = PLAN.replace('["consistent"]', '["iperf"]')
    environment = dict(os.environ) | {"PATH": "/nowhere"}
    command = [*RINGTAP, "sweep", str(write_plan(tmp_path, text)), "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert "iperf3" in one_sentence(done)
    assert not (tmp_path / "out").exists()
