"""A file of a run with wrong types, deep nesting or another kind of content: a sentence, not a traceback."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ringtap.analysis.job.run import open_job
from ringtap.analysis.job.summary import summarize
from ringtap.analysis.live.build_snapshot import SnapshotSource
from ringtap.cli import main
from ringtap.core.append_only_logs import Field, RecordWriter, open_records
from ringtap.core.errors import UsageError
from ringtap.core.run_directory import RunDirectory, open_log, read_points
from tests.gold.analysis_sweep import edit_info, write_sweep
from tests.gold.job_run import Truth, write_ddp_job

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damage")
    write_ddp_job(path / "job", Truth(iterations=3, every_ms=50))
    write_sweep(path / "sweep", [("vgg16", "consistent")], loads_gbps=(0.0, 10.0), iterations=5)
    return path


@pytest.fixture
def job(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole / "job", tmp_path / "job"))


@pytest.fixture
def sweep(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole / "sweep", tmp_path / "sweep"))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("argv", "ls", "argv is not a list"),
        ("why", ["x"], "why is not text or null"),
        ("created_ns", 2**63, "created_ns is not a whole number"),
        ("not_collected", ["packets"], "not_collected[0] is not an object"),
        ("plan", {"models": [3]}, "plan.models[0] is not an object"),
        ("plan", {"models": [{"name": "../x"}]}, "plan.models[0].name is not a name"),
        ("plan", {"scale": 0}, "plan.scale is not a number"),
        ("bottleneck", {"total": {"node": 3}}, "bottleneck.total.node"),
        ("precheck", {"kind": 1}, "precheck is not a list or null"),
        ("lab", {"links": [{"asked_bps": "1"}]}, "lab.links[0].asked_bps"),
    ],
)
@pytest.mark.parametrize("verb", ["analyze", "report", "structure", "status", "merge"])
def test_a_wrong_type_in_run_json_is_named(
    job: Path, verb: str, key: str, value: object, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_info(job, **{key: value})
    assert main([verb, str(job)]) == 2
    shown = capsys.readouterr().err
    assert says in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    "content", [DEEP, '{"a":' * 100_000, "NaN", "[]", "\0", '{"schema": true}', '{"schema": 1e999}']
)
def test_a_run_json_of_something_else_is_refused(job: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (job / "run.json").write_text(content)
    for verb in ("analyze", "report", "structure", "status", "merge"):
        assert main([verb, str(job)]) == 2
        assert "run.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("relative", "content"),
    [
        ("node.json", DEEP),
        ("node.json", '{"collectors": {"nic": 3}}'),
        ("node.json", '{"before": {"links": [1]}}'),
        ("node.json", '{"jobs": {"pid": 1}}'),
        ("clock/clock.json", '{"fit": {"offset_ns": "5"}}'),
        ("clock/clock.json", '{"fit": {"offset_ns": 1e300}}'),
        ("clock/clock.json", '{"segments": 3}'),
        ("sockets/owners.jsonl", '{"inode": "x"}\n' * 3 + DEEP + "\n"),
        ("sockets/sockets.rec", "other"),
        ("nic/nic.rec", "other"),
    ],
)
def test_one_damaged_file_of_a_node_is_a_warning(job: Path, relative: str, content: str) -> None:
    path = job / "nodes" / "n0" / relative
    if content == "other":
        shutil.copyfile(job / "nodes" / "n0" / "steps" / "rank0-100.rec", path)
    else:
        path.write_text(content)
    data = summarize(open_job(job))
    assert data["iterations"]["count"] == 3
    assert any(f"n0/{relative}" in line for line in data["warnings"])
    json.dumps(data, allow_nan=False)


@pytest.mark.parametrize("name", ["/", "..", "", "**", "a\0b", "[", "x" * 5000])
def test_a_collector_of_any_name_is_named_and_looked_for_nowhere(job: Path, name: str) -> None:
    path = job / "nodes" / "n0" / "node.json"
    item = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(item | {"collectors": {name: {"state": "failed", "reason": "it says so"}}}))
    assert ["n0", name, "failed", "it says so"] in open_job(job).collectors.iloc[:, :4].values.tolist()


def test_a_step_log_of_another_content_is_refused(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = job / "nodes" / "n0"
    shutil.copyfile(node / "nic" / "nic.rec", node / "steps" / "rank0-100.rec")
    assert main(["analyze", str(job)]) == 2
    assert "no usable column step, optimizer" in capsys.readouterr().err


def test_a_step_log_that_is_a_link_to_nowhere_is_refused(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job / "nodes" / "n0" / "steps" / "rank0-100.rec"
    path.unlink()
    path.symlink_to("nowhere")
    assert main(["analyze", str(job)]) == 2
    assert "rank0-100.rec cannot be read: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"series": "../x"},
        {"model": None},
        {"directory": "a\0b"},
        {"window_start_ns": -1},
        {"window_end_ns": 1.5},
        {"requested_bps": 1e300},
        {"late_share": "none"},
        {"step": -1},
    ],
)
def test_a_point_of_another_shape_names_its_line_and_key(sweep: Path, change: dict[str, object]) -> None:
    path = sweep / "points.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{json.dumps(json.loads(second) | change)}\n")
    with pytest.raises(UsageError, match=rf"line 2 cannot be used: {next(iter(change))} is not"):
        read_points(path)
    assert main(["report", str(sweep)]) == 2


def columns(path: Path, *fields: Field) -> Path:
    RecordWriter(path, fields, {}).close()
    return path


def test_a_record_file_s_columns_are_those_of_its_name(tmp_path: Path) -> None:
    times = [Field("t_ns", "<i8", "ns", "time"), Field("mono_ns", "<i8", "ns", "time")]
    columns(tmp_path / "nic" / "nic.rec", *times)
    assert open_log(tmp_path / "nic" / "nic.rec").count == 0
    columns(tmp_path / "host" / "host.rec", times[0])
    with pytest.raises(UsageError, match="no usable column mono_ns"):
        open_log(tmp_path / "host" / "host.rec")
    columns(tmp_path / "twice.rec", *times, times[0])
    with pytest.raises(UsageError, match="two of its columns have the same name"):
        open_records(tmp_path / "twice.rec")
    columns(tmp_path / "raw.rec", Field("x", "V4", "", "counter"))
    with pytest.raises(UsageError, match="a counter of raw bytes"):
        open_records(tmp_path / "raw.rec")


def test_damaged_tables_are_made_again(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(job)]) == 0
    first = capsys.readouterr().out
    for name in ("summary.json", "iterations.parquet"):
        path = job / "derived" / name
        path.write_bytes(path.read_bytes()[:-40] + b"x" * 40)
        assert main(["analyze", str(job), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["iterations"]["count"] == 3
    assert main(["analyze", str(job)]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == first.splitlines()[:3]


def test_a_run_json_may_say_null_where_nothing_is_known(job: Path) -> None:
    edit_info(job, why=None, not_collected=None, plan=None, lab=None, precheck=None, bottleneck=None, calibration=None)
    assert RunDirectory.open(job).info["why"] is None
    assert main(["analyze", str(job)]) == 0


def set_back(job: Path, *names: str) -> None:
    """Let the last steps of all ranks have times of an hour earlier."""
    for path in (job / "nodes").glob("*/steps/rank*-[0-9]*.rec"):
        if path.name.endswith(".ddp.rec"):
            continue
        found = open_records(path)
        records = np.memmap(path, [(field.name, field.type) for field in found.fields], "r+", found.offset)
        for name in names:
            records[name][-1] -= 3600 * 10**9
        records.flush()


def test_a_clock_that_was_set_without_a_note_moves_no_iteration(job: Path) -> None:
    expected = open_job(job).iterations
    set_back(job, "start_ns", "end_ns")
    found = open_job(job)
    pd.testing.assert_frame_equal(found.iterations, expected)
    said = "the clock of n1 was set during the run and clock/clock.json does not say when"
    assert any(said in one for one in summarize(found)["warnings"])


def test_an_iteration_that_ends_before_it_begins_is_refused(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a clock that nobody can set, too: the bins of time would be those of other iterations."""
    set_back(job, "start_ns", "end_ns", "start_mono_ns", "end_mono_ns")
    for verb in ("analyze", "report"):
        assert main([verb, str(job)]) == 2
        assert "ends before it begins, by the clocks of the ranks" in capsys.readouterr().err


def test_steps_at_negative_times_are_shown(job: Path) -> None:
    for path in (job / "nodes").glob("*/steps/rank*-[0-9]*.rec"):
        if path.name.endswith(".ddp.rec"):
            continue
        found = open_records(path)
        records = np.memmap(path, [(field.name, field.type) for field in found.fields], "r+", found.offset)
        for name in ("start_ns", "end_ns", "start_mono_ns", "end_mono_ns"):
            records[name] = -(2**62)
        records.flush()
    assert SnapshotSource(job).take().status == "complete"
