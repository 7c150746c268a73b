"""Scans put together."""

import numpy as np
import pytest

from ringtap.analysis.pcap.merge_scans import merge
from ringtap.analysis.pcap.scan import Scan, Scanned
from ringtap.analysis.pcap.scan_captures import scan_packets
from ringtap.core.errors import UsageError
from tests.unit.capture_makers import (
    A4,
    B4,
    C4,
    MS,
    Packet,
    Talk,
    acknowledgement,
    classic,
    frames,
    roce,
    spaced,
    usual,
)

pytestmark = [pytest.mark.computes, pytest.mark.together]

SUMMED = ("packets", "bytes", "payload", "data_packets", "data_bytes", "first_ns", "last_ns")


def scan(packets: list[Packet], **options) -> Scanned:
    made = Scan(**options)
    made.feed(memoryview(classic(packets, nano=True)))
    return made.finish()


def dense(scanned: Scanned) -> np.ndarray:
    bins = (scanned.last_ns - scanned.start_ns) // scanned.bin_ns + 1
    found, cells = np.zeros((2 * len(scanned.conversations), bins), np.int64), np.asarray(scanned.cells)
    np.add.at(found, (cells["flow"], cells["bin"]), cells["bytes"])
    return found


PACKETS = frames(usual()) + frames([(after + 7 * MS, ip) for after, ip in usual()])
WHOLE = scan(PACKETS)


@pytest.mark.parametrize("cut", [1, 7, 40, len(PACKETS) - 1])
def test_a_capture_in_two_files_is_the_same_as_in_one(cut):
    merged = merge([scan(PACKETS[:cut]), scan(PACKETS[cut:])])
    for name in ("protocol", "kind", "layer", "family", "a", "b", "a_port", "b_port", *SUMMED):
        assert np.array_equal(merged.conversations[name], WHOLE.conversations[name]), name
    assert np.array_equal(dense(merged), dense(WHOLE))
    assert merged.counts == WHOLE.counts
    assert (merged.start_ns, merged.first_ns, merged.last_ns) == (WHOLE.start_ns, WHOLE.first_ns, WHOLE.last_ns)
    assert merged.interfaces == WHOLE.interfaces


def test_the_order_of_the_files_does_not_matter_to_who_is_a():
    first, second = scan(PACKETS[:30]), scan(PACKETS[30:])
    assert np.array_equal(merge([first, second]).conversations, merge([second, first]).conversations)
    assert np.array_equal(dense(merge([second, first])), dense(WHOLE))


def test_merged_scans_can_be_merged():
    parts = [scan(PACKETS[at : at + 20]) for at in range(0, len(PACKETS), 20)]
    once, twice = merge(parts), merge([merge(parts[:2]), merge(parts[2:])])
    assert np.array_equal(once.conversations, twice.conversations)
    assert np.array_equal(dense(once), dense(twice))


def test_a_part_in_which_the_other_side_speaks_first_turns_directions():
    talk = Talk(A4, B4, (40001, 5001)).open().data(0, 1448, 1448).data(1, 100)
    alone = scan(frames(talk.packets)).conversations[0]
    answer = frames(spaced([talk.packets[-2][1]], start_ns=-MS))  # from the server
    (merged,) = merge([scan(answer), scan(frames(talk.packets))]).conversations
    assert int(merged["a_port"]) == 5001
    for name in ("rtt_min_ns", "rtt_count", "rtt_sum_ns", "segments", "payload"):
        expected = (
            alone[name][::-1]
            + (np.array([100, 0]) if name == "payload" else 0)
            + (name == "segments") * np.array([1, 0])
        )
        assert merged[name].tolist() == expected.tolist(), name
    assert merged["handshake_ns"] == alone["handshake_ns"] == 400_000


def test_clocks_that_are_ahead_are_put_back():
    ahead = 3 * MS
    late = [Packet(one.time_ns + ahead, one.data, one.length) for one in PACKETS[50:]]
    merged = merge([scan(PACKETS[:50]), scan(late)], [0, ahead])
    assert np.array_equal(merged.conversations["first_ns"], WHOLE.conversations["first_ns"])
    assert np.array_equal(dense(merged), dense(WHOLE))
    # an offset that is no whole bin moves bytes by half a bin at most
    odd = merge([scan(PACKETS[:50]), scan(PACKETS[50:])], [0, 300_000])
    assert int(np.asarray(odd.cells)["bytes"].astype(np.int64).sum()) == WHOLE.counts["bytes"]
    assert odd.last_ns == max(PACKETS[49].time_ns, WHOLE.last_ns - 300_000)


def test_queue_pairs_are_joined():
    packets = [
        *(roce(A4, B4, 0x0A, 17, psn, 1024, bytes(16)) for psn in (1, 2, 5)),
        acknowledgement(B4, A4, 33, 1),
        acknowledgement(B4, A4, 33, 2, syndrome=0x60),
        roce(A4, C4, 0x04, 18, 1, 64),
    ]
    whole = scan(frames(spaced(packets)))
    parts = [scan(frames(spaced(packets)[at : at + 2])) for at in range(0, 6, 2)]
    merged = merge(parts)
    pair = dict(zip(whole.queue_pairs["queue_pair"].tolist(), whole.queue_pairs, strict=True))
    assert sorted(pair) == [17, 18, 33]
    assert (int(pair[17]["packets"]), int(pair[17]["payload"]), int(pair[17]["psn_gaps"])) == (3, 3072, 2)
    assert (int(pair[33]["acknowledgements"]), int(pair[33]["naks"])) == (1, 1)
    for name in ("queue_pair", "packets", "bytes", "payload", "acknowledgements", "naks", "first_ns", "last_ns"):
        assert np.array_equal(merged.queue_pairs[name], whole.queue_pairs[name]), name


def test_merged_cells_are_read_in_slices_across_the_parts():
    merged = merge([scan(PACKETS[at : at + 30]) for at in range(0, len(PACKETS), 30)])
    whole = np.asarray(merged.cells)
    assert len(merged.cells) == len(whole) > 30
    for step in (1, 7, 1000):
        slices = [merged.cells[at : at + step] for at in range(0, len(whole), step)]
        assert np.array_equal(np.concatenate(slices), whole)


def test_empty_captures():
    empty = scan([])
    merged = merge([empty, empty])
    assert (len(merged.conversations), len(merged.cells), merged.first_ns) == (0, 0, -1)
    again = merge([empty, WHOLE])
    assert np.array_equal(again.conversations, WHOLE.conversations)


def test_what_cannot_be_merged():
    with pytest.raises(UsageError, match="different widths"):
        merge([WHOLE, scan(PACKETS, bin_ns=1000)])
    with pytest.raises(UsageError, match="1 clock offset for 2 captures"):
        merge([WHOLE, WHOLE], [0])


def test_single_packets_of_several_files(tmp_path):
    paths = [tmp_path / "a.pcap", tmp_path / "b.pcap"]
    paths[0].write_bytes(classic(PACKETS[1::2]))
    paths[1].write_bytes(classic(PACKETS[::2]))
    table = merge([scan_packets(path) for path in paths])
    assert table.packets["time_ns"].tolist() == [one.time_ns for one in PACKETS]
    sums = np.bincount(table.packets["flow"], table.packets["bytes"], minlength=2 * len(table.conversations))
    assert np.array_equal(sums, table.conversations["bytes"].reshape(-1))
