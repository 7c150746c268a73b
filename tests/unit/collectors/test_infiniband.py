"""InfiniBand, RoCE and Omni-Path counters on written-down trees.

No such device is on a test machine. tests/gold/sysfs-mlx5.txt and sysfs-others.txt hold one file a line; the values are
made up, names and forms are those of
- Linux, Documentation/ABI/stable/sysfs-class-infiniband, drivers/infiniband/core/sysfs.c (which counters a port has
  with and without extended ones, ``N/A (no PMA)``), drivers/infiniband/hw/mlx5/counters.c (Q and congestion counters);
- prometheus/node_exporter issue 2023 (a listing of hfi1_0), procfs pull requests 605 (irdma, which has no ``counters``)
  and 675 (bnxt_re, whose ``counters`` answer "Invalid argument").
"""

import time
from pathlib import Path

import pytest

from ringtap.collectors.collector_interface import Context
from ringtap.collectors.infiniband import InfinibandCollector
from ringtap.core.append_only_logs import Field, RecordFile, open_records, read_json_lines

pytestmark = pytest.mark.shares

GOLD = Path(__file__).parents[2] / "gold"


def tree(tmp_path: Path, name: str) -> Path:
    root = tmp_path / "sys" / "infiniband"
    for line in (GOLD / name).read_text().splitlines():
        path, _, value = line.partition("=")
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(value + "\n")
    return root


def collector(tmp_path: Path, root: Path, every_s: float = 0.1) -> InfinibandCollector:
    made = InfinibandCollector(Context(tmp_path / "node", every_s))
    made.root = root  # type: ignore[misc]
    return made


def rows(log: RecordFile) -> list[dict[str, int]]:
    return [dict(zip((field.name for field in log.fields), row, strict=True)) for row in log.tail()]


def fields(log: RecordFile) -> dict[str, Field]:
    return {field.name: field for field in log.fields}


def log_of(tmp_path: Path, port: str) -> RecordFile:
    return open_records(tmp_path / "node" / "infiniband" / f"{port}.rec")


@pytest.fixture
def mlx5(tmp_path: Path) -> Path:
    return tree(tmp_path, "sysfs-mlx5.txt")


def test_every_port_has_its_log_with_units_widths_and_kinds(tmp_path: Path, mlx5: Path) -> None:
    taken = collector(tmp_path, mlx5)
    taken.start()
    facts = taken.stop()
    assert facts["ports"] == ["mlx5_0-1", "mlx5_1-1", "mlx5_2-1", "mlx5_3-1"]
    log = log_of(tmp_path, "mlx5_0-1")
    columns = fields(log)
    assert columns["port_xmit_data"] == Field("port_xmit_data", "<u8", "4 octets", "counter", 64)
    assert columns["port_xmit_wait"] == Field("port_xmit_wait", "<u8", "ticks", "saturating", 32)
    assert columns["port_xmit_discards"] == Field("port_xmit_discards", "<u8", "packets", "saturating", 16)
    assert columns["link_downed"].width_bits == 8
    assert columns["local_link_integrity_errors"].width_bits == 4
    assert columns["hw.out_of_sequence"] == Field("hw.out_of_sequence", "<u8", "packets", "counter", 32)
    assert columns["hw.np_cnp_sent"].width_bits == 64
    assert "hw.lifespan" not in columns
    first = rows(log)[0]
    # near the end of 64 bit, at the end of 32 and of 16
    assert (first["port_xmit_data"], first["port_xmit_wait"], first["symbol_error"]) == (
        18446744073709551000,
        2**32 - 1,
        65535,
    )
    assert first["t_ns"] == pytest.approx(time.time_ns(), abs=60e9)
    assert log.about["link_layer"] == "InfiniBand"
    assert log.about["rate"] == "200 Gb/sec (4X HDR)"
    assert log.about["counts"] == "all traffic"


