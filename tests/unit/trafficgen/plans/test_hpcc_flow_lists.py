"""CDF files and flow lists of other generators: read, written, and refused with file and line."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from ringtap.cli import main
from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_file import PlanFile, write_plan
from ringtap.core.flow_plan_format import Flow
from ringtap.trafficgen.plans.common import PlanOutline
from ringtap.trafficgen.plans.hpcc_flow_lists import FlowListPlan, write_list
from ringtap.trafficgen.plans.registry import make_plan
from ringtap.trafficgen.plans.size_distributions import WORKLOADS, parse_sizes, read_cdf, write_cdf
from tests.unit.size_quantiles import quantile_bytes
from tests.unit.web_plans import PlanSpec, web_plan

pytestmark = pytest.mark.computes

NODES = ["10.0.0.1:5001", "10.0.0.2:5002", "[fd00::3]:5003"]
FRAME = PlanOutline(0, NODES, ["10.0.0.1", "10.0.0.2", "fd00::3"])
LIST = "3\n0 1 3 100 1000 2.000000001\n2 0 3 100 1 2.5\n1 2 3 100 7 3\n"


def cdf_file(folder: Path, text: str) -> Path:
    path = folder / "cdf.txt"
    path.write_text(text)
    return path


def test_shares_and_percents_mean_the_same(tmp_path: Path) -> None:
    shares = read_cdf(cdf_file(tmp_path, "0 0\n4000 0.2293\n8000  0.6921\n\n2000000\t1\n"))
    percents = read_cdf(cdf_file(tmp_path, "# sizes\n0 0\n4000 22.93\n8000 69.21\n2000000 100\n"))
    assert shares.points == percents.points == ((0, 0), (4000, 0.2293), (8000, 0.6921), (2000000, 1))
    assert shares.name == "file:cdf.txt"


def test_a_first_point_with_a_share_rises_from_zero_and_one_without_is_the_least(tmp_path: Path) -> None:
    assert quantile_bytes(read_cdf(cdf_file(tmp_path, "100 0.5\n200 1\n")), 0.25) == 50
    assert quantile_bytes(read_cdf(cdf_file(tmp_path, "100 0\n200 1\n")), 0) == 100


def test_a_step_is_a_size_of_its_own(tmp_path: Path) -> None:
    cdf = read_cdf(cdf_file(tmp_path, "1 0\n33 0.3\n33 0.4\n50 1\n"))
    assert quantile_bytes(cdf, 0.3) == quantile_bytes(cdf, 0.35) == quantile_bytes(cdf, 0.4) == 33
    assert cdf.mean_bytes == pytest.approx(0.3 * 17 + 0.1 * 33 + 0.6 * 41.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no points"),
        ("10 0.5\n20 0.9\n", "line 2: the last probability is 0.9, not 1 or 100"),
        ("10 50\n20 99.9\n", "line 2: the last probability is 99.9"),
        ("10 0\n", "line 1: the last probability is 0"),
        ("10 0.5\n5 1\n", "line 2: size 5 is smaller than 10"),
        ("10 0.5\n20 0.4\n30 1\n", "line 2: probability 0.4"),
        ("10 1.5\n20 1\n", "line 1: probability 1.5"),
        ("10 0.5\n\n10 0.5\n20 1\n", "line 3: the point 10 0.5 is named twice"),
        ("0 0.5\n20 1\n", "line 1: size 0"),
        ("10 x\n", "line 1: probability 'x'"),
        ("nan 0.5\n20 1\n", "line 1: size 'nan'"),
        ("-10 0.5\n20 1\n", "line 1: size '-10'"),
        ("1e19 1\n", "line 1: size '1e19'"),
        ("10 1_0\n", "line 1: probability '1_0'"),
        ("10 1 0\n", "line 1: a point is two columns"),
        ("10\n", "line 1: a point is two columns"),
    ],
)
def test_what_is_no_cdf_is_refused_with_file_and_line(text: str, words: str, tmp_path: Path) -> None:
    path = cdf_file(tmp_path, text)
    with pytest.raises(UsageError, match=words) as caught:
        read_cdf(path)
    assert str(caught.value).startswith(str(path))


def test_other_files_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "cdf.txt"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not text"):
        read_cdf(path)
    path.write_bytes(b"1 1\n" * 300_000)
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        read_cdf(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_cdf(tmp_path)


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_workloads_are_written_and_read_back(name: str, tmp_path: Path) -> None:
    write_cdf(parse_sizes(name).points, tmp_path / "x.cdf")  # type: ignore[attr-defined]
    assert read_cdf(tmp_path / "x.cdf").points == WORKLOADS[name].points
    with pytest.raises(UsageError, match="--force"):
        write_cdf([(1, 1)], tmp_path / "x.cdf")
    with pytest.raises(UsageError, match="cannot be written"):
        write_cdf([(1, 1)], tmp_path / "missing" / "x.cdf")


def flow_list(folder: Path, text: str) -> Path:
    path = folder / "flow.txt"
    path.write_text(text)
    return path


def test_a_flow_list_is_a_plan(tmp_path: Path) -> None:
    plan = FlowListPlan(flow_list(tmp_path, LIST), FRAME, NODES)
    assert list(plan.flows()) == [
        Flow(2_000_000_001, "10.0.0.1", NODES[1], 1000),
        Flow(2_500_000_000, "fd00::3", NODES[0], 1),
        Flow(3_000_000_000, "10.0.0.2", NODES[2], 7),
    ]
    assert (plan.header["flows"], plan.header["bytes"], plan.header["duration_ns"]) == (3, 1008, 3_001_000_000)
    write_plan(plan, tmp_path / "plan")
    assert len(list(PlanFile(tmp_path / "plan").flows())) == 3


def test_what_follows_the_flows_of_a_list_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The list in HPCC's repository counts fewer flows than it has, and ends with an explanation."""
    path = flow_list(tmp_path, LIST.replace("3\n", "2\n", 1) + "\nFirst line: number of flows\nsrc dst 3 port size\n")
    plan = FlowListPlan(path, FRAME, NODES)
    assert [flow.size_bytes for flow in plan.flows()] == [1000, 1]
    assert (plan.header["flows"], plan.header["unread_lines"]) == (2, 3)
    words = [word for node in NODES for word in ("--node", node)]
    assert main(["traffic", "plan", "--kind", "list", "--list", str(path), *words, "--summary"]) == 0
    assert "flow.txt has 3 lines after as many flows as its first line says" in capsys.readouterr().out
    assert "unread_lines" not in FlowListPlan(flow_list(tmp_path, LIST + "\n"), FRAME, NODES).header


