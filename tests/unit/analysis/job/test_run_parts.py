"""Parts of the join that a DDP run over Ethernet does not show: other counters, Horovod, NCCL, captures."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.analysis.job import byte_accounting, counters_per_iteration, iterations_of_ranks
from ringtap.analysis.job.captured_payload_per_iteration import Packets, read_packets
from ringtap.analysis.job.flows import SocketTraffic
from ringtap.analysis.job.horovod_timeline import read_timeline
from ringtap.analysis.job.nccl_log import read_nccl
from ringtap.analysis.job.run import open_job
from ringtap.analysis.job.summary import summarize
from ringtap.analysis.job.summary_text import _congestion, describe
from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.analysis.runs.samples_to_iterations import Borders
from ringtap.core.append_only_logs import Field, JsonLinesWriter, RecordWriter
from ringtap.core.run_directory import RunDirectory, write_json
from tests.gold.job_run import MS, START_NS, STEP_NAMES, TIMES, Node, Truth, captured_twice, pcap, write_ddp_job

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

GOLD = Path(__file__).resolve().parents[3] / "gold"


@pytest.fixture
def node(tmp_path):
    return Node(RunDirectory.create(tmp_path / "job", "job", [], 1), "n0")


def borders(*edges_ms):
    edges = START_NS + np.array(edges_ms, np.int64) * MS
    return Borders(edges, np.arange(len(edges) - 1))


def long_log(node, relative, fields, rows):
    writer = RecordWriter(node.path / relative, [*TIMES, *fields], {})
    writer.append_many([(START_NS + row[0] * MS, row[0] * MS, *row[1:]) for row in rows])
    writer.close()


def table(node, *edges_ms):
    return counters_per_iteration.node_table(NodeLogs(node.path), borders(*edges_ms))


@pytest.mark.parametrize(("unit", "octets"), [("4 octets", 4), ("8 octets", 8)], ids=["InfiniBand", "Omni-Path"])
def test_fabrics_count_octets_by_four_or_eight_and_all_ports(node, unit, octets):
    fields = [Field("port_xmit_data", "<u8", unit, "counter", 64)]
    for name in ("port_xmit_wait", "hw.np_cnp_sent", "hw.rp_cnp_handled"):
        fields.append(Field(name, "<u8", "", "counter", 32))
    for port in (1, 2):
        rows = [(t_ms, t_ms * 1000, t_ms, t_ms, 2 * t_ms) for t_ms in (0, 100, 200)]
        long_log(node, f"infiniband/mlx5_0-{port}.rec", fields, rows)
    found = table(node, 0, 100, 200)
    assert found["infiniband_tx_bytes"].tolist() == pytest.approx([2 * 100_000 * octets] * 2)
    assert found["cnp_sent"].tolist() == pytest.approx([200, 200])
    assert found["cnp_handled"].tolist() == pytest.approx([400, 400])
    assert found["infiniband_rx_bytes"].isna().all()


def test_pause_frames_are_counted_once_and_not_their_duration(node):
    names = ("rx_prio3_pause", "tx_prio3_pause", "rx_prio3_pause_duration", "rx_pause_ctrl_phy", "rx_ecn_mark")
    rows = [(START_NS + t_ms * MS, t_ms, 0, 900 * t_ms, t_ms, 5 * t_ms) for t_ms in (0, 100)]
    node.wide("ethtool/eth0.rec", dict.fromkeys(names, "counter"), rows)
    found = table(node, 0, 100)
    assert (found["pause_frames"][0], found["ecn_marks"][0]) == (100, 500)


def test_processors_of_the_job_and_of_others(node):
    rows = [(START_NS + t_ms * MS, 0.0015 * t_ms, 0.001 * t_ms, 4e9 - t_ms) for t_ms in (0, 100, 200)]
    columns = {"cpu0.busy_s": "counter", "cpu1.busy_s": "counter", "memory.available_bytes": "gauge"}
    fields = [Field(name, "<f8", "", kind) for name, kind in columns.items()]  # type: ignore[arg-type]
    writer = RecordWriter(node.path / "host" / "host.rec", [*TIMES, *fields], {})
    writer.append_many([(row[0], row[0] - START_NS, *row[1:]) for row in rows])
    writer.close()
    kinds = [Field("pid", "<u4", "", "index"), Field("cpu_s", "<f8", "s", "counter")]
    samples = [(t_ms, pid, t_ms * 0.0005) for t_ms in (0, 100, 200) for pid in (7, 8)]
    long_log(node, "host/processes.rec", kinds, samples)
    lines = JsonLinesWriter(node.path / "host" / "processes.jsonl")
    lines.append({"pid": 7, "parent": 1, "rank": 3, "command": "python", "t_ns": 0})
    lines.append({"pid": 8, "parent": 1, "rank": None, "command": "python", "t_ns": 0})
    lines.close()
    found = table(node, 0, 100, 200)
    assert found["cpu_busy_cores"].tolist() == pytest.approx([2.5, 2.5])
    assert found["cpu_job_cores"].tolist() == pytest.approx([1.0, 1.0])
    assert found["cpu_other_cores"].tolist() == pytest.approx([1.5, 1.5])
    assert found["memory_available_bytes"].tolist() == [4e9, 4e9 - 100]
    cores = counters_per_iteration.rank_cores(NodeLogs(node.path), borders(0, 100, 200))
    assert list(cores) == [3]
    assert cores[3].tolist() == pytest.approx([0.5, 0.5])


def test_queues_written_on_change_hold_and_children_count_once(node):
    kinds = [Field("interface", "<u4", "", "index"), Field("handle", "<u4", "", "index")]
    kinds += [Field("parent", "<u4", "", "index")]
    kinds += [Field(name, "<u4", "", "gauge") for name in ("backlog_bytes", "backlog_packets")]
    kinds += [Field("drops", "<u4", "packets", "counter", 32)]
    root = 0xFFFFFFFF
    rows = [
        (0, 2, 10, root, 0, 0, 2**32 - 1),
        (100, 2, 10, root, 5000, 4, 4),
        (0, 2, 11, 10, 0, 0, 0),
        (100, 2, 11, 10, 5000, 4, 5),
    ]
    long_log(node, "qdisc/qdisc.rec", kinds, rows)
    node.wide(
        "nic/nic.rec",
        dict.fromkeys(("eth0.tx_bytes", "eth0.rx_bytes"), "counter"),
        [(START_NS + t_ms * MS, 0, 0) for t_ms in (0, 300)],
    )
    found = table(node, 0, 100, 200, 300, 400)
    assert found["queue_drops"].tolist()[:3] == [5, 0, 0]
    assert found["queue_backlog_bytes"].tolist()[:3] == [0, 5000, 5000]
    assert found.loc[3].isna().all()  # nothing was recorded any more


def test_gpus_are_averaged(node):
    for index, busy in enumerate((40, 60)):
        rows = [(START_NS + t_ms * MS, busy) for t_ms in (0, 50, 100)]
        node.wide(f"gpu/gpu{index}.rec", {"utilization_pct": "gauge"}, rows)
    assert table(node, 0, 100)["gpu_utilization_pct"].tolist() == pytest.approx([50])


@pytest.mark.parametrize(("used", "mean_pct"), [((), 50), (("b",), 75), (("a", "b"), 50)])
def test_gpus_of_others_do_not_count(node, used, mean_pct):
    for uuid, pct in (("a", 25), ("b", 75)):
        rows = [(START_NS + at * MS, pct) for at in (0, 50, 100)]
        node.wide(f"gpu/gpu{uuid}.rec", {"utilization_pct": "gauge"}, rows, uuid=f"GPU-{uuid}")
    for rank, uuid in enumerate(used):
        about = {"rank": rank, "pid": 7, "gpu": uuid}
        fields = [Field(name, "<i8", "", "gauge") for name in STEP_NAMES]
        RecordWriter(node.path / "steps" / f"rank{rank}-7.rec", fields, about).close()
    assert table(node, 0, 100)["gpu_utilization_pct"].tolist() == pytest.approx([mean_pct])


def test_nccl_says_rings_links_and_interfaces():
    found = read_nccl(GOLD / "job_nccl.log")
    assert (found["version"], found["network"], found["rank"], found["ranks"]) == ("2.20.5+cuda12.4", "IB", 2, 4)
    assert found["rings"] == [[0, 1, 2, 3], [0, 3, 2, 1]]
    assert found["links"] == {"1 -> 2": "NET/IB/0/GDRDMA", "2 -> 3": "P2P/IPC/read", "2 -> 1": "NET/IB/1"}
    assert found["interfaces"] == [
        {"network": "IB", "name": "mlx5_0", "address": "1/RoCE"},
        {"network": "IB", "name": "mlx5_1", "address": "1/RoCE"},
        {"network": "Socket", "name": "ens7", "address": "10.0.0.1"},
        {"network": "Socket", "name": "ib0", "address": "fd00::7"},
    ]
    assert found["warnings"] == ["socketFinalizeAccept: wrong type 4 != 3"]


def test_nccl_and_marks_are_in_the_text(tmp_path):
    write_ddp_job(tmp_path / "job", Truth(iterations=5), sockets=False)
    folder = tmp_path / "job/nodes/n0/nccl"
    folder.mkdir()
    (folder / "node-a.1201.log").write_text((GOLD / "job_nccl.log").read_text())
    found = summarize(open_job(tmp_path / "job"))
    # what sockets carry of such a job is bootstrap, and RAS's messages to keep its connections
    assert (found["demand"]["expected_bytes"], found["demand"]["why"]) == (
        None,
        "NCCL sends by NET/IB, P2P/IPC, past TCP",
    )
    text = "\n".join(describe(found))
    assert "node-a: rank 2 of 4, 2.20.5+cuda12.4, network IB, mlx5_0 (IB), mlx5_1 (IB), ens7 (Socket)" in text
    assert "ring 1: 0 3 2 1" in text


def test_horovods_timeline_is_split_at_the_optimizers_step(tmp_path):
    node = Node(RunDirectory.create(tmp_path / "job", "job", [], 1), "n0")
    step = 100 * MS
    # each step waits 30 ms; collectives: 20 ms before it, 10 ms within
    ends = [START_NS + (number + 1) * step for number in range(6)]
    node.steps(0, [(n, 0, end - 30 * MS, end, 0, 0, 0, 1) for n, end in enumerate(ends)])
    node.clock(0, 0, "n0")
    rows = []
    for end in ends:
        for name, first, last in (("a", 50, 35), ("b", 45, 20)):  # they overlap
            rows.append({"tensor": name, "start_ns": end - first * MS, "end_ns": end - last * MS, "bytes": 1000})
    timeline = pd.DataFrame(rows).assign(operation="ALLREDUCE", negotiate_start_ns=0)
    job = open_job(tmp_path / "job")
    marks = job.logs.run.steps.assign(place=range(6))
    found = iterations_of_ranks._by_timeline(timeline, marks)
    assert found.table["communication_s"].to_numpy() == pytest.approx([0.030] * 5)
    assert found.table["exposed_s"].to_numpy() == pytest.approx([0.010] * 5)
    assert found.table["overlap_s"].to_numpy() == pytest.approx([0.020] * 5)
    assert found.gradient_bytes == 2000


@settings(max_examples=100, deadline=None)
@given(spans=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 30)), max_size=20))
def test_a_union_of_spans_covers_what_they_cover(spans):
    begin = np.array([one[0] for one in spans], np.int64)
    end = begin + np.array([one[1] for one in spans], np.int64)
    first, last = iterations_of_ranks.merged_spans(begin, end)
    covered = {t for b, e in zip(begin.tolist(), end.tolist(), strict=True) for t in range(b, e)}
    assert (last - first).sum() == len(covered)
    assert (last > first).all()
    assert (first[1:] > last[:-1]).all()


def test_captures_are_held_against_sockets_and_classes(tmp_path):
    truth = write_ddp_job(tmp_path / "job", Truth(iterations=6))
    ring, cross = (("10.0.0.1", 40_000), ("10.0.0.2", 50_001)), (("10.0.0.1", 45_000), ("10.0.0.2", 5001))
    packets = []
    for number in range(truth.iterations):
        at = START_NS + (50 + number * truth.iteration_ms) * MS
        for part in range(100):
            packets.append((at + 131 * MS + part * 100_000, *ring, 40_400))
            packets.append((at + part * MS, *cross, 10_000))
    pcap(tmp_path / "job/nodes/n0/packets/eth0-0.pcap", packets[:700])
    pcap(tmp_path / "job/nodes/n0/packets/eth0-1.pcap", packets[700:])
    write_json(tmp_path / "job/nodes/n0/packets/packets.json", {"tool": "tcpdump", "dropped_by_kernel": 12})
    job = open_job(tmp_path / "job")
    assert job.iterations["packet_training_bytes"].tolist() == pytest.approx([4_040_000] * 6)
    assert job.iterations["packet_cross_bytes"].tolist() == pytest.approx([1_000_000] * 6)
    data = summarize(job)
    account = next(
        account for account in data["byte_accounts"] if account["node"] == "n0" and account["direction"] == "tx"
    )
    assert account["packets_difference"] == pytest.approx(0.008, abs=1e-4)
    said = " ".join(data["warnings"])
    assert "the capture on n0 dropped 12 packets" in said


def test_bytes_sent_again_are_no_payload_by_any_count(tmp_path):
    """Of the 4,000,000 bytes of an iteration, 40,000 are sent again, as the capture shows and the counters count."""
    truth = write_ddp_job(tmp_path / "job", Truth(iterations=6, resent_bytes=40_000, cross_bytes=0))
    ring = ("10.0.0.1", 40_000), ("10.0.0.2", 50_001)
    starts = [START_NS + (50 + number * truth.iteration_ms) * MS for number in range(truth.iterations)]
    packets = [(at + 131 * MS + part * 100_000, *ring, 40_000) for at in starts for part in range(100)]
    packets += [(at + 136 * MS + 1000, *ring, -40_000) for at in starts]
    pcap(tmp_path / "job/nodes/n0/packets/eth0-0.pcap", sorted(packets))
    job = open_job(tmp_path / "job")
    assert job.iterations["packet_training_bytes"].tolist() == [4_000_000] * 6
    accounts = {one["node"]: one for one in summarize(job)["byte_accounts"] if one["direction"] == "tx"}
    for name in ("socket_bytes", "packet_payload_bytes", "nic_payload_bytes"):
        assert accounts["n0"][name] == pytest.approx(4_000_000, rel=1e-3), name
    assert accounts["n0"]["retransmitted_bytes"] == 40_000
    assert accounts["n0"]["overhead_share"] == pytest.approx(66 / 1448, rel=0.01)
    shutil.rmtree(tmp_path / "job/nodes/n0/packets")
    shutil.rmtree(tmp_path / "job/derived", ignore_errors=True)
    (account,) = [
        one
        for one in summarize(open_job(tmp_path / "job"))["byte_accounts"]
        if (one["node"], one["direction"]) == ("n0", "tx")
    ]
    assert account["retransmitted_bytes"] == pytest.approx(40_000, rel=1e-3), "without a capture, by the sockets"
    assert account["nic_difference"] == pytest.approx(0, abs=1e-3)


def test_payload_of_interfaces_is_not_known_without_the_size_of_headers(tmp_path):
    """Neither sockets nor packets tell whether the counted packets are of IPv4 or IPv6."""
    path = tmp_path / "job"
    truth = write_ddp_job(path, Truth(iterations=6, cross_bytes=0))
    shutil.rmtree(path / "nodes/n0/sockets")
    shutil.rmtree(path / "nodes/n1/sockets")
    accounts = open_job(path).byte_accounts
    assert accounts["nic_payload_bytes"].isna().all()
    assert (accounts["nic_bytes"] > 0).any()
    shutil.rmtree(path / "derived", ignore_errors=True)
    packets = [(START_NS + 181 * MS + part * 100_000, ("10.0.0.1", 1), ("10.0.0.2", 2), 40_000) for part in range(100)]
    pcap(path / "nodes/n0/packets/eth0-0.pcap", packets)
    accounts = open_job(path).byte_accounts.set_index(["node", "direction", "iteration"])
    assert accounts.at[("n0", "tx", 2), "nic_payload_bytes"] == pytest.approx(truth.rank_bytes, rel=1e-2)
    assert accounts.loc["n1"]["nic_payload_bytes"].isna().all()


def test_copies_of_captured_packets_count_once(tmp_path):
    truth = write_ddp_job(tmp_path / "job", Truth(iterations=6))
    ring = ("10.0.0.1", 40_000), ("10.0.0.2", 50_001)
    starts = [START_NS + (50 + number * truth.iteration_ms) * MS for number in range(truth.iterations)]
    capture = tmp_path / "job/nodes/n0/packets/any-0.pcap"
    pcap(capture, [(at + 131 * MS + part * 100_000, *ring, 40_000) for at in starts for part in range(100)])
    capture.write_bytes(captured_twice(capture.read_bytes()))
    job = open_job(tmp_path / "job")
    assert job.iterations["packet_training_bytes"].tolist() == [4_000_000] * 6
    data = summarize(job)
    assert [(one["packets"], one["without_tcp"]) for one in data["captures"]] == [(600, 0)]
    (said,) = [one for one in data["warnings"] if "copies" in one]
    assert said.startswith("n0/packets/any-0.pcap holds 600 copies of packets")


def test_traffic_that_passes_no_captured_interface_is_unknown(tmp_path):
    write_ddp_job(tmp_path / "job", Truth(iterations=6))
    at = START_NS + 100 * MS
    pcap(tmp_path / "job/nodes/n0/packets/lo-0.pcap", [(at, ("127.0.0.1", 1), ("127.0.0.1", 2), 100)] * 3)
    job = open_job(tmp_path / "job")
    assert job.logs.captured.not_captured["training"] == 1
    assert job.iterations["packet_training_bytes"].isna().all(), "not 0"
    assert job.iterations["packet_other_bytes"].sum() == 300, "captured, so known"
    data = summarize(job)
    assert data["bytes"]["classes"]["training"]["difference"] is None
    said = "100% of the training payload passes no captured interface (--interface any captures them all)"
    assert said in data["warnings"]


@pytest.mark.parametrize(
    ("interfaces", "within", "between"),
    [({"lo"}, 0, 1), ({"eth0"}, 1, 0), ({"eth0", "lo"}, 0, 0), ({"any"}, 0, 0), (set(), 1, 1)],
)
def test_loopback_and_network_are_captured_by_interfaces_of_their_own(interfaces, within, between):
    flows = {
        "traffic_class": ["training", "cross", "other"],
        "local": [True, False, False],
        "source_node": ["n0", "n1", "n1"],
        "destination_node": ["n0", "n0", pd.NA],
        "payload_bytes": [1000.0, 1000.0, 1000.0],
    }
    traffic = SocketTraffic(pd.DataFrame(flows), pd.DataFrame(), 0, [], np.empty(0), {}, None, None, [], {})
    captured = {"n0": Packets(pd.DataFrame(), {}, np.ones(0, bool), frozenset(interfaces))}
    found = byte_accounting._not_captured(captured, traffic)
    assert found == {"training": within, "cross": between, "other": 1}


def test_without_sockets_captures_are_not_called_training(tmp_path):
    write_ddp_job(tmp_path / "job", Truth(iterations=6), sockets=False)
    at = START_NS + 100 * MS
    pcap(tmp_path / "job/nodes/n0/packets/eth0-0.pcap", [(at, ("10.0.0.1", 1), ("10.0.0.2", 2), 100)] * 3)
    table = open_job(tmp_path / "job").iterations
    assert table["packet_training_bytes"].isna().all()
    assert table["packet_unclassified_bytes"].sum() == 300


@pytest.mark.parametrize("agent_ended", [True, False])
@pytest.mark.parametrize("packets", [0, 3])
def test_a_job_recorded_with_packets_alone_is_summed_over_its_time(packets, agent_ended, tmp_path):
    path = tmp_path / "job"
    write_ddp_job(path, Truth(iterations=6), sockets=False)
    for node in path.glob("nodes/*"):
        for folder in ("steps", "nic"):
            shutil.rmtree(node / folder, ignore_errors=True)
        item = json.loads((node / "node.json").read_text())
        agent = {"began_ns": START_NS} | ({"ended_ns": START_NS + 2000 * MS} if agent_ended else {})
        write_json(node / "node.json", item | {"agent": agent})
    at = START_NS + 100 * MS
    pcap(path / "nodes/n0/packets/eth0-0.pcap", [(at, ("10.0.0.1", 1), ("10.0.0.2", 2), 100)] * packets)
    job = open_job(path)
    assert len(job.iterations) == 0
    data = summarize(job)
    assert data["bytes"]["per"] == "run"
    assert data["run"]["seconds"] == (pytest.approx(1.995) if agent_ended else None), "clocks are 5 ms apart"
    found = {kind: one["packets"] for kind, one in data["bytes"]["classes"].items() if one["packets"] is not None}
    known = {"cross": 0, "unclassified": 300} if packets else {"cross": 0}
    assert found == (known if agent_ended else {}), "nothing is 0 where no time is known"
    assert ("no iterations, 2 s" if agent_ended else "a time that is not known") in "\n".join(describe(data))


def test_a_torn_capture_is_read_up_to_where_it_breaks(node):
    path = node.path / "packets" / "eth0-0.pcap"
    pcap(path, [(START_NS + MS, ("10.0.0.1", 1), ("10.0.0.2", 2), 100)] * 3)
    path.write_bytes(path.read_bytes()[:-10])
    (node.path / "packets" / "eth0-1.pcap").write_bytes(b"nonsense")
    logs = NodeLogs(node.path)
    found = read_packets({logs.name: logs}, borders(0, 10))
    assert found is not None
    assert found.flows["packets"].tolist() == [2]
    assert logs.torn == ["n0/packets/eth0-0.pcap"]
    assert "eth0-1.pcap was not read" in logs.problems[0]


def test_interfaces_that_stand_on_others_count_once(tmp_path):
    truth = write_ddp_job(tmp_path / "job", Truth(iterations=6))
    folder = tmp_path / "job/nodes/n0"
    log = NodeLogs(folder).wide("nic/nic.rec")
    columns = ["eth0.rx_bytes", "eth0.rx_packets", "eth0.tx_bytes", "eth0.tx_packets"]
    rows = list(zip(log.t_ns.tolist(), *(log.values(name).tolist() for name in columns), strict=True))
    (folder / "nic/nic.rec").unlink()
    names = [*columns, *(name.replace("eth0", "cross0") for name in columns)]
    both = [(*row, *row[1:]) for row in rows]
    Node(RunDirectory.open(tmp_path / "job"), "n0").wide("nic/nic.rec", dict.fromkeys(names, "counter"), both)
    for stacked, expected in ((True, ["eth0"]), (False, ["eth0,cross0"])):
        links = {"lo": {"below": []}, "eth0": {"below": []}, "cross0": {"below": ["eth0"] if stacked else []}}
        write_json(folder / "node.json", {"before": {"cpus": 4, "links": links}})
        found = open_job(tmp_path / "job").byte_accounts
        assert found[found["node"] == "n0"]["interfaces"].unique().tolist() == expected
    assert truth.iterations == 6


@pytest.mark.parametrize("name", ["cached", "fused", "killed", "uncached"])
def test_real_timelines_are_joined(tmp_path, name):
    """Recorded by Horovod itself; the steps are made up around it, and share out everything that it shows."""
    node = Node(RunDirectory.create(tmp_path / "job", "job", [], 1), "n0")
    folder = node.path / "horovod"
    folder.mkdir()
    (folder / "timeline.json").write_bytes((GOLD / f"horovod-{name}.json").read_bytes())
    timeline = read_timeline(folder / "timeline.json")
    first, last = int(timeline["start_ns"].min()), int(timeline["end_ns"].max())
    ends = np.linspace(first - MS, last + MS, 7).astype(np.int64).tolist()
    node.steps(0, [(number, 0, end - 1000, end, 0, 0, 0, 1) for number, end in enumerate(ends)])
    node.finish()
    job = open_job(tmp_path / "job")
    assert job.logs.work.source == "timeline"
    begin, end = iterations_of_ranks.merged_spans(
        timeline["start_ns"].to_numpy(np.int64), timeline["end_ns"].to_numpy(np.int64)
    )
    assert job.iterations["communication_s"].sum() == pytest.approx((end - begin).sum() / 1e9, rel=1e-6)
    data = summarize(job)
    assert data["phases"]["compute_s"] is None
    assert "Horovod's timeline is of rank 0 alone" in " ".join(data["warnings"])
    assert "exposed" in "\n".join(describe(data))


def test_segments_whose_bytes_are_not_known_are_counted() -> None:
    item = {"per": "iteration", "retransmissions": 3.0, "retransmitted_bytes": None, "queue_backlog_bytes": None}
    lines = _congestion({"congestion": item})
    assert lines == ["Retransmitted per iteration: 3 segments, of a size that the records do not give."]


def test_congestion_is_what_was_seen_and_its_absence_one_line() -> None:
    unknown = dict.fromkeys(["retransmissions", "retransmitted_bytes", "segments_retransmitted", "queue_drops"])
    item = {"per": "run", **unknown, "queue_backlog_bytes": None}
    assert _congestion({"congestion": item}) == []
    assert _congestion({"congestion": item | {"queue_drops": 0}}) == ["No sign of it in what was recorded."]
    seen = {"segments_retransmitted": 2.0, "queue_drops": 3, "queue_backlog_bytes": 1500, "nic_drops": 0}
    assert _congestion({"congestion": item | seen}) == [
        "Retransmitted in all, by all programs of the nodes: 2 segments.",
        "In all: 3 packets dropped in queues.",
        "The largest backlog seen in a queue is 1.5 kB.",
    ]
