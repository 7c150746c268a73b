import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringtap.core.append_only_logs import Field, RecordWriter
from ringtap.core.errors import UsageError
from ringtap.core.run_directory import RunDirectory, clock_gap_ns, new_name, recording_begin
from ringtap.core.run_directory_schema import NIC_REC, SCHEMA, TIME_FIELDS

pytestmark = pytest.mark.computes
STEP_TIMES = ("start_ns", "end_ns", "start_mono_ns", "end_mono_ns")


def test_names_are_dated_and_unique() -> None:
    name = new_name("My Job! v2")
    assert re.fullmatch(r"\d{8}T\d{6}Z-my-job-v2-[0-9a-f]{6}", name)
    assert name != new_name("My Job! v2")


def test_a_run_remembers_how_it_ended(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a b", "job", ["ringtap"], seed=3, series="x")
    assert RunDirectory.open(tmp_path / "a b").info["status"] == "running"
    run.finish("partial", "interrupted")
    info = RunDirectory.open(tmp_path / "a b").info
    assert (info["status"], info["why"], info["seed"], info["series"], info["schema"]) == (
        "partial",
        "interrupted",
        3,
        "x",
        SCHEMA,
    )


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("two years of work")
    with pytest.raises(UsageError, match="not empty"):
        RunDirectory.create(tmp_path, "job", [], seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_unwritable_folder_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        RunDirectory.create(Path("/proc/ringtap"), "job", [], seed=0)


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file is a file: name a folder"):
        RunDirectory.create(tmp_path / "file" / "run", "job", [], seed=0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("[]", "not a ringtap run"),
        ("{}", "not a ringtap run"),
        (json.dumps({"schema": 99}), "upgrade ringtap"),
    ],
)
def test_a_broken_description_is_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(UsageError, match=words):
        RunDirectory.open(tmp_path)


def test_another_folder_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no run\.json"):
        RunDirectory.open(tmp_path)


def test_a_misspelled_path_is_answered_with_the_path_of_the_nearest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    RunDirectory.create(Path("runs") / "small", "job", [], seed=0)
    with pytest.raises(UsageError, match=r"there is no runs/smal: did you mean 'runs/small'\?"):
        RunDirectory.open(Path("runs") / "smal")


@pytest.mark.parametrize(("access", "mode"), [("private", 0o700), ("group", 0o750), ("all", 0o755)])
def test_a_run_directory_is_its_owners_alone_unless_asked_otherwise(access: str, mode: int, tmp_path: Path) -> None:
    """A run within it, as a series of a sweep, is as open as it is; a folder that is there stays as it is."""
    before = os.umask(0o022)
    try:
        outer = RunDirectory.create(tmp_path / "runs" / "outer", "sweep", [], 0, access=access).path
        inner = RunDirectory.create(outer / "series" / "one", "job", [], 0).path
        (tmp_path / "there").mkdir(0o711)
        there = RunDirectory.create(tmp_path / "there", "job", [], 0, access=access).path
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (outer, inner, there, outer.parent)]
    assert modes == [mode, mode, 0o711, 0o755]


def test_the_verbs_that_make_run_directories_say_who_may_enter(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        for options, mode in (((), 0o700), (("--access", "group"), 0o750)):
            run = tmp_path / f"run{len(options)}"
            command = [sys.executable, "-m", "ringtap.cli", "run", "-o", str(run), *options, "--", "true"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
            assert (done.returncode, run.stat().st_mode & 0o777) == (0, mode), done.stderr
    finally:
        os.umask(before)


def test_a_recording_begins_with_the_interfaces_or_else_with_the_earliest_record(tmp_path: Path) -> None:
    node = tmp_path / "nodes" / "a"
    assert (recording_begin(node), clock_gap_ns(node)) == (None, None)
    step_fields = [Field(name, "<i8", "", "time") for name in ("step", "optimizer", *STEP_TIMES)]
    steps = RecordWriter(node / "steps" / "rank0-1.rec", step_fields, {})
    steps.append(0, 0, 1030, 1040, 30, 40)
    steps.append(1, 0, 1050, 1060, 50, 60)
    assert recording_begin(node) == (1040, 40)
    host = RecordWriter(node / "host" / "host.rec", TIME_FIELDS, {})
    host.append(1021, 20)
    assert (recording_begin(node), clock_gap_ns(node)) == ((1021, 20), 1001)
    (node / "nic").mkdir()
    for damaged in (b"", b'{"format"', b"\0" * 100):
        (node / NIC_REC).write_bytes(damaged)
        assert recording_begin(node) == (1021, 20)
    (node / NIC_REC).unlink()
    nic = RecordWriter(node / NIC_REC, TIME_FIELDS, {})
    assert recording_begin(node) == (1021, 20)
    nic.append(1045, 45)
    assert (recording_begin(node), clock_gap_ns(node)) == ((1045, 45), 1000)
    for writer in (steps, host, nic):
        writer.close()


def test_damaged_times_begin_no_recording(tmp_path: Path) -> None:
    log = RecordWriter(tmp_path / "nodes" / "a" / NIC_REC, TIME_FIELDS, {})
    log.append(2**63 - 1, -(2**63))
    log.close()
    assert clock_gap_ns(tmp_path / "nodes" / "a") is None
