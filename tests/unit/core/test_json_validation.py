"""JSON of unknown origin: within bounds, of the shape asked for, or refused in one clause that says where."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringtap.core.append_only_logs import each_json_line, read_json_lines
from ringtap.core.errors import UsageError
from ringtap.core.json_validation import COUNT, NAME, NS, Number, ShapeError, check, load_json, parse_json

pytestmark = pytest.mark.computes

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(JSON)
def test_what_json_writes_is_read_back(item: Any) -> None:
    assert parse_json(json.dumps(item)) == item
    assert parse_json(json.dumps(item).encode()) == item


@given(st.binary() | st.text())
def test_anything_else_is_a_value_error(data: bytes | str) -> None:
    with contextlib.suppress(ValueError):
        parse_json(data)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "nested deeper"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested deeper"),
        ("[" * 65 + "]" * 65, "nested deeper"),
        ("NaN", "not a number"),
        ("[-Infinity]", "not a number"),
        ("1e999", "too large"),
        (str(2**64), "too large"),
        ("-" + "9" * 10_000, "too large"),
        (b'"\xff"', "not UTF-8"),
    ],
)
def test_what_is_out_of_bounds_is_refused(text: str | bytes, why: str) -> None:
    with pytest.raises(ShapeError, match=why):
        parse_json(text)


def test_many_brackets_are_no_depth() -> None:
    assert len(parse_json("[" + ",".join(["[]"] * 1000) + "]")) == 1000
    assert parse_json("[" * 64 + "]" * 64)


def test_half_characters_become_whole_ones() -> None:
    """A command line with bytes that are no UTF-8 is written as half characters, which nobody could print."""
    item = parse_json(json.dumps({"argv": [os.fsdecode(b"a\xff"), "\U0001f600"], "\udc80": 1}))
    assert item == {"argv": ["a\ufffd", "\U0001f600"], "\ufffd": 1}


SHAPE = {"a": str, "b?": ([{"c": NS}], None), "d?": {str: Number(0, 1)}, "e?": NAME, "f?": (int, str)}


@pytest.mark.parametrize(
    ("item", "why"),
    [
        ({"a": "x"}, ""),
        ({"a": "x", "b": None, "d": {"y": 0.5}, "e": "n", "f": "3", "other": object()}, ""),
        ([], "it is not an object"),
        ({}, "it has no a"),
        ({"a": 1}, "a is not text"),
        ({"a": "x", "b": [{"c": 1}, {"c": -1}]}, "b[1].c is not a whole number of at least 0"),
        ({"a": "x", "b": [{"c": True}]}, "b[0].c is not a whole number"),
        ({"a": "x", "b": [{"c": 1.0}]}, "b[0].c is not a whole number"),
        ({"a": "x", "b": [3]}, "b[0] is not an object"),
        ({"a": "x", "b": "y"}, "b is not a list or null"),
        ({"a": "x", "d": {"y": 2}}, "d.y is not a number of at least 0 and at most 1"),
        ({"a": "x", "e": "../up"}, "e is not a name that a file can have"),
        ({"a": "x", "e": ".."}, "e is not a name that a file can have"),
        ({"a": "x", "f": None}, "f is not a whole number or text"),
    ],
)
def test_a_misfit_is_named_by_its_place(item: Any, why: str) -> None:
    if not why:
        check(item, SHAPE)
        return
    with pytest.raises(ShapeError) as caught:
        check(item, SHAPE)
    assert str(caught.value).startswith(why)


def test_a_pipe_and_an_endless_file_are_no_documents(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "zero", "folder", "missing"):
        with pytest.raises(OSError):
            load_json(tmp_path / name)


def test_lines_are_checked_and_a_torn_one_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n{"a": "x"}\n[' + "[" * 100_000 + '\n{"a": 2}\n{"a":')
    found = [(line.number, line.item, line.torn) for line in each_json_line(path, {"a": COUNT})]
    assert found == [(1, {"a": 1}, False), (3, None, False), (4, None, False), (5, {"a": 2}, False), (6, None, True)]
    with pytest.raises(UsageError, match="line 3 cannot be used: a is not a whole number"):
        read_json_lines(path, {"a": COUNT})
    path.write_text('{"a": 1}\n{"a":')
    assert read_json_lines(path, {"a": COUNT}) == ([{"a": 1}], 1)
    assert read_json_lines(tmp_path / "missing", {"a": COUNT}) == ([], 0)
