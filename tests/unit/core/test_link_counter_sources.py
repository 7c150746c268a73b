"""Counters that see RDMA, from recorded mlx5 devices to the points of a sweep."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtap import open_sweep
from ringtap.agents.sweep.detect_disturbances import counted_bps
from ringtap.collectors.collector_interface import Context
from ringtap.collectors.ethtool import EthtoolCollector, counts_port
from ringtap.collectors.infiniband import RdmaPort, rdma_ports
from ringtap.core.append_only_logs import Field, RecordWriter
from ringtap.core.counter_growth import edge_error, window_growth
from ringtap.core.counter_log_reader import CounterLog
from ringtap.core.errors import UsageError
from ringtap.core.json_validation import ShapeError, check
from ringtap.core.link_counter_sources import columns_of, log_of, source_of, stated_mtu
from ringtap.core.run_directory_schema import RUN, TIME_FIELDS
from tests.gold.analysis_sweep import START_NS, edit_info, write_sweep
from tests.unit.collectors.test_ethtool import MLX5E, Recorded
from tests.unit.collectors.test_infiniband import tree

pytestmark = pytest.mark.computes

NIC = "enp65s0f1np1"
PORT = {"node": "S0", "nic": NIC, "direction": "rx", "source": "ethtool"}
FRAME_BYTES, MTU = 1514, 1500
PERIOD_S, RATE_BPS = 0.2, 180e6
S = 1_000_000_000


def counted_frames(t_s: float) -> int:
    """Frames up to a time: all of an iteration's in its second half."""
    whole, rest = divmod(t_s, PERIOD_S)
    in_iteration = RATE_BPS * PERIOD_S / 8 / FRAME_BYTES
    return round((whole + max(0.0, 2 * rest / PERIOD_S - 1)) * in_iteration)


class Growing(Recorded):
    """A recorded interface whose received frames grow with a clock."""

    def __init__(self, clock: Any) -> None:
        super().__init__([MLX5E])
        self._clock = clock

    def statistics(self, nic: str, count: int) -> tuple[int, ...]:
        frames = counted_frames((self._clock.now_ns - START_NS) / 1e9)
        grown = {"rx_packets_phy": frames, "rx_bytes_phy": frames * (FRAME_BYTES + 4)}
        return tuple(value + grown.get(name, 0) for name, value in MLX5E.items())


