"""What a host writes is here, byte by byte, whatever its files do and whenever they are looked at."""

import contextlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ringtap.agents.hosts.copy_growing_files import FolderSync, FrameWriter
from ringtap.agents.hosts.message_frames import CHUNK_BYTES

pytestmark = pytest.mark.shares

LOGS = ["host/a.rec", "host/weird 'name'\n", "host/deep/er/b.rec", os.fsdecode(b"host/\xff\xfe")]
ITEMS = ["host/clock.json", "host/deep/x.json"]


def nobody(*_: object) -> None:
    raise AssertionError("nothing is to be passed on")


class Mirroring(RuleBasedStateMachine):
    """Files grow and are replaced on one side, rounds and catch-ups go on meanwhile, chunk by chunk."""

    @initialize()
    def begin(self) -> None:
        base = Path(self.folder)
        self.there, self.here = base / "there", base / "here"
        (self.there / "nodes").mkdir(parents=True)
        self.here.mkdir()
        self.mirror, self.receiver = FolderSync(), FrameWriter(nobody)
        self.mirror.add_folder("run", str(self.there))
        self.receiver.expect("run", self.here)
        self.round = self.mirror.round()
        self.versions: dict[str, set[bytes]] = {name: set() for name in ITEMS}

    @rule(
        name=st.sampled_from(LOGS),
        size=st.sampled_from([0, 1, 7, CHUNK_BYTES, CHUNK_BYTES + 1]),
        byte=st.binary(min_size=1, max_size=1),
    )
    def grow(self, name: str, size: int, byte: bytes) -> None:
        path = self.there / "nodes" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(byte * size)

    @rule(name=st.sampled_from(ITEMS), number=st.integers(0, 10**20), twice=st.booleans())
    def replace(self, name: str, number: int, twice: bool) -> None:
        """Twice within a moment: then the inode of the version seen last may be given out again."""
        path = self.there / "nodes" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for content in (json.dumps(number).encode(), *([json.dumps(number + 1).encode()] if twice else [])):
            temporary = path.with_name(f".{path.name}.1")
            temporary.write_bytes(content)
            temporary.replace(path)
            self.versions[name].add(content)

    @rule(chunks=st.integers(1, 3))
    def look(self, chunks: int) -> None:
        for _ in range(chunks):
            if (frame := next(self.round, None)) is None:
                self.round = self.mirror.round()
            else:
                self.receiver.take("host", *frame)

    @rule(name=st.sampled_from(LOGS + ITEMS))
    def catch_up(self, name: str) -> None:
        path = self.there / "nodes" / name
        for frame in self.mirror.catch_up([str(path)]):
            self.receiver.take("host", *frame)
        if path.exists():
            assert (self.here / "nodes" / name).read_bytes() == path.read_bytes()

    @invariant()
    def nothing_here_was_never_there(self) -> None:
        assert self.receiver.failures == {}
        for name in LOGS:
            with contextlib.suppress(FileNotFoundError):
                here = (self.here / "nodes" / name).read_bytes()
                assert (self.there / "nodes" / name).read_bytes().startswith(here)
        for name in ITEMS:
            with contextlib.suppress(FileNotFoundError):
                assert (self.here / "nodes" / name).read_bytes() in self.versions[name], "a half file"

    def teardown(self) -> None:
        if hasattr(self, "mirror"):
            for part in (self.round, self.mirror.round()):
                for frame in part:
                    self.receiver.take("host", *frame)
            files = {p.relative_to(self.there): p.read_bytes() for p in self.there.rglob("*") if p.is_file()}
            assert {p.relative_to(self.here): p.read_bytes() for p in self.here.rglob("*") if p.is_file()} == files


def test_a_mirrored_folder_equals_the_original(tmp_path_factory: pytest.TempPathFactory) -> None:
    class Case(Mirroring):
        @property
        def folder(self) -> str:
            if not hasattr(self, "_folder"):
                self._folder = str(tmp_path_factory.mktemp("case"))
            return self._folder

    Case.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
    Case.TestCase().runTest()


