"""The live verdict is that of analyze over the last iterations: the same causes and costs, while they go on."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ringtap.analysis.job.run import open_job
from ringtap.analysis.live import diagnose_recent, repeated_diagnosis
from ringtap.analysis.live.build_snapshot import SnapshotSource
from ringtap.analysis.live.diagnose_recent import diagnose
from ringtap.analysis.live.follow_run import RunFollower
from ringtap.analysis.live.metrics import RunMetrics
from ringtap.analysis.live.plain import line_of
from ringtap.analysis.live.recent_traffic import FlowEnds, FlowGrowth
from ringtap.analysis.live.snapshot import Diagnosis, Snapshot
from ringtap.analysis.live.snapshot_for_browser import TableChoice, parts_of
from ringtap.analysis.live.summary import verdict_lines
from tests.gold.job_run import MS, START_NS, Truth, as_horovod, rewrite, write_ddp_job, write_run_delays

pytestmark = pytest.mark.computes
USUAL: dict[str, Any] = {
    "iterations": 60,
    "compute_ms": (100, 100, 100),
    "offsets_ns": (0, 0, 0),
    "cross_bytes": 0,
    "resent_bytes": 0,
}


def written(path: Path, *, rates_bps: tuple[float, ...] = (), **truth: Any) -> Path:
    """A job of 60 iterations of 200 ms, 20 ms of which are the network's; interfaces have these rates."""
    known = Truth(**USUAL | truth)
    write_ddp_job(path, known)
    for number in range(len(known.compute_ms)):
        nic = {"mtu": 1500, "addresses": [f"10.0.0.{number + 1}"]}
        links = {"eth0": {"qdisc": "tbf", "rate_bps": rates_bps[number]}} if rates_bps else {}
        node = path / "nodes" / f"n{number}" / "node.json"
        facts = {"before": {"cpus": 4, "nics": {"eth0": nic}, "links": links}}
        node.write_text(json.dumps(json.loads(node.read_text()) | facts))
    return path


def now(path: Path) -> Diagnosis:
    follower = RunFollower(path)
    follower.poll()
    return diagnose(follower, follower.ranks)


def test_a_healthy_job_is_said_to_be_healthy(tmp_path: Path) -> None:
    found = now(written(tmp_path / "job", rates_bps=(8e9, 8e9, 8e9)))
    assert (found.causes, found.is_known) == ((), True)
    assert found.lines[0].startswith("No fault found: the ranks' own work takes 90% of an iteration")


@pytest.mark.parametrize(
    "truth",
    [
        {"compute_ms": (100, 130, 100)},
        {"compute_ms": (100, 130, 100), "rates_bps": (8e9, 8e9, 8e9)},
        {"rates_bps": (1e9, 5e8, 1e9), "gradient_bytes": 1_500_000},
        {"compute_ms": (*[100] * 11, 130, *[100] * 4), "offsets_ns": (0,) * 16, "rates_bps": (8e9,) * 16},
    ],
)
def test_causes_and_costs_are_those_of_analyze(tmp_path: Path, truth: dict[str, Any]) -> None:
    path = written(tmp_path / "job", **truth)
    live, recorded = now(path), open_job(path).diagnosed["causes"]
    assert [cause["name"] for cause in live.causes] == [cause["name"] for cause in recorded]
    for one, other in zip(live.causes, recorded, strict=True):
        for name in ("seconds", "share", "here_s", "usual_s", "rate_bps", "usual_bps"):
            assert one[name] is other[name] is None or one[name] == pytest.approx(other[name], rel=0.02), name
        for name in ("rank", "node", "nic", "within", "is_throughout", "is_computed", "is_at_most"):
            assert one[name] == other[name], name


