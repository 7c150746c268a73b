"""Simulated points as a sweep's run directory, beside a measured sweep, and under the flows of plans."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import ringtap
from ringtap.cli import main
from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_file import write_plan
from ringtap.core.flow_plan_format import Flow
from ringtap.core.run_directory import RunDirectory
from ringtap.core.thesis_neural_networks import PROFILES
from ringtap.workload import simulate_under_cross_traffic
from ringtap.workload.execution_trace import Node, NodeType
from ringtap.workload.model_workloads import model_workload
from ringtap.workload.simulate_under_cross_traffic import check_load, read_cross
from ringtap.workload.simulated_run import parameters_of
from ringtap.workload.topologies import star
from ringtap.workload.workload import Workload, read_workload, write_workload
from tests.gold.analysis_sweep import write_sweep

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

VGG = PROFILES["vgg16"]
LINKS = ("--capacity", "25gbit")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workload, and what the commands make of it."""
    path = tmp_path_factory.mktemp("simulated")
    write_workload(model_workload(VGG, 3), path / "w")
    plan(path / "plan", rate_bps=10e9, duration_s=20)
    assert main(["workload", "simulate", str(path / "w"), *LINKS, "--loads", "0:0.8:0.2", "-o", str(path / "sim")]) == 0
    crossed = [
        "workload",
        "simulate",
        str(path / "w"),
        *LINKS,
        "--cross",
        str(path / "plan"),
        "-o",
        str(path / "crossed"),
    ]
    assert main(crossed) == 0
    return path


def plan(path: Path, *, rate_bps: float, duration_s: float, source: str = "") -> None:
    """Write equal flows at equal intervals, of 1 MB each."""
    count = round(rate_bps * duration_s / 8e6)

    header = {"format": "ringtap-flow-plan", "version": 2, "kind": "list", "duration_ns": round(duration_s * 1e9)}
    header |= {"flows": count, "bytes": count * 10**6, "sources": [source] if source else []}
    header |= {"destinations": ["10.0.0.1:5001"]}
    step_ns = duration_s * 1e9 / count
    flows = [Flow(round(i * step_ns), source, "10.0.0.1:5001", 10**6) for i in range(count)]
    write_plan(SimpleNamespace(header=header, flows=lambda: iter(flows)), path)


def test_a_simulated_run_is_read_as_a_sweep(folder: Path) -> None:
    run = RunDirectory.open(folder / "sim")
    assert run.info["status"] == "complete"
    assert run.info["simulated"]["bottleneck"] == "h0 down"
    sweep = ringtap.open_sweep(folder / "sim")
    assert sweep.names == ["vgg16-simulated"]
    table = sweep.points
    assert table["cross_gbps"].tolist() == pytest.approx([0, 5, 10, 15, 20])
    assert (table["iterations"] == 4).all()
    # all bytes through the link are those of the ring, and the total never exceeds its rate
    sent_gb = (table["training_gbps"] * table["mean_s"] / 8).to_numpy(float)
    assert sent_gb == pytest.approx(4 / 3 * 4 * VGG.parameters / 1e9)
    assert (table["total_gbps"].to_numpy(float) <= 25.000001).all()
    assert table["cross_std_gbps"].isna().all()
    assert table["reasons"].str.contains("the simulation gives only the mean").all()
    series = sweep["vgg16-simulated"]
    assert series.is_simulated
    assert series.demand.parameters == VGG.parameters
    assert len(sweep.job("vgg16-simulated").iterations) == 5 * 5 - 1