def record(node: Path, seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the collector sample the growing interface once a second."""
    clock = SimpleNamespace(now_ns=START_NS)
    monkeypatch.setattr("ringtap.collectors.ethtool.Ethtool", lambda: Growing(clock))
    times = SimpleNamespace(time_ns=lambda: clock.now_ns, monotonic_ns=lambda: clock.now_ns - START_NS)
    monkeypatch.setattr("ringtap.collectors.ethtool.time", times)
    taken = EthtoolCollector(Context(node, 0.1))
    taken.interfaces = lambda: {NIC: SimpleNamespace(isup=True)}  # type: ignore[assignment, dict-item, return-value]
    taken.start()
    for _ in range(seconds):
        clock.now_ns += S + 3_000_000  # a sample comes a little late
        taken.sample()
    taken.stop()


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep of one load, whose job is counted by the driver of its port."""
    path = tmp_path / "sweep"
    write_sweep(path, [("resnet50", "iperf")], loads_gbps=(7.5,), iterations=200)
    job = path / "series/resnet50-iperf-1"
    record(job / "nodes/S0", 60, monkeypatch)
    info = json.loads((path / "run.json").read_text())
    bottleneck = {"cross": info["bottleneck"]["cross"], "total": [PORT], "mtu": MTU}
    about = json.loads((job / "run.json").read_text())
    (job / "run.json").write_text(json.dumps(about | {"bottleneck": bottleneck}))
    return path


def test_a_port_of_ethernet_gives_the_planted_rate(sweep: Path) -> None:
    point = open_sweep(sweep).points.iloc[0]
    assert point.window_s > 25
    # an iteration's frames at either end of the window may fall to one side or the other
    assert point.unscaled_total_bps == pytest.approx(RATE_BPS, rel=2 * PERIOD_S / point.window_s)
    assert abs(point.unscaled_total_bps - RATE_BPS) <= point.unscaled_counting_error_bps
    # at most the two gaps of a second at its ends
    assert 0 < point.unscaled_counting_error_bps < 2.1 / point.window_s * RATE_BPS
    assert point.counting_error_gbps == pytest.approx(point.unscaled_counting_error_bps * 100 / 1e9)
    assert point.unscaled_training_bps == pytest.approx(point.unscaled_total_bps - point.unscaled_cross_bps)


def test_the_watch_reads_the_same_counters(sweep: Path) -> None:
    job = sweep / "series/resnet50-iperf-1"
    found = counted_bps(job, PORT, MTU, START_NS + 10 * S, START_NS + 14 * S)
    assert found == pytest.approx(RATE_BPS, rel=PERIOD_S / 3)  # three seconds from sample to sample
    with pytest.raises(UsageError, match="the counters of node S0 were not recorded in the window"):
        counted_bps(job, PORT | {"nic": "other"}, MTU, START_NS, START_NS + 4 * S)


def test_a_window_that_is_short_for_its_counter_has_no_rate(sweep: Path) -> None:
    lines = (sweep / "points.jsonl").read_text().splitlines()
    point = json.loads(lines[0])
    point["window_end_ns"] = point["window_start_ns"] + 10 * S
    (sweep / "points.jsonl").write_text(json.dumps(point) + "\n")
    measured = open_sweep(sweep).points
    assert measured["unscaled_total_bps"].isna().all()
    assert "counter rx_bytes_phy of node S0 has a gap at an edge of the window" in measured["reasons"].iloc[0]


def test_a_job_of_an_older_version_is_counted_as_its_sweep_says(tmp_path: Path) -> None:
    path = tmp_path / "sweep"
    write_sweep(path, [("resnet50", "iperf")], loads_gbps=(7.5,))
    before = open_sweep(path).points.iloc[0]
    assert before.unscaled_total_bps == pytest.approx(95e6, rel=0.05)  # 75 of cross traffic and 20 of training
    edit_info(path, bottleneck={"cross": [], "total": [PORT | {"source": "infiniband", "port": "mlx5_0-1"}]})
    after = open_sweep(path).points.iloc[0]
    assert after.unscaled_cross_bps == 0
    assert after.reasons == "total traffic: counter port_rcv_data of node S0 was not recorded"


@given(st.integers(0, 10**12), st.integers(0, 10**9))
def test_bytes_are_those_of_frames_without_checksum(frames: int, data: int) -> None:
    phy = source_of(PORT)
    assert phy.to_bytes([frames * 1518, frames], MTU) == frames * 1514
    assert source_of({"source": "infiniband"}).to_bytes([data], MTU) == data
    # full segments, one to a packet
    assert source_of({}).to_bytes([frames * 1514, frames], MTU) == pytest.approx(frames * 1514)


@pytest.mark.parametrize(("unit", "octets"), [("4 octets", 4), ("8 octets", 8), ("bytes", 1)])
def test_a_port_of_infiniband_counts_in_the_unit_of_its_log(unit: str, octets: int, tmp_path: Path) -> None:
    path = tmp_path / "nodes/S0/infiniband/mlx5_0-1.rec"
    writer = RecordWriter(path, [*TIME_FIELDS, Field("port_rcv_data", "<u8", unit, "counter", 64)], {"every_s": 0.1})
    writer.append_many([(START_NS + place * S // 10, place * S // 10, 1000 * place) for place in range(101)])
    writer.close()
    infiniband = PORT | {"source": "infiniband", "port": "mlx5_0-1"}
    found = CounterLog(path).frame_bytes(infiniband, None, START_NS + 2 * S, START_NS + 8 * S + S // 20)
    assert found == (60_500 * octets, 500 * octets)


def test_run_json_states_the_mtu_of_all_interfaces_of_a_testbed_or_of_one() -> None:
    first, other = ({"node": "S0", "nic": nic, "direction": "rx"} for nic in ("eth0", "eth1"))
    assert stated_mtu(other, {"total": [first], "mtu": 9000}, {"mtu": 1500}) == 1500
    for total in ([first], first):
        assert [stated_mtu(one, {"total": total, "mtu": 9000}, {}) for one in (first, other)] == [9000, None]
    assert stated_mtu(first, {}, {}) is None


def test_logs_and_columns_of_each_source() -> None:
    infiniband = PORT | {"source": "infiniband", "port": "mlx5_0-1", "direction": "tx"}
    nic = {"node": "S0", "nic": "eth0", "direction": "rx"}
    assert [(log_of(one), columns_of(one)) for one in (nic, PORT, infiniband)] == [
        ("nic/nic.rec", ["eth0.rx_bytes", "eth0.rx_packets"]),
        (f"ethtool/{NIC}.rec", ["rx_bytes_phy", "rx_packets_phy"]),
        ("infiniband/mlx5_0-1.rec", ["port_xmit_data"]),
    ]
    check({"schema": 1, "bottleneck": {"total": [infiniband, PORT, nic]}}, RUN)
    with pytest.raises(ShapeError, match="source"):
        check({"schema": 1, "bottleneck": {"total": [PORT | {"source": "guess"}]}}, RUN)


@given(
    st.lists(st.integers(0, 1000), min_size=6, max_size=30),
    st.floats(0.01, 0.99),
    st.floats(0.01, 0.99),
    st.lists(st.booleans(), min_size=2, max_size=2),
)
def test_the_error_bounds_what_comes_in_one_piece(
    steps: list[int], early: float, late: float, first: list[bool]
) -> None:
    """Against a counter that grows right after, or right before, the samples at the window's ends."""
    values = np.concatenate(([0], np.cumsum(steps))).tolist()
    times = [place * S for place in range(len(values))]
    start_ns, end_ns = round((1 + early) * S), round((len(values) - 3 + late) * S)
    grown = window_growth(times, values, start_ns, end_ns, 64)
    if isinstance(grown, str):
        return
    truth = values[-3 if not first[1] else -2] - values[2 if first[0] else 1]
    assert abs(grown - truth) <= edge_error(times, values, start_ns, end_ns, 64) + 1e-6
    assert edge_error(times, values, times[1], times[-2], 64) == 0


def test_the_interfaces_and_counters_of_recorded_devices(tmp_path: Path) -> None:
    root = tree(tmp_path, "sysfs-mlx5.txt")
    ports = {f"{port.device}-{port.port}": port for port in rdma_ports(root)}
    assert ports["mlx5_1-1"] == RdmaPort("mlx5_1", 1, "Ethernet", (NIC,), False)
    assert (ports["mlx5_0-1"].link_layer, ports["mlx5_0-1"].counts_all) == ("InfiniBand", True)
    assert not ports["mlx5_2-1"].counts_all, "N/A (no PMA)"
    (root / "mlx5_0/device/net/ib0").mkdir(parents=True)
    assert next(port for port in rdma_ports(root) if port.device == "mlx5_0").interfaces == ("ib0",)
    # a card with two ports, whose interfaces are in one folder
    for number, name in enumerate(("ib0", "ib1")):
        (root / f"mlx5_0/ports/{number + 1}").mkdir(exist_ok=True)
        (root / "mlx5_0/device/net" / name).mkdir(exist_ok=True)
        (root / "mlx5_0/device/net" / name / "dev_port").write_text(f"{number}\n")
    both = [port.interfaces for port in rdma_ports(root) if port.device == "mlx5_0"]
    assert both == [("ib0",), ("ib1",)]
    assert rdma_ports(tmp_path / "none") == []
    # Omni-Path counts flits, and 32 bit counters stop at their end
    assert not any(port.counts_all for port in rdma_ports(tree(tmp_path / "others", "sysfs-others.txt")))


def test_a_driver_without_port_counters_is_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not counts_port("lo")
    monkeypatch.setattr("ringtap.collectors.ethtool.Ethtool", lambda: Recorded([MLX5E]))
    assert counts_port(NIC)
    hidden = {name: value for name, value in MLX5E.items() if not name.endswith("_phy")}
    monkeypatch.setattr("ringtap.collectors.ethtool.Ethtool", lambda: Recorded([hidden]))
    assert not counts_port(NIC)
