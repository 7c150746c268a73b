"""Several captures read as one: parts of a rotated set, several interfaces, several nodes."""

import gzip
import threading

import numpy as np
import pandas as pd
import pytest

from ringtap.analysis.pcap import align, read_captures
from ringtap.analysis.pcap import parallel_scan as cutting
from ringtap.analysis.pcap import scan_captures as reading
from ringtap.analysis.pcap.scan_captures import scan_packets
from ringtap.core.errors import MeasurementError, RingtapWarning, UsageError
from tests.unit.capture_makers import A4, B4, C4, MS, START_NS, classic, frames, roce, spaced, udp, usual

pytestmark = [pytest.mark.computes, pytest.mark.together]

PACKETS = [(number * 700_000, udp(*ends, (9, 9), number)) for number in range(60) for ends in ((A4, B4), (B4, A4))]


@pytest.fixture
def parts(tmp_path):
    """A rotated set as tcpdump -C names it, whose names are not in the order of time."""
    names = ("eth0.pcap", "eth0.pcap1", "eth0.pcap2", "eth0.pcap10")
    step = len(PACKETS) // len(names)
    for number, name in enumerate(names):
        data = classic(frames(PACKETS[number * step : (number + 1) * step]))
        (tmp_path / name).write_bytes(gzip.compress(data) if number == 2 else data)
    (tmp_path / "eth0.pcap11").write_bytes(classic([]))
    return [tmp_path / name for name in names]


@pytest.fixture
def whole(tmp_path):
    folder = tmp_path / "whole"
    folder.mkdir()
    (folder / "one.pcap").write_bytes(classic(frames(PACKETS)))
    return read_captures(folder / "one.pcap")


def test_a_rotated_set_is_what_one_file_would_be(parts, whole):
    found = read_captures(f"{parts[0].parent}/eth0.pcap*")
    pd.testing.assert_frame_equal(found.conversations(), whole.conversations())
    pd.testing.assert_frame_equal(found.rates(), whole.rates())
    assert (found.start_ns, found.bins, found.duration_s) == (whole.start_ns, whole.bins, whole.duration_s)
    assert found.counts["packets"] == len(PACKETS)
    # in order of time; an empty file is before all
    assert [name.rpartition("/")[2] for name in found.files][1:] == [path.name for path in parts]


def test_a_directory_is_read_like_its_files(parts, whole):
    found = read_captures(parts[0].parent)
    assert np.array_equal(found.binned(what="bytes"), whole.binned(what="bytes"))


def test_many_files_keep_their_cells_on_disk(parts, whole, monkeypatch):
    monkeypatch.setattr(reading, "_FEW_CELLS", 0)
    found = read_captures(parts, cache=False)
    assert np.array_equal(found.binned(), whole.binned())


def test_progress_reaches_the_bytes_there_are(parts):
    seen = []
    read_captures(parts, progress=lambda done, total: seen.append((done, total)))
    size = sum(path.stat().st_size for path in parts)
    assert seen
    assert {total for _, total in seen} == {size}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == size


@pytest.fixture
def three_cores(monkeypatch):
    """A machine on which small files are scanned in parts."""
    monkeypatch.setattr(reading.os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(reading, "_MIN_PARTS_BYTES", 1)
    monkeypatch.setattr(cutting, "_PART_BYTES", 900)
    monkeypatch.setattr(cutting, "BLOCK_BYTES", 300)


@pytest.mark.usefixtures("three_cores")
def test_one_file_is_scanned_by_several_threads(whole, tmp_path):
    path, seen = tmp_path / "whole" / "one.pcap", []
    found = read_captures(path, cache=False, progress=lambda done, total: seen.append((done, total)))
    pd.testing.assert_frame_equal(found.conversations(), whole.conversations())
    pd.testing.assert_frame_equal(found.rates(), whole.rates())
    assert found.counts == whole.counts
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)


@pytest.mark.usefixtures("three_cores")
def test_several_threads_say_what_is_wrong_with_a_file(whole, tmp_path):
    path = tmp_path / "torn.pcap"
    path.write_bytes((tmp_path / "whole" / "one.pcap").read_bytes()[:-5])
    with pytest.warns(RingtapWarning, match="torn.pcap"):
        found = read_captures(path, cache=False)
    assert found.counts["packets"] == whole.counts["packets"] - 1
    assert found.counts["torn_bytes"] > 0
    path.write_bytes(b"\xd4\xc3\xb2\xa1" + b"\xff" * 2000)
    with pytest.raises(UsageError, match=r"torn\.pcap"):
        read_captures(path, cache=False)