def test_hidden_files_links_and_what_came_from_here_stay_there(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    for name in (".hidden", "given", "own"):
        (nodes / name).write_text(name)
    (nodes / "link").symlink_to("/etc/passwd")
    os.mkfifo(nodes / "pipe")
    mirror = FolderSync()
    mirror.add_folder("run", str(tmp_path))
    mirror.exclude(str(nodes / "given"))
    assert [(item["name"], data) for item, data in mirror.round()] == [("nodes/own", b"own")]
    assert list(mirror.round()) == []
    mirror.remove(str(tmp_path))
    (nodes / "own").write_text("more than before")
    assert list(mirror.round()) == []


CHUNK = {"key": "run", "name": "nodes/S1/x", "at": 0, "new": True, "whole": True, "mode": 0o644}


@pytest.mark.parametrize(
    "name",
    [
        *("../x", "nodes/../../x", "/etc/x", "run.json", "nodes/../run.json", "nodes", ".", "/", "nodes/x\0y"),
        *("nodes/S2/clock/clock.json", "nodes/S1/../S2/x", "nodes/S1", "nodes/S1/", "nodes/S1x/y", "nodes/.S1.mirror"),
        *("nodes/S1/" + "a/" * 2000 + "b", "nodes/S1/x\0y", "nodes/S1/\ud800"),
    ],
)
def test_a_host_writes_nowhere_but_in_its_own_folder(name: str, tmp_path: Path) -> None:
    receiver = FrameWriter(nobody)
    receiver.expect("run", tmp_path / "run", "S2")
    receiver.take("S1", CHUNK | {"name": name}, b"x")
    assert "is not a file of S1's part of a run" in receiver.failures["S1"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("key", ["words", "run", "no such key"])
def test_a_host_writes_no_file_that_another_hosts_words_go_to(key: str, tmp_path: Path) -> None:
    receiver = FrameWriter(nobody)
    receiver.expect("run", tmp_path / "run")
    receiver.expect("words", tmp_path / "words", owner="S2")
    receiver.take("S1", {"key": key, "name": "", "at": 0}, b"forged")
    assert "is none of its own" in receiver.failures["S1"]
    receiver.take("S2", {"key": "words", "name": "", "at": 0}, b"its own")
    assert (tmp_path / "words").read_bytes() == b"its own"
    assert "S2" not in receiver.failures


@pytest.mark.parametrize(
    "fields",
    [
        *({"at": 2**62}, {"at": 1}, {"at": -1}, {"at": 2**63}, {"at": True}, {"at": "0"}, {"at": None}, {"at": 0.0}),
        *({"mode": "x"}, {"mode": None}, {"name": None}, {"name": ["nodes"]}, {"key": 1}, {"key": None}),
        {"at": 2**40, "new": False, "whole": False},
    ],
)
def test_a_chunk_that_no_file_has_is_refused_and_takes_no_room(fields: dict[str, object], tmp_path: Path) -> None:
    receiver = FrameWriter(nobody)
    receiver.expect("run", tmp_path / "run")
    (tmp_path / "run/nodes/S1").mkdir(parents=True)
    receiver.take("S1", CHUNK | fields, b"x")
    assert receiver.failures["S1"].startswith("what it sends cannot be written here: ")
    assert all(path.stat().st_size == 0 for path in tmp_path.rglob("*") if path.is_file())


def test_a_clock_of_many_megabytes_is_not_sent_to_every_other_host(tmp_path: Path) -> None:
    receiver = FrameWriter(nobody)
    receiver.expect("run", tmp_path, "S1")
    item = CHUNK | {"name": "nodes/S1/clock/server.json"}
    for at in range(0, 5 << 20, CHUNK_BYTES):
        receiver.take("S1", item | {"at": at, "new": True, "whole": at + CHUNK_BYTES >= 5 << 20}, bytes(CHUNK_BYTES))
    assert "is too long to be passed on" in receiver.failures["S1"]


def test_clocks_are_passed_on_to_those_that_look_at_them(tmp_path: Path) -> None:
    passed: list[tuple[str, bytes, str, str | None]] = []
    receiver = FrameWriter(lambda _key, name, content, host, target: passed.append((name, content, host, target)))
    receiver.expect("run", tmp_path, "S0")

    def write(host: str, name: str, **flags: object) -> None:
        item = {"key": "run", "name": f"nodes/{host}/{name}", "at": 0, "mode": 0o644, "new": True, "whole": True}
        receiver.take(host, item | flags, name.encode())

    for host in ("S0", "S1"):
        for name in ("clock/server.json", "clock/clock.json", "clock/pings.rec", "nic/nic.rec"):
            write(host, name)
    write("S1", "clock/pings.rec", new=False, whole=False)  # it grows: that it is there is known
    assert passed == [
        ("nodes/S0/clock/server.json", b"clock/server.json", "S0", None),
        ("nodes/S0/clock/clock.json", b"clock/clock.json", "S0", None),
        ("nodes/S1/clock/pings.rec", b"", "S1", "S0"),
    ]
    assert receiver.failures == {}


def test_a_disk_that_is_full_here_is_told_and_the_rest_of_the_host_is_left_alone(tmp_path: Path) -> None:
    receiver = FrameWriter(nobody)
    receiver.expect("run", tmp_path / "file")
    (tmp_path / "file").write_text("in the way")
    item = {"key": "run", "name": "nodes/S1/x", "at": 0, "mode": 0o644, "new": True, "whole": True}
    receiver.take("S1", item, b"")
    assert receiver.failures["S1"].startswith("what it sends cannot be written here: ")
