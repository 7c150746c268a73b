"""Flow plan files: what is wrong is one sentence that names file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ringtap.core import flow_plan_file
from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_file import PlanFile, write_plan
from ringtap.core.flow_plan_format import Flow
from tests.unit.web_plans import PlanSpec, web_plan

pytestmark = pytest.mark.computes

HEADER = {"format": "ringtap-flow-plan", "version": 2, "duration_ns": 1000, "flows": 4, "bytes": 37}
HEADER |= {"sources": ["10.0.0.9"], "destinations": ["a:1", "b:2"]}
LINES = ["0\t-\ta:1\t10\t-", "5\t10.0.0.9\tb:2\t7\t0+3", "5\t-\ta:1\t0\t0", "999\t-\tb:2\t20\t-"]
OLD_HEADER = {"version": 1, "flows": 2, "bytes": 30}
OLD_LINES = ["0\ta:1\t10", "999\tb:2\t20"]


def plan_file(folder: Path, lines: list[str], **header: Any) -> Path:
    path = folder / "plan"
    path.write_bytes("\n".join([json.dumps(HEADER | header), *lines, ""]).encode())
    return path


def test_a_plan_written_by_hand_reads(tmp_path: Path) -> None:
    plan = PlanFile(plan_file(tmp_path, LINES))
    assert list(plan.flows()) == [
        Flow(0, "", "a:1", 10),
        Flow(5, "10.0.0.9", "b:2", 7, ((0, 3),)),
        Flow(5, "", "a:1", 0, ((0, 0),)),
        Flow(999, "", "b:2", 20),
    ]


def test_a_plan_of_version_1_still_reads(tmp_path: Path) -> None:
    plan = PlanFile(plan_file(tmp_path, OLD_LINES, **OLD_HEADER))
    assert list(plan.flows()) == [Flow(0, "", "a:1", 10), Flow(999, "", "b:2", 20)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("5\t-\ta:1\t10", "five columns"),
        ("5\t-\ta:1\t1\t-\t2", "five columns"),
        ("5 - a:1 10 -", "five columns"),
        ("", "five columns"),
        ("-5\t-\ta:1\t10\t-", "start_ns '-5'"),
        ("5.0\t-\ta:1\t10\t-", "start_ns '5.0'"),
        ("x\t-\ta:1\t10\t-", "start_ns 'x'"),
        ("5\t-\ta:1\t1_0\t-", "size_bytes '1_0'"),
        ("5\t-\ta:1\t-10\t-", "size_bytes '-10'"),
        ("5\t-\ta:1\t٣\t-", "size_bytes"),
        ("5\t-\ta:1\t10\t-\r", "after '-\\\\r'"),
        ("5\t-\ta:1\t9223372036854775808\t-", "too large"),
        ("5\t-\ta:1\t4611686018427387904\t-", "a flow has at most"),
        ("5\t-\ta:1\t" + "9" * 5000 + "\t-", "too large"),
        ("1000\t-\ta:1\t10\t-", "end at 1000 ns"),
        ("5\t-\tc:3\t10\t-", "destination 'c:3'"),
        ("5\t-\t\t10\t-", "destination is empty"),
        ("5\t\ta:1\t10\t-", "source is empty"),
        ("5\t10.0.0.8\ta:1\t10\t-", "source '10.0.0.8'"),
        ("5\t-\ta:1\t10\tx", "after 'x'"),
        ("5\t-\ta:1\t10\t-1", "after '-1'"),
        ("5\t-\ta:1\t10\t1", "after 1 is not an earlier flow: this is flow 1"),
        ("5\t-\ta:1\t10\t7", "after 7 is not an earlier flow"),
        ("5\t-\ta:1\t10\t0+", "the delay of after ''"),
        ("5\t-\ta:1\t10\t0+-3", "the delay of after '-3'"),
        ("5\t-\ta:1\t10\t0+9223372036854775807", "the delay of after is too large"),
        ("5\t-\ta:1\t10\t0,0", "after '0,0' is not a whole number"),
        ("5\t-\t-\t0\t-", "destination '-'"),
        (" 5\t-\ta:1\t10\t-", "start_ns ' 5'"),
        ("5\t-\ta:1\t10\t٠", "after '٠'"),
    ],
)
def test_a_wrong_line_is_named(line: str, words: str, tmp_path: Path) -> None:
    path = plan_file(tmp_path, [LINES[0], line, *LINES[1:]])
    with pytest.raises(UsageError, match=words) as caught:
        list(PlanFile(path).flows())
    assert str(caught.value).startswith(f"{path} line 3: ")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("5\ta:1", "three columns"),
        ("5\t-\ta:1\t10\t-", "three columns"),
        ("5\ta:1\t0", "at least 1 byte"),
        ("5\ta:1\tx", "size_bytes 'x'"),
        ("5\tc:3\t1", "destination 'c:3'"),
    ],
)
def test_a_wrong_line_of_version_1_is_named(line: str, words: str, tmp_path: Path) -> None:
    path = plan_file(tmp_path, [OLD_LINES[0], line, OLD_LINES[1]], **OLD_HEADER)
    with pytest.raises(UsageError, match=words) as caught:
        list(PlanFile(path).flows())
    assert str(caught.value).startswith(f"{path} line 3: ")


def test_a_line_of_version_3_waits_for_several_and_may_send_nothing(tmp_path: Path) -> None:
    lines = ["0\t10.0.0.9\t-\t0\t-", "0\t10.0.0.9\ta:1\t7\t0+5", "0\t10.0.0.9\tb:2\t7\t0,1+3"]
    path = plan_file(tmp_path, lines, version=3, flows=2, bytes=14, iterations=3, max_connections=2)
    plan = PlanFile(path)
    assert (plan.iterations, plan.max_connections) == (3, 2)
    assert list(plan.flows()) == [
        Flow(0, "10.0.0.9", "", 0),
        Flow(0, "10.0.0.9", "a:1", 7, ((0, 5),)),
        Flow(0, "10.0.0.9", "b:2", 7, ((0, 0), (1, 3))),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("5\t-\t-\t1\t-", "size_bytes is 1, but a computation sends nothing"),
        ("5\t-\ta:1\t10\t0,", "after ''"),
        ("5\t-\ta:1\t10\t0,x", "after 'x'"),
        ("5\t-\ta:1\t10\t0+1,0+-3", "the delay of after '-3'"),
        ("5\t-\ta:1\t10\t0,1", "after 1 is not an earlier flow: this is flow 1"),
    ],
)
def test_a_wrong_line_of_version_3_is_named(line: str, words: str, tmp_path: Path) -> None:
    path = plan_file(tmp_path, [LINES[0], line, *LINES[1:]], version=3)
    with pytest.raises(UsageError, match=words) as caught:
        list(PlanFile(path).flows())
    assert str(caught.value).startswith(f"{path} line 3: ")


def test_iterations_are_equal_parts_of_the_lines(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line 1: iterations 3 do not divide the 4 lines"):
        list(PlanFile(plan_file(tmp_path, LINES, version=3, iterations=3)).flows())


def test_nothing_can_wait_for_a_flow_that_does_not_end(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line 3: after 0 names a flow of size 0"):
        list(PlanFile(plan_file(tmp_path, ["0\t-\ta:1\t0\t-", "0\t-\ta:1\t1\t0"])).flows())


@pytest.mark.parametrize(
    "line",
    [
        "0\t-\ta:1",
        "x\t-\ta:1\t1\t-",
        "3\t-\ta:1\t1\t-",
        "6\t-\ta:1\t-1\t-",
        "6\t-\tc:1\t1\t-",
        "6\t-\ta:1\t1\t9",
        "6\t-\ta:1\t1\t0+-9",
        "6\t-\ta:1\t1\t-5",
        "6\t-\ta:1\t" + "9" * 5000 + "\t-",
    ],
)
def test_a_plan_edited_after_the_check_is_one_sentence_to_the_sender(line: str, tmp_path: Path) -> None:
    path = plan_file(tmp_path, [*LINES[:3], line])
    with pytest.raises(UsageError) as caught:
        list(PlanFile(path).flows())
    assert str(caught.value).startswith(f"{path} line 5: ")


def test_unsorted_starts_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"line 3: start_ns 5 is before"):
        list(PlanFile(plan_file(tmp_path, LINES[::-1])).flows())


def test_a_last_line_cut_short_is_named(tmp_path: Path) -> None:
    path = plan_file(tmp_path, LINES)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UsageError, match="line 5"):
        list(PlanFile(path).flows())


def test_a_plan_cut_between_lines_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match=r"holds 1 flow of 10 bytes, but flows and bytes in line 1 say 4 of 37: .* \(line 2 is its last\)",
    ):
        list(PlanFile(plan_file(tmp_path, LINES[:1])).flows())


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"format": "other"}, "not a flow plan"),
        (
            {"version": 4, "ringtap": "9.0"},
            r"written by ringtap 9\.0 \(format 4\); .* formats up to 3: upgrade ringtap",
        ),
        ({"version": 0}, "version must be"),
        ({"version": True}, "version must be"),
        ({"version": "1"}, "version must be"),
        ({"duration_ns": -1}, "duration_ns"),
        ({"duration_ns": 0}, "duration_ns"),
        ({"duration_ns": True}, "duration_ns"),
        ({"flows": None}, "flows"),
        ({"bytes": 2**64}, "bytes"),
        ({"kind": 3}, "kind"),
        ({"duration_ns": 1.5}, "duration_ns"),
        ({"destinations": []}, "destinations"),
        ({"destinations": "a:1"}, "destinations"),
        ({"destinations": [3]}, "destination 3"),
        ({"destinations": ["a:0"]}, "a:0"),
        ({"destinations": ["a"]}, "line 1: destination 'a'"),
        ({"destinations": ["a:1", "a:1"]}, "twice"),
        ({"destinations": ["a\ud800:1"]}, "destination"),
        ({"sources": "10.0.0.9"}, "sources"),
        ({"sources": [3]}, "sources"),
        ({"sources": [""]}, "sources"),
        ({"sources": ["-"]}, "sources"),
        ({"sources": ["a b"]}, "sources"),
        ({"sources": ["10.0.0.9", "10.0.0.9"]}, "twice"),
        ({"load_counts": "frames"}, "load_counts"),
        ({"transport": []}, "transport"),
        ({"transport": {"colour": 1}}, "colour"),
        ({"transport": {"dscp": 64}}, "dscp"),
        ({"transport": {"dscp": True}}, "dscp"),
        ({"transport": {"congestion_control": ""}}, "congestion_control"),
        ({"transport": {"send_buffer_bytes": 0}}, "send_buffer_bytes"),
        ({"transport": {"pacing_bps": 1.5}}, "pacing_bps"),
    ],
)
def test_a_wrong_header_is_refused(header: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        PlanFile(plan_file(tmp_path, LINES, **header))


def test_a_header_that_names_a_key_twice_is_refused(tmp_path: Path) -> None:
    path = plan_file(tmp_path, LINES)
    path.write_bytes(path.read_bytes().replace(b'"flows": 4', b'"flows": 4, "flows": 4'))
    with pytest.raises(UsageError, match=r"line 1: the header names 'flows' twice"):
        PlanFile(path)


@pytest.mark.parametrize("content", [b"", b"\n", b"[]\n", b"1\n", b"\xff\xfe\n", b"{\n", b"[" * 100_000])
def test_another_file_is_no_plan(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "plan").write_bytes(content)
    with pytest.raises(UsageError, match="not a flow plan"):
        PlanFile(tmp_path / "plan")


def test_bytes_that_are_no_text_are_one_sentence_that_names_the_line(tmp_path: Path) -> None:
    path = plan_file(tmp_path, LINES)
    whole = path.read_bytes()
    path.write_bytes(whole + b"\xff\n")
    with pytest.raises(UsageError, match=f"line {whole.count(10) + 1}: a flow is"):
        list(PlanFile(path).flows())


def test_a_plan_is_not_overwritten_without_force(tmp_path: Path) -> None:
    plan = web_plan(PlanSpec("consistent", 1e6, 10**9, ("a:1",), scale=100))
    write_plan(plan, tmp_path / "plan")
    with pytest.raises(UsageError, match="--force"):
        write_plan(plan, tmp_path / "plan")
    write_plan(plan, tmp_path / "plan", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["plan"]


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    plan = web_plan(PlanSpec("consistent", 1e6, 10**9, ("a:1",), scale=100))
    with pytest.raises(UsageError, match="cannot be written"):
        write_plan(plan, tmp_path / "missing" / "plan")
    with pytest.raises(UsageError, match="cannot be read"):
        PlanFile(tmp_path / "missing")


def read_or_error(path: Path) -> list[Flow] | str:
    try:
        return list(PlanFile(path).flows())
    except UsageError as error:
        return str(error)


WORDS = st.sampled_from(
    ["0", "5", "7", "999", "1000", "", "-", "+5", "5 ", "٣", "9" * 20, "a:1", "b:2", "10.0.0.9", "0+3"]
)
ANY_LINES = st.lists(st.lists(WORDS, min_size=4, max_size=6).map("\t".join), max_size=3)
RIGHT = st.tuples(st.sampled_from(["-", "10.0.0.9"]), st.sampled_from(["a:1", "b:2"]), st.integers(1, 9))


@given(right=st.lists(RIGHT, max_size=5), more=ANY_LINES, after=st.lists(RIGHT, max_size=2), version=st.integers(1, 3))
def test_lines_read_together_are_those_read_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, right: list[Any], more: list[str], after: list[Any], version: int
) -> None:
    """Lines of which each is right by itself are read by columns; with any other among them, each by itself."""
    lines = ["\t".join(("5", *map(str, one), "-")) for one in right]
    lines += more + ["\t".join(("6", *map(str, one), "-")) for one in after]
    count = len(lines)
    size = sum(one[2] for one in right + after)
    path = plan_file(tmp_path_factory.mktemp("plan"), lines, version=version, flows=count, bytes=size)
    together = read_or_error(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow_plan_file._Lines, "plain", lambda *_: None)
        assert read_or_error(path) == together