def test_the_evidence_of_the_network_is_that_of_analyze(tmp_path: Path) -> None:
    path = written(tmp_path / "job", cross_bytes=300_000, resent_bytes=14_480, rates_bps=(1e9, 1e9, 1e9))
    job, follower = open_job(path), RunFollower(path)
    follower.poll()
    window = diagnose_recent._window(follower.ranks)
    assert not isinstance(window, str)
    window, network = diagnose_recent._with_network(follower, window)
    count = len(window.begin_ns)
    assert count > 40
    of_job = job.iterations.set_index("end_ns").loc[window.end_ns.tolist()]
    evidence = network.evidence
    assert evidence.training_bytes is not None
    assert evidence.other_bytes is not None
    assert evidence.lost_segments is not None
    assert evidence.training_bytes == pytest.approx(of_job["training_bytes"].to_numpy(float), rel=1e-3)
    others = (of_job["cross_bytes"] + of_job["other_bytes"]).to_numpy(float)
    assert evidence.other_bytes == pytest.approx(others, rel=1e-3)
    # analyze spreads a loss over the time since the sample before
    assert evidence.lost_segments.sum() == pytest.approx(10 * count, rel=0.05)
    assert {flow.source_node for flow in network.flows if flow.is_training} == {"n0", "n1", "n2"}


def without_sockets(path: Path, **truth: Any) -> Path:
    """The same job without socket logs, as those of a job that becomes slower would have other times."""
    written(path, **truth)
    for log in path.glob("nodes/*/sockets/*.rec"):
        log.unlink()
    return path


def test_a_rank_that_becomes_slow_is_named_within_ten_iterations(tmp_path: Path) -> None:
    named_after = None
    for count in range(40, 60):
        found = now(without_sockets(tmp_path / str(count), iterations=count, slow=(1, 40, 60, 30)))
        if found.causes:
            named_after = count - 40
            break
    assert named_after is not None
    assert named_after <= 10
    (cause,) = found.causes
    assert (cause["name"], cause["rank"], cause["node"], cause["of"]) == ("slow rank", 1, "n1", named_after)
    assert cause["seconds"] == pytest.approx(0.03)
    begin_s = (START_NS + (50 + 40 * 200) * MS) / 1e9
    assert f" since {time.strftime('%H:%M:%S', time.localtime(begin_s))};" in found.lines[0]


def test_a_rank_that_waits_for_a_processor_is_told_from_one_that_is_slow(tmp_path: Path) -> None:
    path = without_sockets(tmp_path / "job", compute_ms=(100, 130, 100))
    assert any("busy processors (how long" in line for line in now(path).lines)
    for rank, share in enumerate((0.01, 0.13, 0.01)):
        write_run_delays(path / "nodes" / f"n{rank}", 100 + rank, share, 10)
    found = now(path)
    (cause,) = found.causes
    assert (cause["name"], cause["rank"], cause["node"]) == ("busy processors", 1, "n1")
    assert (cause["seconds"], cause["run_delay_s"]) == pytest.approx((0.03, 0.026))
    assert found.lines[0].startswith("Rank 1 (node n1) has to wait for a processor: 30 ms (15%) of an iteration in all")


def test_a_rank_is_not_called_slow_before_it_is_known_whether_it_lacks_a_processor(tmp_path: Path) -> None:
    def with_samples_from(first_s: int, iterations: int = 50) -> list[str]:
        slow = (1, 40, iterations, 30)
        path = without_sockets(tmp_path / str(first_s), iterations=iterations, slow=slow)
        for rank, share in enumerate((0.01, 0.13, 0.01)):
            write_run_delays(path / "nodes" / f"n{rank}", 100 + rank, share, first_s + 2)
            log = path / "nodes" / f"n{rank}" / "host" / "processes.rec"
            rewrite(log, lambda records, _: records[-2:])
        return [cause["name"] for cause in now(path).causes]

    # the rank becomes slow after 8 s
    assert with_samples_from(7) == []
    assert with_samples_from(9) == ["busy processors"]
    # the samples end; the rank is called slow after three seconds
    assert with_samples_from(6, iterations=60) == ["slow rank"]


