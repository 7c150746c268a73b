"""Records of testbeds: where they are kept, and files in their place that are none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringtap import cli
from ringtap.agents.node import agent_control_socket
from ringtap.agents.testbed import registry
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.core.errors import UsageError

pytestmark = pytest.mark.shares

SPEC = TestbedSpec("bad", ("a", "b"), 100_000_000)
RECORD = {"spec": SPEC.to_json(), "pid": 2**22 + 1, "start_ticks": 1, "owner_pid": 0, "links": []}
BAD: dict[str, object] = {
    "not JSON": b"{",
    "no text": b"\xff\xfe",
    "empty": b"",
    "deep": b"[" * 100_000,
    "a list": [],
    "a number": 3,
    "foreign": {"name": "compose", "services": {}},
    "spec no table": RECORD | {"spec": [1]},
    "no spec": {key: value for key, value in RECORD.items() if key != "spec"},
    "hosts no list": RECORD | {"spec": SPEC.to_json() | {"hosts": 3}},
    "a host without a name": RECORD | {"spec": SPEC.to_json() | {"hosts": ["a", None]}},
    "rate in words": RECORD | {"spec": SPEC.to_json() | {"rate_bps": "fast"}},
    "no pid": RECORD | {"pid": None},
    "everybody": RECORD | {"pid": -1, "start_ticks": None},
    "own group": RECORD | {"pid": 0},
    "pid in words": RECORD | {"pid": "1"},
    "pid true": RECORD | {"pid": True},
    "ticks in words": RECORD | {"start_ticks": "1"},
    "owner in words": RECORD | {"owner_pid": "1"},
    "links no list": RECORD | {"links": {}},
    "a link without a rate": RECORD | {"links": [{"host": "a", "direction": "up"}]},
    "unknown topology": RECORD | {"spec": SPEC.to_json() | {"topology": "clos"}},
    "leaves in words": RECORD | {"spec": SPEC.to_json() | {"topology": "leaf-spine", "per_leaf": "one"}},
    "sides no text": RECORD | {"spec": SPEC.to_json() | {"topology": "torus", "sides": 33}},
    "another name": RECORD | {"spec": SPEC.to_json() | {"name": "other"}},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one place of records."""
    place = tmp_path / "records"
    monkeypatch.setattr(registry, "_places", lambda: [place])
    assert registry.state_folder() == place
    return place


@pytest.fixture
def keeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a testbed's."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def record(name: str, process: subprocess.Popen[bytes]) -> registry.TestbedState:
    ticks = registry.start_ticks(process.pid)
    assert ticks is not None
    lab = registry.TestbedState(TestbedSpec(name, ("a", "b"), 100_000_000), process.pid, ticks, 0, [])
    lab.save()
    return lab


def make_bad(kind: str, path: Path) -> None:
    """Put something in the place of a record."""
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    elif isinstance(BAD[kind], bytes):
        path.write_bytes(BAD[kind])  # type: ignore[arg-type]
    else:
        path.write_text(json.dumps(BAD[kind]))