def test_roce_says_that_it_counts_rdma_alone_and_which_interface_it_is(tmp_path: Path, mlx5: Path) -> None:
    taken = collector(tmp_path, mlx5)
    taken.start()
    taken.stop()
    about = log_of(tmp_path, "mlx5_1-1").about
    assert about["counts"] == "RDMA only, no other Ethernet traffic"
    assert about["interface"] == "enp65s0f1np1"


def test_what_cannot_be_read_is_named_and_has_no_column(tmp_path: Path, mlx5: Path) -> None:
    taken = collector(tmp_path, mlx5)
    taken.start()
    facts = taken.stop()
    log = log_of(tmp_path, "mlx5_2-1")
    assert log.about["absent"]["port_xmit_data"] == "N/A (no PMA)"
    assert not [name for name in fields(log) if name.startswith("port_")]
    assert "hw.np_cnp_sent" in fields(log)
    assert facts["absent"]["mlx5_2-1"]["symbol_error"] == "N/A (no PMA)"


def test_the_period_is_no_shorter_than_the_longest_lifespan(tmp_path: Path, mlx5: Path) -> None:
    taken = collector(tmp_path, mlx5, every_s=0.001)
    taken.start()
    taken.stop()
    assert taken.every_s == 0.012
    assert log_of(tmp_path, "mlx5_0-1").about["every_s"] == 0.012


