"""Files of a run directory: regular ones only, and no link of another user is followed."""

import contextlib
import os
import socket
from pathlib import Path

import pytest

from ringtap.analysis.job.run import open_job
from ringtap.analysis.live.follow_run import write_mark
from ringtap.cli import main
from ringtap.core import untrusted_files
from ringtap.core.errors import RingtapWarning, UsageError
from ringtap.core.run_directory import RunDirectory
from tests.gold.analysis_sweep import edit_info, write_sweep
from tests.gold.job_run import Truth, write_ddp_job

pytestmark = [pytest.mark.computes, pytest.mark.long]

SOMEBODY = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a link of another user")


def put(kind: str, path: Path) -> None:
    """Put something that is no regular file in a file's place."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as bound, contextlib.chdir(path.parent):
            bound.bind(path.name)
    else:
        path.symlink_to(kind)


def link_of_another(path: Path, target: Path) -> None:
    path.symlink_to(target)
    os.lchown(path, SOMEBODY, SOMEBODY)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    write_ddp_job(tmp_path / "job", Truth(iterations=3, every_ms=50))
    return tmp_path / "job"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "socket", "/dev/zero", "/dev/full"])
def test_only_a_regular_file_is_opened(tmp_path: Path, kind: str) -> None:
    put(kind, tmp_path / "file")
    for read in (untrusted_files.open_regular, untrusted_files.read_whole):
        with pytest.raises(OSError, match=r"No such device|not a regular file"):
            read(tmp_path / "file")


def test_a_file_that_is_read_whole_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted_files, "MAX_BYTES", 3)
    (tmp_path / "file").write_bytes(b"abc")
    assert untrusted_files.read_whole(tmp_path / "file") == b"abc"
    (tmp_path / "file").write_bytes(b"abcd")
    with pytest.raises(OSError, match="it has more than"):
        untrusted_files.read_whole(tmp_path / "file")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "socket", "/dev/zero"])
def test_a_capture_that_is_no_file_is_named_and_the_rest_is_analyzed(job: Path, kind: str) -> None:
    (job / "nodes" / "n0" / "packets").mkdir()
    put(kind, job / "nodes" / "n0" / "packets" / "eth0-0.pcap")
    with pytest.warns(RingtapWarning, match=r"n0/packets/eth0-0\.pcap cannot be used: "):
        assert open_job(job).logs.nodes["n0"].captures == []
    # what a kind is makes no difference to what comes after
    others = [["report"], ["export", "--to", "csv", "-o", str(job.parent / "tables")]] if kind == "pipe" else []
    for words in (["analyze"], *others):
        assert main([words[0], str(job), *words[1:]]) == 0
    for words in (["structure"], ["packets", "-o", str(job.parent / "x.pcapng")]):
        assert main([words[0], str(job), *words[1:]]) == 2


def test_a_device_is_no_capture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flows", "/dev/zero"]) == 2
    assert "/dev/zero is a device: give a file" in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_a_damaged_series_ends_the_view(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep(tmp_path / "sweep", [("vgg16", "consistent")], loads_gbps=(0.0, 10.0), iterations=5)
    (series,) = (tmp_path / "sweep" / "series").iterdir()
    (series / "run.json").write_text('{"schema": 1, "created_ns": "x"}')
    assert main(["live", "--plain", str(tmp_path / "sweep")]) == 2
    assert "run.json is damaged: created_ns is not a whole number" in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_of_a_submitted_sweep_the_newest_series_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "sweep"
    RunDirectory.create(sweep, "sweep", [], 0).finish("failed", "its job was cancelled")
    assert main(["live", "--plain", str(sweep)]) == 2
    assert f"{sweep} is a sweep that has ended: failed, its job was cancelled" in capsys.readouterr().err
    write_sweep(sweep / "parts" / "000-a", [("vgg16", "consistent")], loads_gbps=(0.0, 10.0), iterations=5)
    assert main(["live", "--plain", str(sweep)]) == 0
    shown = capsys.readouterr()
    assert " status=complete " in shown.out
    (series,) = (sweep / "parts" / "000-a" / "series").iterdir()
    assert shown.err.endswith(f"cancelled. This is its newest series, {series.name}\n")


@pytest.mark.timeout(60)
def test_a_series_of_a_sweep_that_has_ended_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep(tmp_path / "sweep", [("vgg16", "consistent")], loads_gbps=(0.0, 10.0), iterations=5)
    (series,) = (tmp_path / "sweep" / "series").iterdir()
    edit_info(series, status="running")
    assert main(["live", "--plain", str(tmp_path / "sweep")]) == 0
    assert " status=partial " in capsys.readouterr().out


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["host/host.rec", "steps/rank0-100.rec", "clock/pings.rec"])
def test_another_log_in_place_of_the_nic_s_is_named(job: Path, name: str) -> None:
    node = job / "nodes" / "n0"
    other = next(iter(sorted(node.glob(name))), next(iter(sorted(node.glob("steps/*.rec")))))
    (node / "nic" / "nic.rec").write_bytes(other.read_bytes())
    with pytest.warns(RingtapWarning, match=r"n0/nic/nic\.rec cannot be used: .* it has no usable column "):
        assert open_job(job).logs.nodes["n0"].wide("nic/nic.rec") is None
    assert main(["analyze", str(job)]) == 0


@needs_root
def test_a_mark_is_not_written_through_a_link_of_another_user(job: Path, tmp_path: Path) -> None:
    mine = tmp_path / "notes"
    mine.write_text("first\nlast")
    link_of_another(job / "marks.jsonl", mine)
    with pytest.raises(UsageError, match="it is a link of another user, which is not followed"):
        write_mark(job, 1, "here")
    assert mine.read_text() == "first\nlast"
    os.lchown(job / "marks.jsonl", os.geteuid(), -1)  # a link of one's own is followed
    mine.write_text("")
    write_mark(job, 1, "here")
    assert mine.read_text() == '{"t_ns":1,"text":"here"}\n'


@needs_root
@pytest.mark.parametrize(
    ("verb", "folder", "file"), [("analyze", "derived", "sources.json"), ("report", "report", "report.html")]
)
def test_nothing_is_written_through_a_folder_that_another_user_links(
    job: Path, tmp_path: Path, verb: str, folder: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / file).write_text("mine")
    link_of_another(job / folder, tmp_path / "mine")
    assert main([verb, str(job)]) == (2 if verb == "report" else 0)  # an analysis goes on without its tables
    assert f"{job / folder} cannot be written: it is a link of another user" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in (tmp_path / "mine").iterdir()] == [(file, "mine")]


@needs_root
def test_nothing_is_read_through_links_of_another_user(job: Path, tmp_path: Path) -> None:
    node = job / "nodes" / "n0"
    secret = tmp_path / "secret.json"
    (node / "node.json").rename(secret)
    link_of_another(node / "node.json", secret)
    with pytest.warns(RingtapWarning, match=r"n0/node\.json cannot be used: it is a link of another user"):
        assert open_job(job).logs.nodes["n0"].info == {}
    (node / "nic").rename(tmp_path / "nic")
    link_of_another(node / "nic", tmp_path / "nic")
    with pytest.warns(RingtapWarning, match=r"n0/nic/nic\.rec cannot be used: .*/nodes/n0/nic is a link of another"):
        assert open_job(job).logs.nodes["n0"].wide("nic/nic.rec") is None
    os.lchown(node / "nic", os.geteuid(), -1)
    assert open_job(job).logs.nodes["n0"].wide("nic/nic.rec") is not None


@needs_root
def test_links_that_lead_to_a_run_directory_are_the_reader_s_affair(job: Path, tmp_path: Path) -> None:
    link_of_another(tmp_path / "shared", job)
    assert main(["analyze", str(tmp_path / "shared")]) == 0


def test_a_temporary_file_is_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user cannot guess its name, and a link of that name is not followed."""
    monkeypatch.setattr(os, "urandom", bytes)
    mine = tmp_path / "mine"
    mine.write_text("mine")
    guessed = tmp_path / f".run.json.{os.uname().nodename}.{os.getpid()}.00000000"
    guessed.symlink_to(mine)
    with pytest.raises(FileExistsError):
        untrusted_files.replace_file(tmp_path / "run.json", b"{}")
    guessed.unlink()
    untrusted_files.replace_file(tmp_path / "run.json", b"{}")
    assert (mine.read_text(), (tmp_path / "run.json").read_bytes()) == ("mine", b"{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "run.json"]
