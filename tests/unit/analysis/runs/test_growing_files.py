"""Files that grow: whatever the writes were split into, the same is read, once."""

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.analysis.runs import growing_files
from ringtap.analysis.runs.growing_files import Document, LinesTail, RecordTail, TextTail, since
from ringtap.core import append_only_logs
from ringtap.core.append_only_logs import Field, RecordWriter, open_records
from ringtap.core.run_directory_schema import NODE

pytestmark = pytest.mark.shares

FIELDS = (Field("t_ns", "<i8", "ns", "time"), Field("mono_ns", "<i8", "ns", "time"), Field("n", "<u4", "", "counter"))


def record_bytes(path: Path, count: int, begin: int = 0) -> bytes:
    writer = RecordWriter(path, FIELDS, {"collector": "test"})
    writer.append_many([(number * 10**9, number * 10**9, number) for number in range(begin, begin + count)])
    writer.close()
    return path.read_bytes()


def grow(path: Path, data: bytes, cuts: list[int]) -> "list[None]":
    """Append the data piece by piece, one a step of the iteration."""
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        with path.open("ab") as file:
            file.write(data[start:end])
        yield  # type: ignore[misc]
    return []


@settings(deadline=None, max_examples=60)
@given(count=st.integers(0, 60), cuts=st.lists(st.integers(0, 1600), max_size=12))
def test_any_split_of_writes_gives_every_record_once(
    tmp_path_factory: pytest.TempPathFactory, count: int, cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("tail")
    data = record_bytes(folder / "whole.rec", count)
    follower, seen = RecordTail(folder / "a.rec"), []
    for _ in grow(folder / "a.rec", data, cuts):
        seen += [record[2] for batch in follower.poll() for record in batch]
    assert seen == list(range(count))
    assert [record for batch in follower.poll() for record in batch] == []
    assert follower.failure == ""


@settings(deadline=None, max_examples=60)
@given(
    items=st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=8), min_size=1), max_size=20),
    cuts=st.lists(st.integers(0, 400), max_size=10),
)
def test_any_split_of_writes_gives_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, items: list[dict[str, str]], cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    data = b"".join(json.dumps(item, ensure_ascii=False).encode() + b"\n" for item in items)
    follower, seen = LinesTail(folder / "a.jsonl", dict), []
    for _ in grow(folder / "a.jsonl", data, cuts):
        seen += list(follower.poll())
    assert seen == items
    assert follower.damaged == 0


@settings(deadline=None, max_examples=60)
@given(
    lines=st.lists(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=9), max_size=20),
    cuts=st.lists(st.integers(0, 400), max_size=10),
)
def test_any_split_of_writes_gives_the_same_text(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("text")
    follower = TextTail(folder / "job.out")
    for _ in grow(folder / "job.out", "".join(f"{line}\n" for line in lines).encode(), cuts):
        follower.poll()
    assert follower.lines == tuple(lines)


def test_batches_are_bounded_and_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_files, "_BATCH_BYTES", 100)
    record_bytes(tmp_path / "a.rec", 50)
    batches = list(RecordTail(tmp_path / "a.rec").poll())
    assert {len(batch) for batch in batches} == {5}
    assert [record[2] for batch in batches for record in batch] == list(range(50))


def test_a_file_that_is_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    record_bytes(path, 3)
    follower = RecordTail(path, since(1.0, "mono_ns", 1000))
    assert [record[2] for batch in follower.poll() for record in batch] == [1, 2]
    record_bytes(tmp_path / "b.rec", 5, begin=100)
    (tmp_path / "b.rec").replace(path)
    assert [record[2] for batch in follower.poll() for record in batch] == [100, 101, 102, 103, 104]
    os.truncate(path, path.stat().st_size - 40)
    assert [record[2] for batch in follower.poll() for record in batch] == [100, 101, 102]


def test_an_old_file_is_begun_near_its_end(tmp_path: Path) -> None:
    record_bytes(tmp_path / "a.rec", 10_000)
    file = open_records(tmp_path / "a.rec")
    assert since(10.0, "mono_ns", 1000)(file) == 9989
    assert since(1e6, "mono_ns", 1000)(file) == 9000
    assert since(1e6, "mono_ns", 100_000)(file) == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no header at all\n" + b"x" * 200, "is not a ringtap record file"),
        (json.dumps({"format": "ringtap-records", "version": 9}).encode() + b"\n12345", "upgrade"),
        (b"x" * 3000, "is not a ringtap record file"),
    ],
)
def test_a_file_that_is_no_record_file_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, words: str
) -> None:
    monkeypatch.setattr(append_only_logs, "_MAX_HEADER_BYTES", 2000)
    path = tmp_path / "a.rec"
    path.write_bytes(content)
    follower = RecordTail(path)
    assert list(follower.poll()) == []
    assert words in follower.failure
    with path.open("ab") as file:
        file.write(b"more")
    assert list(follower.poll()) == []


def test_a_missing_file_and_one_that_vanishes(tmp_path: Path) -> None:
    follower = RecordTail(tmp_path / "a.rec")
    assert list(follower.poll()) == []
    record_bytes(tmp_path / "a.rec", 2)
    assert len(list(follower.poll())) == 1
    (tmp_path / "a.rec").unlink()
    assert list(follower.poll()) == []
    assert follower.failure == ""


def test_damaged_lines_are_counted_and_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_files, "_BATCH_BYTES", 64)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\nnot json\n[1]\n{"a":"b"}\n' + b"y" * 200 + b'\n{"a":2}\n{"a":')
    follower = LinesTail(path, {"a": int})
    assert list(follower.poll()) == [{"a": 1}, {"a": 2}]
    assert follower.damaged == 4
    with path.open("ab") as file:
        file.write(b"3}\n")
    assert list(follower.poll()) == [{"a": 3}]


def test_a_jobs_output_shows_as_on_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "job.out"
    follower = TextTail(path)
    follower.poll()
    path.write_bytes(b"\x1b[31mred\x1b[0m\tword\n 10%\r 20%\r 30%")
    follower.poll()
    assert follower.lines == ("red     word", " 30%")
    with path.open("ab") as file:
        file.write("\r100% für".encode()[:-1])
    follower.poll()
    with path.open("ab") as file:
        file.write("\r100% für".encode()[-1:] + b"\ndone")
    follower.poll()
    assert follower.lines == ("red     word", "100% für", "done")


def test_of_a_long_output_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.out"
    path.write_bytes(b"".join(b"line %06d\n" % number for number in range(100_000)))
    follower = TextTail(path)
    follower.poll()
    assert follower.lines[-1] == "line 099999"
    assert len(follower.lines) == 200
    assert all(len(line) == 11 for line in follower.lines)


def test_a_document_keeps_its_last_readable_state(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    document = Document(path, NODE)
    document.poll()
    assert document.item == {}
    path.write_text('{"status": "running"}')
    document.poll()
    assert document.item == {"status": "running"}
    path.write_text('{"status": "comp')
    document.poll()
    path.write_text('{"status": ["complete"]}')
    document.poll()
    assert document.item == {"status": "running"}
    path.unlink()
    document.poll()
    path.write_text('{"status": "complete"}')
    document.poll()
    assert document.item == {"status": "complete"}
