"""Snapshots of a run that is being written: rates, flows, iterations, losses, the end; at any pace of looking."""

import dataclasses
import itertools
import random
import shutil
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.analysis.job.flows import CrossTrafficDestinations, _classify
from ringtap.analysis.job.run import open_job
from ringtap.analysis.live import recent_counters
from ringtap.analysis.live.build_snapshot import SnapshotSource
from ringtap.analysis.live.flows import NOBODY, Owner, Owners, port_class, traffic_of
from ringtap.analysis.live.plain import line_of
from ringtap.analysis.live.snapshot import Snapshot
from ringtap.analysis.live.tables import busiest
from ringtap.core.append_only_logs import Field
from ringtap.core.run_directory import write_json
from ringtap.core.run_directory_schema import CROSS_PORTS
from tests.unit.live_run import DDP, GRADIENTS, START_NS, STEPS, RunWriter, T, nic_fields, second_of_training

pytestmark = pytest.mark.shares


class Watch:
    """A source with a clock that is set by hand."""

    def __init__(self, run: Path) -> None:
        self.now_ns = START_NS
        self.source = SnapshotSource(run, lambda: self.now_ns)

    def at(self, seconds: float) -> Snapshot:
        self.now_ns = START_NS + round(seconds * 1e9)
        return self.source.take()


def test_a_second_of_training(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0", "S1") as run:
        watch = Watch(run.path)
        for second in range(1, 6):
            second_of_training(run, second)
            snapshot = watch.at(second)
    assert (snapshot.status, snapshot.ended, snapshot.elapsed_s) == ("running", False, 5.0)
    eth = [nic for nic in snapshot.nics if nic.name == "eth0"]
    assert [(nic.node, nic.tx_bps) for nic in eth] == [("S0", GRADIENTS / 0.25 * 8), ("S1", GRADIENTS / 0.25 * 8)]
    assert {nic.speed_bps for nic in eth} == {10e9}
    training = [flow for flow in snapshot.flows if flow.traffic == "training"]
    assert {(flow.source, flow.destination, flow.rank) for flow in training} == {
        ("S0:40000", "S1:29500", 0),
        ("S1:29500", "S0:40000", 1),
    }
    assert {round(flow.rate_bps) for flow in training} == {round(GRADIENTS / 0.25 * 8)}
    assert {(flow.rtt_s, flow.cwnd_segments) for flow in training} == {(0.00025, 40)}
    (cross,) = (flow for flow in snapshot.flows if flow.traffic == "cross")
    assert (cross.source, cross.destination, round(cross.rate_bps)) == ("10.77.0.3:50001", "S0:5201", 400_000_000)
    assert (cross.rtt_s, cross.cwnd_segments, cross.retransmissions_per_s) == (None, None, None)
    assert [(queue.kind, queue.backlog_bytes, round(queue.drops_per_s or 0)) for queue in snapshot.queues] == [
        ("tbf", 30_000, 5),
        ("tbf", 30_000, 5),
    ]
    assert [tuple(round(core, 6) for core in host.cores) for host in snapshot.hosts] == [(0.9, 0.25)] * 2
    assert [round(host.retransmissions_per_s or 0) for host in snapshot.hosts] == [3, 3]
    assert [round(process.cpu_share or 0, 6) for process in snapshot.processes] == [1.1, 1.1]
    assert len(snapshot.throughput) == 5
    states = {(item.node, item.name): item for item in snapshot.collectors}
    assert states["S0", "sockets"].missed == 2
    assert (states["S1", "gpu"].state, states["S1", "gpu"].health) == ("unavailable", "warning")
    assert snapshot.gpus == ()


def test_iterations_are_those_of_all_ranks(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0", "S1") as run:
        for second in range(1, 4):
            second_of_training(run, second)
        stats = Watch(run.path).at(3).iterations
    assert [item.number for item in stats.history] == list(range(1, 12))
    assert {round(item.seconds, 6) for item in stats.history} == {0.25}
    assert (stats.ranks, stats.world_size) == (2, 2)
    assert (stats.last_s, stats.median_s, stats.p99_s) == (0.25, 0.25, 0.25)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), polls=st.integers(1, 12))
