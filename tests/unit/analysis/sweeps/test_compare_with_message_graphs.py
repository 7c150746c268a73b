"""Series beside their message graphs: ranks, bytes and paths of a made-up sweep, in report and comparison."""

import json
from pathlib import Path
from typing import Any

import pytest

import ringtap
from ringtap.analysis.sweeps.compare_with_message_graphs import ExpectedOrder, expected_orders
from ringtap.cli import main
from tests.gold.analysis_sweep import write_sweep

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

KINDS = ("burst", "consistent", "iperf")  # of vgg16: 0.376, 0.379 and 0.370 s alone
LINKS = [
    {"link": "S0 up", "payload_bytes": 1_000_000, "header_bytes": 1000, "critical_s": 0.1},
    {"link": "S1 up", "payload_bytes": 1_000_000, "header_bytes": 1000, "critical_s": 0.05},
    {"link": "leaf0 down", "payload_bytes": 0, "header_bytes": 0, "critical_s": 0.02},
]
COUNTED = {"S0 up": 1_001_000.0, "S1 up": 1_011_010.0, "leaf0 down": 2.0}


def made(path: Path, simulated_s: dict[str, float], counted: dict[str, Any]) -> None:
    """A sweep of three kinds, with simulated times of some."""
    write_sweep(path, [("vgg16", kind) for kind in KINDS], loads_gbps=(0.0,), noise=0.0)
    lines = [json.loads(line) for line in (path / "points.jsonl").read_text().splitlines()]
    (path / "points.jsonl").write_text("".join(json.dumps(line | counted) + "\n" for line in lines))
    items = [
        {"series": f"vgg16-{kind}", "iteration_s": time_s, "compute_s": 0.2, "latency_s": 0.0, "critical_messages": 9}
        | {"links": LINKS}
        for kind, time_s in simulated_s.items()
    ]  # fmt: skip
    # an earlier attempt's line is not that of the points
    older = [items[0] | {"iteration_s": 9.0}] if items else []
    (path / "expected.jsonl").write_text("".join(json.dumps(item) + "\n" for item in [*older, *items]))


def orders(path: Path) -> list[ExpectedOrder]:
    sweep = ringtap.open_sweep(path)
    return expected_orders(sweep.run, list(sweep))


def test_ranks_bytes_and_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep"
    counted = {"link_payload_bytes": COUNTED, "link_iterations": 12}
    made(path, {"burst": 0.36, "consistent": 0.37, "iperf": 0.36}, counted)
    (order,) = orders(path)
    assert [one.series for one in order.series] == ["vgg16-iperf", "vgg16-burst", "vgg16-consistent"]
    assert [(one.measured_rank, one.simulated_rank) for one in order.series] == [(1, 1.5), (2, 1.5), (3, 3)]
    assert order.spearman == pytest.approx(0.866, abs=0.001)  # of (1, 2, 3) and (1.5, 1.5, 3): √3/2
    first = order.series[0]
    assert first.path == "200 ms of computation, 150 ms on uplinks of hosts, 20 ms on the downlink of leaf0"
    assert (first.link, first.link_iterations, first.messages) == ("S1 up", 12, 9)
    assert first.link_difference == pytest.approx(0.01)
    assert main(["report", str(path)]) == 0
    data = json.loads((path / "report" / "report.json").read_text())
    assert data["orders"] == [json.loads(json.dumps(order.to_json()))]
    assert data["answer"] == " ".join(order.sentences)  # without cross traffic, there is no slowdown
    assert "rank correlation of 0.87 (Spearman)" in data["answer"]
    assert "to within 1.0 % (S1 up" in data["answer"]
    page = (path / "report" / "report.html").read_text()
    assert page.count(first.path) == 3
    capsys.readouterr()
    assert main(["compare", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(order.sentences[0])
    assert first.path in text
    assert main(["compare", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["orders"] == data["orders"]


def test_what_is_not_known_has_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "sweep"
    made(path, {"burst": 0.36, "iperf": 0.35}, {"link_why": "the machine was busy"})
    (order,) = orders(path)
    assert order.spearman is None
    assert order.sentences == []
    by_name = {one.series: one for one in order.series}
    assert by_name["vgg16-burst"].link_why == "the machine was busy"
    assert by_name["vgg16-consistent"].why == "expected.jsonl has no such series"
    assert by_name["vgg16-consistent"].simulated_rank is None
    assert main(["report", str(path)]) == 0
    assert "the machine was busy" in (path / "report" / "report.html").read_text()
    (path / "expected.jsonl").write_text('{"series": "vgg16-burst", "why": "no simulator"}\n')
    assert orders(path) == []
    assert main(["report", str(path), "-o", str(tmp_path / "out")]) == 0
    (path / "expected.jsonl").write_text('{"series": "vgg16-burst", "iteration_s": "much"}\n')
    assert main(["report", str(path), "--force"]) == 2


def test_bytes_of_links_without_any(tmp_path: Path) -> None:
    """Traffic on a link that should be idle is compared with the busiest link."""
    path = tmp_path / "sweep"
    made(path, {"burst": 0.36}, {"link_payload_bytes": COUNTED | {"leaf0 down": 100_100.0}, "link_iterations": 12})
    (order,) = orders(path)
    burst = next(one for one in order.series if one.series == "vgg16-burst")
    assert (burst.link, burst.link_difference) == ("leaf0 down", pytest.approx(0.1))
