import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtap.core.append_only_logs import (
    Field,
    JsonLinesWriter,
    RecordWriter,
    cut_torn_record,
    open_records,
    read_json_lines,
)
from ringtap.core.errors import UsageError

pytestmark = pytest.mark.computes

FIELDS = (
    Field("t_ns", "<i8", "ns", "time"),
    Field("bytes", "<u8", "bytes", "counter", 64),
    Field("share", "<f8", "", "gauge"),
)


def write(path: Path, rows: list[tuple[float, ...]]) -> None:
    writer = RecordWriter(path, FIELDS, {"collector": "test"})
    for row in rows:
        writer.append(*row)
    writer.close()


@given(
    rows=st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1), st.floats(allow_nan=False)))
)
def test_what_is_written_reads_back(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[float, ...]]) -> None:
    path = tmp_path_factory.mktemp("records") / "a.rec"
    write(path, rows)
    log = open_records(path)
    assert log.fields == FIELDS
    assert log.about == {"collector": "test"}
    assert log.tail() == rows
    assert log.torn_bytes == 0


def test_numpy_maps_it_as_the_documentation_says(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.rec"
    write(path, [(1, 2, 0.5), (3, 4, 0.25)])
    with path.open("rb") as file:
        line = file.readline()
    header = json.loads(line)
    dtype = np.dtype([(field["name"], field["type"]) for field in header["fields"]])
    table = np.memmap(path, dtype, mode="r", offset=len(line))
    assert dtype.itemsize == header["record_bytes"]
    assert table["bytes"].tolist() == [2, 4]
    assert len(line) % 64 == 0


def test_a_torn_record_is_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    write(path, [(1, 2, 0.5), (3, 4, 0.25)])
    os.truncate(path, path.stat().st_size - 5)
    log = open_records(path)
    assert log.tail() == [(1, 2, 0.5)]
    assert log.torn_bytes == log.record_bytes - 5


def test_a_killed_writer_loses_no_record(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    code = (
        "import sys, time, pathlib\n"
        "from ringtap.core.append_only_logs import Field, RecordWriter\n"
        "writer = RecordWriter(pathlib.Path(sys.argv[1]), [Field('n', '<i8', '', 'index')], {})\n"
        "for n in range(1000):\n    writer.append(n)\n"
        "print('written', flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"written\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert [row[0] for row in open_records(path).tail()] == list(range(1000))


def test_two_writers_never_share_a_file(tmp_path: Path) -> None:
    write(tmp_path / "a.rec", [])
    with pytest.raises(FileExistsError):
        write(tmp_path / "a.rec", [])


@pytest.mark.parametrize("content", [b"", b"hello\n", b"{}\n", b"[1]\n", b'{"format": "other"}\n', b"\xff\xfe\n"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.rec"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="not a ringtap record file"):
        open_records(path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    write(path, [])
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 9'))
    with pytest.raises(UsageError, match="upgrade"):
        open_records(path)


def test_json_lines_survive_a_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    writer = JsonLinesWriter(path)
    writer.append({"n": 1})
    writer.append({"n": 2})
    writer.close()
    assert read_json_lines(path) == ([{"n": 1}, {"n": 2}], 0)
    with path.open("ab") as file:
        file.write(b'{"n": 3, "half')
    assert read_json_lines(path) == ([{"n": 1}, {"n": 2}], 1)
    with path.open("ab") as file:
        file.write(b'\n{"n": 4}\n')
    with pytest.raises(UsageError, match="line 3"):
        read_json_lines(path)
    assert read_json_lines(tmp_path / "missing") == ([], 0)


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        (b"", []),
        (b'{"a":1}\n', [{"a": 1}]),
        (b'{"a":1}\n{"b":2', [{"a": 1}]),
        (b'{"a":1}\n{"b":2}', [{"a": 1}, {"b": 2}]),
        (b'{"a"', []),
        (b'{"a":1}\n{"b":"' + b"b" * 200_000, [{"a": 1}]),
        (b'{"a":1}\n{"b":"\xc3', [{"a": 1}]),
    ],
    ids=["new", "whole", "torn", "only its line end missing", "one torn line", "a long torn line", "half a letter"],
)
def test_an_appending_writer_ends_or_cuts_a_torn_last_line_first(
    tmp_path: Path, before: bytes, kept: list[dict[str, int]]
) -> None:
    path = tmp_path / "points.jsonl"
    path.write_bytes(before)
    writer = JsonLinesWriter(path)
    writer.append({"c": 3})
    writer.close()
    assert read_json_lines(path) == ([*kept, {"c": 3}], 0)


LIMITED = """
import resource, sys
from pathlib import Path
from ringtap.core.append_only_logs import Field, JsonLinesWriter, RecordWriter
fields = [Field("a", "<i8", "", "index"), Field("b", "<i8", "", "index"), Field("c", "<i8", "", "index")]
records = RecordWriter(Path("log.rec"), fields, {})
lines = JsonLinesWriter(Path("log.jsonl"))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for append in (lambda n: records.append(n, n, n), lambda n: lines.append({"number": n})):
    for number in range(1000):
        try:
            append(number)
        except OSError as error:
            print(error.errno)
            break
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
records.append(-1, -1, -1)
lines.append({"number": -1})
"""


def test_a_write_cut_short_leaves_whole_records_and_lines_to_go_on_from(tmp_path: Path) -> None:
    """A limit of file sizes that is raised again, as a disk that is full for a while."""
    path = {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    command = [sys.executable, "-c", LIMITED]
    done = subprocess.run(
        command, cwd=tmp_path, env=dict(os.environ) | path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(errno.EFBIG)] * 2
    records = open_records(tmp_path / "log.rec")
    rows = records.tail()
    assert records.torn_bytes == 0
    assert rows == [*((number,) * 3 for number in range(len(rows) - 1)), (-1, -1, -1)]
    assert len(rows) > 10
    items, torn = read_json_lines(tmp_path / "log.jsonl")
    assert (torn, items[-1]) == (0, {"number": -1})
    assert [item["number"] for item in items[:-1]] == list(range(len(items) - 1))


def test_of_a_batch_that_does_not_fit_the_whole_records_stay(tmp_path: Path) -> None:
    code = LIMITED.split("for append", maxsplit=1)[0] + (
        "try:\n    records.append_many([(number,) * 3 for number in range(1000)])\n"
        "except OSError as error:\n    print(error.errno)\n"
    )
    environment = dict(os.environ) | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    records = open_records(tmp_path / "log.rec")
    assert (done.stdout, records.torn_bytes) == (f"{errno.EFBIG}\n", 0)
    assert records.count == (1000 - records.offset) // 24
    assert records.tail() == [(number,) * 3 for number in range(records.count)]


def test_a_record_file_that_is_appended_to_loses_its_torn_record_first(tmp_path: Path) -> None:
    path, fields = tmp_path / "log.rec", [Field("a", "<i8", "", "index")]
    writer = RecordWriter(path, fields, {})
    writer.append(1)
    writer.close()
    with path.open("ab") as file:
        file.write(b"torn")
    assert cut_torn_record(path).count == 1
    again = RecordWriter(path, fields, None)
    again.append(2)
    again.close()
    assert (open_records(path).tail(), open_records(path).torn_bytes) == ([(1,), (2,)], 0)