def test_the_pace_of_looking_changes_nothing_that_is_summed(
    tmp_path_factory: pytest.TempPathFactory, seed: int, polls: int
) -> None:
    """The same run, revealed byte by byte in any pieces, gives the same iterations, totals and counts."""
    folder, dice = tmp_path_factory.mktemp("pace"), random.Random(seed)
    with RunWriter(folder / "run", "S0", "S1") as run:
        for second in range(1, 3):
            second_of_training(run, second, 0.1)
        run.mark(1.5, "here")
    whole = Watch(folder / "run").at(2)
    files = [path for path in (folder / "run").rglob("*") if path.is_file()]
    (folder / "copy").mkdir()
    watch = Watch(folder / "copy")
    for poll in range(1, polls + 1):
        for path in files:
            shown = path.stat().st_size if poll == polls else dice.randint(0, path.stat().st_size)
            copy = folder / "copy" / path.relative_to(folder / "run")
            copy.parent.mkdir(parents=True, exist_ok=True)
            have = copy.stat().st_size if copy.exists() else 0
            if path.suffix == ".json" and poll < polls and have == 0:
                continue
            with copy.open("ab") as file:
                file.write(path.read_bytes()[have : max(have, shown)])
        last = watch.at(2)
    same = ("iterations", "marks", "collectors", "ranks", "status", "sockets")
    assert {name: getattr(last, name) for name in same} == {name: getattr(whole, name) for name in same}
    assert [
        dataclasses.replace(nic, tx_bps=0, rx_bps=0, tx_packets_per_s=0, rx_packets_per_s=0) for nic in last.nics
    ] == [dataclasses.replace(nic, tx_bps=0, rx_bps=0, tx_packets_per_s=0, rx_packets_per_s=0) for nic in whole.nics]
    assert [queue.drops_total for queue in last.queues] == [queue.drops_total for queue in whole.queues]


def test_attaching_late_shows_rates_at_once_and_reads_little(tmp_path: Path) -> None:
    """The first look at a run of long ago: the last minutes' iterations and the rates of now."""
    with RunWriter(tmp_path / "run", "S0") as run:
        node = run.nodes["S0"]
        rows = [(*node.t(at / 10), 0, at * 1000, 0, 0, 0, 0, 0, 0) for at in range(30_000)]
        node.records("nic/nic.rec", nic_fields("eth0"), *rows)
        for step in range(3000):
            node.step(0, 1, step, float(step), world=1)
        watch = Watch(run.path)
        snapshot = watch.at(3000)
    (nic,) = snapshot.nics
    assert nic.tx_bps == 10_000 * 8
    (collector,) = (item for item in snapshot.collectors if item.name == "nic")
    assert collector.missed == 0
    assert snapshot.iterations.history[-1].number == 2999
    assert len(snapshot.iterations.history) <= 600
    read = watch.source._follower.nodes["S0"]
    assert read._tails[read.path / "nic" / "nic.rec"].skipped > len(rows) - 40


