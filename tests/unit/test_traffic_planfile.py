"""Plan files: what is wrong is one sentence that names file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringtap.errors import UsageError
from ringtap.trafficgen.planfile import PlanFile, write_plan
from ringtap.trafficgen.plans import FlowPlan, PlanSpec

HEADER = {"format": "ringtap-flow-plan", "version": 1, "duration_ns": 1000, "flows": 2, "bytes": 30}
HEADER |= {"destinations": ["a:1", "b:2"]}
LINES = ["0\ta:1\t10", "999\tb:2\t20"]


def plan_file(folder: Path, lines: list[str], **header: Any) -> Path:
    path = folder / "plan"
    path.write_bytes("\n".join([json.dumps(HEADER | header), *lines, ""]).encode())
    return path


def test_a_plan_written_by_hand_reads(tmp_path: Path) -> None:
    plan = PlanFile(plan_file(tmp_path, LINES))
    plan.check()
    assert [tuple(flow) for flow in plan.flows()] == [(0, "a:1", 10), (999, "b:2", 20)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("5\ta:1", "three columns"),
        ("5\ta:1\t1\t2", "three columns"),
        ("5 a:1 10", "three columns"),
        ("", "three columns"),
        ("-5\ta:1\t10", "start_ns '-5'"),
        ("5.0\ta:1\t10", "start_ns '5.0'"),
        ("x\ta:1\t10", "start_ns 'x'"),
        ("5\ta:1\t1_0", "size_bytes '1_0'"),
        ("5\ta:1\t٣", "size_bytes"),
        ("5\ta:1\t10\r", "size_bytes"),
        ("5\ta:1\t0", "at least 1 byte"),
        ("5\ta:1\t9223372036854775808", "too large"),
        ("5\ta:1\t" + "9" * 5000, "too large"),
        ("1000\ta:1\t10", "end at 1000 ns"),
        ("5\tc:3\t10", "'c:3'"),
    ],
)
def test_a_wrong_line_is_named(line: str, words: str, tmp_path: Path) -> None:
    path = plan_file(tmp_path, [LINES[0], line, LINES[1]])
    with pytest.raises(UsageError, match=words) as caught:
        PlanFile(path).check()
    assert str(caught.value).startswith(f"{path} line 3: ")


def test_unsorted_starts_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"line 3: start 0 is before"):
        PlanFile(plan_file(tmp_path, LINES[::-1])).check()


def test_a_last_line_cut_short_is_named(tmp_path: Path) -> None:
    path = plan_file(tmp_path, LINES)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UsageError, match="line 3"):
        PlanFile(path).check()


def test_a_plan_cut_between_lines_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds 1 flows of 10 bytes but its header says 2 of 30"):
        PlanFile(plan_file(tmp_path, LINES[:1])).check()


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"format": "other"}, "no flow plan"),
        ({"version": 2}, "upgrade"),
        ({"version": "1"}, "upgrade"),
        ({"duration_ns": -1}, "duration_ns"),
        ({"duration_ns": 1.5}, "duration_ns"),
        ({"destinations": []}, "destinations"),
        ({"destinations": "a:1"}, "destinations"),
        ({"destinations": [3]}, "destination 3"),
        ({"destinations": ["a:0"]}, "a:0"),
        ({"destinations": ["a:1", "a:1"]}, "twice"),
    ],
)
def test_a_wrong_header_is_refused(header: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        PlanFile(plan_file(tmp_path, LINES, **header))


@pytest.mark.parametrize("content", [b"", b"\n", b"[]\n", b"1\n", b"\xff\xfe\n", b"{\n", b"[" * 100_000])
def test_another_file_is_no_plan(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "plan").write_bytes(content)
    with pytest.raises(UsageError, match="no flow plan"):
        PlanFile(tmp_path / "plan")


def test_bytes_that_are_no_text_are_one_sentence(tmp_path: Path) -> None:
    path = plan_file(tmp_path, LINES)
    path.write_bytes(path.read_bytes() + b"\xff\n")
    with pytest.raises(UsageError, match="cannot be read"):
        PlanFile(path).check()


def test_a_plan_is_not_overwritten_without_force(tmp_path: Path) -> None:
    plan = FlowPlan(PlanSpec("consistent", 1e6, 10**9, ("a:1",), scale=100))
    write_plan(plan, tmp_path / "plan")
    with pytest.raises(UsageError, match="--force"):
        write_plan(plan, tmp_path / "plan")
    write_plan(plan, tmp_path / "plan", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["plan"]


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    plan = FlowPlan(PlanSpec("consistent", 1e6, 10**9, ("a:1",), scale=100))
    with pytest.raises(UsageError, match="cannot be written"):
        write_plan(plan, tmp_path / "missing" / "plan")
    with pytest.raises(UsageError, match="cannot be read"):
        PlanFile(tmp_path / "missing")