def test_repeats_of_a_cache_are_flagged(tmp_path: Path, mlx5: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("ringtap.collectors.infiniband.time.monotonic", lambda: now_s)
    port = mlx5 / "mlx5_1/ports/1"
    taken = collector(tmp_path, mlx5)
    taken.start()
    # 1: too soon after the last reading to be anything but the kernel's cache, so it is not read
    (port / "hw_counters/np_cnp_sent").write_text("9000\n")
    now_s += 0.012
    taken.sample()
    # 2: read anew
    now_s += 0.012
    taken.sample()
    # 3: packets moved, but the device gave the same again
    (port / "counters/port_xmit_packets").write_text("2000000\n")
    now_s += 0.1
    taken.sample()
    # 4: an idle port: the same again is the truth
    now_s += 0.1
    taken.sample()
    taken.stop()
    told = [(row["hw.np_cnp_sent"], row["hw.repeated"]) for row in rows(log_of(tmp_path, "mlx5_1-1"))]
    assert told == [(8412, 0), (8412, 1), (9000, 0), (9000, 1), (9000, 0), (9000, 0)]


def test_error_counters_are_asked_once_a_second_and_traffic_always(
    tmp_path: Path, mlx5: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("ringtap.collectors.infiniband.time.monotonic", lambda: now_s)
    counters = mlx5 / "mlx5_0/ports/1/counters"
    taken = collector(tmp_path, mlx5)
    taken.start()
    (counters / "link_downed").write_text("4\n")
    (counters / "port_rcv_data").write_text("123456789099999\n")
    for later_s in (0.5, 0.6):
        now_s += later_s
        taken.sample()
    taken.stop()
    seen = rows(log_of(tmp_path, "mlx5_0-1"))
    assert [row["link_downed"] for row in seen] == [3, 3, 4, 4]
    assert [row["port_rcv_data"] for row in seen[1:]] == [123456789099999] * 3
    # a port that is down is asked once a second as well
    assert len(rows(log_of(tmp_path, "mlx5_3-1"))) == 3


def test_a_counter_that_vanishes_keeps_its_last_value_and_is_named(tmp_path: Path, mlx5: Path) -> None:
    counters = mlx5 / "mlx5_0/ports/1/counters"
    taken = collector(tmp_path, mlx5)
    taken.start()
    (counters / "port_xmit_data").write_text("N/A (no PMA)\n")
    taken.sample()
    missing, _ = read_json_lines(tmp_path / "node/infiniband/missing.jsonl")
    assert missing[0]["port"] == "mlx5_0-1"
    assert missing[0]["missing"] == {"port_xmit_data": "N/A (no PMA)"}
    facts = taken.stop()
    assert facts["missing"] == {"mlx5_0-1": {"port_xmit_data": "N/A (no PMA)"}}
    assert rows(log_of(tmp_path, "mlx5_0-1"))[-1]["port_xmit_data"] == 18446744073709551000


def test_a_device_that_goes_away_leaves_a_gap_and_the_others_go_on(tmp_path: Path, mlx5: Path) -> None:
    taken = collector(tmp_path, mlx5)
    taken.start()
    gone = mlx5 / "mlx5_0/ports/1"
    for path in (*(gone / "counters").iterdir(), *(gone / "hw_counters").iterdir()):
        path.write_text("")
    taken.sample()
    taken.stop()
    # one record of the start and none since; the hardware counters are looked at within a cache's time
    assert len(rows(log_of(tmp_path, "mlx5_0-1"))) <= 2
    assert len(rows(log_of(tmp_path, "mlx5_1-1"))) == 3


def test_omni_path_counts_flits_and_of_its_hundreds_the_telling_ones_are_kept(tmp_path: Path) -> None:
    root = tree(tmp_path, "sysfs-others.txt")
    driver = root / "opap2s0/device/driver"
    (root / "hfi1_0").rename(root / "opap2s0")
    driver.parent.mkdir()
    driver.symlink_to("../../../bus/pci/drivers/hfi1")
    taken = collector(tmp_path, root)
    taken.start()
    taken.stop()
    log = log_of(tmp_path, "opap2s0-1")
    columns = fields(log)
    assert columns["port_xmit_data"] == Field("port_xmit_data", "<u8", "8 octets", "counter", 64)
    assert log.about["absent"]["symbol_error"] == "hfi1 always says 0"
    kept = {name for name in columns if name.startswith("hw.")}
    assert kept >= {"hw.RcSeqNak", "hw.RcResend", "hw.TxWait", "hw.XmitDscd", "hw.PktDrop", "hw.RxPkt"}
    assert not kept & {"hw.TxWaitVL0", "hw.XmitDscdVL0", "hw.RcvHdrOvr10", "hw.SwLinkUp,32", "hw.UnknownFrame"}


def test_counters_of_32_bit_stop_at_all_ones(tmp_path: Path) -> None:
    taken = collector(tmp_path, tree(tmp_path, "sysfs-others.txt"))
    taken.start()
    taken.stop()
    columns = fields(log_of(tmp_path, "mthca0-1"))
    assert columns["port_xmit_data"] == Field("port_xmit_data", "<u8", "4 octets", "saturating", 32)
    assert "port_xmit_wait" not in columns


def test_devices_with_hardware_counters_alone(tmp_path: Path) -> None:
    taken = collector(tmp_path, tree(tmp_path, "sysfs-others.txt"))
    taken.start()
    taken.stop()
    irdma, bnxt = (fields(log_of(tmp_path, name)) for name in ("irdma0-1", "bnxt_re0-1"))
    assert irdma["hw.ip4InOctets"] == Field("hw.ip4InOctets", "<u8", "bytes", "counter", 64)
    assert irdma["hw.cnpSent"].unit == "events"
    assert "hw.InRdmaReads" not in irdma
    assert rows(log_of(tmp_path, "bnxt_re0-1"))[0]["hw.rx_bytes"] == 7521781137064
    assert bnxt["hw.to_retransmits"].kind == "counter"


def test_check_tells_what_is_there(tmp_path: Path, mlx5: Path) -> None:
    ok = collector(tmp_path, mlx5).check()
    assert ok.state == "ok"
    assert "mlx5_1-1 (Ethernet)" in ok.reason
    none = collector(tmp_path, tmp_path / "nothing").check()
    assert none.state == "unavailable"
    assert none.remedy
    for path in (mlx5 / "mlx5_2/ports/1/hw_counters").iterdir():
        path.unlink()
    partly = collector(tmp_path, mlx5).check()
    assert partly.state == "degraded"
    assert "none of mlx5_2-1" in partly.reason
    assert not (tmp_path / "node").exists()


def test_no_file_stays_open(tmp_path: Path, mlx5: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    taken = collector(tmp_path, mlx5)
    taken.check()
    taken.start()
    taken.sample()
    taken.stop()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
