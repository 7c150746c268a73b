"""Parts of a sweep put together: nothing is lost, doubled or changed, whatever state a part is in."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from ringtap.analysis.runs.run import SweepRun, read_run
from ringtap.cli import main
from ringtap.core.append_only_logs import read_json_lines
from ringtap.core.run_directory import RunDirectory, write_json
from ringtap.slurm.merge_sweep_parts import merge_run
from ringtap.slurm.submission_file_names import SubmitPaths

pytestmark = pytest.mark.shares

LOADS = [0.0, 0.5]
BOTTLENECK = {"cross": [{"node": "S0", "nic": "eth0", "direction": "rx"}], "total": [], "mtu": 1500}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A sweep of two series, submitted from a place without Slurm."""
    monkeypatch.setenv("PATH", "/nowhere")
    plan = {"models": [{"name": "a"}, {"name": "b"}], "traffic": ["iperf"], "loads": LOADS}
    plan |= {"scale": 1, "capacity_bps": 10**9, "topology": {}}
    run = RunDirectory.create(tmp_path / "a sweep", "sweep", [], 0, plan=plan)
    paths = SubmitPaths(run.path)
    paths.states.mkdir(parents=True)
    write_json(paths.request, {"jobs": [{"id": "7"}], "tasks": [[0, 1]]})
    return run


def window(series: str, step: int) -> dict[str, Any]:
    item = {"series": series, "model": series[0], "traffic": "iperf", "step": step, "directory": f"series/{series}-1"}
    return item | {"requested_bps": 1000 * step, "window_start_ns": 1, "window_end_ns": 2}


def measure(run: RunDirectory, index: int, series: str, steps: list[int], **info: Any) -> Path:
    """A part with these points, one of which was measured twice."""
    part = SubmitPaths(run.path).parts / f"{index:03d}-{series}"
    item = {"schema": 1, "kind": "sweep", "status": "complete", "why": "", "bottleneck": BOTTLENECK}
    item |= {"precheck": [{"kind": "iperf", "share_of_capacity": 0.95}], "calibration": None}
    item |= {"not_collected": [{"what": "GPU", "why": "not asked for"}]}
    (part / "series" / f"{series}-1").mkdir(parents=True)
    write_json(part / "run.json", item | info)
    (part / "points.jsonl").write_text("".join(json.dumps(window(series, step)) + "\n" for step in steps))
    (part / "rejected.jsonl").write_text(json.dumps(window(series, steps[0])) + "\n" if steps else "")
    return part