def test_one_that_is_no_capture_stops_all(parts):
    parts[1].write_bytes(b"no capture, but as long as one would be")
    before = threading.active_count()
    with pytest.raises(UsageError, match=r"eth0.pcap1 is not a capture"):
        read_captures(parts)
    assert threading.active_count() == before


def test_no_packets_at_all_are_said(tmp_path):
    for name in "ab":
        (tmp_path / name).write_bytes(classic([]))
    with pytest.raises(UsageError, match="the 2 captures hold no packets"):
        read_captures([tmp_path / "a", tmp_path / "b"])


def test_room_that_is_lacking_is_said(tmp_path, monkeypatch):
    path = tmp_path / "usual.pcap"
    path.write_bytes(classic(frames(usual())))

    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reading.Scan, "finish", full)
    with pytest.raises(MeasurementError, match="No space left on device; make room"):
        read_captures(path)


def test_offsets_put_clocks_together(tmp_path):
    """Two nodes, each with its own packets; the second's clock is 5 ms and a bit ahead."""
    ahead_ns = 5 * MS + 300_000
    a = [(at, udp(A4, C4, (1, 1), 100)) for at in range(0, 20 * MS, MS)]
    b = [(at + ahead_ns, udp(B4, C4, (1, 1), 200)) for at in range(0, 20 * MS, MS)]
    for name, packets in (("a", a), ("b", b)):
        (tmp_path / name).write_bytes(classic(frames(packets), nano=True))
    found = read_captures([tmp_path / "a", tmp_path / "b"], offsets_ns=[0, ahead_ns])
    table = found.conversations().set_index("a")
    # bins are moved whole: to the nearest
    assert abs(table.loc[A4, "first_ns"] - table.loc[B4, "first_ns"]) == 0
    one, other = (found.select(f"src host {host}").binned(what="packets") for host in (A4, B4))
    assert np.abs(np.cumsum(one) - np.cumsum(other)).max() <= 1
    with pytest.raises(UsageError, match="1 clock offset for 2 captures"):
        read_captures([tmp_path / "a", tmp_path / "b"], offsets_ns=[0])


def test_aligned_nodes_count_each_flow_once(tmp_path):
    """Both nodes see all packets; the receiver of each flow misses some."""
    sent = {A4: [(at, udp(A4, B4, (1, 2), 100)) for at in range(0, 30 * MS, MS)]}
    sent[B4] = [(at + 50_000, udp(B4, A4, (2, 1), 70)) for at in range(0, 30 * MS, MS)]
    pairs = {A4: [(at, roce(A4, B4, 4, 7, at // MS, 64)) for at in range(10 * MS)[::MS]]}
    pairs[B4] = pairs[A4][:8]
    traffics = []
    for own, other, ahead_ns in ((A4, B4, 0), (B4, A4, 7 * MS)):
        packets = sorted([*sent[own], *sent[other][::2], *pairs[own]])
        path = tmp_path / f"{own}.pcap"
        path.write_bytes(classic(frames([(at + ahead_ns, packet) for at, packet in packets])))
        traffics.append(read_captures(path))
    found = align(traffics, [0, 7 * MS])
    table = found.select("udp and not roce").conversations()
    assert len(table) == 1
    assert table[["packets_ab", "packets_ba", "payload_ab", "payload_ba"]].to_numpy().tolist() == [[30, 30, 3000, 2100]]
    assert table["first_ns"].tolist() == [START_NS]
    assert found.queue_pairs()["packets"].tolist() == [10]
    assert found.binned(what="packets").sum() == 70
    assert set(found.select("port 2").binned(what="packets")[:30].tolist()) == {2}
    with pytest.raises(UsageError, match="1 clock offset for 2"):
        align(traffics, [0])
    with pytest.raises(UsageError, match="bins of different widths"):
        align([traffics[0], read_captures(path, bin_s=0.01)], [0, 0])


def test_single_packets_have_their_times(tmp_path):
    path = tmp_path / "spaced.pcap.gz"
    packets = spaced([udp(A4, B4, (1, 2), size) for size in range(50)], 33_000)
    path.write_bytes(gzip.compress(classic(frames(packets), nano=True)))
    scanned = scan_packets(path)
    assert scanned.packets["time_ns"].tolist() == [START_NS + at for at, _ in packets]
    assert scanned.packets["payload"].tolist() == list(range(50))