def test_a_slow_rank_of_horovod_is_named(tmp_path: Path) -> None:
    path = without_sockets(tmp_path / "job", compute_ms=(100, 130, 100))
    as_horovod(path)
    (cause,) = now(path).causes
    assert (cause["name"], cause["rank"], cause["within"]) == ("slow rank", 1, "backward")
    assert cause["seconds"] == pytest.approx(0.03)


def test_a_cause_that_is_over_is_taken_back(tmp_path: Path) -> None:
    slow = (1, 20, 45, 30)
    (cause,) = now(without_sockets(tmp_path / "during", iterations=45, slow=slow)).causes
    assert (cause["name"], cause["rank"]) == ("slow rank", 1)
    # 5 s are 25 iterations
    assert now(without_sockets(tmp_path / "after", iterations=60, slow=slow)).causes
    assert now(without_sockets(tmp_path / "over", iterations=75, slow=slow)).causes == ()


@pytest.mark.parametrize(("buffer", "node"), [("rwnd_limited_us", "n2"), ("sndbuf_limited_us", "n1")])
def test_full_buffers_are_named_while_they_limit_a_connection(tmp_path: Path, buffer: str, node: str) -> None:
    payload_share = 1448 / 1514
    fast_bps = 8 * Truth(compute_ms=(1, 1, 1)).rank_bytes / 0.005 / payload_share

    def limited(records: list[list[Any]], at: dict[str, int]) -> list[list[Any]]:
        """From iteration 20 to 45, a full buffer limits rank 1 for 16 of the 20 ms for which it sends to rank 2."""
        for record in records:
            record[at[buffer]] = round(0.8 * min(max(record[at["busy_time_us"]] - 20 * 20_000, 0), 25 * 20_000))
        return records

    def job(name: str, iterations: int) -> Diagnosis:
        path = written(tmp_path / name, rates_bps=(fast_bps,) * 3, busy_ms=(20, 20, 20), iterations=iterations)
        rewrite(path / "nodes" / "n1" / "sockets" / "sockets.rec", limited)
        return now(path)

    (cause,) = job("during", 45).causes
    assert (cause["name"], cause["node"], cause["source"], cause["destination"]) == ("socket buffers", node, "n1", "n2")
    assert cause["seconds"] == pytest.approx(0.8 * 0.02, rel=0.1)
    assert job("over", 75).causes == ()


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    path = without_sockets(tmp_path / "job")
    found = now(path)
    assert found.lines[-1] == (
        "Cannot be told: other traffic, loss, slow link (sockets are not recorded (--collect sockets))."
    )
    for log in path.glob("nodes/*/steps/*.ddp.rec"):
        log.unlink()
    found = now(path)
    assert not found.is_known
    assert found.lines[:2] == (
        "No cause found: no stretch of iterations is longer than the others, and none stalls.",
        "Cannot be told: slow rank (no passes of the ranks are timed).",
    )
    untimed = without_sockets(tmp_path / "slower", iterations=75, slow=(1, 40, 75, 60))
    for log in untimed.glob("nodes/*/steps/*.ddp.rec"):
        log.unlink()
    (cause,) = now(untimed).causes
    assert (cause["name"], cause["seconds"]) == ("slower iterations", pytest.approx(0.06))
    few = written(tmp_path / "few", iterations=25)
    assert now(few) == Diagnosis()