def test_a_queue_is_shown_at_its_fullest(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0") as run:
        node, watch = run.nodes["S0"], Watch(run.path)
        for at, backlog in ((0.1, 0), (0.5, 90_000), (0.9, 15_000)):
            node.qdisc(at, 0, backlog, 0)
        assert [queue.backlog_bytes for queue in watch.at(1).queues] == [90_000]
        assert [queue.backlog_bytes for queue in watch.at(2).queues] == [15_000]


def test_missed_samples_are_counted_from_the_gaps(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0") as run:
        for at in (0.1, 0.2, 0.3, 0.7, 0.8, 1.2):
            run.nodes["S0"].nic(at, eth0=(0, 0))
        (item,) = Watch(run.path).at(2).collectors
    assert (item.name, item.missed) == ("nic", 6)


def test_a_narrow_counter_wraps_and_a_wide_one_is_reset(tmp_path: Path) -> None:
    fields = [*T, Field("hw.out_of_buffer", "<u8", "packets", "counter", 32)]
    fields += [Field("port_xmit_data", "<u8", "4 octets", "counter", 64)]
    fields += [Field("port_rcv_errors", "<u8", "packets", "saturating", 16)]
    with RunWriter(tmp_path / "run", "S0") as run:
        node = run.nodes["S0"]
        about = {"device": "mlx5_0", "port": 1, "rate": "100 Gb/sec (4X EDR)"}
        node.records("infiniband/mlx5_0-1.rec", fields, (*node.t(0), 2**32 - 10, 1000, 5), **about)
        watch = Watch(run.path)
        watch.at(0)
        node.records("infiniband/mlx5_0-1.rec", fields, (*node.t(1), 20, 1000 + 125_000_000, 5))
        (port,) = watch.at(1).nics
        node.records("infiniband/mlx5_0-1.rec", fields, (*node.t(2), 20, 0, 5))
        (after,) = watch.at(2).nics
    assert (port.name, port.kind, port.speed_bps) == ("mlx5_0:1", "rdma", 100e9)
    assert port.tx_bps == 4e9
    assert (port.drops_per_s, port.drops_total, port.errors_total) == (30.0, 30.0, 0.0)
    assert after.tx_bps is None  # the counter was reset, so its growth is not known


def test_gpus_by_counters_or_by_the_drivers_own_rates(tmp_path: Path) -> None:
    gauges = [Field(name, "<u8", "", "gauge") for name in ("utilization_pct", "memory_used_bytes", "power_mw")]
    counters = [
        Field(f"{bus}_{way}_bytes", "<u8", "", "counter", 64) for bus in ("pcie", "nvlink") for way in ("tx", "rx")
    ]
    meter = [Field(f"pcie_{way}_bytes_per_s", "<u8", "bytes/s", "gauge") for way in ("tx", "rx")]
    with RunWriter(tmp_path / "run", "S0") as run:
        node = run.nodes["S0"]
        for at in (1, 2):
            values = (*node.t(at), 87, 5 * 10**9, 650_000)
            node.records(
                "gpu/gpu0.rec",
                [*T, *gauges, *counters],
                (*values, *(at * 10**9 * n for n in (1, 2, 3, 4))),
                name="H200",
            )
            node.records("gpu/gpu1.rec", [*T, *gauges, *meter], (*values, 10, 20))
        first, second = Watch(run.path).at(2).gpus
    assert (first.name, first.utilization_share, first.power_w, first.memory_used_bytes) == ("0 H200", 0.87, 650.0, 5e9)
    assert (first.pcie_tx_bps, first.pcie_rx_bps, first.nvlink_tx_bps, first.nvlink_rx_bps) == (8e9, 16e9, 24e9, 32e9)
    assert (second.pcie_tx_bps, second.pcie_rx_bps, second.nvlink_tx_bps) == (80, 160, None)


def test_packets_lost_are_told_while_it_captures(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0") as run:
        node = run.nodes["S0"]
        facts = {"state": "ok", "reason": "", "every_s": 1.0, "dropped_by_kernel": 5}
        node.node(status="running", collectors={"packets": facts})
        assert [item.lost for item in Watch(run.path).at(1).collectors] == [5]
        (node.folder / "packets").mkdir()
        told = '{"captured": 100, "received_by_filter": 112, "dropped_by_kernel": 7, "dropped_by_interface": 5}'
        (node.folder / "packets" / "packets.json").write_text(told)
        assert [item.lost for item in Watch(run.path).at(1).collectors] == [12]


def test_the_throughput_counts_each_byte_once(tmp_path: Path) -> None:
    """The bytes of a bond are those of the interface below it, those of a bridge of containers are of other hosts."""
    with RunWriter(tmp_path / "run", "S0", "S1") as run:
        watch = Watch(run.path)
        for node in run.nodes.values():
            node.node(before={"links": {"bond0": {"below": ["eth0"]}, "eth0": {"below": []}}})
        for at in range(1, 5):
            for node in run.nodes.values():
                sent = at * 1_000_000
                node.nic(at, lo=(sent, sent), eth0=(sent, sent), bond0=(sent, sent), docker0=(sent, sent))
            snapshot = watch.at(at)
    assert {(item.tx_bps, item.rx_bps) for item in snapshot.throughput} == {(16e6, 16e6)}


def test_loopback_is_shown_where_the_training_is_over_it(tmp_path: Path) -> None:
    """Ranks of one node, and then of two: an interface is what the training uses, also while it is silent."""
    ends = {"S0": ("127.0.0.1", 1000, "127.0.0.1", 2000), "S1": ("10.0.0.1", 1000, "10.0.0.2", 2000)}
    for name, (source, sport, destination, dport) in ends.items():
        with RunWriter(tmp_path / name, "S0") as run:
            node, watch = run.nodes["S0"], Watch(run.path)
            for inode, rank in ((1, 0), (2, 1)):
                node.line("sockets/owners.jsonl", t_ns=0, inode=inode, pid=inode, rank=rank, command="python job.py")
            for at in range(1, 9):
                sent = at * 1_000_000
                node.nic(at, lo=(sent, sent), eth0=(0, 0))
                acked = min(at, 5) * 1_000_000
                node.socket(at, 1, (source, sport, destination, dport), bytes_acked=acked)
                node.socket(at, 2, (destination, dport, source, sport), bytes_received=acked)
                snapshot = watch.at(at)
        is_over = name == "S0"
        assert not snapshot.flows
        assert snapshot.is_over_loopback is is_over
        assert snapshot.throughput[-1].tx_bps == (8e6 if is_over else 0)
        assert f" tx_gbps={0.008 if is_over else 0:.4f} " in line_of(snapshot)
        assert [nic.name for nic in busiest(snapshot).nics] == (["lo", "eth0"] if is_over else ["eth0", "lo"])


def test_without_a_fit_the_best_measurement_of_a_clock_counts(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0") as run:
        node = run.nodes["S0"]
        node.nic(1, eth0=(0, 0))
        (node.folder / "clock").mkdir()
        measured = [(7_000_000, 5_000), (9_000_000, 300_000)]
        found = [{"mono_ns": 1, "offset_ns": offset, "error_ns": error} for offset, error in measured]
        write_json(node.folder / "clock" / "clock.json", {"reference": "S1", "measurements": found})
        (state,) = Watch(run.path).at(1).nodes
    assert (state.clock_offset_s, state.clock_error_s) == (7e-3, 5e-6)


def test_a_socket_that_is_silent_has_no_rate_and_one_that_is_gone_no_row(tmp_path: Path) -> None:
    ends = ("10.0.0.1", 1000, "10.0.0.2", 2000)
    with RunWriter(tmp_path / "run", "S0") as run:
        node, watch = run.nodes["S0"], Watch(run.path)
        for at in range(1, 6):
            node.nic(at, eth0=(0, 0))
            if at < 3:
                node.socket(at, 1, ends, bytes_acked=at * 1000)
            if at == 5:
                node.socket(at, 1, ends, state=0, bytes_acked=9000)
            snapshot = watch.at(at)
            assert [flow.rate_bps for flow in snapshot.flows] == ([8000.0] if at == 2 else []), at
            assert snapshot.sockets == (0 if at == 5 else 1)


def test_retransmitted_bytes_are_no_payload(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0") as run:
        node, watch = run.nodes["S0"], Watch(run.path)
        for at in (1, 2):
            values = {"bytes_sent": at * 1_000_000, "bytes_acked": at * 750_000, "bytes_retrans": at * 250_000}
            values["total_retrans"] = at * 170
            node.socket(at, 1, ("fe80::1", 1000, "::ffff:10.0.0.2", 2000), **values)
            snapshot = watch.at(at)
    (flow,) = snapshot.flows
    assert (flow.rate_bps, flow.retransmissions_per_s) == (6_000_000, 170)
    assert (flow.source, flow.destination) == ("[fe80::1]:1000", "10.0.0.2:2000")


@pytest.mark.parametrize(
    ("command", "pid", "expected"),
    [
        ("iperf3 --client 10.0.0.2 --port 9999", 50, "cross"),
        ("/v/bin/python -m ringtap.cli traffic send plan", 50, "cross"),
        ("python loader.py", 31, "training"),  # without a rank, as in a job of one process
        ("python train.py", 30, "training"),
    ],
)
def test_flows_are_told_apart_by_their_owners(tmp_path: Path, command: str, pid: int, expected: str) -> None:
    with RunWriter(tmp_path / "run", "S0") as run:
        node, watch = run.nodes["S0"], Watch(run.path)
        node.node(status="running", jobs=[{"pid": 29}], collectors={})
        node.line("sockets/owners.jsonl", t_ns=0, inode=1, pid=pid, rank=None, command=command)
        for at in (1, 2):
            node.socket(at, 1, ("127.0.0.1", 1000, "127.0.0.1", 2000), bytes_acked=at * 10)
            node.socket(at, 2, ("127.0.0.1", 2000, "127.0.0.1", 1000), inode=0, bytes_acked=at * 20)
            snapshot = watch.at(at)
    # the other end's owner is not known, but both ends are the same connection
    assert {(flow.source, flow.traffic) for flow in snapshot.flows} == {
        ("127.0.0.1:1000", expected),
        ("127.0.0.1:2000", expected),
    }


@pytest.mark.parametrize("port", [1000, 5201, 28028])
def test_traffic_is_classified_as_in_analyze(port: int) -> None:
    """Of every pair of owners at the two ends of a connection."""
    owners = [NOBODY, *map(Owner, (None, None, 1, 1), ("iperf3 --server", "python job.py") * 2)]
    pairs = list(itertools.product(owners, repeat=2))
    table = pd.DataFrame({"source_port": port, "destination_port": 2000}, index=range(len(pairs)))
    for side, ends in zip(("source", "destination"), zip(*pairs, strict=True), strict=True):
        table[side] = "10.0.0.1"
        table[f"{side}_rank"] = pd.array([end.rank for end in ends], "Int64")
        table[f"{side}_command"] = pd.Series([end.command for end in ends], dtype=object)
    classes, _ = _classify(table, CrossTrafficDestinations(frozenset(), frozenset(CROSS_PORTS)))
    assert [traffic_of(*pair, port_class(port.to_bytes(2, "big"))) for pair in pairs] == classes.tolist()
    assert {"training", "cross"} <= set(classes)
    if port == 28028:  # who asks a rank's RAS service is no rank
        with_a_rank = [
            kind for pair, kind in zip(pairs, classes, strict=True) if any(one.rank is not None for one in pair)
        ]
        assert set(with_a_rank) == {"training", "other"}


@pytest.mark.parametrize(("rank", "expected"), [(None, "cross"), (1, "training")])
def test_both_ends_decide_as_in_analyze(tmp_path: Path, rank: int | None, expected: str) -> None:
    """A traffic generator's connection is cross traffic at its other end too, unless that end is a rank."""
    with RunWriter(tmp_path / "run", "S0") as run:
        node, watch = run.nodes["S0"], Watch(run.path)
        node.line("sockets/owners.jsonl", t_ns=0, inode=1, pid=50, rank=None, command="iperf3 --server")
        node.line("sockets/owners.jsonl", t_ns=0, inode=2, pid=51, rank=rank, command="python job.py")
        for at in (1, 2):
            node.socket(at, 1, ("127.0.0.1", 1000, "127.0.0.1", 2000), bytes_acked=at * 10)
            node.socket(at, 2, ("127.0.0.1", 2000, "127.0.0.1", 1000), bytes_acked=at * 20)
            snapshot = watch.at(at)
    assert [flow.traffic for flow in snapshot.flows] == [expected] * 2


def test_pause_frames_are_counted_once_and_not_their_duration(tmp_path: Path) -> None:
    names = ("rx_prio3_pause", "rx_global_pause", "rx_prio3_pause_duration", "rx_pause_ctrl_phy", "rx_ecn_mark")
    fields = [*T, *(Field(name, "<u8", "frames", "counter", 64) for name in names)]
    with RunWriter(tmp_path / "run", "S0") as run:
        node, watch = run.nodes["S0"], Watch(run.path)
        for at in (1, 2):
            node.nic(at, eth0=(0, 0))
            node.records("ethtool/eth0.rec", fields, (*node.t(at), at * 10, at * 20, at * 900, at * 30, at * 5))
            snapshot = watch.at(at)
    (nic,) = snapshot.nics
    assert (nic.pauses_per_s, nic.marks_per_s) == (30, 5)


def test_a_connection_without_a_known_owner_is_othertraffic_of(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0") as run:
        node, watch = run.nodes["S0"], Watch(run.path)
        for at in (1, 2):
            node.socket(at, 1, ("127.0.0.1", 1000, "127.0.0.1", 2000), bytes_acked=at * 10)
            snapshot = watch.at(at)
    assert [flow.traffic for flow in snapshot.flows] == ["other"]


def test_nodes_ranks_and_files_may_appear_later(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as run:
        watch = Watch(run.path)
        assert watch.at(0).nodes == ()
        first = run.add("S0")
        for step in range(4):
            first.step(0, 1, step, step + 1.0)
        assert [item.number for item in watch.at(5).iterations.history] == [1, 2, 3]
        second = run.add("S1")
        for step in range(3):
            second.step(1, 1, step, step + 1.5)
        stats = watch.at(6).iterations
        assert [item.number for item in stats.history] == [1, 2]
        first.nic(6, eth0=(0, 0))
        first.nic(7, eth0=(0, 1000))
        first.records("nic/nic-2.rec", nic_fields("eth0", "eth1"), *[(*first.t(at), *[0] * 16) for at in (8, 9)])
        assert [nic.name for nic in watch.at(9).nics] == ["eth0", "eth1"]


def test_ddps_times_may_come_before_the_first_step_and_may_be_unknown(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0") as run:
        node, watch = run.nodes["S0"], Watch(run.path)
        node.records("steps/rank0-1.ddp.rec", DDP, (0, 0, 1, 1, 1, 1, 1, 20_000_000, 60_000_000, 0, 45_000_000))
        watch.at(1)
        node.step(0, 1, 0, 1.0, world=1)
        (rank,) = watch.at(2).ranks
    assert (rank.forward_s, rank.backward_s, rank.comm_s, rank.overlap_s) == (0.02, 0.06, None, 0.045)


def test_marks_count_where_a_rank_has_any_and_rounds_of_the_optimizers_elsewhere(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0") as run:
        node, watch = run.nodes["S0"], Watch(run.path)
        for step in range(4):
            node.step(0, 1, 2 * step, step * 2.0, optimizer=0)
            node.step(0, 1, 2 * step + 1, step * 2.0 + 1, optimizer=0, kind=1)
            node.step(0, 1, step, step * 2.0 + 1.5, optimizer=1)
        history = watch.at(8).iterations.history
        assert [(item.number, item.seconds, item.skipped) for item in history] == [(n, 2.0, True) for n in (1, 2, 3)]
        for step in range(3):
            node.step(0, 1, step, 20 + 5.0 * step, optimizer=0, kind=2)
            node.step(0, 1, 100 + step, 20 + 5.0 * step, optimizer=0)
        assert [(item.number, item.seconds) for item in watch.at(40).iterations.history] == [(1, 5.0), (2, 5.0)]


def test_a_job_that_begins_anew(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0") as run:
        node, watch = run.nodes["S0"], Watch(run.path)
        for rank in (0, 1):
            for step in range(5):
                node.step(rank, 10 + rank, step, step * 1.0)
        assert watch.at(5).iterations.history[-1].number == 4
        for rank in (0, 1):
            node.step(rank, 5 + rank, 0, 20.0)  # a lower pid, which sorts first
        stats = watch.at(20).iterations
        assert (stats.history[-1].number, stats.restarts) == (4, 1)
        for rank in (0, 1):
            for step in (1, 2):
                node.step(rank, 5 + rank, step, 20.0 + 2 * step)
        stats = watch.at(25).iterations
        assert [(item.number, item.seconds) for item in stats.history] == [(1, 2.0), (2, 2.0)]


def test_processes_that_step_at_the_same_time_have_not_begun_anew(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0") as run:
        node, watch = run.nodes["S0"], Watch(run.path)
        for step in range(6):
            node.step(0, 10, step, step * 1.0)
            if step < 3:
                node.step(0, 11, step, step * 2.0 + 0.5)
            watch.at(step + 1)
        stats = watch.at(7).iterations
    assert stats.restarts == 0
    assert [(item.number, item.seconds) for item in stats.history] == [(number, 1.0) for number in range(1, 6)]
    assert [rank.pid for rank in watch.at(7).ranks] == [10]


def test_ranks_that_name_their_first_host_differently_are_one_world(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0") as run:
        node, watch = run.nodes["S0"], Watch(run.path)
        for step in range(4):
            for rank, host in enumerate(("s0", "10.0.0.1")):
                node.step(rank, 10 + rank, step, step * 1.0, group="torch", address=f"{host}:29500", command=5)
        stats = watch.at(5).iterations
    assert (stats.ranks, stats.history[-1].number) == (2, 3)
    assert len(open_job(run.path).phases) == 1


@pytest.mark.parametrize("kind", ["address", "command"])
def test_jobs_at_the_same_time_are_told_apart(tmp_path: Path, kind: str) -> None:
    """Two jobs of two ranks, the second of which takes half as long: the live view and the analysis show the first."""
    addresses = ["s0:29500", "s1:29500" if kind == "address" else "s0:29500"]
    with RunWriter(tmp_path / "run", "S0") as run:
        node, watch = run.nodes["S0"], Watch(run.path)
        for step in range(6):
            for job, period_s in enumerate((1.0, 0.5)):
                for rank in range(2):
                    about = {"group": "torch", "address": addresses[job], "command": job if kind == "command" else 0}
                    node.step(rank, 10 * job + rank + 10, step, step * period_s, **about)
        stats = watch.at(7).iterations
    assert [(item.number, item.seconds) for item in stats.history] == [(number, 1.0) for number in range(1, 6)]
    job = open_job(run.path)
    assert job.phases["ranks"].tolist() == [2, 2]
    assert job.iterations["iteration_s"].median() == 1.0


def test_a_rank_given_in_code_is_that_of_its_process_group() -> None:
    owners = Owners()
    owners.add_owner({"inode": 5, "pid": 10, "rank": None, "command": "python train.py"})
    owners.step_ranks[10] = 1
    assert (owners.of(5).rank, traffic_of(owners.of(5), NOBODY, ""), owners.of(6)) == (1, "training", NOBODY)


def test_ranks_are_compared_on_the_reference_nodes_clock(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0", "S1") as run:
        clock = run.nodes["S1"].folder / "clock"
        clock.mkdir()
        fit = f'{{"t0_ns": {START_NS}, "offset_ns": 2000000000, "drift_ppm": 1000000.0, "error_ns": 50000}}'
        (clock / "clock.json").write_text(f'{{"fit": {fit}, "measurements": []}}')
        watch = Watch(run.path)
        watch.at(0)
        for step in range(3):
            run.nodes["S0"].step(0, 1, step, 10.0 + step)
            run.nodes["S1"].step(1, 1, step, 2 * (10.0 + step) + 2 - 1)  # fast by one second a second, and 2 s ahead
        snapshot = watch.at(20)
        (node,) = (node for node in snapshot.nodes if node.name == "S1")
    assert (node.clock_offset_s, node.clock_error_s) == (2.0, 5e-5)
    assert [round(item.seconds, 6) for item in snapshot.iterations.history] == [1.0, 1.0]


@pytest.mark.parametrize("is_noted", [True, False])
def test_a_clock_that_is_set_moves_no_iteration(tmp_path: Path, is_noted: bool) -> None:
    back_ns = 50 * 10**9
    with RunWriter(tmp_path / "run", "S0", "S1") as run:
        node = run.nodes["S1"]
        (t_ns, mono_ns), (_, first_ns), (_, last_ns) = node.t(12.5), node.t(0), node.t(20)
        before = {"from_ns": t_ns - 10**10, "from_mono_ns": first_ns, "to_mono_ns": mono_ns, "t0_ns": t_ns}
        after = {"from_ns": t_ns - back_ns, "from_mono_ns": mono_ns, "to_mono_ns": last_ns, "t0_ns": t_ns}
        segments = [part | {"drift_ppm": 0.0, "error_ns": 50_000} for part in (before, after)]
        segments[0]["offset_ns"], segments[1]["offset_ns"] = 0, -back_ns
        step = {"mono_before_ns": mono_ns - 10**9, "mono_ns": mono_ns, "t_ns": t_ns - back_ns, "step_ns": -back_ns}
        clock = {"reference": "S0", "fit": segments[0], "segments": segments, "steps": [step], "measurements": []}
        if is_noted:
            (node.folder / "clock").mkdir()
            write_json(node.folder / "clock" / "clock.json", clock)
        watch = Watch(run.path)
        watch.at(0)
        for number in range(6):
            run.nodes["S0"].step(0, 1, number, 10.0 + number)
            end_ns, end_mono_ns = node.t(10.25 + number)
            end_ns -= back_ns * (number > 2)
            row = (number, 0, end_ns - 10**6, end_ns, end_mono_ns - 10**6, end_mono_ns, 0, 1)
            node.records("steps/rank1-1.rec", STEPS, row, rank=1, world_size=2)
        snapshot = watch.at(20)
    assert [item.seconds for item in snapshot.iterations.history] == [1.0] * 5
    assert {rank.step_s for rank in snapshot.ranks} == {1.0}


def test_how_a_run_ended_is_said(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0", "S1") as run:
        second_of_training(run, 1)
        watch = Watch(run.path)
        assert watch.at(60).nodes[0].age_s == 59.0  # silent for long, but nobody has said that it ended
        run.nodes["S1"].node(status="partial", why="the agent was killed", jobs=[], collectors={})
        snapshot = watch.at(61)
        assert (snapshot.status, snapshot.ended, snapshot.why) == ("running", False, "S1: the agent was killed")
        run.finish("complete")
        snapshot = watch.at(62)
    assert (snapshot.status, snapshot.ended) == ("partial", True)
    assert snapshot.elapsed_s == 1.0
    assert {node.age_s for node in snapshot.nodes} == {None}


def test_half_of_a_job_and_a_job_that_failed_elsewhere_are_not_complete(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0", "S1") as run:
        for step in range(3):
            run.nodes["S0"].step(0, 7, step, step, world=2, group="torch")
        run.finish("complete")
        watch = Watch(run.path)
        snapshot = watch.at(4)
        assert (snapshot.status, snapshot.why) == ("partial", "1 of 2 ranks recorded steps here, rank 1 did not")
        run.nodes["S1"].step(1, 8, 0, 0.0, world=2, group="torch")
        assert watch.at(5).status == "complete"
        run.nodes["S1"].node(status="complete", jobs=[{"rank": 1, "exit_code": 7}], collectors={})
        snapshot = watch.at(6)
    assert (snapshot.status, snapshot.why) == ("failed", "rank 1 on S1 ended with exit code 7")


def test_nodes_that_are_all_done_end_a_run_whose_maker_was_killed(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0") as run:
        second_of_training(run, 1)
        run.nodes["S0"].done()
        watch = Watch(run.path)
        assert not watch.at(2).ended
        assert not watch.at(5).ended
        assert watch.at(9).status == "complete"


def test_a_damaged_log_is_said_and_the_others_go_on(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0") as run:
        node = run.nodes["S0"]
        (node.folder / "gpu").mkdir()
        (node.folder / "gpu" / "gpu0.rec").write_text("rubbish\n" * 9)
        node.nic(1, eth0=(0, 0))
        node.nic(2, eth0=(0, 500))
        snapshot = Watch(run.path).at(2)
    states = {item.name: item for item in snapshot.collectors}
    assert states["gpu"].health == "bad"
    assert "is not a ringtap record file" in states["gpu"].reason
    assert [nic.tx_bps for nic in snapshot.nics] == [4000]


def test_the_jobs_output_names_its_node_where_several_speak(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0", "S1") as run:
        watch = Watch(run.path)
        for name, text in (("S0", "epoch 1\n"), ("S1", "warning\n")):
            folder = run.nodes[name].folder / "log"
            folder.mkdir()
            (folder / "job.out").write_text(text)
            snapshot = watch.at(1)
            assert snapshot.output == (("epoch 1",) if name == "S0" else ("S0: epoch 1", "S1: warning"))


def test_memory_is_bounded_however_long_it_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets that come and go for hours leave what minutes leave: the newest."""
    monkeypatch.setattr(recent_counters, "_MAX_KEYS", 200)
    with RunWriter(tmp_path / "run", "S0") as run:
        node, watch = run.nodes["S0"], Watch(run.path)
        for at in range(1, 90):
            for cookie in range(at * 40, at * 40 + 40):
                node.socket(at, cookie, ("10.0.0.1", 1000, "10.0.0.2", 2000), bytes_acked=at)
            for step in range(at * 10, at * 10 + 10):
                node.step(0, 1, step, step / 10, world=1)
            watch.at(at)
        log = watch.source._follower.nodes["S0"]
        assert sorted(log.keyed["sockets", "sockets"].latest) == list(range(85 * 40, 90 * 40))
        (steps,) = log.ranks.values()
        assert len(steps.ends) <= 600


def test_a_plain_line_has_the_same_keys_with_and_without_data(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0", "S1") as run:
        watch = Watch(run.path)
        empty = dict(word.split("=") for word in line_of(watch.at(0)).split())
        for second in (1, 2):
            second_of_training(run, second)
            line = line_of(watch.at(second))
    full = dict(word.split("=") for word in line.split())
    assert list(empty) == list(full)
    assert {empty[key] for key in full if key not in ("time", "status")} == {"-"}
    assert (full["iteration"], full["iteration_s"], full["queue_bytes"]) == ("7", "0.2500", "60000")
    assert full["training_gbps"] == f"{2 * GRADIENTS / 0.25 * 8 / 1e9:.4f}"
    assert full["not_ok"] == "gpu:unavailable"


def test_a_folder_that_cannot_be_read_is_a_node_without_data(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0") as run:
        watch = Watch(run.path)
        run.nodes["S0"].nic(1, eth0=(0, 0))
        assert len(watch.at(1).nics) == 1
        shutil.rmtree(run.path / "nodes")
        assert len(watch.at(2).nics) == 1
        (run.path / "run.json").unlink()
        assert watch.at(3).status == "running"