def digest(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_parts_become_one_sweep(run: RunDirectory) -> None:
    measure(run, 0, "a-iperf", [0, 1])
    measure(run, 1, "b-iperf", [1, 0], precheck=[{"kind": "iperf", "share_of_capacity": 0.91}])
    before = digest(run.path / "parts")
    found, problems = merge_run(run)
    assert (found.status, problems) == ("complete", [])
    merged = read_run(run.path)
    assert isinstance(merged, SweepRun)
    assert [(one["series"], one["step"]) for one in merged.windows] == [
        ("a-iperf", 0),
        ("a-iperf", 1),
        ("b-iperf", 1),
        ("b-iperf", 0),
    ]
    assert {one["directory"] for one in merged.windows} == {
        "parts/000-a-iperf/series/a-iperf-1",
        "parts/001-b-iperf/series/b-iperf-1",
    }
    assert all(merged.job(one["directory"]).path.is_dir() for one in merged.windows)
    assert len(read_json_lines(run.path / "rejected.jsonl")[0]) == 2
    assert (merged.info["status"], merged.info["why"], merged.info["bottleneck"]) == ("complete", "", BOTTLENECK)
    # the least of what the generator reached, and each reason once
    assert merged.info["precheck"] == [{"kind": "iperf", "share_of_capacity": 0.91}]
    assert merged.info["not_collected"] == [{"what": "GPU", "why": "not asked for"}]
    # raw data is never edited, and to merge again changes nothing
    assert digest(run.path / "parts") == before
    whole = digest(run.path)
    merge_run(RunDirectory.open(run.path))
    assert digest(run.path) == whole


def test_a_part_that_is_being_written_counts_as_far_as_it_has_come(run: RunDirectory) -> None:
    part = measure(run, 0, "a-iperf", [0], status="running")
    with (part / "points.jsonl").open("a") as file:
        file.write(json.dumps(window("a-iperf", 1))[:40])
    found, _ = merge_run(run)
    assert (found.status, found.why) == ("unknown", "1 of 4 points")
    assert len(read_json_lines(run.path / "points.jsonl")[0]) == 1
    # it is not known to have ended
    assert run.info["status"] == "running"
    with (part / "points.jsonl").open("a") as file:
        file.write(json.dumps(window("a-iperf", 1))[40:] + "\n")
    merge_run(run)
    assert [one["step"] for one in read_json_lines(run.path / "points.jsonl")[0]] == [0, 1]


def test_a_run_that_was_not_submitted_is_refused_by_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    RunDirectory.create(tmp_path / "run", "sweep", [], 0)
    monkeypatch.chdir(tmp_path)
    assert main(["merge", "run"]) == 2
    assert capsys.readouterr().err == "ringtap: run was not submitted by ringtap: it has no submit/request.json\n"


def test_what_is_missing_is_said_with_its_loads(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    measure(run, 0, "a-iperf", [1], status="partial", why="host S1 was lost")
    SubmitPaths(run.path).state("7_0").write_text("1 begun on n0\n2 ended 1\n")
    SubmitPaths(run.path).state("7_1").write_text("1 begun on n0\n2 ended 1\n")
    assert main(["merge", str(run.path)]) == 0
    shown = capsys.readouterr().out
    assert "missing: a-iperf at 0%: stopped: host S1 was lost" in shown
    assert "missing: b-iperf at 0%, 50%: stopped: exit code 1" in shown
    info = json.loads((run.path / "run.json").read_text())
    assert info["status"] == "partial"
    assert info["why"] == "1 of 4 points; a-iperf: host S1 was lost; b-iperf: exit code 1 by its files"


def test_nothing_measured_is_an_empty_sweep(run: RunDirectory) -> None:
    SubmitPaths(run.path).state("7_0").write_text("1 begun on n0\n2 ended 1\n")
    SubmitPaths(run.path).state("7_1").write_text("1 begun on n0\n2 ended 1\n")
    assert merge_run(run)[0].status == "failed"
    assert (run.path / "points.jsonl").read_text() == ""


def test_points_counted_at_other_interfaces_are_not_mixed(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(run, 0, "a-iperf", [0, 1])
    other = measure(run, 1, "b-iperf", [0, 1], bottleneck=BOTTLENECK | {"mtu": 9000})
    assert main(["merge", str(run.path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [one["series"] for one in read_json_lines(run.path / "points.jsonl")[0]] == ["a-iperf", "a-iperf"]
    assert "the points of 001-b-iperf are left out" in err
    assert json.loads(out)["problems"]
    assert len(read_json_lines(other / "points.jsonl")[0]) == 2


def test_a_command_whose_job_could_not_conclude_it_is_concluded(tmp_path: Path) -> None:
    job = RunDirectory.create(tmp_path / "job", "job", [], 0)
    paths = SubmitPaths(job.path)
    paths.states.mkdir(parents=True)
    write_json(paths.request, {"jobs": [{"id": "7"}]})
    paths.state("7").write_text("1 begun on n0\n2 ended 143\n")
    write_json(job.node("n1") / "node.json", {"status": "running", "collectors": {"gpu": {"state": "unavailable"}}})
    found, _ = merge_run(job)
    assert found.status == "partial"
    info = json.loads((job.path / "run.json").read_text())
    assert info["status"] == "partial"
    assert info["why"].endswith("the recording of n1 was cut off")
    assert [item["what"] for item in info["not_collected"]] == ["gpu"]
    before = digest(job.path)
    merge_run(RunDirectory.open(job.path))
    assert digest(job.path) == before