def test_all_views_show_it(tmp_path: Path) -> None:
    path = written(tmp_path / "job", compute_ms=(100, 130, 100))
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(info | {"status": "running"}))
    for done in path.glob("nodes/*/DONE"):
        done.unlink()
    snapshot = SnapshotSource(path, lambda: START_NS + 12_000 * MS).take()
    assert [cause["name"] for cause in snapshot.diagnosis.causes] == ["slow rank"]
    cause, rest = verdict_lines(snapshot)
    assert cause.plain.startswith("Rank 1 (node n1) makes the others wait: 30 ms (15%) of an iteration in all of the")
    assert rest.plain.startswith("Without it an iteration would take 170 ms instead of 200 ms. Next: ")
    assert " cause=slow_rank:1 cause_s=0.0300 " in line_of(snapshot)
    assert [[text for text, _ in line] for line in parts_of(snapshot, TableChoice())["head"]["lines"]][2] == [
        cause.plain
    ]
    metrics = {metric.name: metric for metric in RunMetrics(path).collect()}
    assert [sample.value for sample in metrics["ringtap_causes_known"].samples] == [1]
    (sample,) = metrics["ringtap_cause_seconds"].samples
    assert sample.labels == {"cause": "slow rank", "node": "n1", "rank": "1", "nic": ""}
    assert sample.value == pytest.approx(0.03)
    assert "ringtap_causes_known" not in {metric.name for metric in RunMetrics(path, "n1").collect()}


def test_views_without_a_verdict() -> None:
    run = Snapshot(START_NS, "runs/x")
    assert verdict_lines(run) == []
    assert " cause=- cause_s=- " in line_of(run)
    healthy = Snapshot(START_NS, "runs/x", diagnosis=Diagnosis(("No fault found.",), (), True))
    assert [line.plain for line in verdict_lines(healthy)] == ["No fault found."]
    assert " cause=none cause_s=- " in line_of(healthy)


def test_it_uses_a_small_share_of_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "job")
    follower = RunFollower(path)
    follower.poll()
    repeated = repeated_diagnosis.RepeatedDiagnosis(follower)
    first = repeated.look()
    assert first.lines
    assert repeated.look() is first  # not due yet
    monkeypatch.setattr(repeated, "_due_s", 0.0)
    assert repeated.look() is not first


def test_a_rank_that_is_not_recorded_may_be_the_slow_one(tmp_path: Path) -> None:
    follower = RunFollower(written(tmp_path / "job"))
    follower.poll()
    for file in follower.ranks:
        file.launch, file.world_size = (True, "10.0.0.1:29500"), 4
    assert diagnose(follower, follower.ranks) == Diagnosis(
        ("Why an iteration takes this long cannot be told: 3 of 4 ranks recorded steps here, rank 3 did not.",)
    )


def test_without_numpy_the_view_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = RunFollower(written(tmp_path / "job"))
    follower.poll()
    monkeypatch.delitem(sys.modules, "ringtap.analysis.live.diagnose_recent")
    monkeypatch.setitem(sys.modules, "numpy", None)
    repeated = repeated_diagnosis.RepeatedDiagnosis(follower)
    (line,) = repeated.look().lines
    assert line.startswith("Why an iteration takes this long cannot be told: numpy is not installed here: ")
    assert repeated.look().lines == (line,)


def test_traffic_that_ends_after_the_last_iteration_has_a_sender(tmp_path: Path) -> None:
    """The newest growth of a rarely sampled socket lies in the last iterations and goes on after these."""
    follower = RunFollower(written(tmp_path / "job"))
    follower.poll()
    last_ns = max(file.ends[-1].end_ns for file in follower.ranks)
    node = follower.nodes["n1"].traffic
    assert node is not None
    ends = FlowEnds("10.0.0.2", "192.0.2.9", False)
    node.growths.append(FlowGrowth(last_ns - 10_000 * MS, last_ns + 10_000 * MS, ends, 10**9))
    window = diagnose_recent._window(follower.ranks)
    assert not isinstance(window, str)
    window, network = diagnose_recent._with_network(follower, window)
    (flow,) = (flow for flow in network.flows if not flow.is_training and flow.payload_bytes > 10**6)
    assert network.evidence.other_bytes is not None
    assert (flow.source_node, flow.destination) == ("n1", "192.0.2.9")
    assert flow.payload_bytes == pytest.approx(network.evidence.other_bytes.sum(), rel=0.01)
    assert diagnose(follower, follower.ranks).lines