def test_a_flow_plan_is_cross_traffic(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal flows at equal intervals take the part of the link that a constant load takes."""
    sweep = ringtap.open_sweep(folder / "crossed")
    alone, crossed = sweep["vgg16-simulated-list"].points
    assert crossed.cross_gbps == pytest.approx(10, rel=0.01)
    assert crossed.iterations is not None
    assert 30 <= crossed.iterations <= 40  # as many as last in 20 s
    constant = ringtap.open_sweep(folder / "sim")["vgg16-simulated"].points
    assert alone.mean_s == pytest.approx(constant[0].mean_s)
    assert crossed.mean_s == pytest.approx(constant[2].mean_s, rel=0.01)
    capsys.readouterr()
    assert (
        main(
            [
                "workload",
                "simulate",
                str(folder / "w"),
                *LINKS,
                "--cross",
                str(folder / "plan"),
                "--iterations",
                "5",
                "--json",
            ]
        )
        == 0
    )
    item = json.loads(capsys.readouterr().out)
    assert [point["iterations"] for point in item["points"]] == [4, 4]
    assert item["hosts"] == 4  # the sender has one of its own


def test_a_report_puts_both_side_by_side(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_sweep(tmp_path / "measured", [("vgg16", "consistent")])
    assert main(["report", "measured", str(folder / "sim"), str(folder / "crossed")]) == 0
    written = tmp_path / "measured-and-sim-and-crossed-report"
    data = json.loads((written / "report.json").read_text())
    names = ["vgg16-consistent", "vgg16-simulated", "vgg16-simulated-list"]
    assert [one["series"] for one in data["series"]] == names
    assert data["run"]["simulated"] == names[1:]
    assert data["run"]["beside"] == ["sim", "crossed"]
    assert data["findings"][0]["text"].endswith("are simulated: nothing was measured there.")
    page = (written / "report.html").read_text()
    assert "Simulated, not measured:</strong> vgg16-simulated, vgg16-simulated-list" in page
    assert "VGG-16, simulated constant" in (written / "figures" / "iteration-times.svg").read_text()
    with pytest.raises(UsageError, match="both have the series vgg16-simulated"):
        ringtap.write_report(folder / "sim", tmp_path / "twice", beside=[folder / "sim"])
    table = tmp_path / "table.csv"
    table.write_text("model,traffic,bandwidth_gbps,iteration_s\nvgg16,iperf,0,0.4\nvgg16,iperf,5,0.5\n")
    with pytest.raises(UsageError, match="a capacity of 40 Gbit/s and sim one of 25"):
        ringtap.write_report(table, capacity=40, workers=3, beside=[folder / "sim"])
    shown = ringtap.write_report(table, workers=3, beside=[folder / "sim"])
    assert [one["series"] for one in json.loads(shown.json_path.read_text())["series"]] == ["vgg16-iperf", names[1]]


def test_the_fit_of_a_run_is_that_of_its_report(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["fit", str(folder / "sim"), "--bootstrap", "0", "--json"]) == 0
    fit = json.loads(capsys.readouterr().out)
    series = ringtap.open_sweep(folder / "sim")["vgg16-simulated"]
    assert series.fit is not None
    assert (fit["A"], fit["n"], fit["capacity_gbps"]) == (pytest.approx(series.fit.A), series.fit.n, 25.0)
    write_sweep(tmp_path / "two", [("vgg16", "consistent"), ("vgg16", "burst")])
    for arguments, says in (
        ([str(tmp_path / "two")], "has 2 series: name one with --series (vgg16-consistent, vgg16-burst)"),
        ([str(tmp_path / "two"), "--series", "vgg16"], "has no series 'vgg16'"),
        ([str(folder / "sim"), "--capacity", "25gbit"], "--capacity and --weights are for a table"),
        (["examples/points.csv", "--series", "vgg16"], "--series is for the run directory"),
    ):
        assert main(["fit", *arguments]) == 2
        assert says in capsys.readouterr().err


def test_addresses_are_placed_at_hosts(tmp_path: Path) -> None:
    plan(tmp_path / "unbound", rate_bps=1e9, duration_s=1)
    plan(tmp_path / "bound", rate_bps=1e9, duration_s=1, source="10.0.0.2")
    plan(tmp_path / "itself", rate_bps=1e9, duration_s=1, source="10.0.0.1")
    for name, source, hosts in (("unbound", 3, 4), ("bound", 3, 4), ("itself", 0, 3)):
        found = read_cross(tmp_path / name, 3)
        assert (set(found.flows.source), set(found.flows.destination), found.hosts) == ({source}, {0}, hosts)
    assert not any(len(flows) for flows in found.through(star(3, 1e9)))  # a host sends to itself
    flows = read_cross(tmp_path / "bound", 3)
    through = flows.through(star(4, 2e9))
    assert [len(each) for each in through] == [0, 0, 0, 125, 125, 0, 0, 0]
    check_load(flows, star(4, 2e9), through)
    with pytest.raises(UsageError, match="offers 1 Gbit/s to link h3 up, which carries 1 Gbit/s"):
        check_load(flows, star(4, 1e9), through)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cross", "endless"], "line 3: the flow lasts until the plan's end"),
        (["--cross", "several"], "line 4: after names several flows"),
        (["--cross", "none"], "has no flow"),
        (["--cross", "plan", "--capacity", "5gbit"], "offers 10 Gbit/s to link h3 up"),
        (["--cross", "plan", "--bottleneck", "h1 down"], "sends nothing through h1 down"),
        (["--cross", "plan", "--topology", "torus", "--sides", "3"], "has 3 hosts, but ranks and plans need 4"),
        (["--cross", "short"], "ends before two iterations have ended"),
        (["--cross", "plan", "--loads", "0.5"], "give one of them"),
        (["--iterations", "100000", "--loads", "0"], None),
        (["-o", "w"], "w exists"),
    ],
)  # fmt: skip
def test_wrong_calls_end_in_one_sentence(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], says: str | None,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name in ("w", "plan"):
        (tmp_path / name).symlink_to(folder / name)
    plan(tmp_path / "short", rate_bps=1e9, duration_s=0.5)
    lines = (folder / "plan").read_text().splitlines(keepends=True)
    header = json.loads(lines[0])
    (tmp_path / "none").write_text(json.dumps(header | {"flows": 0, "bytes": 0}) + "\n")
    ends = [lines[1], lines[2].replace("\t1000000\t", "\t0\t")]
    (tmp_path / "endless").write_text(json.dumps(header | {"flows": 2, "bytes": 10**6}) + "\n" + "".join(ends))
    several = "".join(lines[1:3]) + lines[3].replace("\t-\n", "\t0,1+500\n")
    (tmp_path / "several").write_text(
        json.dumps(header | {"version": 3, "flows": 3, "bytes": 3 * 10**6}) + "\n" + several
    )
    monkeypatch.setattr("ringtap.workload.simulate_under_cross_traffic.MAX_NODES", 10_000)
    assert main(["workload", "simulate", "w", *LINKS, *arguments]) == 2
    error = capsys.readouterr().err
    assert (says or "100,000 iterations of 39 nodes are more than 10,000: give --iterations 256 or fewer") in error
    assert error.count("\n") == 1


def test_parameters_are_what_rank_0_sums_up() -> None:
    assert parameters_of(model_workload(VGG, 2)) == VGG.parameters
    with pytest.raises(UsageError, match="rank 0 sums up no gradients"):
        parameters_of(Workload([[Node(1, "forward", NodeType.COMP, duration_us=5)]]))


def test_a_plan_cannot_name_a_folder_elsewhere(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header, _, flows = (folder / "plan").read_text().partition("\n")
    (tmp_path / "plan").write_text(json.dumps(json.loads(header) | {"kind": "../../../x"}) + "\n" + flows)
    run = tmp_path / "run"
    command = [
        "workload",
        "simulate",
        str(folder / "w"),
        *LINKS,
        "--cross",
        str(tmp_path / "plan"),
        "--iterations",
        "3",
    ]
    assert main([*command, "-o", str(run)]) == 2
    assert "'vgg16-simulated-../../../x' is not a name that a file can have" in capsys.readouterr().err
    assert not run.exists()


def test_simulated_iterations_of_each_rank_are_recorded(folder: Path) -> None:
    steps = ringtap.open_sweep(folder / "crossed").job("vgg16-simulated-list").logs.run.steps
    assert sorted(steps["rank"].unique()) == [0, 1, 2]
    by_rank = steps.groupby("rank")["end_ns"].apply(np.array)
    assert all((np.diff(ends) > 0).all() for ends in by_rank)


def test_too_many_nodes_end_in_advice_that_can_be_followed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = sum(map(len, read_workload(folder / "w").traces))
    simulate = ["workload", "simulate", str(folder / "w"), *LINKS, "--iterations"]
    monkeypatch.setattr(simulate_under_cross_traffic, "MAX_NODES", 3 * nodes)
    assert main([*simulate, "4"]) == 2
    assert f"4 iterations of {nodes} nodes are more than {3 * nodes}: give --iterations 3 or" in capsys.readouterr().err
    assert main([*simulate, "3"]) == 0
    monkeypatch.setattr(simulate_under_cross_traffic, "MAX_NODES", 2 * nodes - 1)
    assert main([*simulate, "2"]) == 2
    assert "simulate a workload with fewer ranks, layers or micro-batches" in capsys.readouterr().err
