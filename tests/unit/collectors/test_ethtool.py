"""Driver statistics: the choice and units on a written-down mlx5e list, the requests on this machine's own interfaces.

The names in tests/gold/ethtool-mlx5e.txt are those of Linux,
Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst, in ``ethtool -S``'s form; values made up.
"""

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringtap.collectors.collector_interface import Context
from ringtap.collectors.ethtool import EthtoolCollector, field_of, select
from ringtap.collectors.ethtool_ioctl import Ethtool, offloads
from ringtap.core.append_only_logs import open_records

pytestmark = pytest.mark.shares

GOLD = Path(__file__).parents[2] / "gold" / "ethtool-mlx5e.txt"
MLX5E = {
    name.strip(): int(value) for name, _, value in (line.rpartition(":") for line in GOLD.read_text().splitlines()[1:])
}


class Recorded(Ethtool):
    """The requests' answers of an interface that is not here; only the ioctl is replaced."""

    def __init__(self, answers: list[dict[str, int]]) -> None:
        super().__init__()
        self._answers = answers

    def driver(self, nic: str) -> dict[str, str]:
        return {"driver": "mlx5_core", "version": "6.8.0", "firmware": "20.39.3004", "bus": "0000:41:00.0"}

    def statistic_names(self, nic: str) -> list[str]:
        return list(self._answers[0])

    def statistics(self, nic: str, count: int) -> tuple[int, ...]:
        if len(self._answers) > 1:
            self._answers.pop(0)
        return tuple(self._answers[0].values())


def test_of_a_drivers_hundreds_the_telling_ones_are_kept() -> None:
    kept = select(list(MLX5E))
    assert {
        "rx_bytes_phy",
        "tx_bytes_phy",
        "rx_discards_phy",
        "rx_prio3_pause",
        "rx_prio3_pause_duration",
        "rx_prio0_discards",
        "rx_ecn_mark",
        "rx_out_of_buffer",
        "tx_vport_rdma_unicast_bytes",
        "rx_pause_ctrl_phy",
        "outbound_pci_stalled_wr",
        "link_down_events_phy",
    } <= set(kept)
    assert not {
        "rx0_packets",
        "tx3_wake",
        "ch2_poll",
        "rx_xdp_drop",
        "rx_csum_complete",
        "rx_65_to_127_bytes_phy",
    } & set(kept)
    assert len(kept) < 100 < len(MLX5E)


@pytest.mark.parametrize(
    "name",
    [
        "rx0_packets",
        "rx-0.bytes",
        "[3]: tx_drops",
        "queue_0_tx_cnt",
        "rx_queue_0_drops",
        "ch0_poll",
        "ptp_cq0_abort",
        "tx_q3_pkts",
    ],
)
def test_queues_are_left_out_unless_there_is_nothing_else(name: str) -> None:
    assert select([name, "rx_missed_errors"]) == ["rx_missed_errors"]
    assert select([name]) == [name]


@pytest.mark.parametrize(
    ("name", "unit", "kind", "bits"),
    [
        ("rx_bytes_phy", "bytes", "counter", 64),
        ("rx_prio3_pause_duration", "us", "counter", 64),
        ("rx_prio3_pause", "frames", "counter", 64),
        ("rx_prio3_pause_transition", "events", "counter", 64),
        ("rx_prio3_bytes", "bytes", "counter", 64),
        ("rx_discards_phy", "packets", "counter", 64),
        ("rx_64_bytes_phy", "packets", "counter", 64),
        ("rx_bits_phy", "bits", "counter", 64),
        ("rx_out_of_buffer", "packets", "counter", 32),
        ("outbound_pci_stalled_wr", "percent", "gauge", 0),
        ("outbound_pci_stalled_wr_events", "s", "counter", 64),
        ("link_down_events_phy", "events", "counter", 64),
        ("rx_vport_rdma_unicast_bytes", "bytes", "counter", 64),
    ],
)
def test_units_kinds_and_widths(name: str, unit: str, kind: str, bits: int) -> None:
    field = field_of(name)
    assert (field.unit, field.kind, field.width_bits) == (unit, kind, bits)


def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[dict[str, int]]) -> EthtoolCollector:
    monkeypatch.setattr("ringtap.collectors.ethtool.Ethtool", lambda: Recorded(answers))
    made = EthtoolCollector(Context(tmp_path / "node", 0.1))
    made.interfaces = lambda: {"enp65s0f1np1": SimpleNamespace(isup=True)}  # type: ignore[assignment, dict-item, return-value]
    return made


def test_a_recorded_interface_is_written_and_not_asked_more_than_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = MLX5E | {"rx_bytes_phy": 118366001000}
    taken = recorded(tmp_path, monkeypatch, [MLX5E, MLX5E, later])
    assert taken.every_s == 1.0
    taken.start()
    taken.sample()
    assert taken.stop() == {"nics": ["enp65s0f1np1"], "gone": {}, "lost": {}}
    log = open_records(tmp_path / "node/ethtool/enp65s0f1np1.rec")
    column = [field.name for field in log.fields].index("rx_bytes_phy")
    assert [row[column] for row in log.tail()] == [118366000000, 118366001000, 118366001000]
    assert log.about["driver"] == "mlx5_core"
    assert log.about["left_out"] == len(MLX5E) - len(log.fields) + 2


def test_channels_that_change_during_a_run_do_not_shift_the_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer = {
        "ch0_poll": 1,
        **{name: value + 1 for name, value in MLX5E.items() if "rx3_" not in name and name != "rx_ecn_mark"},
    }
    taken = recorded(tmp_path, monkeypatch, [MLX5E, MLX5E, fewer])
    taken.start()
    taken.sample()
    facts = taken.stop()
    log = open_records(tmp_path / "node/ethtool/enp65s0f1np1.rec")
    names = [field.name for field in log.fields]
    last = dict(zip(names, log.tail()[-1], strict=True))
    assert last["rx_prio3_pause_duration"] == MLX5E["rx_prio3_pause_duration"] + 1
    assert last["rx_ecn_mark"] == MLX5E["rx_ecn_mark"]
    assert facts["lost"] == {"enp65s0f1np1": ["rx_ecn_mark"]}


def test_requests_to_this_machines_kernel() -> None:
    """The loopback interface answers on every machine: offloads, but no statistics and no driver."""
    ethtool = Ethtool()
    assert ethtool.features("lo")["tx-tcp-segmentation"] in (True, False)
    with pytest.raises(OSError):
        ethtool.driver("lo")
    with pytest.raises(OSError):
        ethtool.driver("nosuch0")
    ethtool.close()
    assert "rx-gro" in offloads("lo")
    assert offloads("nosuch0") == {}


def test_no_socket_is_no_traceback(tmp_path: Path) -> None:
    free = os.dup(0)
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        check = EthtoolCollector(Context(tmp_path, 1.0)).check()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert check.state == "unavailable"
    assert "Too many open files" in check.reason