def test_a_duration_cuts_a_flow_list(tmp_path: Path) -> None:
    frame = PlanOutline(2_500_000_000, NODES, FRAME.sources)
    assert FlowListPlan(flow_list(tmp_path, LIST), frame, NODES).header["flows"] == 1
    with pytest.raises(UsageError, match="no flow that starts"):
        FlowListPlan(flow_list(tmp_path, LIST), PlanOutline(1, NODES, FRAME.sources), NODES)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("0 1 3 100 5", "six columns"),
        ("0 1 3 100 5 2.1 7", "six columns"),
        ("", "six columns"),
        ("-1 1 3 100 5 2.1", "src '-1'"),
        ("0 x 3 100 5 2.1", "dst 'x'"),
        ("0 1 3 100 5.0 2.1", "bytes '5.0'"),
        ("0 1 3 100 99999999999999999999 2.1", "bytes"),
        ("0 1 3 100 9223372036854775808 2.1", "bytes"),
        ("0 1 3 100 0 2.1", "at least 1 byte"),
        ("0 3 3 100 5 2.1", "node 3 has no address"),
        ("1 1 3 100 5 2.1", "node 1 would send to itself"),
        ("0 1 3 100 5 -2.1", "start_s '-2.1'"),
        ("0 1 3 100 5 nan", "start_s 'nan'"),
        ("0 1 3 100 5 1e99", "too large"),
        ("0 1 3 100 5 1.9", "sort by start"),
    ],
)
def test_a_wrong_line_of_a_flow_list_is_named(line: str, words: str, tmp_path: Path) -> None:
    lines = LIST.splitlines()
    path = flow_list(tmp_path, "\n".join(["4", lines[1], line, *lines[2:], ""]))
    with pytest.raises(UsageError, match=words) as caught:
        FlowListPlan(path, FRAME, NODES)
    assert str(caught.value).startswith(f"{path} line 3: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: it must hold the number of flows"),
        ("x\n", "line 1: it must hold the number of flows"),
        (LIST.replace("3\n", "4\n", 1), "line 1: it says 4 flows, and 3 follow"),
        (LIST[:-1], "line 4: a flow is six columns and a newline"),
        ("0\n", "holds no flow"),
        ("1\n0 1 3 100 5 \N{ARABIC-INDIC DIGIT TWO}\n", "not text"),
    ],
)
def test_a_flow_list_cut_short_is_noticed(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        FlowListPlan(flow_list(tmp_path, text), FRAME, NODES)
    with pytest.raises(UsageError, match="cannot be read"):
        FlowListPlan(tmp_path / "missing", FRAME, NODES)


def test_a_plan_of_nodes_is_the_same_after_a_list_and_back(tmp_path: Path) -> None:
    plan = FlowListPlan(flow_list(tmp_path, LIST), FRAME, NODES)
    write_list(plan, tmp_path / "out.txt")
    again = FlowListPlan(tmp_path / "out.txt", FRAME, NODES)
    assert list(again.flows()) == list(plan.flows())
    assert (tmp_path / "out.txt").read_text() == (
        "3\n0 1 3 5002 1000 2.000000001\n2 0 3 5001 1 2.500000000\n1 2 3 5003 7 3.000000000\n"
    )
    with pytest.raises(UsageError, match="--force"):
        write_list(plan, tmp_path / "out.txt")
    with pytest.raises(UsageError, match="cannot be written"):
        write_list(plan, tmp_path / "missing" / "out.txt")


def test_other_plans_number_sources_before_destinations(tmp_path: Path) -> None:
    plan = web_plan(PlanSpec("consistent", 1e8, 10**9, ("a:1", "b:2"), sources=("s", "t")))
    assert write_list(plan, tmp_path / "out.txt") == {"s": 0, "t": 1, "a:1": 2, "b:2": 3}
    nodes = ["s:9", "t:9", "a:1", "b:2"]
    again = FlowListPlan(tmp_path / "out.txt", PlanOutline(0, nodes, ["s", "t", "a", "b"]), nodes)
    assert list(again.flows()) == list(plan.flows())
    starts = [line.split()[5] for line in (tmp_path / "out.txt").read_text().splitlines()[1:]]
    assert all(float(low) <= float(high) for low, high in pairwise(starts))


def test_what_a_list_cannot_hold_is_refused(tmp_path: Path) -> None:
    ring = make_plan("ring", {"duration": 10**9, "node": ["a:1", "b:1"], "bytes": 10, "iterations": 1})
    with pytest.raises(UsageError, match="kind ring"):
        write_list(ring, tmp_path / "out.txt")
    with pytest.raises(UsageError, match="kind long-lived"):
        write_list(make_plan("long-lived", {"duration": 10**9, "to": ["a:1"]}), tmp_path / "out.txt")
    same = ["a:1", "a:2"]
    plan = FlowListPlan(flow_list(tmp_path, "1\n0 1 3 100 5 0\n"), PlanOutline(0, same, ["a"]), same)
    with pytest.raises(UsageError, match="share an address"):
        write_list(plan, tmp_path / "out.txt")
    assert not (tmp_path / "out.txt").exists()