@pytest.mark.parametrize("kind", [*BAD, "folder", "pipe", "link"])
def test_a_file_that_is_no_record_blocks_neither_status_nor_down(
    kind: str, folder: Path, keeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """The testbeds beside it are shown and removed; it is named, and left alone."""
    make_bad(kind, folder / "bad.json")
    lab = record("stands", keeper)
    for verb, said in ((["status"], "stands is up"), (["status", "--json"], "stands"), (["down", "--all"], "removed")):
        assert cli.main(["testbed", *verb]) == 0
        out, err = capsys.readouterr()
        assert said in out
        assert err.startswith(f"warning: {folder / 'bad.json'} is not a record of a testbed (")
        assert "Error" not in err, "no words of Python's"
    assert keeper.wait(10) == -signal.SIGKILL
    assert not lab.path.exists()
    assert os.path.lexists(folder / "bad.json")


def test_down_clears_the_record_of_a_testbed_that_is_gone_and_spares_who_took_its_pid(
    folder: Path, keeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    ticks = registry.start_ticks(keeper.pid)
    assert ticks
    gone = registry.TestbedState(SPEC, keeper.pid, ticks - 1, 0, [])
    gone.save()
    assert gone.folder == folder
    assert cli.main(["testbed", "down", "--all"]) == 0
    assert capsys.readouterr().out == f"{SPEC.name}: was gone; record cleared\n"
    assert not gone.path.exists()
    assert keeper.poll() is None
    keeper.kill()


def test_a_record_of_another_version_is_read_for_what_is_known(folder: Path) -> None:
    item = RECORD | {"spec": SPEC.to_json() | {"colour": "red"}, "weather": "fine"}
    (folder / "bad.json").write_text(json.dumps({key: value for key, value in item.items() if key != "links"}))
    ((lab,), problems) = registry.read_records()
    assert (lab.spec, lab.pid, lab.links, problems) == (SPEC, RECORD["pid"], [], [])


def test_a_testbed_takes_the_place_of_a_bad_record_but_not_of_a_folder(
    folder: Path, keeper: subprocess.Popen[bytes]
) -> None:
    (folder / "stands.json").write_text("{")
    assert [lab.path for lab in [record("stands", keeper)]] == [folder / "stands.json"]
    assert registry.find("stands").pid == keeper.pid
    (folder / "other.json").mkdir()
    with pytest.raises(UsageError, match="cannot be written"):
        record("other", keeper)


def test_a_keeper_that_may_not_be_ended_does_not_keep_the_others(
    folder: Path, keeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "600"]) as foreign:
        end = os.kill

        def kill(pid: int, number: int) -> None:
            if pid == foreign.pid:
                raise PermissionError(1, "Operation not permitted")
            end(pid, number)

        record("foreign", foreign)
        record("stands", keeper)
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", kill)
            code = cli.main(["testbed", "down", "--all"])
        foreign.kill()
    assert code == 1
    out, err = capsys.readouterr()
    assert out == "stands: removed\n"
    assert "the init process of testbed foreign" in err
    assert keeper.wait(10) == -signal.SIGKILL
    assert (folder / "foreign.json").exists()


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Local disk and home of a user who has no runtime folder."""
    monkeypatch.setattr(agent_control_socket, "LOCAL", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    everywhere = registry._places()[1:]
    monkeypatch.setattr(registry, "_places", lambda: everywhere)
    return tmp_path


@pytest.mark.parametrize("kind", ["file", "link", "open to others", "another user's"])
def test_a_folder_that_is_not_ones_own_is_passed_over(kind: str, places: Path) -> None:
    taken = places / f"ringtap-{os.geteuid()}"
    if kind == "file":
        taken.touch()
    elif kind == "link":
        (places / "elsewhere").mkdir(mode=0o700)
        taken.symlink_to(places / "elsewhere")
    elif kind == "open to others":
        taken.mkdir()
        taken.chmod(0o777)
    else:
        taken.mkdir(mode=0o700)
        if os.geteuid() != 0:
            pytest.skip("needs root: only root can give a folder away")
        os.chown(taken, 12345, 12345)
    assert registry.state_folder() == places / f"ringtap-{os.geteuid()}-1"
    assert registry.state_folder().stat().st_mode & 0o777 == 0o700


def test_where_every_name_is_taken_the_home_serves(places: Path) -> None:
    for path in agent_control_socket.local_names(f"ringtap-{os.geteuid()}"):
        path.touch()
    assert registry.state_folder() == places / "home" / f".ringtap-{os.uname().nodename}"
    registry.state_folder().rmdir()
    (places / "home" / f".ringtap-{os.uname().nodename}").touch()
    with pytest.raises(UsageError, match="no folder for the records of testbeds"):
        registry.state_folder()


def test_a_testbed_is_found_after_an_earlier_place_has_come_free(places: Path, keeper: subprocess.Popen[bytes]) -> None:
    """As when another user's folder goes, or the runtime folder comes with a login."""
    taken = places / f"ringtap-{os.geteuid()}"
    taken.touch()
    lab = record("stands", keeper)
    taken.unlink()
    assert registry.state_folder() == taken
    assert registry.find("stands").path == lab.path
    with registry.locked():
        assert registry.remove(registry.find(None))
    assert registry.all_testbeds() == []


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_is_in_the_place_of_the_lock_is_named(kind: str, folder: Path) -> None:
    make_bad(kind, folder / ".lock")
    with (
        pytest.raises(UsageError, match=r"\.lock cannot be opened: .*; remove what is in its place"),
        registry.locked(),
    ):
        pass


def test_a_pipe_in_the_place_of_the_lock_does_not_hang(folder: Path) -> None:
    make_bad("pipe", folder / ".lock")
    with registry.locked():
        pass
